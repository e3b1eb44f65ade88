"""`linear_loss` on the CPU: the battery against float64 logits and `token_loss`, which the oracle has tested itself.

Covered here: values, gradients, chunks, memory, autograd, bad input. The Triton kernels are in `test_triton_rows`, what
needs a GPU in `test_linear_loss_gpu`.
"""

import math
import weakref
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import deftune
import oracle as exact
from battery import CASES, CONTEXT, SETTING, Case, of_kind, sample_logits
from deftune import (
    IGNORE_INDEX,
    Context,
    linear_loss,
    linear_token_stats,
    token_loss,
    token_stats,
)
from deftune.losses.head import Head
from deftune.losses.torch_backend import TorchBackend, column_sums
from deftune.losses.triton_backend import TritonBackend
from tolerances import assert_close, assert_near, tolerance

properties = settings(deadline=None, derandomize=True, max_examples=30, database=None)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
FEW = ["nll", "deft", "cayley", "eaft(k=5)", "deft | eos(nll) | mean_one", "clip(k=1)"]
few = pytest.mark.parametrize("spec", FEW)

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 20.0},
    "bias, softcap and scale": {"bias": True, "softcap": 20.0, "logit_scale": 0.7},
}
every_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


class Result(NamedTuple):
    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


def sample(tokens=40, vocab_size=11, width=6, dtype=torch.float64, seed=0):
    """(hidden, weight, targets): logits from flat to confident, rightly and wrongly."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator) * torch.linspace(0.1, 2.5, tokens)[:, None]
    weight = torch.randn(vocab_size, width, generator=generator)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    likeliest = (hidden @ weight.T).argmax(-1)
    targets = torch.where(torch.arange(tokens) % 3 == 0, likeliest, targets)
    return hidden.to(dtype), weight.to(dtype), targets


def masked(*shape, **kwargs):
    """A sample whose tokens 1, 5, 9, ... are ignored."""
    hidden, weight, targets = sample(*shape, **kwargs)
    return hidden, weight, targets.masked_fill(torch.arange(len(targets)) % 4 == 1, IGNORE_INDEX)


def with_bias(head: dict, weight: Tensor) -> dict:
    """A head's keyword arguments, ``bias=True`` become a vector."""
    if not head.get("bias"):
        return head
    bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(7))
    return {**head, "bias": bias.to(weight.dtype)}


def logits_of(hidden, weight, bias=None, softcap=None, logit_scale=1.0):
    z = hidden @ weight.T
    z = (z if bias is None else z + bias) * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def leaves(hidden, weight, bias, dtype=None):
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]


def fused(hidden, weight, targets, objective, *, bias=None, upstream=None, context=CONTEXT, **kwargs) -> Result:
    inputs = leaves(hidden, weight, bias)
    kwargs["bias"] = inputs[2] if bias is not None else None
    loss = linear_loss(*inputs[:2], targets, objective, context=context, backend="torch", **kwargs)
    return Result(loss.detach(), *torch.autograd.grad(loss, inputs, upstream))


def reference(
    hidden, weight, targets, objective, *, bias=None, softcap=None, logit_scale=1.0, upstream=None, **kwargs
) -> Result:  # fmt: skip
    """float64 logits of the same inputs, then `token_loss`."""
    inputs = leaves(hidden, weight, bias, torch.float64)
    logits = logits_of(*inputs, softcap=softcap, logit_scale=logit_scale)
    loss = token_loss(logits, targets, objective, **{"context": CONTEXT, **kwargs})
    return Result(loss.detach(), *torch.autograd.grad(loss, inputs, upstream))


def error(actual: Tensor, expected: Tensor) -> float:
    """The relative error in norm; 0 where both are exactly 0."""
    gap, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return gap / size if size else gap


def assert_result(actual: Result, expected: Result, loss: str, gradient: str) -> None:
    assert_near(actual.loss, expected.loss, loss, condition=expected.loss.abs().clamp(min=1), what="loss")
    for name in ("hidden", "weight", "bias"):
        got, want = getattr(actual, name), getattr(expected, name)
        assert (got is None) == (want is None)
        if got is not None:
            assert got.shape == want.shape
            assert error(got, want) <= tolerance(gradient), f"d {name}: {error(got, want):.2e}"


def chunk_rows(patch: pytest.MonkeyPatch, rows: int) -> None:
    patch.setattr(TorchBackend, "rows", lambda self, total, bound: rows)


# --- values and gradients ---------------------------------------------------------------------------------------------


@every_head
@every_case
def test_float64_is_token_loss_on_the_logits(case: Case, head):
    """Every objective under every reduction, with ignored tokens, and with a random upstream vector for none."""
    hidden, weight, targets = masked()
    head = with_bias(head, weight)
    upstream = torch.randn(len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for kwargs in ({}, {"reduction": "sum"}, {"reduction": "none", "upstream": upstream}):
        actual = fused(hidden, weight, targets, case.objective, **head, **kwargs)
        expected = reference(hidden, weight, targets, case.objective, **head, **kwargs)
        assert_result(actual, expected, "fused float64", "fused float64")


@every_case
def test_weights_are_constants_per_token(case: Case):
    hidden, weight, targets = masked()
    weights = torch.rand(len(targets), generator=torch.Generator().manual_seed(4)) * 2
    weights[targets == IGNORE_INDEX] = math.nan  # not read
    weights[2] = 0
    upstream = torch.randn(len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for kwargs in ({}, {"reduction": "sum"}, {"reduction": "none", "upstream": upstream}):
        actual, expected = (
            f(hidden, weight, targets, case.objective, weights=weights, **kwargs) for f in (fused, reference)
        )
        assert_result(actual, expected, "fused float64", "fused float64")


VOCABULARIES = [
    1,  # nothing to learn
    7,
    1000,
    32000,  # Llama-2's
    49152,  # SmolLM2's
    128256,  # Llama-3's
    152064,  # Qwen2.5's, padded
    262144,  # Gemma-3's
]
SPECS_OF_VOCABULARIES = [(spec, size) for size in VOCABULARIES for spec in (FEW if size <= 32000 else ["eaft(k=5)"])]


@pytest.mark.parametrize("head", [HEADS["plain"], HEADS["bias, softcap and scale"]], ids=["plain", "all of a head"])
@pytest.mark.parametrize(("spec", "vocab_size"), SPECS_OF_VOCABULARIES)
def test_float32_over_vocabularies(spec, vocab_size, head):
    """float32 against float64 on the same inputs."""
    hidden, weight, targets = masked(37 if vocab_size <= 32000 else 24, vocab_size, 16, dtype=torch.float32)
    hidden = hidden / 4
    head = with_bias(head, weight)
    actual, expected = (f(hidden, weight, targets, spec, **head) for f in (fused, reference))
    assert actual.loss.dtype == actual.hidden.dtype == actual.weight.dtype == torch.float32
    assert_result(actual, expected, "fused loss", "fused gradient")


@pytest.mark.parametrize("vocab_size", [49152, 152064, 262144])
def test_float32_for_few_rows_of_a_large_vocabulary(vocab_size):
    """Three rows: where a BLAS adds up the vocabulary one class after the other, and would lose digits to it."""
    hidden, weight, targets = sample(3, vocab_size, 8, dtype=torch.float32)
    actual, expected = (f(hidden / 3, weight, targets, "nll") for f in (fused, reference))
    assert_result(actual, expected, "fused loss", "fused gradient")


@every_case
def test_float32_over_the_battery(case: Case):
    hidden, weight, targets = masked(30, 500, 12, dtype=torch.float32, seed=1)
    actual, expected = (f(hidden, weight, targets, case.objective) for f in (fused, reference))
    assert_result(actual, expected, "fused loss", "fused gradient")


@few
def test_none_in_float32_with_a_random_upstream_vector(spec):
    hidden, weight, targets = masked(37, 1000, 32, dtype=torch.float32)
    kwargs = {"reduction": "none", "upstream": torch.randn(37, generator=torch.Generator().manual_seed(2))}
    actual = fused(hidden / 6, weight, targets, spec, **kwargs)
    kwargs["upstream"] = kwargs["upstream"].double()
    assert_result(actual, reference(hidden / 6, weight, targets, spec, **kwargs), "fused loss", "fused gradient")


def test_none_has_the_targets_shape_and_zeros_at_ignored_tokens():
    hidden, weight, targets = masked(24)
    losses = linear_loss(hidden.view(2, 3, 4, 6), weight, targets.view(2, 3, 4), "nll", reduction="none")
    assert losses.shape == (2, 3, 4) and not losses.view(-1)[targets == IGNORE_INDEX].any()
    assert losses.dtype == torch.float64 and losses.count_nonzero() == (targets != IGNORE_INDEX).sum()


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 29, 30, 1000])
@few
def test_chunks_change_nothing(monkeypatch, spec, rows):
    """30 supervised rows: one at a time, even, ragged, all but one, all, more than there are."""
    hidden, weight, targets = masked()
    assert (targets != IGNORE_INDEX).sum() == 30
    head = with_bias(HEADS["bias, softcap and scale"], weight)
    upstream = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    chunk_rows(monkeypatch, rows)
    for kwargs in ({}, {"reduction": "none", "upstream": upstream}):
        actual, expected = (f(hidden, weight, targets, spec, **head, **kwargs) for f in (fused, reference))
        assert_result(actual, expected, "split", "split")


