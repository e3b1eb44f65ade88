"""Extraction: each rule on what models write, on every solution of MATH and GSM8K, and on text made to break it."""

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deftune.evaluation.choices import extract_choice
from deftune.evaluation.extraction import (
    Extraction,
    count_answers,
    extract_boxed,
    extract_final,
    jaro_winkler,
    normalize_text,
)
from growth import assert_linear

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data is not beside this checkout ({DATA})")


def rows(name: str):
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


# --- boxes -----------------------------------------------------------------------------------------------------------

BOXES = [
    (r"\boxed{1}", "1"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed {3}", "3"),
    (r"\fbox{4}", "4"),
    (r"\boxed{5} and \fbox{6}", "6"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
]


@pytest.mark.parametrize("text, box", BOXES)
def test_boxes(text, box):
    assert extract_boxed(text) == box


@pytest.mark.parametrize(
    "text, box",
    [
        (r"\boxed{5} and \fbox{6}", "5, 6"),
        (r"$\boxed{2}$, $\boxed{3}$ \text{ and } \(\boxed{5}\)", "2, 3, 5"),
        (r"\boxed{4} \quad \text{or} \quad \boxed{4}", "4"),
        (r"\boxed{4} \boxed{5}", "5"),  # nothing says that both are meant
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{1} and and \boxed{2}", "2"),
        (r"$x = \boxed{2}$ or $x = \boxed{3}$", "2, 3"),
        (r"$x_1 = \boxed{2}$, $x_{2} = \boxed{3}$", "2, 3"),
        (r"\boxed{\boxed{1}, \boxed{2}}", "1, 2"),
        (r"\boxed{1,3}", "1,3"),
    ],
)
def test_several_boxes_are_a_list_where_several_answers_are_asked(text, box):
    assert extract_boxed(text, several=True) == box
    assert extract_final(text, several=True) == Extraction(box, "boxed")
    assert extract_boxed(text) == extract_final(text).answer == box.rpartition(", ")[2]


def test_equal_boxes_are_one_answer_unless_there_are_as_many_as_answers():
    text = r"\boxed{-2}, \boxed{-2}"
    assert extract_boxed(text, several=True) == extract_boxed(text, several=3) == "-2"
    assert extract_boxed(text, several=2) == "-2, -2"


@pytest.mark.parametrize(
    "gold, number",
    [("1,-2", 2), ("58,500", 1), (r"10,\!080", 1), (r"\$32,\!348", 1), ("3, 5, 7", 3), ("(2,12) \\cup (12,102)", 1),
     (r"\{1\pm\sqrt{5},-2\}", 2), (r"\{1,2\}", 2), (r"x=1 \text{ or } x=2", 2), (r"1 \pm \sqrt{19}", 2), ("7", 1),
     ("(1,2),(3,4)", 2), ("((1,2),3)", 1), (r"\text{Evelyn}", 1), ("", 1)],
)  # fmt: skip
def test_how_many_answers_a_gold_answer_lists(gold, number):
    assert count_answers(gold) == number


@needs_data
def test_the_box_of_every_math_solution_is_its_answer():
    seen, differing = 0, []
    for name in ("math/train", "math/test"):
        for row in rows(name):
            seen += 1
            box = extract_boxed(row["solution"])
            if (box or "").replace(" ", "") != row["answer"].replace(" ", ""):
                differing.append((box, row["answer"]))
    assert seen == 12_500
    # the data's own: "\boxed 2" without braces (TeX boxes one token of it), and a few answers edited after the fact
    assert len(differing) <= 20, differing


@needs_data
def test_the_marked_line_of_every_gsm8k_answer():
    for row in rows("gsm8k/test"):
        assert extract_final(row["answer"]) == Extraction(row["answer"].rsplit("#### ", 1)[1], "marked")


# --- final answers ---------------------------------------------------------------------------------------------------

FINALS = [
    (r"The answer is 3. So \boxed{4}", "4", "boxed"),
    ("#### 5\nthe answer is 6", "5", "marked"),
    ("#### 1,234", "1,234", "marked"),
    ("  #### $7 ", "$7", "marked"),
    ("##### 8", "8", "last_number"),
    ("The answer is 9.", "9", "stated"),
    ("The answer is: 10", "10", "stated"),
    ("the final answer is $\\frac{1}{2}$.", "\\frac{1}{2}", "stated"),
    ("The answer is \\(x^2\\), since", "x^2", "stated"),
    ("Answer: **11**", "11", "stated"),
    ("**Answer:** 12", "12", "stated"),
    ("The answer is 3.14.", "3.14", "stated"),
    ("The answer is $18", "18", "stated"),
    ("The answer is 18 dollars.", "18", "stated"),
    ("The answer is 3 and 4.", "3 and 4", "stated"),
    ("The answer is 1. No, the answer is 2.", "2", "stated"),
    ("The answer is\n13", "13", "stated"),
    ("The answer is therefore 59.", "59", "stated"),
    ("The answer is approximately 59", "59", "stated"),
    ("The answer is 59 miles/hour.", "59", "stated"),
    ("The answer is 59 apples, since 2 were eaten.", "59", "stated"),
    ("The answer is $59, which is $2 more.", "59", "stated"),
    ("The answer is 59 because 2 and 3 were eaten", "59", "stated"),
    ("The answer is 59 (2 were eaten).", "59", "stated"),
    ("The answer must be **59** apples", "59", "stated"),
    ("The answer is 3/4 cup.", "3/4", "stated"),
    ("The answer is 50%.", "50%", "stated"),
    ("The answer is 10^3.", "10^3", "stated"),
    ("The answer is 3+2", "3+2", "stated"),
    ("The answer is 3, 4 and 5", "3, 4 and 5", "stated"),
    ("The answer is 1 hour and 30 minutes.", "1 hour and 30 minutes", "stated"),
    ("The answer is 5 million dollars", "5 million dollars", "stated"),  # the grader knows what a million is
    ("The answer is $5$ dollars", "5", "stated"),
    ("The answer is\n\\[\n\\frac{1}{2}\n\\]", "\\frac{1}{2}", "stated"),
    ("The final answer is therefore:\n\n$$\n100\n$$", "100", "stated"),
    ("The answer is $\\$147.00$.", "\\$147.00", "stated"),
    ("The answer is \\$12.50.", "12.50", "stated"),
    ("The answer is $3$ and $-5$.", "3, -5", "stated"),
    ("The answer is $3$, $4$, and $5$.", "3, 4, 5", "stated"),
    ("The answer is $5$, which is $2$ more", "5", "stated"),
    ("Step 1.\n\n### Final Answer\n\n$\\frac{1}{2}$", "\\frac{1}{2}", "stated"),
    ("Step 1.\n\n**Answer**\nThe sum of both is 45.", "45", "stated"),
    ("Now to the answer\n9 - 2 = 7", "7", "last_number"),  # no heading
    ("The answer is $x \\text{ in each of the bags}$, so 12 in all", "x \\text{ in each of the bags}", "stated"),
    ("The answer is Room number 7.", "Room number 7", "stated"),
    ("The answer is the room number 7.", "7", "stated"),  # of a whole sentence its last number
    ("<answer>18</answer>", "18", "stated"),
    ("<answer>\n$\\frac{1}{2}$\n</answer>", "\\frac{1}{2}", "stated"),
    ("<answer>x + 1</answer> as 1 < 2", "x + 1", "stated"),
    ("The answer is not 5 but 6.", "6", "last_number"),
    ("The answer isn't 5", None, "none"),
    ("It cannot be 5.", None, "none"),
    ("The answer is", None, "none"),
    ("answering 14", "14", "last_number"),
    ("10 - 3 = 7 eggs", "7", "last_number"),
    ("it falls to -7", "-7", "last_number"),
    ("it falls to \u22127", "\u22127", "last_number"),
    ("The answer is \u22127 degrees.", "\u22127", "stated"),
    ("from 10-3", "3", "last_number"),  # a difference, not minus three
    ("f(x)-3", "3", "last_number"),
    ("costs $1,234.50!", "1,234.50", "last_number"),
    ("a share of 3/4", "3/4", "last_number"),
    ("on page 12.", "12", "last_number"),
    ("x2y", "2", "last_number"),
    ("no number", None, "none"),
    ("", None, "none"),
]


@pytest.mark.parametrize("text, answer, how", FINALS)
def test_final_answers(text, answer, how):
    assert extract_final(text) == Extraction(answer, how)


@pytest.mark.parametrize(
    "text, answer, how",
    [
        ("so 16 - 7 = 9, and then 9 * 2", None, "none"),  # a number of the derivation
        (r"Hence \boxed{18}. Let me check: 9 * 2", "18", "boxed"),
        (r"Hence \boxed{18", None, "none"),
        ("The answer is 18. Let me check: 9 * 2", "18", "stated"),
        ("9 * 2 = 18\n#### 18\nWait", "18", "marked"),
        ("9 * 2 = 18\n#### 1", None, "none"),  # perhaps the beginning of 18
        ("The answer is 1", None, "none"),
        ("The answer is $1", None, "none"),
    ],
)
def test_a_text_that_was_cut_off_is_read_for_an_explicit_answer_only(text, answer, how):
    assert extract_final(text, cut_off=True) == Extraction(answer, how)


# --- choices ---------------------------------------------------------------------------------------------------------

OPTIONS = ["iron deficiency", "zinc", "hepatitis B", "zinc deficiency"]
CHOICES = [
    # text, strict letter, strict how
    ("\\boxed{B}", "B", "boxed"),
    ("\\boxed{(b)}", "B", "boxed"),
    ("\\boxed{\\text{C}}", "C", "boxed"),
    ("\\boxed{\\textbf{(C) hepatitis B}}", "C", "boxed"),
    ("\\boxed{B. zinc}", "B", "boxed"),
    ("\\boxed{A, C}", None, "ambiguous"),
    ("\\boxed{A. iron, B. zinc}", None, "ambiguous"),
    ("\\boxed{A \\text{ or } B}", None, "ambiguous"),
    ("The answer is A. \\boxed{B}", "B", "boxed"),
    ("\\boxed{zinc} so the answer is B", "B", "stated"),
    ("The answer is (B).", "B", "stated"),
    ("the answer is B", "B", "stated"),
    ("The correct option is B because zinc", "B", "stated"),
    ("Answer: C", "C", "stated"),
    ("**Answer:** C", "C", "stated"),
    ("Answer: **D. zinc deficiency**", "D", "stated"),
    ("Final answer: option (d)", "D", "stated"),
    ("The answer is $\\text{B}$", "B", "stated"),
    ("The answer is A. Wait, no: the answer is B.", "B", "stated"),  # it corrects itself
    ("The answer is A or B", None, "ambiguous"),
    ("The answer is A and C.", None, "ambiguous"),
    ("The answer is (A), (B)", None, "ambiguous"),
    ("The answer is not A but B.", "B", "stated"),
    ("The correct answer is not (A), but rather (B), zinc.", "B", "stated"),
    ("It is not option A but option B", "B", "stated"),
    ("Not A, but B.", "B", "lone"),
    ("The answer is not A but B or C.", None, "ambiguous"),
    ("The answer is not A but B is wrong too.", None, "none"),
    ("The answer is not A, but zinc.", None, "none"),
    ("The answer is B or option B", "B", "stated"),
    ("Answer: A\nAnswer: B\nThe answer is C? No.", None, "ambiguous"),
    ("The answer is a drug", None, "none"),  # an article
    ("The answer is Zinc", None, "none"),
    ("The answer is C-reactive protein", None, "none"),
    ("The answer is D'Arcy's", None, "none"),
    ("The answer is A or possibly B.", None, "ambiguous"),
    ("Answer: A B C D", None, "ambiguous"),
    ("Answer: A\nAnswer: B\nAnswer: C", None, "ambiguous"),  # a list, no correction
    ("Answer: A\n\nWait, that is wrong.\n\nAnswer: B", "B", "stated"),
    ("If the iron were low, the answer would be A.", None, "none"),
    ("If the iron were low, the answer would be A. Here it is normal, so B.", "B", "stated"),
    ("The answer would be A if the iron were low.", None, "none"),
    ("The answer is A: iron deficiency is incorrect.", None, "none"),
    ("Answer: A is incorrect", None, "none"),
    ("The correct answer is A? No, the iron is normal.", None, "none"),
    ("The answer is B. Zinc is not given with iron.", "B", "stated"),
    ("The answer is A. However, on reflection, B is correct.", "B", "stated"),
    ("You might think the answer is A, but the correct answer is B.", "B", "stated"),
    ("A is incorrect. C is incorrect. So B.", "B", "stated"),
    ("However, A is right-sided.", None, "none"),
    ("So A is wrong.", None, "none"),
    *[
        (text, "B", "stated")
        for text in (
            "Answer: <letter>B</letter>",
            "<answer>B</answer>",
            "<answer> (b) </answer>",
            "<answer>\nB. zinc\n</answer>",
            "Answer: {B}",
            "Answer\uff1aB",
            "Ans: B",
            "The answer is \\(B\\).",
            "The answer seems to be B.",
            "The answer is likely B.",
            "The answer for this question is B.",
            "The correct letter is B.",
            "Therefore, B is correct.",
            "Hence B is the correct answer.",
        )
    ],
    *[(text, "B", "lone") for text in ("Option B", "The final answer B", "- B", "### B")],
    *[(text, "B", "edge") for text in ("B - zinc", "B \u2013 Zinc", "B, zinc", "B zinc", "B\n\nZinc is a metal.")],
    ("A, iron deficiency\nB, zinc\nC, hepatitis B\nD, zinc deficiency", None, "ambiguous"),
    ("B", "B", "lone"),
    (" (b) ", "B", "lone"),
    ("B.", "B", "lone"),
    ("**B**", "B", "lone"),
    ("B,", "B", "lone"),
    ("b:", "B", "lone"),
    ("A A A", None, "none"),  # a loop
    ("A B", None, "ambiguous"),
    ("I would choose **B** here, as zinc", "B", "stated"),
    ("I would choose **B. zinc** here", "B", "stated"),
    ("It all comes down to **B** here, as zinc", "B", "bold"),
    ("It all comes down to **B. zinc** here", "B", "bold"),
    ("Either **A** or **B** here", None, "ambiguous"),
    ("B. zinc", "B", "edge"),
    ("B) zinc, of course", "B", "edge"),
    ("It cannot be iron.\n(B) zinc", "B", "edge"),
    ("After some thought I pick (B)", "B", "stated"),
    ("After some thought: (B)", "B", "edge"),
    ("A. iron\nB. zinc\nC. hepatitis B\nD. zinc deficiency", None, "ambiguous"),  # the list, not an answer
    ("A patient with zinc", None, "none"),
    ("This must be hepatitis B", None, "none"),  # the end of a name
    ("I take vitamin D.", None, "none"),
    ("E", None, "none"),
    ("", None, "none"),
    # the prompt's own form and what models make of it
    *[
        (text, "B", "stated")
        for text in (
            "Answer: <B>",
            'Answer: "B"',
            "Answer: [B]",
            "Answer: `B`",
            "Answer: 'B'",
            "Answer: b",
            "Answer: (b)",
            "Answer:B",
            "Answer: b) zinc",
            "**Answer**: B",
            "**Answer: B**",
            "Answer - B",
            "### Answer\nB",
            "**Final Answer**\n\n**B**",
            "Answer:\nB",
            "Option B is correct",
            "Option B is correct.",
            "(B) is correct",
            "B is the correct answer.",
            "I choose B",
            "I would go with (B).",
            "the answer must be B",
            "The best choice is option B.",
            "It's B.",
            "Answer is option b.",
            "The answer is B because A is incorrect.",
            "The answer is B. Option A is wrong.",
            "The answer is B, not A.",
            "Option A is incorrect. Option B is correct.",
            "The answer to this question is B.",
            "If the answer is A, then iron falls. So the answer is B.",
            "Many think the answer is A. They are wrong; it is B.",
        )
    ],
    # a letter that is denied, reported, listed, or part of a name
    *[
        (text, None, "none")
        for text in (
            "the incorrect answer is B",
            "The incorrect answer is B.",
            "The wrong option is B",
            "(A) is wrong",
            "A. is wrong",
            "It is not (B)",
            "The answer is not A.",
            "The correct answer isn't A",
            "Many think the answer is A.",
            "C. difficile",
            "The answer is C. difficile",
            "\\boxed{C. difficile}",
            "Vitamin D is the correct answer",
            "hepatitis B is correct",
            "**A** is wrong",
            "Not **A**, for iron is normal",
            "I don't know",
            "I cannot answer this",
        )
    ],
    ("A. iron\nB. zinc\nC. hepatitis B\nD. zinc deficiency\n\nI hope this helps!", None, "ambiguous"),
    ("A. iron B. zinc C. hepatitis B D. zinc deficiency", None, "ambiguous"),
    ("A. iron B. zinc", None, "ambiguous"),
    ("Two options:\nA. iron\nB. zinc", None, "ambiguous"),
    ("A. 1\nB. 2\nC. 3\nD. 4", None, "ambiguous"),
    ("(A) iron (B) zinc (C) hepatitis B (D) zinc deficiency", None, "ambiguous"),
    ("B. zinc\n\nExplanation:\nA. iron is wrong\nB. zinc is right\nC. no", "B", "edge"),
    ("A. no\nB. no\nC. no\n\nB. zinc", "B", "edge"),
    ("B. zinc\nA. no\nC. no\nI hope this helps!", "B", "edge"),
    ("Let us see.\nA. no\nC. no\nB. zinc", "B", "edge"),
    ("Answer: <A> or <B>", None, "ambiguous"),
]


@pytest.mark.parametrize("text, letter, how", CHOICES)
def test_strict_choices(text, letter, how):
    assert extract_choice(text, "ABCD", OPTIONS) == Extraction(letter, how)


@pytest.mark.parametrize("text, letter, how", [choice for choice in CHOICES if choice[2] != "none"])
def test_lenient_takes_what_is_stated_first(text, letter, how):
    assert extract_choice(text, "ABCD", OPTIONS, rule="lenient") == Extraction(letter, how)


@pytest.mark.parametrize(
    "text, letter, how",
    [
        ("It must be Hepatitis  B", "C", "option_text"),
        ("It must be zinc", "B", "option_text"),
        ("It must be zinc deficiency", "D", "option_text"),  # of which zinc is a part
        ("Iron deficiensy", "A", "similar"),
        ("zincs", "B", "similar"),
        ("", None, "none"),
        ("@@@", None, "none"),
    ],
)
def test_lenient_choices(text, letter, how):
    assert extract_choice(text, "ABCD", OPTIONS, rule="lenient") == Extraction(letter, how)


@pytest.mark.parametrize(
    "text",
    ["I don't know", "I cannot answer this.", "Not sure.", "the incorrect answer is B", "(A) is wrong", "It is not (B)",
     "The answer is not A.", "Many think the answer is A.", "**A** is wrong"],
)  # fmt: skip
def test_lenient_guesses_nothing_where_a_letter_is_named_or_nothing_is_known(text):
    assert extract_choice(text, "ABCD", OPTIONS, rule="lenient") == Extraction(None, "none")


@pytest.mark.parametrize(
    "text, letter, how",
    [
        ("Answer: B. Zinc is", "B", "stated"),
        ("B. zinc, for the following", "B", "edge"),
        ("Let us see.\nA. iron is out, so\nB. zinc is", None, "none"),  # on its way through the options
        ("Zinc is needed for (B)", None, "none"),
        ("It must be zinc def", None, "none"),
    ],
)
def test_a_choice_that_was_cut_off(text, letter, how):
    for rule in ("strict", "lenient"):
        assert extract_choice(text, "ABCD", OPTIONS, rule=rule, cut_off=True) == Extraction(letter, how)


@pytest.mark.parametrize("distance, letter", [(80, None), (81, "B")])
def test_what_stands_far_before_a_statement_is_not_about_it(distance, letter):
    text = "many think ".ljust(distance) + "Answer: B"
    assert extract_choice(text, "ABCD", OPTIONS).answer == letter


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Of these (B) zinc is what is low here", Extraction("B", "option_text")),
        ("Of these (A) zinc is what is low here", Extraction(None, "none")),
        ("Of these (B) zinc and iron deficiency are low here", Extraction(None, "none")),
    ],
)
def test_lenient_takes_an_options_text_beside_its_own_letter_only(text, answer):
    assert extract_choice(text, "ABCD", OPTIONS) == Extraction(None, "none")
    assert extract_choice(text, "ABCD", OPTIONS, rule="lenient") == answer


