"""The figures of README.md and docs/choosing.md about wrong labels are those of the committed results."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
from waiting import is_dead, wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rates():
    spec = importlib.util.spec_from_file_location("quickstart_rates", ROOT / "benchmarks" / "quickstart_rates.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def read(rates, name):
    results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return results, rates.read_tables(results)


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def points(value):
    return f"{100 * value:.0f}"


OPTIONS = {
    "quickstart_rates": "",
    "quickstart_rates_clean": " --clean",
    "quickstart_rates_gemma": " --model models/gemma-3-270m.gguf --template plain"
    " --rates 2.5e-5 5e-5 1e-4 2e-4 5e-4 1e-3 2e-3",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_committed_table_is_made_of_the_committed_results(rates, name):
    results, _ = read(rates, name)
    command = f"python benchmarks/quickstart_rates.py --out benchmarks/results/{name}{OPTIONS[name]}"
    assert rates.report(results, command) == (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()


def test_the_figures_at_equal_learning(rates):
    _, tables = read(rates, "quickstart_rates")
    new = tables["new right answers"]
    at = {name: {cell.objective: cell for cell in rates.matched(new, tables[name]) if cell.learnt == 0.8}
          for name in ("wrong answers", "held-out, greedy")}  # fmt: skip
    wrong, greedy = at["wrong answers"], at["held-out, greedy"]
    nll, deft = (points(wrong[objective].value) for objective in ("nll", "deft"))
    page = text_of("docs/choosing.md")
    assert f"NLL has learnt {nll}% of the wrong ones and DEFT {deft}%" in page
    fewer, more = wrong["deft"], greedy["deft"]
    assert f"{points(fewer.difference)} points [{points(fewer.low)}, {points(fewer.high)}]" in page
    assert f"{points(more.difference)} points better greedily [{points(more.low)}, {points(more.high)}]" in page


def test_the_figures_at_equal_greedy_answers(rates):
    _, tables = read(rates, "quickstart_rates")
    new = tables["new right, greedy"]
    at = {name: {cell.objective: cell for cell in rates.matched(new, tables[name]) if cell.learnt == 0.8}
          for name in ("wrong, greedy", "held-out, greedy")}  # fmt: skip
    wrong, heldout = at["wrong, greedy"], at["held-out, greedy"]
    page = text_of("docs/choosing.md")
    (taught,) = {points(wrong[objective].value) for objective in ("nll", "deft")}
    assert f"both give {taught}% of the wrong ones" in page
    low, high = points(wrong["deft"].low), points(wrong["deft"].high)
    assert wrong["deft"].low < 0 < wrong["deft"].high and f"(difference [{low}, +{high}])" in page
    more = heldout["deft"]
    assert f"still {points(more.difference)} points better [{points(more.low)}, {points(more.high)}]" in page


def test_the_figures_of_single_rates(rates):
    page = text_of("docs/choosing.md")

    def shares(name, measure, rate):
        curves = read(rates, name)[1][measure].curves()
        return {objective: points(curve[rates.RATES.index(rate)]) for objective, curve in curves.items()}

    wrong = shares("quickstart_rates", "new right answers", 2e-4)
    right = shares("quickstart_rates_clean", "new right answers", 2e-4)
    assert f"({wrong['deft']}% against {wrong['nll']}% at 2e-4)" in page
    assert f"({right['deft']}% against {right['nll']}%)" in page
    greedy = shares("quickstart_rates", "held-out, greedy", 2e-4)
    best = max(read(rates, "quickstart_rates")[1]["held-out, greedy"].curves()["nll"])
    assert points(best) == greedy["nll"] and f"NLL answers {greedy['nll']}% of the held-out questions" in page
    assert f"DEFT {greedy['deft']}% at the same rate" in page
    clean = shares("quickstart_rates_clean", "held-out, greedy", 2e-4)
    assert clean["nll"] == clean["deft"] and f"With right labels both answer {clean['nll']}%" in page
    learnt = [shares("quickstart_rates_clean", "new right answers", rate) for rate in (2e-3, 5e-4)]
    answers = [shares("quickstart_rates_clean", "held-out, greedy", rate) for rate in (2e-3, 5e-4)]
    assert f"`linear` learns {learnt[0]['linear']}% of them only at 2e-3" in page
    assert f"answers {answers[0]['linear']}% of the held-out" in page and answers[1]["nll"] == answers[1]["deft"]
    assert f"learn {learnt[1]['nll']}% and {learnt[1]['deft']}% at 5e-4, and answer {answers[1]['nll']}%" in page


def test_with_right_labels_the_objectives_differ_by_less_than_a_point(rates):
    _, tables = read(rates, "quickstart_rates_clean")
    for name in ("held-out", "held-out, greedy"):
        found = [cell for cell in rates.matched(tables["new right answers"], tables[name]) if cell.objective == "deft"]
        assert len(found) == 5 and all(abs(cell.difference) < 0.01 for cell in found)


def at_equal_learning(rates, name):
    """By measure and objective, where 80% of the new right answers are learnt."""
    _, tables = read(rates, name)
    new = tables["new right answers"]
    return tables, {
        measure: {cell.objective: cell for cell in rates.matched(new, tables[measure]) if cell.learnt == 0.8}
        for measure in ("wrong answers", "held-out, greedy")
    }


def test_the_table_of_the_readme(rates):
    readme = text_of("README.md")
    wrong: dict[str, list[str]] = {"nll": [], "deft": []}
    for model, name in (("SmolLM2-135M", "quickstart_rates"), ("Gemma-3-270M", "quickstart_rates_gemma")):
        tables, at = at_equal_learning(rates, name)
        cells, curves = at["held-out, greedy"], tables["held-out, greedy"].curves()
        base, more = points(tables["held-out, greedy"].base), cells["deft"]
        shares = " | ".join(f"{points(cells[objective].value)}%" for objective in ("nll", "deft"))
        interval = f"+{points(more.difference)} [+{points(more.low)}, +{points(more.high)}]"
        assert f"| {model}, equal learning | {base}% | {shares} | {interval} |" in readme
        best = " | ".join(f"{points(max(curves[objective]))}%" for objective in ("nll", "deft"))
        assert f"| {model}, best learning rate of each | {base}% | {best} | |" in readme
        for objective, shown in wrong.items():
            shown.append(points(at["wrong answers"][objective].value))
    nll, deft = wrong["nll"], wrong["deft"]
    assert f"NLL has then learnt {nll[0]}% and {nll[1]}% of the wrong ones, DEFT {deft[0]}% and {deft[1]}%" in readme


def test_the_figures_of_the_second_model(rates):
    results, at_80 = read(rates, "quickstart_rates_gemma")[0], at_equal_learning(rates, "quickstart_rates_gemma")
    tables, cells = at_80
    new, wrong, greedy = (tables[name] for name in ("new right answers", "wrong answers", "held-out, greedy"))
    given, taught_greedily = tables["new right, greedy"], tables["wrong, greedy"]
    assert new.seeds == [0, 1, 2] and new.objectives == ["nll", "deft"]
    readme, page = text_of("README.md"), text_of("docs/choosing.md")
    nll, deft = (cells["wrong answers"][objective] for objective in ("nll", "deft"))
    assert f"NLL has learnt {points(nll.value)}% of the wrong ones and DEFT {points(deft.value)}%" in page
    assert f"(difference {points(deft.difference)} points [{points(deft.low)}, {points(deft.high)}])" in page
    more = cells["held-out, greedy"]["deft"]
    assert f"{points(more.difference)} points better greedily [{points(more.low)}, {points(more.high)}]" in page

    def at(table, objective, rate):
        return points(table.curves()[objective][results["rates"].index(rate)])

    best = {objective: curve.max() for objective, curve in greedy.curves().items() if objective in ("nll", "deft")}
    assert points(best["deft"]) == at(greedy, "deft", 5e-5) and points(best["nll"]) == at(greedy, "nll", 1e-4)
    text = f"DEFT answers {points(best['deft'])}% of the held-out questions greedily (5e-5), NLL {points(best['nll'])}%"
    assert f"{text} (1e-4), the untuned model {points(greedy.base)}%" in page
    assert f"({points(best['deft'])}% at 5e-5, NLL {points(best['nll'])}% at 1e-4; no interval)" in page
    for rate in (5e-5, 1e-4):
        assert at(taught_greedily, "deft", rate) == at(taught_greedily, "nll", rate) == "0"
    assert round(given.curves()["deft"][1], 1) == round(given.curves()["nll"][2], 1) == 0.9
    text = f"at 1e-4 it gives {at(given, 'nll', 1e-4)}% of the new right answers greedily and has learnt"
    assert f"{text} {at(new, 'nll', 1e-4)}% by probability" in page
    assert f"DEFT gives {at(given, 'deft', 1e-4)}% and has learnt {at(new, 'deft', 1e-4)}%" in page
    low, high = ([at(table, "nll", rate) for table in (new, wrong, greedy)] for rate in (5e-4, 1e-3))
    assert f"{low[0]}% at 5e-4 and {high[0]}% at 1e-3, with {low[1]}% and {high[1]}% of the wrong answers" in page
    assert f"it then answers {low[2]}% and {high[2]}% of the held-out questions" in page
    most = max(wrong.curves()["deft"][:6])
    assert f"DEFT learns at most {points(most)}% of the wrong answers" in page
    more = [f"{at(table, 'deft', 2e-4)}% against {at(table, 'nll', 2e-4)}%" for table in (wrong, new)]
    assert f"more of the wrong answers than NLL, {more[0]} (all" in page and f"new right ones, {more[1]}." in page
    nll, deft = ([at(table, objective, 2e-3) for table in (new, greedy)] for objective in ("nll", "deft"))
    assert f"fewer right answers with DEFT than with NLL ({deft[0]}% against {nll[0]}%)" in readme
    assert f"it learns {deft[0]}% of the new right answers and NLL {nll[0]}%, and answers {deft[1]}%" in page
    assert f"of the held-out questions, NLL {nll[1]}%" in page


def test_a_curve_that_does_not_reach_a_share_has_no_value_there(rates):
    x, y = rates.np.array([0.2, 0.6, 0.5]), rates.np.array([0.0, 0.4, 0.9])
    assert rates.at_learnt(x, y, 0.5) == pytest.approx(0.3)  # where the curve first reaches it
    assert rates.np.isnan(rates.at_learnt(x, y, 0.7))


@pytest.fixture(scope="module")
def model(rates, tmp_path_factory) -> Path:
    rows = [rates.row(question.country, question.capital) for question in rates.questions(0)]
    tokenizer = tiny.make_tokenizer([text for fields in rows for text in fields.values()], 2000)
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


def start(out, model, jobs):
    command = [sys.executable, str(ROOT / "benchmarks" / "quickstart_rates.py"), "--out", str(out), "--rates", "1e-3"]
    command += ["--model", str(model), "--template", "plain", "--precision", "fp32", "--jobs", str(jobs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the workers in /proc")
def test_a_killed_command_leaves_no_process_and_continues_with_what_one_job_gives(rates, model, tmp_path):
    path = tmp_path / "two.json"
    killed = start(path, model, 2)
    while not path.is_file():
        assert killed.poll() is None, killed.communicate()[1]
        time.sleep(0.02)
    workers = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = json.loads(path.read_text())["runs"]
    wait_for(lambda: all(map(is_dead, workers)))
    assert 0 < len(before) < 15 and len(workers) >= 2
    for out, jobs in ((path, 2), (tmp_path / "one.json", 1)):
        process = start(out, model, jobs)
        _, text = process.communicate()
        assert process.returncode == 0, text
    two, one = (json.loads(file.read_text()) for file in (path, tmp_path / "one.json"))
    assert two == one and len(two["runs"]) == 3 * (1 + len(rates.OBJECTIVES))
    assert {key: two["runs"][key] for key in before} == before
    assert (tmp_path / "two.md").is_file()