@properties
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.integers(1, 13),
    st.sampled_from(of_kind("local")),
    st.sampled_from(list(HEADS.values())),
)
def test_any_mask_in_any_chunks(kept, rows, case, head):
    """Ignored rows, NaN in them, are not read and get exactly 0; the others do not notice."""
    hidden, weight, targets = sample(len(kept))
    kept = torch.tensor(kept)
    poisoned = torch.where(kept[:, None], hidden, math.nan)
    head = with_bias(head, weight)
    with pytest.MonkeyPatch.context() as patch:
        chunk_rows(patch, rows)
        actual = fused(
            poisoned, weight, targets.where(kept, torch.tensor(IGNORE_INDEX)), case.objective, reduction="sum", **head
        )
    alone = reference(hidden[kept], weight, targets[kept], case.objective, reduction="sum", **head)
    assert torch.equal(actual.hidden[~kept], torch.zeros_like(actual.hidden[~kept]))
    assert_result(actual._replace(hidden=actual.hidden[kept]), alone, "fused float64", "fused float64")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_s_gradient_does_not_degrade_with_the_chunks(monkeypatch, dtype):
    """1 to 1024 chunks: dW is added up in float32, whatever its own dtype."""
    hidden, weight, targets = sample(1024, 50, 16, dtype=dtype)
    expected = reference(hidden, weight, targets, "deft", reduction="sum").weight
    errors = {}
    for rows in (1024, 64, 8, 1):
        chunk_rows(monkeypatch, rows)
        errors[rows] = error(fused(hidden, weight, targets, "deft", reduction="sum").weight, expected)
    limit = tolerance("fused gradient") / 10 if dtype == torch.float32 else 1.01 * errors[1024]
    assert max(errors.values()) <= limit, errors


# --- nothing to learn from, and odd shapes ----------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("leading", [(4,), (2, 3), (0,), (3, 0)])
def test_nothing_supervised_is_zero_and_connected(case: Case, leading):
    hidden, weight, bias = torch.randn(*leading, 3), torch.randn(5, 3), torch.randn(5)
    targets = torch.full(leading, IGNORE_INDEX)
    calls = [{"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"}]
    if case.kind != "step":
        calls.append({"num_items": 7, "context": replace(CONTEXT, step="deferred") if case.kind == "mass" else CONTEXT})
    for kwargs in calls:
        inputs = leaves(hidden, weight, bias)
        loss = linear_loss(*inputs[:2], targets, case.objective, bias=inputs[2], **{"context": CONTEXT, **kwargs})
        assert loss.shape == (torch.Size(leading) if kwargs.get("reduction") == "none" else ())
        assert not loss.any() and loss.requires_grad
        loss.sum().backward()
        for leaf in inputs:
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@every_case
def test_one_class(case: Case):
    """V = 1: p = 1, nothing to learn, nothing to divide by."""
    hidden, weight = torch.randn(3, 4), torch.randn(1, 4)
    result = fused(hidden, weight, torch.zeros(3, dtype=torch.long), case.objective, bias=torch.randn(1))
    assert result.loss.item() == 0
    for grad in result[1:]:
        assert torch.equal(grad, torch.zeros_like(grad))


@few
def test_int32_targets(spec):
    hidden, weight, targets = masked()
    for long, int32 in zip(fused(hidden, weight, targets, spec), fused(hidden, weight, targets.int(), spec)):
        assert (long is None and int32 is None) or torch.equal(long, int32)


@pytest.mark.parametrize("how", ["leading", "shifted", "transposed", "strided", "weight view", "weight transposed"])
@few
def test_gradients_reach_the_tensor_behind_a_view(spec, how):
    """What was sliced away gets exactly 0."""
    hidden, weight, targets = masked(24)
    expected = reference(hidden, weight, targets, spec)
    whole_hidden, whole_weight = hidden.clone(), weight.clone()
    into_hidden = into_weight = lambda x: x
    if how == "leading":
        whole_hidden, into_hidden = hidden.view(2, 3, 4, 6).clone(), lambda x: x
    elif how == "shifted":
        whole_hidden = torch.cat([hidden.view(4, 6, 6), hidden.new_full((4, 1, 6), 5.0)], 1)
        into_hidden = lambda x: x[:, :-1]  # noqa: E731
    elif how == "transposed":
        whole_hidden, into_hidden = hidden.T.contiguous(), lambda x: x.T
    elif how == "strided":
        whole_hidden, into_hidden = hidden.repeat_interleave(2, 1), lambda x: x[:, ::2]
    elif how == "weight view":
        whole_weight, into_weight = torch.cat([weight, weight], 1), lambda x: x[:, :6]
    else:
        whole_weight, into_weight = weight.T.contiguous(), lambda x: x.T
    whole_hidden.requires_grad_()
    whole_weight.requires_grad_()
    view = into_hidden(whole_hidden)
    loss = linear_loss(view, into_weight(whole_weight), targets.view(view.shape[:-1]), spec, context=CONTEXT)
    loss.backward()
    grad_hidden = into_hidden(whole_hidden.grad).reshape(hidden.shape)
    grad_weight = into_weight(whole_weight.grad)
    assert_result(Result(loss.detach(), grad_hidden, grad_weight), expected, "fused float64", "fused float64")
    for grad, inside in ((whole_hidden.grad, grad_hidden), (whole_weight.grad, grad_weight)):
        assert grad.count_nonzero() == inside.count_nonzero()


