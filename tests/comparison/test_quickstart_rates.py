"""The figures of README.md and docs/choosing.md about wrong labels are those of the committed results."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

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
    "quickstart_rates_gemma": " --model models/gemma-3-270m.gguf --template plain",
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
    readme, page = text_of("README.md"), text_of("docs/choosing.md")
    assert f"counted by sampled answers, NLL has learnt {nll}% of them, and DEFT {deft}%" in readme
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
    readme, page = text_of("README.md"), text_of("docs/choosing.md")
    (taught,) = {points(wrong[objective].value) for objective in ("nll", "deft")}
    assert (
        f"Counted by greedy answers, both have learnt {taught}% of the wrong ones" in readme
        and f"both give {taught}% of the wrong ones" in page
    )
    low, high = points(wrong["deft"].low), points(wrong["deft"].high)
    assert wrong["deft"].low < 0 < wrong["deft"].high and f"(difference [{low}, +{high}])" in page
    nll, deft = (points(heldout[objective].value) for objective in ("nll", "deft"))
    untuned, more = points(tables["held-out, greedy"].base), heldout["deft"]
    assert f"right in {nll}% with NLL and in {deft}% with DEFT ({untuned}% before training)" in readme
    assert f"+{points(more.difference)} points [+{points(more.low)}, +{points(more.high)}]" in readme
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


def test_the_figures_of_the_second_model(rates):
    _, tables = read(rates, "quickstart_rates_gemma")
    new, wrong, greedy = (tables[name] for name in ("new right answers", "wrong answers", "held-out, greedy"))
    given, taught_greedily = tables["new right, greedy"], tables["wrong, greedy"]
    assert new.seeds == [0, 1, 2] and new.objectives == ["nll", "deft"]
    assert all(cell.objective == "nll" for cell in rates.matched(new, wrong))  # DEFT's curve crosses no level

    def at(table, objective, rate):
        return points(table.curves()[objective][rates.RATES.index(rate)])

    readme, page = text_of("README.md"), text_of("docs/choosing.md")
    learnt, taught = at(new, "deft", 1e-4), at(wrong, "deft", 1e-4)
    assert f"At 1e-4 DEFT has learnt {learnt}% of the new right answers and {taught}% of the wrong ones" in page
    assert f"answers {at(greedy, 'deft', 1e-4)}% of the held-out questions greedily" in page
    text = f"NLL has learnt {at(new, 'nll', 1e-4)}% and {at(wrong, 'nll', 1e-4)}% at this rate, and answers "
    assert f"{text}{at(greedy, 'nll', 1e-4)}% ({points(greedy.base)}% before training)" in page
    best = [points(max(greedy.curves()[objective])) for objective in ("deft", "nll")]
    assert best == [at(greedy, objective, 1e-4) for objective in ("deft", "nll")]
    assert f"best rate of DEFT gives {best[0]}% and that of NLL {best[1]}%" in readme
    assert (
        f"gives {at(given, 'deft', 1e-4)}% of the new right answers at this rate, and NLL {at(given, 'nll', 1e-4)}%"
        in page
    )
    assert f"({new.base:.2f} on average)" in page
    assert at(given, "nll", 2e-4) == "100" and f"with {at(taught_greedily, 'nll', 2e-4)}% of the wrong ones" in page
    assert f"answers {at(greedy, 'nll', 2e-4)}% of the held-out questions. From" in page
    low, high = ([at(table, "nll", rate) for table in (new, wrong, greedy)] for rate in (5e-4, 1e-3))
    assert f"{low[0]}% at 5e-4 and {high[0]}% at 1e-3, with {low[1]}% and {high[1]}% of the wrong answers" in page
    assert f"it then answers {low[2]}% and {high[2]}% of the held-out questions" in page
    most = max(wrong.curves()["deft"][:4])
    assert f"DEFT learns at most {points(most)}% of the wrong answers" in page
    more = [f"{at(table, 'deft', 2e-4)}% against {at(table, 'nll', 2e-4)}%" for table in (wrong, new)]
    assert f"more of the wrong answers than NLL, {more[0]} (all" in page and f"new right ones, {more[1]}." in page
    nll, deft = ([at(table, objective, 2e-3) for table in (new, greedy)] for objective in ("nll", "deft"))
    assert f"fewer right answers than NLL ({deft[0]}% against {nll[0]}%)" in readme
    assert f"it learns {deft[0]}% of the new right answers and NLL {nll[0]}%, and answers {deft[1]}%" in page
    assert f"of the held-out questions, NLL {nll[1]}%" in page


def test_a_curve_that_does_not_reach_a_share_has_no_value_there(rates):
    x, y = rates.np.array([0.2, 0.6, 0.5]), rates.np.array([0.0, 0.4, 0.9])
    assert rates.at_learnt(x, y, 0.5) == pytest.approx(0.3)  # where the curve first reaches it
    assert rates.np.isnan(rates.at_learnt(x, y, 0.7))
