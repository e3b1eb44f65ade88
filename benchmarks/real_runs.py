"""Real models on real data, as a user trains them: fails on any NaN, any lost step, any drift from TRL's NLL.

    python benchmarks/real_runs.py SmolLM2-135M=smollm2 --data DATA --results out.jsonl          # 12 cells of 200 steps
    python benchmarks/real_runs.py Qwen2.5-Coder-1.5B=MODEL_FOLDER --data DATA --results out.jsonl
    python benchmarks/real_runs.py --render out.jsonl [more.jsonl ...] > benchmarks/results/real_runs_h200.md

DATA holds gsm8k/train.jsonl.gz, math/train.jsonl.gz and medquad/train.jsonl.gz. A cell is one of these datasets, padded
or packed, with full fine-tuning or LoRA. In each cell

1. `deftune` trains --steps steps with --objective: every step must be recorded, with a finite loss and gradient;
2. `deftune` and TRL's own SFTTrainer train the first --compare steps with NLL on the same batches. In float32 no
   step's loss may differ from TRL's by more than --tolerance, relative. In bfloat16 the first step's may not, where the
   weights are the same: from TRL's loss in bfloat16, or from TRL's in float32 if it is nearer to that than TRL's own
   bfloat16 (compiled layers round less often). From then on the weights differ: TRL's gradients come from bfloat16
   logits, deftune's from float32 sums, and such differences grow; the largest one is stated.

All runs start from the same weights. Cells that the results file already holds are not run again. The exit code is 1
if any cell failed. --render adds the notes of out.notes.md, where that file exists. Needs deftune[train].
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

DATASETS = ("gsm8k", "math", "medquad")
LORA = {"r": 16, "alpha": 32}


def config_of(
    args: argparse.Namespace, model: str, dataset: str, packed: bool, lora: bool, objective: str,
    precision: str = "auto",
) -> Any:  # fmt: skip
    """The run of a cell: 16 rows of at most 320 tokens a step, or 4 packs of 1,024."""
    from deftune.artifacts.config import RunConfig

    rows = args.rows or (4 if packed else 16)
    return RunConfig.model_validate(
        {
            "run": "unused",
            "objective": objective,
            "model": {"name": model, "lora": LORA if lora else None},
            "data": {
                "train": [{"path": str(args.data / dataset / "train.jsonl.gz"), "limit": 4000}],
                "template": args.template,
                "max_length": args.length * (3 if packed else 1) + (64 if packed else 0),
                "packing": packed,
            },
            "train": {
                "learning_rate": 1e-4 if lora else 1e-5,
                "max_steps": args.steps,
                "epochs": 1000,
                "batch_size": rows,
                "micro_batch_size": rows,
                "save_steps": 10**6,
                "precision": precision,
                "seed": 1,
            },
        }
    )


def train(prepared: Any, model: Any, steps: int, *, trl: bool) -> list[dict[str, float]]:
    """The records of so many steps, by deftune's trainer or by TRL's own, from the same weights and batches."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

    from deftune.artifacts.display import quiet
    from deftune.artifacts.runs import Run
    from deftune.data.packing import Collator
    from deftune.training.assembly import Batches, lora_config, make_arguments, make_dataset, make_trainer
    from deftune.training.attention import attention_kernels

    records: list[dict[str, float]] = []

    class Record(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                records.append({"step": state.global_step, "loss": logs["loss"], "grad_norm": logs["grad_norm"]})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    model = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder, quiet(), attention_kernels():
        run = Run(Path(folder))
        if trl:
            arguments = make_arguments(prepared, run)
            collator = Collator(prepared.tokenizer.pad_token_id, padding_free=False)
            trainer: Any = SFTTrainer(
                model, arguments, data_collator=Batches(list(prepared.sequences), collator),
                train_dataset=make_dataset(range(len(prepared.sequences))), processing_class=prepared.tokenizer,
                peft_config=lora_config(prepared.config, model) if prepared.config.model.lora else None,
                callbacks=[Record()],
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
        else:
            trainer = make_trainer(prepared, run, model=model)
            trainer.add_callback(Record())
        trainer.train()
        trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return records


def differences(losses: list[float], reference: list[float]) -> list[float]:
    """How far each step's loss is from the reference's, relative; infinity where a step is missing."""
    if len(losses) != len(reference):
        return [math.inf]
    return [abs(a - b) / abs(b) for a, b in zip(losses, reference)]


def run_cell(args: argparse.Namespace, model: Any, source: str, dataset: str, packed: bool, lora: bool) -> Any:
    """A cell's figures, and what is wrong with it."""
    from deftune.training.preparation import prepare

    start = time.perf_counter()
    config = config_of(args, source, dataset, packed, lora, args.objective)
    prepared = prepare(config, lambda _: None)
    wrong: list[str] = []
    try:
        records = train(prepared, model, args.steps, trl=False)
    except ValueError as error:
        return {"wrong": [f"{args.objective}: {error}"], "seconds": time.perf_counter() - start}
    if [record["step"] for record in records] != list(range(1, args.steps + 1)):
        wrong.append(f"{len(records)} of {args.steps} steps were recorded")
    bad = [r["step"] for r in records if not (math.isfinite(r["loss"]) and math.isfinite(r["grad_norm"]))]
    if bad:
        wrong.append(f"step {bad[0]} is not finite")
    nll: dict[str, list[float]] = {}
    for precision in ("fp32", "auto"):
        for trl in (False, True):
            prepared.config = config_of(args, source, dataset, packed, lora, "nll", precision)
            found = train(prepared, model, args.compare, trl=trl)
            nll[f"{'TRL' if trl else 'deftune'} {precision}"] = [record["loss"] for record in found]
    rounding = {who: differences(nll[f"{who} auto"], nll["TRL fp32"])[0] for who in ("deftune", "TRL")}
    drift = {
        "float32": max(differences(nll["deftune fp32"], nll["TRL fp32"])),
        "bfloat16, first step": differences(nll["deftune auto"], nll["TRL auto"])[0],
        "bfloat16, largest": max(differences(nll["deftune auto"], nll["TRL auto"])),
    }
    if not drift["float32"] <= args.tolerance:
        wrong.append(f"NLL differs from TRL's by {drift['float32']:.2g} (float32)")
    nearer = rounding["deftune"] <= max(args.tolerance, rounding["TRL"])
    if not (drift["bfloat16, first step"] <= args.tolerance or nearer):
        wrong.append(
            f"the first step's NLL in bfloat16 differs from TRL's by {drift['bfloat16, first step']:.2g}, and from "
            f"float32 by {rounding['deftune']:.2g} (TRL's by {rounding['TRL']:.2g})"
        )
    losses = [record["loss"] for record in records]
    return {
        "wrong": wrong, "drift": drift, "first": mean(losses[:10]), "last": mean(losses[-10:]),
        "steps": len(records), "nll": nll, "seconds": time.perf_counter() - start,
    }  # fmt: skip


def render(paths: list[Path]) -> str:
    """A table of all cells, the failed ones with their reason, and the notes beside X.jsonl (X.notes.md)."""
    cells = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    lines = [
        *dict.fromkeys(f"`{cell['command']}`" for cell in cells),
        "",
        *dict.fromkeys(cell["machine"] for cell in cells),
        "",
        "Relative difference of the NLL from TRL's: float32, all compared steps; bfloat16, the first step (same "
        "weights) and the largest of all; the first step in bfloat16, deftune's and TRL's, from TRL's in float32.",
        "",
        "| model | data | | | steps | loss, first and last 10 steps | float32 | bf16, first step | bf16, largest | "
        "deftune bf16 from float32 | TRL bf16 from float32 | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        figures = "| | | | | |"
        if "drift" in c:
            nll = c["nll"]
            own = [differences(nll[f"{who} auto"][:1], nll["TRL fp32"][:1])[0] for who in ("deftune", "TRL")]
            drifts = " | ".join(f"{drift:.1e}" for drift in [*c["drift"].values(), *own])
            figures = f"{c['steps']} | {c['first']:.4f} to {c['last']:.4f} | {drifts}"
        lines.append(
            f"| {c['model']} | {c['dataset']} | {'packed' if c['packed'] else 'padded'} | "
            f"{'LoRA' if c['lora'] else 'full'} | {figures} | {'; '.join(c['wrong']) or 'holds'} |"
        )
    failed = sum(bool(c["wrong"]) for c in cells)
    notes = [note.read_text().rstrip() for path in paths if (note := path.with_suffix(".notes.md")).is_file()]
    return "\n".join([*lines, "", f"{len(cells) - failed} passed, {failed} failed", *(f"\n{note}" for note in notes)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL", help="what to call it, and what deftune loads")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, help="a JSONL file; a line is appended for every cell")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compare", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--objective", default="deft")
    parser.add_argument("--length", type=int, default=320, help="longest row of a padded batch")
    parser.add_argument("--rows", type=int, help="rows or packs of a step (default: 16 rows, 4 packs)")
    parser.add_argument("--template", help="for a base model without a chat template: chatml or plain")
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--layouts", default="padded,packed", help="padded, packed or both (default)")
    parser.add_argument("--render", type=Path, nargs="+", help="print the table of these results and stop")
    args = parser.parse_args()
    if args.render:
        print(render(args.render))
        return 0
    if not args.models or args.data is None or args.results is None:
        parser.error("give NAME=MODEL, --data and --results")
    if unknown := set(args.layouts.split(",")) - {"padded", "packed"}:
        parser.error(f"--layouts: unknown {', '.join(sorted(unknown))}; known: padded, packed")
    import transformers

    from deftune.artifacts.models import load_model, resolve_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    machine += f", torch {torch.__version__}, transformers {transformers.__version__}, "
    machine += f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.is_file() else []
    failed = any(cell["wrong"] for cell in done)
    for given in args.models:
        name, _, source = given.partition("=")
        model: Any = None
        for dataset in args.datasets.split(","):
            for packed in [layout == "packed" for layout in args.layouts.split(",")]:
                for lora in (False, True):
                    key = {"model": name, "dataset": dataset, "packed": packed, "lora": lora}
                    if any(all(cell[k] == v for k, v in key.items()) for cell in done):
                        continue
                    if model is None:
                        model = load_model(resolve_model(source, print)).to(device)
                    cell = {**key, **run_cell(args, model, source, dataset, packed, lora),
                            "command": "python " + " ".join(sys.argv), "machine": machine}  # fmt: skip
                    failed = failed or bool(cell["wrong"])
                    with args.results.open("a") as file:
                        file.write(json.dumps(cell) + "\n")
                    print(json.dumps({k: v for k, v in cell.items() if k not in ("command", "machine")}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
