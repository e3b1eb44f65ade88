"""`token_stats`: log p, entropy and log sum P^2 of supervised rows, whatever the logits' size, layout and dtype."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracle as exact
from battery import sample_logits
from deftune import IGNORE_INDEX, TokenStats, linear_token_stats, token_loss, token_stats
from tolerances import assert_close, assert_near

properties = settings(deadline=None, derandomize=True, max_examples=50, database=None)
QWEN = 152064  # Qwen2.5's padded vocabulary
LAYOUTS = ["contiguous", "shifted", "transposed", "padded", "strided"]


def laid_out(logits: torch.Tensor, how: str) -> torch.Tensor:
    """[B, T, V] logits of the same values in the layouts that trainers hand over."""
    B, T, V = logits.shape
    if how == "shifted":  # logits[:, :-1]
        return torch.cat([logits, logits.new_full((B, 1, V), 7.0)], 1)[:, :-1]
    if how == "transposed":  # [V, B, T] in memory
        return logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if how == "padded":  # the model's vocabulary is padded, the tokenizer's is not
        return torch.cat([logits, logits.new_full((B, T, 5), 50.0)], -1)[..., :V]
    if how == "strided":
        return torch.stack([logits, logits + 3], 2)[:, :, 0]
    return logits.contiguous()


def check_against_oracle(logits: torch.Tensor, targets: torch.Tensor, rows=None) -> None:
    stats = token_stats(logits, targets)
    rows = exact.rows(logits, targets) if rows is None else rows
    largest = torch.tensor(
        [size_of(z) for z, y in zip(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)) if y >= 0]
    )
    size = 1 + largest.double()
    assert stats.log_p.dtype == torch.float64 and len(stats) == len(rows)
    assert_near(stats.log_p, exact.column([row.log_p for row in rows]), "log p", condition=size, what="log p")
    assert_near(
        stats.log_collision,
        exact.column([row.log_collision for row in rows]),
        "log p",
        condition=2 * size,
        what="collision",
    )
    assert_near(
        stats.entropy, exact.column([row.entropy for row in rows]), "float32 entropy", condition=size, what="entropy"
    )
    assert torch.equal(stats.targets.long(), targets[targets != IGNORE_INDEX].long())


def size_of(z: torch.Tensor) -> float:
    return z[z.isfinite()].abs().max().item()


# --- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-2, 1.0, 10.0, 300.0, 1e4])
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 64])
def test_float32_logits_of_every_scale(vocab_size, scale):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator) * scale
    check_against_oracle(logits, torch.randint(0, vocab_size, (6,), generator=generator))
    check_against_oracle(logits, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_read_exactly(dtype):
    """A bfloat16 logit is a float32 number: the statistics are as good as float32's on the same numbers."""
    logits, targets = sample_logits(12, 64)
    check_against_oracle(logits.to(dtype), targets)
    check_against_oracle((logits * 8).to(dtype), targets)


def test_float64_logits():
    logits, targets = sample_logits(24, 40)
    stats, rows = token_stats(logits, targets), exact.rows(logits, targets)
    assert_close(stats.log_p, exact.column([row.log_p for row in rows]), "float64 column")
    assert_close(stats.concentration, exact.column([row.collision for row in rows]), "float64 column")
    assert_near(stats.entropy, exact.column([row.entropy for row in rows]), "float64 column")
    top = torch.tensor([[float(p) for p in row.likeliest[:5]] for row in rows], dtype=torch.float64)
    assert_close(stats.top_log_p(5).exp(), top, "float64 column")


@properties
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12), st.integers(0, 11))
def test_any_float32_row(logits, target):
    check_against_oracle(torch.tensor([logits]), torch.tensor([target % len(logits)]))


@pytest.mark.parametrize("value", [0.0, 0.3, -7.3, 1e4])
def test_equal_logits_over_a_whole_vocabulary(value):
    """log p = -ln V = -11.93 has no float32 within 2.4e-7: the columns must be wider."""
    stats = token_stats(torch.full((2, QWEN), value), torch.tensor([0, QWEN - 1]))
    expected = torch.full((2,), -math.log(QWEN), dtype=torch.float64)
    assert_near(stats.log_p, expected, "log p")
    assert_near(stats.log_collision, expected, "log p")
    assert_near(stats.entropy, -expected, "log p")


