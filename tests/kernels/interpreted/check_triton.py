"""The Triton kernels in Triton's own interpreter, on the CPU; run by `test_triton_rows` in a process of its own.

Each launch against plain float64 torch, on sizes one past a block; then `linear_loss(backend="triton")` as a whole. The
interpreter knows no bfloat16 dot product: everything here is float32, the rest is for a GPU.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deftune
from battery import CONTEXT, HalfDeft
from deftune import IGNORE_INDEX, linear_loss, linear_loss_with_stats, linear_token_stats, token_loss, token_stats
from deftune.kernels import triton_rows
from deftune.kernels.backends import TritonBackend, interpreted
from deftune.kernels.head import Head
from tolerances import assert_near, tolerance

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
    monkeypatch.setattr(triton_rows, "blocks_for", lambda width: (16, 16, 16, 2))


class Example:
    """Rows, a head, and their float64 logits; 17 x 33 x 20 are one and a bit past the blocks."""

    def __init__(self, options: dict, tokens=17, vocab_size=33, width=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(tokens, width, generator=generator) * torch.linspace(0.2, 1.5, tokens)[:, None]
        bias = torch.randn(vocab_size, generator=generator) if options.get("bias") else None
        weight = torch.randn(vocab_size, width, generator=generator)
        self.head = Head(weight, bias, options.get("scale", 1.0), options.get("softcap"))
        self.y = torch.randint(0, vocab_size, (tokens,), generator=generator)
        self.index = torch.arange(tokens)

    @property
    def z(self) -> Tensor:
        head = self.head
        z = self.x.double() @ head.weight.double().T
        z = (z if head.bias is None else z + head.bias) * head.scale
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)

    def others(self, values: Tensor) -> Tensor:
        """The target's entry of each row put to 0."""
        return values.scatter(-1, self.y[:, None], 0.0)

    def slope(self) -> Tensor:
        return self.head.slope(self.z)

    def measured(self):
        """(z_y, reference, E, tiles, columns): what the launches make of it, one after the other."""
        z_y, reference = triton_rows.target_logits(self.x, self.index, self.y, self.head)
        vocab_size = self.head.vocab_size
        buffer = torch.full((len(self.x), -(-vocab_size // 64) * 64), math.nan)
        tiles = triton_rows.exponentials(self.x, self.y, reference, self.head, buffer)
        columns = torch.empty(5, len(self.x), dtype=torch.float64)
        triton_rows.reduce_tiles(tiles, z_y, columns)
        triton_rows.repair(self.x, self.y, reference, columns[4], self.head, buffer)
        return z_y, reference, buffer, tiles, columns


def error(actual: Tensor, expected: Tensor) -> float:
    gap, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return gap / size if size else gap


# --- each launch ------------------------------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("shape", [(1, 1, 4), (17, 33, 20), (16, 16, 132), (5, 7, 128)])
def test_target_logits(options, shape):
    """One dot product per row, also of rows that are not all taken, in an order of their own."""
    example = Example(options, *shape)
    index = torch.arange(0, shape[0], 2).flip(0)
    z_y, reference = triton_rows.target_logits(example.x, index, example.y[index], example.head)
    expected = example.z[index].gather(-1, example.y[index, None])[:, 0]
    assert_near(z_y, expected, "log p", condition=1 + example.z.abs().max())
    assert_near(reference - z_y, torch.full_like(expected, triton_rows.HEADROOM), "log p", condition=60)


@every_head
@pytest.mark.parametrize("shape", [(17, 33, 20), (16, 16, 16), (1, 1, 4), (3, 50, 36), (33, 15, 4)])
def test_exponentials_and_statistics(options, shape):
    """E about the reference, the target 0, the slope of a softcap in it; the columns are token_stats of the logits."""
    example = Example(options, *shape)
    z = example.z
    z_y, reference, e, tiles, columns = example.measured()
    assert tiles.shape == (4, -(-shape[1] // 16), shape[0])
    scale = 1 + z.abs().max()
    stats = token_stats(z, example.y)
    for got, want in zip(columns, (stats.log_p, stats.entropy, stats.log_collision)):
        assert_near(got, want, "float32 entropy", condition=2 * scale)
    top = z.amax(-1)
    assert_near(columns[3], torch.logsumexp(z, -1) - top, "log p", condition=scale)
    assert_near(columns[4], top, "log p", condition=scale)
    expected = example.others(torch.exp(z - reference.double()[:, None]) * example.slope())
    assert error(e[:, : shape[1]], expected) <= tolerance("fused gradient")
    assert e[:, shape[1] :].isnan().all()  # what is beyond the vocabulary was not touched

    without = triton_rows.exponentials(example.x, example.y, reference, example.head, None)
    assert torch.equal(without, tiles)


@every_head
def test_rows_that_overflow_are_repaired(options):
    """A target 200 below the maximum: e^{z - r} is beyond float32, the row is made anew about its maximum."""
    if options.get("softcap"):
        options = {**options, "softcap": 150.0}
    example = Example(options)
    example.head.weight[7] = 0
    example.head.weight[7, 0] = -300.0  # class 7 is impossible wherever x_0 = 1
    example.x[:, 0] = 0
    hopeless = torch.tensor([0, 4, 16])
    example.x[hopeless, 0] = 1.0
    example.y[hopeless] = 7
    _, plain = triton_rows.target_logits(example.x, example.index, example.y, example.head)
    _, reference, e, _, columns = example.measured()
    z = example.z
    assert (columns[0][hopeless] < -100).all()
    repaired = torch.zeros(17, dtype=torch.bool).index_fill_(0, hopeless, True)
    assert torch.equal(reference[repaired], columns[4][repaired].float())
    assert torch.equal(reference[~repaired], plain[~repaired])
    e = e[:, :33].double()
    assert e.isfinite().all()
    expected = example.others(torch.exp(z - reference.double()[:, None]) * example.slope())
    for row in range(17):
        assert error(e[row], expected[row]) <= tolerance("fused gradient"), row
    stats = token_stats(z, example.y)
    assert_near(columns[0], stats.log_p, "log p", condition=1 + z.abs().max())


def test_a_class_that_cannot_be():
    """Columns of -inf, a whole tile of them, and a target among them."""
    example = Example({"bias": True})
    example.head.bias[16:32] = -math.inf
    example.y[:2] = torch.tensor([20, 3])
    _, _, e, _, columns = example.measured()
    assert e[:, :33].isfinite().all() and not e[:, 16:32].any()
    assert columns[0, 0] == -math.inf and not columns[1:].isnan().any()
    stats = token_stats(example.z, example.y)
    for got, want in zip(columns[:, 1:], (stats.log_p, stats.entropy, stats.log_collision)):
        kept = want[1:].isfinite()
        assert_near(got[kept], want[1:][kept], "float32 entropy", condition=50)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_nan_comes_out_as_nan(value):
    """In any tile, for the target or another: tl.max drops NaN, the statistics must not."""
    for column in (0, 16, 32):
        for target in (column, 5):
            example = Example({"bias": True})
            example.head.bias[column] = value
            example.y[:] = target
            assert example.measured()[-1][0].isnan().all(), (column, target)


@pytest.mark.parametrize("softcap", [None, 6.0])
def test_coefficients(softcap):
    """v E off the target and -t on it is gate x error, through scale and softcap; a shut gate is shut."""
    example = Example({"scale": 0.7, "softcap": softcap}, 300, 9, 8)
    z = example.z
    z_y, reference, e, _, columns = example.measured()
    gate = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gate[5], gate[299] = 0, 0
    columns[0, 5] = -math.inf
    v, t = torch.full((2, 300), math.nan)
    triton_rows.coefficients(gate, columns, reference, z_y, example.head, v, t)
    P = torch.softmax(z, -1)
    onehot = F.one_hot(example.y, 9)
    expected = gate[:, None] * (P - onehot) * example.slope() * 0.7
    got = v.double()[:, None] * e[:, :9].double() - t.double()[:, None] * onehot
    assert v[5] == t[5] == v[299] == t[299] == 0
    assert error(got, expected) <= tolerance("fused gradient")


@pytest.mark.parametrize("log_p", [0.0, -1e-300, -1e-17, -1e-9, -1e-3, -0.7, -30.0, -700.0, -1e4, -math.inf])
def test_coefficients_keep_the_digits_of_the_error(log_p):
    """t = 1 - p to float32's last digits for any p."""
    example = Example({}, 1, 3, 4)
    columns = torch.zeros(5, 1, dtype=torch.float64)
    columns[0] = log_p
    v, t = torch.full((2, 1), math.nan)
    gate = torch.ones(1, dtype=torch.float64)
    triton_rows.coefficients(gate, columns, torch.zeros(1), torch.zeros(1), example.head, v, t)
    expected = -math.expm1(log_p)
    assert abs(t.item() - expected) <= 2**-23 * expected + 1.5e-45


@pytest.mark.parametrize("width", [4, 20, 1028])
def test_finish_hidden(width):
    """out[index] = v u - t W[y]; rows that are not named stay as they are."""
    generator = torch.Generator().manual_seed(1)
    u, weight = torch.randn(5, width, generator=generator), torch.randn(7, width, generator=generator)
    v, t = torch.rand(2, 5, generator=generator)
    y, index = torch.tensor([6, 0, 6, 3, 1]), torch.tensor([8, 1, 4, 0, 5])
    out = torch.full((9, width), 2.5)
    triton_rows.finish_hidden(u, y, index, v, t, weight, out)
    expected = torch.full((9, width), 2.5, dtype=torch.float64)
    expected[index] = v[:, None].double() * u - t[:, None].double() * weight[y]
    assert error(out, expected) <= tolerance("float32 gradient")
    assert (out[[2, 3, 6, 7]] == 2.5).all()


@pytest.mark.parametrize("width", [1, 4, 20, 600])
@pytest.mark.parametrize("targets", ["all the same", "all different", "runs of 1, 7, 8, 9 and 16", "random"])
def test_subtract_targets(width, targets):
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
    x = torch.randn(50, width, generator=generator)
    index = torch.randperm(50, generator=generator)[:41]
    t = torch.rand(41, generator=generator)
    dw = torch.randn(41, width, generator=generator)
    expected = dw.double().index_add(0, y, -t[:, None].double() * x[index])
    again = dw.clone()
    triton_rows.subtract_targets(x, index, y, t, dw)
    triton_rows.subtract_targets(x, index, y, t, again)
    assert error(dw, expected) <= tolerance("float32 gradient")
    assert torch.equal(dw, again)
    untouched = torch.ones(41, dtype=torch.bool).index_fill_(0, y, False)
    assert torch.equal(dw[untouched].double(), expected[untouched])


@pytest.mark.parametrize("k", [1, 5, 20, 33, 100])
@pytest.mark.parametrize("options", [HEADS["plain"], HEADS["bias"], HEADS["scale"]], ids=["plain", "bias", "scale"])
def test_top_logits(options, k):
    """Exactly the largest logits, the target among them where it is one, ties as often as they occur."""
    example = Example(options)
    example.x *= 0.5
    example.head.weight[5] = example.head.weight[6]
    example.y[:9] = example.z[:9].argmax(-1)
    z_y, reference, e, tiles, _ = example.measured()
    top = triton_rows.top_logits(example.x, example.y, z_y, reference, tiles, e, example.head, k)
    expected = example.z.topk(min(k, 33), -1).values
    assert_near(top, expected, "log p", condition=1 + example.z.abs().max())


def test_top_logits_of_a_repaired_row():
    example = Example({})
    example.head.weight[7] = 0
    example.head.weight[7, 0] = -300.0
    example.x[:, 0] = 1.0
    example.y[:] = 7
    z_y, reference, e, tiles, _ = example.measured()
    top = triton_rows.top_logits(example.x, example.y, z_y, reference, tiles, e, example.head, 5)
    assert_near(top, example.z.topk(5, -1).values, "log p", condition=1 + example.z.abs().max())


def test_no_candidate_counts_twice(monkeypatch):
    """Two likely classes, the others beyond E's range, more of them asked for than a tile holds: each once."""
    monkeypatch.undo()  # the real blocks
    example = Example({"bias": True}, 2, 300, 4)
    example.head.bias[:] = -100.0
    example.head.bias[0], example.head.bias[5] = -1.0, 0.0
    example.x[:] = 0
    example.y[:] = 5
    z_y, reference, e, tiles, _ = example.measured()
    top = triton_rows.top_logits(example.x, example.y, z_y, reference, tiles, e, example.head, 200)
    assert (top[:, 0] == 0).all() and (top[:, 1] == -1).all()
    assert (top[:, 2:] <= -99).all(), f"{int((top[0] == -1).sum())} times the second"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled(dtype):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    factor = torch.tensor(1.7, dtype=torch.float64)
    expected = (x.double() * torch.tensor(1.7)).to(dtype)
    out = triton_rows.scaled(x.clone(), factor, dtype)
    assert out.dtype == dtype
    assert (out.double() - expected.double()).abs().max() <= 2 * torch.finfo(dtype).eps * 5
    same = x.clone()
    once = triton_rows.scaled(same, torch.ones(()), torch.float32)
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
    """Three chunks, the last one ragged: 280 supervised rows in 128, 128 and 24."""
    monkeypatch.setattr(triton_rows, "blocks_for", lambda width: (128, 64, 32, 2))  # fewer programs to interpret
    monkeypatch.setattr(TritonBackend, "rows", lambda self, total: 128)
    hidden, weight, targets = sample(350)
    options = {}
    if head != "plain":
        options = {"bias": torch.randn(37, generator=torch.Generator().manual_seed(7)), "logit_scale": 0.7}
        if not deftune.objective(objective).needs:
            options["softcap"] = 6.0
    assert_both(both(hidden, weight, targets, objective, **options))


@pytest.mark.parametrize("objective", ["deft", "clip"])
def test_none_with_a_random_upstream_vector(monkeypatch, objective):
    monkeypatch.setattr(TritonBackend, "rows", lambda self, total: 16)
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


def test_one_class():
    inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)]
    loss = linear_loss(*inputs, torch.zeros(3, dtype=torch.long), "deft", backend="triton")
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs)


def test_bitwise_the_same_again(monkeypatch):
    monkeypatch.setattr(TritonBackend, "rows", lambda self, total: 16)
    hidden, weight, targets = sample(40)
    first, second = (both(hidden, weight, targets, "deft", bias=torch.zeros(37))[0] for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1]))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            {"hidden": torch.zeros(2, 5), "weight": torch.zeros(3, 5)},
            r"\(5 x torch.float32\) is no multiple of 16 bytes",
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
