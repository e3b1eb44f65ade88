"""Each launch of the Triton kernels in Triton's own interpreter, on the CPU, against plain float64 torch.

Sizes are one past a block. The interpreter knows no bfloat16 dot product: everything here is float32, the rest is for a
GPU.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from examples import HEADS, Example, error, small_blocks  # noqa: F401 (small_blocks)
from torch import Tensor

from deftune import IGNORE_INDEX, token_stats
from deftune.losses import triton_rows
from deftune.losses.chunks import Chunk, Gradients, Supervised
from deftune.losses.triton_backend import TritonBackend
from deftune.objectives.stats import from_columns
from tolerances import assert_close, assert_near, tolerance

every_head = pytest.mark.parametrize(
    "options",
    [pytest.param(HEADS[name], id=name, marks=() if name in ("plain", "all") else pytest.mark.slow) for name in HEADS],
)


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


@pytest.mark.parametrize(
    "width, vocab_size",
    [
        (1, 41),
        (600, 41),
        (3, 70000),
        *(pytest.param(*size, marks=pytest.mark.slow) for size in ((20, 41), (3, 1 << 16))),
    ],
)
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


@pytest.mark.parametrize("k", [1, 20, 100, *(pytest.param(k, marks=pytest.mark.slow) for k in (5, 33))])
@pytest.mark.parametrize(
    "options",
    [HEADS["bias"], *(pytest.param(HEADS[name], marks=pytest.mark.slow) for name in ("plain", "scale"))],
    ids=["bias", "plain", "scale"],
)
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
    example = Example({}, 3, 1500, 20)  # 94 tiles, of which 24 have one of the likeliest at most
    example.head.weight[300:340] *= spread
    example.head.weight[1490:] *= spread
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
