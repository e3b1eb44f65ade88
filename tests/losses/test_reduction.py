"""The divisor of a mean: the supervised tokens of the call, 1 where there is none, or num_items."""

import pytest
import torch

import deftune
from deftune.losses.reduction import mean_items, reduce_losses


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_mean_divides_by_the_count_and_by_one_for_no_token(count):
    assert mean_items(None, count) == max(count, 1)
    assert mean_items(None, torch.tensor(count)).item() == max(count, 1)
    losses = torch.full((count,), 3.0)
    assert reduce_losses(losses, "mean", None, count).item() == (3.0 if count else 0.0)
    assert reduce_losses(losses, "mean", None, torch.tensor(count)).item() == (3.0 if count else 0.0)


@pytest.mark.parametrize("num_items", [3.0, torch.tensor(3.0), torch.tensor([3.0])])
def test_num_items_replaces_the_count(num_items):
    assert reduce_losses(torch.full((2,), 3.0), "mean", num_items, 2).item() == 2.0


def test_the_mean_of_one_token_is_its_loss():
    logits, target = torch.tensor([[1.0, 2.0, -0.5]], dtype=torch.float64), torch.tensor([2])
    per_token = deftune.token_loss(logits, target, "deft", reduction="none")
    assert deftune.token_loss(logits, target, "deft").item() == per_token.item()
    hidden, weight = torch.ones(1, 2, dtype=torch.float64), torch.tensor([[0.5, 0.5], [1, 1], [-0.25, -0.25]]).double()
    assert deftune.linear_loss(hidden, weight, target, "deft").item() == pytest.approx(per_token.item(), rel=1e-14)
