"""Does the fast path of a GPU train as the plain one? The losses of 20 steps of `deftune train`, both ways.

    python benchmarks/fast_path.py MODEL rows.jsonl.gz --json out.json --markdown out.md     # on a GPU
    python benchmarks/fast_path.py MODEL rows.jsonl.gz --steps 3 --rows 8 --length 64        # a try on a CPU, in float32

Plain: padded rows with torch's memory-efficient attention, no compiled code, float32 weights under autocast. Fast: rows end to
end (`train.attention: varlen`), compiled layers, bfloat16 weights with float32 masters; on a CPU the two differ by
compiled layers and rows end to end only. Both begin with the same weights and see the same rows. The exit code is 1
if a step's loss differs by more than --tolerance, relative. Needs deftune[train].
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

PLAIN = {"attention": "efficient", "compile": False, "weights": "float32"}
FAST = {"attention": "varlen", "compile": "layers", "weights": "bfloat16_with_masters"}


def run(args: argparse.Namespace, objective: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The losses of a run, and the tokens per second of its later steps."""
    from deftune.artifacts.config import RunConfig
    from deftune.training.train import train_run

    config = RunConfig.model_validate(
        {
            "run": str(folder),
            "objective": objective,
            "model": {"name": args.model},
            "data": {"train": [{"path": args.data, "limit": 64 * args.steps}], "max_length": args.length},
            "train": {
                "max_steps": args.steps, "batch_size": 2 * args.rows, "micro_batch_size": args.rows, "epochs": 100,
                "learning_rate": args.learning_rate, "seed": 1, **options,
            },
        }
    )  # fmt: skip
    outcome = train_run(config, save=False)
    records = [record for record in outcome.run.read_metrics() if "loss" in record and not record.get("final")]
    later = [record["tokens_per_second"] for record in records[args.steps // 2 :]]
    return {"losses": [record["loss"] for record in records], "tokens_per_second": statistics.median(later)}


def render(found: dict[str, Any]) -> str:
    lines = [f"`python {found['command']}`", "", found["machine"], "",
             "| objective | loss, first and last step: plain | fast | largest relative difference of a step | "
             "tokens/s: plain | fast |", "|---|---|---|---|---|---|"]  # fmt: skip
    for objective, result in found["objectives"].items():
        plain, fast = result["plain"], result["fast"]
        ends = " | ".join(f"{one['losses'][0]:.4f} to {one['losses'][-1]:.4f}" for one in (plain, fast))
        speeds = " | ".join(f"{one['tokens_per_second']:,.0f}" for one in (plain, fast))
        lines.append(f"| `{objective}` | {ends} | {result['difference']:.1e} | {speeds} |")
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
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    machine = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {"command": " ".join(sys.argv), "machine": f"{machine}, torch {torch.__version__}"}
    found["objectives"] = {}
    for objective in args.objectives.split(","):
        with tempfile.TemporaryDirectory() as folder:
            plain = run(args, objective, Path(folder, "plain"), PLAIN if gpu else PLAIN | {"attention": "auto"})
            fast = run(args, objective, Path(folder, "fast"), FAST if gpu else FAST | {"weights": "float32"})
        pairs = zip(plain["losses"], fast["losses"], strict=True)
        difference = max(abs(a - b) / abs(a) for a, b in pairs)
        found["objectives"][objective] = {"plain": plain, "fast": fast, "difference": difference}
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    text = render(found)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return int(any(result["difference"] > args.tolerance for result in found["objectives"].values()))


if __name__ == "__main__":
    sys.exit(main())
