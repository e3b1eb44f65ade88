"""A result's folder: which questions it is of, who writes it, and what is said of a file that is damaged."""

import errno
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from result_holder import hold

from deftune.evaluation.comparison import compare
from deftune.evaluation.evaluate import FIRST_ERRORS, Settings, answered, ask, describe_errors, grade, summarize
from deftune.evaluation.items import Item
from deftune.evaluation.results import Result, describe_data, misfit
from deftune.evaluation.sampler import Output, Sampler, SamplerError
from deftune.evaluation.suites import task_named
from waiting import wait_for

TASK = task_named("gsm8k")


def make_tasks(golds):
    return {"gsm8k": (TASK, [Item(f"gsm8k/{i}", f"question {gold}", gold)
                             for i, gold in enumerate(golds)])}  # fmt: skip


TASKS = make_tasks(["4", "8", "1", "2"])
OTHERS = make_tasks(["4", "1", "8", "2"])  # two rows have changed places: the ids are row numbers
SETTINGS = Settings(model="m", suite="", tasks={"gsm8k": TASK.version}, samples=2, temperatures=(0.0, 1.0))
ENDPOINT = replace(SETTINGS, engine={"name": "endpoint", "url": "http://a/v1"})


class GoldSampler(Sampler):
    """Answers every prompt with the gold of `TASKS`; ``fail(id, sample)`` says which are errors instead."""

    def __init__(self, fail=lambda item, sample: False, until=10**9):
        self.fail, self.until, self.asked = fail, until, []

    def answers(self, prompts, settings):
        for prompt in prompts:
            for i in settings.samples_of(prompt):
                if len(self.asked) == self.until:
                    raise SamplerError("the server went away", len(self.asked))
                self.asked.append((prompt.id, settings.temperature, i))
                if self.fail(prompt.id, i):
                    yield Output(prompt.id, i, "partly \\boxed{4}", None, "error", f"HTTP 400: {len(prompt.id)} tokens")
                else:
                    gold = prompt.text.split()[-1]
                    yield Output(prompt.id, i, f"\\boxed{{{gold}}}", 3, "stop")


def run(folder, tasks=TASKS, settings=SETTINGS, sampler=None):
    result = Result(folder)
    with result.writing(settings, tasks):
        ask(result, settings, tasks, sampler or GoldSampler())
        graded = grade(result, settings, tasks, workers=1)
        summary = summarize(settings, None, tasks, graded, {})
        (folder / "summary.json").write_text(json.dumps(summary))
    return result


# Which questions -----------------------------------------------------------------------------------------------------


def test_the_hash_is_of_id_prompt_and_gold_in_any_order():
    described = describe_data(TASKS)["gsm8k"]
    assert described["items"] == 4 and described["source"].startswith("hub:")
    task, items = TASKS["gsm8k"]
    assert describe_data({"gsm8k": (task, items[::-1])})["gsm8k"]["hash"] == described["hash"]
    for change in ({"gold": "5"}, {"id": "x"}, {"prompt": "other"}):
        changed = {"gsm8k": (task, [replace(items[0], **change), *items[1:]])}
        assert describe_data(changed)["gsm8k"]["hash"] != described["hash"]


def test_other_questions_are_refused_and_counted(tmp_path):
    result = run(tmp_path / "r")
    before = {path.name: path.read_bytes() for path in result.folder.iterdir()}
    assert json.loads(before["settings.json"])["data"]["gsm8k"] == describe_data(TASKS)["gsm8k"]
    with pytest.raises(
        ValueError,
        match=r"r: 2 of 4 questions of gsm8k are not those that were answered \(prompt or gold differs, such as "
        r"'gsm8k/1'\); pass the data that this result was made with, or choose another folder with --out",
    ):
        run(tmp_path / "r", OTHERS)
    assert {path.name: path.read_bytes() for path in result.folder.iterdir()} == before
    run(tmp_path / "r")  # the same ones go on
    assert {path.name: path.read_bytes() for path in result.folder.iterdir()} == before


def without_hash(result):
    """As older versions wrote it."""
    path = result.folder / "settings.json"
    settings = json.loads(path.read_text())
    del settings["data"]
    path.write_text(json.dumps(settings))
    result.questions.unlink()
    return result


