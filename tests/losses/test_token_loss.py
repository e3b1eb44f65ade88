"""`token_loss`: value and gradient against the oracle for the whole battery, and under everything autograd can do."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import deftune
import oracle as exact
from battery import CASES, CONTEXT, SETTING, Case, of_kind, sample_logits
from deftune import IGNORE_INDEX, Context, token_loss, token_stats
from tolerances import assert_close, assert_near, tolerance

properties = settings(deadline=None, derandomize=True, max_examples=40, database=None)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
FEW = ["nll", "deft", "cayley", "eaft(k=3)", "deft | eos(nll) | mean_one", "clip(k=1)"]
few = pytest.mark.parametrize("spec", FEW)


def gradient(logits, targets, objective, upstream=None, **kwargs):
    """(loss, d loss / d logits)."""
    leaf = logits.detach().clone().requires_grad_()
    loss = token_loss(leaf, targets, objective, context=kwargs.pop("context", CONTEXT), **kwargs)
    return loss.detach(), torch.autograd.grad(loss, leaf, upstream)[0]


def norm_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


# --- gate x error -----------------------------------------------------------------------------------------------------


@every_case
def test_closed_form(case: Case):
    """float64: value and gate x (P - onehot), each token by itself."""
    logits, targets = sample_logits(15, 8)
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    loss, grad = gradient(
        logits, targets, case.objective, reduction="none", upstream=torch.ones(15, dtype=torch.float64)
    )
    assert_near(loss, expected.value, "closed form", condition=1 + expected.value, what="loss")
    assert_near(grad, expected.gradient, "closed form", what="gradient")


@every_case
def test_difference_quotient(case: Case):
    """The gradient is the derivative of the value with focus, weights and step statistics frozen at the base point."""
    logits, targets = sample_logits(9, 6, seed=3)
    tokens = case.oracle(exact.rows(logits, targets), SETTING)
    quotient = [exact.difference_quotient(*row) for row in zip(tokens, logits.tolist(), targets.tolist())]
    _, grad = gradient(logits, targets, case.objective, reduction="sum")
    assert_near(grad, torch.tensor(quotient, dtype=torch.float64), "difference quotient")


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0, 2.0])
def test_torch_gradcheck_where_nothing_is_frozen(a):
    """A constant focus has no stop-gradient: torch's own finite differences agree."""
    logits, targets = sample_logits(5, 4)
    targets = torch.cat([targets[:-1], torch.tensor([IGNORE_INDEX])])
    torch.autograd.gradcheck(
        lambda z: token_loss(z, targets, f"alpha({a})", reduction="none"),
        logits.requires_grad_(),
        eps=1e-6,
        atol=1e-9,
        rtol=1e-7,
    )


@every_case
def test_float32_logits(case: Case):
    logits, targets = sample_logits(15, 8, torch.float32)
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    loss, grad = gradient(logits, targets, case.objective, reduction="sum")
    assert loss.dtype == grad.dtype == torch.float32
    assert norm_error(grad, expected.gradient) <= tolerance("float32 gradient")
    assert_close(loss, expected.value.sum(), "float32 gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@few
def test_half_precision_logits(spec, dtype):
    """The gradient is the exact one of the half-precision logits, rounded once; the loss is float32."""
    case = next(case for case in CASES if case.spec == spec)
    logits, targets = sample_logits(15, 8, dtype)
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    loss, grad = gradient(logits, targets, case.objective, reduction="sum")
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    name = "bfloat16 gradient" if dtype == torch.bfloat16 else "float16 gradient"
    smallest = torch.finfo(dtype).tiny  # below it the format has fewer bits
    large = expected.gradient.abs() >= smallest
    assert_close(grad[large], expected.gradient[large], name)
    assert_close(loss, expected.value.sum(), "float32 gradient", condition=1 + logits.double().abs().max())


@pytest.mark.parametrize("spec", ["nll", "deft"])
def test_a_whole_vocabulary(spec):
    """One row of 152064 classes, and 600 rows of 1000: more than one block, against the float64 twin."""
    for shape in ((2, 152064), (600, 1000)):
        logits, targets = sample_logits(*shape, torch.float32)
        twin, P = exact.twin(logits, targets), torch.softmax(logits.double(), -1)
        gate = (twin.log_p * (twin.collision if spec == "deft" else 0)).exp()
        expected = gate[:, None] * (P - F.one_hot(targets, shape[1]))
        _, grad = gradient(logits, targets, spec, reduction="sum")
        assert norm_error(grad, expected) <= tolerance("float32 gradient")


@properties
@given(
    st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=8), st.integers(0, 7), st.sampled_from(of_kind("local"))
)
def test_gradient_rows_sum_to_zero_and_pull_the_target_up(logits, target, case):
    z, y = torch.tensor([logits]), torch.tensor([target % len(logits)])
    _, grad = gradient(z, y, case.objective)
    assert grad.isfinite().all()
    assert abs(grad.double().sum().item()) <= 1e-6 * max(1.0, grad.abs().max().item())
    others = torch.arange(len(logits)) != y
    assert grad[0, y].item() <= 0 and (grad[0, others] >= 0).all()