@pytest.mark.parametrize("scale", [0.05, 2.0, 5.0])
def test_random_logits_over_a_whole_vocabulary(scale):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, QWEN, generator=generator) * scale
    targets = torch.tensor([11, QWEN - 1, int(logits[2].argmax())])
    stats, twin = token_stats(logits, targets), exact.twin(logits, targets)
    size = 1 + logits.abs().amax(-1).double()
    assert_near(stats.log_p, twin.log_p, "log p", condition=size)
    assert_near(stats.log_collision, twin.collision.log(), "log p", condition=2 * size)
    assert_near(stats.entropy, twin.entropy, "float32 entropy", condition=size)


def test_more_rows_than_a_block():
    """600 rows of 1000 classes are three blocks of 1 MiB; a third of the rows is ignored."""
    logits, targets = sample_logits(600, 1000, torch.float32)
    twin = exact.twin(logits, targets)
    kept = torch.arange(600) % 3 != 1
    stats = token_stats(logits, torch.where(kept, targets, IGNORE_INDEX))
    size = 1 + logits.abs().amax(-1).double()
    assert_near(stats.log_p, twin.log_p[kept], "log p", condition=size[kept])
    assert_near(stats.log_collision, twin.collision.log()[kept], "log p", condition=2 * size[kept])
    top = stats.top_log_p(20).log_softmax(-1)
    assert_near(-(top.exp() * top).sum(-1), twin.top_entropy[kept], "log p", condition=size[kept])


@pytest.mark.parametrize("margin", [10.0, 40.0, 80.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_of_a_confident_token_keeps_its_digits(margin, dtype):
    """1 - p = 1e-17 is below the rounding of p = 1, in float64 too; log p and 1 - p know it all the same."""
    logits, _ = sample_logits(6, 30, dtype)
    targets = torch.arange(6)
    logits[targets, targets] = logits.amax(-1) + margin
    stats, rows = token_stats(logits, targets), exact.rows(logits, targets)
    size = 1 + logits.abs().amax(-1).double()  # float32's z - max z is off by up to 2^-24 of itself
    assert_close(stats.log_p, exact.column([row.log_p for row in rows]), "log p", condition=size)
    assert_close(stats.error, exact.column([-exact.mp.expm1(row.log_p) for row in rows]), "log p", condition=size)


# --- offsets and impossible tokens ------------------------------------------------------------------------------------


@properties
@given(st.lists(st.integers(-8192, 8192), min_size=2, max_size=16), st.integers(0, 15), st.sampled_from([1e4, -1e4]))
def test_an_offset_changes_nothing(steps, target, offset):
    logits = torch.tensor([steps], dtype=torch.float32) / 1024
    targets = torch.tensor([target % len(steps)])
    plain, moved = token_stats(logits, targets), token_stats(logits + offset, targets)
    for name in ("log_p", "entropy", "log_collision"):
        assert_near(getattr(moved, name), getattr(plain, name), "offset", what=name)


def test_impossible_classes():
    inf = math.inf
    logits = torch.tensor([[0.0, -inf, 1.0, -inf], [-inf, -inf, 3.0, -inf], [2.0, 0.0, -inf, -1.0]])
    targets = torch.tensor([2, 2, 2])
    check_against_oracle(logits, targets)
    stats = token_stats(logits, targets)
    assert stats.log_p[1] == 0 and stats.entropy[1] == 0 and stats.log_collision[1] == 0
    assert stats.log_p[2] == -inf and stats.p[2] == 0 and stats.error[2] == 1
    for dtype in (torch.float64, torch.bfloat16):
        check_against_oracle(logits.to(dtype), targets)


def test_huge_margins_are_certain():
    stats = token_stats(torch.tensor([[3e38, -3e38], [0.0, -1e30]]), torch.tensor([0, 1]))
    assert stats.log_p.tolist() == [0.0, float(torch.tensor(-1e30))]
    assert stats.entropy.tolist() == [0.0, 0.0] and stats.log_collision.tolist() == [0.0, 0.0]


@properties
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), st.integers(0, 39))
def test_ranges_hold(logits, target):
    """log p <= 0, 0 <= H <= ln V, -ln V <= log sum P^2 <= 0, and H >= H_2."""
    stats = token_stats(torch.tensor([logits]), torch.tensor([target % len(logits)]))
    log_v, rounding = math.log(len(logits)), 1e-6
    assert stats.log_p.item() <= 0
    assert 0 <= stats.entropy.item() <= log_v + rounding
    assert -log_v - rounding <= stats.log_collision.item() <= 0
    assert stats.entropy.item() >= -stats.log_collision.item() - rounding * (1 + log_v)


