"""Trackers get every number of metrics.jsonl but the histogram; runs do not mix; what is not there is refused."""

import glob
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from deftune.artifacts.config import ConfigError, render_yaml
from deftune.artifacts.runs import Run
from deftune.cli import main
from deftune.training import assembly, preparation
from deftune.training.trackers import check_trackers
from waiting import HANG_SECONDS

COMMANDS = "import sys; from deftune.cli import main; sys.exit(any([main(['train', c]) for c in sys.argv[1:]]) * 2)"


def needs(name: str):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def write_config(make_config, folder: Path, tracker: str) -> Path:
    nested = {"train.report_to": [tracker], "data.holdout": 0.1, "train.eval_steps": 2}
    path = Path(f"{folder}.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(render_yaml(make_config(folder, nested)), encoding="utf-8")
    return path


def trained(folder: Path, *configs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`deftune train` of each in one process, with nothing of the user's accounts."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_", "HF_"))}
    environment = {
        **keep, "HOME": str(folder), "NETRC": str(folder / "netrc"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "WANDB_DIR": str(folder), "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), **variables,
    }  # fmt: skip
    command = [sys.executable, "-c", COMMANDS, *map(str, configs)]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_SECONDS
    )


# --- what a tracker holds: {name of the run: [(step, {name: value})]} -------------------------------------------------


def read_tensorboard(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = defaultdict(list)
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found[str(file.parent.parent)] += [(event.step, {tag: event.value}) for event in events.Scalars(tag)]
    return found


def read_trackio(folder: Path) -> dict[str, list]:
    [database] = folder.glob("trackio/*.db")
    found = defaultdict(list)
    with sqlite3.connect(database) as connection:
        for name, text in connection.execute("SELECT run_name, metrics FROM metrics"):
            numbers = json.loads(text)
            found[name].append((numbers["train/global_step"], numbers))
    return found


def wandb_records(path: str):
    """The records of an offline run: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = Path(path).read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(parts)
            parts = b""


def read_wandb(folder: Path) -> dict[str, list]:
    found = defaultdict(list)
    for path in glob.glob(str(folder / "wandb" / "offline-run-*" / "*.wandb")):
        name = None
        for record in wandb_records(path):
            name = record.run.display_name if record.HasField("run") else name
            if record.HasField("history"):
                items = record.history.item
                numbers = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                found[name].append((numbers["train/global_step"], numbers))
    return found


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb}


@pytest.mark.parametrize("tracker", [pytest.param(name, marks=needs(name)) for name in READERS])
def test_a_tracker_gets_the_numbers_of_each_run(tracker, tmp_path, make_config):
    """Two runs in one process, whose folders have the same name."""
    runs = [Run(tmp_path / name / "run") for name in ("a", "b")]
    done = trained(tmp_path, *(write_config(make_config, run.folder, tracker) for run in runs))
    assert done.returncode == 0, done.stdout + done.stderr
    found = READERS[tracker](tmp_path)
    assert len(found) == 2
    for run in runs:
        [events] = [events for name, events in found.items() if name.startswith(str(run.folder))]
        values = defaultdict(list)
        for step, numbers in events:
            for name, value in numbers.items():
                values[name, step].append(value)
        records = run.read_metrics()
        assert [(r["step"], r["kind"]) for r in records] == [
            (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval"), (4, "eval"),
        ]  # fmt: skip
        assert {"loss", "nll", "p", "focus", "gate", "signal", "suppressed", "grad_norm"} < records[0].keys()
        for record in records:
            for name in record.keys() - {"step", "kind", "final", "p_histogram"}:
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                # tensorboard keeps float32
                assert record[name] in [pytest.approx(v, rel=1e-6) for v in values[tag, record["step"]]], tag
        assert sorted(step for name, step in values if name == "train/nll") == [1, 2, 3, 4]
        assert all(len(values["train/nll", step]) == 1 for step in (1, 2, 3, 4))


@needs("wandb")
def test_wandb_without_a_login_is_one_line(tmp_path, make_config):
    run = Run(tmp_path / "a" / "run")
    done = trained(tmp_path, write_config(make_config, run.folder, "wandb"), WANDB_MODE="online")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "deftune: train.report_to: wandb: No API key configured" in done.stderr
    assert "WANDB_MODE=offline keeps the run on this machine" in done.stderr
    assert run.status()["state"] == "failed"


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read(
    tracker, tmp_path, make_config, monkeypatch, capsys
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == tracker else find(name, *more))
    for room, name in ((preparation, "read_mixture"), (preparation, "load_tokenizer"), (assembly, "load_model")):
        monkeypatch.setattr(room, name, lambda *args, **kwargs: pytest.fail("began"))
    path = write_config(make_config, tmp_path / "a" / "run", tracker)
    assert main(["train", str(path)]) == 2
    assert f"train.report_to: {tracker} is not installed; pip install {tracker}\n" in capsys.readouterr().err
    assert not (tmp_path / "a" / "run").exists()


def test_a_folder_of_offline_runs_is_no_tracker(tmp_path, monkeypatch):
    """`python -m deftune` looks for modules in the working folder too, where wandb puts its runs."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_trackers(["wandb"])
