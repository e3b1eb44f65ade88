"""The study's queue: missing cells in the order of the plan, within a budget, merged one by one."""

import shutil
import signal
from pathlib import Path

import pytest
import yaml
from benchmarks.study.__main__ import main
from benchmarks.study.cells import read_study, write_study
from benchmarks.study.plan import Plan
from benchmarks.study.run import START_SECONDS, lacking, missing_cells, run_queue

import tiny_comparison
from deftune.comparison.grid import load_comparison
from deftune.comparison.schedule import Children
from serial import run_here

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def study(tmp_path):
    """A plan of two tiers over a comparison of a tiny model: its folder, and the folder of its results."""
    folder, results = tmp_path / "study", tmp_path / "results"
    folder.mkdir()
    what = tiny_comparison.content(tiny_comparison.save_model(tmp_path / "model"), tmp_path / "comparisons")
    what["train"]["max_steps"] = 1
    what["regimes"]["weak"]["evaluate"][0] |= {"temperatures": [1], "samples": 1}
    tiny_comparison.write(folder / "tiny.yaml", what)
    first = {"name": "1", "minutes": 1, "regimes": ["weak"], "objectives": ["deft"], "learning_rates": [], "seeds": [1]}
    second = {**first, "name": "2", "base": True, "objectives": ["nll"], "learning_rates": [2e-3]}
    weak = {"kind": "weak", "model": "tiny", "data": "words", "config": "tiny", "seconds": 100}
    tiny_comparison.write(folder / "plan.yaml", {"regimes": {"weak": weak}, "tiers": [first, second]})
    return Plan(folder / "plan.yaml"), folder, results


CELLS = ["weak/deft/lr0.001-s1", "weak/base", "weak/nll/lr0.002-s1"]


def test_missing_cells_run_in_the_order_of_the_plan_and_are_merged_one_by_one(study, tmp_path):
    plan, folder, results = study
    assert [one.cell.name for one in missing_cells(plan, folder, results)] == CELLS
    merged, said = [], []

    def runner(cells, begin):
        for cell, state in run_here(cells, begin):
            yield cell, state
            merged.append(sorted(read_study(results / "tiny.json").cells))

    outcome = run_queue(plan, folder, results, minutes=30, runner=runner, say=said.append, clock=lambda: 0.0)
    assert outcome.finished == CELLS and outcome.failed == {} and outcome.left == []
    assert merged == [sorted(CELLS[: number + 1]) for number in range(3)]
    assert said[0].startswith("tier 1: weak/deft/lr0.001-s1, 120 s expected, 30.0 minutes left")
    # a machine that has the committed results alone
    shutil.rmtree(tmp_path / "comparisons")
    study_file = read_study(results / "tiny.json")
    del study_file.cells["weak/base"]
    write_study(study_file, results / "tiny.json")
    again = run_queue(plan, folder, results, minutes=30, runner=run_here, say=said.append)
    assert again.finished == ["weak/base"] and sorted(read_study(results / "tiny.json").cells) == sorted(CELLS)
    # what a cell took is expected of the next one of its regime
    cost = study_file.cells["weak/deft/lr0.001-s1"]["cost"]
    cost |= {"steps_seconds": 1, "tokens_seconds": 2, "eval_seconds": 3, "overhead_seconds": 4}
    del study_file.cells["weak/nll/lr0.002-s1"]
    write_study(study_file, results / "tiny.json")
    base, nll = missing_cells(plan, folder, results)
    assert (base.seconds, nll.seconds) == (START_SECONDS + 100, START_SECONDS + 10)


@pytest.mark.long
def test_processes_run_the_cells_of_several_comparisons(study, tmp_path):
    """As `study run` does: the cells of two comparisons, in processes of their own, each merged into its own file."""
    plan, folder, results = study
    other = yaml.safe_load((folder / "tiny.yaml").read_text())
    other |= {"folder": str(tmp_path / "other"), "regimes": {"other": other["regimes"]["weak"]}}
    tiny_comparison.write(folder / "other.yaml", other)
    plan.regimes["other"] = plan.regimes["weak"] | {"config": "other"}
    plan.tiers[0]["regimes"] = ["weak", "other"]
    outcome = run_queue(plan, folder, results, minutes=30, say=lambda _: None)
    assert outcome.failed == {} and outcome.left == []
    assert sorted(outcome.finished) == sorted([*CELLS, "other/deft/lr0.001-s1"])
    assert sorted(read_study(results / "tiny.json").cells) == sorted(CELLS)
    assert list(read_study(results / "other.json").cells) == ["other/deft/lr0.001-s1"]


