"""The page in a real browser: what it shows, what its keys do, and that nothing leaves or enters it."""

import json
from pathlib import Path

import numpy as np
import pytest
from inspect_tables import END, OBJECTIVES, ROWS, make_inspection, make_tables, many_rows

from accessibility import violations
from deftune.inspection.inspect import inspect_table, inspect_tables, summary
from deftune.inspection.page import page_arrays, render_page, rounded, write_page
from deftune.tokens.conflict import CONFIDENT
from deftune.tokens.table import write_token_table
from waiting import wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
PATIENCE = 120_000  # milliseconds for an element to appear, on a loaded machine too
playwright.expect.set_options(timeout=PATIENCE)
RIGHT, WRONG, PROSE = range(3)


@pytest.fixture(scope="module")
def browser(chromium):
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=PATIENCE)
        yield opened
        opened.close()


class Opened:
    """A page that was opened, and what it tried: messages on the console, errors, requests."""

    def __init__(self, browser, path, **options):
        self.page = browser.new_page(**{"viewport": {"width": 1300, "height": 800}, **options})
        self.page.set_default_timeout(PATIENCE)
        self.said, self.requests = [], []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"file://{path}")
        self.page.wait_for_selector("html[data-ready]")

    def texts(self, selector):
        return self.page.locator(selector).all_text_contents()

    def focus(self):
        return self.page.evaluate("document.activeElement.id || document.activeElement.className")

    def wait_for_count(self, text):  # wait_for_function would need eval, which the page's policy forbids
        playwright.expect(self.page.locator("#count")).to_have_text(text)

    def chosen_row(self):
        return self.page.locator("#row h2").text_content()

    def chosen_token(self):
        return self.page.locator(".answer [aria-selected=true]").text_content()


@pytest.fixture
def open_page(browser, tmp_path):
    opened = []

    def make(inspection, **options) -> Opened:
        opened.append(Opened(browser, write_page(inspection, tmp_path / "page.html"), **options))
        return opened[-1]

    yield make
    for one in opened:
        one.page.close()


@pytest.fixture
def shown(open_page):
    return open_page(make_inspection())


def test_it_opens_by_itself(shown):
    share = summary(make_inspection())["loss_share"]
    assert shown.said == []
    assert len(shown.requests) == 1 and shown.requests[0].startswith("file://")  # itself
    assert "tiny reads rows.jsonl · 3 rows · 26 tokens" in shown.page.locator("#source").text_content()
    assert shown.texts("#overview .tile > b")[:3] == ["2", f"{share:.0%}", "1"]
    assert shown.page.title() == "rows.jsonl · deftune inspect"


def test_the_first_row_is_the_most_suspicious_at_its_worst_token(shown):
    assert shown.chosen_row() == "rows.jsonl:2"
    assert shown.chosen_token() == "7"
    assert (
        shown.texts(".reasons li")[0] == "stated answer '7': the model expects '6' (0.98), not '7' (0.001), margin 6.89"
    )
    assert "".join(shown.texts(".answer .token")) == "3 + 3 = 7\n#### 7<|im_end|>"
    assert "Question 2?" in shown.page.locator(".prompt").text_content()


def test_the_space_before_a_token_stands_before_it_in_the_list(shown):
    """The text to its left runs from right to left, so that its end stays visible: "3 + 3 = 7", not " 3 + 3 =7"."""
    gap = shown.page.evaluate("""() => {
        const left = document.querySelector(".snippet .left bdi").firstChild;
        const space = document.createRange();
        const at = left.data.lastIndexOf("=") + 1;
        space.setStart(left, at);
        space.setEnd(left, at + 1);
        const token = document.querySelector(".snippet .token").getBoundingClientRect();
        return [left.data[at], token.left - space.getBoundingClientRect().right];
    }""")
    assert gap[0] == " " and abs(gap[1]) < 1


def test_a_tokens_details_are_the_tables(shown):
    details = shown.page.locator("#details")
    assert details.locator(".the-token").text_content() == "7"
    assert "the model expects “6”" in details.locator("p").first.text_content()
    assert details.locator(".choices td").all_text_contents()[1::2] == ["0.001", "0.98"]
    cells = details.locator(".gates tbody tr").all_text_contents()
    assert cells == ["nll10.999", "linear0.0010.000999", "deft0.001310.00131"]  # gate, signal
    facts = dict(
        zip(details.locator(".facts th").all_text_contents(), details.locator(".facts td").all_text_contents())
    )
    assert (facts["NLL (nats)"], facts["rank"], facts["position"]) == ("6.91", "1", "12")


