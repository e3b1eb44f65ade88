"""Processes for cells that are started before the command imports and checks: what they run, and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from deftune.cli import IMPORTS, main
from deftune.comparison import process as processes
from deftune.comparison.grid import load_comparison, open_comparison
from deftune.comparison.process import Process, Request, Requests, count_unfinished, started_early
from deftune.comparison.schedule import Children
from tiny_comparison import comparison_at, content, save_model, write

HANG_SECONDS = 1200  # a machine that is loaded may be slow; one that hangs ends the test
MARK = "DEFTUNE_TEST_MARK"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def made(monkeypatch) -> list[Process]:
    """The processes for cells that this process starts."""
    found = []

    class Seen(Process):
        def __init__(self):
            super().__init__()
            found.append(self)

    monkeypatch.setattr(processes, "Process", Seen)
    return found


def wait_until(ready) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def workers_marked(mark: str) -> list[int]:
    """The living processes for cells that have inherited a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment, line = ((entry / name).read_bytes() for name in ("environ", "cmdline"))
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0") and b"--worker" in line.split(b"\0"):
                found.append(int(entry.name))
    return found


def test_an_early_process_takes_the_first_cell(tmp_path, model, monkeypatch):
    """Here before there is a config. What it has printed before stands at the head of the cell's log."""
    (tmp_path / "mine.py").write_text("print('imported')")
    monkeypatch.setenv(IMPORTS, str(tmp_path / "mine.py"))
    with started_early(1) as early:
        (cell,) = comparison_at(tmp_path, model, seeds=[0], objectives=["deft"], base=False).cells()
        open_comparison(cell.comparison)
        asked = time.time()
        assert [state for _, state in Children(1, early=early)([cell], lambda _: True)] == ["finished"]
        assert early[0].has_been_asked and early[0].exit_code == 0
    log = (cell.folder / "log.txt").read_text()
    assert log.startswith("imported\n") and log.count("imported") == 1 and f"{cell.folder}/eval-tasks: " in log
    assert 0 <= cell.state()["start_seconds"] <= time.time() - asked


def test_an_early_process_that_has_died_gets_no_cell(tmp_path, model, monkeypatch):
    code = """
import json, os, pathlib, sys
for request in map(json.loads, sys.stdin):
    folder = pathlib.Path(request["comparison"], request["cell"])
    folder.mkdir(parents=True)
    (folder / "part").write_text('{"state": "finished"}')
    os.replace(folder / "part", folder / "cell.json")
"""
    codes, real = ["raise SystemExit(3)", code], subprocess.Popen
    monkeypatch.setattr(
        processes.subprocess, "Popen", lambda command, **more: real([sys.executable, "-c", codes.pop(0)], **more)
    )
    (cell,) = comparison_at(tmp_path, model, seeds=[0], objectives=["deft"], base=False).cells()
    with started_early(1) as early:
        wait_until(early[0].exits)
        assert [state for _, state in Children(1, early=early)([cell], lambda _: True)] == ["finished"]
        assert early[0].exit_code == 3 and not early[0].has_been_asked


def test_a_process_refuses_the_code_of_a_model_that_its_starter_has_not_allowed(tmp_path, model):
    what = content(model, tmp_path / "grid")
    what["model"]["trust_remote_code"] = True
    comparison = load_comparison(write(tmp_path / "c.yaml", what))
    open_comparison(comparison)
    process, request = Process(), Request(time.time(), comparison.folder, comparison.cells()[0].name, False)
    process.ask(request)
    wait_until(process.exits)
    assert process.exit_code == 2 and "pass --trust-remote-code" in request.log.read_text()


# --- how many ---------------------------------------------------------------------------------------------------------


def test_unfinished_cells_are_counted_from_the_files(tmp_path, model):
    """As the comparison itself counts them, in its file and in its folder."""
    path = write(tmp_path / "c.yaml", content(model, tmp_path / "grid"))
    assert count_unfinished(path, []) == 5
    overrides = ["seeds=[0, 1, 2]", "base=false", "learning_rates=[1e-3, 2e-3]", "train.max_steps=1"]
    assert count_unfinished(path, overrides) == len(load_comparison(path, overrides).cells()) == 12
    comparison = load_comparison(path)
    open_comparison(comparison)
    for cell, state in zip(comparison.cells(), ("finished", "failed", "finished")):
        cell.set_state(state)
    assert count_unfinished(path, []) == count_unfinished(tmp_path / "grid", []) == 3
    assert count_unfinished(path, [f"folder={tmp_path}/other"]) == 5
    what = content(model, tmp_path / "grid")
    del what["seeds"], what["learning_rates"]
    assert count_unfinished(write(path, what), []) == 1  # 3, of which 2 have finished