def test_a_result_without_a_hash_is_known_by_its_grades(tmp_path):
    result = without_hash(run(tmp_path / "r"))
    with pytest.raises(ValueError, match=r"2 of 4 questions of gsm8k are not those that were answered"):
        result.check(SETTINGS, OTHERS)
    assert result.check(SETTINGS, TASKS) == []
    with result.writing(SETTINGS, TASKS):
        pass
    assert result.settings()["data"] == describe_data(TASKS)  # recorded from now on
    result = without_hash(result)
    result.graded.unlink()
    [note] = result.check(SETTINGS, TASKS)
    assert "was begun without a record of its questions; they are taken to be these" in note


def test_results_of_other_questions_are_not_compared(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", OTHERS)
    with pytest.raises(
        ValueError, match=r"2 of 4 questions of gsm8k differ in prompt or gold, such as 'gsm8k/1'; evaluate both on"
    ):
        compare(a, b)
    with pytest.raises(ValueError, match="2 of 4 questions of gsm8k differ"):
        compare(without_hash(a), without_hash(b))


def test_another_version_of_a_task_grades_the_answers_again(tmp_path):
    older, newer = (replace(SETTINGS, tasks={"gsm8k": version}) for version in ("0", "1"))
    result = run(tmp_path / "r", settings=older)
    with pytest.raises(ValueError, match=r"version 0 and version 1 are different tasks; the command that made"):
        compare(result, run(tmp_path / "other", settings=newer))
    [note] = result.check(newer, TASKS)
    assert note.endswith("r: gsm8k: graded again by version 1, was 0") and result.settings()["tasks"] == {"gsm8k": "0"}
    with pytest.raises(ValueError, match=r"holds another evaluation \(tasks"):
        result.check(newer, OTHERS)
    with result.writing(newer, TASKS):
        assert not result.graded.exists()  # the grades of the older version are not taken for the newer one's
    sampler = GoldSampler()
    run(tmp_path / "r", settings=newer, sampler=sampler)
    assert sampler.asked == [] and result.settings()["tasks"] == {"gsm8k": "1"}
    assert {row["difference"] for row in compare(result, Result(tmp_path / "other"))} == {0.0}


# Errors --------------------------------------------------------------------------------------------------------------


def test_errors_score_nothing_are_counted_and_asked_again(tmp_path):
    result = run(tmp_path / "r", sampler=GoldSampler(lambda item, sample: item == "gsm8k/0"))
    greedy, sampled = result.summary()["rows"]
    assert greedy["score"] == 0.75 and greedy["errors"]["count"] == 1 and sampled["errors"]["of"] == 8
    assert greedy["finished"] == {"stop": 3, "error": 1}
    text = "2 of 8 answers are errors and score 0: gsm8k/0: HTTP 400: 7 tokens (and 1 like it)"
    assert describe_errors(sampled) == text
    assert not answered(result, SETTINGS, TASKS) and answered(result, SETTINGS, TASKS, with_errors=True)

    lines = result.samples.read_text()
    again = GoldSampler(lambda item, sample: True)  # still failing: asked, and recorded no second time
    run(tmp_path / "r", sampler=again)
    assert again.asked == [("gsm8k/0", 0.0, 0), ("gsm8k/0", 1.0, 0), ("gsm8k/0", 1.0, 1)]
    assert result.samples.read_text() == lines
    run(tmp_path / "r")  # a healthy server
    assert [row["score"] for row in result.summary()["rows"]] == [1.0, 1.0] and answered(result, SETTINGS, TASKS)
    assert describe_errors(result.summary()["rows"][0]) == ""


def test_only_missing_samples_are_asked_and_errors_come_last(tmp_path):
    with pytest.raises(SamplerError):
        run(tmp_path / "r", sampler=GoldSampler(lambda item, sample: item == "gsm8k/0", until=7))
    rest = GoldSampler()
    run(tmp_path / "r", sampler=rest)
    # four greedy answers and three of eight at T = 1 were recorded; those of gsm8k/0 are errors
    assert rest.asked == [("gsm8k/0", 0.0, 0), ("gsm8k/1", 1.0, 1), ("gsm8k/2", 1.0, 0),
                          ("gsm8k/2", 1.0, 1), ("gsm8k/3", 1.0, 0), ("gsm8k/3", 1.0, 1), ("gsm8k/0", 1.0, 0),
                          ("gsm8k/0", 1.0, 1)]  # fmt: skip


def test_a_server_whose_first_answers_are_all_errors_is_asked_no_further_once(tmp_path):
    tasks = make_tasks([str(i) for i in range(2 * FIRST_ERRORS)])
    settings = replace(ENDPOINT, temperatures=(0.0,))
    with pytest.raises(SamplerError, match=f"the first {FIRST_ERRORS} answers are all errors: gsm8k/19: HTTP 400"):
        run(tmp_path / "r", tasks, settings, GoldSampler(lambda item, sample: True))
    run(tmp_path / "r", tasks, settings, GoldSampler(lambda item, sample: True))  # whoever calls again means it
    assert Result(tmp_path / "r").summary()["rows"][0]["errors"]["count"] == 2 * FIRST_ERRORS


def test_errors_of_a_compared_result_are_said(tmp_path):
    from deftune.evaluation.comparison import compare_folders

    run(tmp_path / "a"), run(tmp_path / "b", sampler=GoldSampler(lambda item, sample: sample == 1))
    [note] = compare_folders(tmp_path / "a", [tmp_path / "b"])["errors"]
    assert note.startswith(f"{tmp_path / 'b'}: gsm8k T=1: 4 of 8 answers are errors and score 0: gsm8k/0: HTTP 400")


# Another server, another process -------------------------------------------------------------------------------------


def test_answers_of_two_dtypes_are_not_mixed(tmp_path):
    """A GPU answers in bfloat16, a CPU in float32; deftune 0.2.0 recorded no dtype."""
    on_gpu, on_cpu, older = (
        replace(SETTINGS, engine={"name": "transformers", "version": "5", **dtype})
        for dtype in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {})
    )
    with pytest.raises(ValueError, match=r"holds another evaluation \(engine"):
        run(tmp_path / "r", settings=on_gpu).check(on_cpu, TASKS)
    assert run(tmp_path / "older", settings=older).check(on_cpu, TASKS) == []


