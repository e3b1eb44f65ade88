"""A whole evaluation: asked, stopped, resumed, graded, summed up, compared."""

import json
from pathlib import Path

import pytest

from deftune.artifacts.options import OptionError
from deftune.cli import main
from deftune.cli.eval_tables import render_summary
from deftune.evaluation.comparison import compare
from deftune.evaluation.engines import Endpoint, Transformers, Vllm
from deftune.evaluation.evaluate import Result, Settings, ask, drop_cut_line, evaluate, grade, summarize
from deftune.evaluation.heldout import evaluate_heldout
from deftune.evaluation.items import Item
from deftune.evaluation.kinds import KINDS, score_answers
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.questions import load_items
from deftune.evaluation.sampler import Output, Sampler, SamplerError
from deftune.evaluation.suites import SUITES, task_named
from deftune.evaluation.task_files import load_task_file

ANSWERS = {"a": "So \\boxed{4}", "b": "I think it is 7", "c": "no idea"}
GOLD = {"a": "4", "b": "8", "c": "1"}


class Told(Sampler):
    """Answers from a table; stops after ``until`` of them."""

    def __init__(self, answers=ANSWERS, until=10**9):
        self.table, self.until, self.asked = answers, until, []

    def answers(self, prompts, settings):
        done = 0
        for prompt in prompts:
            self.asked.append(prompt.id)
            for i in settings.samples_of(prompt):
                if done >= self.until:
                    raise SamplerError("the server went away", done)
                done += 1
                yield Output(prompt.id, i, self.table[prompt.id], 3, "stop")


@pytest.fixture
def tasks():
    task = task_named("gsm8k")
    items = [Item(key, f"question {key}", GOLD[key]) for key in "abc"]
    return {"gsm8k": (task, items)}


def settings(tasks, **more):
    base = {"model": "m", "suite": "math", "tasks": {n: t.version for n, (t, _) in tasks.items()}, "samples": 2}
    return Settings(**{**base, "temperatures": (0.0, 1.0), **more})


def run(folder, tasks, sampler):
    result = Result(folder)
    result.open(settings(tasks))
    ask(result, settings(tasks), tasks, sampler)
    graded = grade(result, settings(tasks), tasks, workers=1)
    return result, graded, summarize(settings(tasks), SUITES["math"], tasks, graded, {})


def test_scores_are_means_over_samples_then_items(tmp_path, tasks):
    _, graded, summary = run(tmp_path / "r", tasks, Told())
    assert len(graded) == 3 * (1 + 2)  # greedy needs one answer, T = 1 two
    greedy, sampled = summary["rows"]
    assert greedy["score"] == sampled["score"] == pytest.approx(1 / 3)
    assert (greedy["samples"], sampled["samples"]) == (1, 2)
    assert sampled["pass_at"] == {1: pytest.approx(1 / 3), 2: pytest.approx(1 / 3)}
    assert greedy["extracted"] == {"boxed": 1, "last_number": 1, "none": 1}
    assert summary["averages"][0]["covers"].startswith("0 of 5") and "score" not in summary["averages"][0]
    assert greedy["interval"][0] <= greedy["score"] <= greedy["interval"][1]


def test_multiple_choice_says_what_a_constant_answer_would_score(tmp_path, tasks):
    """A model that answers A to everything looks as if it knew something."""
    golds = {"a": "B", "b": "A", "c": "B"}
    items = [Item(key, f"question {key}", gold, options={"A": "iron", "B": "zinc"}) for key, gold in golds.items()]
    told = Told({key: "Answer: A" for key in golds})
    _, _, summary = run(tmp_path / "r", {"medqa": (task_named("medqa"), items)}, told)
    assert [row["constant"] for row in summary["rows"]] == [{"answer": "B", "score": 2 / 3}] * 2
    assert "always B: 66.67" in render_summary(summary)
    *_, maths = run(tmp_path / "maths", tasks, Told())
    assert not any("constant" in row for row in maths["rows"]) and "always" not in render_summary(maths)


def test_a_server_that_dies_loses_nothing(tmp_path, tasks):
    whole = run(tmp_path / "whole", tasks, Told())[2]
    result = Result(tmp_path / "r")
    result.open(settings(tasks))
    with pytest.raises(SamplerError, match="the server went away"):
        ask(result, settings(tasks), tasks, Told(until=2))
    assert len(result.read_samples()) == 2
    with result.samples.open("a") as file:
        file.write('{"task": "gsm8k", "id": "c", "te')  # and a kill in the middle of a line
    sampler = Told()
    ask(result, settings(tasks), tasks, sampler)
    assert sampler.asked[0] == "c"  # what was answered is not asked again
    graded = grade(result, settings(tasks), tasks, workers=1)
    assert summarize(settings(tasks), SUITES["math"], tasks, graded, {}) == whole


