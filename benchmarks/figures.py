r"""The paper's figures from real runs of a small model: three regimes, five objectives, one command.

    python benchmarks/figures.py --strong gsm8k.jsonl.gz math.jsonl.gz --intermediate medquad.jsonl.gz \
        --weak generated:figlet_font --out figures        # on a GPU
    python benchmarks/figures.py ... --steps 2 --long-steps 5 --save-at 1 2 3 4 --batch 4 --long-batch 4 --micro 4 \
        --rows 6                                          # a CPU, to try

Every run is a `deftune train` run and every figure a `deftune analyze` command, which is printed; runs that are
finished are not run again. The long run, nll in the strong regime, is the one whose checkpoints show learning
conflicts: on an H200 its 264 steps of 256 rows took more than four minutes.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from deftune.cli import main as deftune
from deftune.training.config import RunConfig
from deftune.training.train import train_run


def source(path: str, rows: int) -> dict[str, Any]:
    name = path.removeprefix("generated:")
    return {"path": path} if name == path else {"generate": name, "limit": rows}


def train(args: argparse.Namespace, regime: str, objective: str, folder: Path, **settings: Any) -> Path:
    batch = settings.get("batch_size", args.batch)
    steps = settings.get("max_steps", args.steps)
    config = RunConfig.model_validate({
        "run": str(folder), "objective": objective, "model": {"name": args.model},
        "data": {"train": [source(path, batch * steps) for path in getattr(args, regime)], "max_length": args.length},
        "train": {
            "batch_size": batch, "micro_batch_size": args.micro, "max_steps": steps, "epochs": 1000, "keep": 1,
            "save_steps": 10**6, "learning_rate": args.learning_rate, "seed": 0, **settings,
        },
    })  # fmt: skip
    start = time.perf_counter()
    train_run(config, Console(stderr=True, quiet=True), title=folder.name)
    print(f"{folder}: {time.perf_counter() - start:.0f} s", flush=True)
    return folder


def run(*words: str | Path) -> None:
    """A deftune command, as a user would type it."""
    line = [str(word) for word in words]
    print("deftune", shlex.join(line), flush=True)
    if code := deftune(line):
        raise SystemExit(code)


def tokens(args: argparse.Namespace, model: str, regime: str, out: Path) -> Path:
    if not out.exists():
        run("analyze", "tokens", model, getattr(args, regime)[0], "--rows", str(args.rows), "--out", out,
            "--max-length", str(args.length), "--batch-tokens", str(args.batch_tokens))  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for regime in ("strong", "intermediate", "weak"):
        parser.add_argument(f"--{regime}", nargs="+", required=True, help="files, or generated:NAME; tables: the first")
    parser.add_argument("--objectives", nargs="+", default=["nll", "linear", "cayley", "deft", "eaft"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--work", type=Path, help="runs and token tables go here (default: OUT/work)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--long-steps", type=int, default=264)
    parser.add_argument("--long-batch", type=int, default=256)
    parser.add_argument("--save-at", type=int, nargs=4, default=[10, 100, 200, 210])
    parser.add_argument("--micro", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=200, help="rows of a token table")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    args = parser.parse_args()
    work: Path = args.work or args.out / "work"
    work.mkdir(parents=True, exist_ok=True)

    long = train(args, "strong", "nll", work / "long", batch_size=args.long_batch, max_steps=args.long_steps,
                 save_at=args.save_at)  # fmt: skip
    steps = [0, *args.save_at]
    at = {step: tokens(args, f"{long}:{step}", "strong", work / f"long-{step}.parquet") for step in steps}
    first, second, third, fourth = args.save_at
    pairs = [(0, first), (0, second), (third, fourth)]
    run("analyze", "conflicts", *[at[step] for pair in pairs for step in pair], "--out", args.out / "conflicts")

    runs: list[str] = []
    base: list[str] = []
    tuned: list[str] = []
    for regime in ("strong", "intermediate", "weak"):
        table = tokens(args, args.model, regime, work / f"{regime}-base.parquet")
        base.append(f"{regime}={table}")
        tuned.append(f"{regime}/base={table}")
        for objective in args.objectives:
            folder = train(args, regime, objective, work / f"{regime}-{objective}")
            runs.append(f"{regime}={folder}")
            table = tokens(args, str(folder), regime, work / f"{regime}-{objective}.parquet")
            tuned.append(f"{regime}/{objective}={table}")
    run("analyze", "gradients", *base, "--out", args.out / "gradients")
    run("analyze", "histograms", *tuned, "--out", args.out / "histograms")
    run("analyze", "progress", *runs, "--out", args.out / "progress")
    run("analyze", "progress", f"strong={long}", "--out", args.out / "progress-long")


if __name__ == "__main__":
    main()
