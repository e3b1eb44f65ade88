"""The report: self-contained, complete, honest about what is missing, and safe with any text in it."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from accessibility import violations
from deftune.cli import main
from deftune.comparison import report_figures as report_figures_module
from deftune.comparison.grid import Comparison, load_comparison, open_comparison
from deftune.comparison.report import cautions, render_report, verdicts
from deftune.comparison.report_figures import by_entropy, first_tables, gradient_figures, report_figures, score_lines
from deftune.comparison.schedule import run_grid
from deftune.comparison.show import score_tables
from deftune.comparison.summary import summarize_comparison
from serial import run_here
from tiny_comparison import comparison_at, content, save_model, write
from waiting import HANG_SECONDS

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags in order, attributes, and whether every element is closed where it should be."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Comparison:
    folder = tmp_path_factory.mktemp("report")
    comparison = comparison_at(folder, save_model(folder / "model"))
    assert run_grid(comparison, run_here, lambda _: None).exit_code == 0
    return comparison


@pytest.fixture(scope="module")
def page(finished) -> str:
    assert main(["report", finished.folder]) == 0
    return (Path(finished.folder) / "report.html").read_text()


def test_it_asks_for_nothing_and_runs_nothing(page):
    found = Page(page)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(found.tags)
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), f"{tag} {name}"
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith("#"), f"{tag} {name}={value}"  # within a drawing
    assert "url(http" not in page and "@import" not in page
    (policy,) = [v for tag, name, v in found.attributes if tag == "meta" and name == "content" and "default-src" in v]
    assert "default-src 'none'" in policy and "script-src" not in policy


def test_ids_are_unique(page):
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) > 20 and len(ids) == len(set(ids))
    known = set(ids)
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', page)) <= known


def test_it_has_everything(finished, page):
    text = " ".join(Page(page).text.split())
    for words in (
        "grid: nll, deft", "5 of 5", "What it says", "Scores", "figfont similarity", "Figures",
        "Score against sampling temperature", "Target probabilities on held-out tokens", "Held-out tokens: weak",
        "Cost: weak", "The paper's claims", "How to reproduce it", "deftune report grid",
        "Configuration", "Environment", "tokens/s", "weak/deft/lr0.001-s1",
    ):  # fmt: skip
        assert words in text, words
    assert (
        "batch_size: 4" in page
        and json.loads((Path(finished.folder) / "environment.json").read_text())["python"] in text
    )


def test_it_has_a_date_and_no_folder_of_this_machine(finished, page):
    started = json.loads((Path(finished.folder) / "environment.json").read_text())["started"]
    assert f"<dt>started</dt><dd>{started[:10]}</dd>" in page
    assert str(Path(finished.folder).parent) not in page and f"{Path(sys.argv[0]).parent}/" not in page


@pytest.fixture(scope="module")
def browser(chromium):
    playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=1000 * HANG_SECONDS
        )
        yield opened
        opened.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 390)])
def test_assistive_technology_can_read_it(finished, page, browser, scheme, width):
    shown = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
    shown.goto((Path(finished.folder) / "report.html").as_uri(), timeout=1000 * HANG_SECONDS)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll inside the page
    wide = shown.locator(".wide").evaluate_all("all => all.map(x => [x.tabIndex, x.getAttribute('aria-label')])")
    assert len(wide) > 5 and all(index == 0 and name for index, name in wide)
    found = violations(shown)
    shown.close()
    assert found == []


def test_figures_follow_the_colours_of_the_page(finished, page, browser):
    """Text, axes and the black line of NLL have the page's colour of text; no panel stays white."""
    path = (Path(finished.folder) / "report.html").as_uri()
    for scheme, text in (("light", "rgb(28, 30, 33)"), ("dark", "rgb(230, 232, 234)")):
        shown = browser.new_page(color_scheme=scheme)
        shown.goto(path, timeout=1000 * HANG_SECONDS)
        colours = shown.locator(".drawing svg").evaluate_all(
            """all => all.flatMap(svg => [...svg.querySelectorAll('text, path, use')].flatMap(
                 x => { const s = getComputedStyle(x); return [s.fill, s.stroke]; }))"""
        )
        shown.close()
        assert text in colours and not {"rgb(0, 0, 0)", "rgb(255, 255, 255)"} & set(colours)


def test_the_numbers_are_the_summarys(finished, page):
    summary = summarize_comparison(finished)
    view = summary["regimes"]["weak"]["evaluations"][0]["views"][-1]
    for row in view["rows"].values():
        assert f"{100 * row['columns']['figfont similarity']['value']:.2f}" in page
    for where, lines in verdicts(summary).items():
        assert where in Page(page).text and all(sentence in Page(page).text for _, sentence in lines)


def test_little_is_called_little(finished):
    lines = cautions(summarize_comparison(finished))
    assert any(line.startswith("2 seeds: intervals") for line in lines)
    assert "Sets with few items, too few to rank by: weak, tasks: 6." in lines
    (((decided, sentence), *_),) = verdicts(summarize_comparison(finished)).values()
    assert not decided and "deft is not distinguishable from nll" in sentence


