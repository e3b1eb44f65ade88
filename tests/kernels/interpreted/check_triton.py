"""The Triton kernels in Triton's own interpreter, on the CPU; run by `test_triton_rows` in a process of its own.

Each launch against plain float64 torch, on sizes one past a block; then `linear_loss(backend="triton")` as a whole. The
interpreter knows no bfloat16 dot product: everything here is float32, the rest is for a GPU.
"""

import math
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deftune
from battery import CONTEXT, HalfDeft
from deftune import IGNORE_INDEX, linear_loss, linear_loss_with_stats, linear_token_stats, token_loss, token_stats
from deftune.kernels import call, linear, replay, triton_rows
from deftune.kernels.backends import interpreted
from deftune.kernels.call import prepare
from deftune.kernels.chunks import Chunk, Gradients, Supervised, balanced
from deftune.kernels.compiled import linear_loss_op
from deftune.kernels.head import Head, Slices
from deftune.kernels.triton_backend import TritonBackend
from deftune.objectives.stats import from_columns
from tolerances import assert_close, assert_near, tolerance

assert interpreted(), "TRITON_INTERPRET=1 must be set before triton is imported"

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 6.0},
    "all": {"bias": True, "scale": 0.7, "softcap": 6.0},
}
every_head = pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Tiles of 16 rows x 16 classes x 16 channels: small sizes have several of them, and ragged last ones."""
    for name in ("BLOCK_M_FLOAT32", "BLOCK_N", "BLOCK_K_FLOAT32"):
        monkeypatch.setattr(triton_rows, name, 16)


class Example:
    """Rows, a head, and their float64 logits; 17 x 33 x 20 are one and a bit past the blocks."""

    def __init__(self, options: dict, tokens=17, vocab_size=33, width=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(tokens, width, generator=generator) * torch.linspace(0.2, 1.5, tokens)[:, None]
        self.x *= (20 / width) ** 0.5
        bias = torch.randn(vocab_size, generator=generator) if options.get("bias") else None
        weight = torch.randn(vocab_size, width, generator=generator)
        self.head = Head(weight, bias, options.get("scale", 1.0), options.get("softcap"))
        self.y = torch.randint(0, vocab_size, (tokens,), generator=generator)
        self.index = torch.arange(tokens)

    @property
    def uncapped(self) -> Tensor:
        head = self.head
        z = self.x.double() @ head.weight.double().T
        return (z if head.bias is None else z + head.bias) * head.scale

    @property
    def z(self) -> Tensor:
        cap = self.head.softcap
        return self.uncapped if cap is None else cap * torch.tanh(self.uncapped / cap)

    @property
    def size(self) -> Tensor:
        """What float32 rounds: the GEMM's logits, and the cap itself (its tanh is 1 - 2 / (1 + e^2a))."""
        finite = self.uncapped[self.uncapped.isfinite()]
        return 1 + finite.abs().max() + (self.head.softcap or 0.0)

    def expected_e(self, reference: Tensor) -> Tensor:
        """e^{z - r} times the softcap's slope, 0 at the target; a reference is in units of ln 2."""
        e = torch.exp(self.z - math.log(2) * reference.double()[:, None]) * self.head.slope(self.z)
        return e.scatter(-1, self.y[:, None], 0.0)

    def measured(self, top: int = 0) -> tuple[TritonBackend, Chunk]:
        """The backend after one chunk of all rows, and the chunk."""
        backend = TritonBackend(self.head, torch.float32, Supervised(self.x, self.index, self.y))
        columns = torch.full((5, len(self.x)), math.nan, dtype=torch.float64)
        return backend, backend.measure(slice(0, len(self.x)), columns, True, top)


def error(actual: Tensor, expected: Tensor) -> float:
    gap, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return gap / size if size else gap