@pytest.mark.long
def test_cells_that_run_when_the_budget_is_spent_are_stopped(study):
    """The watch looks every few seconds: a clock that jumps past the end while the first cell runs."""
    plan, folder, results = study
    for path in folder.glob("tiny.yaml"):
        content = yaml.safe_load(path.read_text())
        content["train"] |= {"max_steps": 100_000, "epochs": 100_000}
        tiny_comparison.write(path, content)
    asked = iter([0.0, 0.0, 0.0])
    outcome = run_queue(plan, folder, results, minutes=30, say=lambda _: None, clock=lambda: next(asked, 1e9))
    assert outcome.finished == [] and outcome.failed == {}
    cell = missing_cells(plan, folder, results)[0].cell
    assert cell.state()["state"] == "stopped"


def test_a_spent_budget_is_signalled_once(study, monkeypatch):
    """The runner watches every few seconds; a second signal would end a cell while it saves."""
    plan, folder, results = study
    stops: list[int] = []

    class Watching(Children):
        def __call__(self, cells, begin):
            for _ in range(3):
                self.watch(cells)
            return iter(())

        def stop(self):
            super().stop()
            stops.append(self.signal)

    monkeypatch.setattr("benchmarks.study.run.Children", Watching)
    outcome = run_queue(plan, folder, results, minutes=1, say=lambda _: None, clock=iter(range(0, 10**4, 100)).__next__)
    assert stops == [signal.SIGTERM] and outcome.signal is None  # the budget is no signal of the user's


def test_a_signal_is_the_exit_code(study, monkeypatch, capsys):
    plan, folder, results = study

    class Stopped(Children):
        def __call__(self, cells, begin):
            self.stop(signal.SIGINT)
            return iter(())

    monkeypatch.setattr("benchmarks.study.run.Children", Stopped)
    assert run_queue(plan, folder, results, minutes=1, say=lambda _: None).signal == signal.SIGINT
    monkeypatch.setattr("benchmarks.study.__main__.FOLDER", folder)
    monkeypatch.setattr("benchmarks.study.plan.Plan", lambda _: plan)
    assert main(["run", "--minutes", "1", "--results", str(results)]) == 130


def test_the_first_cells_get_processes_that_start_before_the_imports(study, monkeypatch):
    _, folder, results = study
    started, taken = [], []

    class Early:
        def __init__(self):
            self.has_been_asked = True  # nothing to close
            started.append(self)

    class Taking(Children):
        def __call__(self, cells, begin):
            taken.extend(child.process for child in self.idle)
            return iter(())

    monkeypatch.setattr("deftune.comparison.process.Process", Early)
    monkeypatch.setattr("benchmarks.study.run.Children", Taking)
    monkeypatch.setattr("benchmarks.study.__main__.FOLDER", folder)
    command = ["run", "--minutes", "1", "--jobs", "2", "--results", str(results)]
    assert main(command) == 0 and taken == started and len(started) == 2
    assert main([*command, "--dry-run"]) == 0 and len(started) == 2


def test_no_cell_starts_that_would_not_end_in_time(study):
    plan, folder, results = study
    now = 0.0

    def runner(cells, begin):
        nonlocal now
        for cell in cells:
            if begin(cell):
                now += 90
                cell.set_state("failed", stage="train", error=cell.name)
                yield cell, "failed"

    outcome = run_queue(plan, folder, results, minutes=200 / 60, runner=runner, clock=lambda: now, say=lambda _: None)
    # 200 s: the first cell is expected to take 120 s; 90 s later 110 s are left
    assert list(outcome.failed) == CELLS[:1] and [one.cell.name for one in outcome.left] == CELLS