def test_answers_that_were_cut_off_are_named_first(finished):
    """The limit of tokens decides such a score: an untuned model that explains at length looks worse than it is."""
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    (evaluation,) = summary["regimes"]["weak"]["evaluations"]
    (base,) = (cell for cell in finished.cells() if cell.objective == "base")
    shares = {f"T={row['temperature']:g}": row["finished"].get("length", 0) / sum(row["finished"].values())
              for row in base.result(finished.regimes["weak"].evaluate[0]).summary()["rows"]}  # fmt: skip
    assert evaluation["cut_off"]["base"] == shares and set(evaluation["cut_off"]) == {"base", "nll", "deft"}
    first, *_ = evaluation["views"]
    evaluation["cut_off"] = {"base": {first["name"]: 0.7}, "nll": {first["name"]: 0.1}}
    line = (
        "weak, tasks: cut off at the limit of tokens: base (70% of the answers). Their scores measure the limit, not "
    )
    assert any(one.startswith(line) for one in cautions(summary))
    shown = [table for table in score_tables(summary) if table.caption.endswith(first["name"])]
    assert all("Answers cut off at the limit of tokens (max_new_tokens): base 70%." in table.notes for table in shown)
    evaluation["cut_off"] = {"base": {first["name"]: 0.1}}
    assert not any("cut off" in one for one in cautions(summary))


def test_scores_below_a_constant_answer_are_called_that(finished):
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    (evaluation,) = summary["regimes"]["weak"]["evaluations"]
    assert evaluation["constant"] == {}  # for multiple choice alone
    (column, *_), rows = evaluation["columns"], evaluation["views"][-1]["rows"]
    best = max(rows[name]["columns"][column]["value"] for name in ("nll", "deft"))
    evaluation["constant"] = {column: {"answer": "A", "score": best}}
    line = "weak, tasks: no tuned model is above the most frequent right answer, given to every question: "
    assert any(one.startswith(f"{line}{column} (always A: {100 * best:.1f}).") for one in cautions(summary))
    note = f"No tuned model is above a constant answer: {column} (always A: {100 * best:.1f})."
    assert all(note in table.notes for table in score_tables(summary))
    evaluation["constant"][column]["score"] = best - 0.01
    assert not any("constant" in one or "most frequent" in one for one in cautions(summary))


def test_versions_of_the_grading_that_differ_are_named(finished):
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    assert not any("versions" in line for line in cautions(summary))
    assert [cell["task_versions"] for cell in summary["cells"].values()] == [{"figfont": "1"}] * 5
    summary["cells"]["weak/base"]["task_versions"] = {"figfont": "0"}
    line = "Cells were graded by different versions of figfont (0, 1): a difference may be the grading's."
    assert line in cautions(summary)


def test_a_decided_difference_names_its_direction(finished):
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    for record in summary["regimes"]["weak"]["evaluations"][0]["views"][-1]["differences"]:
        if (record["a"], record["b"]) == ("deft", "nll"):
            record |= {"difference": -0.1, "low": -0.15, "high": -0.05, "p_holm": 0.001}
    (((decided, sentence), *_),) = verdicts(summary).values()
    assert decided and "deft is below nll: -10.00 points [-15.00, -5.00], p = 0.001 after Holm" in sentence


def test_score_lines_are_per_temperature(finished):
    lines = score_lines(summarize_comparison(finished))
    assert [(line["objective"], line["temperature"]) for line in lines] == [
        (objective, t) for t in (0.0, 1.0) for objective in ("base", "nll", "deft")
    ]
    assert all(0 <= line["score"] <= 1 for line in lines)


def test_figures_have_the_intervals_of_the_tables(finished):
    summary = summarize_comparison(finished)
    for line in score_lines(summary):
        (view,) = [view for view in summary["regimes"]["weak"]["evaluations"][0]["views"]
                   if view["temperature"] == line["temperature"]]  # fmt: skip
        cell = view["rows"][line["objective"]]["columns"]["figfont similarity"]  # the only column that is averaged
        assert (line["score"], line["low"], line["high"]) == (cell["value"], cell["low"], cell["high"])


def test_a_score_stands_at_the_entropy_of_its_learning_rate(finished):
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    about = summary["regimes"]["weak"]
    for view in about["evaluations"][0]["views"]:
        view["rows"]["deft"]["chosen"] = [[view["temperature"], 1e-3], [view["temperature"], 2e-3]]
        view["rows"]["nll"]["chosen"] = [[view["temperature"], 2e-3]] * 2
    tokens = [record for record in about["tokens"] if record["objective"] != "base"]
    for record in tokens:
        record["entropy"]["mean"] = 1.0
        about["tokens"].append({**record, "learning_rate": 2e-3, "entropy": {"mean": 3.0}})
    found = {line["objective"]: line["entropy"] for line in by_entropy(score_lines(summary), summary)}
    assert (found["nll"], found["deft"]) == (3.0, 2.0)


