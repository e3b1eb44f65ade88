"""A comparison's processes: signals, kills, and what is left of them. Real commands, a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deftune.artifacts.runs import Run
from deftune.comparison.grid import Cell, load_comparison
from deftune.comparison.process import Process
from deftune.comparison.schedule import WATCH_SECONDS, Child, Children, cell_progress, run_grid
from tiny_comparison import content, save_model, write
from waiting import is_dead

HANG_SECONDS = 1200  # a machine that is loaded may be slow; one that hangs ends the test


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def wait_until(ready, about=lambda: "") -> None:
    end = time.monotonic() + HANG_SECONDS
    while not ready():
        assert time.monotonic() < end, about()
        time.sleep(0.05)


def long_comparison(tmp_path, model, **train) -> tuple[list[str], list[Cell]]:
    """(the command, its cells): two objectives that would train for a long time."""
    what = content(model, tmp_path / "grid") | {"seeds": [0], "base": False}
    what["train"] |= {"max_steps": 100_000, "epochs": 100_000, "save_steps": 100_000, **train}
    path = write(tmp_path / "c.yaml", what)
    return [sys.executable, "-m", "deftune", "compare", "run", str(path)], load_comparison(path).cells()


def steps(cell: Cell) -> int:
    return len(Run(cell.folder / "run").read_metrics())


def log(cell: Cell) -> str:
    path = cell.folder / "log.txt"
    return path.read_text() if path.is_file() else "no log"


def group_of(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(after[2]) == leader and after[0] != "Z":
                found.append(int(entry.name))
    return found


def leader_of(cell: Cell) -> int:
    """The process that runs a cell: it writes to the cell's log, and leads its session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                output = (entry / "fd" / "2").resolve()
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            except (OSError, IndexError):
                continue
            if output == (cell.folder / "log.txt").resolve() and session == int(entry.name):
                found.append(int(entry.name))
    (leader,) = found
    return leader


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_ends_the_grid_within_the_step_and_the_same_command_resumes(tmp_path, model, number, code, workers):
    """Two cells at a time: both save where they are and stop; nothing of them runs on; the next call goes on there."""
    command, cells = long_comparison(tmp_path, model, workers=workers)
    process = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: all(steps(cell) > 2 for cell in cells) or process.poll() is not None, lambda: log(cells[0]))
    leaders = [leader_of(cell) for cell in cells]
    at = [steps(cell) for cell in cells]
    process.send_signal(number)
    out = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == code, out
    assert "stopped; the same command goes on" in out
    assert not any(group_of(leader) for leader in leaders)
    for cell, before in zip(cells, at):
        assert cell.state()["state"] == "stopped", log(cell)
        run = Run(cell.folder / "run")
        reached = run.status()["step"]
        assert run.status()["state"] == "stopped" and before <= reached == cell.state()["step"]
        assert (run.checkpoints / f"checkpoint-{reached}").is_dir()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    first, reached = cells[0], Run(cells[0].folder / "run").status()["step"]
    wait_until(lambda: "resuming from" in log(first) and steps(first) > reached, lambda: log(first))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    assert [r["step"] for r in Run(first.folder / "run").read_metrics()][: reached + 1] == list(range(1, reached + 2))


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_killed_cell_is_a_failure_that_leaves_nothing_behind(tmp_path, model, whole_group):
    """SIGKILL of a cell, or of its whole process group: the grid records it and goes on with the next cell."""
    command, cells = long_comparison(tmp_path, model, workers=1)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: steps(cells[0]) > 2 or process.poll() is not None, lambda: log(cells[0]))
    leader = leader_of(cells[0])
    wait_until(lambda: len(group_of(leader)) > 1, lambda: log(cells[0]))  # the data loader's worker, one an epoch
    (os.killpg if whole_group else os.kill)(leader, signal.SIGKILL)
    wait_until(lambda: steps(cells[1]) > 2 or process.poll() is not None, lambda: log(cells[1]))
    assert cells[0].state()["state"] == "failed"
    assert cells[0].state()["error"] == f"killed by signal 9; see {cells[0].folder / 'log.txt'}"
    assert group_of(leader) == []
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 143 and f"{cells[0].name} failed: killed by signal 9" in out
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)  # it is tried again
    wait_until(lambda: steps(cells[0]) > 2 and cells[0].state()["state"] == "running", lambda: log(cells[0]))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_a_killed_process_group_of_the_command_stops_its_cells(tmp_path, model, told):
    """``told``: the cells have been told to stop before; the end of their requests is no second signal."""
    command, cells = long_comparison(tmp_path, model)
    process = subprocess.Popen([*command, "--jobs", "2"], stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: all(steps(cell) > 2 for cell in cells), lambda: log(cells[0]))
    leaders = [leader_of(cell) for cell in cells]
    for leader in leaders if told else []:
        os.kill(leader, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(group_of(leader) for leader in leaders), lambda: log(cells[0]))
    assert [cell.state()["state"] for cell in cells] == ["stopped", "stopped"]
    assert all((Run(cell.folder / "run").checkpoints).is_dir() for cell in cells)