class OneByOne(Sampler):
    """A sampler's answers, one temperature after another."""

    def __init__(self, sampler):
        self.sampler = sampler

    def answers(self, prompts, settings):
        return self.sampler.answers(prompts, settings)


class Shown:
    """A display that keeps what it is shown."""

    def __init__(self):
        self.counts, self.said = [], []

    def show(self, label, done=0, total=None):
        self.counts.append((label, done, total))

    def say(self, text):
        self.said.append(text)


def test_pooled_temperatures_give_the_same_result(tmp_path, tasks, model, tokenizer):
    """The records of a sampler that pools are those of one that takes one temperature after another; resumed, too."""
    task, items = tasks["gsm8k"]
    tasks = {"gsm8k": (task, [*items, Item("long", "x1" * 300, "1")])}
    three = settings(tasks, temperatures=(0.0, 0.5, 1.0), max_new_tokens=8)
    sampler = TransformersSampler(model, tokenizer, end_ids=range(3, 30))

    def asked(name: str, sampler: Sampler, keep=lambda record: False) -> tuple[Result, Shown]:
        result, shown = Result(tmp_path / name), Shown()
        result.open(three)
        result.samples.write_text("".join(json.dumps(r) + "\n" for r in whole if keep(r)))
        ask(result, three, tasks, sampler, shown)
        return result, shown

    whole = []
    result, one_by_one = asked("one", OneByOne(sampler))
    expected, whole = result.latest_samples(), result.read_samples()
    assert [record["temperature"] for record in whole] == [0.0] * 4 + [0.5] * 8 + [1.0] * 8
    result, pooled = asked("pooled", sampler)
    assert result.latest_samples() == expected and len(result.read_samples()) == len(expected) == 20
    assert pooled.counts[:4] == one_by_one.counts[:4]
    for shown in (one_by_one, pooled):
        assert set(shown.counts) == {
            (f"gsm8k T={t:g}", done, total) for t, total in ((0, 4), (0.5, 8), (1, 8)) for done in range(total + 1)
        }
        assert len(shown.said) == 3 and all("recorded as an error" in text for text in shown.said)  # one a temperature
    gone, made = [("a", 0.5, 1), ("b", 1.0, 0)], sampler.num_tokens
    result, resumed = asked("resumed", sampler, lambda r: (r["id"], r["temperature"], r["sample"]) not in gone)
    assert result.latest_samples() == expected
    assert resumed.counts[:3] == [("gsm8k T=0", 3, 4), ("gsm8k T=0.5", 5, 8), ("gsm8k T=1", 5, 8)]  # errors again
    added = sum(expected["gsm8k", *key]["tokens"] for key in gone)
    assert sampler.num_tokens == made + added and len(result.read_samples()) == 20


def test_another_evaluation_is_not_mixed_in(tmp_path, tasks):
    result = Result(tmp_path / "r")
    result.open(settings(tasks))
    result.samples.write_text("{}\n")
    with pytest.raises(ValueError, match=r"holds another evaluation \(seed: 0 -> 1\); choose another"):
        result.open(settings(tasks, seed=1))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "file").touch()
    with pytest.raises(ValueError, match="is not empty and no evaluation"):
        Result(tmp_path / "x").open(settings(tasks))


def test_compare_is_paired_by_item(tmp_path, tasks):
    a = run(tmp_path / "a", tasks, Told())[0]
    b = run(tmp_path / "b", tasks, Told({**ANSWERS, "b": "\\boxed{8}"}))[0]
    rows = compare(a, b)
    assert [row["difference"] for row in rows] == [pytest.approx(1 / 3)] * 2
    assert (rows[0]["won"], rows[0]["lost"]) == (1, 0) and rows[0]["p"] == 1.0  # one item of three decides nothing
    assert compare(b, a)[0]["lost"] == 1
    other = Result(tmp_path / "a")
    lines = other.graded.read_text().splitlines()
    other.graded.write_text("\n".join(lines[3:]) + "\n")
    with pytest.raises(ValueError, match="1 items are in one result only"):
        compare(other, b)