def test_a_letter_at_the_end_of_an_options_text_names_no_option():
    options = ["hepatitis B", "hepatitis"]
    assert extract_choice("It must be hepatitis B", "AB", options, rule="lenient") == Extraction("A", "option_text")


def test_a_lenient_tie_is_no_answer():
    assert extract_choice("q", "AB", ["qx", "qy"], rule="lenient") == Extraction(None, "none")


@needs_data
@pytest.mark.parametrize("form", ["The answer is ({}).", "{}", "**{}**", "\\boxed{{{}}}", "{}. {option}", "Answer: {}"])
def test_every_gold_of_medqa_is_found_in_each_form(form):
    for row in rows("medical_eval/medqa_usmle_4opt_test"):
        letters, options = list(row["options"]), list(row["options"].values())
        if len(options[0]) == 1:
            continue  # options that are letters themselves: "A. B" has two
        text = form.format(row["answer_idx"], option=row["options"][row["answer_idx"]])
        assert extract_choice(text, letters, options).answer == row["answer_idx"], text


@needs_data
def test_strict_gives_no_credit_for_an_options_text():
    credited = [
        row["answer"]
        for row in rows("medical_eval/medqa_usmle_4opt_test")
        if len(row["answer"]) > 1  # one item asks for a letter in a figure
        and extract_choice(row["answer"], list(row["options"]), list(row["options"].values())).answer
    ]
    assert credited == []


