"""`linear_loss(backend="triton")` as a whole in Triton's own interpreter, on the CPU, against float64 logits."""

import math
from itertools import product

import pytest
import torch
from examples import assert_both, both, error, sample, small_blocks, some_of  # noqa: F401 (small_blocks)

import deftune
from battery import CONTEXT, HalfDeft
from deftune import IGNORE_INDEX, linear_loss, linear_token_stats, token_stats
from deftune.losses.backends import BACKENDS
from deftune.losses.compiled import linear_loss_op
from deftune.losses.head import Head, Slices
from deftune.losses.request import make_request
from deftune.losses.triton_backend import TritonBackend
from tolerances import assert_near, tolerance

WHOLE = "bias, softcap and scale"
SPECS = ["nll", "deft", "cayley", "eaft(k=5)", "clip", "mile", HalfDeft()]


@pytest.mark.parametrize(
    "objective, head",
    some_of([*product(SPECS, ["plain", WHOLE])], [("deft", "plain"), ("eaft(k=5)", WHOLE), ("clip", WHOLE)]),
    ids=str,
)
def test_linear_loss(monkeypatch, objective, head):
    """Three chunks, the last one ragged: 40 supervised rows in 16, 16 and 8; likeliest tokens of half as many."""
    chunk = 8 if deftune.objective(objective).top_k else 16  # the interpreter takes long over a row's likeliest
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: chunk))
    hidden, weight, targets = sample(25 * chunk // 8)
    options = {}
    if head != "plain":
        options = {"bias": torch.randn(37, generator=torch.Generator().manual_seed(7)), "logit_scale": 0.7}
        if not deftune.objective(objective).top_k:
            options["softcap"] = 6.0
    assert_both(both(hidden, weight, targets, objective, **options))


def test_a_weight_whose_rows_are_not_side_by_side():
    hidden, weight, targets = sample(20)
    inputs = [hidden.requires_grad_(), weight.T.contiguous().requires_grad_()]
    loss = linear_loss(inputs[0], inputs[1].T, targets, "deft", backend="triton")
    got = torch.autograd.grad(loss, inputs)
    _, (expected, truth) = both(hidden, weight, targets, "deft")
    assert_both([(loss.detach(), (got[0], got[1].T)), (expected, truth)])


@pytest.mark.parametrize(
    "objective, vocab_size",
    some_of([*product(["deft", "eaft(k=5)"], [700, 768, 100])], [("deft", 100), ("eaft(k=5)", 700)]),
)
def test_a_large_weight_of_another_dtype_comes_in_slices(monkeypatch, objective, vocab_size):
    """Once a chunk, to its end and back, or whole, once for both; rows beyond E's range come of the weight itself."""
    monkeypatch.setattr(TritonBackend, "first_rows", staticmethod(lambda *_: 8))
    monkeypatch.setattr(Slices, "large", 0)
    copied = []
    monkeypatch.setattr(
        Slices, "each", lambda self, each=Slices.each: (copied.append(b) or (b, w) for b, w in each(self))
    )
    hidden, weight, targets = sample(25, vocab_size, width=72)  # more than one block of a row that is made anew
    weight[7] = 0
    weight[7, 0] = -300.0
    hidden[:, 0] = 0
    for row in (4, 20):  # of the first chunk, which is begun before its rows are counted, and of a later one
        hidden[row, 0], targets[row] = 1.0, 7
    low = weight.bfloat16()
    options = [None, None, None, objective, "mean", None, 1.0, None, None, "triton", torch.float32, [True, True, False]]
    loss, d_hidden, d_weight, _ = linear_loss_op(hidden, low, targets, *options)
    begins = list(range(0, vocab_size, 256))
    # the first chunk is begun before its rows are counted: there and back; each of the two others once
    assert copied == ([0] * 6 if len(begins) == 1 else begins + begins[::-1] + begins + begins[::-1])
    assert_both([(loss, (d_hidden, d_weight)), both(hidden, low.float(), targets, objective)[1]])


@pytest.mark.parametrize(
    "objective, share, vocab_size",
    some_of(
        [*product(["nll", "deft", "eaft(k=5)"], [0.05, 0.4, 1.0], [700, 250])],
        [("deft", 0.05, 250), ("deft", 0.4, 250), ("eaft(k=5)", 0.4, 250)],
    ),
)
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
        request = make_request(
            hidden, Head(head), targets, deftune.objective(objective), context=CONTEXT, chunk_rows=16, sparse=sparse,
            dtype=torch.float32, wanted=(True, True, False),
        )  # fmt: skip
        result = BACKENDS[backend].run(request)
        found.append((result.loss, (result.gradients.hidden, result.gradients.weight), sparse.report()))
    (loss, grads, report), (expected, truth, other) = found
    assert_near(loss, expected, "fused loss", condition=10)
    # r, what is left of a sum when most is taken away, has float32's rounding of the sum
    assert all(error(a, b) <= 1e-5 for a, b in zip(grads, truth))
    for a, b in zip(report, other):
        assert abs(a - b) <= 0.05 * b + 1e-5  # equal masses may be sampled in another order


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
    hidden, weight, targets = sample(22)  # 17 of them supervised: one past a block
    stats = linear_token_stats(hidden, weight, targets, top_k=5, backend="triton")
    z = hidden.double() @ weight.double().T
    expected = token_stats(z, targets)
    for name in ("log_p", "entropy", "log_collision"):
        assert_near(getattr(stats, name), getattr(expected, name), "float32 entropy", condition=2 + 2 * z.abs().max())
    assert_near(stats.top_log_p(5), expected.top_log_p(5), "log p", condition=2 + 2 * z.abs().max())
    _, same = linear_loss(hidden, weight, targets, "eaft(k=5)", backend="triton", return_stats=True)
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