@few
def test_a_tied_head(spec):
    """One parameter, embedding and head: its gradients add up."""
    _, weight, targets = masked()
    ids = torch.arange(40) % 11
    grads = []
    for loss_of in (
        lambda hidden, head: linear_loss(hidden, head, targets, spec, context=CONTEXT),
        lambda hidden, head: token_loss(hidden @ head.T, targets, spec, context=CONTEXT),
    ):
        embedding = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
        loss_of(torch.tanh(embedding(ids)), embedding.weight).backward()
        grads.append(embedding.weight.grad)
    assert error(*grads) <= tolerance("fused float64")


def test_the_caller_s_tensors_are_left_alone():
    hidden, weight, targets = masked(dtype=torch.float32)
    bias, weights = torch.randn(11), torch.rand(40)
    given_tensors = (hidden, weight, targets, bias, weights)
    before = [x.clone() for x in given_tensors]
    for reduction in ("mean", "none"):
        inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
        linear_loss(
            *inputs[:2], targets, "deft", bias=bias, weights=weights, softcap=5.0, logit_scale=2.0, reduction=reduction
        ).sum().backward()
    for now, then in zip(given_tensors, before):
        assert torch.equal(now, then)


# --- what is computed, and what is kept -------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The shapes of the tensors that operations made, views and the tensors known before left out."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.shapes.append((tensor.shape, tensor.dtype))
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)
        return out

    def made(self, *shape: int) -> bool:
        return any(s == torch.Size(shape) or s == torch.Size(shape[::-1]) for s, _ in self.shapes)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@few
def test_never_a_tensor_of_all_tokens_times_the_vocabulary(monkeypatch, spec, reduction):
    tokens, vocab_size, width, rows = 600, 301, 4, 16
    hidden, weight, targets = sample(tokens, vocab_size, width, dtype=torch.float32)
    chunk_rows(monkeypatch, rows)
    inputs = leaves(hidden, weight, None)
    with Allocations(*inputs, targets) as seen:
        linear_loss(*inputs, targets, spec, context=CONTEXT, reduction=reduction).sum().backward()
    assert seen.made(vocab_size, width)  # it sees the head's gradient, so that it would see the logits
    assert seen.largest <= max(rows * vocab_size, vocab_size * width, tokens * width, tokens * 5)


def test_the_default_chunk_is_bounded():
    """A vocabulary of 262144: chunks of at most 48 MiB of logits, whatever the number of tokens."""
    hidden, weight, targets = sample(150, 262144, 4, dtype=torch.float32)
    inputs = leaves(hidden, weight, None)
    with Allocations(*inputs, targets) as seen:
        linear_loss(*inputs, targets, "nll").backward()
    assert seen.largest * 4 <= 48 << 20 < 150 * 262144 * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden and bias"])
@few
def test_only_what_requires_a_gradient_gets_one(spec, trained, reduction):
    """A frozen head costs no [V, D] tensor, frozen hidden states no [N, D] one."""
    tokens, vocab_size, width = 40, 301, 6
    hidden, weight, targets = masked(tokens, vocab_size, width, dtype=torch.float32)
    bias = torch.zeros(vocab_size)
    expected = reference(hidden, weight, targets, spec, bias=bias, reduction="mean")._asdict()
    inputs = {"hidden": hidden, "weight": weight, "bias": bias}
    for name in trained.split(" and "):
        inputs[name].requires_grad_()
    with Allocations(hidden, weight, bias, targets) as seen:
        loss = linear_loss(hidden, weight, targets, spec, bias=bias, reduction=reduction, context=CONTEXT)
        (loss if reduction == "mean" else loss.sum() / (targets != IGNORE_INDEX).sum()).backward()
    for name, leaf in inputs.items():
        if name in trained:
            assert error(leaf.grad, expected[name]) <= tolerance("fused gradient")
        else:
            assert leaf.grad is None
    assert seen.made(vocab_size, width) == ("weight" in trained)
    assert seen.made(tokens, width) == ("hidden" in trained)


@few
def test_without_gradients(spec):
    """Nothing requires one, no_grad, inference: the value alone, and the work of the value alone."""
    hidden, weight, targets = masked(40, 301, 6)
    expected = fused(hidden, weight, targets, spec).loss
    assert_near(linear_loss(hidden, weight, targets, spec, context=CONTEXT), expected, "split")
    with torch.inference_mode():
        assert_near(linear_loss(hidden, weight, targets, spec, context=CONTEXT), expected, "split")
    inputs = leaves(hidden, weight, None)
    for reduction in ("mean", "none"):
        with torch.no_grad(), Allocations(*inputs, targets) as seen:
            loss = linear_loss(*inputs, targets, spec, reduction=reduction, context=CONTEXT)
        assert not loss.requires_grad
        assert not seen.made(301, 6) and not seen.made(40, 6), "gradients were made under no_grad"


# --- autograd ---------------------------------------------------------------------------------------------------------


@few
def test_backward_twice_and_two_losses(spec):
    hidden, weight, targets = masked()
    bias = torch.randn(11, dtype=torch.float64)
    expected, other = (reference(hidden, weight, targets, o, bias=bias) for o in (spec, "nll"))
    for reduction in ("mean", "none"):
        inputs = leaves(hidden, weight, bias)
        loss = linear_loss(*inputs[:2], targets, spec, bias=inputs[2], context=CONTEXT, reduction=reduction)
        loss = loss if reduction == "mean" else loss.sum() / 30
        for _ in range(3):
            grads = torch.autograd.grad(loss, inputs, retain_graph=True)
            assert_result(Result(expected.loss, *grads), expected, "fused float64", "fused float64")
    inputs = leaves(hidden, weight, bias)
    first, second = (linear_loss(*inputs[:2], targets, o, bias=inputs[2], context=CONTEXT) for o in (spec, "nll"))
    (first + 3 * second).backward()
    both = [a + 3 * b for a, b in zip(expected, other)]
    assert_result(Result(both[0], *(x.grad for x in inputs)), Result(*both), "fused float64", "fused float64")


@pytest.mark.parametrize("factor", [3.0, -0.5, 0.0])
@few
def test_the_upstream_scales_the_gradients(spec, factor):
    hidden, weight, targets = masked()
    once = fused(hidden, weight, targets, spec)
    scaled = fused(hidden, weight, targets, spec, upstream=torch.tensor(factor, dtype=torch.float64))
    for got, want in zip(scaled[1:3], once[1:3]):
        assert error(got, factor * want) <= tolerance("split")


