"""`deftune export`: a run as the files of another training stack."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deftune.cli.output import notice
from deftune.cli.train import need_training, read_config

STACKS = ("verl", "axolotl", "llamafactory", "swift")


def add_to(commands: Any) -> None:
    export = commands.add_parser("export", help="write a run as the config and data files of another training stack")
    export.add_argument("stack", metavar="STACK", help=", ".join(STACKS))
    export.add_argument("config", help="a YAML file, a run's folder, or a recipe of `deftune paper recipes`")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder for the files")
    export.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a value of the config")
    export.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that will train (default: 1)")
    export.set_defaults(run=run_export)


def read_run_or_recipe(name: str, overrides: list[str]) -> Any:
    """The config of a YAML file, of a run's folder, or of a recipe."""
    if Path(name).exists() or name.endswith((".yaml", ".yml")):
        return read_config(Path(name), overrides)
    from deftune.artifacts.config import load_config
    from deftune.paper.recipes import recipe

    return load_config(None, overrides, base=recipe(name).config())


def run_export(args: argparse.Namespace) -> int:
    need_training()
    if args.ranks < 1:
        raise ValueError(f"export: --ranks from 1, got {args.ranks}")
    from deftune.adapters.export import export_run
    from deftune.artifacts.display import quiet

    config = read_run_or_recipe(args.config, args.set)
    with quiet():
        done = export_run(config, args.stack, args.out, ranks=args.ranks, notice=notice)
    for path in done.files:
        print(path)
    for line in done.notes:
        print(f"note: {line}")
    print(f"train with:\n  {done.command}")
    return 0
