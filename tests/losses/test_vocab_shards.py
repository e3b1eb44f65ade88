"""A vocabulary divided among 2 and 4 ranks: every objective equals one rank in float64, loss and gradients."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deftune
from battery import CASES, CONTEXT, names_in
from deftune import IGNORE_INDEX, Context, VocabShard, linear_loss, linear_token_stats, token_loss, token_stats
from ranks import run_ranks
from tolerances import tolerance

V, D, N = 23, 6, 31
EXACT = tolerance("split")  # the same float64 sums in another order
# of 23 classes: even as can be; uneven, one rank with a single class; a rank with no target; a rank without a class
SPLITS = {2: [(0, 12, 23), (0, 22, 23)], 4: [(0, 6, 12, 18, 23), (0, 1, 15, 15, 23)]}
NO_TARGET = range(12, 18)  # classes that no row has as its target: a whole shard of four


def example(dtype=torch.float64, seed=0):
    """Rows from flat to confident, some ignored; no target in one shard of four."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 3.0, N)[:, None]
    weight, bias = torch.randn(V, D, generator=generator).double(), torch.randn(V, generator=generator).double()
    targets = torch.randint(0, V, (N,), generator=generator)
    likeliest = (hidden @ weight.T).argmax(-1)
    targets = torch.where(torch.arange(N) % 3 == 0, likeliest, targets)
    targets = torch.where((targets >= NO_TARGET.start) & (targets < NO_TARGET.stop), 3, targets)
    targets[::5] = IGNORE_INDEX
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


def mine(bounds: tuple[int, ...]) -> slice:
    return slice(*[*pairwise(bounds)][dist.get_rank()])


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest entry."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    gap = (actual.double() - expected.double()).abs()
    return float(gap.max() / expected.double().abs().max().clamp(min=1e-30)) if gap.numel() else 0.0


def fused(inputs, targets, objective, upstream=None, **options):
    """(loss, gradients of hidden, weight and bias)."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    hidden, weight, bias = leaves
    loss = linear_loss(hidden, weight, targets, objective, bias=bias, context=CONTEXT, backend="torch", **options)
    return loss.detach(), torch.autograd.grad(loss, leaves, upstream)


def from_logits(z, targets, objective, upstream=None, **options):
    leaf = z.clone().requires_grad_()
    loss = token_loss(leaf, targets, objective, context=CONTEXT, **options)
    return loss.detach(), torch.autograd.grad(loss, [leaf], upstream)


def check_every_objective(bounds: tuple[int, ...]) -> None:
    hidden, weight, bias, targets = example()
    part, weights = mine(bounds), torch.linspace(0, 2, N, dtype=torch.float64)
    shard = VocabShard(part.start, V)
    upstream = torch.linspace(-1, 2, N, dtype=torch.float64)
    z = hidden @ weight.T + bias
    settings = [{}, {"reduction": "sum"}, {"reduction": "none", "upstream": upstream}, {"weights": weights}]
    for number, case in enumerate(CASES):
        for options in settings if number % 6 == 0 else settings[:1]:
            what = f"{case} {options.keys()} {bounds}"
            loss, (dz,) = from_logits(z, targets, case.objective, **options)
            got, (mine_dz,) = from_logits(z[:, part].contiguous(), targets, case.objective, shard=shard, **options)
            assert error(got, loss) <= EXACT, what
            assert (mine_dz - dz[:, part]).abs().amax() <= EXACT * dz.abs().amax() if mine_dz.numel() else True, what
            loss, grads = fused((hidden, weight, bias), targets, case.objective, **options)
            for chunk_rows in (None, 7) if options else (7,):
                got, parts = fused(
                    (hidden, weight[part], bias[part]), targets, case.objective, shard=shard, chunk_rows=chunk_rows,
                    **options,
                )  # fmt: skip
                assert error(got, loss) <= EXACT, what
                assert error(parts[0], grads[0]) <= EXACT, what
                for own, whole in zip(parts[1:], grads[1:]):
                    gap = (own - whole[part]).abs()
                    assert not gap.numel() or gap.max() <= EXACT * whole.abs().max(), what


def check_every_label(bounds: tuple[int, ...]) -> None:
    """Each of 150 classes is a target once: no label is taken for IGNORE_INDEX, or for another one."""
    generator = torch.Generator().manual_seed(1)
    z, targets = torch.randn(150, 150, generator=generator, dtype=torch.float64), torch.arange(150)
    shard = VocabShard.chunked(150)
    part = slice(shard.first, shard.first + -(-150 // dist.get_world_size()))
    loss, (dz,) = from_logits(z, targets, "deft")
    got, (own,) = from_logits(z[:, part], targets, "deft", shard=shard)
    assert error(got, loss) <= EXACT and error(own, dz[:, part]) <= EXACT
    loss, grads = fused((torch.eye(150).double(), z.T.contiguous(), z[0]), targets, "deft")
    got, parts = fused((torch.eye(150).double(), z.T[part].contiguous(), z[0, part]), targets, "deft", shard=shard)
    assert error(got, loss) <= EXACT and error(parts[0], grads[0]) <= EXACT
    assert all(error(own, whole[part]) <= EXACT for own, whole in zip(parts[1:], grads[1:]))


def check_chunks(bounds: tuple[int, ...]) -> None:
    """A rank with one class beside one with 100,000: all ranks must take chunks of the same rows."""
    generator, large, rank = torch.Generator().manual_seed(2), 100_001, dist.get_rank()
    hidden, weight = torch.randn(130, 2, generator=generator), torch.randn(large, 2, generator=generator)
    targets = torch.randint(0, large, (130,), generator=generator)
    part = slice(0, 1) if rank == 0 else slice(1, large) if rank == 1 else slice(large, large)
    loss = linear_loss(hidden, weight[part], targets, "deft", shard=VocabShard(part.start, large))
    expected = linear_loss(hidden, weight, targets, "deft")
    assert abs(float(loss - expected)) <= tolerance("fused loss") * max(1, float(expected))


def check_head_options(bounds: tuple[int, ...]) -> None:
    """Scale and softcap, and classes that cannot be: all of a shard's."""
    hidden, weight, bias, targets = example()
    part = mine(bounds)
    shard = VocabShard(part.start, V)
    bias[NO_TARGET.start : NO_TARGET.stop] = -torch.inf
    for options in ({"logit_scale": 0.7, "softcap": 6.0}, {}):
        capped = bias.clamp(min=-50) if options else bias  # under a softcap -inf would be -c
        loss, grads = fused((hidden, weight, capped), targets, "deft", **options)
        got, parts = fused((hidden, weight[part], capped[part]), targets, "deft", shard=shard, **options)
        assert error(got, loss) <= EXACT and error(parts[0], grads[0]) <= EXACT
        for own, whole in zip(parts[1:], grads[1:]):
            assert not own.numel() or (own - whole[part]).abs().max() <= EXACT * whole.abs().max()
        assert got.isfinite() and all(grad.isfinite().all() for grad in parts)