def test_another_server_goes_on_only_if_told(tmp_path):
    result = run(tmp_path / "r", settings=ENDPOINT)
    moved = replace(ENDPOINT, engine={"name": "endpoint", "url": "http://b/v1"})
    with pytest.raises(
        ValueError, match=r"was begun with the server http://a/v1, not http://b/v1; pass --change-endpoint"
    ):
        result.check(moved, TASKS)
    with result.writing(moved, TASKS, change_endpoint=True):
        pass
    engine = result.settings()["engine"]
    assert engine == {"name": "endpoint", "url": "http://b/v1", "earlier_urls": ["http://a/v1"]}
    result.check(moved, TASKS)
    extra = replace(moved, engine={**moved.engine, "extra_body": {"top_k": 1}})
    with pytest.raises(ValueError, match=r"holds another evaluation \(engine.extra_body: None -> {'top_k': 1}\)"):
        result.check(extra, TASKS, change_endpoint=True)


def test_a_second_process_is_refused(tmp_path):
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "r", SETTINGS, entered, leave))
    process.start()
    try:
        wait_for(lambda: entered.is_set() or not process.is_alive())
        assert entered.is_set()
        with pytest.raises(ValueError, match=r"r: another process is writing this result; wait until it ends, or"):
            run(tmp_path / "r")
    finally:
        leave.set()
        process.join()
    run(tmp_path / "r")
    assert not (tmp_path / "r" / ".lock").exists()


def test_a_folder_without_an_answer_is_not_left_behind(tmp_path):
    with pytest.raises(RuntimeError), Result(tmp_path / "a" / "b").writing(SETTINGS, TASKS):
        raise RuntimeError("the model cannot be loaded")
    assert not list(tmp_path.iterdir())
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"), Result(tmp_path / "r").writing(SETTINGS, TASKS):
        pass
    assert not (tmp_path / "elsewhere").exists()


