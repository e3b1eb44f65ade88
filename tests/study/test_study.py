"""The study's tools: from the folder of a comparison to committed results, pages, figures and evidence."""

import copy
import doctest
import importlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.study.__main__ import main
from benchmarks.study.cells import Study, collect, read_study, shared_config, write_study
from benchmarks.study.effects import Section, effect_of, sections
from benchmarks.study.ledger import StudyBoard, evidence, ledger
from benchmarks.study.pages import (
    EVIDENCE,
    LEDGER,
    answers,
    default_answer,
    limits,
    put_between,
    readme_block,
    report,
    results_page,
    tokens_text,
)
from benchmarks.study.plan import Plan
from benchmarks.study.tables import (
    entropy_text,
    form_table,
    points,
    primary_table,
    rerun_difference,
    rerun_table,
    series_table,
    verdict,
    wall_seconds,
)

from deftune.comparison.evidence import Evidence
from deftune.comparison.grid import Cell, Comparison, load_comparison
from deftune.comparison.schedule import run_grid
from deftune.comparison.scores import Option, Scores, common
from deftune.evaluation.crossed import crossed
from deftune.evaluation.evaluate import Result
from deftune.evaluation.items import read_task
from deftune.evaluation.suites import TASKS
from deftune.objectives import objective
from serial import run_here
from tiny_comparison import comparison_at, save_model

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY.parent / "shared/data"
INPUTS = ("benchmarks/study/plan.yaml", "benchmarks/study/earlier.yaml", "docs/study/results.md", "README.md",
          "docs/claims.md")  # fmt: skip


@pytest.fixture(scope="module")
def tiny_grid(tmp_path_factory) -> Comparison:
    """A real comparison of three cells: the untuned model, nll and deft."""
    folder = tmp_path_factory.mktemp("study")
    comparison = comparison_at(folder, save_model(folder / "model"), seeds=[0])
    assert run_grid(comparison, run_here, lambda _: None).exit_code == 0
    return comparison


@pytest.fixture
def root(tmp_path) -> Path:
    """What `report` reads of a checkout."""
    for name in INPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for path in (EVIDENCE, LEDGER):
        (tmp_path / path).parent.mkdir(parents=True)
    return tmp_path


def invented(**accuracy: tuple[float, float, float]) -> Study:
    """Made-up cells for tests of the arithmetic: 200 items, three temperatures, three seeds, two rates."""
    comparison = load_comparison(REPOSITORY / "benchmarks/study/strong.yaml")
    draw = torch.Generator().manual_seed(0)
    items = [f"gsm8k/{i}" for i in range(200)]
    cells = {}
    for name, scores in accuracy.items():
        spec = name if name == "base" else str(objective(name))
        runs = [(None, None)] if spec == "base" else [(rate, seed) for rate in (1e-5, 2e-5) for seed in (0, 1, 2)]
        for rate, seed in runs:
            grades = {
                f"{t:g}": {
                    "grades": ["".join(str(int(x < p)) for x in torch.rand(200, generator=draw).tolist())],
                    "extracted": {"boxed": 150, "none": 50}, "finished": {"stop": 200}, "answer_tokens": 90.0,
                }
                for t, p in zip((0, 0.5, 1), scores)
            }  # fmt: skip
            seconds = {"steps_seconds": 40, "eval_seconds": 10, "tokens_seconds": 5, "overhead_seconds": 5}
            cells[Cell(comparison, "strong", spec, rate, seed).name] = {
                "regime": "strong", "objective": spec, "learning_rate": rate, "seed": seed, "state": "finished",
                "environment": 0, "command": "deftune compare run ...", "time": 1000 + 60 * len(cells),
                "cost": {**seconds, "memory_gib": 3.0}, "scores": {"tasks": {"gsm8k": grades}},
            }  # fmt: skip
    return Study(shared_config(comparison), [{"gpus": ["a GPU"]}], {"strong": {"tasks": {"gsm8k": items}}}, cells)


# --- collecting -------------------------------------------------------------------------------------------------------