def test_a_cut_line_is_dropped_and_nothing_else(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(b'{"a": 1}\n{"b"')
    drop_cut_line(path)
    assert path.read_bytes() == b'{"a": 1}\n'
    drop_cut_line(path)
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_task_asked_for_by_name_must_have_data(tmp_path):
    with pytest.raises(ValueError, match="aime24"):
        load_items([(task_named("aime24"), True)], tmp_path, None)
    with pytest.raises(ValueError, match="no task has data"):
        load_items([(task_named("aime24"), False)], tmp_path, None)


@pytest.fixture
def own_task(tmp_path):
    (tmp_path / "exam.jsonl").write_text(
        "".join(json.dumps({"q": f"What is {n} + 1?", "correct": str(n + 1)}) + "\n" for n in range(4))
    )
    path = tmp_path / "exam.yaml"
    path.write_text('name: exam\nversion: "1"\nkind: math\ndata: exam.jsonl\nfields: {question: q, gold: correct}\n')
    assert load_task_file(path).name == "exam"
    return path


def test_the_command_with_a_real_model(tmp_path, own_task, model, tokenizer, capsys):
    tiny_model = tmp_path / "model"
    model.save_pretrained(tiny_model)
    tokenizer.save_pretrained(tiny_model)
    arguments = ["eval", "run", str(tiny_model), "--task-file", str(own_task), "--max-new-tokens", "8", "--out"]
    out = tmp_path / "result"
    assert main([*arguments, str(out)]) == 0
    assert "exam" in capsys.readouterr().out
    first = (out / "samples.jsonl").read_text()
    assert main([*arguments, str(out)]) == 0  # nothing left to ask
    assert (out / "samples.jsonl").read_text() == first
    assert main(["eval", "show", str(out), "--wrong"]) == 0
    assert "question: What is 0 + 1?" in capsys.readouterr().out
    assert main(["eval", "compare", str(out), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["difference"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "m"], "--suite: name a suite, a task or a task file"),
        (["run", "m", "--suite", "maths"], "Did you mean 'math'? Known: math, medical, figfont;"),
        (
            ["run", "m", "--suite", "heldout"],
            "unknown suite 'heldout'. Known: math, medical, figfont; token statistics",
        ),
        (["show", "nowhere"], "nowhere: is no result (no settings.json); `deftune eval run MODEL` makes one"),
        (["run", "m", "--suite", "math", "--data", "nowhere"], "--data: nowhere: no such folder"),
        (["run", "m", "--task-file", "no.yaml"], "no.yaml: no such file; a task of your own is a small YAML file"),
        (["run", "m", "--suite", "math", "--limit", "0"], "--limit: at least 1, got 0"),
        (["run", "m", "--suite", "math", "--workers", "0"], "--workers: at least 1, got 0"),
    ],
)
def test_wrong_inputs_are_one_line(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["runs/first", "--suite", "math"], ["smollm2"], ["a", "b"]])
def test_a_model_without_an_action_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *arguments])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and f"argument ACTION: invalid choice: {arguments[0]!r}. Choose from " in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "a"], "the following arguments are required: RUN"),
        (["run", "a", "b"], "unrecognized arguments: b"),
        (["run", "m", "--suite", "math", "--rows", "3"], "unrecognized arguments: --rows 3"),
        (["run", "m", "--suite", "math", "--wrong"], "unrecognized arguments: --wrong"),
        (["run", "m", "--suite", "math", "--engine", "sglang"], "argument --engine: invalid choice: 'sglang'"),
        (["heldout", "m"], "the following arguments are required: --data"),
        (["heldout", "m", "--data", "x", "--engine", "vllm"], "unrecognized arguments: --engine vllm"),
        (["list", "--temperature", "1"], "unrecognized arguments: --temperature 1"),
        (["show", "r", "--temperature", "1"], "unrecognized arguments: --temperature 1"),
    ],
)
def test_a_verb_refuses_options_that_it_does_not_have(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--temperature", "-1"], "temperature: a number from 0 (greedy), got -1.0"),
        (["--temperature", "1", "--temperature", "1"], "temperature: 1 is given twice"),
        (["--temperature", "1", "--top-p", "0"], "--top-p: above 0, at most 1 (all tokens), got 0.0"),
        (["--samples", "4"], "--samples: has no effect on greedy answers (T = 0)"),
        (["--top-p", "0.9"], "--top-p: has no effect on greedy answers"),
        (["--rule", "lenient"], "--rule: is for multiple choice, and none is asked"),
        ([], "model: unknown name 'm'"),
    ],
)
def test_what_is_refused_leaves_no_folder(options, text, own_task, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "run", "m", "--task-file", str(own_task), *options]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_a_folder_without_an_answer_holds_nothing(tmp_path, tasks):
    result = Result(tmp_path / "r")
    result.open(settings(tasks))
    result.open(settings(tasks, seed=1))  # the first try died before its first answer
    assert result.settings()["seed"] == 1