# --- without a model --------------------------------------------------------------------------------------------------


ASKED = """
import json, os, pathlib, sys, time
HANG_SECONDS = 900
def whole(path, text):  # as the product writes: who reads sees all of the text, or no file
    part = path.with_name("." + path.name)
    with part.open("w") as file:
        file.write(text)
    os.replace(part, path)
pathlib.Path.write_text = whole
def wait_until(ready):
    end = time.monotonic() + HANG_SECONDS
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
def asked():
    for request in map(json.loads, sys.stdin):
        folder = pathlib.Path(request["comparison"], request["cell"])
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
"""


@pytest.fixture
def stand_in(tmp_path, model, monkeypatch):
    """``stand_in(code)``: cells whose process runs ``code`` instead; `asked` yields the folders of its cells."""

    def make(code: str, **changes) -> list[Cell]:
        comparison = load_comparison(write(tmp_path / "c.yaml", content(model, tmp_path / "grid") | changes))
        real = subprocess.Popen
        monkeypatch.setattr(
            "deftune.comparison.process.subprocess.Popen",
            lambda command, **more: real([sys.executable, "-c", ASKED + code], **more),
        )
        return comparison.cells()

    return make


def test_helpers_of_a_dead_cell_are_ended(stand_in):
    """A process that dies and leaves a child behind, which would hold the cell's lock."""
    cell = stand_in(
        "import subprocess; os.write(2, str(subprocess.Popen(['sleep', '1000']).pid).encode()); os._exit(3)"
    )[0]
    child = Child(Process())
    child.start(cell)
    wait_until(child.is_over)
    assert child.end(asked_to_stop=False) == "failed" and cell.state()["error"].startswith("exit code 3; see ")
    helper = int((cell.folder / "log.txt").read_text())
    wait_until(lambda: is_dead(helper))


def test_a_cell_stopped_while_it_measures_says_so(stand_in):
    """The default action of SIGTERM leaves it no time: whoever started it writes the state."""
    cell = stand_in("(next(asked()) / 'log.txt').open('a').write('up'); time.sleep(1000)")[0]
    child = Child(Process())
    child.start(cell)
    wait_until(lambda: "up" in log(cell))
    cell.set_state("running", stage="measure")
    child.process.stop()
    wait_until(child.is_over)
    assert child.end(asked_to_stop=True) == "stopped"
    assert cell.state() == {"state": "stopped", "stage": "measure"}


def test_the_first_signal_is_the_exit_code(stand_in):
    cells = stand_in("time.sleep(1000)")
    before = signal.getsignal(signal.SIGINT)
    runner = Children(1, watch=lambda _: os.kill(os.getpid(), signal.SIGINT), clock=Clock(WATCH_SECONDS))
    found = list(runner(cells, lambda cell: True))
    assert [(cell.name, state) for cell, state in found] == [(cells[0].name, "stopped")]
    assert runner.signal == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_between_two_cells_stops_the_grid(tmp_path, model, number, code):
    """The cell that ran has finished, so no cell is stopped; the others have not run."""
    comparison = load_comparison(write(tmp_path / "c.yaml", content(model, tmp_path / "grid")))

    class Runner:
        signal = number

        def __call__(self, cells, begin):
            yield cells[0], "finished"

    said = []
    outcome = run_grid(comparison, Runner(), said.append)
    assert outcome.stopped and outcome.exit_code == code and said[-1] == "stopped; the same command goes on"
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        outcome.pass_on_stop()


class Clock:
    """Moves on by ``step`` seconds whenever it is read."""

    def __init__(self, step: float):
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_running_cells_are_watched_by_the_clock(stand_in, tmp_path):
    """They end once they have been seen."""
    go, seen = tmp_path / "go", []
    cells = stand_in(f"wait_until(pathlib.Path({str(go)!r}).exists)", base=False, seeds=[0])
    list(
        Children(2, lambda running: (seen.append(running), go.touch()), Clock(WATCH_SECONDS))(cells, lambda cell: True)
    )
    assert [cell.name for cell in seen[0]] == [cell.name for cell in cells]
    seen.clear()
    list(Children(2, seen.append, clock=lambda: 0.0)(cells, lambda cell: True))  # no time passes
    assert seen == []


