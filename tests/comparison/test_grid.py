"""A comparison: its file, its cells, running and resuming it, and what it says."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from deftune.artifacts.config import ConfigError
from deftune.artifacts.folders import FolderError
from deftune.artifacts.runs import Run
from deftune.cli import main
from deftune.comparison.grid import STARTER, Comparison, load_comparison, open_comparison, slug
from deftune.comparison.schedule import run_grid
from deftune.comparison.scores import (
    Option,
    Scores,
    Shown,
    averaged_columns,
    common,
    difference_record,
    score_record,
    show,
    view_record,
)
from deftune.comparison.show import view_notes
from deftune.comparison.summary import BEST, summarize_comparison
from deftune.comparison.tables import render_markdown
from deftune.evaluation.statistics import equal_differences_interval, half_of, wilson_interval
from deftune.paper.beside import paper_model, tables_beside_paper
from deftune.paper.board import ComparisonBoard
from serial import run_here
from tiny_comparison import comparison_at, content, save_model, write
from waiting import HANG_SECONDS, wait_for


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Comparison:
    """A comparison that was run."""
    comparison = comparison_at(tmp_path_factory.mktemp("comparison"), model)
    outcome = run_grid(comparison, run_here, lambda _: None)
    assert outcome.exit_code == 0 and len(outcome.finished) == 5
    return comparison


# --- the file ---------------------------------------------------------------------------------------------------------


def test_cells_come_seed_by_seed(tmp_path, model):
    comparison = comparison_at(tmp_path, model, learning_rates=[1e-3, 5e-5], objectives=["nll", "deft | eos(nll)"])
    assert [cell.name for cell in comparison.cells()] == [
        "weak/base",
        *(f"weak/{objective}/lr{rate}-s{seed}" for seed in (0, 1) for rate in ("0.001", "5e-05")
          for objective in ("nll", slug("deft | eos(nll)"))),
    ]  # fmt: skip
    config = comparison.cells()[-1].config
    assert (config.objective, config.train.seed, config.train.learning_rate) == ("deft | eos(nll)", 1, 5e-5)
    assert config.train.max_steps == 3
    with pytest.raises(ValueError, match="unknown cell 'weak/nil'"):
        comparison.cell("weak/nil")


def test_specs_that_look_alike_have_different_folders():
    assert slug("deft") == "deft"
    assert len({slug("alpha(0.5)"), slug("alpha 0.5"), slug("alpha-0.5")}) == 3
    assert all(Path(slug(spec)).name == slug(spec) for spec in ("../x", "a/b", "deft | eos(nll)"))


def test_a_regime_is_laid_over_the_comparison(tmp_path, model):
    what = content(model, tmp_path / "grid")
    what["regimes"]["weak"]["train"] = {"max_steps": 7}
    comparison = load_comparison(write(tmp_path / "c.yaml", what))
    train = comparison.cells()[1].config.train
    assert (train.max_steps, train.batch_size) == (7, 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"objectives": ["defft"]}, "objectives: unknown objective 'defft'. Did you mean 'deft'?"),
        ({"objectives": ["deft", "deft"]}, "objectives: deft is there twice"),
        ({"seeds": [1, 1]}, "seeds: 1 is there twice"),
        ({"learning_rates": [1e-3, 1.0000001e-3]}, "0.001 is there twice"),  # their cells would have one folder
        ({"sedes": [1]}, "sedes: unknown key. Did you mean 'seeds'?"),
        ({"train": {"learning_rate": 1e-3}}, "train.learning_rate: belongs in `learning_rates`"),
        ({"train": {"seed": 1}}, "train.seed: belongs in `seeds`"),
        ({"train": {"max_stepz": 1}}, "regimes.weak: train.max_stepz: unknown key. Did you mean 'max_steps'?"),
        ({"model": {"nam": "x"}}, "regimes.weak: model.nam: unknown key. Did you mean 'name'?"),
        ({"regimes": {}}, "regimes: Dictionary should have at least 1 item"),
        ({"regimes": {"a/b": {"data": {}, "tokens": []}}}, "nothing is measured; give `evaluate` or `tokens`"),
        ({"regimes": {"weak": {"data": {}, "evaluate": [{"suite": "maths"}]}}}, "Did you mean 'math'?"),
        ({"regimes": {"weak": {"data": {}, "evaluate": [{"tsks": []}]}}}, "Did you mean 'tasks'?"),
        ({"regimes": {"weak": {"data": {}, "evaluate": [{"suite": "heldout"}]}}}, "asked for with `tokens`"),
    ],
)
def test_wrong_files_are_named(tmp_path, model, changes, text, capsys):
    path = write(tmp_path / "c.yaml", content(model, tmp_path / "grid") | changes)
    assert main(["compare", "run", str(path)]) == 2
    error = capsys.readouterr().err
    assert text in error and str(path) in error
    assert not (tmp_path / "grid").exists()


@pytest.mark.parametrize("name", ["../up", "..", ".", "", ".hidden", "a/../../b", "/tmp", "a\nb"])
def test_a_regime_cannot_leave_the_folder(tmp_path, model, name):
    what = content(model, tmp_path / "grid")
    weak = what["regimes"]["weak"]
    with pytest.raises(ConfigError, match="letters, digits"):
        load_comparison(write(tmp_path / "c.yaml", what | {"regimes": {name: weak}}))
    named = {**weak, "evaluate": [{**weak["evaluate"][0], "name": name}]}
    with pytest.raises(ConfigError, match="letters, digits"):
        load_comparison(write(tmp_path / "c.yaml", what | {"regimes": {"weak": named}}))


def test_too_few_items_to_choose_on_are_refused_before_anything_runs(tmp_path, model, capsys):
    what = content(model, tmp_path / "grid")
    what["regimes"]["weak"]["evaluate"][0]["limit"] = 1
    assert main(["compare", "run", str(write(tmp_path / "c.yaml", what))]) == 2
    assert "figfont has 1 items, all in one half" in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


def test_the_starter_is_a_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "init"]) == 0
    assert Path("compare.yaml").read_text() == STARTER
    assert load_comparison(Path("compare.yaml")).objectives == ["nll", "deft"]
    assert main(["compare", "init"]) == 2
    assert "exists; name another file" in capsys.readouterr().err


def test_a_folder_grows_and_changes_in_nothing_else(tmp_path, model):
    what = content(model, tmp_path / "grid")
    open_comparison(Comparison.model_validate(what))
    grown = what | {"seeds": [0, 1, 2], "objectives": ["nll", "deft", "linear"]}
    open_comparison(Comparison.model_validate(grown))
    assert load_comparison(tmp_path / "grid").seeds == [0, 1, 2]
    with pytest.raises(FolderError, match=r"holds another comparison \(objectives: linear is gone; seeds: 2 is gone\)"):
        open_comparison(Comparison.model_validate(what))
    written = yaml.safe_load((tmp_path / "grid" / "comparison.yaml").read_text())
    assert written.pop("keep_models") is True  # as if the key had come later
    write(tmp_path / "grid" / "comparison.yaml", written)
    open_comparison(Comparison.model_validate(grown))
    other = grown | {"train": {**what["train"], "max_steps": 4}}
    with pytest.raises(FolderError, match=r"train.max_steps: 3 -> 4"):
        open_comparison(Comparison.model_validate(other))
    regimes = json.loads(json.dumps(what["regimes"]))
    regimes["weak"]["tokens"][0]["limit"] = 5
    with pytest.raises(FolderError, match=r"regimes.weak.tokens.0.limit: 4 -> 5"):
        open_comparison(Comparison.model_validate(grown | {"regimes": regimes}))


def test_jobs_of_an_array_open_a_new_folder_at_the_same_time(tmp_path, model):
    for attempt in range(5):
        comparison = Comparison.model_validate(content(model, tmp_path / str(attempt)))
        with ThreadPoolExecutor(8) as jobs:
            for job in [jobs.submit(open_comparison, comparison) for _ in range(8)]:
                job.result()
        assert {path.name for path in (tmp_path / str(attempt)).iterdir()} == {"comparison.yaml", "environment.json"}


@pytest.mark.parametrize("words", [[], ["--cell", "weak/deft/lr0.001-s2"]])
def test_cells_of_other_items_are_refused_before_they_are_trained(finished, tmp_path, capsys, words):
    """The questions were changed, and a seed is added: the new cells could not be paired with the finished ones."""
    shutil.copytree(finished.folder, tmp_path / "grid")
    settings = tmp_path / "grid/weak/nll/lr0.001-s0/eval-tasks/settings.json"
    content = json.loads(settings.read_text())
    content["data"]["figfont"]["hash"] = "0" * 16
    settings.write_text(json.dumps(content))
    assert main(["compare", "run", str(tmp_path / "grid")]) == 0  # every cell has finished
    capsys.readouterr()
    assert main(["compare", "run", str(tmp_path / "grid"), "--set", "seeds=[0, 1, 2]", *words]) == 2
    error = capsys.readouterr().err
    assert f"figfont has other items than {settings.parent} was asked" in error and "--set folder=..." in error
    assert not (tmp_path / "grid/weak/nll/lr0.001-s2").exists()


def test_a_folder_of_something_else_is_refused(tmp_path, model, capsys):
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "thesis.tex").touch()
    path = write(tmp_path / "c.yaml", content(model, tmp_path / "grid"))
    assert main(["compare", "run", str(path)]) == 2
    assert "is not empty and no comparison" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "grid").iterdir()] == ["thesis.tex"]
    assert main(["compare", "show", str(tmp_path / "grid")]) == 2
    assert "is no comparison" in capsys.readouterr().err
    assert main(["compare", "run", str(tmp_path / "nowhere.yaml")]) == 2
    assert "`deftune compare init` writes one" in capsys.readouterr().err


def test_dry_run_lists_cells_and_makes_nothing(tmp_path, model, capsys):
    path = write(tmp_path / "c.yaml", content(model, tmp_path / "grid"))
    assert main(["compare", "run", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.startswith("weak/")]
    assert [line[0] for line in lines] == [cell.name for cell in load_comparison(path).cells()]
    # six items, one greedy answer and two at T = 1, four tokens each
    assert all(line[-2:] == ["18", "72"] for line in lines)
    assert lines[0][2:4] == ["0", "0"] and lines[1][2] == "3"
    trained = int(lines[1][3].replace(",", ""))
    assert f"5 of 5 cells to run: {4 * trained:,} tokens to train on, at most 360 to generate" in out
    assert not (tmp_path / "grid").exists()


# --- running ----------------------------------------------------------------------------------------------------------


def test_a_cell_is_a_run_a_result_and_a_token_table(finished):
    for cell in finished.cells():
        assert cell.is_finished
        assert (cell.folder / "tokens.parquet").is_file()
        graded = (cell.folder / "eval-tasks" / "graded.jsonl").read_text().splitlines()
        assert len(graded) == 6 * 3
    tuned = finished.cells()[1]
    assert Run(tuned.folder / "run").status()["state"] == "finished"
    assert not (tuned.folder / "run" / "checkpoints").exists()
    cost = tuned.state()["cost"]
    assert cost["steps"] == 3 and cost["seconds"] > 0 and cost["memory_gib"] > 0
    assert cost["tokens_per_second"] == pytest.approx(cost["tokens"] / cost["seconds"])
    assert finished.cells()[0].state()["cost"] == {}


def test_objectives_see_the_same_data_in_the_same_order(finished):
    """For a seed: the same supervised and input tokens at every step; another seed has another order."""
    seen = {}
    for cell in finished.cells()[1:]:
        records = [r for r in Run(cell.folder / "run").read_metrics() if r["kind"] == "train"]
        data = json.loads((cell.folder / "run" / "data.json").read_text())["fingerprint"]
        seen.setdefault(cell.seed, set()).add((data, *((r["tokens"], r["input_tokens"]) for r in records)))
    assert all(len(orders) == 1 for orders in seen.values())
    assert seen[0] != seen[1]


def test_finished_cells_are_left_alone_and_lost_ones_made_again(finished, capsys):
    cells = finished.cells()
    before = {cell.name: (cell.folder / "cell.json").read_bytes() for cell in cells}
    samples = cells[2].folder / "eval-tasks" / "samples.jsonl"
    whole, weights = samples.read_text(), (cells[2].folder / "run" / "model" / "model.safetensors").read_bytes()
    # killed while it answered: half a line, no grades, the state still running
    samples.write_text(whole[: len(whole) // 2])
    for name in ("graded.jsonl", "summary.json"):
        (cells[2].folder / "eval-tasks" / name).unlink()
    cells[2].set_state("running", stage="measure")
    started = []
    outcome = run_grid(
        finished, lambda cells, begin: run_here(cells, lambda cell: started.append(cell.name) or True), lambda _: None
    )
    assert outcome.exit_code == 0 and started == [cells[2].name]
    assert sorted(samples.read_text().splitlines()) == sorted(whole.splitlines())  # answers come in any order
    assert (cells[2].folder / "run" / "model" / "model.safetensors").read_bytes() == weights
    assert {n: b for n, b in before.items() if n != cells[2].name} == {
        cell.name: (cell.folder / "cell.json").read_bytes() for cell in cells if cell.name != cells[2].name
    }


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path, model, capsys):
    comparison = comparison_at(tmp_path, model, seeds=[0])
    broken = comparison.cells()[1]
    broken.folder.mkdir(parents=True)
    (broken.folder / "run").write_text("in the way")
    open_before = comparison.cells()[0].folder.parents[1]
    write(open_before / "comparison.yaml", json.loads(comparison.model_dump_json()))
    outcome = run_grid(comparison, run_here, lambda _: None)
    assert outcome.exit_code == 1
    assert list(outcome.failed) == [broken.name] and len(outcome.finished) == 2
    assert "is not a folder" in outcome.failed[broken.name]
    assert broken.state()["state"] == "failed" and broken.state()["stage"] == "train"
    assert main(["compare", "show", comparison.folder, "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert f"failed: {broken.name}: FolderError" in out
    assert "| deft |" in out and "| nll |" not in out
    (broken.folder / "run").unlink()
    assert run_grid(comparison, run_here, lambda _: None).exit_code == 0


def test_weights_go_when_they_are_not_kept(tmp_path, model):
    comparison = comparison_at(tmp_path, model, seeds=[0], objectives=["deft"], keep_models=False, base=False)
    assert run_grid(comparison, run_here, lambda _: None).exit_code == 0
    (cell,) = comparison.cells()
    assert not (cell.folder / "run" / "model").exists()
    assert cell.is_finished
    assert run_grid(comparison, lambda cells, _: iter(cells and pytest.fail("started")), lambda _: None).exit_code == 0


@pytest.mark.slow
def test_a_killed_grid_stops_its_cell_and_goes_on(tmp_path, model):
    """SIGKILL to the command while a cell trains: the cell's process saves and stops; the same command finishes."""
    what = content(model, tmp_path / "grid") | {"objectives": ["deft"], "seeds": [0], "base": False}
    what["train"] |= {"max_steps": 200, "epochs": 1000, "save_steps": 100}
    path = write(tmp_path / "c.yaml", what)
    command = [sys.executable, "-m", "deftune", "compare", "run", str(path)]
    (cell,) = load_comparison(path).cells()
    run = Run(cell.folder / "run")

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: run.status()["state"] == "running" and len(run.read_metrics()) > 6)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: cell.state()["state"] == "stopped", (cell.folder / "log.txt").read_text)
    reached = run.status()["step"]
    assert 0 < reached < 200
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + (cell.folder / "log.txt").read_text()
    assert "1 of 1 cells finished, 0 failed" in done.stdout
    assert "resuming from" in (cell.folder / "log.txt").read_text()
    assert [r["step"] for r in run.read_metrics()] == list(range(1, 201))