def test_a_question_without_options_has_no_answer():
    assert extract_choice("A", [], []) == Extraction(None, "none")


def test_choice_arguments_are_checked():
    with pytest.raises(ValueError, match=r"unknown rule 'loose'. Known: strict, lenient"):
        extract_choice("A", "AB", ["x", "y"], rule="loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 letters for 1 options"):
        extract_choice("A", "AB", ["x"])
    with pytest.raises(ValueError, match="distinct single capitals"):
        extract_choice("A", ["A", "A"], ["x", "y"])
    with pytest.raises(ValueError, match="distinct single capitals"):
        extract_choice("A", ["a", "yes"], ["x", "y"])
    for wrong in ("b", "BC"):
        with pytest.raises(ValueError, match="distinct single capitals"):
            extract_choice("A", ["A", wrong], ["x", "y"])


# --- figfont ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, similarity",
    [  # the matches and transpositions counted by hand, in Winkler's own examples
        ("MARTHA", "MARHTA", (6 / 6 + 6 / 6 + 5 / 6) / 3),
        ("DWAYNE", "DUANE", (4 / 6 + 4 / 5 + 4 / 4) / 3),
        ("DIXON", "DICKSONX", (4 / 5 + 4 / 8 + 4 / 4) / 3),
    ],
)
def test_jaro_winkler_of_the_textbook(a, b, similarity):
    prefix = {"MARTHA": 3, "DWAYNE": 1, "DIXON": 2}[a]
    expected = similarity + 0.1 * prefix * (1 - similarity)
    assert jaro_winkler(a, b) == pytest.approx(expected, abs=1e-12)
    assert jaro_winkler(f" {a.lower()}\n", b) == pytest.approx(expected, abs=1e-12)