def test_where_a_cell_stands(stand_in):
    base, nll, *_ = stand_in("")
    assert cell_progress(nll) == f"{nll.name}: preparing"
    (nll.folder / "run").mkdir(parents=True)
    lines = [json.dumps({"step": n, "kind": "train"}) + "\n" for n in (1, 2)]
    (nll.folder / "run" / "metrics.jsonl").write_text("".join(lines))
    nll.set_state("running", stage="train")
    assert cell_progress(nll) == f"{nll.name}: training, step 2"
    base.set_state("running", stage="measure")
    for name in ("eval-a", "eval-b"):
        (base.folder / name).mkdir()
        (base.folder / name / "samples.jsonl").write_text("{}\n" * 3)
    assert cell_progress(base) == f"{base.name}: measuring, 6 answers"


OUT_OF_MEMORY_ONCE = """
for folder in asked():  # as a worker: a process that ended after each cell might be given one more before it is gone
    tries = folder / "tries"
    tries.write_text((tries.read_text() if tries.exists() else "") + "x")
    time.sleep(0.5)  # beside the other one
    fails = folder.parent.name == "deft" and (ALWAYS or len(tries.read_text()) == 1)
    state = {"state": "failed", "error": "OutOfMemoryError: CUDA out of memory."} if fails else {"state": "finished"}
    (folder / "cell.json").write_text(json.dumps(state))
    if fails:
        sys.exit(1)
"""


@pytest.mark.parametrize("always", [False, True])
def test_a_cell_without_gpu_memory_beside_others_runs_again_alone(stand_in, always):
    code = OUT_OF_MEMORY_ONCE.replace("ALWAYS", str(always))
    cells = stand_in(code, base=False, seeds=[0], objectives=["nll", "deft", "linear"])
    found = [(cell.objective, state) for cell, state in Children(2)(cells, lambda cell: True)]
    ends = [state for name, state in found if name == "deft"]
    assert ends == ["crowded", "failed" if always else "finished"]
    assert sorted(name for name, state in found if state == "finished" and name != "deft") == ["linear", "nll"]
    assert [(cell.folder / "tries").read_text() for cell in cells] == ["x", "xx", "x"]


TWO_HAVE_ROOM = """
def three(mark):  # of the first crowd have come this far; later cells find three marks
    (home / f"{mark}-{folder.parent.name}").touch()
    wait_until(lambda: len(list(home.glob(f"{mark}-*"))) >= 3)
for folder in asked():
    home = folder.parents[2]
    here = home / f"here-{folder.parent.name}"
    here.touch()
    three("came")
    time.sleep(0.5)  # a fourth would come
    beside = len(list(home.glob("here-*")))
    with (folder / "beside").open("a") as file:
        file.write(str(beside))
    three("counted")
    here.unlink()
    fails = beside > 2
    state = {"state": "failed", "error": "OutOfMemoryError: CUDA out of memory."} if fails else {"state": "finished"}
    (folder / "cell.json").write_text(json.dumps(state))
    if fails:
        sys.exit(1)
"""


def test_where_two_cells_have_room_two_run_at_a_time_after_three_did_not(stand_in):
    """All three of the first crowd fail, and count once; none of the later ones does."""
    names = ["nll", "deft", "linear", "eaft", "cayley"]
    cells = stand_in(TWO_HAVE_ROOM, base=False, seeds=[0], objectives=names)
    runner = Children(3)
    found = [(cell.objective, state) for cell, state in runner(cells, lambda cell: True)]
    assert sorted(found[:3]) == [("deft", "crowded"), ("linear", "crowded"), ("nll", "crowded")]
    assert sorted(found[3:]) == sorted((name, "finished") for name in names) and runner.room == 2
    assert all(int(count) <= 2 for cell in cells for count in (cell.folder / "beside").read_text()[-1])


CROWDED_ONCE = """
def is_dead(pid):
    try:
        return pathlib.Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:  # reaped already, or not yet here
        return pid.exists()
    except ProcessLookupError:
        return True
for folder in asked():
    again = (folder / "pid").exists()
    (folder / "pid").write_text(str(os.getpid()))
    if folder.parent.name == "deft" and not again:
        (folder / "cell.json").write_text('{"state": "failed", "error": "OutOfMemoryError: CUDA out of memory."}')
        sys.exit(1)
    if folder.parent.name == "nll":  # a process that is idle before deft has failed is ended
        wait_until(lambda: is_dead(folder.parents[1] / "deft" / folder.name / "pid"))
    (folder / "cell.json").write_text('{"state": "finished"}')
"""


