"""What a run gained and lost against its base: several suites, several runs, paired by item."""

import json

import pytest

from deftune.cli import main
from deftune.evaluation.comparison import average_changes, compare_folders, results_in
from deftune.evaluation.evaluate import Result, Settings
from deftune.evaluation.statistics import holm


def write_result(folder, suite, scores, **settings):
    """A graded result of the given scores: {task: {item: [score, ...]}}."""
    result = Result(folder)
    result.open(
        Settings(model="m", suite=suite, tasks=dict.fromkeys(scores, "1"), samples=2, temperatures=(0.0,), **settings)
    )
    records = [
        {"task": task, "id": item, "temperature": 0.0, "sample": n, "score": score}
        for task, items in scores.items()
        for item, samples in items.items()
        for n, score in enumerate(samples)
    ]
    result.graded.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def items(*scores):
    return {str(i): [score] for i, score in enumerate(scores)}


@pytest.fixture
def folders(tmp_path):
    """Tuned on maths: better there, worse on medicine."""
    base, run = tmp_path / "base", tmp_path / "run"
    for folder, maths, medical in ((base, (0, 0, 0, 1), (1, 1, 1, 0)), (run, (1, 1, 0, 1), (0, 0, 1, 1))):
        write_result(folder / "math", "math", {"math500": items(*maths), "gsm8k": items(*maths)})
        write_result(folder / "medical", "medical", {"medqa": items(*medical), "nejm": items(1, 1, 1, 1)})
    return base, run


def test_what_was_gained_and_what_was_lost(folders):
    base, run = folders
    found = compare_folders(base, [run])
    rows = {r["task"]: r for r in found["tasks"]}
    assert rows["math500"]["difference"] == 0.5 and (rows["math500"]["won"], rows["math500"]["lost"]) == (2, 0)
    assert rows["medqa"]["difference"] == -0.25 and (rows["medqa"]["won"], rows["medqa"]["lost"]) == (1, 2)
    assert rows["nejm"]["difference"] == 0 and rows["nejm"]["p"] == 1
    assert [r["p_holm"] for r in found["tasks"]] == holm([r["p"] for r in found["tasks"]])
    math, medical = found["averages"]
    assert math["difference"] == 0.5 and math["covers"].startswith("1 of 5")  # GSM8K enters no average
    assert medical["difference"] == -0.125 and medical["covers"].startswith("2 of 11")
    assert (medical["base"], medical["score"]) == (0.875, 0.75)
    backwards = compare_folders(run, [base])["tasks"]
    assert [r["difference"] for r in backwards] == [-r["difference"] for r in found["tasks"]]


def test_several_runs_share_one_correction(folders):
    base, run = folders
    found = compare_folders(base, [run, base])
    assert [r["run"] for r in found["tasks"]] == [str(run)] * 4 + [str(base)] * 4
    assert [r["p_holm"] for r in found["tasks"]] == holm([r["p"] for r in found["tasks"]])
    assert len(found["averages"]) == 4


def test_one_result_of_several(folders, tmp_path):
    base, run = folders
    assert [r["task"] for r in compare_folders(base / "math", [run / "math"])["tasks"]] == ["math500", "gsm8k"]
    found = compare_folders(base, [run / "medical"])
    assert {r["suite"] for r in found["tasks"]} == {"medical"} and found["alone"] == [f"{base}: math"]
    assert [result.folder.name for result in results_in(base)] == ["math", "medical"]


