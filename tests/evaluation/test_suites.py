"""Tasks: every real file read whole, the hub's spellings, what is missing said plainly, and tasks from YAML."""

import gzip
import json

import pytest

from deftune.artifacts.options import OptionError
from deftune.data.generated import generate
from deftune.data.rows import RowError
from deftune.evaluation.items import MissingData, find_data, locate_tasks, read_task, render_prompt, with_data
from deftune.evaluation.kinds import MATH_PROMPT
from deftune.evaluation.questions import load_questions
from deftune.evaluation.readers import OLYMPIAD_SLACK
from deftune.evaluation.suites import SUITES, TASKS, coverage, size_note, suite_named, task_named
from deftune.evaluation.task_files import load_task_file

# rows of the released files; where the paper's set is another one, `size_note` must say so
COUNTS = {
    "gsm8k": 1319, "math500": 500, "minerva_math": 272, "olympiadbench": 675, "aime24": 30, "amc23": 40,
    "medmcqa": 4183, "medqa": 1273, "medqa_5": 1273, "pubmedqa": 500, "mmlu_pro_health": 818, "medbullets_4": 308,
    "medbullets_5": 308, "medxpertqa": 1449, "hle_biomed": 103,
}  # fmt: skip
NOT_THE_PAPERS = {"pubmedqa", "mmlu_pro_health", "hle_biomed"}


@pytest.mark.parametrize("name", COUNTS)
def test_every_real_file_is_read_whole(data, name):
    task = TASKS[name]
    items = read_task(task, data)
    assert len(items) == COUNTS[name] == len({item.id for item in items})
    assert bool(size_note(task, len(items))) == (name in NOT_THE_PAPERS)
    for item in items:
        assert item.id.startswith(f"{name}/") and item.gold.strip() == item.gold != ""
        if task.kind == "choice":
            assert item.gold in item.options and list(item.options) == sorted(item.options)
            assert all(f"\n{letter}. " in item.prompt for letter in item.options)
            assert item.prompt.endswith('in the form "Answer: <letter>".')
        else:
            assert item.options is None and item.prompt.endswith("within \\boxed{}.")


def gold(data, name: str, index: int) -> str:
    return read_task(TASKS[name], data)[index].gold


def test_golds_of_known_questions(data):
    assert gold(data, "gsm8k", 0) == "18"
    assert not any("," in item.gold for item in read_task(TASKS["gsm8k"], data))
    assert gold(data, "minerva_math", 0) == "1.6"
    assert [item.gold for item in read_task(TASKS["amc23"], data)][:4] == ["27", "36", "45", "3159"]
    aime = [item.gold for item in read_task(TASKS["aime24"], data)]
    assert all(0 <= int(number) <= 999 and str(int(number)) == number for number in aime)
    olympiad = {item.id: item for item in read_task(TASKS["olympiadbench"], data)}
    assert olympiad["olympiadbench/1606"].gold == "2"
    assert sum(item.rule.absolute == OLYMPIAD_SLACK * 0.1 for item in olympiad.values()) == 1
    assert sum(item.rule.unit != "" for item in olympiad.values()) == 11
    medmcqa = read_task(TASKS["medmcqa"], data)[0]
    assert medmcqa.gold == "A" and medmcqa.options["A"].startswith("Impulse through myelinated fibers is slower")
    medqa, five = read_task(TASKS["medqa"], data)[0], read_task(TASKS["medqa_5"], data)[0]
    assert len(medqa.options) == 4 and len(five.options) == 5
    assert medqa.options[medqa.gold] == five.options[five.gold]
    pubmed = read_task(TASKS["pubmedqa"], data)
    assert [sum(item.gold == letter for item in pubmed) for letter in "ABC"] == [276, 169, 55]


@pytest.mark.parametrize("name", ["math500", "minerva_math", "aime24", "amc23"])
def test_an_answer_may_leave_out_the_percent_sign_of_a_gold(tmp_path, name):
    rows = [{"problem": "By what percent?", "answer": answer} for answer in (r"44\%", "44")]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    signed, plain = read_task(TASKS[name], tmp_path)
    assert (signed.rule.unit, plain.rule.unit) == ("%", "")
    assert signed.rule.relative == plain.rule.relative


def test_a_limit_is_a_fair_sample_that_grows(data):
    few, more = (read_task(TASKS["gsm8k"], data, limit=n) for n in (20, 100))
    assert len(few) == 20 and {item.id for item in few} < {item.id for item in more}
    places = [int(item.id.split("/")[1]) for item in more]
    assert places == sorted(places) and max(places) > 1000
    with pytest.raises(ValueError, match="limit: at least 1"):
        read_task(TASKS["gsm8k"], data, limit=0)