@pytest.mark.slow
def test_two_cells_at_a_time(tmp_path, model):
    """SIGTERM stops both; the same command finishes them, and a cell that fails is not in the others' way."""
    what = content(model, tmp_path / "grid") | {"seeds": [0], "base": False}
    what["train"] |= {"max_steps": 200, "epochs": 1000}
    path = write(tmp_path / "c.yaml", what)
    command = [sys.executable, "-m", "deftune", "compare", "run", str(path), "--jobs", "2"]
    cells = load_comparison(path).cells()
    assert len(cells) == 2
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for(
        lambda: process.poll() is not None or all(len(Run(cell.folder / "run").read_metrics()) > 6 for cell in cells)
    )
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 143 and "stopped; the same command goes on" in out
    assert [cell.state()["state"] for cell in cells] == ["stopped", "stopped"]
    shutil.rmtree(cells[0].folder / "run")
    (cells[0].folder / "run").write_text("in the way")
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1 and "1 of 2 cells finished, 1 failed" in done.stdout, done.stdout + done.stderr
    assert f"{cells[0].name} failed: ConfigError" in done.stdout
    assert [cell.state()["state"] for cell in cells] == ["failed", "finished"]


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--jobs", "2", "--dry-run"], ["--jobs", "2", "--cell", "x"]])
def test_jobs_that_cannot_be(tmp_path, model, words, capsys):
    path = write(tmp_path / "c.yaml", content(model, tmp_path / "grid"))
    assert main(["compare", "run", str(path), *words]) == 2
    assert "--jobs: " in capsys.readouterr().err and not (tmp_path / "grid").exists()


