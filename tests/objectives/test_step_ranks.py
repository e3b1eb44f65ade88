"""`step_stats` over several processes: unequal tokens, a rank without any, the same numbers everywhere."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deftune
from deftune.objectives.stats import TokenStats
from ranks import run_ranks

SPECS = ["clip", "cayley-released", "mile(2) | floor(0.1)", "clip | mean_one"]


def tokens() -> TokenStats:
    generator = torch.Generator().manual_seed(0)
    return deftune.token_stats(torch.randn(11, 30, generator=generator) * 3, torch.arange(11))


def some(stats: TokenStats, part: slice) -> TokenStats:
    return TokenStats(stats.log_p[part], stats.entropy[part], stats.log_collision[part], stats.targets[part], 30)


def worker(rank: int, world: int, folder: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    stats = tokens()
    shares = [[slice(0, 3), slice(3, 8)], [slice(0, 0)], [slice(8, 11)]][:world]
    if world == 2:
        shares = [[slice(0, 8), slice(8, 11)], [slice(0, 0)]]
    for spec in SPECS:
        got = deftune.step_stats(spec, [some(stats, part) for part in shares[rank]])
        want = deftune.step_stats(spec, [stats], local=True)
        assert got.num_items == want.num_items == 11
        assert got.values.keys() == want.values.keys()
        for key, value in want.values.items():
            assert abs(float(got.values[key] - value)) <= 1e-12, (spec, key)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_over_ranks_it_is_the_whole_step(world: int, tmp_path: Path):
    run_ranks(worker, (world, str(tmp_path)), world)


def test_an_empty_step_is_an_error():
    with pytest.raises(ValueError, match="no supervised token on any rank; skip it or check the labels"):
        deftune.step_stats("clip", [some(tokens(), slice(0, 0))])
