"""What a benchmark's own grader allows: Minerva's tolerance, OlympiadBench's lists, errors and units, on real rows."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from deftune.data.rows import RowError
from deftune.evaluation.answers import Rule, Verdict
from deftune.evaluation.grading import Grader
from deftune.evaluation.items import Item, read_task, with_data
from deftune.evaluation.kinds import score_answers
from deftune.evaluation.suites import TASKS

sys.path.insert(0, str(Path(__file__).parent))
from labelled_pairs import as_decimal, right_answers, wrong_answers


@pytest.fixture(scope="module")
def grader():
    pytest.importorskip("math_verify")
    with Grader(workers=2) as grader:
        yield grader


def real(data, task):
    return {item.id.split("/")[1]: item for item in read_task(TASKS[task], data)}


def scores(grader, pairs):
    return [record["score"] for record in score_answers([("math", item, text) for item, text in pairs], grader=grader)]


def test_minerva_allows_a_ten_thousandth(data, grader):
    items = real(data, "minerva_math")
    assert {item.rule for item in items.values()} == {Rule(relative=1e-4)}
    flux = items["1"]
    assert flux.gold == "4.5e33"
    right = [
        r"\boxed{4.5e33}",
        r"\boxed{4.5 \times 10^{33}}",
        r"\boxed{4.5003 \times 10^{33}}",
        r"\boxed{L = 4.4996e33}",
    ]
    wrong = [r"\boxed{4.51 \times 10^{33}}", r"\boxed{4.5 \times 10^{34}}", r"\boxed{-4.5e33}", r"\boxed{4.4994e33}"]
    assert scores(grader, [(flux, text) for text in right + wrong]) == [1.0] * 4 + [0.0] * 4
    numbers = [item for item in items.values() if item.gold.replace(".", "").lstrip("-").isdigit() and float(item.gold)]
    assert len(numbers) > 100
    near = scores(grader, [(item, rf"\boxed{{{float(item.gold) * (1 + 5e-5)!r}}}") for item in numbers])
    far = scores(grader, [(item, rf"\boxed{{{float(item.gold) * 1.01!r}}}") for item in numbers])
    assert near == [1.0] * len(numbers) and far == [0.0] * len(numbers)


NOT_NOUNS = {"percent", "times", "dozen", "dozens", "halves", "million", "thousand", "hundred", "and", "squared"}
# of single items, beside those that `wrong_answers` makes
WRONG_IN_MINERVA = {
    64: [r"\frac{dx}{dt}=a-kx", r"\frac{dx}{dt}=2kx-2a", "kx=a"], 119: ["bv=f", r"-m\frac{dv}{dt}+bv=f"],
    125: [r"2B\omega=T"], 137: [r"\frac{1}{\sqrt{2}}"], 250: ["CARS=LRAC"],
}  # fmt: skip


def minerva_pairs(data, keep):
    """(item, answer, label) of all items; one in ``keep`` of the answers, but all to relations and tiny numbers."""
    pairs = []
    for n, item in enumerate(read_task(TASKS["minerva_math"], data)):
        wrong, right = list(wrong_answers(item.gold)), list(right_answers(item.gold))
        number = as_decimal(item.gold)
        if "=" not in item.gold and (number is None or abs(number) > 1e-4):
            wrong, right = wrong[n % keep :: keep] or wrong[:1], right[n % keep :: keep] or right[:1]
        pairs += [(item, answer, False) for answer in wrong + WRONG_IN_MINERVA.get(n, [])]
        pairs += [(item, answer, True) for answer in right]
    return pairs


def misjudged(grader, pairs):
    verdicts = grader.grade([(item.gold, answer) for item, answer, _ in pairs], [item.rule for item, *_ in pairs])
    return [
        (item.id, item.gold, answer, label, verdict.how)
        for (item, answer, label), verdict in zip(pairs, verdicts)
        if verdict.correct != label
    ]


@pytest.mark.long
def test_no_minerva_item_credits_a_wrong_answer_or_refuses_its_gold(data, grader):
    pairs = minerva_pairs(data, keep=8)
    assert len(pairs) > 1_000 and len({item.id for item, *_ in pairs}) == 272
    assert misjudged(grader, pairs) == []


@pytest.mark.slow
def test_no_minerva_item_credits_a_wrong_answer_in_any_notation(data, grader):
    pairs = minerva_pairs(data, keep=1)
    assert len(pairs) > 5_000
    assert misjudged(grader, pairs) == []


def test_a_list_in_several_boxes_counts_on_every_task(data, grader):
    lists = [item for item in read_task(TASKS["math500"], data) if item.gold in ("1,-2", "3, 5, 7", "-2,1")]
    assert len(lists) == 3
    texts = [" and ".join(rf"$\boxed{{{part.strip()}}}$" for part in item.gold.split(",")) for item in lists]
    assert scores(grader, zip(lists, texts)) == [1.0] * 3
    assert scores(grader, [(item, text.split(" and ")[-1]) for item, text in zip(lists, texts)]) == [0.0] * 3
    twice = real(data, "olympiadbench")["2532"]
    assert scores(grader, [(twice, r"\boxed{-2}, \boxed{-2}"), (twice, r"\boxed{-2}")]) == [1.0, 0.0]


def test_a_text_that_was_cut_off_needs_an_explicit_answer(grader):
    item = Item("gsm8k/0", "", "18")
    texts = ["so 9 * 2 = 18 and then", r"\boxed{18}. Now", "The answer is 18. Now"]
    asked = [("math", item, text) for text in texts]
    assert [r["score"] for r in score_answers(asked, grader=grader)] == [1.0, 1.0, 1.0]
    cut = score_answers(asked, grader=grader, finishes=["length"] * 3)
    assert [r["score"] for r in cut] == [0.0, 1.0, 1.0] and cut[0]["how"] == "none"
    with pytest.raises(ValueError, match="1 finishes for 3 answers"):
        score_answers(asked, grader=grader, finishes=["stop"])


def test_reasoning_is_no_answer(grader):
    number = Item("gsm8k/0", "", "18")
    letter = Item("medqa/0", "", "B", {"A": "iron", "B": "zinc"})
    texts = [("math", number, r"<think>\boxed{17}?</think> The answer is 18."),
             ("math", number, r"<think>hence \boxed{18}</think>"),  # nothing else is said
             ("choice", letter, "<think>The answer is A?\nOr not.</think>\n\nAnswer: B"),
             ("choice", letter, "<think>The answer is B.</think>\n\nI do not know.")]  # fmt: skip
    assert [record["score"] for record in score_answers(texts, grader=grader)] == [1.0, 1.0, 1.0, 0.0]


def test_nouns_after_a_number_are_dropped(data, grader):
    """Every noun that follows a number at the end of a GSM8K solution's sentence."""
    path = data / "gsm8k" / "test.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        text = " ".join(json.loads(line)["answer"] for line in lines)
    nouns = sorted(set(re.findall(r"(?<=\d )[a-z]{3,}(?=[.\n])", text)) - NOT_NOUNS)
    assert len(nouns) > 100
    pairs = [("18", f"18 {noun}") for noun in nouns]
    refused = [pair for pair, verdict in zip(pairs, grader.grade(pairs)) if not verdict.correct]
    assert refused == []
    kept = sorted(NOT_NOUNS - {"percent"})  # 18 percent is 18, by another rule
    assert not any(verdict.correct for verdict in grader.grade([("18", f"18 {word}") for word in kept]))