@pytest.mark.slow
def test_the_command_with_a_real_model(tmp_path):
    """SmolLM2, two objectives, two seeds, two steps each; SIGTERM in the middle, then on to the end."""
    what = content(Path("smollm2"), tmp_path / "grid")
    what["train"] |= {"max_steps": 2}
    what["regimes"]["weak"]["data"]["max_length"] = 256
    path = write(tmp_path / "c.yaml", what)
    command = [sys.executable, "-m", "deftune", "compare", "run", str(path)]
    comparison = load_comparison(path)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: process.poll() is not None or comparison.cells()[1].state()["state"] != "new")
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=HANG_SECONDS)[0]
    assert process.returncode == 143, out
    assert "stopped; the same command goes on" in out
    first = (comparison.cells()[0].folder / "cell.json").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (comparison.cells()[0].folder / "cell.json").read_bytes() == first
    summary = summarize_comparison(comparison)
    tokens = {record["objective"]: record["nll"]["mean"] for record in summary["regimes"]["weak"]["tokens"]}
    assert tokens["nll"] != tokens["deft"] != tokens["base"]
    assert main(["compare", "show", str(tmp_path / "grid")]) == 0


# --- what it says -----------------------------------------------------------------------------------------------------

ITEMS = [f"item {n}" for n in range(40)]
HALVES = [[item for item in ITEMS if half_of(item) == half] for half in (0, 1)]