def test_a_committed_cell_has_what_its_folder_has(tiny_grid, tmp_path):
    out = tmp_path / "results" / "tiny.json"
    study, said = collect([Path(tiny_grid.folder)], out)
    assert said == [] and list(study.cells) == [cell.name for cell in tiny_grid.cells()]
    for cell in tiny_grid.cells():
        record = study.cells[cell.name]
        graded = Result(cell.folder / "eval-tasks").read_graded()
        again = Scores()
        again.add(cell, graded)
        ours = read_study(out).scores("weak", "tasks")[cell.objective]
        assert ours.values.keys() == again.values.keys()
        for key, columns in again.values.items():
            assert ours.values[key]["figfont"] == columns["figfont"]
            assert ours.values[key]["figfont similarity"] == pytest.approx(columns["figfont similarity"], abs=5e-4)
        assert record["cost"]["eval_seconds"] == pytest.approx(cell.state()["eval_seconds"], rel=1e-3)
        assert record["held_out"]["end_rows"] == 1 and len(record["held_out"]["p"]) == 3
        assert record["task_versions"] == {"figfont": "1"}
    deft = study.cells["weak/deft/lr0.001-s0"]
    assert deft["training"]["step"] == [1, 2, 3] and "concentration" in deft["training"]
    assert deft["command"] == (
        "deftune compare run benchmarks/study/tiny.yaml --set folder=comparisons/again --set 'objectives=[\"deft\"]' "
        "--set 'seeds=[0]' --set 'learning_rates=[0.001]' --cell weak/deft/lr0.001-s0"
    )
    (environment,) = study.environments
    assert environment["versions"]["torch"] and "command" not in environment


def test_collecting_again_changes_nothing_and_a_part_may_come_later(tiny_grid, tmp_path, capsys):
    out, part = tmp_path / "tiny.json", tmp_path / "part"
    shutil.copytree(tiny_grid.folder, part)
    (part / "weak/deft/lr0.001-s0/cell.json").unlink()
    assert main(["collect", str(part), "--out", str(out)]) == 0
    seen = capsys.readouterr()
    assert "2 cells" in seen.out and "1 cells are not finished: weak/deft/lr0.001-s0" in seen.err
    assert main(["collect", tiny_grid.folder, str(part), "--out", str(out)]) == 0
    before = out.read_bytes()
    assert main(["collect", tiny_grid.folder, "--out", str(out)]) == 0
    assert out.read_bytes() == before and len(read_study(out).cells) == 3


def test_another_result_of_a_cell_is_refused_unless_it_is_a_rerun(tiny_grid, tmp_path, capsys):
    out, again = tmp_path / "tiny.json", tmp_path / "again"
    collect([Path(tiny_grid.folder)], out)
    shutil.copytree(tiny_grid.folder, again)
    graded = again / "weak/nll/lr0.001-s0/eval-tasks/graded.jsonl"
    graded.write_text(graded.read_text().replace('"score": 0.0', '"score": 1.0', 1))
    assert main(["collect", str(again), "--out", str(out)]) == 2
    assert (
        f"{again}: weak/nll/lr0.001-s0 is in the results already, with other measurements; pass the folder with --rerun"
    ) in capsys.readouterr().err
    for _ in range(2):
        assert main(["collect", "--rerun", str(again), "--out", str(out)]) == 0
    cells = read_study(out).cells
    assert len(cells["weak/nll/lr0.001-s0"]["reruns"]) == 1 and "reruns" not in cells["weak/deft/lr0.001-s0"]


def test_the_former_default_weight_of_a_single_source_is_no_other_comparison(tiny_grid, tmp_path):
    """Results of before 0.3.0 have 1.0 there; new cells were refused for it after their hours of training."""
    out = tmp_path / "tiny.json"
    study, _ = collect([Path(tiny_grid.folder)], out)
    content = json.loads(out.read_text())
    for regime in content["config"]["regimes"].values():
        regime["tokens"][0]["weight"] = 1.0
    out.write_text(json.dumps(content))
    again, messages = collect([Path(tiny_grid.folder)], out)
    assert again.cells == study.cells and messages == []


def test_another_comparison_and_other_items_are_refused(tiny_grid, tmp_path):
    out, other = tmp_path / "tiny.json", tmp_path / "other"
    collect([Path(tiny_grid.folder)], out)
    shutil.copytree(tiny_grid.folder, other)
    config = other / "comparison.yaml"
    config.write_text(config.read_text().replace("max_steps: 3", "max_steps: 4"))
    with pytest.raises(ValueError, match=r"is another comparison than the results: train\.max_steps: 3 -> 4; name"):
        collect([other], out)
    with pytest.raises(ValueError, match="name at least one folder"):
        collect([], tmp_path / "none.json")
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wrong\.json: is no results file of the study \(KeyError: 'format'\)"):
        read_study(tmp_path / "wrong.json")


