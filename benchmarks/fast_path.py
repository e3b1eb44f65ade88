"""Does the fast path of a GPU train as the plain one? The losses of 20 steps of `deftune train`, both ways.

    python benchmarks/fast_path.py MODEL rows.jsonl.gz --json out.json --markdown out.md     # on a GPU
    python benchmarks/fast_path.py MODEL rows.jsonl.gz --parts --objectives deft             # which part differs?
    python benchmarks/fast_path.py MODEL rows.jsonl.gz --steps 3 --rows 8 --length 64        # a try on a CPU

Plain: padded rows with torch's memory-efficient attention, no compiled code, float32 weights under autocast. Fast: rows
end to end (`train.attention: varlen`), compiled layers, bfloat16 weights with float32 masters. A third run computes in
float32, plainly. On a CPU all three are in float32, or the first two in bfloat16 with --precision bf16. All begin with
the same weights and see the same rows. Differences are relative, the largest of a step. The exit code is 1 if the fast
path is farther than --tolerance from the plain one, and farther from float32 than the plain one is. Needs
deftune[train].

--parts trains more runs, which tell the parts of the fast path apart: each part alone, and one after the other. Three
controls say how far runs are apart that nobody calls different: the plain run again (does it repeat bitwise?), with
another attention kernel of torch, and with micro-batches of half the size. Of each run the table has the difference
from the plain run in the first step, where no weight has been updated, its root mean square over the steps, its signed
mean (rounding without a direction gives about nothing) and the largest; and the root mean square from float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

EXACT = {"attention": "efficient", "compile": False, "weights": "float32", "precision": "fp32"}
PLAIN = {"attention": "efficient", "compile": False, "weights": "float32"}
VARLEN, MASTERS = {"attention": "varlen"}, {"weights": "bfloat16_with_masters"}
FAST = VARLEN | MASTERS | {"compile": "layers"}
PARTS: dict[str, dict[str, Any]] = {
    "control: plain again": {},
    "control: another kernel": {"attention": "math"},
    "control: half the micro-batch": {"micro_batch_size": 0.5},
    "rows end to end": VARLEN,
    "masters": MASTERS,
    "compiled layers": {"compile": "layers"},
    "rows end to end, masters": VARLEN | MASTERS,
    "rows end to end, compiled layers": VARLEN | {"compile": "layers"},
}
"""What a run of --parts changes about the plain one; all three parts together are the fast path."""


def run(args: argparse.Namespace, objective: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run, and the tokens per second of its later steps."""
    from deftune.artifacts.config import RunConfig
    from deftune.training.train import train_run

    micro = max(1, round(args.rows * options.get("micro_batch_size", 1)))
    config = RunConfig.model_validate(
        {
            "run": str(folder),
            "objective": objective,
            "model": {"name": args.model},
            "data": {"train": [{"path": args.data, "limit": 64 * args.steps}], "max_length": args.length},
            "train": {
                "max_steps": args.steps, "batch_size": 2 * args.rows, "epochs": 100,
                "learning_rate": args.learning_rate, "seed": 1, **options, "micro_batch_size": micro,
            },
        }
    )  # fmt: skip
    outcome = train_run(config, save=False)
    records = [record for record in outcome.run.read_metrics() if "loss" in record and not record.get("final")]
    later = [record["tokens_per_second"] for record in records[args.steps // 2 :]]
    return {"losses": [record["loss"] for record in records], "tokens_per_second": statistics.median(later)}


def signed(found: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """The relative difference of each step's loss."""
    return [(a - b) / abs(b) for a, b in zip(found["losses"], reference["losses"], strict=True)]


def largest(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference of a step's loss."""
    return max(map(abs, signed(found, reference)))


def render_parts(result: dict[str, Any]) -> list[str]:
    """The runs of --parts beside the plain one, the fast one last."""
    lines = ["", "| run | first step | root mean square | mean | largest | root mean square from float32 | tokens/s |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    plain, exact = result["plain"], result["float32"]
    for name, one in {"plain": plain, **result["parts"], "all three parts": result["fast"]}.items():
        far, root = signed(one, plain), statistics.fmean(x * x for x in signed(one, exact)) ** 0.5
        cells = (far[0], statistics.fmean(x * x for x in far) ** 0.5, statistics.fmean(far), max(map(abs, far)), root)
        lines.append(f"| {name} | {' | '.join(f'{x:.1e}' for x in cells)} | {one['tokens_per_second']:,.0f} |")
    return lines


def render(found: dict[str, Any]) -> str:
    lines = [f"`python {found['command']}`", "", found["machine"], "",
             "| objective | loss, first and last step: plain | fast | fast from plain | plain from float32 | "
             "fast from float32 | tokens/s: plain | fast |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for objective, result in found["objectives"].items():
        plain, fast = result["plain"], result["fast"]
        ends = " | ".join(f"{one['losses'][0]:.4f} to {one['losses'][-1]:.4f}" for one in (plain, fast))
        speeds = " | ".join(f"{one['tokens_per_second']:,.0f}" for one in (plain, fast))
        far = " | ".join(f"{one:.1e}" for one in result["differences"].values())
        lines.append(f"| `{objective}` | {ends} | {far} | {speeds} |")
    for objective, result in found["objectives"].items():
        if "parts" in result:
            lines += ["", f"`{objective}`, beside the plain run:", *render_parts(result)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder or GGUF file")
    parser.add_argument("data")
    parser.add_argument("--objectives", default="nll,deft,eaft")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="rows of a micro-batch; a step has two")
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--parts", action="store_true", help="also runs that tell the parts of the fast path apart")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of the plain and fast runs on a CPU "
                        "(default: fp32)")  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu and args.precision:
        parser.error("--precision: on a GPU the plain and fast runs are in bfloat16")
    machine = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {"command": " ".join(sys.argv), "machine": f"{machine}, torch {torch.__version__}"}
    found["objectives"] = {}
    here: dict[str, Any] = {} if gpu else {"precision": args.precision or "fp32"}
    if not gpu and args.precision != "bf16":  # masters are of bfloat16 weights
        here |= {"weights": "float32"}
    plain_attention = {} if gpu else {"attention": "auto"}  # a CPU has no memory-efficient kernel

    for objective in args.objectives.split(","):
        with tempfile.TemporaryDirectory() as folder:

            def train(name: str, options: dict[str, Any], objective: str = objective, folder: str = folder) -> Any:
                return run(args, objective, Path(folder, name), options)

            plain = train("plain", PLAIN | plain_attention | here)
            fast = train("fast", PLAIN | FAST | here)
            exact = train("exact", EXACT if gpu else EXACT | {"attention": "math"})
            parts = {
                name: train(name.replace(" ", "-").replace(":", ""), PLAIN | plain_attention | options | here)
                for name, options in PARTS.items()
                if args.parts
            }
        differences = {
            "fast from plain": largest(fast, plain), "plain from float32": largest(plain, exact),
            "fast from float32": largest(fast, exact),
        }  # fmt: skip
        runs = {"plain": plain, "fast": fast, "float32": exact}
        found["objectives"][objective] = {**runs, "differences": differences, **({"parts": parts} if parts else {})}
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    text = render(found)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    far = [result["differences"] for result in found["objectives"].values()]
    return int(
        any(d["fast from plain"] > args.tolerance and d["fast from float32"] > d["plain from float32"] for d in far)
    )


if __name__ == "__main__":
    sys.exit(main())