def scores(**by_option) -> Scores:
    """option name -> item -> score; names are T_lr."""
    found = Scores()
    for name, items in by_option.items():
        temperature, rate = name.removeprefix("t").split("_lr")
        option = Option(float(temperature), float(rate.replace("m", "-")))
        found.values[0, option] = {"task": dict(items)}
    return found


def test_an_item_is_never_scored_at_what_it_helped_to_choose():
    """Rate 1 is perfect on the first half and fails on the second, rate 2 the other way round: chosen and scored on
    the same items either would look perfect; held out, both score 0."""
    first = {item: float(half_of(item) == 0) for item in ITEMS}
    second = {item: float(half_of(item) == 1) for item in ITEMS}
    shown = show(scores(t0_lr1e1=first, t0_lr2e1=second), ["task"], 0.0, [0])
    assert shown.columns["task"].unique().tolist() == [0.0]
    assert [option.learning_rate for option in shown.chosen] == [20.0, 10.0]


def test_one_temperature_chooses_the_rate_only():
    low, high = dict.fromkeys(ITEMS, 0.2), dict.fromkeys(ITEMS, 0.9)
    found = scores(t0_lr1e1=low, t0_lr2e1=dict.fromkeys(ITEMS, 0.5), t1_lr1e1=high)
    assert show(found, ["task"], 0.0, [0]).columns["task"].unique().tolist() == [0.5]
    best = show(found, ["task"], None, [0])
    assert best.columns["task"].unique().tolist() == [0.9]
    assert best.chosen == (Option(1.0, 10.0), Option(1.0, 10.0))