def test_sorting_by_any_score(shown):
    scores = make_inspection().scores
    for label, name in (("max NLL", "max_nll"), ("loss on conflicts", "noise"), ("mean NLL", "mean_nll")):
        shown.page.select_option("#sort", label=label)
        assert shown.chosen_row() == f"rows.jsonl:{1 + int(np.argmax(scores[name]))}", label
        shown.page.click("#direction")
        assert shown.chosen_row() == f"rows.jsonl:{1 + int(np.argmin(scores[name]))}", label
    shown.page.select_option("#sort", label="place in the data")
    assert shown.texts("#list .where") == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]


def test_what_is_shown_beside_a_score_is_what_it_comes_from(open_page, tmp_path, model, tokenizer, rows):
    """For every row and score: the chosen token, its numbers in the panel, and the first reason."""
    write_token_table(tmp_path / "tokens.parquet", model, tokenizer, rows, objectives=["deft"])
    inspection = inspect_table(tmp_path / "tokens.parquet")
    shown = open_page(inspection)
    wheres = [line["where"] for line in inspection.rows]
    for label, name, fact in (("answer margin", "answer", "margin (nats)"), ("max NLL", "max_nll", "NLL (nats)"),
                              ("conflict", "conflict", None), ("mean p", "mean_p", None)):  # fmt: skip
        shown.page.select_option("#sort", label=label)
        shown.page.focus("#list")
        for index in range(len(wheres)):
            row = wheres.index(shown.chosen_row())
            chosen = shown.page.locator(".answer [aria-selected=true]").get_attribute("data-token")
            assert int(chosen) == inspection.token_of(row, name)
            scores = dict(zip(shown.texts("#row .scores dt"), shown.texts("#row .scores dd")))
            facts = dict(zip(shown.texts("#details .facts th"), shown.texts("#details .facts td")))
            if fact and not np.isnan(inspection.scores[name][row]):
                assert facts[fact] == scores[label] == shown.texts("#list [aria-selected=true] .head b")[0]
            first = shown.texts(".reasons li")[0]
            assert first.startswith(("stated answer", "states no answer") if name == "answer" else label)
            if index + 1 < len(wheres):
                shown.page.keyboard.press("ArrowDown")


def test_a_page_to_share_has_no_folder_of_this_machine(open_page):
    shown = open_page(make_inspection(data="/home/me/secret/rows.jsonl", model="/home/me/secret/tiny"))
    assert "secret" not in shown.page.content() and shown.page.title() == "rows.jsonl · deftune inspect"
    assert shown.chosen_row() == "rows.jsonl:2"


def test_a_row_without_the_score_comes_last_either_way(open_page):
    shown = open_page(make_inspection([ROWS[PROSE], ROWS[RIGHT], ROWS[WRONG]]))
    for _ in range(2):
        assert shown.texts("#list .where")[-1] == "rows.jsonl:1"
        shown.page.click("#direction")


@pytest.mark.parametrize(("label", "rgb", "values"), [
    ("p", "0, 158, 115", [token[1] for token in ROWS[WRONG]]),
    ("other token's p", "213, 94, 0", [token[3] for token in ROWS[WRONG]]),
    ("gate of linear", "213, 94, 0", [token[1] for token in ROWS[WRONG]]),
    ("signal of linear", "213, 94, 0", [token[1] * (1 - token[1]) for token in ROWS[WRONG]]),
])  # fmt: skip
def test_colours_follow_the_chosen_column(shown, label, rgb, values):
    shown.page.select_option("#colour", label=label)
    found = shown.page.eval_on_selector_all(
        ".answer .token", "all => all.map(x => getComputedStyle(x).backgroundColor)"
    )
    for colour, value in zip(found, values, strict=True):
        assert colour.startswith(f"rgba({rgb}, ") or (value > 0.99 and rgb in colour), colour
        assert float(colour.rstrip(")").split(", ")[3]) == pytest.approx(0.6 * value, abs=0.003)


def test_every_column_can_be_chosen(shown):
    labels = shown.texts("#colour option")
    assert {"conflict", "margin", "NLL", "p", "rank", "entropy", "concentration", "gate of deft"} <= set(labels)
    for label in labels:
        shown.page.select_option("#colour", label=label)
        assert shown.page.locator("#legend .bins i").count() == 36
    assert shown.said == []


