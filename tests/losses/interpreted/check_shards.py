"""`linear_loss(backend="triton")` on vocabulary shards of two ranks, in Triton's interpreter, against float64."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).parent


def start_rank(rank: int, folder: str, checks: list[tuple]) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
    torch.set_num_threads(1)
    from deftune.losses import triton_rows

    for name in ("BLOCK_M_FLOAT32", "BLOCK_N", "BLOCK_K_FLOAT32"):
        setattr(triton_rows, name, 16)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, *arguments in checks:
        globals()[name](*arguments)
    dist.destroy_process_group()


def loss_and_gradients(bounds: tuple[int, int, int], objective, head: str, reduction: str) -> None:
    """40 supervised rows in chunks of 16, 16 and 8, or half of each where a row's likeliest tokens are asked for.

    Row 4 is beyond E's range, its target on the second rank.
    """
    from examples import error, sample

    from battery import CONTEXT
    from deftune import VocabShard, linear_loss, token_loss
    from deftune import objective as parse
    from deftune.losses.triton_backend import TritonBackend
    from tolerances import assert_near, tolerance

    chunk = 8 if parse(objective).top_k else 16
    tokens = 25 * chunk // 8
    TritonBackend.first_rows = staticmethod(lambda *_: chunk)
    hidden, weight, targets = sample(tokens)
    weight[30] = 0
    weight[30, 0] = -150.0
    hidden[:, 0] = 0
    hidden[4, 0], targets[4] = 1.0, 30
    bias = torch.randn(37, generator=torch.Generator().manual_seed(7)) if head != "plain" else None
    scale, softcap = (1.0, None) if head == "plain" else (0.7, None if parse(objective).top_k else 6.0)
    part = slice(*bounds[dist.get_rank() : dist.get_rank() + 2])
    inputs = [hidden, weight[part]] + ([] if bias is None else [bias[part]])
    inputs = [x.clone().requires_grad_() for x in inputs]
    upstream = torch.linspace(-1, 1, tokens) if reduction == "none" else None
    loss = linear_loss(
        *inputs[:2], targets, objective, bias=inputs[2] if bias is not None else None, context=CONTEXT, softcap=softcap,
        logit_scale=scale, backend="triton", shard=VocabShard(part.start, 37), reduction=reduction,
    )  # fmt: skip
    got = torch.autograd.grad(loss, inputs, upstream)
    whole = [x.double().clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    z = whole[0] @ whole[1].T
    z = (z if bias is None else z + whole[2]) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = token_loss(z, targets, objective, context=CONTEXT, reduction=reduction)
    truth = torch.autograd.grad(expected, whole, None if upstream is None else upstream.double())
    expected = expected.detach()
    assert_near(loss.detach(), expected, "fused loss", condition=expected.abs().clamp(min=1), what=str(objective))
    for own, all_rows, name in zip(got, (truth[0], *(grad[part] for grad in truth[1:])), ("hidden", "weight", "bias")):
        assert error(own, all_rows) <= tolerance("fused gradient"), f"{objective}, d {name}: {error(own, all_rows)}"


def statistics(bounds: tuple[int, int, int]) -> None:
    """Columns, likeliest tokens (more than a rank has), derivatives; and a NaN on one rank is an error on both."""
    from examples import error, sample

    from deftune import VocabShard, linear_loss, linear_token_stats, token_stats
    from tolerances import assert_near, tolerance

    hidden, weight, targets = sample(20)
    part = slice(*bounds[dist.get_rank() : dist.get_rank() + 2])
    shard = VocabShard(part.start, 37)
    stats = linear_token_stats(hidden, weight[part], targets, top_k=5, backend="triton", shard=shard)
    z = hidden.double() @ weight.double().T
    expected = token_stats(z, targets)
    for name in ("log_p", "entropy", "log_collision"):
        assert_near(getattr(stats, name), getattr(expected, name), "float32 entropy", condition=2 + 2 * z.abs().max())
    assert_near(stats.top_log_p(5), expected.top_log_p(5), "log p", condition=2 + 2 * z.abs().max())
    leaves = [hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()]
    column = linear_token_stats(*leaves, targets, backend="triton", shard=shard).log_p
    got = torch.autograd.grad(column.mean(), leaves)
    whole = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    truth = torch.autograd.grad(linear_token_stats(*whole, targets).log_p.mean(), whole)
    for own, all_rows in zip(got, (truth[0], truth[1][part])):
        assert error(own, all_rows) <= tolerance("fused gradient")
    poisoned = weight[part].clone()
    if dist.get_rank():
        poisoned[0] = torch.nan
    for rows, labels in ((poisoned, targets), (weight[part], (targets + dist.get_rank()).clamp(0, 36))):
        with pytest.raises(ValueError, match=r"or nothing but -inf.*were given different targets"):
            linear_loss(hidden, rows, torch.where(targets < 0, targets, labels), "deft", backend="triton", shard=shard)
        dist.barrier()


def reduced_numbers(bounds: tuple[int, int, int]) -> None:
    """No memory that nothing was written to goes to the other ranks: NCCL may be told to stop at a NaN.

    20 tokens, some of them ignored, are no multiple of the rows that planes are padded to. Deterministic algorithms
    fill new memory with NaN.
    """
    from examples import sample

    from deftune import VocabShard, linear_loss

    hidden, weight, targets = sample(20)
    assert (targets < 0).any()
    part = slice(*bounds[dist.get_rank() : dist.get_rank() + 2])
    leaves = [hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()]
    all_reduce, reduced = dist.all_reduce, 0

    def watched(tensor, *arguments, **options):
        nonlocal reduced
        reduced += 1
        assert not tensor.isnan().any(), f"reduction {reduced}, of {tuple(tensor.shape)}"
        return all_reduce(tensor, *arguments, **options)

    torch.use_deterministic_algorithms(True)
    dist.all_reduce = watched
    try:
        linear_loss(*leaves, targets, "deft", backend="triton", shard=VocabShard(part.start, 37)).backward()
    finally:
        dist.all_reduce = all_reduce
        torch.use_deterministic_algorithms(False)
    assert reduced == 4  # z_y, then of one chunk the maxima and the sums, then d hidden


WHOLE = "bias, softcap and scale"
FEW = [
    ("loss_and_gradients", (0, 20, 37), "deft", "plain", "mean"),
    ("loss_and_gradients", (0, 35, 37), "eaft(k=5)", WHOLE, "mean"),
    ("loss_and_gradients", (0, 16, 37), "clip", WHOLE, "none"),
    ("statistics", (0, 35, 37)),
    ("reduced_numbers", (0, 20, 37)),
]
MANY = [
    ("loss_and_gradients", bounds, spec, head, reduction)
    for bounds in ((0, 20, 37), (0, 1, 37))
    for spec in ("nll", "cayley", "eaft(k=5)", "mile", "clip")
    for head, reduction in (("plain", "mean"), (WHOLE, "none"))
]


@pytest.mark.parametrize("checks", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_two_ranks(checks, tmp_path):
    mp.spawn(start_rank, args=(str(tmp_path), checks), nprocs=2)