def test_equals_are_settled_by_the_lower_setting():
    same = dict.fromkeys(ITEMS, 0.5)
    assert show(scores(t1_lr2e1=same, t0_lr2e1=same, t0_lr1e1=same), ["task"], None, [0]).chosen[0] == Option(0.0, 10.0)


def test_an_option_that_a_seed_lacks_is_not_offered():
    found = scores(t0_lr1e1=dict.fromkeys(ITEMS, 0.1), t0_lr2e1=dict.fromkeys(ITEMS, 0.9))
    found.values[1, Option(0.0, 10.0)] = {"task": dict.fromkeys(ITEMS, 0.3)}
    both = show(found, ["task"], 0.0, [0, 1])
    assert both.chosen == (Option(0.0, 10.0), Option(0.0, 10.0))
    assert both.columns["task"].shape == (2, len(ITEMS)) and both.items["task"] == sorted(ITEMS)
    assert both.columns["task"].unique(dim=1).tolist() == [[0.1], [0.3]]


def test_an_unfinished_sweep_is_shown_for_the_seeds_that_have_a_rate_in_common():
    """Seed 0 has one rate and seed 1 has two: both are shown at the rate that both have."""
    found = Scores()
    for seed, rate in ((0, 1.0), (1, 1.0), (1, 2.0)):
        found.values[seed, Option(0.0, rate)] = {"task": dict.fromkeys(ITEMS, rate / 10)}
    whole = common(found)
    assert whole.seeds == [0, 1] and show(whole, ["task"], None, whole.seeds).chosen[0].learning_rate == 1.0
    view = view_record("T=0", 0.0, {"nll": found}, ["task"], ["task"])
    assert view["rows"]["nll"]["seeds"] == 2 and view["rows"]["nll"]["columns"]["task"]["value"] == pytest.approx(0.1)


