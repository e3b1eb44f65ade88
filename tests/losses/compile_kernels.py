"""Compile every Triton kernel for an H100 or H200 (sm_90) on a machine without a GPU; `test_triton_rows.py` runs this.

Triton's interpreter does not check types, shared memory or what the compiler can lower. Here the launch functions of
`triton_rows` and `triton_adamw` get CPU tensors, and each launch is compiled to a cubin instead of being started.
Prints the name of each kernel that was compiled.
"""

from itertools import product

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from deftune.losses import triton_gradients, triton_rows, triton_statistics
from deftune.losses.head import Head, Slices
from deftune.losses.statistics import COLUMNS
from deftune.training import triton_adamw

SHARED_MEMORY = 227 << 10  # bytes that a block may use on sm_90
ROWS, TOKENS, WIDTH = 256, 300, 576
compiled: set[str] = set()


class Target:
    """A driver of Triton without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class OneRank:
    """Of a vocabulary shard, what the launch functions read; no other rank is asked."""

    first = 1000

    def total(self, column: Tensor) -> Tensor:
        return column


def compile_launch(kernel: JITFunction, grid: tuple[int, ...]):
    def launch(*arguments, **options):
        found = kernel.warmup(*arguments, grid=grid, **options)
        name = kernel.fn.__name__
        assert found.asm["cubin"], name
        assert found.metadata.shared <= SHARED_MEMORY, f"{name}: {found.metadata.shared} bytes of shared memory"
        compiled.add(name)
        if name == "adamw_kernel":  # whole blocks of aligned tensors: 16 bytes at a time
            assert "ld.global.v4" in found.asm["ptx"] and "st.global.v4" in found.asm["ptx"]

    return launch


def launch_all(dtype: torch.dtype, classes: int, whole: bool, sharded: bool, keep: bool, top: int) -> None:
    """All kernels of a chunk; ``whole``: the head has a bias, a softcap and a scale."""
    bias, scale, softcap = (torch.zeros(classes), 0.5, 30.0) if whole else (None, 1.0, None)
    head = Head(torch.zeros(classes, WIDTH, dtype=dtype), bias, scale, softcap, OneRank() if sharded else None)  # pyright: ignore
    hidden, rows = torch.zeros(TOKENS, WIDTH, dtype=dtype), triton_rows
    places, labels, facts, told = rows.survey(torch.zeros(TOKENS, dtype=torch.long), classes, -100, None)
    rows.survey(torch.zeros(TOKENS, dtype=torch.int32), classes, -100, facts[1:])
    x, y, number, nan = hidden[:ROWS], labels[:ROWS], facts[:1], facts[1:]
    vectors = rows.target_logits(hidden, places, labels, head, number)
    z_y, ref, v, t = vectors[:, :ROWS].unbind()
    e = torch.zeros(ROWS, -(-classes // 64) * 64, dtype=dtype) if keep else None
    tiles = rows.exponentials(x, y, ref, head, Slices(head.weight, dtype), e, number, 0)
    columns = rows.aligned(len(COLUMNS), ROWS, torch.float64, x.device)
    out = rows.new_sums(ROWS, x.device) if sharded else columns
    u, scaled = torch.zeros(ROWS, WIDTH), torch.zeros_like(x)
    for product_of_e in (None, u) if keep else (None,):
        rows.reduce_tiles(tiles, z_y, out, x, y, ref, head, e, product_of_e, nan, number, 0)
    if sharded:
        rows.rescale_sums(out)
        rows.merged_columns(out, z_y, columns, nan)
    if e is None:
        return
    found = torch.zeros(ROWS, top, dtype=torch.float64) if top else None
    if found is not None:
        rows.likeliest(x, z_y, ref, tiles, e, head, columns, number, 0, found, torch.zeros(ROWS, dtype=torch.float64))
    for given in ((u, hidden, scaled), (u, hidden.float(), None), (None, None, scaled)):
        rows.finish_rows(columns[0], columns, ref, z_y, v, t, x, y, places[:ROWS], head, 0.5, *given)
    rows.subtract_targets(hidden, places, rows.sort_targets(labels, classes), vectors[3], torch.zeros(classes, WIDTH))
    rows.column_sums(e[:, :classes], v)
    rows.column_sums(e[:, :classes], v, absolute=True)
    rows.add_products(torch.zeros(classes, WIDTH), torch.zeros(3, classes), torch.zeros(3, WIDTH))
    rows.scaled([u, torch.zeros(classes, WIDTH), torch.zeros(classes)], torch.ones(()), [dtype] * 3)
    if not sharded:  # the kernels of graphs
        table, record = torch.zeros(15, dtype=torch.long), torch.zeros(len(COLUMNS) + 2, ROWS, dtype=torch.float64)
        rows.survey_told(table, table, told, classes, -100)
        rows.take_rows(table, dtype, x, y, facts)
        rows.finish_told(table, record, vectors[:, :ROWS], x, y, facts, head, u, dtype, scaled, found)


def launch_updates(gradient: torch.dtype, rounds: bool) -> None:
    parameter = torch.zeros(5000)
    table = triton_adamw.Table(
        [parameter], [torch.zeros(5000)], [torch.zeros(5000)], [parameter.bfloat16() if rounds else None]
    )
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    gradients = [parameter.to(gradient)]
    table.update(gradients, range(1), torch.ones(1), group, None, None)
    table.norm(gradients)


def main() -> None:
    triton.runtime.driver.set_active(Target())  # pyright: ignore
    JITFunction.__getitem__ = compile_launch
    for dtype, whole, sharded in product((torch.bfloat16, torch.float32), (False, True), (False, True)):
        launch_all(dtype, 1032, whole, sharded, keep=True, top=0 if whole else 20)
        launch_all(dtype, 1024, whole, sharded, keep=False, top=0)  # whole tiles
    for gradient, rounds in product((torch.bfloat16, torch.float32), (False, True)):
        launch_updates(gradient, rounds)
    kernels = {name for module in (triton_gradients, triton_statistics, triton_adamw) for name in vars(module)}
    missing = {name for name in kernels if name.endswith("_kernel")} - compiled
    assert not missing, f"not compiled: {sorted(missing)}"
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
