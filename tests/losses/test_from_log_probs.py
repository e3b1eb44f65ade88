"""`loss_from_log_probs` against `token_loss`, which has the oracle's tests: same value, same gradient at the logits."""

import pytest
import torch

import deftune
from battery import CASES, CONTEXT, Case, extreme_columns, sample_logits
from deftune import Context
from deftune.losses import columns_read, loss_from_log_probs
from tolerances import assert_close

WITHOUT_TOP = [case for case in CASES if "top_log_p" not in columns_read(case.objective)]


def columns(logits, targets):
    """What an engine such as verl hands over: differentiable columns, also those that must not carry a gradient."""
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropy, log_probs.exp().square().sum(-1).log()


@pytest.mark.parametrize("case", WITHOUT_TOP, ids=str)
def test_value_and_gradient_are_those_of_token_loss(case: Case):
    logits, targets = sample_logits(15, 8)
    results = []
    for from_columns in (False, True):
        leaf = logits.clone().requires_grad_()
        if from_columns:
            log_p, entropy, log_collision = columns(leaf, targets)
            loss = loss_from_log_probs(
                log_p, case.objective, vocab_size=8, entropy=entropy, log_collision=log_collision, targets=targets,
                context=CONTEXT,
            )  # fmt: skip
        else:
            loss = deftune.token_loss(leaf, targets, case.objective, reduction="none", context=CONTEXT)
        upstream = torch.linspace(0.5, 2.0, 15, dtype=torch.float64)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf, upstream)))
    assert_close(results[1][0], results[0][0], "closed form", condition=1 + results[0][0], what="loss")
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in WITHOUT_TOP if case.kind == "local"], ids=str)
def test_extreme_tokens_have_gradient_minus_gate_and_no_nan(case: Case):
    stats, _ = extreme_columns()
    log_p = stats.log_p.clone().requires_grad_()
    given = dict(entropy=stats.entropy, log_collision=stats.log_collision, targets=stats.targets)
    loss = loss_from_log_probs(log_p, case.objective, vocab_size=stats.vocab_size, context=CONTEXT, **given)
    gate, value = case.objective.evaluate(stats, CONTEXT)
    torch.testing.assert_close(loss.detach(), value, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), log_p)[0], -gate, rtol=0, atol=0)


def test_columns_that_an_objective_reads():
    assert columns_read("nll") == columns_read("cayley | floor(0.2)") == columns_read("top(0.1)") == frozenset()
    assert columns_read("deft | warmup(0.1)") == columns_read("nll | eos(deft)") == {"log_collision"}
    assert columns_read("mile") == columns_read("eaft(norm=full)") == {"entropy"}
    assert columns_read("eaft | blend(deft, 0.5)") == {"top_log_p", "log_collision"}


def test_errors_say_what_is_missing():
    log_p = torch.tensor([-1.0])
    with pytest.raises(ValueError, match=r"`deft` reads log_collision, which this call lacks; pass log_collision="):
        loss_from_log_probs(log_p, "deft", vocab_size=4)
    with pytest.raises(ValueError, match=r"`eaft` reads the likeliest tokens of each row; use deftune.token_loss"):
        loss_from_log_probs(log_p, "eaft", vocab_size=4)
    with pytest.raises(ValueError, match=r"log_p: must be float32 or float64, got torch\.bfloat16"):
        loss_from_log_probs(log_p.bfloat16(), "nll", vocab_size=4)
    with pytest.raises(ValueError, match=r"log_p: expected a tensor, got list"):
        loss_from_log_probs([-1.0], "nll", vocab_size=4)  # pyright: ignore
    with pytest.raises(ValueError, match="needs the training progress"):
        loss_from_log_probs(log_p, "nll | warmup(0.1)", vocab_size=4, context=Context())
    empty = torch.zeros(0, requires_grad=True)
    assert loss_from_log_probs(empty, "nll", vocab_size=4).sum().requires_grad


def test_an_objective_that_reads_the_targets_needs_them():
    given = dict(vocab_size=4, context=Context(special_ids=(0,)))
    with pytest.raises(ValueError, match=r"`linear \| eos\(nll\)` reads targets, which this call lacks; pass targets="):
        loss_from_log_probs(torch.tensor([-1.0, -2.0]), "linear | eos(nll)", **given)
    with pytest.raises(ValueError, match=r"targets has 1 rows for 2 tokens; one for each token"):
        loss_from_log_probs(torch.tensor([-1.0, -2.0]), "linear | eos(nll)", targets=torch.tensor([0]), **given)


@pytest.mark.parametrize(
    ("log_p", "context", "text"),
    [
        (torch.tensor(-1.0), None, r"the columns must be flat and equally long, got shapes \[\(\)"),
        (torch.tensor([-1.0]), 0.5, r"context: expected a deftune\.Context\(\.\.\.\), got float"),
    ],
)
def test_bad_input_is_named(log_p, context, text):
    with pytest.raises(ValueError, match=text):
        loss_from_log_probs(log_p, "linear", vocab_size=4, context=context)


def test_a_column_that_is_nan_is_not_trained_as_nll():
    log_p = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    collision = torch.tensor([torch.nan, -1.0, -0.5])
    loss = loss_from_log_probs(log_p, "deft", vocab_size=4, log_collision=collision)
    loss.sum().backward()
    assert loss.isnan().tolist() == log_p.grad.isnan().tolist() == [True, False, False]
    unread = loss_from_log_probs(log_p, "linear", vocab_size=4, entropy=collision, log_collision=collision)
    assert unread.isfinite().all()


@pytest.mark.parametrize("spec", ["nll", "cayley", "deft", "alpha(0.5)", "top(1)"])
def test_a_log_p_that_rounding_left_above_zero_is_a_certain_token(spec):
    log_p = torch.tensor([4e-6], requires_grad=True)
    loss = loss_from_log_probs(log_p, spec, vocab_size=4, log_collision=torch.tensor([1e-6]))
    loss.sum().backward()
    assert loss.item() == 0 and log_p.grad.item() == -1


def test_a_second_derivative_is_refused():
    logits, targets = sample_logits(15, 8)
    leaf = logits.clone().requires_grad_()
    log_p, _, log_collision = columns(leaf, targets)
    loss = loss_from_log_probs(log_p, "deft", vocab_size=8, log_collision=log_collision).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="the loss has a first derivative only"):
        gradient.square().sum().backward()