def shown(**columns):
    """What `show` finds: for each column one list of item scores, or one for each seed."""
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    tensors = {name: values if values.dim() == 2 else values[None] for name, values in tensors.items()}
    items = {name: [str(place) for place in range(values.shape[1])] for name, values in tensors.items()}
    seeds = tuple(range(len(next(iter(tensors.values())))))
    return Shown(tensors, items, (Option(0, None), Option(0, None)), seeds)


def test_a_difference_over_columns_counts_each_once():
    """Two columns of 4 and 2 items: the mean of their means, and sign flips over weighted items."""
    found = difference_record(shown(a=[1, 1, 0, 0], b=[1, 0]), shown(a=[0, 0, 0, 0], b=[0, 0]), ["a", "b"])
    assert found["difference"] == pytest.approx((0.5 + 0.5) / 2)
    assert found["standard_error"] == pytest.approx(math.hypot(math.sqrt(1 / 12), 0.5) / 2)
    assert found["p"] == 0.25  # weights 1/8, 1/8, 1/4: of eight sign patterns two reach the sum
    assert found["items"] == 6 and found["seeds"] == 1


def test_seeds_that_disagree_widen_the_interval_of_a_difference():
    """The same item means in three seeds that agree, and in three seeds that are far apart."""
    base = shown(a=[[0.0] * 40])
    agree = shown(a=[[0.29, 0.3, 0.31, 0.3] * 10] * 3)
    apart = shown(a=[[x + shift for x in [0.29, 0.3, 0.31, 0.3] * 10] for shift in (-0.2, 0.0, 0.2)])
    one, other = difference_record(agree, base, ["a"]), difference_record(apart, base, ["a"])
    assert one["difference"] == pytest.approx(other["difference"]) == pytest.approx(0.3)
    assert one["high"] - one["low"] < 0.05 and one["p"] < 1e-6
    half = 4.303 * 0.2 / math.sqrt(3)  # Student's t with two degrees of freedom: the seeds' part is nearly all
    assert (other["high"] - other["low"]) / 2 == pytest.approx(half, rel=0.01)
    assert 0.1 < other["p"] < 0.15 and other["seeds"] == 3


def test_a_score_over_seeds_stays_between_0_and_1():
    found = score_record([torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)])
    assert found["low"] == 0 and found["value"] == 0.125 and 0.125 < found["high"] <= 1 and found["items"] == 4


def test_results_of_different_items_are_not_paired():
    with pytest.raises(ValueError, match="a: the two results are of different items"):
        shown(a=[1, 0]).minus(replace(shown(a=[1, 0]), items={"a": ["0", "2"]}), ["a"])


@pytest.mark.parametrize("step", [0.0, 1.0])
@pytest.mark.parametrize("seeds", [1, 3])
def test_items_that_all_agree_leave_an_interval(step, seeds):
    """Two items that differ by nothing, or by everything, prove nothing about others: no interval of width 0."""
    mine, zero = (shown(a=[[value] * 2] * seeds, b=[[value] * 2] * seeds) for value in (step, 0.0))
    found = difference_record(mine, zero, ["a", "b"])
    expected = equal_differences_interval(step, 2)
    assert (found["low"], found["high"]) == (expected.low, expected.high) and found["low"] < 0
    average, expected = score_record(list(mine.columns.values())), wilson_interval(step, 2)
    assert (average["low"], average["high"]) == (expected.low, expected.high)
    assert found["p"] == (1.0 if step == 0 else 0.125)  # four items, whose signs agree in two of sixteen patterns