# --- each step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("tokens", [1, 4095, 4096, 9001])
def test_survey(tokens, dtype):
    """Places and labels in order, over more than one block; the first bad label; an earlier call's flag."""
    targets = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(tokens), dtype=dtype)
    targets[targets < 20] = IGNORE_INDEX
    kept = (targets != IGNORE_INDEX).nonzero()[:, 0]
    places, labels, facts, told = triton_rows.survey(targets, 50, IGNORE_INDEX, None)
    assert facts.tolist() == [len(kept), 0] and told.tolist() == [len(kept), tokens, 0]
    assert torch.equal(places[: len(kept)], kept) and torch.equal(labels[: len(kept)], targets[kept].long())
    targets[[tokens // 2, tokens - 1]] = torch.tensor([50, -1], dtype=dtype)
    told = triton_rows.survey(targets, 50, IGNORE_INDEX, torch.tensor([7]))[3]
    assert told.tolist()[1:] == [tokens // 2, 7]


def test_survey_leaves_no_label_that_a_kernel_could_trip_over():
    """The first chunk starts before the host has seen the labels: a wrong one stands as 0, and so does the rest."""
    targets = torch.tensor([3, IGNORE_INDEX, 50, -7, 2**40, 9])
    places, labels, facts, told = triton_rows.survey(targets, 50, IGNORE_INDEX, None)
    assert facts.tolist() == [5, 0] and told.tolist() == [5, 2, 0]
    assert places.tolist() == [0, 2, 3, 4, 5, 0] and labels.tolist() == [3, 0, 0, 0, 9, 0]


@every_head
@pytest.mark.parametrize("shape", [(1, 1, 4), (17, 33, 20), (16, 16, 132), (5, 7, 128)])
def test_target_logits(options, shape):
    """One dot product per row, also of rows that are not all taken, in an order of their own."""
    example = Example(options, *shape)
    index = torch.arange(0, shape[0], 2).flip(0)
    z_y, reference, _, _ = triton_rows.target_logits(
        example.x, index, example.y[index], example.head, torch.tensor([len(index)])
    )
    expected = example.z[index].gather(-1, example.y[index, None])[:, 0]
    assert_near(z_y, expected, "log p", condition=example.size)
    above = reference - z_y / math.log(2)
    assert (triton_rows.HEADROOM - 1e-4 < above).all() and (above < triton_rows.HEADROOM + 1.0001).all()
    assert torch.equal(reference, reference.round()), "a reference is a whole number"


@every_head
@pytest.mark.parametrize("shape", [(17, 33, 20), (16, 16, 16), (1, 1, 4), (3, 50, 36), (33, 15, 4)])
def test_exponentials_and_statistics(options, shape):
    """E about the reference, the target 0, the slope of a softcap in it; the columns are token_stats of the logits."""
    example = Example(options, *shape)
    backend, chunk = example.measured()
    z, stats = example.z, token_stats(example.z, example.y)
    for got, want in zip(chunk.columns, (stats.log_p, stats.entropy, stats.log_collision)):
        assert_near(got, want, "float32 entropy", condition=2 * example.size)
    top = z.amax(-1)
    assert_near(chunk.columns[3], torch.logsumexp(z, -1) - top, "log p", condition=example.size)
    assert_near(chunk.columns[4], top, "log p", condition=example.size)
    assert chunk.e.shape == shape[:2]
    assert error(chunk.e, example.expected_e(backend.vectors[1])) <= tolerance("fused gradient")

    columns = torch.empty(5, shape[0], dtype=torch.float64)
    assert backend.measure(slice(0, shape[0]), columns, False, 0).e is None
    assert torch.equal(columns, chunk.columns)


def test_nothing_is_written_beyond_the_vocabulary():
    """Rows of E are padded; the padding is not touched, by whatever tile."""
    example = Example({"bias": True}, 17, 33, 20)
    backend, _ = example.measured()
    backend.e.fill_(7.0)
    backend.measure(slice(0, 17), torch.empty(5, 17, dtype=torch.float64), True, 0)
    assert backend.e.shape == (17, 64) and (backend.e[:, 33:] == 7).all() and (backend.e[:, :33] != 7).all()


def impossible(options: dict, rows: list[int]) -> Example:
    """Class 7 is 300 below the others in these rows, and asked for there."""
    example = Example(options)
    example.head.weight[7] = 0
    example.head.weight[7, 0] = -300.0
    example.x[:, 0] = 0
    example.x[rows, 0] = 1.0
    example.y[rows] = 7
    return example


@every_head
def test_rows_that_overflow_are_repaired(options):
    """A target 150 and more below the maximum: e^{z - r} is beyond float32, the row is made anew about its maximum."""
    rows = [0, 4, 16]
    example = impossible({**options, "softcap": 150.0} if options.get("softcap") else options, rows)
    _, plain, _, _ = triton_rows.target_logits(example.x, example.index, example.y, example.head, torch.tensor([17]))
    backend, chunk = example.measured()
    assert (chunk.columns[0][rows] < -100).all()
    repaired = torch.zeros(17, dtype=torch.bool).index_fill_(0, torch.tensor(rows), True)
    assert torch.equal(backend.vectors[1][repaired], (chunk.columns[4][repaired] / math.log(2)).ceil().float())
    assert torch.equal(backend.vectors[1][~repaired], plain[~repaired])
    assert chunk.e.isfinite().all()
    expected = example.expected_e(backend.vectors[1])
    for row in range(17):
        assert error(chunk.e[row], expected[row]) <= 4 * tolerance("log p") * example.size, row
    assert_near(chunk.columns[0], token_stats(example.z, example.y).log_p, "log p", condition=example.size)


def test_a_class_that_cannot_be():
    """Columns of -inf, a whole tile of them, and a target among them."""
    example = Example({"bias": True})
    example.head.bias[16:32] = -math.inf
    example.y = torch.where((example.y >= 16) & (example.y < 32), 3, example.y)
    example.y[0] = 20
    _, chunk = example.measured()
    assert chunk.e.isfinite().all() and not chunk.e[:, 16:32].any()
    assert chunk.columns[0, 0] == -math.inf and not chunk.columns.isnan().any()
    stats = token_stats(example.z, example.y)
    for got, want in zip(chunk.columns, (stats.log_p, stats.entropy, stats.log_collision)):
        assert_near(got, want, "float32 entropy", condition=2 * example.size)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_nan_comes_out_as_nan(value):
    """In any tile, for the target or another: tl.max drops NaN, the statistics must not."""
    for column in (0, 16, 32):
        for target in (column, 5):
            example = Example({"bias": True})
            example.head.bias[column] = value
            example.y[:] = target
            assert example.measured()[1].columns[0].isnan().all(), (column, target)


def coefficients(backend: TritonBackend, chunk: Chunk, gate: Tensor) -> tuple[Tensor, Tensor]:
    """(v, t) that the backend makes of a chunk's gates."""
    backend.add(chunk, gate, 1.0, Gradients(None, None, torch.zeros(backend.head.vocab_size)))
    return backend.vectors[2], backend.vectors[3]


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_coefficients(softcap):
    """v E off the target and -t on it is gate x error, through scale and softcap; a shut gate is shut."""
    example = Example({"scale": 0.7, "softcap": softcap}, 40, 9, 8)
    backend, chunk = example.measured()
    gate = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gate[5], gate[39] = 0, 0
    chunk.columns[0, 5] = -math.inf
    v, t = coefficients(backend, chunk, gate)
    onehot = F.one_hot(example.y, 9)
    expected = gate[:, None] * (torch.softmax(example.z, -1) - onehot) * example.head.slope(example.z) * 0.7
    got = v.double()[:, None] * chunk.e.double() - t.double()[:, None] * onehot
    assert v[5] == t[5] == v[39] == t[39] == 0
    assert error(got, expected) <= tolerance("fused gradient")


def test_coefficients_keep_the_digits_of_the_error():
    """t = 1 - p to float32's last digits for any p."""
    log_ps = [0.0, -1e-300, -1e-17, -1e-9, -1e-3, -0.7, -30.0, -700.0, -1e4, -math.inf]
    backend, chunk = Example({}, len(log_ps), 3, 4).measured()
    chunk.columns[0] = torch.tensor(log_ps, dtype=torch.float64)
    _, t = coefficients(backend, chunk, torch.ones(len(log_ps), dtype=torch.float64))
    for got, log_p in zip(t.tolist(), log_ps):
        expected = -math.expm1(log_p)
        assert abs(got - expected) <= 2**-23 * expected + 1.5e-45, log_p


@every_head
@pytest.mark.parametrize("width", [4, 20, 1028])
def test_gradients_of_a_chunk(options, width):
    """dX at the rows' places, dW and db, for gates of any sign; what is not wanted stays None."""
    example = Example(options, 5, 7, width)
    places = torch.tensor([8, 1, 4, 0, 5])
    hidden = torch.randn(9, width).index_copy_(0, places, example.x)
    gate = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dz = gate[:, None] * (torch.softmax(example.z, -1) - F.one_hot(example.y, 7)) * example.head.slope(example.z)
    dz = dz * example.head.scale
    for wanted in ("hidden weight bias", "hidden", "weight", "bias"):
        into = Gradients(
            torch.full((9, width), 2.5) if "hidden" in wanted else None,
            torch.full((7, width), math.nan) if "weight" in wanted else None,
            torch.zeros(7) if "bias" in wanted else None,
        )
        backend = TritonBackend(example.head, torch.float32, Supervised(hidden, places, example.y))
        chunk = backend.measure(slice(0, 5), torch.empty(5, 5, dtype=torch.float64), True, 0)
        backend.add(chunk, gate, 1.0, into)
        backend.end(into)
        if into.hidden is not None:
            assert error(into.hidden[places], dz @ example.head.weight.double()) <= tolerance("fused gradient")
            assert (into.hidden[[2, 3, 6, 7]] == 2.5).all()
        if into.weight is not None:
            assert error(into.weight, dz.T @ example.x.double()) <= tolerance("fused gradient")
        if into.bias is not None:
            assert error(into.bias, dz.sum(0)) <= tolerance("fused gradient")
        assert sum(x is not None for x in (into.hidden, into.weight, into.bias)) == len(wanted.split())


@pytest.mark.parametrize("width, vocab_size", [(1, 41), (20, 41), (600, 41), (3, 1 << 16), (3, 70000)])
@pytest.mark.parametrize("targets", ["all the same", "all different", "runs of 1, 7, 8, 9 and 16", "random"])
def test_subtract_targets(width, vocab_size, targets):
    generator = torch.Generator().manual_seed(1)
    if targets == "all the same":
        y = torch.full((41,), 3)
    elif targets == "all different":
        y = torch.randperm(41, generator=generator)
    elif targets == "random":
        y = torch.randint(0, 41, (41,), generator=generator)
    else:
        y = torch.arange(5).repeat_interleave(torch.tensor([1, 7, 8, 9, 16]))
        y = y[torch.randperm(41, generator=generator)] * 10
    y = y * (vocab_size // 41)
    x = torch.randn(50, width, generator=generator)
    index = torch.randperm(50, generator=generator)[:41]
    t = torch.rand(41, generator=generator)
    dw = torch.randn(vocab_size, width, generator=generator)
    expected = dw.double().index_add(0, y, -t[:, None].double() * x[index])
    again = dw.clone()
    for out in (dw, again):
        triton_rows.subtract_targets(x, index, triton_rows.sort_targets(y, vocab_size), t, out)
    assert error(dw, expected) <= tolerance("float32 gradient")
    assert torch.equal(dw, again)
    untouched = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, y, False)
    assert torch.equal(dw[untouched].double(), expected[untouched])


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (33, 129), (100, 300)])
def test_column_sums(rows, classes, absolute):
    """E may have a longer stride than it has classes."""
    generator = torch.Generator().manual_seed(rows)
    e = torch.rand(rows, classes + 7, generator=generator).bfloat16()[:, :classes]
    v = torch.randn(rows, generator=generator)
    expected = e.double().T @ (v.abs() if absolute else v).double()
    assert error(triton_rows.column_sums(e, v, absolute), expected) <= tolerance("float32 gradient")


@pytest.mark.parametrize(("classes", "width", "means"), [(1, 1, 1), (33, 257, 5), (16, 512, 32)])
def test_add_products(classes, width, means):
    generator = torch.Generator().manual_seed(classes)
    to, a, b = (
        torch.randn(*size, generator=generator) for size in ((classes, width), (means, classes), (means, width))
    )
    expected = to.double() + a.double().T @ b.double()
    squares = triton_rows.add_products(to, a, b)
    assert error(to, expected) <= tolerance("float32 gradient")
    assert error(squares, expected.square().sum()) <= tolerance("float32 gradient")


def assert_entropy_of_the_top(chunk: Chunk) -> None:
    """The kernel's entropy is that of its own log p, relative to its size, however near certainty the row is."""
    columns = chunk.columns[:3]
    stats = from_columns(*columns, vocab_size=chunk.top.shape[1], top_log_p=chunk.top)
    gap = chunk.top[:, 0] - chunk.top[:, 1] if chunk.top.shape[1] > 1 else torch.zeros_like(columns[0])
    assert_close(chunk.top_entropy, stats.top_entropy(chunk.top.shape[1]), "float64 column", condition=1 + gap)


@pytest.mark.parametrize("k", [1, 5, 20, 33, 100])
@pytest.mark.parametrize("options", [HEADS["plain"], HEADS["bias"], HEADS["scale"]], ids=["plain", "bias", "scale"])
def test_top_logits(options, k):
    """Exactly the largest logits, the target among them where it is one, ties as often as they occur."""
    example = Example(options, tokens=7)
    example.x *= 0.5
    example.head.weight[5] = example.head.weight[6]
    example.y[:4] = example.z[:4].argmax(-1)
    _, chunk = example.measured(top=k)
    want = example.z.log_softmax(-1).topk(min(k, 33), -1).values
    assert_near(chunk.top, want, "log p", condition=example.size)
    entropy = torch.special.entr(want.softmax(-1)).sum(-1)
    assert_near(chunk.top_entropy, entropy, "float32 entropy", condition=2 * example.size)
    assert_entropy_of_the_top(chunk)


def test_top_logits_of_a_flat_row():
    """Logits closer together than the 8 bits of E that find them: one stands for another, none counts twice."""
    example = Example({}, 4, 400, 20)
    example.x *= 0.002
    _, chunk = example.measured(top=20)
    log_p = example.z.log_softmax(-1)
    want = log_p.topk(20, -1).values
    assert (chunk.top - want).abs().max() < 2**-7
    for row, every in zip(chunk.top, log_p):
        nearest = (row[:, None] - every[None, :]).abs().argmin(-1)
        assert len(set(nearest.tolist())) == 20, "a class counted twice"
    assert (chunk.top_entropy - torch.special.entr(want.softmax(-1)).sum(-1)).abs().max() < 1e-5


def test_top_logits_of_a_repaired_row():
    example = impossible({}, list(range(17)))
    _, chunk = example.measured(top=5)
    assert_near(chunk.top, example.z.log_softmax(-1).topk(5, -1).values, "log p", condition=example.size)


@pytest.mark.parametrize("spread", [0.3, 3.0], ids=["even", "clumped"])
def test_top_logits_of_many_tiles(spread):
    """More tiles than are looked at, and tiles with many of the likeliest: still exactly those."""
    example = Example({}, 3, 9000, 20)
    example.head.weight[300:340] *= spread
    example.head.weight[8990:] *= spread
    _, chunk = example.measured(top=20)
    want = example.z.log_softmax(-1).topk(20, -1).values
    assert_near(chunk.top, want, "log p", condition=example.size)


def nothing_but(example: Example) -> None:
    """As under a constrained vocabulary: all classes are impossible but some late ones."""
    example.head.bias[:] = -math.inf
    example.head.bias[840:880] = 0.0


def untrained(example: Example) -> None:
    """Most rows of the head are one and the same."""
    example.head.weight[:860] = example.head.weight[0]
    example.head.weight[860:] *= 2


def certain(example: Example) -> None:
    """All but the target are beyond E's range: only the tiles' maxima are known."""
    example.x[:] = 0
    example.x[:, 0] = 1
    example.head.weight[:, 0] -= 60
    example.head.weight[845, 0] = 60.0


@pytest.mark.parametrize("change", [nothing_but, untrained, certain], ids=lambda change: change.__name__)
def test_top_logits_of_tiles_that_tie(change):
    """More tiles that share the last place than there is room for: those ahead of them are not left out."""
    example = Example({"bias": True} if change is nothing_but else {}, 3, 900, 20)
    change(example)
    example.y[:] = 845
    _, chunk = example.measured(top=5)
    want = example.z.log_softmax(-1).topk(5, -1).values
    assert_near(chunk.top[:, :3], want[:, :3], "log p", condition=2 * example.size)
    entropy = torch.special.entr(want.softmax(-1)).sum(-1)
    assert_near(chunk.top_entropy, entropy, "float32 entropy", condition=2 * example.size)
    assert_entropy_of_the_top(chunk)


@pytest.mark.parametrize("vocab_size", [300, 33])
def test_no_candidate_counts_twice(vocab_size):
    """Two likely classes, the others beyond E's range, more of them asked for than a tile holds: each once."""
    example = Example({"bias": True}, 2, vocab_size, 4)
    example.head.bias[:] = -100.0
    example.head.bias[0], example.head.bias[5] = -1.0, 0.0
    example.x[:] = 0
    example.y[:] = 5
    _, chunk = example.measured(top=30)
    below = chunk.top - chunk.top[:, :1]
    assert_near(below[:, 1], torch.full_like(below[:, 1], -1), "log p")
    assert (below[:, 2:] <= -99).all(), f"{int((below[0] > -2).sum()) - 1} times the second"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled(dtype):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    factor = torch.tensor(1.7, dtype=torch.float64)
    expected = (x.double() * torch.tensor(1.7)).to(dtype)
    out, other = triton_rows.scaled([x.clone(), x[:7].clone()], factor, [dtype, dtype])
    assert torch.equal(other, out[:7])
    assert out.dtype == dtype
    assert (out.double() - expected.double()).abs().max() <= 2 * torch.finfo(dtype).eps * 5
    same = x.clone()
    (once,) = triton_rows.scaled([same], torch.ones(()), [torch.float32])
    assert once is same and torch.equal(once, x)


# --- the whole --------------------------------------------------------------------------------------------------------


SPECS = ["nll", "deft", "cayley", "eaft(k=5)", "clip", "mile", HalfDeft()]


def sample(tokens, vocab_size=37, width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator) * torch.linspace(0.1, 1.0, tokens)[:, None]
    weight = torch.randn(vocab_size, width, generator=generator)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    targets = torch.where(torch.arange(tokens) % 3 == 0, (hidden @ weight.T).argmax(-1), targets)
    return hidden, weight, targets.masked_fill(torch.arange(tokens) % 5 == 1, IGNORE_INDEX)


def both(hidden, weight, targets, objective, *, bias=None, softcap=None, logit_scale=1.0, upstream=None, **kwargs):
    """[(loss, gradients)] of the Triton backend and of float64 logits."""
    results = []
    for fused in (True, False):
        inputs = [
            x.detach().to(x.dtype if fused else torch.float64).clone() for x in (hidden, weight, bias) if x is not None
        ]
        inputs = [x.requires_grad_() for x in inputs]
        if fused:
            extra = {"bias": inputs[2] if bias is not None else None, "softcap": softcap, "logit_scale": logit_scale}
            loss = linear_loss(*inputs[:2], targets, objective, context=CONTEXT, backend="triton", **extra, **kwargs)
        else:
            z = inputs[0] @ inputs[1].T
            z = (z if bias is None else z + inputs[2]) * logit_scale
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            loss = token_loss(z, targets, objective, context=CONTEXT, **kwargs)
        up = None if upstream is None else upstream.to(loss.dtype)
        results.append((loss.detach(), torch.autograd.grad(loss, inputs, up)))
    return results


def assert_both(results) -> None:
    (loss, grads), (expected, truth) = results
    assert_near(loss, expected, "fused loss", condition=expected.abs().clamp(min=1), what="loss")
    for got, want, name in zip(grads, truth, ("hidden", "weight", "bias")):
        assert error(got, want) <= tolerance("fused gradient"), f"d {name}: {error(got, want):.2e}"


@pytest.mark.parametrize("head", ["plain", "bias, softcap and scale"])
@pytest.mark.parametrize("objective", SPECS, ids=str)
def test_linear_loss(monkeypatch, objective, head):
    """Three chunks, the last one ragged: 40 supervised rows in 16, 16 and 8."""
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 16))
    hidden, weight, targets = sample(50)
    options = {}
    if head != "plain":
        options = {"bias": torch.randn(37, generator=torch.Generator().manual_seed(7)), "logit_scale": 0.7}
        if not deftune.objective(objective).needs:
            options["softcap"] = 6.0
    assert_both(both(hidden, weight, targets, objective, **options))