def test_conflicts_are_told_without_colour_too(shown):
    assert shown.texts(".answer .token.conflict") == ["7"]
    style = "x => getComputedStyle(x).textDecorationLine"
    assert shown.page.eval_on_selector(".answer .token.conflict", style) == "underline"


def test_search_finds_rows_and_marks_the_words(shown):
    shown.page.keyboard.press("/")
    assert shown.focus() == "search"
    shown.page.keyboard.type("UPON A TI")
    shown.wait_for_count("1 of 3 rows")
    assert shown.chosen_row() == "rows.jsonl:3"
    assert shown.texts(".answer .hit") == [" upon", " a", " time"]
    shown.page.keyboard.press("Escape")
    assert shown.focus() == "list" and shown.page.locator("#count").text_content() == "3 rows"
    assert shown.texts(".answer .hit") == []
    shown.page.fill("#search", "no such words")
    shown.wait_for_count("0 of 3 rows")
    assert shown.texts("#list [role=option]") == [] and shown.said == []


def test_the_keyboard_reaches_everything(shown):
    press = shown.page.keyboard.press
    assert shown.focus() == "list"
    press("ArrowDown")
    assert shown.chosen_row() == "rows.jsonl:1"
    press("End")
    assert shown.chosen_row() == "rows.jsonl:3"
    press("Enter")
    assert shown.chosen_token() == " upon" and "token" in shown.focus()
    press("ArrowRight")
    assert shown.chosen_token() == " a"
    press("ArrowLeft"), press("ArrowLeft")
    assert shown.chosen_token() == "Once"
    press("n")
    assert shown.chosen_token() == " upon"  # the conflict
    press("End")
    assert shown.chosen_token() == "<|im_end|>"
    press("p")
    assert shown.chosen_token() == " upon"
    outline = shown.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # the focus can be seen
    press("Escape")
    assert shown.focus() == "list"
    press("?")
    assert shown.page.locator("#help").is_visible()
    press("Escape")
    assert not shown.page.locator("#help").is_visible()


def test_arrows_move_by_lines(open_page):
    shown = open_page(make_inspection([[(f"line {n}\n", 0.5, "x", 0.1) for n in range(4)] + [END]]))
    shown.page.keyboard.press("Enter")
    shown.page.keyboard.press("Home")
    shown.page.keyboard.press("ArrowDown")
    shown.page.keyboard.press("ArrowDown")
    assert shown.chosen_token() == "line 2\n"
    shown.page.keyboard.press("ArrowUp")
    assert shown.chosen_token() == "line 1\n"


def test_what_is_chosen_is_announced(shown):
    page = shown.page
    for _ in range(2):
        chosen = page.locator("#list [aria-selected=true]")
        assert chosen.count() == 1
        assert page.get_attribute("#list", "aria-activedescendant") == chosen.get_attribute("id")
        assert chosen.get_attribute("aria-setsize") == "3"
        assert page.locator(".answer [role=option][tabindex='0']").count() == 1
        page.keyboard.press("ArrowDown")
    assert page.get_attribute("#details", "aria-live") == "polite"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, select, input, [role=listbox]')].filter(x => "
        "!x.getAttribute('aria-label') && !x.closest('label') && !x.textContent.trim()).map(x => x.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 1300), ("light", 390)])
def test_assistive_technology_can_read_it(open_page, scheme, width):
    spaces = [("\n", 0.5, "x", 0.1), (" ", 0.5, "x", 0.1), ("", 0.5, "x", 0.1), END]
    long = ["<|im_start|>user\n" + 400 * "a long question " + "<|im_end|>"]
    inspection = make_inspection([spaces], prompts=long)
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}, "bypass_csp": True}
    shown = open_page(inspection, **options)
    assert violations(shown.page) == []
    shown.page.click("#list [role=option]")
    labels = shown.page.locator(".answer [role=option]").evaluate_all("all => all.map(x => x.ariaLabel)")
    assert labels == ["“↵”", "“␣”", "no text", None]
    assert violations(shown.page) == []


def test_a_link_opens_its_row(open_page):
    shown = open_page(make_inspection())
    assert shown.page.get_attribute("#row h2 a", "href") == "#row=2"
    shown.page.evaluate("location.hash = '#row=3'")
    playwright.expect(shown.page.locator("#row h2")).to_have_text("rows.jsonl:3")
    shown.page.goto(shown.page.url.partition("#")[0] + "#row=1")
    shown.page.reload()
    shown.page.wait_for_selector("html[data-ready]")
    assert shown.chosen_row() == "rows.jsonl:1" and shown.said == []
    shown.page.evaluate("location.hash = '#row=99'")  # there is none: nothing happens
    assert shown.chosen_row() == "rows.jsonl:1" and shown.said == []