def test_a_single_item_has_no_error():
    found = difference_record(shown(a=[[1.0], [0.5]]), shown(a=[[0.0], [0.0]]), ["a"])
    assert found["difference"] == 0.75 and found["low"] is found["high"] is found["standard_error"] is None
    assert found["p"] == 1.0


def test_what_counts_in_the_average():
    from deftune.comparison.grid import Evaluation

    math_suite = Evaluation.model_validate({"suite": "math"})
    assert averaged_columns(math_suite, ["gsm8k", "math500", "amc23"]) == ["math500", "amc23"]
    assert averaged_columns(Evaluation(tasks=["gsm8k"]), ["gsm8k"]) == ["gsm8k"]
    figfont = Evaluation.model_validate({"suite": "figfont"})
    columns = ["figfont", "figfont similarity", "figfont_heldout_words", "figfont_heldout_words similarity"]
    assert averaged_columns(figfont, columns) == ["figfont similarity"]


def test_the_summary_agrees_with_the_results(finished):
    """The view at T = 0 is the mean over the seeds of what each cell's own summary says."""
    summary = summarize_comparison(finished)
    (evaluation,) = summary["regimes"]["weak"]["evaluations"]
    assert [view["name"] for view in evaluation["views"]] == ["T=0", "T=1", BEST]
    for view, temperature in zip(evaluation["views"], (0.0, 1.0)):
        for objective in ("nll", "deft"):
            cells = [cell for cell in finished.cells() if cell.objective == objective]
            own = []
            for cell in cells:
                rows = json.loads((cell.folder / "eval-tasks" / "summary.json").read_text())["rows"]
                own += [row["similarity"] for row in rows if row["temperature"] == temperature]
            row = view["rows"][objective]
            assert row["columns"]["figfont similarity"]["value"] == pytest.approx(sum(own) / 2)
            assert list(row["by_seed"].values()) == pytest.approx(own)
            assert row["seeds"] == 2
    pairs = {(r["a"], r["b"]) for r in evaluation["views"][0]["differences"]}
    assert pairs == {("deft", "nll"), ("deft", "base"), ("nll", "base")}
    tokens = summary["regimes"]["weak"]["tokens"]
    assert [record["objective"] for record in tokens] == ["base", "nll", "deft"]
    assert all(record["nll"]["low"] <= record["nll"]["mean"] <= record["nll"]["high"] for record in tokens)
    focus = summary["regimes"]["weak"]["focus"]
    assert focus is not None and all(0 < value < 1 for value in focus)


def test_the_summary_is_kept_until_a_cell_or_the_version_changes(finished, monkeypatch):
    path = Path(finished.folder) / "comparison.json"
    summarize_comparison(finished)
    written = path.stat().st_mtime_ns
    summarize_comparison(finished)
    assert path.stat().st_mtime_ns == written
    cell = finished.cells()[0]
    cell.set_state(**cell.state(), touched=True)
    summarize_comparison(finished)
    assert path.stat().st_mtime_ns > written
    written = path.stat().st_mtime_ns
    turned = finished.model_copy(update={"objectives": finished.objectives[::-1]})
    assert summarize_comparison(turned)["config"]["objectives"] == ["deft", "nll"]
    summarize_comparison(finished)
    written = path.stat().st_mtime_ns
    monkeypatch.setattr("deftune.comparison.summary.__version__", "another")
    summarize_comparison(finished)
    assert path.stat().st_mtime_ns > written