def test_a_queue_expects_what_its_own_cells_took_and_takes_the_cells_that_were_asked_for(study):
    plan, folder, results = study
    now = 0.0

    def runner(cells, begin):
        nonlocal now
        for cell, state in run_here(cells, begin):
            now += 90
            yield cell, state

    only = "weak/(deft|nll)"
    assert [one.cell.name for one in missing_cells(plan, folder, results, only)] == [CELLS[0], CELLS[2]]
    said = []
    outcome = run_queue(
        plan, folder, results, minutes=190 / 60, only=only, runner=runner, clock=lambda: now, say=said.append
    )
    # 90 s after the first cell 100 s are left: too few for the plan's 120 s, enough for the 90 s that a cell took
    assert outcome.finished == [CELLS[0], CELLS[2]] and outcome.left == []
    assert said[1].startswith("tier 2: weak/nll/lr0.002-s1, 90 s expected, 1.7 minutes left")


def test_a_failure_is_merged_and_a_regime_without_its_files_is_left_out(study):
    plan, folder, results = study
    said = []

    def runner(cells, begin):
        for cell in cells:
            if begin(cell):
                cell.set_state("failed", stage="train", error="out of paper")
                yield cell, "failed"

    outcome = run_queue(plan, folder, results, minutes=30, runner=runner, say=said.append)
    assert set(outcome.failed) == set(CELLS[:2]) and len(outcome.left) == 3  # alike: the rest is not started
    assert "  weak/base failed: out of paper" in said
    assert read_study(results / "tiny.json").cells["weak/base"]["failures"] == [
        {"stage": "train", "error": "out of paper"}
    ]
    plan.regimes["weak"]["config"] = "other"
    content = yaml.safe_load((folder / "tiny.yaml").read_text())
    content["regimes"]["weak"]["tokens"] = [{"path": "nowhere/rows.jsonl"}]
    tiny_comparison.write(folder / "other.yaml", content)
    said.clear()
    assert run_queue(plan, folder, results, minutes=30, runner=runner, say=said.append).failed == {}
    assert said == ["weak: left out: nowhere/rows.jsonl: no such file"]
    content["regimes"]["weak"]["tokens"] = []
    content["regimes"]["weak"]["evaluate"][0] |= {"tasks": ["figfont", "gsm8k"], "data": str(folder)}
    tiny_comparison.write(folder / "other.yaml", content)
    said.clear()
    assert run_queue(plan, folder, results, minutes=30, runner=runner, say=said.append).failed == {}
    (line,) = said  # and the other regimes of the plan would run
    assert line.startswith("weak: left out: gsm8k")


@pytest.mark.parametrize(
    ("key", "name", "missing"),
    [
        ("model", "org/model-1.5B", False),
        ("model", "smollm2", False),
        ("model", "org/model.gguf", True),
        ("model", "./absent", True),
        ("model", "here/model", True),  # a folder of this machine, no organisation of the hub
        ("data", "org/rows", False),
        ("data", "org/rows:main", False),
        ("data", "org/rows.jsonl", True),
        ("data", "org/rows.jsonl.gz", True),
        ("data", "../rows", True),
        ("data", "a/b/c", True),
    ],
)
def test_a_hub_id_is_no_missing_file(study, tmp_path, monkeypatch, key, name, missing):
    _, folder, _ = study
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((folder / "tiny.yaml").read_text())
    if key == "model":
        content["model"]["name"] = name
    else:
        content["regimes"]["weak"]["tokens"] = [{"path": name}]
    comparison = load_comparison(Path(tiny_comparison.write(folder / "other.yaml", content)))
    assert lacking(comparison, "weak") == (f"{name}: no such file" if missing else "")


def test_every_planned_cell_of_the_study_has_a_config(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    assert main(["run", "--minutes", "9", "--jobs", "2", "--dry-run", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    plan = Plan(REPOSITORY / "benchmarks/study/plan.yaml")
    assert len(lines) - 1 == sum(len(list(plan.wanted(tier))) for tier in plan.tiers)
    assert lines[-1].startswith(f"{len(lines) - 1} planned cells are missing, about ")
    assert main(["run", "--minutes", "0"]) == 2 and "--minutes is above 0" in capsys.readouterr().err