def test_marked_rows_are_copied_and_downloaded(open_page):
    shown = open_page(make_inspection())
    page = shown.page
    assert not page.locator("#marked").is_visible()
    page.keyboard.press("m")  # the first in the list, rows.jsonl:2
    page.keyboard.press("ArrowDown")
    assert not page.is_checked("#mark")
    page.check("#mark")
    assert page.locator("#marked-count").text_content() == "2 marked"
    assert shown.texts("#list .where") == ["✓ rows.jsonl:2", "✓ rows.jsonl:1", "rows.jsonl:3"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    playwright.expect(page.locator("#marked-count")).to_have_text("2 copied")
    assert page.evaluate("navigator.clipboard.readText()") == "rows.jsonl:1\nrows.jsonl:2"
    with page.expect_download() as found:
        page.click("#download")
    lines = [json.loads(line) for line in Path(found.value.path()).read_text().splitlines()]
    assert [line["row"] for line in lines] == [1, 2]
    assert lines[1]["answer"] == "3 + 3 = 7\n#### 7<|im_end|>" and "Question 2?" in lines[1]["prompt"]
    page.focus("#list")
    page.keyboard.press("m")
    assert page.locator("#marked-count").text_content() == "1 marked" and shown.said == []


def test_bars_of_one_panel_say_their_scale(shown):
    most = max(summary(make_inspection())["share"].values())
    assert f"(bars from 0 to {most:.0%})" in shown.page.locator(".tile.wide > span").text_content()


def test_the_token_list(shown):
    inspection = make_inspection()
    shown.page.click("#tab-tokens")
    assert shown.page.get_attribute("#tab-tokens", "aria-selected") == "true"
    notes = shown.texts("#list .note")
    values = [float(text) for text, note in zip(shown.texts("#list .head b"), notes) if "im_end" not in note]
    assert values == sorted(values, reverse=True) and len(values) > 5
    assert shown.page.locator("#count").text_content() == f"{inspection.num_tokens} tokens"
    assert (shown.chosen_row(), shown.chosen_token()) == ("rows.jsonl:3", " upon")
    shown.page.fill("#search", "king")
    shown.wait_for_count("1 of 26 tokens")
    assert shown.chosen_token() == " fox"  # found by what the model would have written


def test_end_tokens_are_listed_after_all_others(open_page):
    shown = open_page(make_inspection([[("a", 0.5, "b", 0.4), ("<|im_end|>", 1e-6, "c", 0.999)]]))
    shown.page.click("#tab-tokens")
    for _ in range(2):
        assert "im_end" in shown.texts("#list .note")[-1]
        shown.page.click("#direction")


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '<img src="http://127.0.0.1:9/x" onerror="window.hacked = 1">',
    "<!--<script>", "{{data}}{{script}}", "&lt;b&gt;", "javascript:window.hacked=1", "__proto__",
    "\u202eright to left\u202c", "\u200b", "\x1b[31m", "'\"`${window.hacked = 1}", "\u2028\u2029",
]  # fmt: skip


def test_hostile_text_stays_text(open_page):
    rows = [[(text, 0.001, other, 0.99), ("\n", 0.5, "x", 0.1), END] for text, other in zip(HOSTILE, HOSTILE[::-1])]
    inspection = make_inspection(rows, prompts=HOSTILE, wheres=HOSTILE, data="<b>data</b>", model="<script>")
    html = render_page(inspection)
    assert html.count("</script>") == 2  # the data's and the program's
    assert "hacked" not in html
    shown = open_page(inspection)
    shown.page.select_option("#sort", label="place in the data")
    shown.page.focus("#list")
    for text in HOSTILE:
        assert text.isprintable() is (shown.page.locator(".answer .token").first.text_content() == text), text
        shown.page.keyboard.press("ArrowDown")
    shown.page.click("#tab-tokens")
    shown.page.fill("#search", "__proto__")
    shown.wait_for_count(f"2 of {inspection.num_tokens} tokens")
    assert shown.page.evaluate("window.hacked") is None
    assert len(shown.requests) == 1 and shown.said == []
    assert shown.page.locator("main img, main script, main b b").count() == 0