@pytest.mark.parametrize("spec", ["deft", "mile"])
def test_the_upstream_is_not_rounded_to_the_gradient_s_dtype(spec):
    """1.7 in bfloat16 would be 1.703: every gradient 0.2% too large. The same for a mass of the step."""
    hidden, weight, targets = masked(64, 200, 32, dtype=torch.bfloat16)
    want = reference(hidden, weight, targets, spec, upstream=torch.tensor(1.7, dtype=torch.float64))
    got = fused(hidden, weight, targets, spec, upstream=torch.tensor(1.7))
    for name in ("hidden", "weight"):
        ours, theirs = getattr(got, name), getattr(want, name).bfloat16()
        # rounded once, from float32: but for ties it is the float64 gradient's rounding
        # (d hidden is in bfloat16 already when the upstream arrives, and is rounded again)
        assert (ours == theirs).double().mean() > {"hidden": 0.75, "weight": 0.97}[name], name


@pytest.mark.parametrize("made", [
    lambda h, w, y: linear_loss(h, w, y),
    lambda h, w, y: linear_loss(h, w, y, reduction="none").sum(),
    lambda h, w, y: linear_token_stats(h, w, y).log_p.sum(),
])  # fmt: skip
def test_hidden_states_are_freed_by_the_backward_while_the_loss_is_held(made):
    leaf, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    hidden = leaf * 1.0
    there = weakref.ref(hidden)
    loss = made(hidden, weight, torch.arange(6))
    del hidden
    assert there() is not None
    loss.backward()
    assert there() is None and leaf.grad is not None


def test_a_loss_used_twice():
    hidden, weight, targets = masked()
    once = fused(hidden, weight, targets, "deft")
    inputs = leaves(hidden, weight, None)
    loss = linear_loss(*inputs, targets, "deft")
    (loss**2 + loss).backward()
    for leaf, want in zip(inputs, once[1:3]):
        assert error(leaf.grad, (2 * once.loss + 1) * want) <= tolerance("fused float64")