# Damaged files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda text: text[:-20], "graded.jsonl:12: the line is cut off"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "graded.jsonl: has 11 of 12 answers; it was cut"),
        (lambda text: text + text.splitlines(keepends=True)[0], "graded.jsonl: has 12 of 12 answers; it was cut"),
        (lambda text: text.replace('"score"', '"points"', 1), "graded.jsonl:1: the line is damaged (no 'score')"),
        (lambda text: text.replace('"score": 1.0', '"score": NaN', 1), "the line is damaged (score is nan)"),
        (lambda text: "[1]\n" + text, "graded.jsonl:1: the line is damaged (it is a list)"),
        (lambda text: "\0\0\0\n" + text, "graded.jsonl:1: the line is damaged (it is not JSON or null)"),
        (lambda text: "", "graded.jsonl: has 0 of 12 answers"),
    ],
)
def test_damaged_grades_are_named_and_made_again(damage, text, tmp_path):
    result = run(tmp_path / "r")
    whole = result.graded.read_text()
    result.graded.write_text(damage(whole))
    with pytest.raises(ValueError) as caught:
        compare(result, result)
    assert text in str(caught.value) and "run the same `deftune eval run` again" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    run(tmp_path / "r", sampler=GoldSampler(until=0))  # the remedy, which asks for nothing
    assert result.graded.read_text() == whole


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "it is not JSON or null"),
        ("[" * 100_000, "it is not JSON or null"),
        ("[1, 2]", "it is a list"),
        ("{}", "no 'settings'"),
        ('{"settings": {"suite": ""}}', "no 'rows'"),
        ('{"settings": {"suite": ""}, "rows": [3], "missing": {}}', "rows[0] is a number"),
        ('{"settings": {"suite": ""}, "rows": [], "missing": {}}', "no rows"),
        ('{"settings": {"suite": "heldout", "data": "x"}, "rows": {}}', "rows is an object"),
    ],
)
def test_a_summary_of_another_shape_is_named(content, text, tmp_path):
    result = run(tmp_path / "r")
    (result.folder / "summary.json").write_text(content)
    with pytest.raises(ValueError) as caught:
        result.summary()
    assert f"summary.json: is damaged or of another version ({text}); run the same" in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "[" * 100_000, '{"suite": "", "tasks": []}', '{"suite": "", "tasks": {}}']
)
def test_damaged_settings_are_named(content, tmp_path):
    result = run(tmp_path / "r")
    (result.folder / "settings.json").write_text(content)
    for read in (result.settings, result.read_graded, lambda: result.check(SETTINGS, TASKS)):
        with pytest.raises(ValueError, match=r"settings.json: is damaged \(.*\); evaluate again into another folder"):
            read()


def test_answers_of_other_weights_are_refused(tmp_path):
    """A run that was trained again under the same name does not get the scores of the old weights."""
    folder = tmp_path / "r"
    with Result(folder).writing(SETTINGS, TASKS, weights="old"):
        ask(Result(folder), SETTINGS, TASKS, GoldSampler())
    for weights in ("old", None):  # None: the weights are gone, and the recorded answers can still be graded
        assert Result(folder).check(SETTINGS, TASKS, weights=weights) == []
    with pytest.raises(ValueError, match="its answers are of other weights than m has now; choose another folder"):
        Result(folder).check(SETTINGS, TASKS, weights="new")


def test_weights_of_an_older_result_are_not_known(tmp_path):
    result = run(tmp_path / "r")
    with result.writing(SETTINGS, TASKS, weights="now"):
        pass
    assert "weights" not in result.settings()
    assert result.check(SETTINGS, TASKS, weights="later") == []


def test_settings_that_cannot_be_read_are_not_missing(tmp_path, monkeypatch):
    """Another user's result is a result: it is neither begun again nor called damaged."""
    result = run(tmp_path / "r")
    read_text = Path.read_text

    def refused(path, *args, **kwargs):
        if path.name == "settings.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refused)
    for read in (result.settings, lambda: result.check(SETTINGS, TASKS)):
        with pytest.raises(PermissionError, match=r"settings\.json"):
            read()


def test_a_damaged_answer_is_named_and_a_cut_one_is_asked_again(tmp_path):
    result = run(tmp_path / "r")
    lines = result.samples.read_text().splitlines(keepends=True)
    result.samples.write_text("".join(lines[:-1]) + lines[-1][:30])
    sampler = GoldSampler()
    run(tmp_path / "r", sampler=sampler)
    assert sampler.asked == [("gsm8k/3", 1.0, 1)] and result.samples.read_text() == "".join(lines)
    result.samples.write_text("".join([lines[0], "{}\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"samples.jsonl:2: the line is damaged \(no 'task'\); delete that line"):
        run(tmp_path / "r")


@pytest.mark.parametrize(
    ("value", "shape", "wrong"),
    [
        (1, int, None),
        (True, int, " is a boolean"),
        (True, object, None),
        (1.5, (int, float), None),
        (float("inf"), (int, float), " is inf"),
        ({"a": {"b": "c"}}, {"a": {"b": int}}, "a.b is a string"),
        ({"a": [1, None]}, {"a": [int]}, "a[1] is not JSON or null"),
        ({"a": 1}, {"a": [int]}, "a is a number"),
    ],
)
def test_shapes(value, shape, wrong):
    assert misfit(value, shape) == wrong
