"""Tables in the paper's form: who is marked, what stands beside the paper, and that no text becomes markup."""

import re
from html.parser import HTMLParser

import pytest

from deftune.comparison.tables import (
    Printed,
    ResultTable,
    Score,
    escape_latex,
    render,
    render_html,
    render_latex,
    render_markdown,
    render_text,
)
from deftune.paper.beside import beside_paper
from deftune.paper.printed import paper_tables, printed_tables


def table(rows, **options):
    """A table of one column."""
    return ResultTable("caption", ("set",), {name: {"set": Score(value)} for name, value in rows.items()}, **options)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"nll": 1, "deft": 3, "linear": 2}, {"deft": "bold", "linear": "underline"}),
        ({"nll": 3, "deft": 3, "linear": 2}, {"nll": "bold", "deft": "bold", "linear": "underline"}),
        ({"nll": 3, "deft": 2, "linear": 2}, {"nll": "bold", "deft": "underline", "linear": "underline"}),
        ({"nll": 2.001, "deft": 2.004, "linear": 1}, {"nll": "bold", "deft": "bold", "linear": "underline"}),
        ({"nll": 2, "deft": 2}, {}),
        ({"nll": 2}, {}),
        ({"base": 9, "nll": 1, "deft": 2}, {"deft": "bold", "nll": "underline"}),
    ],
)
def test_marks(rows, expected):
    assert table(rows).marks() == {(name, "set"): mark for name, mark in expected.items()}


def test_the_base_model_is_ranked_when_asked():
    rows = {"base": 9, "nll": 1, "deft": 2}
    ranked = table(rows, rank_base=True)
    assert ranked.marks() == {("base", "set"): "bold", ("deft", "set"): "underline"}
    assert "the untuned model is ranked too" in render_markdown(ranked)
    assert "the untuned model is not ranked" in render_markdown(table(rows))


def test_missing_cells_are_left_out_of_the_ranking():
    partial = ResultTable("c", ("a", "b"), {"nll": {"a": Score(1)}, "deft": {"a": Score(2), "b": Score(3)}})
    assert partial.marks() == {("deft", "a"): "bold", ("nll", "a"): "underline"}  # one score alone is no best
    assert "| nll | <u>1.00</u> | - |" in render_markdown(partial)


def test_printed_tables_repeat_the_papers_marks_where_those_are_right():
    """Average columns of Tables 1, 2, 5, 7 and 8: by our rule all but Table 2's Qwen2.5-1.5B come out as printed."""
    differing = []
    for number in (1, 2, 5, 7, 8):
        source = paper_tables()[number]
        for model, ours in zip(source.models, printed_tables(number), strict=True):
            printed = {
                c.method: c.mark for c in source.cells if c.mark and (c.model, c.column) == (model, "Avg")
            }  # fmt: skip
            if {name: mark for (name, column), mark in ours.marks().items() if column == "Avg"} != printed:
                differing.append((number, model))
    assert differing == [(2, "Qwen2.5-1.5B")]
    assert [len(printed_tables(number)) for number in range(1, 9)] == [4, 4, 4, 1, 1, 4, 1, 1]
    with pytest.raises(ValueError, match="no Table 9"):
        printed_tables(9)


def medical(**changes):
    """Our results on all ten sets of Table 5, with the paper's sizes but for what is changed; None: not run."""
    from deftune.paper.printed import paper_sets

    sizes = {s.task: s.items for name, s in paper_sets().items() if name in paper_tables()[5].columns} | changes
    row = {task: Score(50.0, 48.0, 52.0, items) for task, items in sizes.items() if items is not None}
    rows = {"base": row, "nll": {**row, "average": Score(50.0)}, "alpha(0.5)": row}
    return ResultTable("ours", (*row, "average"), rows)


def test_equal_sets_stand_beside_the_papers_numbers():
    found = beside_paper(medical(), 5, model="LLaMA-3.1-8B").paper
    assert set(found) == {"nll"}  # Table 5 has no untuned model, and no alpha(0.5)
    assert found["nll"]["medmcqa"] == Printed("41.45")
    assert found["nll"]["average"] == Printed("43.14")
    assert all(not cell.differs for cell in found["nll"].values())


def test_another_set_is_never_shown_as_equal():
    found = beside_paper(medical(pubmedqa=500), 5, model="LLaMA-3.1-8B")
    assert found.paper["nll"]["pubmedqa"] == Printed("71.40", "500 items, the paper's set has 1,000")
    assert found.paper["nll"]["average"] == Printed("43.14", "other items in pubmedqa")
    text = render_markdown(found)
    assert "*71.40†*" in text and "*43.14†*" in text and "*41.45*" in text
    assert "† pubmedqa: 500 items, the paper's set has 1,000; not comparable with the paper's number." in text


