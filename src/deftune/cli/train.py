"""`deftune train`, `init`, `config`, `runs`, `data preview`: the main job and what surrounds it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.cli.options import (
    Renamed,
    add_encoding_options,
    add_row_options,
    add_set,
    add_trust,
    data_options,
    flag,
    need,
    parse_fields,
)
from deftune.cli.output import notice, say


def add_to(commands: Any) -> None:
    train = commands.add_parser("train", help="fine-tune a model with an objective; the same command resumes")
    train.add_argument("config", type=Path, help="a YAML file (`deftune init` writes one), or a run's folder to resume")
    add_set(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="read the data, try one batch, print what the run would be; nothing is trained",
    )
    train.add_argument("--skip-bad-rows", action="store_true", help="write bad rows to bad_rows.jsonl and go on")
    train.add_argument("--no-cache", action="store_true", help="encode the rows even if they were encoded before")
    train.add_argument(
        "--restart", action="store_true", help="train from the beginning; checkpoints are moved to checkpoints.old-1"
    )
    train.add_argument(
        "--profile", action="store_true", help="train as usual, and print where the time of some steps goes"
    )
    add_trust(train)
    train.set_defaults(run=run_train)

    init = commands.add_parser("init", help="write a config to start from")
    init.add_argument(
        "file", type=Path, nargs="?", default=Path("run.yaml"), help="the file to write (default: run.yaml)"
    )
    init.add_argument("--recipe", help="a training run of the paper: `deftune paper recipes` lists them")
    init.set_defaults(run=run_init)

    config = commands.add_parser(
        "config", help="list the keys of a config, show a config with its defaults, print the JSON schema"
    )
    actions = config.add_subparsers(metavar="ACTION", required=True)
    keys = actions.add_parser("keys", help="every key with type, default and meaning")
    keys.add_argument("prefix", nargs="?", help="only keys that begin with this: train, or data.train")
    keys.add_argument(
        "--markdown",
        action="store_true",
        help="print the documentation page of all keys, with those of comparisons and task files",
    )
    keys.set_defaults(run=run_keys)
    show = actions.add_parser("show", help="a config with every default")
    show.add_argument("config", type=Path, help="a YAML file, or the folder of a run")
    add_set(show)
    show.set_defaults(run=run_show)
    schema = actions.add_parser("schema", help="the JSON schema of a config, for editors")
    schema.set_defaults(run=run_schema)

    runs = commands.add_parser("runs", help="list the runs below a folder")
    runs.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="the folder that holds the runs (default: runs)"
    )
    runs.add_argument("--json", action="store_true", help="print the list as JSON")
    runs.set_defaults(run=run_runs)

    data = commands.add_parser("data", help="show your data as a run would see it")
    actions = data.add_subparsers(metavar="ACTION", required=True)
    preview = actions.add_parser(
        "preview", help="print rows with their supervised tokens marked, the lengths, and the rows that are dropped"
    )
    preview.add_argument("data", help="a run's config.yaml; or a file, a folder, a hub id, or generated:NAME")
    preview.add_argument("--model", help="the model whose tokenizer and chat template are used (default: smollm2)")
    add_row_options(preview, "read the first N rows only (default: 1000)")
    add_encoding_options(preview, source="")
    preview.add_argument("--show", type=int, metavar="N", default=3, help="how many rows to show (default: 3)")
    preview.add_argument("--limit", action=Renamed, now="--rows (rows to read); --show says how many to show")
    preview.set_defaults(run=run_preview)


def read_config(path: Path, overrides: list[str]) -> Any:
    from deftune.artifacts.config import load_config

    if path.is_dir():  # a run, wherever it lies now
        if not (path / "config.yaml").is_file():
            raise ValueError(f"{path}: is no run (it has no config.yaml)")
        return load_config(path / "config.yaml", [f"run={json.dumps(str(path))}", *overrides])
    return load_config(path, overrides)


def read_typed_trust(path: Path, overrides: list[str], trust_remote_code: bool) -> Any:
    """The config of a file or a run, for a command that loads its model or tokenizer.

    The code of the model's repository runs if the user typed it: as ``trust_remote_code``, among the overrides, or in a
    file that no run recorded.
    """
    overrides = [*overrides, *(["model.trust_remote_code=true"] if trust_remote_code else [])]
    config = read_config(path, overrides)
    typed = any(text.partition("=")[0].strip() == "model.trust_remote_code" for text in overrides)
    if config.model.trust_remote_code and not typed:
        refuse_recorded_trust(path, "run", config.model.name)
    return config


def refuse_recorded_trust(path: Path, kind: str, model: str) -> None:
    """Refuse to run a model's code because a folder says so, which may be somebody else's; it must be typed.

    Args:
        path: a YAML file that the user wrote, which may say so, or what a run or a comparison recorded of itself.
        kind: "run" or "comparison".
        model: the name of the model.
    """
    own = path.name in ("config.yaml", "comparison.yaml") and (path.parent / "environment.json").exists()
    if path.is_dir() or own:
        raise ValueError(
            f"{path}: the {kind} asks to execute the code of {model}; read that code, and pass --trust-remote-code if "
            f"you trust it"
        )


def run_train(args: argparse.Namespace) -> int:
    need()
    if args.no_cache:
        os.environ["DEFTUNE_DATA_CACHE_GB"] = "0"
    overrides = [*args.set, *(["data.skip_bad_rows=true"] if args.skip_bad_rows else [])]
    config = read_typed_trust(args.config, overrides, args.trust_remote_code)
    from deftune.training.machine import leave_ranks
    from deftune.training.stopping import StopSignal
    from deftune.training.train import dry_run, train_run

    if args.dry_run:
        if args.restart:
            raise ValueError("--restart: a dry run begins nothing; leave it out")
        if args.profile:
            raise ValueError("--profile: a dry run takes no steps; leave one of the two out")
        dry_run(config, say)
        return 0
    score_tasks = None
    if config.data.tasks:
        from deftune.evaluation.in_training import task_scorer

        score_tasks = task_scorer(config)
    outcome = train_run(config, score_tasks=score_tasks, restart=args.restart, profile=args.profile)
    leave_ranks()
    if outcome.state == "finished":
        return 0
    return 128 + (StopSignal.last.number if StopSignal.last is not None else signal.SIGTERM)


def run_init(args: argparse.Namespace) -> int:
    need()
    from deftune.artifacts.config import STARTER
    from deftune.paper.recipes import render_recipe

    return write_starter(args.file, render_recipe(args.recipe) if args.recipe else STARTER, "deftune train")


def write_starter(path: Path, text: str, command: str) -> int:
    """A new file to begin with, and the commands that take it."""
    if path.exists():
        raise ValueError(f"{path}: exists; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{path} written; next:\n  {command} {path} --dry-run\n  {command} {path}")
    return 0


def run_keys(args: argparse.Namespace) -> int:
    need()
    from deftune._suggest import did_you_mean
    from deftune.artifacts.config import RunConfig
    from deftune.artifacts.keys import keys_of, render_keys, render_page

    if not args.markdown:
        keys = keys_of(RunConfig)
        prefix = args.prefix or ""
        found = [key for key in keys if key.path.startswith(prefix)]
        if not found:
            hint = did_you_mean(prefix, [key.path for key in keys])
            raise ValueError(f"config keys: no key begins with {prefix!r}.{hint}")
        say(render_keys(found))
        return 0
    if args.prefix:
        raise ValueError("config keys: --markdown writes the page of all keys; leave out the prefix")
    from deftune.comparison.grid import Comparison
    from deftune.evaluation.task_files import TaskFile

    files = {
        "A run: `deftune train run.yaml`": RunConfig,
        "A comparison: `deftune compare run compare.yaml`": Comparison,
        "A task of your own: `deftune eval run --task-file exam.yaml`": TaskFile,
    }
    seen: dict[str, str] = {}  # a section of an earlier table is not repeated
    say(render_page({title: keys_of(root, seen) for title, root in files.items()}).rstrip())
    return 0


def run_schema(args: argparse.Namespace) -> int:
    need()
    from deftune.artifacts.config import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=1))
    return 0


def run_show(args: argparse.Namespace) -> int:
    need()
    from deftune.artifacts.config import render_yaml

    print(render_yaml(read_config(args.config, args.set)), end="")
    return 0


def run_runs(args: argparse.Namespace) -> int:
    need()
    from deftune.artifacts.names import shown_model
    from deftune.artifacts.runs import find_runs, summary

    if not args.folder.is_dir():
        raise ValueError(f"{args.folder}: no such folder; name the folder that holds your runs: deftune runs FOLDER")
    found = [summary(run) for run in find_runs(args.folder)]
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    if not found:
        print(f"no runs below {args.folder}")
        return 0
    for run in found:
        run["run"] = str(Path(run["run"]).relative_to(args.folder))
        run["model"] = shown_model(run.pop("model") or "-")  # the longest text comes last
    print(table_of_runs(found, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 0


LEFT_OUT = ("checkpoints", "model", "p", "kept", "loss", "eval_loss", "nll", "step", "state")  # in this order


def table_of_runs(found: list[dict[str, Any]], width: int | None) -> str:
    """The runs in columns; of those in `LEFT_OUT` as many are left out as it takes to be no wider than ``width``."""
    from deftune.artifacts.terminal import align, one_line

    columns = {
        name: [name, *(f"{v:.4g}" if isinstance(v, float) else one_line(str("-" if v is None else v)) for v in values)]
        for name, values in ((name, [run[name] for run in found]) for name in found[0])
    }
    left_out: list[str] = []
    for name in LEFT_OUT:
        if width is None or sum(max(map(len, cells)) + 2 for cells in columns.values()) - 2 <= width:
            break
        if columns.pop(name, None):
            left_out.append(name)
    text = align(list(zip(*columns.values())), width)
    return f"{text}\nleft out: {', '.join(left_out)} (--json has all)" if left_out else text


def preview_run(args: argparse.Namespace) -> int:
    """The rows of a config as its run encodes them; options that the config decides are refused."""
    from rich.console import Console

    from deftune.artifacts.display import quiet
    from deftune.data.preview import render_preview
    from deftune.training.preparation import prepare

    given = [name for name in ("model", "skip_bad_rows") if getattr(args, name)]
    given += [name for name in data_options(args) if name != "trust_remote_code"]
    if given:
        raise ValueError(
            f"data preview: {', '.join(map(flag, given))}: {args.data} says how its rows are read; change it there"
        )
    with quiet():
        prepared = prepare(read_typed_trust(Path(args.data), [], args.trust_remote_code), notice, here=False)
    render_preview(prepared.train, prepared.tokenizer, Console(), num_examples=args.show)
    if prepared.bad.rows:
        prepared.bad.write("bad_rows.jsonl")
        notice(f"{prepared.bad.summary()}; see bad_rows.jsonl")
    return 0


def run_preview(args: argparse.Namespace) -> int:
    need()
    from rich.console import Console

    from deftune.artifacts.display import quiet
    from deftune.artifacts.models import load_tokenizer, resolve_model
    from deftune.artifacts.results import encoding_of
    from deftune.data.encoding import Encoder
    from deftune.data.parallel import encode_packed
    from deftune.data.preview import render_preview
    from deftune.data.rows import BadRows, PackedRows
    from deftune.data.sources import iterate_rows
    from deftune.training.display import RowProgress

    check_counts(rows=args.rows)
    if args.show < 0:
        raise ValueError(f"--show: at least 0, got {args.show}")
    if Path(args.data).suffix in (".yaml", ".yml"):
        return preview_run(args)
    bad = BadRows(skip=args.skip_bad_rows)
    found = iterate_rows(
        args.data,
        format=args.format or "auto",
        split=args.split,
        limit=args.rows or 1000,
        bad=bad,
        fields=parse_fields(args.fields),
    )
    packed = PackedRows(found, bad)
    model = args.model or "smollm2"
    encoding = encoding_of(model, template=args.template, mask=args.mask, max_length=args.max_length)
    with quiet():
        tokenizer = load_tokenizer(resolve_model(model, notice), trust_remote_code=args.trust_remote_code)
        encoder = Encoder(tokenizer, **encoding)
        with RowProgress("encoding rows", len(packed), notice) as progress:
            encoded = encode_packed(packed, encoder, bad=bad, progress=progress.update)
    render_preview(encoded, tokenizer, Console(), num_examples=args.show)
    if bad.skip and bad.rows:
        bad.write("bad_rows.jsonl")
        notice(f"{bad.summary()}; see bad_rows.jsonl")
    return 0
