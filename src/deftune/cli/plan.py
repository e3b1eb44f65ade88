"""`deftune plan`: memory, speed and strategy of a run before it is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.cli.export import read_run_or_recipe
from deftune.cli.options import Renamed, add_set, add_trust, need
from deftune.cli.output import say


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="count a run's memory on given GPUs, estimate its speed and choose a strategy"
    )
    parser.add_argument(
        "run_or_model", nargs="?", metavar="RUN|MODEL", help="a YAML file, a run's folder, a recipe, or a model"
    )
    parser.add_argument("--backbones", action="store_true", help="plan the paper's base models instead of one run")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument(
        "--gpu",
        default="h200",
        metavar="NAME",
        help="kind of GPU: h200, h100, a100, h20, l40s, rtx4090, rtx3090, a10 or l4 (default: h200)",
    )
    add_set(parser)
    parser.add_argument("--length", type=int, metavar="T", help="tokens of a row (default: the run's, or 2048)")
    parser.add_argument(
        "--micro-batch-size", type=int, metavar="B", help="rows of a forward pass (default: the run's, or 4)"
    )
    parser.add_argument("--rows", action=Renamed, now="--micro-batch-size")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    need()
    from dataclasses import replace

    from deftune.artifacts.display import quiet
    from deftune.training.plan import BACKBONES, Workload, find_shape, known_gpu, plan, workload_of

    known_gpu(args.gpu)  # before the hub is asked for the model's config
    check_counts(gpus=args.gpus, length=args.length, micro_batch_size=args.micro_batch_size)
    asked = {"length": args.length, "rows": args.micro_batch_size}
    given = {name: value for name, value in asked.items() if value is not None}
    if args.backbones:
        if args.run_or_model or args.set or args.trust_remote_code:
            raise ValueError(
                "plan: --backbones is a table of its own; leave out RUN|MODEL, --set and --trust-remote-code"
            )
        work = replace(Workload(2048, 4), **given)
        with quiet():
            chosen = [plan(find_shape(name), work, gpu=args.gpu, gpus=args.gpus)[0] for name in BACKBONES]
        print(json.dumps([record(found) for found in chosen], indent=1) if args.json else table(chosen))
        return 0
    if args.run_or_model is None:
        raise ValueError("plan: name a run, a recipe or a model, or pass --backbones")
    lora, config = 0, None
    name = args.run_or_model
    is_run = name.endswith((".yaml", ".yml")) or Path(name, "config.yaml").is_file() or is_recipe(name)
    if is_run:
        config = read_run_or_recipe(name, args.set, args.trust_remote_code)
        lora = config.model.lora.r if config.model.lora else 0
        work = replace(workload_of(config, args.gpus), **given)
    else:
        if args.set:
            raise ValueError("plan: --set is for a run; use --length and --micro-batch-size with a model")
        work = replace(Workload(2048, 4), **given)
    with quiet():
        model = config.model if config is not None else None
        shape = find_shape(
            model.name if model else name, revision=model.revision if model else None,
            trust_remote_code=model.trust_remote_code if model else args.trust_remote_code,
        )  # fmt: skip
    narrow = work.bf16 and (model is None or model.dtype != "float32")
    base = "4bit" if model and model.quantization else "bfloat16" if narrow else "float32"
    chosen, tried = plan(shape, work, gpu=args.gpu, gpus=args.gpus, lora_rank=lora, base=base)
    if args.json:
        print(json.dumps({"parameters": shape.parameters, "work": asdict(work), "chosen": record(chosen),
                          "tried": [record(found) for found in tried], "notes": chosen.notes}, indent=1))  # fmt: skip
        return 0
    say(
        f"{shape.name}: {shape.parameters / 1e9:.2f}B parameters; {args.gpus} x {args.gpu} ({chosen.gpu.gib:g} GiB), "
        f"{work.rows} rows of {work.length} tokens a GPU x {work.accumulation}, "
        f"{'bf16 over fp32 weights' if work.bf16 else 'fp32'}"
    )
    say(table(tried, chosen))
    if not chosen.fits:
        print("nothing fits: take more GPUs, shorter rows or a smaller micro-batch")
    elif chosen.strategy.options():
        print("deftune train options: " + " ".join(f"--set {option}" for option in chosen.strategy.options()))
    for note in chosen.notes:
        print(f"note: {note}")
    return 0


def is_recipe(name: str) -> bool:
    from deftune.paper.recipes import recipes

    return name in {found.name for found in recipes()}


def record(found: Any) -> dict[str, Any]:
    memory = {**asdict(found.memory), "total": found.memory.total}
    return {
        "model": found.shape.name, "strategy": str(found.strategy), "options": found.strategy.options(),
        "fits": found.fits, "memory_gib": memory, "tokens_per_second": found.tokens_per_second,
    }  # fmt: skip


def table(plans: list[Any], chosen: Any = None) -> str:
    """Plans as aligned columns: strategies of one model, or models."""
    parts = ("weights", "gradients", "optimizer", "copies", "activations", "head")
    first = "strategy" if chosen else "model"
    rows = [["", first, *([] if chosen else ["B", "strategy"]), *parts, "GiB", "fits", "tokens/s"]]
    for found in plans:
        names = [str(found.strategy)] if chosen else [
            found.shape.name, f"{found.shape.parameters / 1e9:.2f}", str(found.strategy)
        ]  # fmt: skip
        rows.append([
            "*" if found is chosen else "", *names, *(f"{getattr(found.memory, part):.1f}" for part in parts),
            f"{found.memory.total:.1f}", "yes" if found.fits else "no", f"{found.tokens_per_second:,.0f}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = 2 if chosen else 4
    return "\n".join(
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    )