def test_a_cell_that_runs_again_alone_has_no_idle_process_beside_it(stand_in):
    """A process that waits for a cell holds memory: it takes the cell, or ends before."""
    nll, deft = cells = stand_in(CROWDED_ONCE, base=False, seeds=[0], objectives=["nll", "deft"])
    found = [(cell.objective, state) for cell, state in Children(2)(cells, lambda cell: True)]
    assert sorted(found[:2]) == [("deft", "crowded"), ("nll", "finished")] and found[2:] == [("deft", "finished")]
    assert (nll.folder / "pid").read_text() == (deft.folder / "pid").read_text()


def test_a_single_cell_without_gpu_memory_fails(stand_in):
    cells = stand_in(OUT_OF_MEMORY_ONCE.replace("ALWAYS", "True"), base=False, seeds=[0], objectives=["deft"])
    assert [state for _, state in Children(2)(cells, lambda cell: True)] == ["failed"]


SEVERAL = """
for folder in asked():
    home = folder.parents[1 if folder.name == "base" else 2]
    (folder / "pid").write_text(str(os.getpid()))
    if folder.parent.name == "deft":
        os._exit(7)
    (folder / "cell.json").write_text('{"state": "finished"}')
(home / f"left-{os.getpid()}").touch()
"""


def test_a_process_runs_cells_until_one_fails(stand_in):
    """nll, eaft and linear share a process; deft ends it, and cayley and mile get a new one, which ends on request."""
    cells = stand_in(SEVERAL, base=False, seeds=[0], objectives=["nll", "eaft", "linear", "deft", "cayley", "mile"])
    found = [(cell.objective, state) for cell, state in Children(1)(cells, lambda cell: True)]
    assert found == [(cell.objective, "failed" if cell.objective == "deft" else "finished") for cell in cells]
    assert cells[3].state()["error"].startswith("exit code 7; see ")
    first, second = (int((cell.folder / "pid").read_text()) for cell in (cells[0], cells[4]))
    assert [int((cell.folder / "pid").read_text()) for cell in cells] == [first] * 4 + [second] * 2
    left = [path.name for path in Path(cells[0].comparison.folder).glob("left-*")]
    assert first != second and left == [f"left-{second}"]


def test_liger_kernels_stay_out_of_cells_without_them(stand_in):
    """Liger's functions replace those of transformers for good: the untuned model needs a process of its own."""
    cells = stand_in(SEVERAL, seeds=[0], objectives=["nll", "linear"], train={"liger": True, "max_steps": 1})
    base, *tuned = cells
    list(Children(1)([*tuned, base], lambda cell: True))
    first, second, third = ((cell.folder / "pid").read_text() for cell in (*tuned, base))
    assert first == second != third


def test_a_cell_of_another_comparison_gets_another_process(stand_in, tmp_path):
    """A process has read the config of one comparison."""
    (cell,) = stand_in(SEVERAL, base=False, seeds=[0], objectives=["nll"])
    other = cell.comparison.model_copy(update={"folder": str(tmp_path / "other")})
    cells = [cell, *other.cells()]
    assert [state for _, state in Children(1)(cells, lambda cell: True)] == ["finished", "finished"]
    assert (cells[0].folder / "pid").read_text() != (cells[1].folder / "pid").read_text()


GONE_AFTERWARDS = """
for folder in asked():
    (folder / "pid").write_text(str(os.getpid()))
    print(f"{folder} is at work", flush=True)
    (folder / "cell.json").write_text('{"state": "finished"}')
    if folder.parent.name == "deft":
        os._exit(7)
"""


def test_a_finished_cell_stays_finished_whatever_becomes_of_its_process(stand_in):
    cells = stand_in(GONE_AFTERWARDS, base=False, seeds=[0], objectives=["nll", "deft", "linear"])

    def begin(cell: Cell) -> bool:
        if cell.objective == "linear":  # asked earlier, the process might take it and end
            wait_until(lambda: is_dead((cells[1].folder / "pid").read_text()))
        return True

    assert [state for _, state in Children(1)(cells, begin)] == ["finished"] * 3
    assert all(cell.is_finished for cell in cells)
    assert f"{cells[0].folder} is at work" in log(cells[0])