def test_a_failure_stays_in_the_record_of_a_cell_that_was_run_again(tiny_grid, tmp_path):
    out, failed = tmp_path / "tiny.json", tmp_path / "failed"
    shutil.copytree(tiny_grid.folder, failed)
    cell = load_comparison(failed).cell("weak/deft/lr0.001-s0")
    finished = cell.state()
    cell.set_state("failed", stage="train", error="out of memory")
    study, _ = collect([failed], out)
    assert study.cells[cell.name]["state"] == "failed" and not list(study.scores("weak", "tasks").get("deft", []))
    cell.set_state("running", stage="train")
    cell.set_state("finished", **{key: value for key, value in finished.items() if key != "state"})
    assert cell.state()["failures"] == [{"stage": "train", "error": "out of memory"}]
    study, _ = collect([failed], out)
    record = study.cells[cell.name]
    assert record["state"] == "finished" and record["failures"] == [{"stage": "train", "error": "out of memory"}]
    cell.set_state("failed", stage="train", error="killed")
    study, _ = collect([failed], out)
    record = study.cells[cell.name]  # the finished one; each failure once
    assert record["state"] == "finished" and [f["error"] for f in record["failures"]] == ["out of memory", "killed"]


# --- effects ----------------------------------------------------------------------------------------------------------


def test_the_interval_is_over_items_and_seeds():
    draw = torch.Generator().manual_seed(1)
    alike = (torch.rand(1, 400, generator=draw) < 0.5).double().expand(3, -1)
    one, three = effect_of([alike[:1]]), effect_of([alike])
    assert (one.value, one.low, one.high) == (three.value, three.low, three.high)  # equal seeds add nothing
    error = float(alike[0].std()) / 400**0.5
    assert one.high - one.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    apart = alike + torch.tensor([[-0.1], [0.0], [0.1]])
    assert effect_of([apart]).high - effect_of([apart]).low > 1.5 * (one.high - one.low)
    both = effect_of([alike, torch.zeros(3, 10)])
    assert both.value == pytest.approx(one.value / 2) and both.items == 410


def test_p_values_reject_a_true_difference_and_not_noise():
    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(3, 500, generator=draw, dtype=torch.float64)
    assert effect_of([noise - noise.mean()]).p > 0.5
    assert effect_of([noise + 0.5]).p < 0.001


def test_two_objectives_are_compared_on_the_cells_that_both_have():
    study = invented(nll=(0.5, 0.4, 0.3), deft=(0.5, 0.5, 0.5))
    for name in [n for n in study.cells if n.startswith("strong/deft/") and (n.endswith("s2") or "2e-05" in n)]:
        del study.cells[name]
    section = Section(study, "strong", "tasks")
    mine, nll = section.pair("deft", 1.0)
    assert mine.seeds == nll.seeds == (0, 1) and {o.learning_rate for o in (*mine.chosen, *nll.chosen)} == {1e-5}
    alone = section.chosen("nll", 1.0)
    assert alone.seeds == (0, 1, 2)
    values = section.scores["deft"].values
    expected = sum(
        values[s, Option(1.0, 1e-5)]["gsm8k"][i] - section.scores["nll"].values[s, Option(1.0, 1e-5)]["gsm8k"][i]
        for s in (0, 1) for i in study.items["strong"]["tasks"]["gsm8k"]
    ) / 400  # fmt: skip
    assert section.difference("deft", 1.0).value == pytest.approx(expected)
    del study.cells["strong/deft/lr1e-05-s0"], study.cells["strong/nll/lr1e-05-s1"]
    assert Section(study, "strong", "tasks").difference("deft", 1.0) is None
    assert common(Scores()).values == {}


def test_a_temperature_is_never_chosen_by_the_items_that_it_scores():
    """With the same chance everywhere, the best of many settings on the same items would be too high."""
    study = invented(nll=(0.5, 0.5, 0.5))
    section = Section(study, "strong", "tasks")
    means = [section.accuracy("nll", t, rate).value for t in section.temperatures for rate in section.rates]
    assert min(means) <= section.accuracy("nll", None).value < max(means)