def check_statistics(bounds: tuple[int, ...]) -> None:
    """Every column, the likeliest tokens, and the derivatives of log p and entropy."""
    hidden, weight, _, targets = example()
    part = mine(bounds)
    shard = VocabShard(part.start, V)
    expected = token_stats(hidden @ weight.T, targets)
    local = token_stats(hidden @ weight[part].T, targets, shard=shard)
    fused_stats = linear_token_stats(hidden, weight[part], targets, shard=shard, top_k=9)
    for stats in (local, fused_stats):
        assert stats.vocab_size == V and torch.equal(stats.targets, expected.targets)
        for name in ("log_p", "entropy", "log_collision"):
            assert error(getattr(stats, name), getattr(expected, name)) <= EXACT, name
        for k in (1, 4, 9):
            assert error(stats.top_log_p(k), expected.top_log_p(k)) <= EXACT
    assert local.top_log_p(40).shape == (len(expected), V)
    for softcap in (None, 5.0):
        grads = []
        for sharded in (False, True):
            rows = weight[part] if sharded else weight
            leaves = [hidden.clone().requires_grad_(), rows.clone().requires_grad_()]
            stats = linear_token_stats(*leaves, targets, softcap=softcap, shard=shard if sharded else None)
            value = (stats.log_p * torch.linspace(0, 1, len(stats)) + 0.5 * stats.entropy).sum()
            grads.append(torch.autograd.grad(value, leaves))
        (dx, dw), (own_dx, own_dw) = grads
        assert error(own_dx, dx) <= EXACT
        assert not own_dw.numel() or (own_dw - dw[part]).abs().max() <= EXACT * dw.abs().max()