def test_a_weight_whose_rows_are_not_side_by_side():
    hidden, weight, targets = sample(20)
    inputs = [hidden.requires_grad_(), weight.T.contiguous().requires_grad_()]
    loss = linear_loss(inputs[0], inputs[1].T, targets, "deft", backend="triton")
    got = torch.autograd.grad(loss, inputs)
    _, (expected, truth) = both(hidden, weight, targets, "deft")
    assert_both([(loss.detach(), (got[0], got[1].T)), (expected, truth)])


@pytest.mark.parametrize("vocab_size", [700, 768, 100])
@pytest.mark.parametrize("objective", ["deft", "eaft(k=5)"])
def test_a_large_weight_of_another_dtype_comes_in_slices(monkeypatch, objective, vocab_size):
    """Once a chunk, to its end and back, or whole, once for both; rows beyond E's range come of the weight itself."""
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 16))
    monkeypatch.setattr(Slices, "large", 0)
    copied = []
    monkeypatch.setattr(
        Slices, "each", lambda self, each=Slices.each: (copied.append(b) or (b, w) for b, w in each(self))
    )
    hidden, weight, targets = sample(50, vocab_size, width=72)  # more than one block of a row that is made anew
    weight[7] = 0
    weight[7, 0] = -300.0
    hidden[:, 0] = 0
    for row in (4, 40):  # of the first chunk, which is begun before its rows are counted, and of a later one
        hidden[row, 0], targets[row] = 1.0, 7
    low = weight.bfloat16()
    options = [None, None, None, objective, "mean", None, 1.0, None, None, "triton", torch.float32, [True, True, False]]
    loss, d_hidden, d_weight, _ = linear_loss_op(hidden, low, targets, *options)
    begins = list(range(0, vocab_size, 256))
    # the first chunk is begun before its rows are counted: there and back; each of the two others once
    assert copied == ([0] * 6 if len(begins) == 1 else begins + begins[::-1] + begins + begins[::-1])
    assert_both([(loss, (d_hidden, d_weight)), both(hidden, low.float(), targets, objective)[1]])


