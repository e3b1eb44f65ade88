"""`deftune export`: a run as the config and data files of another training stack.

The rows are exported as tokens and labels, so that every stack trains on what `deftune train` would train on. A key of
the run that a stack cannot honour is an error, or a note that says what differs; none is left out unnoticed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deftune._suggest import did_you_mean
from deftune.adapters.export_job import Job, Keys, check_common
from deftune.adapters.export_stacks import STACKS
from deftune.artifacts.config import ConfigError, RunConfig
from deftune.artifacts.pages import page
from deftune.objectives import objective as parse_objective
from deftune.training.data_record import facts
from deftune.training.preparation import Prepared, prepare


@dataclass(frozen=True)
class Exported:
    """What was written, the command that trains it, and what differs from `deftune train`."""

    stack: str
    files: list[Path]
    command: str
    notes: list[str] = field(default_factory=list[str])


def export_run(
    config: RunConfig, stack: str, out: Path, *, ranks: int = 1, notice: Callable[[str], None] = lambda _: None
) -> Exported:
    """Write the files with which another stack trains the run: its config, and the rows as tokens and labels.

    Args:
        config: the run, as `deftune train` takes it.
        stack: a name of `STACKS`.
        out: a new folder.
        ranks: processes that will train; ``train.batch_size`` is divided among them.
        notice: gets a line about each thing that is read.

    Returns:
        The files, the command that trains them, and notes on what differs from `deftune train`.

    Raises:
        ConfigError: the stack cannot honour a key of the run, or the rows do not divide among the ranks.
        ValueError: an unknown stack, an objective that the stack cannot train, or a folder that has files in it.

    Example:
        ``export_run(load_config(Path("run.yaml")), "axolotl", Path("exported")).command``
    """
    if stack == "torchtitan":
        raise ValueError(
            "export torchtitan: its configs are Python modules, its models are its own definitions, and its loader "
            "packs rows into sequences, so that no file of it is the same run; "
            f"{page('docs/stacks/torchtitan.md')} has a config"
        )
    if stack not in STACKS:
        known = (*STACKS, "gguf")  # gguf: of the command, which writes a model
        raise ValueError(f"export: unknown stack {stack!r}.{did_you_mean(stack, known)} Known: {', '.join(known)}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"export: {out} is not empty; name another folder")
    objective = parse_objective(config.objective)
    if stack != "verl" and objective.kind != "local":
        raise ValueError(
            f"export {stack}: `{config.objective}` depends on the whole optimizer step, and the loss of a "
            f"micro-batch cannot see it; verl and `deftune train` can train it"
        )
    train = config.train
    if train.batch_size % (train.micro_batch_size * ranks):
        raise ConfigError(
            f"export: train.batch_size {train.batch_size} cannot be {ranks} ranks x {train.micro_batch_size} rows x a "
            f"whole number; change batch_size, micro_batch_size or --ranks"
        )
    out = out.absolute()
    prepared = prepare(config, notice, here=False)
    if not prepared.train.examples:
        raise ValueError("export: no row is left to train on; `deftune data preview` shows why")
    for line in facts(prepared)[:2]:
        notice(line)
    return export_prepared(prepared, stack, out, ranks)


def export_prepared(prepared: Prepared, stack: str, out: Path, ranks: int = 1) -> Exported:
    """`export_run` of data that is read already."""
    job = Job(Keys(prepared.config, stack), prepared, out, ranks)
    check_common(job)
    out.mkdir(parents=True, exist_ok=True)
    try:
        command = STACKS[stack](job)
        job.keys.check()
    except BaseException:
        remove_written(job)
        raise
    record = {"stack": stack, "command": command, "notes": job.keys.notes}
    (out / "export.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return Exported(stack, [*job.files, out / "export.json"], command, job.keys.notes)


def remove_written(job: Job) -> None:
    for path in job.files:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if job.out.is_dir() and not any(job.out.iterdir()):
        job.out.rmdir()