# --- confident and impossible tokens ----------------------------------------------------------------------------------


def confident(margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 50, generator=generator)
    targets = torch.arange(8) * 5
    logits[torch.arange(8), targets] = logits.amax(-1) + margin
    return logits, targets


@pytest.mark.parametrize("margin", [10.0, 20.0])
@every_case
def test_confident_tokens_keep_their_digits(case: Case, margin):
    """1 - p is 1e-3 to 1e-8 here: p - 1 in float32 would have lost most of it."""
    logits, targets = confident(margin)
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    _, grad = gradient(logits, targets, case.objective, reduction="sum")
    at = (torch.arange(8), targets)
    assert_close(grad[at], expected.gradient[at], "confident gradient")


@pytest.mark.parametrize("margin", [10.0, 20.0])
def test_confident_tokens_are_at_least_as_good_as_torch(margin):
    logits, targets = confident(margin)
    expected = exact.answer(exact.nll, exact.rows(logits, targets), SETTING)
    _, ours = gradient(logits, targets, "nll", reduction="sum")
    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, targets, reduction="sum").backward()
    at = (torch.arange(8), targets)
    truth = expected.gradient[at]
    error_ours, error_torch = ((grad[at].double() / truth - 1).abs() for grad in (ours, leaf.grad))
    assert (error_ours <= error_torch + 2**-24).all()  # half an ulp: the nearest float32 itself may be that far
    assert error_ours.max() <= error_torch.max()


@every_case
def test_impossible_tokens_have_finite_gradients(case: Case):
    """p = 0 among ordinary tokens: gate x error stays finite and right, the value is infinite where it should be."""
    logits, targets = sample_logits(10, 6)
    logits[2, targets[2]] = -math.inf
    logits[5, (targets[5] + 1) % 6] = -math.inf
    logits[7, targets[7]] -= 1e4
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    ones = torch.ones(10, dtype=torch.float64)
    loss, grad = gradient(logits, targets, case.objective, reduction="none", upstream=ones)
    assert torch.equal(loss.isinf(), expected.value.isinf())
    assert_close(loss, expected.value, "closed form", condition=100, what="loss")
    assert grad.isfinite().all()
    assert_near(grad, expected.gradient, "closed form", what="gradient")
    _, mean = gradient(logits, targets, case.objective, reduction="mean")
    assert_near(mean, expected.gradient / 10, "closed form", what="gradient of the mean")


@properties
@given(
    st.lists(st.integers(-8192, 8192), min_size=2, max_size=12), st.integers(0, 11), st.sampled_from(of_kind("local"))
)
def test_an_offset_changes_neither_loss_nor_gradient(steps, target, case):
    logits, targets = torch.tensor([steps], dtype=torch.float32) / 1024, torch.tensor([target % len(steps)])
    loss, grad = gradient(logits, targets, case.objective)
    loss_moved, grad_moved = gradient(logits + 1e4, targets, case.objective)
    assert_near(loss_moved, loss, "offset", condition=1 + loss.double())
    assert_near(grad_moved, grad, "offset")