def check_accumulation(bounds: tuple[int, ...]) -> None:
    """Two micro-batches with num_items and the statistics of the step, for objectives of the whole step too."""
    hidden, weight, bias, targets = example()
    part = mine(bounds)
    shard, halves = VocabShard(part.start, V), (slice(0, 17), slice(17, N))
    count = int((targets != IGNORE_INDEX).sum())
    for spec in ("deft", "clip", "mile", "cayley-released | mean_one", "eaft(k=5)"):
        loss, grads = fused((hidden, weight, bias), targets, spec)
        batches = [
            linear_token_stats(hidden[h], weight[part], targets[h], bias=bias[part], shard=shard) for h in halves
        ]
        step = None
        if deftune.objective(spec).kind != "local":  # every rank has all tokens: none is asked for more
            step = deftune.step_stats(spec, batches, context=CONTEXT, local=True)
        context = Context(CONTEXT.progress, CONTEXT.special_ids, step)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight[part], bias[part])]
        total = sum(
            linear_loss(
                leaves[0][h], leaves[1], targets[h], spec, bias=leaves[2], num_items=count, context=context, shard=shard
            )
            for h in halves
        )
        parts = torch.autograd.grad(total, leaves)
        assert error(total.detach(), loss) <= EXACT and error(parts[0], grads[0]) <= EXACT, spec
        assert not parts[1].numel() or (parts[1] - grads[1][part]).abs().max() <= EXACT * grads[1].abs().max()


