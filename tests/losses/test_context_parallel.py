"""A sequence divided among two ranks: attention over all of it, the loss of each rank's own places."""

import pytest
import torch
import torch.distributed as dist

import deftune
from ranks import run_ranks
from tolerances import tolerance

ROWS, LENGTH, D, V, RANKS = 3, 10, 6, 17, 2
CONTEXT = deftune.Context(progress=0.3, special_ids=(2,))
OBJECTIVES = ("nll", "linear", "cayley", "deft", "eaft", "deft | floor(0.2)", "linear | eos(nll)", "deft | warmup(0.5)")


def example():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (ROWS, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.3, -100)
    labels[:, LENGTH // 2] = ids[:, LENGTH // 2]  # the target of the first rank's last place is on the second rank
    sizes = [(V, D), (D, D), (D, D), (D, D), (V, D)]
    return ids, labels, [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


class Gathered(torch.autograd.Function):
    """The places of all ranks; the gradient of a rank's places is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(RANKS, 1)[dist.get_rank()]


def hidden_states(ids, places, weights, gather):
    """Causal attention; ``gather`` makes keys and values of the whole sequence."""
    embedding, q, k, v, _ = weights
    x = embedding[ids] + 0.1 * places[:, None]
    keys, values = gather(x @ k), gather(x @ v)
    mask = torch.where(torch.arange(keys.shape[1]) <= places[:, None], 0.0, -torch.inf)
    return x + ((x @ q) @ keys.transpose(1, 2) + mask).softmax(-1) @ values


def losses(hidden, head, targets, objective, count):
    from_logits = deftune.token_loss(hidden @ head.T, targets, objective, num_items=count, context=CONTEXT)
    fused = deftune.linear_loss(hidden, head, targets, objective, num_items=count, context=CONTEXT, backend="torch")
    return from_logits, fused


def compare(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    ids, labels, weights = example()
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # of whole rows: shifted before the division
    count = int((targets != -100).sum())
    part = slice(rank * LENGTH // RANKS, (rank + 1) * LENGTH // RANKS)
    for objective in OBJECTIVES:
        leaves = [weight.clone().requires_grad_() for weight in weights]
        whole = losses(
            hidden_states(ids, torch.arange(LENGTH), leaves, lambda x: x), leaves[-1], targets, objective, count
        )
        own = [weight.clone().requires_grad_() for weight in weights]
        states = hidden_states(ids[:, part], torch.arange(LENGTH)[part], own, Gathered.apply)
        mine = losses(states, own[-1], targets[:, part], objective, count)
        for expected, loss in zip(whole, mine):
            total = loss.detach().clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, expected.detach(), rtol=tolerance("split"), atol=0)
            gradients = torch.autograd.grad(loss, own, retain_graph=True)
            for gradient, reference in zip(gradients, torch.autograd.grad(expected, leaves, retain_graph=True)):
                gradient = gradient.clone()
                dist.all_reduce(gradient)
                worst = float((gradient - reference).abs().max() / reference.abs().max())
                assert worst <= tolerance("split"), (objective, worst)
        # labels that each rank shifts by itself lose a target at the boundary
        alone = torch.nn.functional.pad(labels[:, part][:, 1:], (0, 1), value=-100)
        short = losses(states.detach(), weights[-1], alone, objective, count)[0]
        dist.all_reduce(short)
        assert abs(float(short - whole[0])) > 1e-3, objective
    dist.destroy_process_group()


@pytest.mark.long
def test_a_divided_sequence_has_the_loss_and_gradients_of_the_whole(tmp_path):
    run_ranks(compare, (str(tmp_path),), RANKS)