def test_show_prints_tables_differences_tokens_and_cost(finished, capsys):
    assert main(["compare", "show", finished.folder]) == 0
    out = capsys.readouterr().out
    for words in (
        "T=0",
        "each at its best temperature",
        "paired by item",
        "held-out tokens",
        "tokens/s",
        "By seed (0, 1)",
    ):
        assert words in out
    assert "\\" not in out and "**" not in out  # no Markdown on a terminal
    assert f"T=0\n{' ' * 4}" in out and "* best, + second, ties alike" in out
    assert main(["compare", "show", finished.folder, "--format", "markdown"]) == 0
    assert "|---|---|" in capsys.readouterr().out
    assert main(["compare", "show", finished.folder, "--format", "latex"]) == 0
    assert capsys.readouterr().out.count(r"\begin{tabular}") == 3
    assert main(["compare", "show", finished.folder, "--format", "json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"config", "cells", "regimes"}
    for option in (["--rank-base"], ["--beside", "Qwen2.5-7B"]):
        assert main(["compare", "show", finished.folder, "--format", "json", *option]) == 2
        assert f"{option[0]}: is for tables" in capsys.readouterr().err


def test_scores_by_seed_stand_under_their_seeds(finished):
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    evaluation = summary["regimes"]["weak"]["evaluations"][0]
    rows = evaluation["views"][0]["rows"]
    rows["nll"]["by_seed"], rows["deft"]["by_seed"] = {"2": 0.1, "10": 0.2}, {"0": 0.3, "10": 0.4}
    assert view_notes(evaluation, evaluation["views"][0])[-1] == (
        "By seed (0, 2, 10), figfont similarity: nll -, 10.00, 20.00; deft 30.00, -, 40.00."
    )


def test_chosen_rates_are_shown_and_hold_for_every_seed():
    """Seed 0 is better at the large rate, seed 1 and both together at the small one."""
    grades = {(0, 1e-5): 0.5, (0, 1e-3): 0.75, (1, 1e-5): 1.0, (1, 1e-3): 0.25}
    scores = Scores()
    for (seed, rate), share in grades.items():
        items = {f"exam/{i}": float(i % 4 < 4 * share) for i in range(64)}
        scores.values[seed, Option(0.0, rate)] = {"exam": items}
    view = view_record("T=0", 0.0, {"nll": scores}, ["exam"], ["exam"])
    row = view["rows"]["nll"]
    assert row["by_seed"] == {"0": pytest.approx(0.5), "1": pytest.approx(1.0)} and row["options"] == 2
    assert sum(row["by_seed"].values()) / 2 == pytest.approx(row["columns"]["exam"]["value"])
    evaluation = {"notes": {}, "missing": [], "views": [view], "averaged": ["exam"], "cut_off": {}, "constant": {}}
    chosen = "Each half of the items at what was best on the other half: nll T=0, lr 1e-05."
    assert chosen in view_notes(evaluation, view)


def test_the_papers_numbers_stand_beside_with_a_dagger(finished, capsys):
    tables = tables_beside_paper(summarize_comparison(finished), beside="Qwen2.5-7B")
    text = render_markdown(tables[0])
    assert "*42.97†*" in text and "6 items, the paper's set has 128" in text
    assert main(["compare", "show", finished.folder, "--beside", "Qwen2.5-Math-1.5B"]) == 2
    assert "no table of the paper has 'Qwen2.5-Math-1.5B'" in capsys.readouterr().err


def test_models_of_the_paper_are_known_by_their_hub_id():
    from deftune.paper.recipes import BACKBONES

    assert {paper_model(backbone.hub) for backbone in BACKBONES.values()} == {
        "LLaMA-3.1-8B", "LLaMA-3.2-3B", "DeepseekMath-7B", "Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen2.5-1.5B",
        "Qwen2.5-7B",
    }  # fmt: skip
    assert paper_model("smollm2") is None


def test_a_comparison_is_a_board_for_the_claims(finished, capsys):
    board = ComparisonBoard(summarize_comparison(finished))
    (case,) = board.cases("weak")
    assert board.cases("strong") == [] and board.cases("epochs") == []
    best = summarize_comparison(finished)["regimes"]["weak"]["evaluations"][0]["views"][-1]
    expected = 100 * best["rows"]["deft"]["columns"]["figfont similarity"]["value"]
    assert board.score("weak", case, "deft") == pytest.approx(expected)
    assert board.score("weak", case, "eaft") is None
    forward, backward = board.difference("weak", case, "deft", "base"), board.difference("weak", case, "base", "deft")
    assert forward.value == -backward.value and not forward.decided  # six items decide nothing
    assert main(["paper", "claims", finished.folder]) == 0
    out = capsys.readouterr().out
    assert "ours     UNDECIDED: ahead in 0 of 1, 1 undecided: weak, deft - nll" in out
    assert "ours     not measured" in out


def test_claims_and_printed_tables_need_no_comparison(capsys):
    assert main(["paper", "claims"]) == 0
    out = capsys.readouterr().out
    assert "29 claims; by the paper's own tables: 2 fails, 17 holds, 6 in part, 4 not printed" in out
    assert main(["paper", "claims", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 29
    assert main(["paper", "table", "5"]) == 0
    assert "| EAFT | <u>45.92</u> |" in capsys.readouterr().out
    assert main(["paper", "table", "9"]) == 2
    assert "no Table 9" in capsys.readouterr().err