def test_a_shut_gate_is_shut_whatever_the_upstream_says():
    """An overflowed loss scale times a gate of 0 is 0: NaN must not reach the logits."""
    logits, targets = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1])
    logits[0, 0] = -math.inf
    upstream = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    _, grad = gradient(logits, targets, "linear", reduction="none", upstream=upstream)
    assert not grad[0].any() and grad[1].any() and grad.isfinite().all()


# --- nothing to learn from --------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("leading", [(4,), (2, 3), (0,), (3, 0)])
def test_nothing_supervised_is_zero_and_connected(case: Case, leading):
    logits = torch.randn(*leading, 5, requires_grad=True)
    targets = torch.full(leading, IGNORE_INDEX)
    for reduction in ("mean", "sum"):
        loss = token_loss(logits, targets, case.objective, reduction=reduction, context=CONTEXT)
        assert loss.item() == 0 and loss.requires_grad
        (grad,) = torch.autograd.grad(loss, logits)
        assert torch.equal(grad, torch.zeros_like(logits))
    deferred = replace(CONTEXT, step="deferred") if case.kind == "mass" else CONTEXT
    if case.kind != "step":
        loss = token_loss(logits, targets, case.objective, num_items=7, context=deferred)
        assert loss.item() == 0 and not torch.autograd.grad(loss, logits)[0].any()
    losses = token_loss(logits, targets, case.objective, reduction="none", context=CONTEXT)
    assert losses.shape == torch.Size(leading) and not losses.any() and losses.requires_grad


@every_case
def test_one_class(case: Case):
    """V = 1: p = 1, nothing to learn, nothing to divide by."""
    loss, grad = gradient(torch.randn(3, 1), torch.zeros(3, dtype=torch.long), case.objective, reduction="sum")
    assert loss.item() == 0 and torch.equal(grad, torch.zeros(3, 1))


@properties
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from(of_kind("local")))
def test_ignored_rows_get_no_gradient_and_change_nothing(kept, case):
    kept = torch.tensor(kept)
    logits, targets = sample_logits(len(kept), 6)
    poisoned = torch.where(kept[:, None], logits, math.nan)
    loss, grad = gradient(poisoned, torch.where(kept, targets, IGNORE_INDEX), case.objective, reduction="sum")
    assert torch.equal(grad[~kept], torch.zeros_like(grad[~kept]))
    alone, grad_alone = gradient(logits[kept], targets[kept], case.objective, reduction="sum")
    assert_near(loss, alone, "split", condition=1 + alone)
    assert torch.equal(grad[kept], grad_alone)


# --- reduction and weights --------------------------------------------------------------------------------------------


def masked_sample(dtype=torch.float64):
    logits, targets = sample_logits(12, 7, dtype)
    return logits.view(3, 4, 7), targets.masked_fill(torch.arange(12) % 4 == 1, IGNORE_INDEX).view(3, 4)


@few
def test_reductions(spec):
    logits, targets = masked_sample()
    case = next(case for case in CASES if case.spec == spec)
    kept = targets != IGNORE_INDEX
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    total, count = expected.value.sum(), int(kept.sum())
    grad = torch.zeros_like(logits)
    grad[kept] = expected.gradient

    losses = token_loss(logits, targets, spec, reduction="none", context=CONTEXT)
    assert losses.shape == targets.shape and not losses[~kept].any()
    assert_close(losses[kept], expected.value, "closed form")
    for kwargs, divisor in (
        ({"reduction": "sum"}, 1),
        ({"reduction": "mean"}, count),
        ({}, count),
        ({"num_items": count}, count),
        ({"num_items": torch.tensor(count)}, count),
        ({"num_items": torch.tensor([count])}, count),
    ):
        got, got_grad = gradient(logits, targets, spec, **kwargs)
        assert got.shape == ()
        assert_close(got, total / divisor, "closed form", what=str(kwargs))
        assert_near(got_grad, grad / divisor, "closed form", what=str(kwargs))


@pytest.mark.parametrize("case", of_kind("local"), ids=str)
def test_num_items_is_the_steps_count(case: Case):
    logits, targets = masked_sample()
    (total, grad), (part, grad_part) = (
        gradient(logits, targets, case.objective, **kwargs) for kwargs in ({"reduction": "sum"}, {"num_items": 1000})
    )
    assert_close(part, total / 1000, "closed form")
    assert_near(grad_part, grad / 1000, "closed form")