def test_results_that_cannot_be_compared(folders, tmp_path):
    base, run = folders
    with pytest.raises(ValueError, match="neither a result nor a folder of results"):
        compare_folders(base, [tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"base/math has math and .*run/medical has medical: nothing in common"):
        compare_folders(base / "math", [run / "medical"])
    lenient = write_result(tmp_path / "lenient", "medical", {"medqa": items(1, 1, 1, 1)}, rule="lenient")
    with pytest.raises(ValueError, match="rule was strict and lenient; evaluate both alike"):
        compare_folders(base / "medical", [lenient])
    write_result(base / "again", "math", {"math500": items(1, 1, 1, 1)})
    with pytest.raises(ValueError, match=r"both hold math; name one of them"):
        compare_folders(base, [run])


def test_answers_of_another_engine_are_pointed_out(folders, tmp_path, capsys):
    base, run = folders
    assert compare_folders(base, [run])["engines"] == []
    engine = {"name": "vllm", "version": "0.32"}
    other = write_result(
        tmp_path / "other", "math", {"math500": items(1, 1, 0, 1), "gsm8k": items(1, 1, 0, 1)}, engine=engine
    )
    assert main(["eval", "compare", str(base / "math"), str(other)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{other}: math was answered by vllm 0.32, and in {base / 'math'} by ")
    assert line.endswith("a difference may be the engine's, not the model's")


def test_tasks_of_ones_own_have_no_average():
    rows = [{"suite": "", "run": "r", "temperature": 0.0, "task": "exam", "difference": 0.1, "standard_error": 0.0}]
    assert average_changes(rows) == []


def test_the_tables(folders, capsys):
    base, run = map(str, folders)
    assert main(["eval", "compare", base, run]) == 0
    out = capsys.readouterr().out
    assert "every difference is run - base" in out and "-25.00" in out and "+50.00" in out
    assert "medical at T=0, average over 2 of 11" in out
    assert main(["eval", "compare", base, run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["averages"][1]["difference"] == -0.125


# Several suites in one run -------------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path, model, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    for name, row in {
        "gsm8k/test": {"question": "2 + 2?", "answer": "It is 4.\n#### 4"},
        "medqa_usmle_4opt_test": {"question": "Which?", "options": {"A": "this", "B": "that"}, "answer_idx": "B"},
    }.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    return tmp_path


def test_several_suites_go_into_one_folder(model_folder, capsys):
    command = [
        "eval",
        "run",
        "model",
        "--suite",
        "math",
        "--suite",
        "medical",
        "--data",
        "data",
        "--max-new-tokens",
        "6",
    ]
    command += ["--temperature", "0"]
    assert main([*command, "--out", "results/base"]) == 0
    out = capsys.readouterr()
    assert "gsm8k" in out.out and "medqa" in out.out and "left out: nejm" in out.err
    assert sorted(p.name for p in (model_folder / "results/base").iterdir()) == ["math", "medical"]
    assert main(command) == 0  # without --out: results/MODEL/SUITE
    assert (model_folder / "results/model/medical/summary.json").is_file()
    assert main(["eval", "compare", "results/base", "results/model"]) == 0
    assert "average over 1 of 11" in capsys.readouterr().out


def test_where_nothing_is_left_to_ask_no_model_is_loaded(model_folder, monkeypatch, capsys):
    """Only graded again: by another number of workers, after a change of a rule's code."""
    command = [
        "eval",
        "run",
        "model",
        "--suite",
        "math",
        "--data",
        "data",
        "--max-new-tokens",
        "6",
        "--temperature",
        "0",
    ]
    assert main(command) == 0
    summary = (model_folder / "results/model-math/summary.json").read_bytes()
    (model_folder / "results/model-math/graded.jsonl").unlink()

    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("deftune.evaluation.engines.load", refuse)
    assert main([*command, "--workers", "1"]) == 0
    assert (model_folder / "results/model-math/summary.json").read_bytes() == summary
    samples = model_folder / "results/model-math/samples.jsonl"
    samples.write_text(samples.read_text().splitlines(keepends=True)[0])
    with pytest.raises(AssertionError, match="loaded"):
        main(command)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--suite", "math", "--suite", "math"], "a suite is named twice"),
        (
            ["--suite", "math", "--suite", "medical", "--task", "gsm8k"],
            "--suite: single tasks go with one suite at most",
        ),
        (["--suite", "math", "--samples", "0"], "--samples: at least 1, got 0"),
        (
            ["--suite", "math", "--endpoint", "http://x", "--template", "plain"],
            "--template: an endpoint loads its own model",
        ),
    ],
)
def test_options_are_honoured_or_refused(options, text, model_folder, capsys):
    assert main(["eval", "run", "model", "--data", "data", *options]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1 and not (model_folder / "results").exists()


def test_list_says_what_is_there(model_folder, capsys):
    assert main(["eval", "list", "--data", "data"]) == 0
    out = capsys.readouterr().out
    assert "data below data: 1 of 11 (without medmcqa," in out and "data below data: 0 of 5" in out
    assert "no data" in out and "data/gsm8k/test.jsonl" in out and "medqa_5" in out
    assert main(["eval", "list"]) == 0
    assert "hub: openai/gsm8k:main" in capsys.readouterr().out
    assert main(["eval", "list", "--data", "nowhere"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