def test_two_files_with_the_same_regime_are_refused():
    study = invented(nll=(0.5, 0.4, 0.3))
    with pytest.raises(ValueError, match="regime 'strong' is in two results files"):
        sections([study, copy.deepcopy(study)])


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_of_real_cells(tiny_grid, root, capsys):
    collect([Path(tiny_grid.folder)], root / "benchmarks/study/results/tiny.json")
    assert main(["report", "--root", str(root)]) == 0
    page = (root / "docs/study/results.md").read_text()
    assert "## weak: SmolLM2-135M-Instruct (Q4_1, dequantised) tuned on FigFont, asked figfont similarity" in page
    assert "deftune compare run benchmarks/study/tiny.yaml" in page and "Tier 1, cells missing: strong base" in page
    assert (root / "docs/images/study_weak_tasks_temperature.png").stat().st_size > 5000
    assert main(["report", "--root", str(root), "--check"]) == 0
    (root / "docs/study/results.md").write_text(page.replace("| `nll` | 1 | 1 |", "| `nll` | 1 | 2 |"))
    capsys.readouterr()
    assert main(["report", "--root", str(root), "--check"]) == 1
    assert capsys.readouterr().out == "docs/study/results.md: does not agree with the committed results\n"


def test_a_report_of_invented_cells_says_what_they_say(root):
    study = invented(base=(0.3, 0.3, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.5, 0.5, 0.5), linear=(0.3, 0.3, 0.3))
    study.cells["strong/nll/lr1e-05-s0"]["failures"] = [{"stage": "train", "error": "a | failure"}]
    study.cells["strong/nll/lr1e-05-s0"]["reruns"] = [study.cells["strong/nll/lr1e-05-s1"]]
    write_study(study, root / "benchmarks/study/results/strong.json")
    report(root)
    (section,) = sections([study])
    assert section.holm()["linear"] < 0.05 < section.holm()["deft"]
    page, readme = (" ".join((root / name).read_text().split()) for name in ("docs/study/results.md", "README.md"))
    hot = section.difference("deft", 1.0)
    value, low, high = hot.points
    assert f"`deft` {value:+.1f} [{low:+.1f}, {high:+.1f}]" in page
    assert (
        "3 seeds. Points" in readme
        and "`deft` minus NLL" in readme
        and f"| {value:+.1f} [{low:+.1f}, {high:+.1f}] |" in readme
    )
    assert value == pytest.approx(20, abs=6)
    for text in ("Below NLL: `linear`", "Not decided: `deft`", "training helps",
                 "(run again, finished)", "## Cells that were run again", "| 1 | 7 | 4 | 3 |"):  # fmt: skip
        assert text in page, text
    assert {path.name for path in (root / "docs/images").iterdir()} == {
        "study_strong_tasks_temperature.png", "study_strong_tasks_rate.png",
    }  # fmt: skip
    rows = [Evidence(**row) for row in json.loads((root / EVIDENCE).read_text())]
    assert {row.source for row in rows} == {"study", "comparison", "paper"}  # the first look is replaced
    (best,) = [r for r in rows if (r.source, r.objective, r.measure) == ("study", "deft", "best temperature")]
    assert (best.seeds, best.regime, best.p_holm) == (3, "strong", section.holm()["deft"])  # as in the ledger
    assert best.score == section.accuracy("deft", None).points[0]
    found = [r for r in rows if (r.source, r.objective, r.measure) == ("study", "deft", "T = 1")]
    assert [r.learning_rates for r in found] == [[rate] for rate in section.rates] and len(found) > 1
    for row in found:  # both rates have all seeds: such a row is at one rate
        effect, pair = (find("deft", 1.0, rate=row.learning_rates[0]) for find in (section.difference, section.pair))
        assert (row.difference, row.low, row.high) == effect.points and row.p_holm is None
        assert row.p_variance == pytest.approx(crossed(pair[0].minus(pair[1], ["gsm8k"])).p_value, abs=1e-4)