def check_sequence_parallel(bounds: tuple[int, ...]) -> None:
    """The hidden states are gathered from shards of the sequence, and their gradient is reduce-scattered there."""
    hidden, weight, _, targets = example()
    part, ranks, rank = mine(bounds), dist.get_world_size(), dist.get_rank()
    rows = -(-N // ranks) * ranks
    hidden = torch.cat([hidden, hidden.new_zeros(rows - N, D)])
    targets = torch.cat([targets, targets.new_full((rows - N,), IGNORE_INDEX)])

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            whole = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(whole, x)
            return torch.cat(whole)

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(grad := grad.clone())
            return grad.chunk(ranks)[rank]

    whole = hidden.clone().requires_grad_()
    expected = torch.autograd.grad(linear_loss(whole, weight, targets, "deft"), whole)[0].chunk(ranks)[rank]
    own = hidden.chunk(ranks)[rank].clone().requires_grad_()
    shard = VocabShard(part.start, V, reduce_hidden=False)
    loss = linear_loss(Gather.apply(own), weight[part], targets, "deft", shard=shard)
    assert error(torch.autograd.grad(loss, own)[0], expected) <= EXACT


def check_lower_precision(bounds: tuple[int, ...]) -> None:
    """float32 beside float64; bfloat16 beside one rank, rounded once like its gradient."""
    hidden, weight, bias, targets = example()
    part = mine(bounds)
    for spec in ("nll", "deft", "eaft(k=5)", "cayley", "mile"):
        for dtype, bound in ((torch.float32, "fused gradient"), (torch.bfloat16, "bfloat16 gradient")):
            low = [x.to(dtype) for x in (hidden, weight, bias)]
            whole = [x.double() for x in low] if dtype == torch.float32 else low
            loss, grads = fused(whole, targets, spec)
            got, parts = fused((low[0], low[1][part], low[2][part]), targets, spec, shard=VocabShard(part.start, V))
            assert got.dtype == torch.float32 and all(grad.dtype == dtype for grad in parts)
            assert abs(float(got - loss)) <= tolerance("fused loss") * max(1, abs(float(loss))), spec
            for own, all_rows in zip(parts, (grads[0], grads[1][part], grads[2][part])):
                gap = float((own.double() - all_rows.double()).norm())
                assert gap <= tolerance(bound) * float(all_rows.double().norm()), (spec, dtype)


def check_twice(bounds: tuple[int, ...]) -> None:
    """A second backward over the same graph, no gradient of the head, no gradient at all, and no supervised token."""
    hidden, weight, _, targets = example()
    part = mine(bounds)
    shard = VocabShard(part.start, V)
    own = weight[part].clone().requires_grad_()
    loss = linear_loss(hidden, own, targets, "deft", shard=shard)
    first = torch.autograd.grad(loss, own, retain_graph=True)[0].clone()
    assert torch.equal(first, torch.autograd.grad(loss, own)[0])
    leaf = hidden.clone().requires_grad_()
    frozen = torch.autograd.grad(linear_loss(leaf, weight[part], targets, "deft", shard=shard), leaf)[0]
    assert error(frozen, fused_hidden(hidden, weight, targets)) <= EXACT
    with torch.no_grad():
        assert error(linear_loss(hidden, weight[part], targets, "deft", shard=shard), loss.detach()) <= EXACT
    compiled = torch.compile(lambda x, w: linear_loss(x, w, targets, "deft", shard=shard), backend="eager")
    assert torch.equal(compiled(hidden, own).detach(), loss.detach())  # a graph break, not another loss
    nothing = torch.full_like(targets, IGNORE_INDEX)
    for value in (
        linear_loss(leaf, own, nothing, "deft", shard=shard),
        token_loss(leaf @ own.T, nothing, "deft", shard=shard),
    ):
        value.backward()
        assert value == 0 and not leaf.grad.any() and not own.grad.any()


def fused_hidden(hidden, weight, targets):
    leaf = hidden.clone().requires_grad_()
    return torch.autograd.grad(linear_loss(leaf, weight, targets, "deft"), leaf)[0]


def expect(message: str, call) -> None:
    try:
        call()
    except ValueError as found:
        assert message in str(found), f"{message!r} is not in {found}"
    else:
        raise AssertionError(f"no error, expected {message!r}")
    dist.barrier()  # every rank has raised


def check_refusals(bounds: tuple[int, ...]) -> None:
    hidden, weight, _, targets = example()
    part, rank = mine(bounds), dist.get_rank()

    def loss(shard, rows=weight[part], labels=targets, **more):
        return lambda: linear_loss(hidden, rows, labels, "deft", shard=shard, **more)

    moved = VocabShard(part.start + (rank == 1), V)
    expect("leave a gap", loss(moved))
    expect("overlap", loss(VocabShard(part.start - (rank == 1), V)))
    expect("and vocab_size is 24", loss(VocabShard(part.start, V + 1)))
    expect("the ranks differ in vocab_size", loss(VocabShard(part.start, V + rank)))
    expect("overlap", loss(VocabShard(0, V), weight))
    expect("overlap", lambda: token_loss(hidden @ weight.T, targets, "deft", shard=VocabShard(0, V)))
    expect("expected a deftune.VocabShard", loss("tp"))
    expect("sparse: cannot be combined with a shard", loss(VocabShard(part.start, V), sparse=deftune.Sparse()))
    if min(b - a for a, b in pairwise(bounds)):
        expect("graphs are for a whole vocabulary", lambda: loss_with_graphs(hidden, weight[part], targets, part))
    wrong = targets.clone()
    wrong[1] = V
    expect("has label 23; a label must be below the vocabulary size 23", loss(VocabShard(part.start, V), labels=wrong))
    poisoned = weight[part].clone()
    if rank == 1 and len(poisoned):
        poisoned[0] = torch.nan
    if bounds[2] > bounds[1]:
        expect("has NaN or +inf logits", loss(VocabShard(part.start, V), poisoned))
    alone = targets.clone()  # data-parallel ranks, whose rows differ
    alone[1] = 1 if rank else 0
    expect(
        "the ranks that share the vocabulary were given different targets",
        loss(VocabShard(part.start, V), labels=alone),
    )
    group = dist.new_group([0])
    if rank:
        lonely = VocabShard(part.start, V, group)
        try:
            linear_loss(hidden, weight[part], targets, "deft", shard=lonely)
        except ValueError as found:
            assert "this rank is not in the shard's process group" in str(found)
    else:
        try:
            linear_loss(hidden, weight[part], targets, "deft", shard=VocabShard(part.start, V, group))
        except ValueError as found:
            assert f"the shards have {part.stop} classes and vocab_size is {V}" in str(found)


def loss_with_graphs(hidden, weight, targets, part):
    import os

    os.environ["TRITON_INTERPRET"] = "1"  # else the device refuses first
    try:
        leaf = hidden.float()[:, :4].contiguous().requires_grad_()
        shard = VocabShard(part.start, V)
        return linear_loss(leaf, weight.float()[:, :4], targets, "deft", shard=shard, backend="graphs")
    finally:
        del os.environ["TRITON_INTERPRET"]


def check_dtensors(bounds: tuple[int, ...]) -> None:
    """Placements instead of a shard: DTensor divides 23 classes as torch.chunk does."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    hidden, weight, bias, targets = example()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    z, labels = hidden @ weight.T + bias, distribute_tensor(targets, mesh, [Replicate()])
    for case in CASES[::4]:
        loss, (dz,) = from_logits(z, targets, case.objective)
        for given in (targets, labels):
            logits = distribute_tensor(z, mesh, [Shard(-1)]).requires_grad_()
            got = token_loss(logits, given, case.objective, context=CONTEXT)
            got.backward()
            assert error(got.detach(), loss) <= EXACT and logits.grad.placements == (Shard(1),)
            assert error(logits.grad.full_tensor(), dz) <= EXACT
        loss, grads = fused((hidden, weight, bias), targets, case.objective)
        placed = [(hidden, Replicate()), (weight, Shard(0)), (bias, Shard(0))]
        leaves = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x, placement in placed]
        got = linear_loss(leaves[0], leaves[1], targets, case.objective, bias=leaves[2], context=CONTEXT)
        got.backward()
        assert error(got.detach(), loss) <= EXACT and leaves[1].grad.placements == (Shard(0),)
        for leaf, expected in zip(leaves, grads):
            assert error(leaf.grad.full_tensor(), expected) <= EXACT
    # sequence parallel: the gradient comes back in shards of the sequence
    rows = distribute_tensor(hidden, mesh, [Shard(0)]).requires_grad_()
    head = distribute_tensor(weight, mesh, [Shard(0)])
    linear_loss(rows.redistribute(placements=[Replicate()]), head, targets, "deft").backward()
    assert rows.grad.placements == (Shard(0),)
    assert error(rows.grad.full_tensor(), fused_hidden(hidden, weight, targets)) <= EXACT
    stats = linear_token_stats(distribute_tensor(hidden, mesh, [Replicate()]), head, targets)
    assert error(stats.log_p, token_stats(hidden @ weight.T, targets).log_p) <= EXACT
    whole = distribute_tensor(z, mesh, [Replicate()])
    assert error(token_loss(whole, targets, "deft"), token_loss(z, targets, "deft")) <= EXACT

    expect("hidden is a plain tensor, so it is not known", lambda: linear_loss(hidden, head, targets, "deft"))
    expect("hidden: is a DTensor and the weight is not", lambda: linear_loss(rows, weight, targets, "deft"))
    expect("hidden: is divided (S(0)) over mesh dimension 0", lambda: linear_loss(rows, head, targets, "deft"))
    partial = DTensor.from_local(z, mesh, [Partial()])
    expect("logits: P(sum) over mesh dimension 0", lambda: token_loss(partial, targets, "deft"))
    shard = VocabShard.chunked(V)
    logits = distribute_tensor(z, mesh, [Shard(-1)])
    expect("drop one of them", lambda: token_loss(logits, targets, "deft", shard=shard))
    expect("targets: is a DTensor, the logits are not", lambda: token_loss(z, labels, "deft"))
    expect("targets: is a DTensor, hidden and weight are not", lambda: linear_loss(hidden, weight, labels, "deft"))
    factors = distribute_tensor(torch.ones(N), mesh, [Replicate()])
    expect("weights: is a DTensor, the logits are not", lambda: token_loss(z, targets, "deft", weights=factors))
    alone = distribute_tensor(bias, mesh, [Shard(0)])
    expect("bias: is a DTensor, hidden and weight", lambda: linear_loss(hidden, weight, targets, "deft", bias=alone))
    labels = distribute_tensor(targets, mesh, [Shard(0)])
    logits, replicated = distribute_tensor(z, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()])
    for name, loss in (
        ("logits", lambda *given, **options: token_loss(logits, labels, *given, **options)),
        ("hidden", lambda *given, **options: linear_loss(rows, replicated, labels, *given, **options)),
    ):
        expect(f"the rows of {name} are divided over mesh dimension 0", lambda loss=loss: loss("deft"))
        expect(f"{name}: `mile` depends on the whole", lambda loss=loss: loss("mile", reduction="sum"))
        summed = loss("deft", reduction="sum").detach()
        dist.all_reduce(summed)
        assert error(summed, token_loss(z if name == "logits" else z - bias, targets, "deft", reduction="sum")) <= EXACT
    if dist.get_world_size() == 4:
        check_two_dimensions(hidden, weight, targets)


def check_two_dimensions(hidden, weight, targets) -> None:
    """Rows over two ranks, classes over two: the head's gradient is to be summed over the rows."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hidden, targets = hidden[:30], targets[:30]
    count = int((targets != IGNORE_INDEX).sum())
    rows = distribute_tensor(hidden, mesh, [Shard(0), Replicate()]).requires_grad_()
    head = distribute_tensor(weight, mesh, [Replicate(), Shard(0)]).requires_grad_()
    labels = distribute_tensor(targets, mesh, [Shard(0), Replicate()])
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(linear_loss(*leaves, targets, "deft"), leaves)
    linear_loss(rows, head, labels, "deft", num_items=count).backward()
    for leaf, whole in zip((rows, head), expected):
        assert error(leaf.grad.full_tensor(), whole) <= EXACT


def check_fsdp(bounds: tuple[int, ...]) -> None:
    """FSDP2 also places a weight as Shard(0): whole inside its forward; refused outside, where rows differ by rank."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    hidden, weight, _, targets = example()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Head(nn.Linear):
        def forward(self, hidden, targets):
            assert type(self.weight.data) is torch.Tensor and self.weight.shape == (V, D)
            return linear_loss(hidden, self.weight, targets, "deft", num_items=count)

    head = Head(D, V, bias=False, dtype=torch.float64)
    head.weight.data = weight.clone()
    fully_shard(head)
    count = int((targets != IGNORE_INDEX).sum())
    rows, labels = hidden.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
    expect("FSDP2: call the loss inside the forward", lambda: linear_loss(rows, head.weight, labels, "deft"))
    (ranks * head(rows, labels)).backward()  # FSDP2 averages over the ranks
    whole = weight.clone().requires_grad_()
    expected = torch.autograd.grad(linear_loss(hidden, whole, targets, "deft"), whole)[0]
    assert error(head.weight.grad.full_tensor(), expected) <= EXACT


CHECKS = [
    check_every_objective, check_every_label, check_chunks, check_head_options, check_statistics, check_accumulation,
    check_sequence_parallel, check_lower_precision, check_twice, check_refusals, check_dtensors, check_fsdp,
]  # fmt: skip


def start_rank(rank: int, world: int, folder: str, names: list[str], *arguments) -> None:
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for name in names:
        globals()[name](*arguments)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "world, bounds",
    [
        pytest.param(world, bounds, marks=[] if (world, bounds) == (2, SPLITS[2][0]) else pytest.mark.long)
        for world in SPLITS
        for bounds in SPLITS[world]
    ],
    ids=str,
)
def test_ranks_that_share_a_vocabulary_are_one_rank(world, bounds, tmp_path):
    run_ranks(start_rank, (world, str(tmp_path), [check.__name__ for check in CHECKS], bounds), world)


def check_on_a_gpu(bounds: tuple[int, ...]) -> None:
    """Both ranks on one GPU, reduced by gloo: the Triton backend in bfloat16 against itself on a whole vocabulary."""
    torch.cuda.set_device(0)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(700, 64, generator=generator), torch.randn(5001, 64, generator=generator) / 4
    targets = torch.randint(0, 5001, (700,), generator=generator)
    targets = torch.where(torch.arange(700) % 3 == 0, (hidden @ weight.T).argmax(-1), targets)
    targets[::7] = IGNORE_INDEX
    hidden, weight, targets = hidden.cuda().bfloat16(), weight.cuda().bfloat16(), targets.cuda()
    shard = VocabShard.chunked(5001)
    part = slice(shard.first, min(5001, shard.first + 2501))
    for spec in ("nll", "deft", "eaft", "clip", "mile"):
        results = []
        for rows, given in ((weight, None), (weight[part], shard)):
            leaves = [hidden.clone().requires_grad_(), rows.clone().requires_grad_()]
            loss = linear_loss(*leaves, targets, spec, backend="triton", shard=given, chunk_rows=256)
            results.append((loss.detach(), torch.autograd.grad(loss, leaves)))
        (loss, (dx, dw)), (got, (own_dx, own_dw)) = results
        assert abs(float(got - loss)) <= tolerance("fused loss") * max(1, abs(float(loss))), spec
        for own, whole in ((own_dx, dx), (own_dw, dw[part])):
            gap = float((own.double() - whole.double()).norm())
            assert gap <= tolerance("bfloat16 gradient") * float(whole.double().norm()), spec
    deftune.raise_pending()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")
def test_two_ranks_on_a_gpu(tmp_path):
    mp.spawn(start_rank, args=(2, str(tmp_path), ["check_on_a_gpu"], (0, 2501, 5001)), nprocs=2)


def test_the_battery_has_every_objective_and_modifier():
    covered = set().union(*(names_in(case.spec) for case in CASES))
    assert {*deftune.OBJECTIVES, *deftune.MODIFIERS} <= covered


def test_without_ranks():
    hidden, weight, _, targets = example()
    with pytest.raises(ValueError, match=r"torch.distributed, which is not initialised"):
        linear_loss(hidden, weight, targets, "deft", shard=VocabShard(0, V))
