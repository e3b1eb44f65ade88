"""`deftune export`: a run as the files of another training stack, or its model as a GGUF file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.cli.options import add_set, add_trust, need
from deftune.cli.output import notice, say
from deftune.cli.train import read_typed_trust

STACKS = ("verl", "axolotl", "llamafactory", "swift")
TYPES = ("f16", "bf16", "f32", "q8_0")


def add_to(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="write a run for another training stack, or its model as a GGUF file for llama.cpp"
    )
    export.add_argument("stack", metavar="STACK", help=f"{', '.join(STACKS)} or gguf")
    export.add_argument(
        "config",
        metavar="RUN",
        help="a YAML file, a run's folder, or a recipe of `deftune paper recipes`; with gguf a run's folder or a model",
    )
    export.add_argument("--out", type=Path, required=True, metavar="PATH", help="a new folder; with gguf a new file")
    add_set(export)
    export.add_argument("--ranks", type=int, metavar="N", help="processes that will train (default: 1)")
    export.add_argument(
        "--type", choices=TYPES,
        help="type of the matrices in a GGUF file (default: f16); llama.cpp's llama-quantize makes Q4_K_M of it",
    )  # fmt: skip
    add_trust(export)
    export.set_defaults(run=run_export)


def read_run_or_recipe(name: str, overrides: list[str], trust_remote_code: bool = False) -> Any:
    """The config of a YAML file, of a run's folder, or of a recipe, for a command that loads something of its model."""
    if Path(name).exists() or name.endswith((".yaml", ".yml")):
        return read_typed_trust(Path(name), overrides, trust_remote_code)
    from deftune.artifacts.config import load_config
    from deftune.paper.recipes import recipe

    try:
        found = recipe(name)
    except ValueError as error:
        raise ValueError(f"{name}: no such file or run, and {error}") from None
    overrides = [*overrides, *(["model.trust_remote_code=true"] if trust_remote_code else [])]
    return load_config(None, overrides, base=found.config())


def run_export(args: argparse.Namespace) -> int:
    need()
    if args.stack == "gguf":
        return run_gguf(args)
    if args.type is not None:
        raise ValueError(f"export: --type is for gguf; {args.stack} trains the run itself: leave it out")
    check_counts(ranks=args.ranks)
    from deftune.adapters.export import export_run
    from deftune.artifacts.display import quiet

    config = read_run_or_recipe(args.config, args.set, args.trust_remote_code)
    with quiet():
        done = export_run(config, args.stack, args.out, ranks=args.ranks or 1, notice=notice)
    for path in done.files:
        say(str(path))
    for line in done.notes:
        say(f"note: {line}")
    say(f"train with:\n  {done.command}")
    return 0


def run_gguf(args: argparse.Namespace) -> int:
    given = {"--set": args.set, "--ranks": args.ranks is not None}
    if wrong := [flag for flag, value in given.items() if value]:
        raise ValueError(f"export gguf: {', '.join(wrong)}: the file holds a trained model; leave it out")
    from deftune.adapters.export_gguf import export_gguf
    from deftune.artifacts.display import quiet

    with quiet():
        done = export_gguf(
            args.config, args.out, type=args.type or "f16", notice=notice, trust_remote_code=args.trust_remote_code
        )
    for line in done.notes:
        say(f"note: {line}")
    say(f"{done.path}: {done.architecture}, {done.num_tensors} tensors, {done.num_bytes / 1e6:,.1f} MB")
    say(f"run with:\n  llama-cli -m {done.path}")
    return 0