def test_a_shut_gate_is_shut_whatever_the_upstream_says():
    """An overflowed loss scale times a gate of 0 is 0: NaN must not reach the parameters."""
    hidden, weight = torch.eye(2, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    bias = torch.tensor([-math.inf, 0.0, 0.0, 0.0], dtype=torch.float64)
    upstream = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    result = fused(hidden, weight, torch.tensor([0, 1]), "linear", bias=bias, reduction="none", upstream=upstream)
    assert not result.hidden[0].any() and result.hidden[1].any()
    assert all(grad.isfinite().all() for grad in result[1:])


def test_a_second_derivative_is_refused():
    """A gradient penalty must not become a constant unnoticed."""
    hidden, weight, targets = masked()
    for reduction in ("mean", "none"):
        inputs = leaves(hidden, weight, None)
        loss = linear_loss(*inputs, targets, "deft", reduction=reduction).sum()
        with pytest.raises(RuntimeError, match=r"first derivative only.*do not use create_graph=True"):
            (grad,) = torch.autograd.grad(loss, inputs[:1], create_graph=True)
            (inputs[0].sum() + grad.square().sum()).backward()


def test_a_second_derivative_of_the_compiled_operator_is_refused():
    """`aot_eager` cannot differentiate twice itself; with `eager` autograd sees the operator."""
    hidden, weight, targets = masked(dtype=torch.float32)
    inputs = leaves(hidden, weight, None)
    torch._dynamo.reset()
    loss = torch.compile(lambda x, w: linear_loss(x, w, targets, "deft"), backend="eager")(*inputs)
    (grad,) = torch.autograd.grad(loss, inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        grad.square().sum().backward()


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))]
)
def test_transforms_of_torch_func_are_refused(transform):
    hidden, weight, targets = sample(5)

    def loss(x):
        return linear_loss(x.view(-1, x.shape[-1]), weight, targets[: x.numel() // x.shape[-1]])

    with pytest.raises(ValueError, match=r"torch\.func .* cannot transform the fused loss.*deftune\.token_loss"):
        transform(loss)(hidden)


@pytest.mark.parametrize("top_k", [-1, 2.0])
def test_a_number_of_likeliest_tokens_is_a_count(top_k):
    with pytest.raises(ValueError, match=rf"top_k: a whole number, at least 0, got {top_k}"):
        linear_token_stats(**GOOD, top_k=top_k)


def test_a_change_of_the_inputs_before_the_backward_is_noticed():
    """The gradients are those of the forward's values; autograd's own check says so where they changed."""
    hidden, weight, targets = masked()
    for reduction in ("mean", "none"):
        inputs = leaves(hidden, weight, None)
        loss = linear_loss(*inputs, targets, "deft", reduction=reduction).sum()
        with torch.no_grad():
            inputs[1].mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(backend, reduction):
    hidden, weight, targets = masked(dtype=torch.float32)

    def step(x, w):
        return 2 * linear_loss(x * 0.5, w, targets, "deft | eos(nll)", context=CONTEXT, reduction=reduction).sum()

    plain, compiled = leaves(hidden, weight, None), leaves(hidden, weight, None)
    loss = step(*plain)
    loss.backward()
    torch._dynamo.reset()
    again = torch.compile(step, backend=backend)(*compiled)
    again.backward()
    assert_close(again, loss, "float32 gradient")
    for a, b in zip(compiled, plain):
        assert error(a.grad, b.grad) <= tolerance("float32 gradient")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@few
def test_under_gradient_checkpointing(spec, reduction):
    hidden, weight, targets = masked()
    expected = reference(hidden, weight, targets, spec, reduction="sum" if reduction == "none" else reduction)
    inputs = leaves(hidden, weight, None)

    def step(x, w):
        return linear_loss(torch.tanh(x).atanh(), w, targets, spec, context=CONTEXT, reduction=reduction).sum()

    loss = checkpoint(step, *inputs, use_reentrant=False)
    loss.backward()
    for leaf, want in zip(inputs, expected[1:3]):
        assert error(leaf.grad, want) <= tolerance("fused float64")


# --- the optimizer step and its parts ---------------------------------------------------------------------------------


def ragged(sequences: int = 32, length: int = 6):
    """(hidden [32, 6, D], weight, targets): sequences of 0 to 6 supervised tokens each."""
    hidden, weight, targets = sample(sequences * length, 7)
    lengths = torch.arange(sequences) * 5 % (length + 1)
    targets = targets.view(sequences, length).masked_fill(torch.arange(length) >= lengths[:, None], IGNORE_INDEX)
    order = torch.randperm(sequences * length, generator=torch.Generator().manual_seed(8))
    return hidden[order].view(sequences, length, -1), weight, targets


def accumulated(hidden, weight, targets, objective, size, **kwargs) -> Result:
    parts = [
        fused(hidden[i : i + size], weight, targets[i : i + size], objective, **kwargs)
        for i in range(0, len(hidden), size)
    ]
    return Result(
        sum(part.loss for part in parts),
        torch.cat([part.hidden for part in parts]),
        sum(part.weight for part in parts),
    )


@every_case
@pytest.mark.parametrize("size", [32, 16, 5, 1])
def test_accumulation_is_the_whole_step(case: Case, size):
    """1 x 32, 2 x 16, 7 micro-batches with a partial last one, 32 x 1: the gradient of the whole step's logits."""
    hidden, weight, targets = ragged()
    num_items = int((targets != IGNORE_INDEX).sum())
    whole = reference(hidden, weight, targets, case.objective, num_items=num_items)
    context = CONTEXT
    if case.kind != "local" and size < 32:
        top_k = case.objective.top_k
        pre_pass = [
            linear_token_stats(hidden[i : i + size], weight, targets[i : i + size], top_k=top_k)
            for i in range(0, 32, size)
        ]
        context = replace(CONTEXT, step=deftune.step_stats(case.objective, pre_pass, context=CONTEXT))
    got = accumulated(hidden, weight, targets, case.objective, size, num_items=num_items, context=context)
    assert_result(got, whole, "split", "split")


@pytest.mark.parametrize("case", of_kind("mass"), ids=str)
def test_deferred_mass_without_a_second_pass(case: Case):
    """Micro-batches unnormalised, one rescaling by num_items / mass, the mass from the same calls' statistics."""
    hidden, weight, targets = ragged()
    num_items = int((targets != IGNORE_INDEX).sum())
    whole = reference(hidden, weight, targets, case.objective)
    deferred = replace(CONTEXT, step="deferred")
    leaf, mass = weight.clone().requires_grad_(), 0.0
    for i in range(0, 32, 9):
        loss, stats = linear_loss(
            hidden[i : i + 9],
            leaf,
            targets[i : i + 9],
            case.objective,
            num_items=num_items,
            context=deferred,
            return_stats=True,
        )
        loss.backward()
        mass += case.objective.mass(stats, deferred).sum()
    assert error(leaf.grad * num_items / mass, whole.weight) <= tolerance("split")


@pytest.mark.parametrize("case", of_kind("mass", "step"), ids=str)
def test_a_part_of_the_step_is_refused(case: Case):
    hidden, weight, targets = masked(12)
    context = Context(progress=0.15, special_ids=(1, 3))
    text = r"depends on the whole optimizer step.*holds 9 of its 20 .*step_stats"
    with pytest.raises(ValueError, match=text) as refused:
        linear_loss(hidden, weight, targets, case.objective, num_items=20, context=context)
    assert ("deferred" in str(refused.value)) == (case.kind == "mass")
    assert f"`{case.objective}`" in str(refused.value)
    linear_loss(hidden, weight, targets, case.objective, num_items=9, context=context)  # the whole of it is not


def test_num_items():
    hidden, weight, targets = masked(12)
    total = fused(hidden, weight, targets, "deft", reduction="sum")
    for num_items in (1000, 1000.0, torch.tensor(1000), torch.tensor([1000.0])):
        part = fused(hidden, weight, targets, "deft", num_items=num_items)
        assert part.loss.shape == ()
        for got, want in zip(part[:3], total[:3]):
            assert error(got, want / 1000) <= tolerance("split")


# --- statistics -------------------------------------------------------------------------------------------------------


@every_head
@pytest.mark.parametrize("rows", [7, 1000])
def test_statistics_are_those_of_the_logits(monkeypatch, head, rows):
    hidden, weight, targets = masked()
    head = with_bias(head, weight)
    expected = token_stats(logits_of(hidden, weight, **head), targets)
    chunk_rows(monkeypatch, rows)
    _, fused_stats = linear_loss(hidden, weight, targets, "eaft(k=5)", **head, return_stats=True)
    _, none_stats = linear_loss(hidden, weight, targets, "eaft(k=5)", reduction="none", **head, return_stats=True)
    plain_stats = linear_token_stats(hidden, weight, targets, top_k=5, **head)
    for stats in (fused_stats, none_stats, plain_stats):
        assert torch.equal(stats.targets, expected.targets) and stats.vocab_size == 11 and len(stats) == 30
        for name in ("log_p", "entropy", "log_collision"):
            assert_near(getattr(stats, name), getattr(expected, name), "fused float64", what=name)
        assert_near(stats.top_log_p(5), expected.top_log_p(5), "fused float64")
        assert_near(stats.top_log_p(3), expected.top_log_p(3), "fused float64")
        with pytest.raises(ValueError, match=r"the top 6 were asked for.*top_k=5"):
            stats.top_log_p(6)


def test_more_likeliest_tokens_than_classes():
    hidden, weight, targets = masked()
    stats = linear_token_stats(hidden, weight, targets, top_k=50)
    assert stats.top_log_p(50).shape == (30, 11)
    assert_near(stats.top_log_p(50).exp().sum(-1), torch.ones(30, dtype=torch.float64), "fused float64")
    with pytest.raises(ValueError, match=r"hold no likeliest tokens"):
        linear_token_stats(hidden, weight, targets).top_log_p(5)


def test_the_loss_s_statistics_are_detached():
    hidden, weight, targets = masked()
    loss, stats = linear_loss(*leaves(hidden, weight, None), targets, "eaft(k=5)", return_stats=True)
    assert loss.requires_grad
    assert not any(x.requires_grad for x in (stats.log_p, stats.entropy, stats.log_collision, stats.top_log_p(5)))


@every_head
@pytest.mark.parametrize("rows", [7, 1000])
@pytest.mark.parametrize("through", ["log_p", "entropy", "both"])
def test_gradients_through_the_statistics(monkeypatch, head, rows, through):
    """Any upstream vector, against autograd through float64 logits."""
    hidden, weight, targets = masked()
    head = dict(with_bias(head, weight))
    bias = head.pop("bias", None)
    chunk_rows(monkeypatch, rows)
    generator = torch.Generator().manual_seed(2)
    upstream = {name: torch.randn(30, dtype=torch.float64, generator=generator) for name in ("log_p", "entropy")}
    wanted = [name for name in upstream if through in (name, "both")]

    inputs = leaves(hidden, weight, bias)
    stats = linear_token_stats(*inputs[:2], targets, bias=inputs[2] if bias is not None else None, **head)
    assert not stats.log_collision.requires_grad
    grads = torch.autograd.grad(sum((getattr(stats, name) * upstream[name]).sum() for name in wanted), inputs)

    same = leaves(hidden, weight, bias)
    kept = targets != IGNORE_INDEX
    log_P = F.log_softmax(logits_of(*same, **head)[kept], -1)
    columns = {"log_p": log_P.gather(-1, targets[kept, None])[:, 0], "entropy": -(log_P.exp() * log_P).sum(-1)}
    expected = torch.autograd.grad(sum((columns[name] * upstream[name]).sum() for name in wanted), same)
    for got, want in zip(grads, expected):
        assert error(got, want) <= tolerance("fused float64")


@every_case
def test_an_objective_on_differentiable_statistics_is_the_fused_loss(case: Case):
    hidden, weight, targets = masked()
    expected = fused(hidden, weight, targets, case.objective)
    inputs = leaves(hidden, weight, None)
    stats = linear_token_stats(*inputs, targets, top_k=case.objective.top_k)
    loss = case.objective.loss(stats, CONTEXT).mean()
    loss.backward()
    actual = Result(loss.detach(), *(x.grad for x in inputs))
    assert_result(actual, expected, "fused float64", "fused float64")


def test_statistics_of_nothing():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    targets = torch.full((3,), IGNORE_INDEX)
    stats = linear_token_stats(hidden, weight, targets, top_k=2)
    assert len(stats) == 0 and stats.top_log_p(2).shape == (0, 2)
    (stats.log_p.sum() + stats.entropy.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


# --- confident and impossible tokens ----------------------------------------------------------------------------------
# The head is the identity here: the hidden states are the logits, and d hidden is gate x error itself.


def confident(margin: float) -> tuple[Tensor, Tensor]:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(5))
    targets = torch.arange(8) * 5
    logits[torch.arange(8), targets] = logits.amax(-1) + margin
    return logits, targets


@pytest.mark.parametrize("margin", [10.0, 20.0])
@every_case
def test_confident_tokens_keep_their_digits(case: Case, margin):
    """1 - p is 1e-3 to 1e-8 here: p - 1 in float32 would have lost most of it."""
    logits, targets = confident(margin)
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    result = fused(logits, torch.eye(50), targets, case.objective, reduction="sum")
    at = (torch.arange(8), targets)
    assert_close(result.hidden[at], expected.gradient[at], "confident gradient")


@pytest.mark.parametrize("margin", [10.0, 20.0])
def test_confident_tokens_are_at_least_as_good_as_torch(margin):
    logits, targets = confident(margin)
    truth = exact.answer(exact.nll, exact.rows(logits, targets), SETTING).gradient
    ours = fused(logits, torch.eye(50), targets, "nll", reduction="sum").hidden
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf @ torch.eye(50), targets, reduction="sum").backward()
    at = (torch.arange(8), targets)
    error_ours, error_torch = ((grad[at].double() / truth[at] - 1).abs() for grad in (ours, leaf.grad))
    assert (error_ours <= error_torch + 2**-23).all()  # an ulp: gate, 1 - p and their product are each rounded
    assert error_ours.max() <= error_torch.max()


@every_case
def test_impossible_tokens_have_finite_gradients(case: Case):
    """log p = -80, -1e4 and -inf among ordinary tokens: right where finite, infinite only where the maths is."""
    logits, targets = sample_logits(12, 6)
    targets = torch.where(targets == 5, 0, targets)
    targets[2] = 5
    bias = torch.zeros(6, dtype=torch.float64)
    bias[5] = -math.inf  # a class that cannot be: a column of -inf, and one token that asks for it
    logits[7, targets[7]] -= 1e4
    logits[8, targets[8]] -= 80
    expected = exact.answer(case.oracle, exact.rows(logits + bias, targets), SETTING)
    ones = torch.ones(12, dtype=torch.float64)
    result = fused(
        logits, torch.eye(6, dtype=torch.float64), targets, case.objective, bias=bias, reduction="none", upstream=ones
    )
    assert torch.equal(result.loss.isinf(), expected.value.isinf())
    assert_close(result.loss, expected.value, "closed form", condition=100, what="loss")
    assert_near(result.hidden, expected.gradient, "closed form", what="d hidden")
    assert_near(result.bias, expected.gradient.sum(0), "closed form", condition=10, what="d bias")
    mean = fused(logits, torch.eye(6, dtype=torch.float64), targets, case.objective, bias=bias)
    assert_near(mean.hidden, expected.gradient / 12, "closed form", what="d hidden of the mean")
    assert all(grad.isfinite().all() for grad in mean[1:])


@pytest.mark.parametrize("case", of_kind("local", "mass"), ids=str)
def test_an_offset_changes_neither_loss_nor_gradient(case: Case):
    logits, targets = sample_logits(20, 12, torch.float32)
    logits = (logits * 1024).round() / 1024
    weight = torch.eye(12)
    plain = fused(logits, weight, targets, case.objective, bias=torch.zeros(12), reduction="sum")
    moved = fused(logits, weight, targets, case.objective, bias=torch.full((12,), 1e4), reduction="sum")
    assert_near(moved.loss, plain.loss, "offset", condition=1 + plain.loss.double())
    assert_near(moved.hidden, plain.hidden, "offset")


def test_a_weight_of_zero_silences_an_impossible_token():
    """0 * inf is a token left out, not NaN."""
    hidden, weight = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.eye(2)
    bias = torch.tensor([-math.inf, 0.0])
    result = fused(
        hidden, weight, torch.tensor([0, 1]), "nll", bias=bias, weights=torch.tensor([0.0, 1.0]), reduction="sum"
    )
    assert result.loss.item() == 0 and not result.hidden.any() and result.hidden.isfinite().all()


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@few
def test_half_precision_is_no_worse_than_torch(spec, dtype):
    """Against float64 on the same inputs; torch's own way is half-precision logits, widened."""
    hidden, weight, targets = masked(64, 200, 32, dtype=dtype)
    bias = torch.randn(200, generator=torch.Generator().manual_seed(7)).to(dtype)
    expected = reference(hidden, weight, targets, spec, bias=bias)
    ours = fused(hidden, weight, targets, spec, bias=bias)
    assert ours.loss.dtype == torch.float32
    assert all(grad.dtype == dtype for grad in ours[1:])
    inputs = leaves(hidden, weight, bias)
    loss = token_loss(logits_of(*inputs).float(), targets, spec, context=CONTEXT)
    eager = Result(loss.detach(), *torch.autograd.grad(loss, inputs))
    for got, theirs, want in zip(ours, eager, expected):
        assert error(got, want) <= error(theirs, want)


@few
def test_autocast(spec):
    """Master weights in float32, autocast to bfloat16: no worse than a linear layer under it, gradients in float32."""
    hidden, weight, targets = masked(64, 200, 32, dtype=torch.float32)
    expected = reference(hidden, weight, targets, spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = fused(hidden, weight, targets, spec)
        inputs = leaves(hidden, weight, None)
        loss = token_loss(F.linear(*inputs), targets, spec, context=CONTEXT)
        per_token = fused(hidden, weight, targets, spec, reduction="none", upstream=torch.ones(64) / 48)
    eager = Result(loss.detach(), *torch.autograd.grad(loss, inputs))
    assert ours.loss.dtype == ours.weight.dtype == ours.hidden.dtype == torch.float32
    for got, theirs, want in zip(ours[:3], eager[:3], expected[:3]):
        assert got.isfinite().all()
        assert error(got, want) <= error(theirs, want)
    for got, want in zip(per_token[1:3], ours[1:3]):
        assert error(got, want) <= tolerance("fused gradient")


def test_mixed_dtypes():
    """bfloat16 hidden states and a float32 head: each gradient in its own dtype."""
    hidden, weight, targets = masked(64, 200, 32, dtype=torch.float32)
    hidden = hidden.bfloat16()
    expected = reference(hidden, weight, targets, "deft")
    ours = fused(hidden, weight, targets, "deft")
    assert ours.hidden.dtype == torch.bfloat16 and ours.weight.dtype == torch.float32
    assert error(ours.hidden, expected.hidden) <= tolerance("bfloat16 gradient")
    assert error(ours.weight, expected.weight) <= tolerance("bfloat16 gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@few
def test_bitwise_the_same_ten_times(monkeypatch, spec, dtype):
    hidden, weight, targets = masked(200, 300, 16, dtype=dtype)
    bias = torch.randn(300, dtype=dtype, generator=torch.Generator().manual_seed(7))
    chunk_rows(monkeypatch, 64)
    first = fused(hidden, weight, targets, spec, bias=bias)
    for _ in range(9):
        again = fused(hidden, weight, targets, spec, bias=bias)
        assert all(torch.equal(a, b) for a, b in zip(again, first))


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = {"hidden": torch.zeros(2, 3, 4), "weight": torch.ones(5, 4), "targets": torch.ones(2, 3, dtype=torch.long)}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"hidden": torch.zeros(2, 3, 6)}, r"hidden: last dimension of shape \(2, 3, 6\).*weight's width 4"),
        ({"hidden": torch.zeros(())}, r"hidden: last dimension of shape \(\)"),
        (
            {"hidden": torch.zeros(2, 3, 4).long()},
            r"hidden: must be floating point, got torch.int64.*hidden\.float\(\)",
        ),
        ({"hidden": [[0.0]]}, r"hidden: expected a tensor, got list"),
        ({"weight": torch.ones(4)}, r"weight: the head's weight is \[V, D\], got shape \(4,\)"),
        ({"weight": torch.ones(0, 4)}, r"weight: the head's weight is \[V, D\], got shape \(0, 4\)"),
        ({"weight": torch.ones(5, 4).int()}, r"weight: must be floating point, got torch.int32"),
        ({"weight": nn.Linear(4, 5)}, r"weight: expected a tensor, got Linear"),
        ({"weight": torch.ones(5, 4, device="meta")}, r"hidden is on cpu and weight on meta; move them together"),
        (
            {"targets": torch.ones(2, 3, dtype=torch.int64, device="meta")},
            r"hidden is on cpu and targets on meta; move them",
        ),
        ({"bias": torch.zeros(4)}, r"bias: shape \(4,\) does not match the vocabulary of 5"),
        ({"bias": torch.zeros(5, 1)}, r"bias: shape \(5, 1\) does not match"),
        ({"bias": torch.zeros(5).long()}, r"bias: must be floating point, got torch.int64"),
        ({"bias": 0.5}, r"bias: expected a tensor, got float"),
        ({"softcap": 0.0}, r"softcap: must be > 0 and finite, got 0\.0; None is no cap"),
        ({"softcap": -3.0}, r"softcap: must be > 0 and finite, got -3\.0"),
        ({"softcap": math.nan}, r"softcap: must be > 0 and finite, got nan"),
        ({"logit_scale": 0.0}, r"logit_scale: must be finite and not 0, got 0\.0"),
        ({"logit_scale": math.inf}, r"logit_scale: must be finite and not 0, got inf"),
        ({"logit_scale": math.nan}, r"logit_scale: must be finite and not 0, got nan"),
        (
            {"logit_scale": nn.Parameter(torch.ones(()))},
            r"logit_scale: is a constant number and gets no gradient, got Parameter; pass float\(logit_scale\)",
        ),
        ({"softcap": torch.tensor(3.0)}, r"softcap: is a constant number .*got Tensor; pass float\(softcap\)"),
        ({"chunk_rows": 2.5}, r"chunk_rows: a whole number, at least 1, got 2\.5"),
        ({"weight": torch.ones(5, 4).to(torch.float8_e4m3fn)}, r"weight: torch.float8_e4m3fn has no arithmetic of its"),
        ({"targets": torch.full((2, 3), 5)}, r"targets: token 0 .* label 5; .*below the vocabulary size 5"),
        ({"targets": torch.full((2, 3), -1)}, r"targets: token 0 .* label -1; only -100"),
        ({"targets": torch.full((2, 3), -101)}, r"targets: token 0 .* label -101; only -100"),
        ({"targets": torch.zeros(2, 2).long()}, r"targets: shape \(2, 2\).*hidden's leading shape \(2, 3\)"),
        ({"targets": torch.zeros(2, 3)}, r"targets: token ids must be int64 or int32, got torch.float32"),
        (
            {"backend": "cuda"},
            r"backend: auto, or one or more of graphs, triton, torch with commas between them, got 'cuda'",
        ),
        (
            {"backend": "triton"},
            r"backend='triton' cannot be used here: .*cpu, not cuda; use backend='torch' or 'auto'",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("function", [linear_loss, linear_token_stats])
def test_bad_input_is_named(monkeypatch, function, bad, text):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {**GOOD, **bad}
    with pytest.raises(ValueError, match=text):
        function(**arguments)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"weights": torch.ones(3)}, r"weights: shape \(3,\) does not match the targets' \(2, 3\)"),
        ({"weights": torch.ones(2, 3).requires_grad_()}, r"weights: are constants.*pass weights\.detach\(\)"),
        ({"reduction": "avg"}, r"reduction: one of mean, sum, none, got 'avg'"),
        ({"reduction": "none", "num_items": 6}, r"num_items: .*no place with reduction='none'"),
        ({"num_items": 0}, r"num_items: the optimizer step has 0 supervised tokens.*skip it"),
        ({"num_items": 5}, r"num_items: 5 is fewer than this call's 6 supervised tokens.*whole optimizer step"),
        ({"weights": torch.ones(2, 3, device="meta")}, r"targets is on cpu and weights on meta; move them together"),
        ({"context": {"progress": 0.5}}, r"context: expected a deftune\.Context\(\.\.\.\), got dict"),
        ({"objective": "defft"}, r"unknown objective 'defft'\. Did you mean 'deft'\?"),
        ({"objective": "deft | warmup(0.1)"}, r"needs the training progress"),
        ({"objective": "deft | eos(nll)"}, r"needs the ids of the end and format tokens"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_named(bad, text):
    with pytest.raises(ValueError, match=text):
        linear_loss(**{**GOOD, **bad})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["hidden", "bias", "weight"])
