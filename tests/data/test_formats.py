"""Every format: a literal row and what it becomes, how it is detected, and the real files beside the checkout."""

import re
from pathlib import Path

import pytest

from deftune.data.formats import FORMATS, Ambiguous, check_conversation, detect, known_format
from deftune.data.rows import BadRows, Fault, RowError
from deftune.data.sources import read_rows

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
MCQ = dict(question="Which bone?", opa="Ulna", opb="Tibia", opc="Fibula", opd="Radius", subject_name="Anatomy", id="x")
CHOICES = "Which bone?\n\nA. Ulna\nB. Tibia\nC. Fibula\nD. Radius"
ABSTRACT = dict(QUESTION="Does it?", CONTEXTS=["We did.", "We saw."], LONG_ANSWER="It does.", final_decision="yes")

# format, a row as its source writes it, the user's and the assistant's text
LITERAL = [
    ("messages", {"messages": CHAT}, "2 + 2?", "4"),
    (
        "sharegpt",
        {"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "q",
        "a",
    ),
    ("prompt_completion", {"prompt": "q", "completion": "a"}, "q", "a"),
    ("prompt_completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}, "2 + 2?", "4"),
    ("alpaca", {"instruction": "Add.", "input": "2, 2", "output": "4"}, "Add.\n\n2, 2", "4"),
    ("alpaca", {"instruction": "Name a colour.", "input": "", "output": "Red."}, "Name a colour.", "Red."),
    (
        "gsm8k",
        {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72.\n#### 72"},
        "How many?",
        "48/2 = 24 in May.\n48+24 = 72.\n#### 72",
    ),
    (
        "math",
        {"problem": "Find $m$.", "level": "Level 1", "type": "Algebra", "solution": "$\\boxed{2}$"},
        "Find $m$.",
        "$\\boxed{2}$",
    ),
    ("numina", {"source": "cn_k12", "problem": "p", "solution": "s", "messages": CHAT}, "p", "s"),
    ("verl", {"data_source": "d", "prompt": CHAT[:1], "extra_info": {"question": "q", "answer": "a"}}, "q", "a"),
    (
        "m23k",
        {
            "prompt": "q\nA. x",
            "reasoning": "Hmm.",
            "distilled_answer_string": "It is A.",
            "answer_string": "x",
            "answer_letter": "A",
        },
        "q\nA. x",
        "It is A.",
    ),
    ("m23k", {"prompt": "q", "reasoning": "Hmm.", "distilled_answer_string": None, "answer_string": "x"}, "q", "x"),
    ("medmcqa", {**MCQ, "cop": 0, "exp": None}, CHOICES, "Answer: A. Ulna"),
    ("medmcqa_1based", {**MCQ, "cop": 4, "exp": " The radius. "}, CHOICES, "The radius.\n\nAnswer: D. Radius"),
    (
        "medqa",
        {"question": "q", "answer": "y", "options": {"A": "x", "B": "y"}, "answer_idx": "B"},
        "q\n\nA. x\nB. y",
        "Answer: B. y",
    ),
    (
        "medqa",
        {"question": "q", "options": {"A": "x"}, "label": "A", "question_type": "R"},
        "q\n\nA. x",
        "Answer: A. x",
    ),
    ("pubmedqa", {"pmid": "1", **ABSTRACT}, "We did.\n\nWe saw.\n\nDoes it?", "It does.\n\nAnswer: yes"),
    (
        "pubmedqa",
        {
            "pubid": 1,
            "question": "Does it?",
            "context": {"contexts": ["We did."], "labels": []},
            "long_answer": "It does.",
        },
        "We did.\n\nDoes it?",
        "It does.",
    ),
    ("medquad", {"qtype": "treatment", "focus": "Gout", "question": "q", "answer": "a\n#### 7"}, "q", "a\n#### 7"),
    ("tulu3", {"id": "1", "messages": CHAT, "source": "aya"}, "2 + 2?", "4"),
]


@pytest.mark.parametrize(("name", "row", "user", "assistant"), LITERAL, ids=[name for name, *_ in LITERAL])
def test_a_row_of_each_format(name, row, user, assistant):
    assert detect(row) == name
    messages, tools = FORMATS[name].convert(row)
    assert [(m["role"], m["content"]) for m in check_conversation(messages)] == [
        ("user", user),
        ("assistant", assistant),
    ]
    assert tools is None


def test_every_format_has_a_literal_row_and_says_what_it_is():
    assert {name for name, *_ in LITERAL} == set(FORMATS)
    assert all(form.about for form in FORMATS.values())


def test_medmcqa_counts_as_its_name_says():
    for cop in range(4):
        answers = [
            FORMATS[name].convert({**MCQ, "cop": n})[0][1]["content"]
            for name, n in (("medmcqa", cop), ("medmcqa_1based", cop + 1))
        ]
        assert answers[0] == answers[1] and answers[0].startswith(f"Answer: {'ABCD'[cop]}. ")
    for cop in (-1, 4, True, "1", 1.0):
        with pytest.raises(
            Fault, match=r"'cop' out of range \(.* is not in 0 to 3\); format 'medmcqa_1based' counts from 1 to 4"
        ):
            FORMATS["medmcqa"].convert({**MCQ, "cop": cop})
    with pytest.raises(
        Fault, match=r"'cop' out of range \('0' is not in 1 to 4\); format 'medmcqa' counts from 0 to 3"
    ):
        FORMATS["medmcqa_1based"].convert({**MCQ, "cop": 0})


@pytest.mark.parametrize("cop", [1, 2, 3])
def test_a_medmcqa_answer_in_both_countings_is_not_guessed(cop):
    with pytest.raises(Ambiguous, match=r"could be medmcqa or medmcqa_1based\); name it, e\.g\. --format medmcqa"):
        detect({**MCQ, "cop": cop})


REFUSED = [
    (
        {"question": "q", "answer": "a"},
        "format not clear (its keys: question, answer; could be gsm8k or medquad); name it",
    ),
    (
        {"messages": CHAT, "conversations": []},
        "format not clear (its keys: messages, conversations; could be messages or sharegpt)",
    ),
    ({"messages": CHAT, "prompt": "q", "completion": "a"}, "could be messages or prompt_completion"),
    (
        {"mesages": CHAT},
        "unknown format (its keys: mesages. Did you mean 'messages' for 'mesages'? Known: messages, sharegpt,",
    ),
    ({"instruction": "i", "instances": []}, "Did you mean alpaca? It needs output too. Known:"),
    ({"question": "q", "answer": "a", "options": {"A": "x"}}, "Did you mean medqa? It needs answer_idx too."),
    ({"text": "once upon a time"}, "unknown format (its keys: text. Known: "),
    ({"prompt": None, "completion": "a"}, "'prompt' is null; fix the row or pass --skip-bad-rows"),
    ({}, "unknown format (its keys: none. Known: messages, "),
    ({f"k{i}": 0 for i in range(20)}, "k10, k11 and 8 more"),
    ({"extra_info": {"index": 1}}, "unknown format (its keys: extra_info. Known:"),
]


@pytest.mark.parametrize(("row", "expected"), REFUSED)
def test_detection_refuses_to_guess(row, expected):
    with pytest.raises(Fault, match=re.escape(expected)):
        detect(row)


def test_a_tables_empty_columns_do_not_count():
    assert detect({"messages": CHAT, "conversations": None, "prompt": None, "completion": None}) == "messages"


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match=r"unknown format 'alpacca'\. Did you mean 'alpaca'\? Known: auto, messages, "):
        known_format("alpacca")


def test_sharegpt_speakers():
    turns = [("system", "s"), ("human", "q"), ("function", "42"), ("gpt", "a")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    assert [m["role"] for m in FORMATS["sharegpt"].convert(row)[0]] == ["system", "user", "tool", "assistant"]
    assert FORMATS["sharegpt"].convert({"conversations": CHAT})[0] == CHAT
    with pytest.raises(Fault, match=r"unknown speaker \(turn 0 is from 'narrator'; known: human, user, gpt"):
        FORMATS["sharegpt"].convert({"conversations": [{"from": "narrator", "value": "x"}]})
    with pytest.raises(Fault, match=r"no 'value' \(its keys: from\)"):
        FORMATS["sharegpt"].convert({"conversations": [{"from": "human"}]})


def test_a_sharegpt_answer_that_is_not_to_be_trained_is_refused():
    """axolotl honours `weight` and `train` of a turn; ignoring them would train on answers that the file excludes."""
    question = {"from": "human", "value": "q", "weight": 0}
    for key, value in (("weight", None), ("weight", 1), ("weight", 1.0), ("train", True)):
        FORMATS["sharegpt"].convert({"conversations": [question, {"from": "gpt", "value": "a", key: value}]})
    for key, value in (("weight", 0), ("weight", 0.5), ("train", False)):
        with pytest.raises(Fault, match=rf"trained \(turn 1 has '{key}': {value}\); .* data\.mask: completion"):
            FORMATS["sharegpt"].convert({"conversations": [question, {"from": "gpt", "value": "a", key: value}]})


def test_the_field_system_is_the_first_message():
    system = {"role": "system", "content": "s"}
    assert CHAT[0]["role"] != "system"
    for row in ({"messages": CHAT}, {"messages": [system, *CHAT]}):
        assert FORMATS["messages"].convert({"system": "s", **row})[0] == [system, *CHAT]
    for nothing in ("", None):
        assert FORMATS["messages"].convert({"system": nothing, "messages": CHAT})[0] == CHAT
    with pytest.raises(Fault, match=r"two system prompts \(the field 'system' and a message differ\); remove one"):
        FORMATS["messages"].convert({"system": "another", "messages": [system, *CHAT]})
    pair = FORMATS["prompt_completion"].convert({"system": "s", "prompt": "q", "completion": "a"})[0]
    assert [m["content"] for m in pair] == ["s", "q", "a"]


def test_alpaca_history_and_system():
    row = {"instruction": "i", "output": "o", "system": "s", "history": [["q", "a"]]}
    assert [m["content"] for m in FORMATS["alpaca"].convert(row)[0]] == ["s", "q", "a", "i", "o"]
    with pytest.raises(Fault, match="'history' is not made of pairs"):
        FORMATS["alpaca"].convert({**row, "history": [["q"]]})


@pytest.mark.parametrize("more", [{}, {"image_url": None}])
def test_a_single_part_of_text_is_the_text(more):
    part = {"type": "text", "text": "q", **more}
    found = check_conversation([{"role": "user", "content": [part]}, CHAT[1]])
    assert found[0] == {"role": "user", "content": "q"}
    with pytest.raises(Fault, match="content is not text"):
        check_conversation([{"role": "user", "content": [{**part, "image_url": "cat.png"}]}, CHAT[1]])


def test_tools_and_tool_calls_are_kept():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tool = {"type": "function", "function": {"name": "add"}}
    messages = [
        {"role": "user", "content": "2 + 2?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hmm."},
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "4"},
    ]
    for tools in ([tool], '[{"type": "function", "function": {"name": "add"}}]'):
        turns, offered = FORMATS["messages"].convert({"messages": messages, "tools": tools})
        assert offered == [tool]
        assert check_conversation(turns) == ({"role": "user", "content": "2 + 2?"}, *messages[1:])
    assert FORMATS["messages"].convert({"messages": messages, "tools": []})[1] is None


WRONG_FIELDS = [
    ("gsm8k", {"question": "q"}, "no 'answer' (its keys: question)"),
    ("math", {"problem": "p", "solution": ["s"]}, "'solution' is not text (it is a list)"),
    ("prompt_completion", {"prompt": "q", "completion": None}, "'completion' is null"),
    (
        "prompt_completion",
        {"prompt": {}, "completion": {}},
        "neither both text nor both messages (they are an object and an",
    ),
    (
        "prompt_completion",
        {"prompt": "q", "completion": []},
        "prompt and completion are neither both text nor both messages (they are a string and a list)",
    ),
    ("verl", {"extra_info": "x"}, "'extra_info' is not an object (it is a string)"),
    ("medqa", {"question": "q", "options": ["x"], "answer_idx": "A"}, "'options' is not an object of texts"),
    ("medqa", {"question": "q", "options": {"A": "x"}, "answer_idx": "B"}, "answer is no option ('B' is not among A)"),
    ("pubmedqa", {**ABSTRACT, "CONTEXTS": "x"}, "'CONTEXTS' is not a list (it is a string)"),
    ("pubmedqa", {**ABSTRACT, "CONTEXTS": [1]}, "'CONTEXTS' is not a list of texts"),
]


@pytest.mark.parametrize(("name", "row", "expected"), WRONG_FIELDS)
def test_a_field_of_the_wrong_kind(name, row, expected):
    with pytest.raises(Fault, match=re.escape(expected)):
        FORMATS[name].convert(row)


# The real files ----------------------------------------------------------------------------------------------------

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the real data is not beside the checkout ({REAL})")

# file: the format to ask for, its rows, the summary of those that are rightly refused
FILES = {
    "gsm8k/train": ("auto", 7473, ""),
    "gsm8k/test": ("auto", 1319, ""),
    "math/train": ("auto", 7500, ""),
    "math/test": ("auto", 5000, ""),
    "math/test_minus_math500": ("auto", 4500, ""),
    "math_eval/aime24": ("auto", 30, ""),
    "math_eval/math500": ("auto", 500, ""),
    "math_eval/minerva_math": ("auto", 272, ""),
    "medquad/train": ("auto", 16407, ""),
    "pubmedqa/train_dev": ("auto", 500, ""),
    "pubmedqa/test": ("auto", 500, ""),
    "medical_eval/medmcqa_validation": ("medmcqa_1based", 4183, ""),
    "medical_eval/medqa_test": ("auto", 1273, ""),
    "medical_eval/medqa_usmle_4opt_test": ("auto", 1273, ""),
    "medical_eval/medbullets_op4": ("auto", 308, ""),
    "medical_eval/medbullets_op5": ("auto", 308, ""),
    "medical_eval/HLE_biomed": ("auto", 103, ""),
    "medical_eval/MedXpertQA_test": ("auto", 1449, ""),
    "medical_eval/mmlu_pro_med_test": ("auto", 818, ""),
    "instruct/alpaca_gpt4_en_1k": ("auto", 999, ""),
    "instruct/code_alpaca_2k": ("auto", 2017, "2 rows skipped: 2 empty assistant turn"),
    "instruct/gpteacher_roleplay": ("auto", 3146, ""),
    "instruct/gpteacher_toolformer": ("auto", 7673, ""),
    "instruct/new_codealpaca": ("auto", 4535, ""),
}


@real
@pytest.mark.parametrize("name", FILES)
def test_real_rows(name):
    given, count, refused = FILES[name]
    bad = BadRows(skip=True)
    rows = read_rows(REAL / f"{name}.jsonl.gz", format=given, bad=bad)
    assert (len(rows) + len(bad.rows), bad.summary()) == (count, refused or "no rows skipped")
    for row in rows:
        assert row.messages[-1]["role"] == "assistant" and row.messages[-1]["content"].strip()
        assert "<<" not in row.messages[-1]["content"] or not name.startswith("gsm8k")


@real
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("medical_eval/medmcqa_validation", ":1: format not clear .* could be medmcqa or medmcqa_1based"),
        ("math_eval/amc23", ":1: format not clear .* could be gsm8k or medquad"),
        ("math_eval/olympiadbench", ":1: unknown format "),
        ("instruct/self_instruct_seed_tasks", ":1: unknown format .* Did you mean alpaca"),
    ],
)
def test_real_rows_that_need_a_name_or_are_no_training_data(name, expected):
    with pytest.raises(RowError, match=expected):
        read_rows(REAL / f"{name}.jsonl.gz")


@real
def test_every_real_file_is_in_the_tables():
    known = {*FILES, "math_eval/amc23", "math_eval/olympiadbench", "instruct/self_instruct_seed_tasks"}
    assert {str(path.relative_to(REAL)).removesuffix(".jsonl.gz") for path in REAL.rglob("*.jsonl.gz")} == known