@pytest.mark.parametrize("vocab_size", [700, 250])
@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
@pytest.mark.parametrize("objective", ["nll", "deft", "eaft(k=5)"])
def test_the_sparse_mode(monkeypatch, objective, share, vocab_size):
    """As the torch backend's, in the same chunks; one row is beyond E's range, the weight comes in slices."""
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 16))
    monkeypatch.setattr(Slices, "large", 0)
    hidden, weight, targets = sample(50, vocab_size, width=24)
    weight[7] = 0
    weight[7, 0] = -300.0
    hidden[:, 0] = 0
    hidden[40, 0], targets[40] = 1.0, 7
    low = weight.bfloat16()
    found = []
    for backend, head in (("triton", low), ("torch", low.float())):
        sparse = deftune.Sparse(share)
        call = prepare(
            hidden, head, targets, deftune.objective(objective), None, None, 1.0, None, CONTEXT, backend,
            dtype=torch.float32, keep=True, chunk_rows=16, sparse=sparse,
        )  # fmt: skip
        loss, grads, _, _ = linear.fused(call, [True, True, False], 1 / 24)
        found.append((loss, (grads.hidden, grads.weight), sparse.report()))
    (loss, grads, report), (expected, truth, other) = found
    assert_near(loss, expected, "fused loss", condition=10)
    # r, what is left of a sum when most is taken away, has float32's rounding of the sum
    assert all(error(a, b) <= 1e-5 for a, b in zip(grads, truth))
    for a, b in zip(report, other):
        assert abs(a - b) <= 0.05 * b + 1e-5  # equal masses may be sampled in another order