def test_a_row_without_a_distribution_is_named(monkeypatch, value, where):
    """The first supervised one, by its flat index, whichever chunk it is in; what is ignored is not looked at."""
    hidden, weight, targets = sample(12)
    bias = torch.zeros(11, dtype=torch.float64)
    targets[:5] = IGNORE_INDEX
    if where == "hidden":
        hidden[3], hidden[8, 1], hidden[11] = value, value, value
        first = 8
    else:
        (bias if where == "bias" else weight[:, 2])[4] = value
        hidden[:, 2] = hidden[:, 2].abs()
        first = 5
    chunk_rows(monkeypatch, 2)
    text = rf"hidden x weight: token {first} \(flat index\) has NaN or \+inf logits.*learning rate"
    for reduction in ("mean", "sum", "none"):
        with pytest.raises(ValueError, match=text):
            linear_loss(hidden.view(3, 4, -1), weight, targets.view(3, 4), "deft", bias=bias, reduction=reduction)
    with pytest.raises(ValueError, match=text):
        linear_token_stats(hidden, weight, targets, bias=bias)


def test_the_first_bad_label_is_the_one_named():
    hidden, weight, targets = sample(12)
    targets[7], targets[9] = 11, -5
    with pytest.raises(ValueError, match=r"token 7 \(flat index\) has label 11"):
        linear_loss(hidden.view(3, 4, -1), weight, targets.view(3, 4))