def test_what_is_missing_of_a_suite(data):
    found = locate_tasks(data)
    have = [name for name, where in found.items() if isinstance(where, str)]
    assert coverage(SUITES["medical"], have) == "8 of 11 (without gpqa_medical, lancet, nejm)"
    assert "looked for nejm.jsonl" in str(found["nejm"])


# Suites --------------------------------------------------------------------------------------------------------------


def test_suites_are_the_papers():
    medical = SUITES["medical"]
    assert len(medical.tasks) == medical.of == 11 and medical.averaged == medical.tasks
    assert (medical.samples, medical.temperature) == (1, 0.0)
    sizes = [TASKS[name].size for name in medical.tasks]
    assert sizes == [4183, 1273, 1000, 1535, 390, 412, 308, 308, 1449, 603, 158]
    math = SUITES["math"]
    assert math.of == 5 == len(math.averaged) and "gsm8k" not in math.averaged and "gsm8k" in math.tasks
    assert (math.samples, math.temperature, TASKS["math500"].max_new_tokens) == (16, 1.0, 4096)
    assert [TASKS[name].size for name in math.averaged] == [500, 272, 675, 30, 40]
    for name, suite in SUITES.items():
        assert (
            suite.name == name and all(task in TASKS for task in suite.tasks) and set(suite.extra) <= set(suite.tasks)
        )
    assert all(task.name == name for name, task in TASKS.items())


def test_coverage_is_never_unqualified():
    assert coverage(SUITES["medical"], SUITES["medical"].tasks) == "11 of 11"
    assert coverage(SUITES["medical"], ["medqa"]).startswith("1 of 11 (without medmcqa, ")
    assert coverage(SUITES["math"], ["gsm8k"]).startswith("0 of 5")


def test_unknown_names_are_suggested():
    with pytest.raises(ValueError, match=r"unknown task 'gsmk8'. Did you mean 'gsm8k'"):
        task_named("gsmk8")
    with pytest.raises(ValueError, match=r"unknown suite 'medicl'. Did you mean 'medical'"):
        suite_named("medicl")


@pytest.mark.parametrize(
    ("task", "split"),
    [("figfont", "test"), ("figfont_heldout_words", "heldout_words"), ("figfont_heldout_fonts", "heldout_fonts")],
)
def test_figfont_asks_what_training_shows(task, split):
    items = read_task(TASKS[task], limit=5)
    rows = generate("figlet_font", split=split, size=5)
    assert [item.prompt for item in items] == [row.messages[0]["content"] for row in rows]
    assert [item.gold for item in items] == [row.messages[1]["content"] for row in rows]
    assert [f"figlet_font[{item.id.split('/')[1]}]" for item in items] == [row.where for row in rows]
    if split == "test":
        assert items[0].id == "figfont/40000"


# Finding -------------------------------------------------------------------------------------------------------------


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


GSM = {"question": "2 + 2?", "answer": "It is 4.\n#### 4"}
CHOICE = {"question": "Which?", "options": {"A": "this", "B": "that"}, "answer_idx": "B"}


def test_files_are_found_by_name_at_any_depth(tmp_path):
    file = write(tmp_path / "a" / "GSM8K" / "test.jsonl.gz", GSM)
    write(tmp_path / "math" / "test.jsonl", GSM)  # another test file
    write(tmp_path / ".cache" / "gsm8k" / "test.jsonl", GSM)
    assert find_data(TASKS["gsm8k"], tmp_path) == file
    assert find_data(TASKS["gsm8k"], file.parent) == file  # the folder itself
    assert find_data(TASKS["gsm8k"]) is None  # the hub
    assert read_task(TASKS["gsm8k"], tmp_path)[0].gold == "4"
    write(tmp_path / "b" / "gsm8k" / "test.json", GSM)
    with pytest.raises(MissingData, match="both match"):
        find_data(TASKS["gsm8k"], tmp_path)


