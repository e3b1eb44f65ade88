"""`token_loss` on logits against F.cross_entropy and the straightforward softmax version, in one run.

    python benchmarks/token_loss.py                 # 4096 x 49152 float32, as in docs/benchmarks.md
    python benchmarks/token_loss.py --rows 512 --json out.json

Time is forward + backward, the median of the repeats, the rows interleaved so that drift hits all alike; the
spread is (max - min) / median. Peak memory is what a fresh process adds on top of its logits (resident set on CPU).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import deftune


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets)


def straightforward_deft(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What one writes from the paper: full softmax, stop-gradient on the focus."""
    log_probs = F.log_softmax(logits, -1)
    focus = log_probs.exp().square().sum(-1).detach()
    log_p = log_probs.gather(-1, targets[:, None])[:, 0]
    return (-torch.expm1(focus * log_p) / focus).mean()


CONTENDERS = {
    "F.cross_entropy": cross_entropy,
    "softmax deft": straightforward_deft,
    "token_loss deft": lambda z, y: deftune.token_loss(z, y, "deft"),
    "token_loss nll": lambda z, y: deftune.token_loss(z, y, "nll"),
}


def inputs(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator).mul_(3)
    targets = torch.randint(vocab, (rows,), generator=generator)
    return logits.requires_grad_(), targets


def step(name: str, logits: torch.Tensor, targets: torch.Tensor) -> float:
    logits.grad = None
    start = time.perf_counter()
    CONTENDERS[name](logits, targets).backward()
    return time.perf_counter() - start


def high_water_bytes() -> int:
    """The process's largest resident set so far (Linux; getrusage would inherit the parent's)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def peak_bytes(name: str, rows: int, vocab: int) -> int:
    """Peak resident bytes that one forward + backward adds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--rows", str(rows), "--vocab", str(vocab), "--peak-of", name],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--peak-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    logits, targets = inputs(args.rows, args.vocab)
    if args.peak_of:
        step(args.peak_of, *inputs(8, args.vocab))  # libraries loaded, threads started
        before = high_water_bytes()
        step(args.peak_of, logits, targets)
        print(high_water_bytes() - before)
        return

    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(args.repeats + 1):
        for name in CONTENDERS:
            taken = step(name, logits, targets)
            if repeat:  # the first round warms up
                seconds[name].append(taken)
    del logits
    base = statistics.median(seconds["F.cross_entropy"])
    rows: dict[str, dict[str, float]] = {}
    peaks = {name: peak_bytes(name, args.rows, args.vocab) for name in CONTENDERS}
    machine = f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}"
    print(f"{args.rows} x {args.vocab} float32, {machine}")
    print("| | time / F.cross_entropy | spread | peak memory / F.cross_entropy |\n|---|---|---|---|")
    for name, taken in seconds.items():
        median = statistics.median(taken)
        spread = (max(taken) - min(taken)) / median
        rows[name] = {"ratio": median / base, "spread": spread, "memory_ratio": peaks[name] / peaks["F.cross_entropy"]}
        print(f"| {name} | {median / base:.2f} | {spread:.0%} | {rows[name]['memory_ratio']:.2f} |")
    if args.json:
        with open(args.json, "w") as sink:
            json.dump(
                {"rows": args.rows, "vocab": args.vocab, "torch": torch.__version__, "results": rows}, sink, indent=1
            )


if __name__ == "__main__":
    main()