def test_a_sharded_weight_is_refused():
    """A DTensor holds a shard only; its gradient would be this rank's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        arguments = {**GOOD, "bias": torch.zeros(5)}
        for name in ("weight", "bias", "hidden"):
            sharded = {**arguments, name: distribute_tensor(arguments[name], mesh, [Shard(0)])}
            advice = "pass both as DTensors" if name == "hidden" else "inside the forward of the module that FSDP"
            with pytest.raises(ValueError, match=rf"{name}: is a DTensor.*{advice}"):
                linear_loss(**sharded)
            if name == "weight":
                with pytest.raises(ValueError, match=r"weight: is a DTensor"):
                    linear_token_stats(**sharded)
    finally:
        dist.destroy_process_group()


def test_nothing_is_pending_on_the_cpu():
    """Errors on the CPU are raised at once, none is left for later."""
    hidden, weight, targets = sample(3)
    hidden[1] = math.nan
    with pytest.raises(ValueError, match="token 1"):
        linear_loss(hidden, weight, targets)
    deftune.raise_pending()


@pytest.fixture
def cuda_mm(monkeypatch):
    """A stand-in for CUDA's half-precision GEMM with float32 output, which the CPU build of torch lacks.

    Same signature and dtype rules, computed in float32; it lets the torch backend's half-precision path run here. The
    real one runs in test_linear_loss_gpu.py.
    """
    true = torch.mm

    def mm(a, b, *, out_dtype=None, out=None):
        if out_dtype is None:
            return true(a, b) if out is None else true(a, b, out=out)
        if a.dtype != b.dtype:
            raise RuntimeError("input dtypes must be the same")
        return true(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    before = TorchBackend.__init__

    def init(self, head, dtype, rows):
        before(self, head, dtype, rows)
        self.low = dtype != self.dtype
        self.weight = head.weight.to(dtype) if self.low else self.weight

    monkeypatch.setattr(TorchBackend, "__init__", init)
    monkeypatch.setattr(TorchBackend, "over_classes", lambda self, e: self.matmul(e, self.weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["nll", "deft", "eaft(k=5)"])
@pytest.mark.parametrize("num_items", [None, 10**8])
def test_the_half_precision_path_of_a_gpu(cuda_mm, monkeypatch, spec, dtype, num_items):
    """Rounded once, the target's part never in half precision; 1 / num_items may be below the range of float16."""
    chunk_rows(monkeypatch, 17)
    hidden, weight, targets = masked(64, 200, 32, dtype=dtype)
    kwargs = {"bias": torch.linspace(-1, 1, 200).to(dtype), "num_items": num_items}
    upstream = 1.0 if num_items is None else 2.0**22
    got = fused(hidden, weight, targets, spec, upstream=torch.tensor(upstream), **kwargs)
    want = reference(hidden, weight, targets, spec, upstream=torch.tensor(upstream, dtype=torch.float64), **kwargs)
    for name in ("hidden", "weight", "bias"):
        assert getattr(got, name).dtype == dtype
        assert error(getattr(got, name), getattr(want, name)) <= torch.finfo(dtype).eps / 2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_column_sums_keep_the_digits_of_their_factor(cuda_mm, dtype, size):
    """v in two halves: 16 bits and more of it, of whatever size it is."""
    generator = torch.Generator().manual_seed(4)
    e = torch.rand(50, 30, generator=generator).to(dtype)
    v = torch.rand(50, generator=generator) * size
    assert error(column_sums(e, v), e.double().T @ v.double()) <= 2**-17


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunk_rows_bounds_the_work_and_changes_nothing(rows, monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 12, dtype=torch.float64), torch.randn(33, 12, dtype=torch.float64)
    targets = torch.randint(33, (50,))
    sizes = []
    measure = TorchBackend.measure
    monkeypatch.setattr(
        TorchBackend,
        "measure",
        lambda self, part, *rest: (sizes.append(part.stop - part.start), measure(self, part, *rest))[1],
    )

    def gradients(chunk_rows):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = linear_loss(*leaves, targets, "deft", chunk_rows=chunk_rows)
        return loss, *torch.autograd.grad(loss, leaves)

    expected = gradients(None)
    assert sizes == [50]
    sizes.clear()
    for mine, theirs in zip(gradients(rows), expected):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-15)
    assert max(sizes) == min(rows, 50) and sum(sizes) == 50