def test_files_are_found_through_links(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "data"
    elsewhere.mkdir()
    folder.mkdir()
    (elsewhere / "blob").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    (elsewhere / "test.jsonl").symlink_to(elsewhere / "blob")
    (folder / "gsm8k").symlink_to(elsewhere)
    (elsewhere / "round").symlink_to(folder)  # leads back to where the search began
    assert find_data(TASKS["gsm8k"], folder) == folder / "gsm8k" / "test.jsonl"


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(MissingData, match=r"aime24: not below .*looked for aime24\.jsonl, .*HuggingFaceH4/aime_2024"):
        find_data(TASKS["aime24"], tmp_path)
    with pytest.raises(MissingData, match=r"nejm: no data: looked for nejm\.jsonl.*--data DIR"):
        find_data(TASKS["nejm"])
    with pytest.raises(MissingData, match="no such folder"):
        find_data(TASKS["aime24"], tmp_path / "nowhere")


def test_a_file_of_ones_own_goes_first(tmp_path):
    file = write(tmp_path / "mine.jsonl", CHOICE)
    task = with_data(TASKS["nejm"], file)
    assert [item.gold for item in read_task(task)] == ["B"]
    assert read_task(task, tmp_path / "nowhere")
    with pytest.raises(MissingData, match="no such file"):
        read_task(with_data(TASKS["nejm"], tmp_path / "none.jsonl"))


def test_without_a_folder_the_hub_is_asked(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, split, streaming):
        asked.append((name, config, split))
        return [GSM]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [item.gold for item in read_task(TASKS["gsm8k"])] == ["4"]
    assert asked == [("openai/gsm8k", "main", "test")]


# Spellings -----------------------------------------------------------------------------------------------------------


def one(tmp_path, name, *rows):
    return read_task(with_data(TASKS[name], write(tmp_path / "rows.jsonl", *rows)))


MED = {"question": "Which?", "opa": "w", "opb": "x", "opc": "y", "opd": "z"}
PRO = {"question": "Q?", "options": ["u", "v", "w"], "answer": "C", "answer_index": 2, "category": "health"}


def test_the_hubs_spellings(tmp_path):
    assert one(tmp_path, "minerva_math", {"question": "Q?", "answer": "1.6"})[0].gold == "1.6"
    assert one(tmp_path, "aime24", {"problem": "Q?", "solution": r"so \boxed{033}."})[0].gold == "33"
    assert one(tmp_path, "amc23", {"id": 3, "question": "Q?", "answer": "27", "url": "u"})[0].id == "amc23/3"
    for from_zero, last in ((0, 3), (1, 4)):
        items = one(tmp_path, "medmcqa", {**MED, "cop": from_zero}, {**MED, "cop": last}, {**MED, "cop": 2})
        assert [item.gold for item in items] == ["A", "D", "ABCD"[2 - from_zero]]
    other = {**PRO, "category": "law", "answer_index": 0}
    items = one(tmp_path, "mmlu_pro_health", PRO, other, {**PRO, "category": "biology"})
    assert [item.gold for item in items] == ["C", "C"]
    pubmed = {"pubid": 7, "question": "Q?", "context": {"contexts": ["One.", "Two."]}, "final_decision": "no"}
    [item] = one(tmp_path, "pubmedqa", pubmed)
    assert item.gold == "B" and item.id == "pubmedqa/7" and item.prompt.startswith("One.\n\nTwo.\n\nQ?\n\nA. ")
    nulls = {**CHOICE, "options": {"A": "this", "B": "that", "C": None}}
    assert list(one(tmp_path, "nejm", nulls)[0].options) == ["A", "B"]
    pairs = {"question": "Q?", "options": [{"key": "A", "value": "x"}, {"key": "B", "value": "y"}], "answer": "y"}
    assert one(tmp_path, "lancet", pairs)[0].gold == "B"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "Q?", "answer": "4"}, "no gold answer"),
        ("gsm8k", {"answer": "#### 4"}, "no 'question'"),
        ("math500", {"problem": "Q?", "solution": "four"}, "nothing boxed"),
        ("math500", {"problem": "  ", "answer": "4"}, "'problem' is not text"),
        ("olympiadbench", {"question": "Q?", "final_answer": []}, "no gold answer"),
        ("nejm", {**CHOICE, "answer_idx": "C"}, "answer is no option"),
        ("nejm", {**CHOICE, "answer_idx": 2}, "answer is no option"),
        ("nejm", {**CHOICE, "options": {"A": "only"}}, "fewer than two options"),
        ("nejm", {**CHOICE, "options": {"A": "x", "B": 3}}, "an option is not text"),
        ("nejm", {**CHOICE, "options": {"a": "x", "b": "y"}}, "an option's name is not a letter"),
        ("nejm", {**CHOICE, "options": "A or B"}, "'options' is neither"),
        ("nejm", {**CHOICE, "options": ["x"] * 27}, "too many options"),
        ("nejm", {"question": "Q?", "options": ["x", "x"], "answer": "x"}, "answer is no option"),
        ("medmcqa", {**MED, "cop": 2}, "'cop' cannot be told"),
        ("medmcqa", {**MED, "cop": [1]}, r"'cop' cannot be told .*the file has \[1\]"),
        ("pubmedqa", {"QUESTION": "Q?", "CONTEXTS": "One.", "final_decision": "no"}, "'CONTEXTS' is not a list"),
        ("pubmedqa", {"QUESTION": "Q?", "CONTEXTS": ["One."], "final_decision": "perhaps"}, "answer is no option"),
    ],
)
def test_bad_rows_name_their_place(tmp_path, name, row, message):
    with pytest.raises(RowError, match=rf"rows\.jsonl:1: .*{message}.*another benchmark"):
        one(tmp_path, name, row)


