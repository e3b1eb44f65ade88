"""The fused linear loss against every installed peer, in one run, on whatever device there is.

    python benchmarks/linear_loss.py                               # the paper's shapes on a GPU, a small one on a CPU
    python benchmarks/linear_loss.py --shapes 8192,576,49152 --json out.json --markdown out.md
    python benchmarks/linear_loss.py --hidden smollm2.safetensors  # real hidden states, head and labels
    python benchmarks/linear_loss.py --scaling 4096,8192,16384     # cost and memory against the number of tokens
    python benchmarks/linear_loss.py --shards 8                    # one of 8 ranks that share the vocabulary

Peers are used where they import: liger_kernel, cut_cross_entropy, trl, quack. Every row is forward + backward on the
same inputs, 10% of the rows ignored.

- floor: 6 N D V at the GEMM rate the card sustains (8192^3 looped for 3 s in the same run), N counting supervised rows
- ms: median of the repeats; spread: the two halves' medians, apart, in per cent. Below 20 ms the host's moods last
  longer than the repeats: ten rounds over all contenders in turn; spread: from the fastest round to the slowest
- GPU busy: the kernels' own time in a step (torch.profiler); the rest of ms is waiting for the host. Over three steps,
  which can be faster than the card's power limit would let many be
- extra memory: peak - inputs - dX - dW in float32
- error: gradients against float64 from the same inputs, ||g - g64|| / ||g64||
- --shards: the work of rank 0, in one process whose reductions do nothing; times, without communication. The floor is
  that of V / shards classes; "whole" is a head of so many classes, and "x whole" the time beside that one's
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Loss, contenders, ours
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import deftune
from deftune.losses import graphs
from deftune.losses.shards import chunks_of

PAPER_SHAPES = [(8192, 576, 49152), (16384, 1536, 151936), (16384, 3584, 152064), (16384, 4096, 128256)]
CPU_SHAPES = [(2048, 576, 49152)]
ROUNDS, SHORT = 10, 20.0  # rounds of a contender whose step takes less than these milliseconds


# --- inputs -----------------------------------------------------------------------------------------------------------


def synthetic(n: int, d: int, v: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states whose target probability spans a strong model's spectrum, most of it near 1; 10% ignored."""
    torch.manual_seed(0)
    weight = torch.randn(v, d, device=device) / d**0.5
    targets = torch.randint(v, (n,), device=device)
    strength = torch.rand(n, 1, device=device) * 24
    hidden = weight[targets] * strength + torch.randn(n, d, device=device)
    targets[torch.rand(n, device=device) < 0.1] = deftune.IGNORE_INDEX
    return hidden.to(dtype), weight.to(dtype), targets