# --- programs: what a CUDA graph would be captured from ---------------------------------------------------------------


class Stand:
    """In a graph's place: its work again, on what the room holds by then."""

    def __init__(self, room, work):
        self.replay = work


@pytest.fixture
def programs(monkeypatch):
    """Every call whose objective can be replayed goes through programs of 16 or 32 rows, captured at the second run."""
    monkeypatch.setattr(
        TritonBackend, "first_rows", staticmethod(lambda head, dtype, total, bound: balanced(total, 32))
    )
    monkeypatch.setattr(
        call, "suits", lambda head, objective, context, weights, *_: weights is None and replay.constant(objective)
    )
    monkeypatch.setattr(replay, "PAD", 16)
    monkeypatch.setattr(replay, "CAPTURE_AT", 2)
    monkeypatch.setattr(replay, "refusing_reads", nullcontext)
    monkeypatch.setattr(replay, "record", Stand)
    replay.clear()
    yield lambda: [program for room in replay._rooms.values() for program in room.programs.values()]
    replay.clear()


@pytest.mark.parametrize("rows", [16, 48])
@pytest.mark.parametrize("objective", ["nll", "deft", "eaft(k=5)", "deft | eos(nll)", "top(0.2) | floor(0.1)"], ids=str)
def test_a_program_as_it_is_written(monkeypatch, programs, objective, rows):
    """Rows taken, fewer than the program's in the last chunk or in the only one.

    Ignored rows hold NaN, which must not come in with the padding.
    """
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: rows))
    monkeypatch.setattr(replay, "CAPTURE_AT", 100)
    hidden, weight, targets = sample(50)
    softcap = None if "eaft" in objective else 6.0
    dirty = torch.where((targets == IGNORE_INDEX)[:, None], math.nan, hidden)
    for items in (None, 70):
        _, expected = both(hidden, weight, targets, objective, softcap=softcap, num_items=items)
        got, _ = both(dirty, weight, targets, objective, softcap=softcap, num_items=items)
        assert_both([got, expected])
    assert {program.rows for program in programs()} == {rows}