def test_an_index_counts_the_options_that_are_left_out(tmp_path):
    row = {"question": "Q?", "options": ["x", None, "z"]}
    assert one(tmp_path, "nejm", {**row, "answer_index": 2})[0].gold == "C"
    with pytest.raises(RowError, match="answer is no option"):
        one(tmp_path, "nejm", {**row, "answer_index": 1})


def test_an_id_twice_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="duplicate id 'nejm/7' in questions 1 and 2"):
        one(tmp_path, "nejm", {**CHOICE, "id": 7}, {**CHOICE, "id": 7})


# Tasks from files ----------------------------------------------------------------------------------------------------

YAML = """
name: my_exam
version: "1"
kind: choice
data: exam.jsonl
fields: {question: q, gold: right, options: [a, b, c], id: n}
answer_from: 1
"""


def test_a_task_from_a_file(tmp_path):
    write(tmp_path / "exam.jsonl", {"q": "Q {x}?", "right": 2, "a": "x", "b": "y", "c": None, "n": 5})
    (tmp_path / "task.yaml").write_text(YAML + 'prompt: "Read: {question}\\n{options}\\n{{}}"\nmax_new_tokens: 7\n')
    task = load_task_file(tmp_path / "task.yaml")
    assert (task.name, task.kind, task.version, task.max_new_tokens) == ("my_exam", "choice", "1", 7)
    [item] = read_task(task)
    assert item.id == "my_exam/5" and item.gold == "B" and item.options == {"A": "x", "B": "y"}
    assert item.prompt == "Read: Q {x}?\nA. x\nB. y\n{}"


def test_two_task_files_of_one_name_are_refused(tmp_path):
    """The second one's questions would stand for both."""
    write(tmp_path / "exam.jsonl", {"q": "Q?", "right": 2, "a": "x", "b": "y", "c": "z", "n": 5})
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for file in files:
        file.write_text(YAML)
    assert list(load_questions(task_files=files[:1])[0].tasks) == ["my_exam"]
    with pytest.raises(OptionError, match="two task files have the name my_exam; rename one of the tasks"):
        load_questions(task_files=files)


def test_a_maths_task_from_the_hub(tmp_path):
    (tmp_path / "task.yaml").write_text('name: m\nversion: "2"\nkind: math\ndata: org/name:main\nsplit: dev\n')
    source = load_task_file(tmp_path / "task.yaml").source
    assert (source.hub, source.split, source.path) == ("org/name:main", "dev", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("promt: x", "promt: unknown key. Did you mean 'prompt'"),
        ("kind: figfont", r"kind: math or choice \(got 'figfont'\)"),
        ("version: 1", r"version: a text is needed \(in quotes\)"),
        ("name: gsm8k", "name: gsm8k is a task already"),
        ("name: a/b", "letters, digits"),
        ("fields: {quest: q}", r"fields\.quest: unknown key. Did you mean 'question'"),
        ("fields: {gold: 3}", r"fields\.gold: Input should be a valid string \(got 3\)"),
        ("answer_from: 2", r"answer_from: Input should be less than or equal to 1 \(got 2\)"),
        ("answer_from: true", r"answer_from: Input should be a valid integer \(got True\)"),
        ("max_new_tokens: 0", "max_new_tokens"),
        ("prompt: hello", r"task.yaml: prompt: a choice needs \{question\}"),
        ("prompt: '{question}'", r"a choice needs \{options\}"),
        ("prompt: '{question}{options}{answer}'", r"unknown \{answer\}"),
        ("prompt: '{question}{options}{question.__class__}'", r"unknown \{question.__class__\}"),
        ("prompt: '{question}{options}{question!r}'", r"prompt: unknown"),
        ("prompt: '{question}{options}{'", "a brace that is meant is written twice"),
        ("read: !!python/object/apply:os.system [true]", "not YAML"),
    ],
)
def test_a_wrong_task_file_says_so(tmp_path, change, message):
    key = change.partition(":")[0]
    lines = [line for line in YAML.strip().splitlines() if not line.startswith(f"{key}:")]
    (tmp_path / "task.yaml").write_text("\n".join([*lines, change]) + "\n")
    with pytest.raises(ValueError, match=message):
        load_task_file(tmp_path / "task.yaml")


def test_prompts_take_plain_names_only():
    assert render_prompt("{question}", {"question": "{options} {{"}) == "{options} {{"
    for template in ("{question.x}", "{question[0]}", "{question:>9}", "{0}", "{}"):
        with pytest.raises(ValueError, match="prompt"):
            render_prompt(template, {"question": "Q"})


def test_every_prompt_renders():
    for task in TASKS.values():
        assert "Q?" in render_prompt(task.prompt, {"question": "Q?", "options": "A. x"})
    assert MATH_PROMPT.count("{{}}") == 1