def read_hidden(path: Path, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    from safetensors.torch import load_file  # pyright: ignore

    tensors = load_file(path)
    return tensors["hidden"].to(device, dtype), tensors["weight"].to(device, dtype), tensors["targets"].to(device)


# --- measuring --------------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sustained_rate(device: str, seconds: float = 3.0) -> float:
    """FLOP/s of a bf16 (CPU: float32) GEMM over the last half of some seconds: what the power limit lets it keep."""
    side = 8192 if device == "cuda" else 2048
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    b = torch.randn_like(a)
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(20 if device == "cuda" else 1):
            torch.mm(a, b)
        synchronize(device)
        rates.append((20 if device == "cuda" else 1) * 2 * side**3 / (time.perf_counter() - start))
    return statistics.mean(rates[len(rates) // 2 :])


def reference(spec: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 gradients of the mean loss, written out: gate (P - onehot), a few rows at a time."""
    n, d, v = len(hidden), hidden.shape[1], len(weight)
    w = weight.double()
    dx = torch.zeros(n, d, dtype=torch.float64, device=hidden.device)
    dw = torch.zeros(v, d, dtype=torch.float64, device=hidden.device)
    rows = (targets != deftune.IGNORE_INDEX).nonzero()[:, 0]
    objective = deftune.objective(spec)
    for part in rows.split(2048 if hidden.device.type == "cuda" else 512):
        x, y = hidden[part].double(), targets[part]
        z = x @ w.T
        stats = deftune.token_stats(z, y)  # float64, itself tested against 50 digits
        dz = torch.softmax(z, -1)
        dz[torch.arange(len(part), device=z.device), y] -= 1
        dz *= objective.gate(stats)[:, None] / len(rows)
        dx[part] = dz @ w
        dw.addmm_(dz.T, x)
    return dx, dw


def error(got: Tensor, want: Tensor) -> float:
    total = 0.0
    for a, b in zip(got.split(8192), want.split(8192)):
        total += float((a.double() - b).square().sum())
    return (total / float(want.square().sum())) ** 0.5


class Peak:
    """Peak bytes above what is there at the start: allocator's on CUDA, resident set on Linux otherwise."""

    def __init__(self, device: str):
        self.device = device

    def __enter__(self) -> Peak:
        if self.device == "cuda":
            torch.cuda.synchronize()
            graphs.clear()  # the buffers that deftune keeps between calls count as well
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.base = self._resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.base
        else:
            self.bytes = self._resident("VmHWM") - self.base

    @staticmethod
    def _resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Contender:
    """A loss on inputs of its own: its steps, timed in rounds."""

    def __init__(self, loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]):
        hidden, weight, self.targets = (t.detach() for t in inputs)
        self.hidden, self.weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        self.loss, self.device = loss, hidden.device.type
        self.medians: list[float] = []

    def step(self) -> Tensor:
        self.hidden.grad = self.weight.grad = None
        out = self.loss(self.hidden, self.weight, self.targets)
        out.backward()
        return out

    def measure(self, repeats: int) -> dict[str, Any]:
        """Loss, gradients, peak memory, and the first round."""
        value = self.step().item()  # compiles
        self.step()
        self.hidden.grad = self.weight.grad = None
        gc.collect()
        with Peak(self.device) as peak:
            for _ in range(4 if self.device == "cuda" else 1):  # a graph is captured by the third
                self.step()
        self.run_round(repeats)
        busy = self.busy_ms()
        assert self.hidden.grad is not None
        grad_bytes = self.hidden.grad.nbytes + 4 * self.weight.numel()
        extra = max(0.0, (peak.bytes - grad_bytes) / 2**30)
        grads = (self.hidden.grad, self.weight.grad)
        return {"loss": value, "extra_gib": extra, "busy_ms": busy, "grads": grads, **self.times()}

    def busy_ms(self, steps: int = 3) -> float | None:
        """The time that the GPU's kernels take in a step, whatever the host does between them."""
        if self.device != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(steps):
                self.step()
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in seen.key_averages()) / steps / 1e3

    def run_round(self, repeats: int, warmup: int = 0) -> None:
        milliseconds: list[float] = []
        for turn in range(warmup + repeats):
            synchronize(self.device)
            start = time.perf_counter()
            self.step()
            synchronize(self.device)
            if turn >= warmup:
                milliseconds.append(1e3 * (time.perf_counter() - start))
        half = repeats // 2
        self.halves = [statistics.median(milliseconds[:half]), statistics.median(milliseconds[half:])]
        self.medians.append(statistics.median(milliseconds))

    def times(self) -> dict[str, float]:
        """Median of the rounds, and how far they are apart; of a single round its two halves."""
        ms = statistics.median(self.medians)
        apart = self.medians if len(self.medians) > 1 else self.halves
        return {"ms": ms, "spread": (max(apart) - min(apart)) / ms, "rounds": len(self.medians)}


def run_shape(
    inputs: tuple[Tensor, Tensor, Tensor], rate: float, repeats: int, only: str, name: str
) -> tuple[dict[str, Any], list[str]]:
    hidden, weight, targets = inputs
    (n, d), v = hidden.shape, len(weight)
    rows = int((targets != deftune.IGNORE_INDEX).sum())
    floor = 6 * rows * d * v / rate * 1e3
    title = f"{name}N {n} ({rows} supervised), D {d}, V {v}; floor {floor:.2f} ms"
    print(title, flush=True)
    table: dict[str, Any] = {}
    truth: dict[str, tuple[Tensor, Tensor]] = {}
    again: dict[str, Contender] = {}
    for label, spec, make in contenders(hidden.device.type):
        if only not in label:
            continue
        try:
            contender = Contender(make(), inputs)
            result = contender.measure(repeats)
        except Exception as failure:  # a peer's compiler has exceptions of its own; the table says what happened
            if label.startswith("deftune"):
                raise
            table[label] = {"failed": f"{type(failure).__name__}: {failure}"[:200]}
            print(label, "not run:", table[label]["failed"].splitlines()[0], flush=True)
            continue
        if spec not in truth:
            truth[spec] = reference(spec, *inputs)
        dx, dw = result.pop("grads")
        table[label] = result | {"error_dx": error(dx, truth[spec][0]), "error_dw": error(dw, truth[spec][1])}
        print(f"{label} {result['ms']:.2f} ms", flush=True)
        if result["ms"] < SHORT:
            again[label] = contender
        del dx, dw, contender
        gc.collect()
        if hidden.device.type == "cuda":
            torch.cuda.empty_cache()
    for _ in range(ROUNDS - 1):
        for contender in again.values():
            contender.run_round(repeats, warmup=4)  # what another one has cleared is captured again
    for label, contender in again.items():
        table[label] |= contender.times()
    for result in table.values():
        if "ms" in result:
            result["ratio"] = result["ms"] / floor
    lines = [
        f"\n### {title}\n",
        "| | ms | x floor | spread | GPU busy ms | extra GiB | error dX | error dW |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [table_line(label, result) for label, result in table.items()]
    print("\n".join(lines), flush=True)
    return {"n": n, "supervised": rows, "d": d, "v": v, "floor_ms": floor, "rows": table}, lines


def table_line(label: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"| {label} | not run: {result['failed'].splitlines()[0][:80]} | | | | | | |"
    busy = "-" if result["busy_ms"] is None else f"{result['busy_ms']:.2f}"
    return (
        f"| {label} | {result['ms']:.2f} | {result['ratio']:.2f} | {result['spread']:.1%} | {busy} "
        f"| {result['extra_gib']:.2f} | {result['error_dx']:.1e} | {result['error_dw']:.1e} |"
    )


def run_scaling(
    tokens: list[int], d: int, v: int, device: str, dtype: torch.dtype, repeats: int
) -> tuple[list[dict[str, float]], list[str]]:
    lines = [
        f"\n### Cost and memory against the number of tokens, deft, D {d}, V {v}\n",
        "| tokens | ms | ms per 1k supervised tokens | extra GiB |\n|---|---|---|---|",
    ]
    table: list[dict[str, float]] = []
    for n in tokens:
        inputs = synthetic(n, d, v, device, dtype)
        rows = int((inputs[2] != deftune.IGNORE_INDEX).sum())
        result = Contender(ours("deft"), inputs).measure(repeats)
        result.pop("grads")
        table.append({"n": n, "supervised": rows, **result})
        lines.append(f"| {n} | {result['ms']:.2f} | {1e3 * result['ms'] / rows:.3f} | {result['extra_gib']:.2f} |")
        del inputs, result
    print("\n".join(lines), flush=True)
    return table, lines


def run_shards(
    shards: int, n: int, d: int, v: int, device: str, dtype: torch.dtype, rate: float, repeats: int
) -> tuple[dict[str, Any], list[str]]:
    """The loss on the first of some shards of a vocabulary beside the loss of a vocabulary of that size."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shards)
    hidden, weight, targets = synthetic(n, d, v, device, dtype)
    layout = chunks_of(v, shards)
    classes = layout[0][1]
    rows = int((targets != deftune.IGNORE_INDEX).sum())
    floor = 6 * rows * d * classes / rate * 1e3
    part, ignored = weight[:classes].clone(), targets == deftune.IGNORE_INDEX
    small = torch.where(ignored, targets, targets % classes)
    table: dict[str, Any] = {}
    made: dict[str, Contender] = {}
    for spec in ("deft", "nll"):
        for reduced in (True, False):
            # the layout is given: ranks that do not exist cannot be asked for it
            shard = deftune.VocabShard(0, v, None, reduced, layout)
            name = f"{spec}, one of {shards} shards, dX {'reduced' if reduced else 'left to the caller'}"
            made[name] = Contender(ours(spec, shard=shard, backend="triton,torch"), (hidden, part, targets))
        made[f"{spec}, whole"] = Contender(ours(spec), (hidden, part, small))
        made[f"{spec}, whole, no graphs"] = Contender(ours(spec, backend="triton,torch"), (hidden, part, small))
    for name, contender in made.items():
        table[name] = contender.measure(repeats)
        table[name].pop("grads")
    short = min(result["ms"] for result in table.values()) < SHORT
    for _ in range(ROUNDS - 1 if short and device == "cuda" else 0):
        for contender in made.values():
            contender.run_round(repeats, warmup=4)
    lines = [
        f"\n### One of {shards} shards: N {n} ({rows} supervised), D {d}, {classes} of {v} classes; "
        f"floor {floor:.2f} ms\n",
        f"A step would reduce {rows * 3 * 8 / 2**20:.2f} MiB (MAX) and {rows * 4 * 8 / 2**20:.2f} MiB (SUM) of sums, "
        f"and {n * d * 4 / 2**20:.0f} MiB of dX unless the caller does; none of this is in the times.\n",
        "| | ms | x floor | x whole | spread | extra GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, contender in made.items():
        table[name] |= contender.times()
    for name, result in table.items():
        result["ratio"] = result["ms"] / floor
        result["of_whole"] = result["ms"] / table[f"{name.partition(',')[0]}, whole"]["ms"]
        lines.append(
            f"| {name} | {result['ms']:.2f} | {result['ratio']:.2f} | {result['of_whole']:.2f} "
            f"| {result['spread']:.1%} | {result['extra_gib']:.2f} |"
        )
    print("\n".join(lines), flush=True)
    dist.destroy_process_group()
    return {"n": n, "supervised": rows, "d": d, "v": v, "shards": shards, "floor_ms": floor, "rows": table}, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="N,D,V (default: the paper's on a GPU, one small shape on a CPU)")
    parser.add_argument("--hidden", type=Path, help="safetensors with hidden [N, D], weight [V, D] and targets [N]")
    parser.add_argument("--scaling", help="token counts, e.g. 4096,8192: cost and memory of deft at the first shape")
    parser.add_argument("--shards", type=int, help="time one of so many vocabulary shards, in one process")
    parser.add_argument("--only", default="", help="only contenders whose name contains this")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rate = sustained_rate(device)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    head = f"{name}, torch {torch.__version__}, {dtype}; sustained GEMM {rate / 1e12:.3g} TFLOP/s"
    command = shlex.join(["python", "benchmarks/linear_loss.py", *sys.argv[1:]])
    lines = [f"`{command}`\n\n{head}"]
    print(lines[0], flush=True)
    results: dict[str, Any] = {"machine": head, "command": command, "rate": rate, "shapes": []}
    if args.hidden:
        inputs = read_hidden(args.hidden, device, dtype)
        table, text = run_shape(inputs, rate, args.repeats, args.only, "real hidden states: ")
        results["shapes"].append(table | {"hidden": args.hidden.name})
        lines += text
    shapes = [tuple(map(int, s.split(","))) for s in args.shapes or []]
    if args.shapes is None and not args.hidden and not args.scaling:
        shapes = PAPER_SHAPES if device == "cuda" else CPU_SHAPES
    if args.shards:
        for shape in shapes:
            table, text = run_shards(args.shards, *shape, device, dtype, rate, args.repeats)  # pyright: ignore
            results["shapes"].append(table)
            lines += text
    for shape in shapes if not args.scaling and not args.shards else []:
        table, text = run_shape(synthetic(*shape, device, dtype), rate, args.repeats, args.only, "")  # pyright: ignore
        results["shapes"].append(table)
        lines += text
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.scaling:
        _, d, v = shapes[0] if shapes else (PAPER_SHAPES if device == "cuda" else CPU_SHAPES)[0]
        tokens = [int(n) for n in args.scaling.split(",")]
        results["scaling"], text = run_scaling(tokens, d, v, device, dtype, args.repeats)
        lines += text
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