def test_an_average_without_a_set_is_another_average():
    found = beside_paper(medical(nejm=None), 5, model="LLaMA-3.1-8B")
    assert found.paper["nll"]["average"].differs == "without nejm"
    assert "nejm" not in found.paper["nll"]


def test_an_average_over_one_more_set_is_another_average():
    """Ours has eleven medical sets, each of the paper's tables ten; GSM8K is beside the maths average, not in it."""
    found = beside_paper(medical(hle_biomed=158), 5, model="LLaMA-3.1-8B")
    assert found.paper["nll"]["average"].differs == "also over hle_biomed"
    averaged = [column for column in medical().columns if column != "average"]
    beside = beside_paper(medical(hle_biomed=158), 5, model="LLaMA-3.1-8B", averaged=averaged)
    assert beside.paper["nll"]["average"].differs == ""


def test_figfont_has_two_columns_and_another_number_of_items():
    row = {"figfont": Score(1.0, items=5000), "figfont similarity": Score(40.0, items=5000)}
    found = beside_paper(ResultTable("ours", tuple(row), {"deft": row}), 3, model="LLaMA-3.1-8B").paper["deft"]
    assert {name: cell.text for name, cell in found.items()} == {"figfont": "1.56", "figfont similarity": "46.34"}
    assert {cell.differs for cell in found.values()} == {"5,000 items, the paper's set has 128"}


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"Table 5 has no model 'gpt2'. Known: LLaMA-3.1-8B"):
        beside_paper(medical(), 5, model="gpt2")


HOSTILE = "x</table><script>alert(1)</script> | *b* _u_ `c` [l](javascript:a) $m$ \\input{f} & % # ~ ^ {"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def hostile():
    row = {HOSTILE: Score(1.0, 0.5, 1.5, 10, 2)}
    return ResultTable(HOSTILE, (HOSTILE,), {HOSTILE: row}, notes=(HOSTILE,))


def test_html_takes_no_text_for_markup():
    page = Tags()
    page.feed(render_html(hostile()))
    assert set(page.tags) <= {
        "figure",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "small",
        "figcaption",
        "p",
    }
    assert page.text.count(HOSTILE) == 4


def test_latex_takes_no_text_for_a_command():
    text = render_latex(hostile())
    assert r"\input" not in text
    assert text.count(escape_latex(HOSTILE)) == 4
    commands = set(re.findall(r"\\([A-Za-z]+)", text))
    assert commands <= {
        "begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule", "scriptsize", "footnotesize",
        "textbackslash", "textless", "textgreater", "textbar", "textasciicircum", "textasciitilde",
    }  # fmt: skip
    bare = re.sub(r"\\[{}$&#_%]", "", text)
    assert bare.count("{") == bare.count("}")


def test_markdown_keeps_its_columns():
    lines = [line for line in render_markdown(hostile()).splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [4, 4, 4]
    assert "<script>" not in "\n".join(lines).replace("\\<script\\>", "")


def test_text_has_no_escapes():
    rows = {"nll": {"top_k": Score(1.234, 0.5, 2.0, 10)}, "linear | eos(nll)": {"top_k": Score(2.0, 1.0, 3.0, 10)}}
    assert render_text(ResultTable("weak: tiny (Q4_1)", ("top_k",), rows)) == (
        "weak: tiny (Q4_1)\n"
        "                   top_k\n"
        "nll                1.23+ [0.50, 2.00]\n"
        "linear | eos(nll)  2.00* [1.00, 3.00]\n"
        "* best, + second, ties alike; the untuned model is not ranked.\n"
        "In brackets: 95% interval over items.\n"
    )


def test_intervals_and_seeds_are_shown():
    rows = {"nll": {"set": Score(1.234, 0.5, 2.0, 10, 3)}, "deft": {"set": Score(2.0, 1.0, 3.0, 10, 2)}}
    text = render_markdown(ResultTable("c", ("set",), rows))
    assert "| nll | <u>1.23</u> [0.50, 2.00] | 3 |" in text
    assert "| deft | **2.00** [1.00, 3.00] | 2 |" in text
    assert "95% interval" in text
    assert "seeds" not in render_markdown(table({"nll": 1, "deft": 2}))


def test_latex_is_booktabs():
    text = render_latex(table({"nll": 1, "deft | eos(nll)": 2}))
    assert r"\begin{tabular}{lc}" in text and r"\toprule" in text
    assert r"deft \textbar{} eos(nll) & \textbf{2.00} \\" in text


def test_several_tables_are_rendered_in_order():
    text = render(printed_tables(1), "latex")
    assert [text.index(model) for model in paper_tables()[1].models] == sorted(
        text.index(model) for model in paper_tables()[1].models
    )