def test_invisible_characters_are_spelled_out(open_page):
    shown = open_page(
        make_inspection([[("a\u202eb", 0.5, "\u200b", 0.4), ("\x07", 0.5, "", 0.4), ("", 0.5, "c", 0.4), END]])
    )
    assert shown.texts(".answer .token")[:3] == ["a\\u{202e}b", "\\u{7}", ""]
    assert shown.page.locator(".answer .token.empty").count() == 1


def test_the_policy_lets_nothing_in_or_out(shown):
    blocked = shown.page.evaluate("""async () => {
        const blocked = [];
        document.addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
        await fetch("http://127.0.0.1:9/").catch(() => {});
        await new Promise((done) => setTimeout(done, 50));
        return blocked;
    }""")
    assert sorted(blocked) == ["connect-src", "script-src-elem"]
    assert shown.page.evaluate("window.hacked") is None
    assert len(shown.requests) == 1


def test_turns_between_answers_are_shown(open_page):
    table, rows = make_tables([[("One", 0.5, "x", 0.1), (".", 0.5, "x", 0.1), ("Two", 0.5, "x", 0.1), END]])
    table = table.set_column(1, "position", [np.array([10, 11, 20, 21], dtype=np.int32)])
    rows = rows.set_column(3, rows.schema.field("between"), [[["And then?"]]])
    shown = open_page(inspect_tables(table, rows, OBJECTIVES))
    assert shown.page.locator(".answer").text_content() == "One.And then?Two<|im_end|>"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(open_page, scheme):
    shown = open_page(make_inspection(), color_scheme=scheme)

    def background():
        colour = shown.page.evaluate("getComputedStyle(document.querySelector('#reader')).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(", ")))

    first = background()
    assert (first > 600) is (scheme == "light")
    shown.page.click("#theme")
    assert (background() > 600) is (scheme == "dark")
    shown.page.click("#theme")
    assert background() == first


def test_a_narrow_screen_shows_the_list_then_the_row(open_page):
    shown = open_page(make_inspection(), viewport={"width": 400, "height": 800})
    page = shown.page
    assert page.locator("#list").is_visible() and not page.locator("#reader").is_visible()
    page.click("#list [role=option] >> nth=1")
    assert page.locator("#reader").is_visible() and not page.locator("#list").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.click("#back")
    assert page.locator("#list").is_visible()


def test_print_shows_the_row_whole_on_white(open_page):
    shown = open_page(make_inspection(), color_scheme="dark")
    shown.page.emulate_media(media="print")
    assert not shown.page.locator("#side").is_visible()
    assert shown.page.locator(".answer").is_visible()
    colour = shown.page.evaluate("getComputedStyle(document.querySelector('#reader')).backgroundColor")
    assert colour == "rgb(255, 255, 255)"


def test_a_hundred_thousand_tokens(open_page):
    """Only what is in sight exists while it scrolls; benchmarks/latency.py measures how soon it opens."""
    shown = open_page(make_inspection(many_rows(100_000)))
    shown.page.click("#tab-tokens")
    assert shown.page.locator("#count").text_content() == "100,000 tokens"
    seen = set()
    for share in (0.1, 0.5, 1):
        shown.page.evaluate(f"const l = document.getElementById('list'); l.scrollTop = {share} * l.scrollHeight")

        def listed():
            return shown.page.locator("#list [role=option]").evaluate_all("all => all.map(x => +x.dataset.index)")

        wait_for(lambda share=share: min(listed()) > 90_000 * share, lambda: str(listed()))
        assert 5 < len(listed()) < 40
        seen |= set(listed())
    assert max(seen) == 99_999 and len(seen) < 120
    assert shown.said == []


def test_one_row_of_thirty_thousand_tokens(open_page):
    shown = open_page(make_inspection(many_rows(30_000, per_row=30_000)))
    assert shown.page.locator(".answer .token").count() == 30_000


def test_numbers_keep_what_the_page_prints():
    values = np.random.default_rng(0).lognormal(size=1000).astype(np.float32)
    assert np.abs(rounded(values) / values - 1).max() <= 2**-13
    assert not (rounded(values).view(np.uint32) & ((1 << 11) - 1)).any()


@pytest.mark.parametrize("distance", [-2e-4, -1e-5, 0, 1e-5, 2e-4])
def test_rounding_moves_no_token_across_the_threshold(distance):
    inspection = make_inspection()
    inspection.tokens["conflict"][:] = np.float32(CONFIDENT + distance)
    found = page_arrays(inspection)["conflict"].astype(np.float64) >= CONFIDENT
    assert found.tolist() == inspection.confident.tolist() == [distance >= 0] * len(found)
