"""Our tasks in lm-evaluation-harness, and its tasks on our models: what is written, and what `lm_eval` makes of it."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from deftune.cli import main
from deftune.evaluation.answers import Rule
from deftune.evaluation.harness import export_tasks, process_results
from deftune.evaluation.items import Item
from deftune.evaluation.suites import SUITES, TASKS


def item(name, content, gold, options=None, rule=None):
    return Item(name, content, gold, options, rule=rule or Rule())


@pytest.fixture
def exported(tmp_path):
    tasks = {
        "gsm8k": (TASKS["gsm8k"], [item("gsm8k/0", "What is 2 + 2?", "4")]),
        "math500": (TASKS["math500"], [item("math500/0", "Half of one?", r"\frac{1}{2}")]),
        "minerva_math": (TASKS["minerva_math"], [item("minerva_math/0", "c?", "3e8", rule=Rule(relative=1e-4))]),
        "medqa": (TASKS["medqa"], [item("medqa/0", "Which?", "B", {"A": "iron", "B": "zinc"})]),
        "figfont": (TASKS["figfont"], [item("figfont/0", "Read.", "ABC")]),
    }
    names = export_tasks(tmp_path / "tasks", tasks, [SUITES["math"]])
    assert names == [f"deftune_{name}" for name in (*tasks, "math")]
    return tmp_path / "tasks"


def documents(folder, name):
    return [json.loads(line) for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "answer", "scores"),
    [
        ("gsm8k", r"So \boxed{4}", {"score": 1.0}),
        ("gsm8k", "It is 5", {"score": 0.0}),
        ("math500", r"\boxed{0.5}", {"score": 1.0}),
        ("minerva_math", r"\boxed{2.99998 \times 10^8}", {"score": 1.0}),
        ("minerva_math", r"\boxed{2.9 \times 10^8}", {"score": 0.0}),
        ("medqa", "Answer: B", {"score": 1.0}),
        ("medqa", "zinc", {"score": 0.0}),
        ("figfont", " abc\n", {"score": 1.0, "similarity": 1.0}),
    ],
)
def test_answers_are_scored_as_we_score_them(exported, name, answer, scores):
    assert process_results(documents(exported, name)[0], [answer]) == scores


def test_what_is_written(exported):
    text = (exported / "gsm8k.yaml").read_text()
    assert "process_results: !function deftune_scoring.process_results\n" in text
    assert "custom_dataset: !function deftune_scoring.read_items\n" in text
    content = yaml.safe_load(text.replace("!function ", ""))
    assert content["task"] == "deftune_gsm8k" and content["metadata"]["version"] == TASKS["gsm8k"].version
    assert content["dataset_kwargs"] == {"file": "data/gsm8k.jsonl"}
    group = yaml.safe_load((exported / "group_math.yaml").read_text())
    assert group["task"] == ["deftune_math500", "deftune_minerva_math"]  # GSM8K enters no average
    assert group["aggregate_metric_list"][0]["weight_by_size"] is False


def test_a_folder_may_be_moved(exported, tmp_path):
    """No file has the folder's name, and the items are read from where the Python file is."""
    moved = exported.rename(tmp_path / "elsewhere")
    assert not any(str(exported) in path.read_text() for path in moved.rglob("*") if path.is_file())
    source = runpy.run_path(str(moved / "deftune_scoring.py"))
    [row] = source["read_items"](file="data/gsm8k.jsonl", version="1")["test"]
    assert row["id"] == "gsm8k/0" and source["process_results"](row, [r"\boxed{4}"]) == {"score": 1.0}