@pytest.mark.parametrize(
    "text", [None, "", "a: [", "- 1", "objectives: 3", "objectives: [nll]\nregimes: weak\nseeds: 1"]
)
def test_files_that_are_wrong_have_no_cells_to_start_for(tmp_path, text):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    assert count_unfinished(tmp_path / "c.yaml", []) == 0 == count_unfinished(tmp_path, ["seeds"])


@pytest.mark.parametrize(
    ("options", "count"), [([], 1), (["--jobs", "3"], 3), (["--jobs", "9"], 5), (["--dry-run"], 0)]
)
def test_no_more_processes_than_jobs_and_cells(tmp_path, model, monkeypatch, options, count):
    path, seen = write(tmp_path / "c.yaml", content(model, tmp_path / "grid")), []
    monkeypatch.setattr(processes, "Process", type("Fake", (), {"has_been_asked": True}))
    monkeypatch.setattr("deftune.cli.compare.run_all", lambda args, shown, early: seen.append(len(early)) or 0)
    assert main(["compare", "run", str(path), *options]) == 0 and seen == [count]


def test_a_finished_comparison_starts_no_process(tmp_path, model, made, capsys):
    what = content(model, tmp_path / "grid") | {"objectives": ["nll"], "seeds": [0], "base": False}
    (cell,) = load_comparison(write(tmp_path / "c.yaml", what)).cells()
    open_comparison(cell.comparison)
    cell.set_state("finished")
    main(["compare", "run", str(tmp_path / "c.yaml")])
    assert made == []


# --- how they end -----------------------------------------------------------------------------------------------------


def test_an_error_of_the_config_is_said_once_and_leaves_no_process(tmp_path, model, made, capfd):
    path = write(tmp_path / "c.yaml", content(model, tmp_path / "grid") | {"objectives": ["nll", "defft"]})
    assert main(["compare", "run", str(path), "--jobs", "2"]) == 2
    said = capfd.readouterr()
    assert len(made) == 2 and all(process.exit_code is not None for process in made)
    assert main(["compare", "run", str(path), "--dry-run"]) == 2
    assert capfd.readouterr() == said and said.err.count("unknown objective 'defft'") == 1
    assert len(made) == 2 and not (tmp_path / "grid").exists()


def test_an_error_of_the_checks_leaves_no_process(tmp_path, model, made, capfd):
    what = content(model, tmp_path / "grid")
    what["regimes"]["weak"]["evaluate"][0]["limit"] = 1
    assert main(["compare", "run", str(write(tmp_path / "c.yaml", what))]) == 2
    assert "ask more items" in capfd.readouterr().err
    assert len(made) == 1 and made[0].exit_code is not None and not (tmp_path / "grid").exists()


@pytest.mark.parametrize(
    ("number", "codes", "said"),
    [
        # -2: Python ends by the signal if it came while an import compiled a string (a dataclass); 130 for a shell, too
        (signal.SIGINT, (130, -2), "deftune: interrupted\n"),
        (signal.SIGTERM, (-15,), ""),
        (signal.SIGKILL, (-9,), ""),
    ],
)
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_signal_before_the_first_cell_ends_the_processes(tmp_path, model, number, codes, said, seconds):
    """``seconds`` after they have started: they, and the command, import."""
    path, mark = write(tmp_path / "c.yaml", content(model, tmp_path / "grid")), uuid.uuid4().hex
    command = subprocess.Popen(
        [sys.executable, "-m", "deftune", "compare", "run", str(path), "--jobs", "2"], text=True,
        env=os.environ | {MARK: mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    wait_until(lambda: len(workers_marked(mark)) == 2)
    time.sleep(seconds)
    command.send_signal(number)
    out, err = command.communicate(timeout=HANG_SECONDS)
    assert (out, err) == ("", said) and command.returncode in codes
    # Not at once: a process that the command was about to note when the signal came ends with its standard input.
    wait_until(lambda: not workers_marked(mark))
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("imported", [False, True])
def test_the_end_of_requests_ends_a_process_that_still_imports(monkeypatch, imported):
    seen, requests = [], Requests()
    monkeypatch.setattr("deftune.comparison.process.os.read", lambda *_: b"")
    monkeypatch.setattr("os._exit", seen.append)
    if imported:
        requests.stop = lambda: seen.append("stop")
    requests.read()
    assert seen == ([] if imported else [0]) and requests.get() is None


def test_requests_come_in_any_pieces(monkeypatch):
    made = [Request(1.5, "comparisons/a\nb é", "weak/base", True), Request(2.5, "c", "weak/nll/lr1-s0", False)]
    text = b"".join(json.dumps(vars(request)).encode() + b"\n" for request in made)
    pieces, requests = [text[:7], text[7:90], text[90:], b""], Requests()
    requests.stop = lambda: None
    monkeypatch.setattr("deftune.comparison.process.os.read", lambda *_: pieces.pop(0))
    requests.read()
    assert [requests.get(), requests.get(), requests.get()] == [*made, None]