def test_a_tolerance_is_not_for_expressions(grader):
    rule = Rule(relative=1e-4)
    pairs = [("x^2", "1.00001 x^2"), (r"\frac{1}{3}", "0.33333"), ("3", "3.00001 i"), ("1,2", "2.00001, 1.00001"),
             ("1,2", "1.00001"), ("0", "0.00001"), (r"\pi", "3.1416"), ("(1,2)", "(2,1)"), ("5", "5")]  # fmt: skip
    verdicts = grader.grade(pairs, [rule] * len(pairs))
    assert [v.correct for v in verdicts] == [False, True, False, True, False, False, True, False, True]
    assert verdicts[1] == Verdict(True, "tolerance") and verdicts[-1] == Verdict(True, "exact")
    assert not grader.grade([(r"\frac{1}{3}", "0.33333")])[0].correct  # other tasks allow nothing
    absolute = grader.grade([("4.2", "4.3"), ("4.2", "4.4")], [Rule(absolute=0.101)] * 2)
    assert [v.correct for v in absolute] == [True, False]


def test_olympiad_golds_are_lists_in_any_order(data, grader):
    items = real(data, "olympiadbench")
    assert not any("$" in item.gold for item in items.values())
    assert sum(item.rule.several for item in items.values()) == 94
    expected = {"1664": "69,84", "2349": "221,8", "2287": r"a=2, a=-6-4 \sqrt{2}"}
    assert {key: items[key].gold for key in expected} == expected
    right = [
        ("1664", r"\boxed{84, 69}"), ("1664", r"\boxed{69} and \boxed{84}"), ("1664", r"\boxed{84 \text{ and } 69}"),
        ("2349", r"\boxed{8,221}"), ("2287", r"\boxed{-6-4\sqrt{2}, 2}"), ("2568", r"\boxed{-9}, \boxed{-1}"),
        ("1766", r"\boxed{(4,-23), (4,23), (0,2), (0,-2)}"), ("1807", r"\boxed{0, \pm 2}"), ("1606", r"\boxed{2}"),
    ]  # fmt: skip
    wrong = [("1664", r"\boxed{84}"), ("1664", r"\boxed{69, 84, 85}"), ("1664", r"\boxed{69}, so \boxed{84}"),
             ("1766", r"\boxed{(-23,4), (23,4), (2,0), (-2,0)}"), ("1606", r"\boxed{2, 3}")]  # fmt: skip
    found = scores(grader, [(items[key], text) for key, text in right + wrong])
    assert found == [1.0] * len(right) + [0.0] * len(wrong)