# --- shapes, layouts, dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_shapes(leading):
    count = math.prod(leading)
    logits, targets = sample_logits(max(count, 1), 9, torch.float32)
    logits, targets = logits[:count].reshape(*leading, 9), targets[:count].reshape(leading)
    check_against_oracle(logits, targets)


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("ignored", [False, True], ids=["all", "some ignored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layouts_do_not_matter(how, ignored, dtype):
    logits, targets = sample_logits(12, 9, dtype)
    logits, targets = logits.view(3, 4, 9), targets.view(3, 4)
    if ignored:
        targets = targets.masked_fill(torch.arange(12).view(3, 4) % 5 == 0, IGNORE_INDEX)
    view = laid_out(logits, how)
    assert torch.equal(view, logits) and view.is_contiguous() == (how == "contiguous")
    plain, other = token_stats(logits, targets), token_stats(view, targets)
    for name in ("log_p", "entropy", "log_collision", "targets"):
        assert torch.equal(getattr(other, name), getattr(plain, name)), name
    assert torch.equal(other.top_log_p(3), plain.top_log_p(3))


@properties
@given(st.lists(st.booleans(), min_size=1, max_size=10), st.sampled_from([torch.int64, torch.int32]))
def test_ignored_rows_anywhere(kept, dtype):
    """Ignored rows are not read: NaN there is nobody's business."""
    kept = torch.tensor(kept)
    logits, targets = sample_logits(len(kept), 6, torch.float32)
    poisoned = torch.where(kept[:, None], logits, math.nan)
    stats = token_stats(poisoned, torch.where(kept, targets, IGNORE_INDEX).to(dtype))
    alone = token_stats(logits[kept], targets[kept])
    for name in ("log_p", "entropy", "log_collision"):
        assert torch.equal(getattr(stats, name), getattr(alone, name)), name
    assert torch.equal(stats.targets.long(), targets[kept])


def test_no_gradient_flows_through_statistics():
    logits = torch.randn(3, 5, requires_grad=True)
    stats = token_stats(logits, torch.tensor([0, 1, 2]))
    assert not any(
        column.requires_grad for column in (stats.log_p, stats.entropy, stats.log_collision, stats.top_log_p(2))
    )


def test_top_tokens_are_sorted_and_at_most_the_vocabulary():
    logits, targets = sample_logits(5, 4)
    top = token_stats(logits, targets).top_log_p(20)
    assert top.shape == (5, 4)
    assert_near(top, torch.log_softmax(logits, -1).sort(-1, descending=True).values, "float64 column", condition=10)


@pytest.mark.parametrize("how", ["contiguous", "shifted"])
def test_bitwise_the_same_ten_times(how):
    logits, targets = sample_logits(60, 500, torch.float32)
    logits, targets = laid_out(logits.view(6, 10, 500), how), targets.view(6, 10)
    first = token_stats(logits, targets)
    for _ in range(9):
        again = token_stats(logits, targets)
        assert torch.equal(again.log_p, first.log_p) and torch.equal(again.entropy, first.entropy)
        assert torch.equal(again.log_collision, first.log_collision)


# --- memory -----------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of every storage that is new, largest first."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.kept = list(known)  # alive, so that no address is used twice
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.seen:
                self.seen.add(tensor.untyped_storage().data_ptr())
                self.kept.append(tensor)
                self.sizes.append(tensor.untyped_storage().nbytes())
        return out

    def as_large_as(self, nbytes: float) -> int:
        return sum(size >= nbytes for size in self.sizes)


def large(how: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """16 MiB of logits (float32), sixteen working blocks."""
    logits, targets = sample_logits(4096, 1024, dtype)
    return laid_out(logits.view(8, 512, 1024), how), targets.view(8, 512)


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("ignored", [False, True], ids=["all", "some ignored"])
def test_no_copy_of_the_logits_for_statistics(how, ignored):
    logits, targets = large(how, torch.float32)
    if ignored:
        targets = targets.masked_fill(torch.arange(512) % 7 == 0, IGNORE_INDEX)
    nbytes = logits.numel() * logits.element_size()
    with Allocations(logits, targets) as seen:
        stats = token_stats(logits, targets)
        stats.top_log_p(20)
    assert max(seen.sizes) <= nbytes / 8, f"{max(seen.sizes)} bytes beside {nbytes} of logits"


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_allocates_its_gradient_and_nothing_else_of_that_size(how, dtype):
    logits, targets = large(how, dtype)
    nbytes = logits.numel() * logits.element_size()
    leaf = logits.detach().requires_grad_()
    with Allocations(logits, targets) as forward:
        loss = token_loss(leaf, targets, "deft")
    with Allocations(logits, targets) as backward:
        (gradient,) = torch.autograd.grad(loss, leaf)
    assert forward.as_large_as(nbytes / 4) == 0
    assert backward.as_large_as(nbytes / 4) == 1 and gradient.shape == logits.shape


def test_the_recorder_sees_a_copy():
    logits, targets = large("contiguous", torch.float32)
    with Allocations(logits, targets) as seen:
        torch.log_softmax(logits, -1).exp()
    assert seen.as_large_as(logits.nbytes) == 2


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_distribution_are_named(bad):
    logits, targets = sample_logits(6, 5, torch.float32)
    logits, targets = logits.view(2, 3, 5), targets.view(2, 3).clone()
    targets[0, 0] = IGNORE_INDEX
    logits[1, 1, 2] = bad
    with pytest.raises(ValueError, match=r"logits: token 4 \(flat index\) has NaN or \+inf.*Look at the inputs"):
        token_stats(logits, targets)


def test_a_row_of_nothing_but_minus_infinity_is_named():
    logits = torch.zeros(3, 4)
    logits[2] = -math.inf
    with pytest.raises(ValueError, match=r"token 2 .*nothing but -inf"):
        token_stats(logits, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("logits", "targets", "text"),
    [
        (
            torch.zeros(2, 4),
            torch.tensor([0, 4]),
            r"targets: token 1 .* label 4; .*below the vocabulary size 4.*tokenizer",
        ),
        (torch.zeros(2, 4), torch.tensor([-1, 0]), r"targets: token 0 .* label -1; only -100 marks.*replace"),
        (
            torch.zeros(2, 4),
            torch.tensor([[0, 1]]),
            r"targets: shape \(1, 2\) does not match logits's leading shape \(2,\)",
        ),
        (
            torch.zeros(2, 4),
            torch.tensor([0.0, 1.0]),
            r"targets: token ids must be int64 or int32, got torch.float32.*long\(\)",
        ),
        (torch.zeros(2, 4), [0, 1], r"targets: expected a tensor of token ids, got list"),
        (
            torch.zeros(2, 4, dtype=torch.long),
            torch.tensor([0, 1]),
            r"logits: must be floating point, got torch.int64.*float\(\)",
        ),
        ([[0.0]], torch.tensor([0]), r"logits: expected a tensor, got list"),
        (
            torch.zeros(2, 0),
            torch.tensor([0, 1]),
            r"logits: need a last dimension of V >= 1 classes, got shape \(2, 0\)",
        ),
        (torch.tensor(1.0), torch.tensor(0), r"logits: need a last dimension"),
    ],
)
def test_bad_input_is_named(logits, targets, text):
    for function in (token_stats, token_loss):
        with pytest.raises(ValueError, match=text):
            function(logits, targets)


def test_statistics_with_their_likeliest_tokens_can_be_pickled():
    """Those of `token_stats` keep the logits for them; `map` keeps the tokens alone."""
    logits, targets = torch.randn(5, 9), torch.arange(5)
    stats = linear_token_stats(logits, torch.eye(9), targets, top_k=3)
    kept = token_stats(logits, targets)
    for made in (stats, TokenStats.cat([stats, stats]), kept, kept.map(torch.clone, 3)):
        again = pickle.loads(pickle.dumps(made))
        assert torch.equal(again.top_log_p(3), made.top_log_p(3)) and torch.equal(again.log_p, made.log_p)