@every_case
def test_none_with_a_random_upstream_vector(case: Case):
    logits, targets = masked_sample()
    upstream = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    kept = targets != IGNORE_INDEX
    expected = torch.zeros_like(logits)
    expected[kept] = exact.answer(case.oracle, exact.rows(logits, targets), SETTING).gradient * upstream[kept][:, None]
    _, grad = gradient(logits, targets, case.objective, upstream=upstream, reduction="none")
    assert_near(grad, expected, "closed form", condition=10)


@every_case
def test_weights_are_constants_per_token(case: Case):
    logits, targets = masked_sample()
    weights = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) * 2
    weights[targets == IGNORE_INDEX] = math.nan  # not read
    kept = targets != IGNORE_INDEX
    expected = exact.answer(case.oracle, exact.rows(logits, targets), SETTING)
    loss, grad = gradient(logits, targets, case.objective, weights=weights, reduction="sum")
    assert_close(loss, (expected.value * weights[kept]).sum(), "closed form")
    assert_near(grad[kept], expected.gradient * weights[kept][:, None], "closed form", condition=10)
    mean, _ = gradient(logits, targets, case.objective, weights=weights)
    assert_close(mean, (expected.value * weights[kept]).sum() / int(kept.sum()), "closed form")


def test_a_weight_of_zero_silences_an_impossible_token():
    """0 * inf is a token left out, not NaN."""
    logits = torch.tensor([[0.0, -math.inf], [1.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([0.0, 1.0], dtype=torch.float64)
    loss, grad = gradient(logits, torch.tensor([1, 0]), "nll", weights=weights, reduction="sum")
    assert not grad[0].any() and grad.isfinite().all()
    assert_close(loss, torch.tensor(math.log1p(math.exp(-1)), dtype=torch.float64), "closed form")


@pytest.mark.parametrize("how", ["shifted", "padded", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_the_tensor_behind_a_view(how, dtype):
    """The slices that trainers make; what was sliced away gets exactly 0."""
    logits, targets = masked_sample(dtype)
    _, expected = gradient(logits, targets, "deft")
    if how == "shifted":
        whole = torch.cat([logits, logits.new_full((3, 1, 7), 5.0)], 1).requires_grad_()
        view, back = whole[:, :-1], lambda grad: (grad[:, :-1], grad[:, -1])
    elif how == "padded":
        whole = torch.cat([logits, logits.new_full((3, 4, 2), 50.0)], -1).requires_grad_()
        view, back = whole[..., :7], lambda grad: (grad[..., :7], grad[..., 7:])
    else:
        whole = logits.permute(2, 0, 1).contiguous().requires_grad_()
        view, back = whole.permute(1, 2, 0), lambda grad: (grad.permute(1, 2, 0), grad[:0])
    token_loss(view, targets, "deft").backward()
    inside, outside = back(whole.grad)
    assert torch.equal(inside, expected) and not outside.any()


def test_int32_targets():
    logits, targets = masked_sample()
    for spec in FEW:
        long, int32 = (gradient(logits, t, spec) for t in (targets, targets.int()))
        assert torch.equal(long[0], int32[0]) and torch.equal(long[1], int32[1]), spec


# --- the optimizer step and its parts ---------------------------------------------------------------------------------


def ragged(sequences: int = 32, length: int = 6, vocab_size: int = 5):
    """Sequences of 0 to 6 supervised tokens each."""
    logits, targets = sample_logits(sequences * length, vocab_size)
    lengths = torch.arange(sequences) * 5 % (length + 1)
    targets = targets.view(sequences, length).masked_fill(torch.arange(length) >= lengths[:, None], IGNORE_INDEX)
    order = torch.randperm(sequences * length, generator=torch.Generator().manual_seed(8))
    return logits[order].view(sequences, length, vocab_size), targets


@every_case
@pytest.mark.parametrize("size", [16, 5, 1])
def test_accumulation_is_the_whole_step(case: Case, size):
    """1 x 32, 2 x 16, 7 micro-batches with a partial last one, 32 x 1: one gradient, to rounding."""
    logits, targets = ragged()
    num_items = int((targets != IGNORE_INDEX).sum())
    whole, whole_grad = gradient(logits, targets, case.objective, num_items=num_items)
    parts = [(logits[i : i + size], targets[i : i + size]) for i in range(0, 32, size)]
    context = CONTEXT
    if case.kind != "local":
        pre_pass = [token_stats(*part) for part in parts]
        context = replace(CONTEXT, step=deftune.step_stats(case.objective, pre_pass, context=CONTEXT))
    results = [gradient(*part, case.objective, num_items=num_items, context=context) for part in parts]
    assert_near(sum(loss for loss, _ in results), whole, "split", condition=1 + whole)
    assert_near(torch.cat([grad for _, grad in results]), whole_grad, "split")


@pytest.mark.parametrize("case", of_kind("mass"), ids=str)
def test_deferred_mass_without_a_second_pass(case: Case):
    logits, targets = ragged()
    num_items = int((targets != IGNORE_INDEX).sum())
    _, whole = gradient(logits, targets, case.objective)
    deferred = replace(CONTEXT, step="deferred")
    _, first = gradient(logits[:9], targets[:9], case.objective, num_items=num_items, context=deferred)
    _, second = gradient(logits[9:], targets[9:], case.objective, num_items=num_items, context=deferred)
    mass = case.objective.mass(token_stats(logits, targets), deferred).sum()
    assert_near(torch.cat([first, second]) * num_items / mass, whole, "split")


@pytest.mark.parametrize("case", of_kind("mass", "step"), ids=str)
def test_a_part_of_the_step_is_refused(case: Case):
    logits, targets = masked_sample()
    context = Context(progress=0.15, special_ids=(1, 3))
    with pytest.raises(
        ValueError, match=r"depends on the whole optimizer step.*holds 9 of its 20 .*step_stats"
    ) as error:
        token_loss(logits, targets, case.objective, num_items=20, context=context)
    assert ("deferred" in str(error.value)) == (case.kind == "mass")
    assert f"`{case.objective}`" in str(error.value)
    token_loss(logits, targets, case.objective, num_items=9, context=context)  # the whole of it is not


def test_a_step_objective_refuses_a_deferred_mass():
    logits, targets = masked_sample()
    with pytest.raises(ValueError, match=r"a deferred mass cannot replace"):
        token_loss(logits, targets, "clip", num_items=20, context=Context(step="deferred"))


# --- autograd ---------------------------------------------------------------------------------------------------------


@few
def test_backward_twice_and_two_losses(spec):
    logits, targets = masked_sample()
    _, once = gradient(logits, targets, spec)
    leaf = logits.clone().requires_grad_()
    loss = token_loss(leaf, targets, spec, context=CONTEXT)
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, once)
    loss.backward()
    assert_near(leaf.grad, 2 * once, "closed form")
    _, other = gradient(logits, targets, "nll")
    leaf = logits.clone().requires_grad_()
    (token_loss(leaf, targets, spec, context=CONTEXT) + 3 * token_loss(leaf, targets, "nll")).backward()
    assert_near(leaf.grad, once + 3 * other, "closed form", condition=10)


def test_the_caller_s_tensors_are_left_alone():
    logits, targets = masked_sample(torch.float32)
    before, targets_before = logits.clone(), targets.clone()
    gradient_before = gradient(logits, targets, "deft")
    leaf = logits.requires_grad_()
    token_loss(leaf, targets, "deft").backward()
    assert torch.equal(leaf, before) and torch.equal(targets, targets_before)
    assert torch.equal(leaf.grad, gradient_before[1])


@few
def test_through_a_head(spec):
    """The gradient goes on through whatever made the logits."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(3, 4, 5, dtype=torch.float64, generator=generator)
    head = torch.randn(7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    _, targets = masked_sample()
    token_loss(hidden @ head.T, targets, spec, context=CONTEXT).backward()
    _, grad = gradient(hidden @ head.detach().T, targets, spec)
    assert_near(head.grad, torch.einsum("btv,btd->vd", grad, hidden), "closed form", condition=10)


@few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(spec, dtype):
    logits, targets = masked_sample(dtype)
    plain = gradient(logits, targets, spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gradient(logits, targets, spec)
        stats = token_stats(logits, targets)
    assert cast[0].dtype == plain[0].dtype
    assert torch.equal(cast[0], plain[0]) and torch.equal(cast[1], plain[1])
    assert torch.equal(stats.log_p, token_stats(logits, targets).log_p)


@few
def test_no_grad_and_no_leaf(spec):
    logits, targets = masked_sample()
    expected, _ = gradient(logits, targets, spec)
    assert torch.equal(token_loss(logits, targets, spec, context=CONTEXT), expected)
    with torch.no_grad():
        loss = token_loss(logits.clone().requires_grad_(), targets, spec, context=CONTEXT)
    assert torch.equal(loss, expected) and not loss.requires_grad
    with torch.inference_mode():
        assert torch.equal(token_loss(logits, targets, spec, context=CONTEXT), expected)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU")


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])]
)
def test_compiled(backend):
    logits, targets = masked_sample(torch.float32)

    def step(z):
        return 2 * token_loss(z * 0.5, targets, "deft | eos(nll)", context=CONTEXT)

    leaf, compiled_leaf = (logits.clone().requires_grad_() for _ in range(2))
    loss = step(leaf)
    loss.backward()
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend)(compiled_leaf)
    compiled.backward()
    assert_near(compiled, loss.double(), "float32 gradient")
    assert_near(compiled_leaf.grad, leaf.grad, "float32 gradient")


@pytest.mark.parametrize("case", of_kind("local"), ids=str)
def test_functional_gradients(case: Case):
    """torch.func.grad is backward; vmap of it is the loop over samples."""
    logits, targets = masked_sample()

    def loss(z, y):
        return token_loss(z, y, case.objective, context=CONTEXT)

    _, expected = gradient(logits, targets, case.objective)
    assert torch.equal(torch.func.grad(loss)(logits, targets), expected)
    loop = torch.stack([gradient(z, y, case.objective)[1] for z, y in zip(logits, targets)])
    values = torch.stack([gradient(z, y, case.objective)[0] for z, y in zip(logits, targets)])
    assert_near(torch.func.vmap(torch.func.grad(loss))(logits, targets), loop, "closed form")
    assert_near(torch.func.vmap(loss)(logits, targets), values, "closed form", condition=10)
    one = targets[0]
    shared = torch.stack([gradient(z, one, case.objective)[1] for z in logits])
    assert_near(torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(logits, one), shared, "closed form")


@pytest.mark.parametrize("case", of_kind("mass", "step"), ids=str)
def test_objectives_of_the_step_are_not_mapped_over_its_parts(case: Case):
    logits, targets = masked_sample()
    with pytest.raises(ValueError, match=r"depends on the whole optimizer step and cannot be mapped over its parts"):
        torch.func.vmap(lambda z, y: token_loss(z, y, case.objective, context=CONTEXT))(logits, targets)


def test_a_second_derivative_is_refused():
    logits, targets = masked_sample()
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(token_loss(leaf, targets, "deft"), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"first derivative only.*do not use create_graph=True"):
        grad.sum().backward()


@few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_the_same_ten_times(spec, dtype):
    logits, targets = sample_logits(300, 1000, dtype)
    targets[::7] = IGNORE_INDEX
    loss, grad = gradient(logits, targets, spec)
    for _ in range(9):
        again, grad_again = gradient(logits, targets, spec)
        assert torch.equal(again, loss) and torch.equal(grad_again, grad)


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = {"logits": torch.zeros(2, 3, 4), "targets": torch.ones(2, 3, dtype=torch.long)}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (
            {"logits": torch.full((2, 3, 4), math.nan)},
            r"logits: token 0 \(flat index\) has NaN or \+inf.*learning rate",
        ),
        ({"logits": torch.full((2, 3, 4), math.inf)}, r"logits: token 0 .*\+inf"),
        (
            {"logits": torch.zeros(2, 3, 4, dtype=torch.int32)},
            r"logits: must be floating point, got torch.int32.*float\(\)",
        ),
        ({"targets": torch.full((2, 3), 4)}, r"targets: token 0 .* label 4; .*below the vocabulary size 4"),
        ({"targets": torch.full((2, 3), -1)}, r"targets: token 0 .* label -1; only -100"),
        ({"targets": torch.full((2, 3), -101)}, r"targets: token 0 .* label -101; only -100"),
        (
            {"targets": torch.zeros(2, 2, dtype=torch.long)},
            r"targets: shape \(2, 2\) does not match.*\(2, 3\).*already shifted",
        ),
        ({"targets": torch.zeros(2, 3)}, r"targets: token ids must be int64 or int32, got torch.float32"),
        (
            {"targets": torch.zeros(2, 3, dtype=torch.bool)},
            r"targets: token ids must be int64 or int32, got torch.bool",
        ),
        (
            {"weights": torch.ones(3)},
            r"weights: shape \(3,\) does not match the targets' \(2, 3\); one weight per token",
        ),
        ({"weights": torch.ones(2, 3).requires_grad_()}, r"weights: are constants.*pass weights\.detach\(\)"),
        ({"weights": torch.ones(2, 3, dtype=torch.long)}, r"weights: must be floating point, got torch.int64"),
        ({"weights": [1.0]}, r"weights: expected a tensor, got list"),
        (
            {"targets": torch.ones(2, 3, dtype=torch.long, device="meta")},
            r"logits is on cpu and targets on meta; move them",
        ),
        ({"logits": torch.zeros(2, 3, 4).to(torch.float8_e5m2)}, r"logits: torch.float8_e5m2 has no arithmetic of its"),
        ({"context": {"progress": 0.5}}, r"context: expected a deftune\.Context\(\.\.\.\), got dict"),
        ({"reduction": "avg"}, r"reduction: one of mean, sum, none, got 'avg'"),
        ({"reduction": "none", "num_items": 6}, r"num_items: .*no place with reduction='none'"),
        ({"reduction": "sum", "num_items": 6}, r"num_items: .*no place with reduction='sum'"),
        ({"num_items": 0}, r"num_items: the optimizer step has 0 supervised tokens.*skip it"),
        ({"num_items": -3}, r"num_items: the optimizer step has -3 supervised tokens"),
        ({"num_items": math.nan}, r"num_items: the optimizer step has nan"),
        ({"num_items": 5}, r"num_items: 5 is fewer than this call's 6 supervised tokens.*whole optimizer step"),
        ({"num_items": torch.tensor(5)}, r"num_items: 5 is fewer than this call's 6"),
        ({"num_items": torch.tensor([3, 3])}, r"num_items: one count for the step, got a tensor of shape \(2,\)"),
        ({"num_items": "6"}, r"num_items: a number of supervised tokens, got str"),
        ({"num_items": True}, r"num_items: a number of supervised tokens, got bool"),
        ({"objective": "defft"}, r"unknown objective 'defft'\. Did you mean 'deft'\?"),
        ({"objective": "alpha(-1)"}, r"alpha: the focus a must be finite and >= 0.*got -1\.0"),
        ({"objective": "cayley(kappa=-2)"}, r"cayley: kappa must be > -1.*got -2\.0"),
        ({"objective": None}, r"an objective is a spec such as 'deft' or an Objective, got NoneType"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_bad_input_is_named(bad, text):
    arguments = {**GOOD, "objective": "deft", **bad}
    with pytest.raises(ValueError, match=text):
        token_loss(arguments.pop("logits"), arguments.pop("targets"), arguments.pop("objective"), **arguments)


def test_the_first_bad_token_is_the_one_named():
    logits, targets = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    targets[1, 1], targets[1, 2] = 9, 10
    with pytest.raises(ValueError, match=r"token 4 \(flat index\) has label 9"):
        token_loss(logits, targets)
    targets = torch.zeros(2, 3, dtype=torch.long)
    targets[0, 0] = IGNORE_INDEX
    logits[1, 0, 2] = logits[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match=r"token 3 \(flat index\) has NaN"):
        token_loss(logits, targets)
