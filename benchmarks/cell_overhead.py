"""What a cell of a comparison costs beside its training steps, its answers and its token table, part by part.

    python benchmarks/cell_overhead.py MODEL --data DATA --json out.json --markdown out.md      # on a GPU
    python benchmarks/cell_overhead.py MODEL --data DATA --rows 64 --micro 1 --questions 4      # a try on a CPU

The cells are those of the study's strong regime (benchmarks/study/strong.yaml: GSM8K, 3,712 rows, 200 rows for the
token table) with few steps and few questions, which do not count. They run one after the other through `deftune
compare`, as the study's do: --repeats times a fresh process that takes --cells cells. So the first cell of a process
also pays for its start, the data and the model, and the later ones do not. The seconds are those of cell.json: `start`
is the wait for the process, `prepare` data, model and trainer, `around steps` the call of the trainer without its
steps, `save` the weights taken from it (nothing is written), `load` moving the model, `other` what no part holds.
`between` is the time from the end of the cell to the end that the scheduler saw, which is in no cell's clock. Needs
deftune[train] and deftune[eval].
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

STUDY = Path(__file__).parent / "study/strong.yaml"
OBJECTIVES = ["nll", "deft", "deft | floor(0.2)", "linear", "eaft", "cayley"]
PARTS = ("start", "prepare", "around steps", "save", "load", "other")


def comparison_of(args: argparse.Namespace, folder: Path) -> Any:
    """The study's strong regime with one learning rate and seed, ``args.cells`` objectives, few steps and questions."""
    from deftune.comparison.grid import load_comparison

    content = yaml.safe_load(STUDY.read_text())
    regime = content["regimes"]["strong"]
    regime["data"]["train"][0] |= {"path": str(args.data / "gsm8k/train.jsonl.gz"), "limit": args.rows}
    regime["evaluate"][0] |= {
        "data": str(args.data), "limit": args.questions, "max_new_tokens": 16, "batch_size": args.questions,
    }  # fmt: skip
    regime["tokens"][0] |= {"path": str(args.data / "gsm8k/test.jsonl.gz"), "limit": min(200, args.rows)}
    content |= {"folder": str(folder), "objectives": OBJECTIVES[: args.cells], "seeds": [0]}
    content["model"]["name"] = args.model
    content["train"] |= {"max_steps": args.steps}
    if args.micro:
        content["train"] |= {"micro_batch_size": args.micro, "batch_size": 2 * args.micro}
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(content))
    return load_comparison(config)


def parts_of(state: dict[str, Any]) -> dict[str, float]:
    """The overhead of a finished cell by part; they sum up to ``overhead_seconds``."""
    parts = {part: state[f"{part}_seconds"] for part in ("start", "prepare", "save", "load")}
    parts["around steps"] = state["train_seconds"] - state["cost"]["seconds"]
    return {part: parts.get(part, state["overhead_seconds"] - sum(parts.values())) for part in PARTS}


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The cells of one fresh process, in order."""
    from deftune.comparison.schedule import Children, check_comparison, open_comparison

    comparison = comparison_of(args, folder)
    check_comparison(comparison, print)
    open_comparison(comparison)
    found: list[dict[str, Any]] = []
    for cell, state in Children(1)(comparison.cells()[-args.cells :], lambda _: True):
        seen, about = time.time(), cell.state()
        if state != "finished":
            raise RuntimeError(
                f"{cell.name} {state}: {about.get('error', '')}\n{(cell.folder / 'log.txt').read_text()}"
            )
        found.append({
            "cell": cell.name, "overhead": about["overhead_seconds"], "parts": parts_of(about),
            "between": seen - about["time"], "steps": about["cost"]["seconds"], "answers": about["eval_seconds"],
            "table": about["tokens_seconds"],
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def render(found: dict[str, Any]) -> str:
    lines = [f"`python {found['command']}`", "", found["machine"], "",
             f"| process, cell | overhead s | {' | '.join(PARTS)} | between | steps | answers | token table |",
             "|---" * (len(PARTS) + 6) + "|"]  # fmt: skip
    for number, cells in enumerate(found["processes"], 1):
        for place, cell in enumerate(cells, 1):
            seconds = [cell["overhead"], *cell["parts"].values(), *(cell[k] for k in ("between", "steps", "answers"))]
            shown = " | ".join(f"{second:.1f}" for second in (*seconds, cell["table"]))
            lines.append(f"| {number}, {place} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, name or GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="a folder with gsm8k/train.jsonl.gz and test.jsonl.gz")
    parser.add_argument("--cells", type=int, default=3, choices=range(1, len(OBJECTIVES) + 1), help="of a process")
    parser.add_argument("--repeats", type=int, default=2, help="processes, one after the other")
    parser.add_argument("--rows", type=int, default=3712, help="rows to train on")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--micro", type=int, help="rows of a micro-batch; a step has two (default: the study's 16 of 64)"
    )
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {"command": " ".join(sys.argv), "machine": f"{machine}, torch {torch.__version__}"}
    found["processes"] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            found["processes"].append(measure(args, Path(folder, f"cells-{repeat}")))
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    text = render(found)
    print(text)
    if args.markdown:
        args.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