def test_jaro_winkler_at_its_edges():
    assert jaro_winkler("", "") == jaro_winkler(" ", "\n") == 1.0
    assert jaro_winkler("", "a") == jaro_winkler("a", " ") == 0.0
    assert jaro_winkler("abc", "ABC ") == 1.0 and jaro_winkler("abc", "xyz") == 0.0
    # jaro 0.6 with a common prefix: under 0.7 there is no bonus
    assert jaro_winkler("ab", "axxxx") == pytest.approx((1 / 2 + 1 / 5 + 1) / 3, abs=1e-12)


@given(st.text(), st.text())
def test_jaro_winkler_is_a_similarity(a, b):
    similarity = jaro_winkler(a, b)
    assert 0.0 <= similarity <= 1.0
    assert similarity == pytest.approx(jaro_winkler(b, a), abs=1e-12)
    assert jaro_winkler(a, a) == 1.0
    assert normalize_text(normalize_text(a)) == normalize_text(a)


# --- any text --------------------------------------------------------------------------------------------------------

PIECES = [
    "\\boxed{",
    "\\fbox",
    "{",
    "}",
    "\\",
    "answer",
    " is ",
    ":",
    "####",
    "\n",
    "A",
    "(B)",
    "**",
    "$",
    "1",
    ",",
    "-",
]
PIECES += [".", "/", " ", "or", "and", "\\text{", "\x00", "\ud800", "é"]
texts = st.lists(st.sampled_from(PIECES)).map("".join) | st.text()