def test_calls_of_many_sizes_one_after_the_other(programs):
    """A room that is too small is made anew, with programs of its own; a smaller call leaves the rest of it alone."""
    hidden, weight, targets = sample(40, width=8)
    weight.requires_grad_()
    objective = "eaft(k=5)"
    for tokens in (10, 10, 10, 40, 40, 10, 1):
        inputs = [hidden[:tokens].clone().requires_grad_(), weight]
        loss, stats = linear_loss_with_stats(*inputs, targets[:tokens], objective, backend="triton")
        reference = [x.detach().double().requires_grad_() for x in inputs]
        expected = token_loss(reference[0] @ reference[1].T, targets[:tokens], objective)
        assert_both(
            [(loss.detach(), torch.autograd.grad(loss, inputs)), (expected, torch.autograd.grad(expected, reference))]
        )
        truth = token_stats((hidden[:tokens] @ weight.detach().T).double(), targets[:tokens])
        assert_near(stats.log_p, truth.log_p, "float32 entropy", condition=60)
        assert_near(stats.top_log_p(5), truth.top_log_p(5), "float32 entropy", condition=60)
    assert any(all(part.graph for part in program.parts()) for program in programs())


OPTIONS = {
    "sum": {"reduction": "sum"},
    "a count on the host": {"num_items": torch.tensor(70)},
    "a count in one dimension": {"num_items": torch.tensor([70.0])},
    "chunks of no multiple of the padding": {"chunk_rows": 20},
    "chunks smaller than the padding": {"chunk_rows": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_program_under_every_option(programs, options):
    hidden, weight, targets = sample(30, width=8)
    chunk_rows = {"chunk_rows": options["chunk_rows"]} if "chunk_rows" in options else {}
    options = {key: value for key, value in options.items() if key != "chunk_rows"}
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    reference = [x.detach().double().requires_grad_() for x in inputs]
    expected = token_loss(reference[0] @ reference[1].T, targets, "deft", **options)
    truth = torch.autograd.grad(expected, reference)
    for _ in range(3):
        loss = linear_loss(*inputs, targets, "deft", backend="triton", **options, **chunk_rows)
        assert_both([(loss.detach(), torch.autograd.grad(loss, inputs)), (expected, truth)])
    assert any(all(part.graph for part in program.parts()) for program in programs())


def test_without_graphs_nothing_is_kept(programs):
    hidden, weight, targets = sample(30, width=8)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    with_graphs, without = (linear_loss(*inputs, targets, "deft", backend="triton", graphs=on) for on in (True, False))
    assert len(programs()) == 1 and all(program.beginning.runs == 1 for program in programs())
    for one, other in zip(*(torch.autograd.grad(loss, inputs) for loss in (with_graphs, without))):
        assert error(one, other) <= tolerance("fused gradient")


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["frozen head", "frozen hidden"])
def test_the_gradients_that_are_wanted_after_a_program(programs, trained):
    """One program, whatever is wanted of the rows it measured."""
    *inputs, targets = sample(20, width=8)
    reference = [x.double().requires_grad_() for x in inputs]
    truth = torch.autograd.grad(token_loss(reference[0] @ reference[1].T, targets, "deft"), reference)
    for wanted in [trained, (True, True)] * 3:
        for x, want in zip(inputs, wanted):
            x.requires_grad_(want).grad = None
        linear_loss(*inputs, targets, "deft", backend="triton").backward()
        for x, want, expected in zip(inputs, wanted, truth):
            assert (x.grad is None) == (not want)
            assert x.grad is None or error(x.grad, expected) <= tolerance("fused gradient")
    assert len(programs()) == 1


def test_nothing_supervised_in_a_program(programs):
    hidden, weight, targets = sample(20, width=8)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    for _ in range(3):
        linear_loss(*inputs, targets, "deft", backend="triton").backward()
        inputs[0].grad = inputs[1].grad = None
        loss = linear_loss(*inputs, torch.full_like(targets, IGNORE_INDEX), "deft", backend="triton")
        loss.backward()
        assert loss == 0 and not inputs[0].grad.any() and not inputs[1].grad.any()


def test_a_second_call_before_the_backward_of_the_first(programs):
    """Also twice the same backward: what a call returned is its own."""
    examples = [sample(10, width=8, seed=seed) for seed in range(2)]
    alone = [both(*example, "eaft(k=5)")[0] for example in examples]
    inputs = [[x.clone().requires_grad_() for x in example[:2]] for example in examples]
    results = [
        linear_loss_with_stats(*leaves, example[2], "eaft(k=5)", context=CONTEXT, backend="triton")
        for leaves, example in zip(inputs, examples)
    ]
    tops = [stats.top_log_p(5).clone() for _, stats in results]
    for (loss, stats), leaves, (expected, truth), top in zip(results, inputs, alone, tops):
        grads = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert loss == expected and all(torch.equal(a, b) for a, b in zip(grads, truth))
        assert torch.equal(stats.top_log_p(5), top)
        again = torch.autograd.grad(loss, leaves)
        assert all(error(a, b) <= tolerance("fused gradient") for a, b in zip(again, truth))


def test_two_threads_do_not_share_a_room(programs):
    """Between the rows that a call takes and its work on them, another thread makes a call of its own."""
    examples = [sample(30, width=8, seed=seed) for seed in range(2)]
    expected = [both(*example, "deft")[0] for example in examples]

    def begun(example):
        hidden, weight, targets = example
        return prepare(
            hidden, weight, targets, deftune.objective("deft"), None, None, 1.0, None, CONTEXT, "triton", keep=True
        )

    first = begun(examples[0])
    assert first.replay is not None
    thread = threading.Thread(target=lambda: linear.fused(begun(examples[1]), [True, True, False], 1 / 24))
    thread.start()
    thread.join()
    loss, grads, _, _ = linear.fused(first, [True, True, False], 1 / 24)
    assert torch.equal(loss, expected[0][0])
    assert torch.equal(grads.hidden, expected[0][1][0]) and torch.equal(grads.weight, expected[0][1][1])


def test_rows_left_over_in_a_room_are_not_looked_at(programs):
    """A longer call's NaN stands where a shorter one has no row: neither its flag nor its results see it."""
    hidden, weight, targets = sample(30, width=8)
    weight.requires_grad_()
    targets.clamp_(min=0)
    dirty = hidden.clone()
    dirty[25] = math.nan
    with pytest.raises(ValueError, match="25"):
        linear_loss(dirty, weight, targets, "deft", backend="triton")
    (room,) = replay._rooms.values()
    assert room.facts[1] == 1
    few = torch.where(torch.arange(30) < 10, targets, IGNORE_INDEX)
    assert_both(both(hidden, weight.detach(), few, "deft"))
    assert replay._rooms.popitem()[1] is room and room.facts.tolist() == [10, 0]


class Scheduled(deftune.Focus):
    """A user's own, no dataclass: all of these compare equal, and a schedule changes them."""

    def __init__(self, a):
        self.a = a

    def focus(self, stats, context=CONTEXT):
        return torch.full_like(stats.log_p, self.a)


def test_a_users_objective_is_evaluated_at_every_call(programs):
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    mine = Scheduled(0.0)
    assert mine == Scheduled(7.0)
    for a in (0.0, 0.4, 0.8):
        mine.a = a
        expected = token_loss(hidden @ weight.T, targets, f"alpha({a})")
        for objective in (mine, Scheduled(a), deftune.MODIFIERS["floor"](Scheduled(a), 0.0)):
            loss = linear_loss(hidden, weight, targets, objective, backend="triton")
            assert_near(loss, expected, "fused loss", condition=10)
    assert not programs()


def test_a_capture_that_fails_is_given_up(monkeypatch, programs):
    """Half-way, with the program's tensors overwritten: the call is right all the same, and none is tried again."""
    hidden, weight, targets = sample(10, width=8)
    weight.requires_grad_()
    tried = []

    def fails(room, work):
        tried.append(work)
        for program in room.programs.values():  # what the first half writes; the second, v and v X
            (program.likeliest if len(tried) == 1 else program.vectors[2]).fill_(math.nan)
        (room.record if len(tried) == 1 else room.scaled).fill_(math.nan)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(replay, "record", fails)
    losses = [linear_loss(hidden, weight, targets, "eaft(k=5)", backend="triton").item() for _ in range(4)]
    # its first half, with the survey, and its second
    assert len(set(losses)) == 1 and len(tried) == 2 and math.isfinite(losses[0])


@pytest.mark.parametrize(
    "form", [torch.Tensor.int, lambda targets: torch.cat([targets[:1], targets])[1:]], ids=["int32", "odd"]
)
def test_targets_that_had_to_be_copied(monkeypatch, programs, form):
    """The survey runs twice when it is captured: its targets are still there."""
    hidden, weight, targets = sample(30, width=8)
    alive, ask, survey = [], replay.Room.ask, triton_rows.survey_told

    def asked(room, hidden, targets, earlier):
        asked.targets = weakref.ref(targets)
        return ask(room, hidden, targets, earlier)

    def surveyed(*given):
        alive.append(asked.targets() is not None)
        return survey(*given)

    monkeypatch.setattr(replay.Room, "ask", asked)
    monkeypatch.setattr(triton_rows, "survey_told", surveyed)
    for _ in range(3):
        assert_both(both(hidden, weight, form(targets), "deft"))
    assert len(alive) >= 3 and all(alive)


def test_a_program_that_was_half_made(monkeypatch, programs):
    """No memory for the last of its tensors: the next call makes them all."""
    hidden, weight, targets = sample(30, width=8)
    weight.requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(triton_rows, "aligned", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        with pytest.raises(torch.OutOfMemoryError):
            linear_loss(hidden, weight, targets, "eaft(k=5)", backend="triton")
    _, stats = linear_loss_with_stats(hidden, weight, targets, "eaft(k=5)", backend="triton")
    truth = token_stats(hidden.double() @ weight.detach().double().T, targets)
    assert_near(stats.top_log_p(5), truth.top_log_p(5), "log p", condition=10)


def test_a_survey_that_tells_nothing_is_not_waited_for(monkeypatch):
    """The host looks at what it is told while the queue is busy, and no longer."""
    place = replay.Place(torch.device("cpu"), 0, 0, torch.float32, 64, 16, False)
    room, looked = replay.Room(place, 16), []

    class Stream:
        def query(self) -> bool:
            looked.append(1)
            if len(looked) == 3 and told:
                room.told.copy_(torch.tensor(told))
            return len(looked) > 3

    monkeypatch.setattr(replay, "LOOKS", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    for told in ([5, 9, 0], []):
        room.heard[:] = replay.NOTHING
        looked.clear()
        if told:
            assert room.hear() == told and len(looked) == 3
        else:
            with pytest.raises(RuntimeError, match="told nothing"):
                room.hear()


def test_few_rooms_are_kept(programs):
    for width in (4, 8, 12):
        hidden, weight, targets = sample(10, width=width)
        assert_both(both(hidden, weight, targets, "deft"))
    assert [place.width for place in replay._rooms] == [8, 12]


def test_weights_that_move_leave_few_programs(monkeypatch, programs):
    """As under FSDP: another address at every step."""
    monkeypatch.setattr(replay, "MOST", 3)
    hidden, weight, targets = sample(10, width=8)
    weights = [weight.clone().requires_grad_() for _ in range(5)]
    for moved in weights:
        linear_loss(hidden, moved, targets, "deft", backend="triton").backward()
    assert len(programs()) == 3
    assert all(torch.equal(moved.grad, weights[0].grad) for moved in weights)


def test_float16_hidden_states_in_a_program(programs):
    """dX is float32 until the upstream, a loss scale, has come in."""
    hidden, weight, targets = sample(20, width=8)
    half = hidden.half()
    options = [None, None, None, "deft", "mean", None, 1.0, None, None, "triton", torch.float32, [True, True, False]]
    loss, d_hidden, d_weight, _ = linear_loss_op(half, weight, targets, *options)
    assert d_hidden.dtype == torch.float32 and programs()
    assert_both([(loss, (d_hidden, d_weight)), both(half.float(), weight, targets, "deft")[1]])


@pytest.mark.parametrize("objective", ["deft", "clip"])
def test_none_with_a_random_upstream_vector(monkeypatch, objective):
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 16))
    hidden, weight, targets = sample(50)
    generator = torch.Generator().manual_seed(3)
    upstream, weights = torch.randn(50, generator=generator), torch.rand(50, generator=generator)
    bias = torch.randn(37, generator=generator)
    assert_both(
        both(hidden, weight, targets, objective, bias=bias, weights=weights, reduction="none", upstream=upstream)
    )


def test_hopeless_rows_among_others():
    """log p = -200 and p = 0: right in hidden, weight and bias, in the same chunk as ordinary rows."""
    hidden, weight, targets = sample(40)
    bias = torch.zeros(37)
    bias[3], bias[4] = -200.0, -math.inf
    targets[[7, 12]], targets[18] = 3, 4
    (loss, grads), (expected, truth) = both(hidden, weight, targets, "linear | floor(0.1)", bias=bias)
    assert torch.equal(loss.double(), expected)  # both infinite: the floor's NLL at p = 0
    for got, want in zip(grads, truth):
        assert got.isfinite().all() and error(got, want) <= tolerance("fused gradient")


def test_statistics_and_their_gradients():
    hidden, weight, targets = sample(40)
    stats = linear_token_stats(hidden, weight, targets, needs=frozenset({deftune.topk(5)}), backend="triton")
    z = hidden.double() @ weight.double().T
    expected = token_stats(z, targets)
    for name in ("log_p", "entropy", "log_collision"):
        assert_near(getattr(stats, name), getattr(expected, name), "float32 entropy", condition=2 + 2 * z.abs().max())
    assert_near(stats.top_log_p(5), expected.top_log_p(5), "log p", condition=2 + 2 * z.abs().max())
    _, same = linear_loss_with_stats(hidden, weight, targets, "eaft(k=5)", backend="triton")
    assert torch.equal(same.log_p, stats.log_p) and torch.equal(same.top_log_p(5), stats.top_log_p(5))
    for through in ("log_p", "entropy"):
        grads = []
        for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
            inputs = [x.to(dtype).clone().requires_grad_() for x in (hidden, weight)]
            column = getattr(linear_token_stats(*inputs, targets, backend=backend), through)
            grads.append(torch.autograd.grad(column.mean(), inputs))
        for got, want in zip(*grads):
            assert error(got, want) <= tolerance("fused gradient")


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_requires_a_gradient_gets_one(trained):
    hidden, weight, targets = sample(20)
    inputs = [hidden.clone(), weight.clone()]
    inputs[trained].requires_grad_()
    linear_loss(*inputs, targets, "deft", backend="triton").backward()
    (_, _), (_, truth) = both(hidden, weight, targets, "deft")
    assert inputs[1 - trained].grad is None
    assert error(inputs[trained].grad, truth[trained]) <= tolerance("fused gradient")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_supervised_is_zero_and_connected(tokens, reduction):
    inputs = [torch.randn(tokens, 4), torch.randn(5, 4), torch.randn(5)]
    inputs = [x.requires_grad_() for x in inputs]
    targets = torch.full((tokens,), IGNORE_INDEX)
    loss = linear_loss(*inputs[:2], targets, "deft", bias=inputs[2], reduction=reduction, backend="triton")
    loss.sum().backward()
    assert not loss.any()
    for leaf in inputs:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("margin", [90.0, 99.0, 101.0, 124.0, 126.0])
def test_unlikely_tokens_of_a_large_step(margin):
    """On both sides of the repair, at 1 / num_items = 1e-7: the factor v of E must not leave float32's range."""
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(4)
    logits[targets, targets] = logits.amax(-1) - margin
    grads = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "torch")):
        weight = torch.eye(20, dtype=dtype).requires_grad_()
        linear_loss(logits.to(dtype), weight, targets, "nll", num_items=10**7, backend=backend).backward()
        grads.append(weight.grad.double())
    assert (grads[0] - grads[1]).norm() <= 1e-5 * grads[1].norm()
    off_target = ~torch.eye(20, dtype=torch.bool)
    assert (grads[0] - grads[1])[off_target].norm() <= 1e-5 * grads[1][off_target].norm()


