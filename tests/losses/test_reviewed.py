"""What a second reader found: each once wrong, each held here."""

import pytest
import torch

import deftune
from deftune import Context, linear_loss, token_loss


def sample(tokens=6, vocab_size=40, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, width, generator=generator).to(dtype)
    return hidden, weight, torch.arange(tokens) % vocab_size


@pytest.mark.parametrize("compiled", [False, True])
def test_float16_gradients_survive_a_small_share_and_a_loss_scale(compiled):
    """1 / num_items alone is below float16's range; a loss scale must still bring the gradient back."""
    hidden, weight, targets = sample(dtype=torch.float16)
    hidden.requires_grad_()

    def loss(hidden):
        return linear_loss(hidden, weight, targets, "nll", num_items=10**8)

    run = torch.compile(loss, backend="eager", fullgraph=True) if compiled else loss
    (run(hidden) * 2.0**24).backward()
    wide = hidden.detach().double().requires_grad_()
    (token_loss(wide @ weight.double().T, targets, "nll", num_items=10**8) * 2.0**24).backward()
    assert (hidden.grad.double() - wide.grad).norm() <= 2**-11 * wide.grad.norm()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"reduction": "avg"}, "reduction: one of mean, sum, none, got 'avg'"),
        ({"reduction": "sum", "num_items": 50}, "num_items: divides the sum for reduction='mean'"),
        ({"reduction": "sum", "num_items": torch.tensor(50)}, "num_items: divides the sum for reduction='mean'"),
        ({"num_items": "7"}, "num_items: a number of supervised tokens, got str"),
        ({"num_items": 0}, "an empty step has no loss"),
    ],
)
def test_a_compiled_call_is_checked_like_any_other(kwargs, message):
    hidden, weight, targets = sample()
    for backend in (None, "eager"):
        torch._dynamo.reset()

        def loss(hidden):
            return linear_loss(hidden, weight, targets, "nll", **kwargs)

        run = torch.compile(loss, backend=backend) if backend else loss
        with pytest.raises(Exception, match=message):
            run(hidden)


def test_progress_does_not_recompile():
    hidden, weight, targets = sample()
    compiles = []

    def count(graph, inputs):
        compiles.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(lambda h, c: linear_loss(h, weight, targets, "deft | warmup(0.2)", context=c), backend=count)
    for step in range(8):
        context = Context(progress=step / 10)
        want = linear_loss(hidden, weight, targets, "deft | warmup(0.2)", context=context)
        assert abs(run(hidden, context) - want) <= 1e-6
    assert len(compiles) <= 2, f"{len(compiles)} compiles for 8 steps"


@pytest.mark.parametrize("spec", ["mile | floor(0.9)", "mile | blend(nll, 0.5)", "mile | eos(nll)", "clip"])
def test_a_mass_cannot_be_deferred_from_inside(spec):
    hidden, weight, targets = sample()
    context = Context(step="deferred", special_ids=(1,))
    with pytest.raises(ValueError, match="which a deferred mass cannot replace"):
        token_loss(hidden @ weight.T, targets, spec, num_items=100, context=context)
    with pytest.raises(ValueError, match="which a deferred mass cannot replace"):
        linear_loss(hidden, weight, targets, spec, num_items=100, context=context)


def test_statistics_of_another_step_are_noticed():
    hidden, weight, targets = sample()
    step = deftune.step_stats("clip", [deftune.token_stats(hidden @ weight.T, targets)])
    with pytest.raises(ValueError, match="step statistics are of 6 tokens; make them anew"):
        token_loss(hidden @ weight.T, targets, "clip", num_items=50, context=Context(step=step))
    whole = token_loss(hidden @ weight.T, targets, "clip")
    for num_items in (None, 6):
        got = token_loss(hidden @ weight.T, targets, "clip", num_items=num_items, context=Context(step=step))
        assert torch.equal(got, whole)


def test_float64_stays_float64_under_autocast():
    hidden, weight, targets = sample(dtype=torch.float64)
    want = linear_loss(hidden, weight, targets, "deft")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_loss(hidden, weight, targets, "deft"), want)


def test_a_weight_that_is_no_number_is_named_unless_ignored():
    hidden, weight, targets = sample()
    weights = torch.ones(6)
    weights[4] = torch.nan
    for call in (lambda: linear_loss(hidden, weight, targets, weights=weights),
                 lambda: token_loss(hidden @ weight.T, targets, weights=weights)):  # fmt: skip
        with pytest.raises(ValueError, match=r"weights: token 4 .* has weight nan; use finite numbers"):
            call()
    targets = targets.clone()
    targets[4] = deftune.IGNORE_INDEX
    assert linear_loss(hidden, weight, targets, weights=weights).isfinite()


def test_a_second_derivative_through_the_bias_alone_is_refused():
    hidden, weight, targets = sample()
    bias = torch.zeros(40, requires_grad=True)
    loss = linear_loss(hidden, weight, targets, "nll", bias=bias)
    (grad,) = torch.autograd.grad(loss, bias, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        grad.square().sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"special_ids": 2}, r"special_ids is a tuple of ids, got the number 2; write \(id,\)"),
        ({"step": "defered"}, "step is what deftune.step_stats returns, or 'deferred', got 'defered'"),
        ({"progress": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_a_context_says_what_is_wrong_with_it(arguments, message):
    with pytest.raises(ValueError, match=message):
        Context(**arguments)


def test_eaft_takes_its_norm_as_a_number_too():
    from deftune.objectives.family import Eaft

    assert Eaft(norm=3) == deftune.objective("eaft(norm=3)")