def test_chunk_rows_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk_rows: a whole number, at least 1, got 0"):
        linear_loss(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 1]), chunk_rows=0)


@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size", "bound", "rows"),
    [
        (8192, 576, 49152, None, 4096),  # the shapes of docs/linear_loss.md, whose memory was measured in these chunks
        (16384, 1536, 151936, None, 3328),
        (16384, 3584, 152064, None, 3328),
        (16384, 4096, 128256, None, 3712),
        (8192, 2048, 128256, None, 1920),  # a quarter of the tokens
        (8192, 2048, 128256, 4096, 3968),  # a bound is instead of the quarter
        (8192, 576, 49152, 700, 700),
        (131072, 576, 49152, None, 4096),
        (131072, 4096, 128256, 10**6, 3712),
        (3000, 576, 49152, None, 3000),
        (3000, 2048, 128256, None, 1024),
        (300, 576, 49152, None, 300),
        (8192, 64, 10**7, None, 128),
    ],
)
def test_the_rows_of_a_gpus_chunks(tokens, width, vocab_size, bound, rows):
    """Small heads: 4,096 rows. Others: at most a quarter of the tokens, and an eighth of a compiled loss's memory."""
    head = Head(torch.empty(vocab_size, width, device="meta", dtype=torch.bfloat16), None)
    assert TritonBackend.first_rows(head, torch.bfloat16, tokens, bound) == rows


@pytest.mark.parametrize("width", [64, 576, 896, 1024, 4096])
@pytest.mark.parametrize("vocab_size", [4096, 32000, 49152, 49280, 51200, 56000, 128256])
def test_the_chunks_of_small_heads_take_less_than_half_a_gib(width, vocab_size):
    """Beside the tensors of a chunk, 0.046 GiB were measured at 8,192 tokens of D 576, V 49152 (0.45 of 0.404)."""
    head = Head(torch.empty(vocab_size, width, device="meta", dtype=torch.bfloat16), None)
    tokens = 8192
    rows = TritonBackend.first_rows(head, torch.bfloat16, tokens, None)
    e, tiles, states = 2 * -(-vocab_size // 64) * 64, vocab_size // 16, width * (2 + 2 + 4)  # x, v X, E W in float32
    if rows > 1920:  # more than a quarter of the tokens: the head is small
        assert rows == 4096 and rows * (e + tiles + states) + 0.046 * 2**30 <= 0.5 * 2**30
    else:
        assert rows == 1920 and 4096 * (e + tiles + states) > 0.43 * 2**30


def test_calls_with_several_threads_give_equal_bits():
    """Many rows share few targets, whose gradients torch's own ``index_put_`` adds in any order of the threads."""
    hidden, weight, _ = sample(tokens=4096, vocab_size=512, width=64, dtype=torch.float32)
    targets, bias = torch.arange(4096) % 7, torch.zeros(512)

    def gradients() -> tuple[Tensor, ...]:
        leaves = [leaf.clone().requires_grad_() for leaf in (weight, bias)]
        loss = linear_loss(hidden, leaves[0], targets, "deft", bias=leaves[1], backend="torch")
        return torch.autograd.grad(loss, leaves)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, *others = [gradients() for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))
