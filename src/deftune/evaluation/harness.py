"""Export tasks to EleutherAI's lm-evaluation-harness, with the same prompts, golds and verdicts.

`export_tasks` writes the items (JSONL) and a task file (YAML) of each task, a group for each suite, and a small Python
file that reads the items and passes answers to `process_results`. `lm_eval` generates, deftune extracts and grades.
Paths are relative, so the folder may be moved.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from deftune.artifacts.files import write_atomic
from deftune.evaluation.answers import Rule
from deftune.evaluation.grading import Grader
from deftune.evaluation.items import Item
from deftune.evaluation.kinds import KINDS, score_answers
from deftune.evaluation.suites import Suite, Task

MODULE = "deftune_scoring"
PREFIX = "deftune_"
_SHIM = '''"""Reads and scores the tasks beside this file; written by `deftune eval export-tasks`."""

from pathlib import Path

from deftune.evaluation.harness import process_results, read_documents

__all__ = ["process_results", "read_items"]


def read_items(file, **others):
    return read_documents(Path(__file__).parent / file)
'''


def export_tasks(folder: Path, tasks: Mapping[str, tuple[Task, list[Item]]], suites: Sequence[Suite] = ()) -> list[str]:
    """Write the tasks into a new or empty folder, and return their names in the harness."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir()
    write_atomic(folder / f"{MODULE}.py", _SHIM)
    for name, (task, items) in tasks.items():
        lines = [json.dumps(_document(task, item)) + "\n" for item in items]
        file = f"data/{name}.jsonl"
        write_atomic(folder / file, "".join(lines))
        write_atomic(folder / f"{name}.yaml", _task_file(task, file))
    names = [PREFIX + name for name in tasks]
    for suite in suites:
        have = [PREFIX + name for name in suite.averaged if name in tasks]
        if not have:  # the harness has no average of nothing
            continue
        group = {
            "group": PREFIX + suite.name,
            "task": have,
            "aggregate_metric_list": [{"metric": "score", "aggregation": "mean", "weight_by_size": False}],
            "metadata": {"version": 1},
        }
        write_atomic(folder / f"group_{suite.name}.yaml", yaml.safe_dump(group, sort_keys=False))
        names.append(PREFIX + suite.name)
    return names


def _document(task: Task, item: Item) -> dict[str, Any]:
    """The exported row of an item; options and rule are JSON, so that every row has the same columns."""
    return {
        "id": item.id, "kind": task.kind, "prompt": item.prompt, "gold": item.gold,
        "options": json.dumps(item.options), "rule": json.dumps(asdict(item.rule)),
    }  # fmt: skip


def _task_file(task: Task, file: str) -> str:
    metrics = ["score", *KINDS[task.kind].columns]
    content = {
        "task": PREFIX + task.name,
        "dataset_path": "",  # the harness wants the key, and the function below reads the items
        "custom_dataset": "FUNCTION read_items",
        "dataset_kwargs": {"file": file},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{gold}}",
        "process_results": "FUNCTION process_results",
        "generation_kwargs": {
            "until": [],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": task.max_new_tokens,
        },
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
        "metadata": {"version": task.version},
    }
    # the harness's own tag, which no plain YAML writer knows
    return re.sub(r"\bFUNCTION ", f"!function {MODULE}.", yaml.safe_dump(content, sort_keys=False))


def read_documents(path: Path) -> Any:
    """The exported items as a dataset of the harness: {"test": rows}."""
    import datasets

    return datasets.load_dataset("json", data_files={"test": str(path)})


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The scores of an answer; the harness passes the exported row and the generated text."""
    rule = Rule(**json.loads(doc["rule"]))
    item = Item(doc["id"], doc["prompt"], doc["gold"], json.loads(doc["options"]), rule)
    [scored] = score_answers([(doc["kind"], item, results[0])], grader=_grader())
    return {name: scored[name] for name in ("score", *KINDS[doc["kind"]].columns)}


@functools.cache
def _grader() -> Grader:
    """One grader per process: the harness passes one answer at a time, and a worker takes a second to start."""
    return Grader(workers=1)