def test_too_few_items_to_choose_a_temperature_on(tmp_path, tasks):
    task, items = tasks["gsm8k"]
    summary = run(tmp_path / "r", {"gsm8k": (task, items[:1])}, Told())[2]
    assert summary["best_temperature"] == {} and len(summary["rows"]) == 2
    assert "gsm8k: too few items to choose a temperature" in render_summary(summary)


def test_answers_do_not_steer_the_terminal(tmp_path, tasks, capsys):
    answers = {**ANSWERS, "a": "one\n\x1b[2Jtwo"}
    result, _, summary = run(tmp_path / "r", tasks, Told(answers))
    (result.folder / "summary.json").write_text(json.dumps(summary))
    assert main(["eval", "show", str(result.folder)]) == 0
    out = capsys.readouterr().out
    assert "one\n\\x1b[2Jtwo" in out and "\x1b" not in out
    assert main(["eval", "show", str(result.folder), "--task", "math500"]) == 2
    assert "has no task 'math500'; it has gsm8k" in capsys.readouterr().err


def test_list(capsys):
    assert main(["eval", "list"]) == 0
    out = capsys.readouterr().out
    assert "math500" in out and "medical:" in out


# The library ----------------------------------------------------------------------------------------------------------


def test_a_python_user_calls_what_the_command_calls(tmp_path, own_task, model, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    capsys.readouterr()  # a progress bar of transformers
    seen = []
    options = {"task_files": [own_task], "max_new_tokens": 8, "engine": Transformers(batch_size=2)}
    outcomes = evaluate("model", **options, finished=seen.append)
    assert list(outcomes) == [""] and seen == [outcomes[""]] and capsys.readouterr() == ("", "")
    outcome = outcomes[""]
    assert str(outcome.folder) == "results/model-tasks" and not outcome.failed
    assert [row["task"] for row in outcome.summary["rows"]] == ["exam"]
    command = ["eval", "run", "model", "--task-file", str(own_task), "--max-new-tokens", "8", "--batch-size", "2"]
    assert main([*command, "--out", "again", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == json.loads(json.dumps(outcome.summary["rows"]))
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    measured = evaluate_heldout("model", "rows.jsonl", out="tokens")
    assert measured.summary["rows"][0]["metric"] == "nll" and measured.folder == Path("tokens")


@pytest.mark.parametrize(
    ("make", "option", "problem"),
    [
        (lambda: Transformers(batch_size=0), "batch_size", "at least 1, got 0"),
        (lambda: Vllm(dtype="int4"), "dtype", "one of bfloat16, float16, float32; got 'int4'"),
        (lambda: Vllm(gpu_memory_utilization=90), "gpu_memory_utilization", "a share above 0, at most 1; got 90"),
        (lambda: Endpoint("http://h", timeout=-1), "timeout", "a number of seconds above 0; got -1"),
        (lambda: Endpoint("http://h", extra_body={"n": 2}), "extra_body", "'n' is set by deftune itself; leave it out"),
        (lambda: evaluate("m"), "suites", "name a suite, a task or a task file; `deftune eval list` shows them"),
        (lambda: evaluate("m", suites=["math"], rule="loose"), "rule", "strict or lenient, got 'loose'"),
        (lambda: evaluate("m", suites=["math"], data="no"), "data", "no: no such folder"),
        (lambda: evaluate("m", samples=0), "samples", "at least 1, got 0"),
        (lambda: evaluate("m", change_endpoint=True), "change_endpoint", "is for an endpoint; leave it out"),
        (lambda: evaluate_heldout("m", "d", rows=0), "rows", "at least 1, got 0"),
    ],
)
def test_errors_name_the_argument(make, option, problem):
    with pytest.raises(OptionError) as caught:
        make()
    assert (caught.value.option, caught.value.problem) == (option, problem)


def test_the_help_has_the_engines_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in ("timeout", "retries", "concurrency"):
        assert f"(default: {getattr(Endpoint, name):g})" in text.rpartition(f"--{name} ")[2].partition("--")[0]


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_says_how_it_is_asked_and_scored(name):
    kind, options = KINDS[name], {"A": "4", "B": "5"} if "{options}" in KINDS[name].prompt else None
    gold, text = ("A", "Answer: A") if options else ("4", "4")
    [right] = score_answers([(name, Item("q", "", gold, options), text)], workers=1)
    assert right["score"] == 1.0 and right["how"] != "none" and set(kind.columns) <= right.keys()
    assert "{question}" in kind.prompt and kind.max_new_tokens > 0