def test_a_comparison_of_answers_alone_has_no_token_figures(tmp_path, finished):
    """What was not measured is left out, not drawn empty."""
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    summary["regimes"]["weak"]["evaluations"] = []
    names = [drawn.name for drawn in report_figures(finished, summary)]
    assert names == ["histograms", "progress"]


def test_a_comparison_of_tokens_alone_says_that_it_scores_no_answers(finished):
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    page = render_report(finished, summary, {}, {})
    assert "<h2>Scores</h2>" in page and "scores no answers" not in page
    for about in summary["regimes"].values():
        about["evaluations"] = []
    page = render_report(finished, summary, {}, {})
    assert "The comparison scores no answers" in page
    assert "<h2>Scores</h2>" not in page and "No two objectives" not in page


def test_figures_are_saved_with_their_tables(tmp_path, finished, capsys):
    assert main(["report", finished.folder, "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "f")]) == 0
    found = {path.name for path in (tmp_path / "f").iterdir()}
    for name in ("temperatures", "histograms", "progress", "entropy"):
        assert {f"{name}.png", f"{name}.svg", f"{name}.pdf", f"{name}.csv"} <= found
    assert {"gradients.png", "gradients.csv"} <= found and "image" not in (tmp_path / "r.html").read_text()
    assert "continuum.png" not in found  # one regime


def test_gradients_of_what_every_regime_has(monkeypatch, finished):
    """A regime that came with another objective: its tables have more, and the older ones cannot be drawn with it."""
    (table,) = [t for (_, name), t in first_tables(finished, None).items() if name == "base"]
    more = table
    for column in ("gate", "gradient"):
        more = more.append_column(f"{column}:linear", table[f"{column}:nll"])
    monkeypatch.setattr(
        report_figures_module, "first_tables", lambda *_: {("new", "base"): more, ("old", "base"): table}
    )
    (drawn,) = gradient_figures(finished)
    assert {line["objective"] for line in drawn.table} == {"nll", "deft"}


HOSTILE = "</title></style><img src=x onerror=document.title='taken'><script>document.title='taken'</script>&'\""


def hostile_page(tmp_path, finished) -> str:
    """A page where every text that a user or a file could set is markup."""
    what = content(Path(HOSTILE), tmp_path / "grid")
    comparison = Comparison.model_validate(what)
    summary = json.loads(json.dumps(summarize_comparison(finished)))
    summary["regimes"]["weak"]["model"] = HOSTILE
    evaluation = summary["regimes"]["weak"]["evaluations"][0]
    evaluation["title"], evaluation["notes"], evaluation["missing"] = HOSTILE, {HOSTILE: HOSTILE}, {HOSTILE: HOSTILE}
    for view in evaluation["views"]:
        view["rows"][HOSTILE] = view["rows"].pop("deft")
    name = next(iter(summary["cells"]))
    summary["cells"][name] = {"state": "failed", "error": HOSTILE}
    summary["config"]["objectives"] = ["nll", HOSTILE]
    return render_report(comparison, summary, {HOSTILE: "<svg></svg>"}, {"command": [HOSTILE]})


def test_no_text_becomes_markup(tmp_path, finished):
    found = Page(hostile_page(tmp_path, finished))
    assert not {"img", "script"} & set(found.tags)
    assert found.tags.count("style") == found.tags.count("title") == 1
    assert found.text.count("onerror=document.title") > 6  # all of it is there, as text


def test_hostile_names_in_figures_stay_text(finished):
    from deftune.comparison.figures import plot_temperatures
    from deftune.comparison.report_figures import svg_text

    lines = [line | {"objective": HOSTILE} for line in score_lines(summarize_comparison(finished))]
    text = svg_text(plot_temperatures(lines), "figure1")
    assert "<script" not in text and "<img" not in text
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)


def test_a_browser_runs_nothing_of_it(tmp_path, finished, chromium):
    path = tmp_path / "page.html"
    path.write_text(hostile_page(tmp_path, finished))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [chromium, *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert "<title>grid: nll, " in done.stdout  # it is still the page's own


def test_it_links_a_token_browser_that_is_there(finished):
    cell = finished.cells()[1]
    browser = cell.folder / "inspect.html"
    browser.write_text("<p>tokens</p>")
    try:
        assert main(["report", finished.folder]) == 0
        page = (Path(finished.folder) / "report.html").read_text()
        assert f'<a href="{cell.name}/inspect.html">tokens</a>' in page
    finally:
        browser.unlink()


def test_nothing_finished_is_no_report(tmp_path, capsys):
    comparison = load_comparison(write(tmp_path / "c.yaml", content(Path("smollm2"), tmp_path / "grid")))
    open_comparison(comparison)
    assert main(["report", str(tmp_path / "grid")]) == 2
    assert "no cell is finished yet" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "grid" / "report.html").exists()