def test_olympiad_units_and_errors(data, grader):
    items = real(data, "olympiadbench")
    with_error = [item for item in items.values() if item.rule.absolute]
    assert [item.gold for item in with_error] == ["4.2"] and with_error[0].rule == Rule(absolute=0.101, unit="%")
    units = {item.rule.unit: item for item in items.values() if item.rule.unit}
    assert len(units) == 8 and {item.gold for item in items.values() if item.rule.unit == "%"} == {
        "4.2", "62.5%", "17.5%", r"8 \%"}  # fmt: skip
    percent, area = with_error[0], units["$cm^2$"]
    signed = next(item for item in items.values() if item.gold == "62.5%")
    right = [(percent, r"\boxed{4.2\%}"), (percent, r"\boxed{4.25}"), (percent, r"\boxed{4.3\%}"),
             (area, r"\boxed{166 \mathrm{~cm}^{2}}"), (area, r"\boxed{166}"),
             (units["minute"], r"\boxed{45 \text{ minutes}}"), (units["km"], r"\boxed{\frac{41}{12}} km"),
             (units["km/h"], r"\boxed{\frac{600}{7} \text{ km/h}}")]  # fmt: skip
    right += [(signed, text) for text in (r"\boxed{62.5}", r"\boxed{62.5\%}", r"\boxed{0.625}")]
    wrong = [(percent, r"\boxed{4.4\%}"), (area, r"\boxed{167 \mathrm{~cm}^{2}}"), (units["km"], r"\boxed{12 km}")]
    wrong += [(signed, text) for text in (r"\boxed{6250}", r"\boxed{6.25}")]
    assert scores(grader, right + wrong) == [1.0] * len(right) + [0.0] * len(wrong)


def test_approximately_in_a_box_counts_for_every_task_but_gsm8k(data, grader):
    """Of GSM8K's recorded answers no grade changes."""
    texts = [r"\boxed{approximately %s}", r"\boxed{\text{about } %s \text{ apples}}"]
    for task in ("math500", "aime24", "amc23", "minerva_math", "olympiadbench", "gsm8k"):
        item = next(item for item in read_task(TASKS[task], data) if item.gold.isdigit())
        found = scores(grader, [(item, text % item.gold) for text in texts])
        assert found == [float(task != "gsm8k")] * 2, task


def test_every_olympiad_gold_is_its_own_answer(data, grader):
    items = list(real(data, "olympiadbench").values())
    assert scores(grader, [(item, rf"\boxed{{{item.gold}}}") for item in items]) == [1.0] * 675


def test_rules_are_checked(tmp_path, grader):
    with pytest.raises(ValueError, match="relative: a tolerance is from 0 to below 1, got 1"):
        Rule(relative=1)
    with pytest.raises(ValueError, match="1 rules for 2 pairs"):
        grader.grade([("1", "1"), ("2", "2")], [Rule()])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Q?", "final_answer": ["1"], "error": "about 1"}) + "\n")
    with pytest.raises(RowError, match=r"rows\.jsonl:1: 'error' is no tolerance .*another benchmark"):
        read_task(with_data(TASKS["olympiadbench"], path))