def test_one_class():
    inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)]
    loss = linear_loss(*inputs, torch.zeros(3, dtype=torch.long), "deft", backend="triton")
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


def test_bitwise_the_same_again(monkeypatch):
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 16))
    hidden, weight, targets = sample(40)
    first, second = (both(hidden, weight, targets, "deft", bias=torch.zeros(37))[0] for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1]))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            {"hidden": torch.zeros(2, 5), "weight": torch.zeros(3, 5)},
            r"5 of torch.float32, is no multiple of 16 bytes",
        ),
        (
            {"hidden": torch.zeros(2, 4).double(), "weight": torch.zeros(3, 4).double()},
            r"torch.float64 has not the range",
        ),
        ({"hidden": torch.zeros(2, 8).half(), "weight": torch.zeros(3, 8).half()}, r"torch.float16 has not the range"),
        ({"objective": "eaft", "softcap": 5.0}, r"the likeliest tokens under a softcap are found by torch only"),
    ],
)
def test_what_it_cannot_do_is_refused(bad, text):
    arguments = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(3, 4), "objective": "nll", **bad}
    with pytest.raises(ValueError, match=rf"backend='triton' cannot be used here: .*{text}.*use backend='torch'"):
        linear_loss(targets=torch.zeros(2, dtype=torch.long), backend="triton", **arguments)