def test_the_table_counts_the_rates_that_were_chosen_from(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    for lacking, rates in (("", [1e-5, 2e-5]), ("strong/deft/lr2e-05-s2", [1e-5])):
        study = invented(nll=(0.5, 0.45, 0.3), deft=(0.7, 0.7, 0.7))
        study.cells.pop(lacking, None)
        (section,) = plan.arranged(sections([study]))
        assert section.rates_of("deft") == rates and section.rates_of("nll") == [1e-5, 2e-5]
        assert f"| `deft` | 3 | {len(rates)} | T=" in primary_table(section)


def test_both_tests_decide(root):
    """The bootstrap leaves out half of the variance of two seeds; the analysis of variance does not."""
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(nll=(0.5, 0.45, 0.3), deft=(0.7, 0.7, 0.7))
    (section,) = plan.arranged(sections([study]))
    assert section.decided("deft") and verdict(section, "deft") == "above NLL"
    effect = section.primary["deft"]
    section.primary["deft"] = section._differences["deft", "nll", None, None] = replace(effect, p_variance=0.06)
    assert section.holm()["deft"] < 0.05 and not section.decided("deft") and verdict(section, "deft") == "not decided"


@pytest.mark.parametrize("kept", ["base", "nll/", "deft/lr2e-05-s1"])
def test_any_part_of_the_cells_makes_a_report(root, kept):
    study = invented(base=(0.3, 0.3, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.5, 0.5, 0.5))
    study.cells = {name: cell for name, cell in study.cells.items() if kept in name}
    write_study(study, root / "benchmarks/study/results/strong.json")
    report(root)
    page = (root / "docs/study/results.md").read_text()
    assert "**strong**: no cell to compare with NLL yet." in page and "A [study]" in (root / "README.md").read_text()


def test_without_results_the_pages_say_so(root):
    report(root)
    assert "No cell of the study is committed yet" in (root / "docs/study/results.md").read_text()
    assert report(root, check=True) == []


def test_the_rule_for_a_default_counts_regimes_where_training_helps(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    helps = Section(invented(base=(0.2, 0.2, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.6, 0.6, 0.6)), "strong", "tasks")
    hurts = Section(invented(base=(0.9, 0.9, 0.9), nll=(0.5, 0.45, 0.3), deft=(0.6, 0.6, 0.6)), "strong", "tasks")
    assert default_answer([helps], plan)[-1] == "**Default**, over the 1 regime where training helps: `deft`."
    assert "in no regime here is training known to help" in default_answer([hurts], plan)[-1]
    lacking = Section(invented(base=(0.9, 0.9, 0.9), nll=(0.5, 0.45, 0.3), linear=(0.6, 0.6, 0.6)), "strong", "tasks")
    assert default_answer([lacking, helps], plan)[-1] == "**Default**, over the 1 regime where training helps: `deft`."
    assert evidence([helps], plan, [{"until": "strong", "regime": "strong"}])[0]["source"] == "study"


def test_an_untuned_model_whose_answers_were_cut_off_has_no_score(root):
    study = invented(base=(0.2, 0.2, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.6, 0.6, 0.6))
    for grade in study.cells["strong/base"]["scores"]["tasks"]["gsm8k"].values():
        grade["finished"] = {"stop": 60, "length": 140}
    section = Section(study, "strong", "tasks")
    assert section.base_cut == 0.7 and "base" not in section.scores and "`base`" in form_table(section)
    why = "70% of its answers were cut off at the limit of tokens"
    plan = Plan(root / "benchmarks/study/plan.yaml")
    assert f"the untuned model's score is left out ({why})" in default_answer([section], plan)[0]
    left_out = 100 * section.left_out_score(0.0).value
    assert left_out == pytest.approx(20, abs=6)
    study.cells["strong/base"]["reruns"] = [study.cells["strong/base"]]
    assert rerun_table([section]) == ""  # a score that is left out is not compared with itself
    text = limits([study], [section], plan)
    assert f"score ({left_out:.1f} greedily, " in text and why in text


def test_scores_below_a_constant_answer_show_no_knowledge(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(base=(0.2, 0.2, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.6, 0.6, 0.6))
    (section,) = plan.arranged(sections([study]))
    assert not plan.teaches_nothing(section) and evidence([section], plan, [])[0].get("counts") is None
    plan.regimes["strong"]["constant"] = {"gsm8k": 90.0}
    assert plan.teaches_nothing(section)
    assert "in no regime here is training known to help" in default_answer([section], plan)[-1]
    assert any("strong: no knowledge shown" in line and "would score 90.0" in line for line in answers(section, plan))
    rows = [row for row in evidence([section], plan, []) if row["source"] == "study"]
    assert all(row["counts"] is False for row in rows)
    assert {row.get("note") for row in rows} == {"no tuned model was above a constant answer", None}


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not here ({DATA})")
def test_the_constant_answers_of_the_plan_are_those_of_the_data(tmp_path):
    """What the most frequent gold among the items that the cells were asked would score."""
    command = [sys.executable, str(REPOSITORY / "benchmarks/study/data.py"), str(DATA), str(tmp_path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    study = read_study(REPOSITORY / "benchmarks/study/results/intermediate.json")
    for task, score in Plan(REPOSITORY / "benchmarks/study/plan.yaml").regimes["intermediate"]["constant"].items():
        golds = {item.id: item.gold for item in read_task(TASKS[task], tmp_path)}
        found = Counter(golds[name] for name in study.items["intermediate"]["tasks"][task])
        assert round(100 * max(found.values()) / found.total(), 1) == score


def renamed(study: Study, regime: str) -> Study:
    """The cells of the regime strong under another name."""
    config = copy.deepcopy(study.config)
    config["regimes"] = {regime: config["regimes"]["strong"]}
    cells = {name.replace("strong/", f"{regime}/", 1): {**c, "regime": regime} for name, c in study.cells.items()}
    return Study(config, study.environments, {regime: study.items["strong"]}, copy.deepcopy(cells))


def test_the_untuned_model_with_room_for_its_answers_counts_where_the_plan_says(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(base=(0.2, 0.2, 0.2), nll=(0.4, 0.35, 0.3), deft=(0.4, 0.4, 0.4))
    longer = invented(base=(0.8, 0.8, 0.8))
    for grade in study.cells["strong/base"]["scores"]["tasks"]["gsm8k"].values():
        grade["finished"] = {"stop": 60, "length": 140}
    alone = plan.arranged(sections([study]))[0]
    assert alone.base_cut == 0.7 and "base" not in alone.scores
    (section,) = plan.arranged(sections([renamed(longer, "strong-base"), study]))  # which has no objectives to show
    assert section.regime == "strong" and section.base_cut == 0
    assert section.accuracy("base", 0.0).value == pytest.approx(0.8, abs=0.1)
    assert "training does not help" in default_answer([section], plan)[0]
    longer.cells["strong/base"]["scores"]["tasks"]["gsm8k"]["0"]["answer_tokens"] = 311
    (section,) = plan.arranged(sections([renamed(longer, "strong-base"), study]))
    (line,) = [line for line in form_table(section).splitlines() if line.startswith("| `base` |")]
    assert "| 311 |" in line  # the form of the answers that the score is of
    assert tokens_text(section) == ""  # both have the same limit
    section.base_section.study.config["regimes"]["strong-base"]["evaluate"][0]["max_new_tokens"] = 1024
    assert tokens_text(section) == (
        "the untuned model's answers had at most 1,024 tokens, those of the tuned models 256."
    )
    other = renamed(longer, "strong-base")
    other.items["strong-base"]["tasks"]["gsm8k"][0] = "another item"
    (section,) = plan.arranged(sections([other, study]))
    assert "base" not in section.scores  # it was asked other items


def test_regimes_that_change_one_thing_have_a_table_and_are_no_evidence(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(nll=(0.5, 0.45, 0.3), deft=(0.5, 0.5, 0.5))
    noisy = renamed(invented(nll=(0.2, 0.2, 0.1), deft=(0.4, 0.4, 0.4)), "noise-10")
    for cell in noisy.cells.values():
        interval = {"nll": [1, 1, 1], "concentration": [1, 1, 1], "entropy": [1, 1, 1], "conflicts": [0, 0, 0]}
        cell["held_out"] = {**interval, "p": [0.5, 0.4, 0.6], "top1": [1, 1, 1], "end_p": 1.0,
                            "exchanged": {"p": [0.125, 0.1, 0.2]}}  # fmt: skip
    found = plan.arranged(sections([noisy, study]))
    assert [section.regime for section in found] == ["strong", "noise-10"]
    page = results_page([study, noisy], found, plan)
    assert "## By share of the answers exchanged\n\nScores in per cent, all at learning rate 1e-05" in page
    assert "## By epochs" not in page
    (line,) = [line for line in page.splitlines() if line.startswith("| `deft` |") and line.endswith("| 0.125 |")
               and line.count("[") == 4]  # fmt: skip
    assert line.startswith(f"| `deft` | {points(found[0].accuracy('deft', 0.0, 1e-5), sign=False)} |")
    assert "Default, noise-10" not in page
    for cell in noisy.cells.values():
        cell["learning_rate"] *= 8
    assert series_table(sections([study, noisy]), plan.series["share of the answers exchanged"]) == ""  # no shared rate
    rows = evidence(found, plan, [])
    assert {row["data"] for row in rows if row["source"] == "study"} == {"GSM8K"}


def test_the_ledger_judges_our_cells_and_says_what_differs(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    cold, hot = (0.5, 0.45, 0.3), (0.7, 0.7, 0.7)
    study = invented(nll=cold, linear=hot, deft=hot, cayley=hot, eaft=cold)
    entries = ledger(plan.arranged(sections([study])), plan)
    above = entries["strong-above-nll"]
    assert above["verdict"] == "holds" and above["because"].startswith("ahead in 3 of 3: strong, deft - nll: +")
    assert above["best"].startswith("holds: ahead in 3 of 3")
    assert above["differs"] == (
        "strong: GSM8K, asked gsm8k, Qwen2.5-Coder-1.5B-Instruct, 3 seeds; the paper: NuminaMath, asked five sets, "
        "four models"
    )
    assert entries["strong-linear"]["verdict"] == "holds"
    for name, cell in study.cells.items():
        if "/deft/" in name:
            cell["training"] = {"step": [1, 4, 7, 58], "focus": [0.5, 0.6, 0.7, 0.9]}
    assert StudyBoard(sections([study]), plan).focus("strong") == (0.5, 0.6, 0.9, 3)  # after 3 steps: 4 are not kept
    assert entries["weak-gaps"] == {
        **entries["weak-gaps"],
        "verdict": "",
        "because": "no cells yet: intermediate, weak",
    }
    assert entries["gradient-shares"]["because"].startswith("rests on token tables")
    assert ledger([], plan)["strong-linear"]["because"] == "no cells yet: strong"
    sharp = invented(nll=(0.7, 0.6, 0.3), linear=(0.5, 0.5, 0.5))  # the paper's answers to mathematics are at T = 1
    linear = ledger(plan.arranged(sections([sharp])), plan)["strong-linear"]
    assert linear["verdict"] == "holds" and linear["because"].startswith("ahead in 1 of 1: strong, linear - nll: +")
    assert linear["best"].startswith("fails: ahead in 0 of 1: strong, linear - nll: -")
    write_study(study, root / "benchmarks/study/results/strong.json")
    report(root)
    assert "5 of 29 claims" in (root / "docs/claims.md").read_text()
    assert json.loads((root / LEDGER).read_text()) == entries


def test_the_page_says_what_each_seed_and_each_environment_gave(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(nll=(0.5, 0.45, 0.3), deft=(0.7, 0.7, 0.7))
    (section,) = plan.arranged(sections([study]))
    values = section.by_seed("deft")
    assert len(values) == 3 and sum(values) / 3 == pytest.approx(section.primary["deft"].value)
    assert ", ".join(f"{100 * value:+.1f}" for value in values) in primary_table(section)
    text = limits([study], [section], plan)
    mine, nll = section.pair("deft", None)
    interval = crossed([mine.columns["gsm8k"] - nll.columns["gsm8k"]]).interval
    assert f"strong `deft` [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}] (3 seeds)" in text
    assert "different environments" not in text
    study.environments.append({"gpus": ["a GPU"], "versions": {"torch": "2.12"}, "git": {"commit": "abc"}})
    study.cells["strong/deft/lr1e-05-s0"]["environment"] = 1
    assert ("strong: cells of different environments are paired: 11 with a GPU, commit not recorded; 1 with a GPU, "
            "torch 2.12, commit abc.") in limits([study], [section], plan)  # fmt: skip
    assert "different versions" not in text
    for name, cell in study.cells.items():
        cell["environment"] = int("2e-05" in name)
    assert ("strong: learning rates were run with different versions, so that a difference between two rates may be "
            "one between versions; most cells of each: 1e-05 (a GPU, commit not recorded); 2e-05 (a GPU, torch 2.12, "
            "commit abc).") in limits([study], [section], plan)  # fmt: skip
    study.cells["strong/deft/lr1e-05-s0"]["task_versions"] = {"gsm8k": "3"}
    assert ("strong: cells graded by different versions are paired: 11 by a version that was not recorded; 1 by gsm8k "
            "3.") in limits([study], [section], plan)  # fmt: skip


def test_the_temperature_of_equal_entropy_is_stated(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(nll=(0.5, 0.45, 0.3), deft=(0.7, 0.7, 0.7))
    colder = renamed(invented(nll=(0.5, 0.45, 0.3)), "strong-colder")
    for cells, held_out in ((study, {"entropy": [0.2, 0.1, 0.3]}),
                            (colder, {"entropy": [0.6, 0.5, 0.7], "entropies": {"0.5": [0.3, 0.2, 0.4]}})):  # fmt: skip
        for cell in cells.cells.values():
            cell["held_out"] = held_out
    found = plan.arranged(sections([study, colder]))
    texts = [" ".join(entropy_text(section, found, plan).split()) for section in found]
    assert texts == ["", (
        "Mean entropy of the held-out tokens with `nll`: 0.300 at T = 0.5, 0.600 at T = 1. It is that of `deft` at "
        "T = 1 (0.200) between T = 0 and T = 0.5."
    )]  # fmt: skip


def test_the_entropies_of_a_cell_that_was_run_again_count(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(nll=(0.5, 0.45, 0.3), deft=(0.7, 0.7, 0.7))
    for name, cell in study.cells.items():
        cell["held_out"] = {"entropy": [0.6 if "nll" in name else 0.2, 0.1, 0.9]}
    (section,) = plan.arranged(sections([study]))
    assert entropy_text(section, [section], plan) == ""  # not measured at other temperatures
    first = study.cells["strong/nll/lr1e-05-s0"]
    first["reruns"] = [first | {"held_out": {"entropy": [0.6, 0.1, 0.9], "entropies": {"0.5": [0.3, 0.2, 0.4]}}}]
    (section,) = plan.arranged(sections([study]))
    assert "0.300 at T = 0.5" in entropy_text(section, [section], plan)


def test_readme_shows_regimes_in_which_a_model_learnt(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    study = invented(base=(0.2, 0.2, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.6, 0.6, 0.6))
    idle = renamed(invented(base=(0.2, 0.2, 0.2), nll=(0.5, 0.45, 0.3), deft=(0.6, 0.6, 0.6)), "strong-math")
    plan.regimes["strong-math"] |= {"constant": {"gsm8k": 90.0}}
    found = plan.arranged(sections([study, idle]))
    text = " ".join(readme_block(found, plan).split())
    assert "| GSM8K, greedy |" in text and "| MATH, greedy |" not in text
    assert "- MATH with Qwen2.5-Coder-1.5B-Instruct: no tuned model is shown to have learnt the task" in text
    assert "run again" not in text
    cell = study.cells["strong/nll/lr1e-05-s0"]
    cell["reruns"] = [study.cells["strong/nll/lr1e-05-s1"]]
    effect = rerun_difference(plan.arranged(sections([study]))[0], "nll", 1.0)
    value, low, high = effect.points
    text = " ".join(readme_block(plan.arranged(sections([study])), plan).split())
    assert f"differs from the first run by {value:+.1f} [{low:+.1f}, {high:+.1f}] at T = 1" in text


def test_planned_cells_are_found_by_spec_and_rate(root):
    plan = Plan(root / "benchmarks/study/plan.yaml")
    first = plan.tiers[0]
    assert len(plan.missing(first, [])) == 7
    study = invented(nll=(0.5, 0.4, 0.3), mile=(0.5, 0.4, 0.3))
    assert ("strong", "nll", 0, 1e-5) in plan.missing(first, [])
    assert ("strong", "nll", 0, 1e-5) not in plan.missing(first, [study])
    assert plan.tier_of(study.cells["strong/nll/lr1e-05-s1"]) == "2"
    assert plan.tier_of(study.cells["strong/mile/lr1e-05-s1"]) == "4"
    assert wall_seconds(list(study.cells.values())[:2]) == 120


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks/study").glob("*.py")), ids=lambda path: path.stem)
def test_doctests(path):
    failed, _ = doctest.testmod(importlib.import_module(f"benchmarks.study.{path.stem}"))
    assert failed == 0


def test_a_page_without_its_marks_is_refused(root):
    with pytest.raises(ValueError, match=r"page\.md: needs <!-- x --> and <!-- /x -->, once each"):
        put_between("no marks", "x", "block", Path("page.md"))


@pytest.mark.long
def test_the_pages_and_the_evidence_agree_with_the_committed_results():
    """README.md, docs/study/results.md and evidence.json: `python -m benchmarks.study report` writes them."""
    assert report(REPOSITORY, check=True) == []


def test_the_probability_of_end_tokens_in_choosing_an_objective():
    """The study's held-out end tokens, which docs/choosing.md quotes."""
    cells = read_study(REPOSITORY / "benchmarks/study/results/strong.json").cells

    def mean_of(name: str) -> str:
        found = [cell["held_out"]["end_p"] for key, cell in cells.items() if key.startswith(f"strong/{name}")]
        return f"{sum(found) / len(found):.3f}"

    page = " ".join((REPOSITORY / "docs/choosing.md").read_text(encoding="utf-8").split())
    assert (
        f"from {mean_of('base')} before training to {mean_of('deft/')} with `deft`, {mean_of('nll/')} with `nll`"
        in page
    )