def test_the_command_that_is_suggested_runs_all_that_was_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "test.jsonl").write_text(
        json.dumps({"question": "2 + 2?", "answer": "#### 4"}) + "\n"
    )
    row = {"question": "Which?", "options": {"A": "this", "B": "that"}, "answer_idx": "B"}
    (tmp_path / "data" / "medqa_usmle_4opt_test.jsonl").write_text(json.dumps(row) + "\n")
    some = ["--task", "gsm8k", "--task", "medqa", "--data", "data"]
    assert main(["eval", "export-tasks", "my tasks", *some]) == 0
    err = capsys.readouterr().err
    assert err.strip().endswith("--include_path 'my tasks' --tasks deftune_gsm8k,deftune_medqa")
    assert main(["eval", "export-tasks", "suites", "--suite", "math", "--data", "data"]) == 0
    assert capsys.readouterr().err.strip().endswith("--include_path suites --tasks deftune_gsm8k")  # in no average
    assert main(["eval", "export-tasks", "medical", "--suite", "medical", "--data", "data"]) == 0
    assert capsys.readouterr().err.strip().endswith("--include_path medical --tasks deftune_medical")


def test_a_folder_that_holds_something_is_left_alone(exported, capsys):
    with pytest.raises(ValueError, match="is not empty; name another folder"):
        export_tasks(exported, {})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--suite", "heldout"], "unknown suite 'heldout'"),
        ([], "--suite: name a suite"),
        (["--task", "nejm", "--data", "."], "nejm: not below ."),
    ],
)
def test_wrong_calls_are_one_line(options, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "export-tasks", "tasks", *options]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1 and not list(tmp_path.iterdir())


# The harness itself --------------------------------------------------------------------------------------------------

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason='lm_eval is missing: pip install "lm_eval[hf]"')
ITS_OWN = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def run_harness(model, folder, tasks, out, *more):
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--include_path", str(folder),
               "--model_args", f"pretrained={model},dtype=float32", "--tasks", tasks, "--output_path", str(out),
               "--log_samples", *more]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    [results] = out.rglob("results_*.json")
    samples = [json.loads(line) for path in sorted(out.rglob("samples_*.jsonl")) for line in path.open()]
    return json.loads(results.read_text())["results"], samples


@pytest.mark.slow
@needs_harness
def test_the_harness_gives_the_same_answers_and_scores(tmp_path, monkeypatch, data):
    from deftune.artifacts.models import resolve_model

    monkeypatch.chdir(tmp_path)
    some = ["--task", "gsm8k", "--task", "medqa", "--limit", "2", "--data", str(data)]
    assert main(["eval", "export-tasks", "tasks", *some]) == 0
    assert main(["eval", "run", "smollm2", *some, "--max-new-tokens", "24", "--out", "ours"]) == 0
    ours = {r["id"]: r for r in map(json.loads, (tmp_path / "ours" / "graded.jsonl").open())}
    results, samples = run_harness(
        resolve_model("smollm2"), tmp_path / "tasks", "deftune_gsm8k,deftune_medqa", tmp_path / "theirs",
        "--apply_chat_template", "--gen_kwargs", "max_gen_toks=24",
    )  # fmt: skip
    assert len(samples) == 4
    for sample in samples:
        mine = ours[sample["doc"]["id"]]
        assert sample["resps"][0][0] == mine["text"] and sample["score"] == mine["score"]
    for name in ("gsm8k", "medqa"):
        scores = [r["score"] for r in ours.values() if r["task"] == name]
        assert results[f"deftune_{name}"]["score,none"] == sum(scores) / 2


@pytest.mark.slow
@needs_harness
def test_its_tasks_run_on_a_runs_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "run: runs/a\nmodel: {name: smollm2, lora: {r: 2}}\n"
        "data: {train: [{generate: gsm_symbolic, limit: 4}], max_length: 256}\n"
        "train: {batch_size: 4, micro_batch_size: 1, max_steps: 1}\n"
    )
    assert main(["train", "run.yaml"]) == 0
    assert main(["merge", "runs/a"]) == 0
    rows = [{"question": "The sky is", "choices": [" blue", " carpet"], "answer": 0},
            {"question": "Grass is", "choices": [" typewriter", " green"], "answer": 1}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "colours.yaml").write_text(ITS_OWN % (tmp_path / "rows.jsonl"))
    results, _ = run_harness("runs/a/merged", tmp_path / "tasks", "colours", tmp_path / "out")
    assert results["colours"]["acc,none"] == 1.0