@given(texts)
@example("\\boxed{" * 1_000)
@settings(max_examples=500, deadline=None)
def test_extraction_never_raises_and_takes_its_answer_from_the_text(text):
    box = extract_boxed(text)
    assert box is None or (box in text and box.strip() == box != "")
    final = extract_final(text)
    assert (final.answer is None) == (final.how == "none")
    assert final.answer is None or final.answer.strip()
    for rule in ("strict", "lenient"):
        choice = extract_choice(text, "AB", ["x", "y z"], rule=rule)
        assert (choice.answer is None) == (choice.how in ("none", "ambiguous"))
        assert choice.answer in (None, "A", "B")


@given(texts, st.text(alphabet="abc0123 \\", max_size=20).filter(lambda text: text.strip() and not text.endswith("\\")))
def test_a_box_at_the_end_is_always_found(text, answer):
    opened = text.rstrip("\\") + " \\boxed{" + answer + "}"
    found = extract_boxed(opened)
    assert found is not None and re.sub(r"\s", "", found) == re.sub(r"\s", "", answer)


LONG = [
    "{",
    "}",
    "{}",
    "\\boxed{",
    "\\boxed{}",
    "\\boxed{1}",
    "\\boxed ",
    "\\",
    "\\fbox",
    " ",
    "\n",
    "####",
    "#### ",
    "####\n",
    "answer",
    "answer is ",
    "answer is\n",
    "answer: A or ",
    "answer is A, ",
    "A or ",
    "A ",
    "(A",
    "**A",
    "** A",
    "**A.",
    "* ",
    "1",
    "1,",
    "1,111",
    "1.",
    "-1",
    "1/",
    "$",
    "$1",
    "\\(",
    "\\[",
    "$1$ and ",
    "answer: A\n",
    "answer would be A if ",
    "# ",
    "so ",
    "not ",
    "<answer>",
    "option ",
    "the answer is the ",
    "\x00",
    "é",
]


@pytest.mark.parametrize("piece", LONG)
def test_time_is_linear_in_the_text(piece):
    def extract(repeats: int) -> None:
        text = piece * repeats
        for whole in (text, f"answer is {text}", f"answer is A{text}x", f"\\boxed{{A{text}!}}", f"#### {text}\n{text}"):
            extract_boxed(whole)
            extract_final(whole)
            extract_choice(whole, "ABCD", OPTIONS)

    assert_linear(extract, 20_000)
