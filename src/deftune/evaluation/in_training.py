"""Score tasks at every evaluation of a training run: greedy answers, graded as by `deftune eval run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deftune.artifacts.config import RunConfig, TaskSource
from deftune.artifacts.results import encoder_options, prompt_options
from deftune.evaluation.items import Item, read_task
from deftune.evaluation.kinds import score_answers
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Prompt
from deftune.evaluation.suites import Task, task_named


def task_scorer(config: RunConfig) -> Callable[[Any, Any], dict[str, float]] | None:
    """A function (model, tokenizer) -> {task: mean score} for `train_run`; None if the config names no task.

    The questions are read here, so that missing data is an error before the training starts.
    """
    if not config.data.tasks:
        return None
    tasks: list[tuple[TaskSource, Task, list[Item]]] = []
    for source in config.data.tasks:
        task = task_named(source.name)
        tasks.append((source, task, read_task(task, source.path, limit=source.limit)))
    options = prompt_options(encoder_options(config.data))

    def score(model: Any, tokenizer: Any) -> dict[str, float]:
        sampler = TransformersSampler(model, tokenizer, encoder_options=options)
        scores: dict[str, float] = {}
        for source, task, items in tasks:
            outputs = sampler.sample(
                [Prompt(item.id, item.prompt) for item in items], samples=1, temperature=0.0, top_p=1.0,
                max_new_tokens=source.max_new_tokens or task.max_new_tokens, seed=0,
            )  # fmt: skip
            answers = {output.id: output for output in outputs}
            texts = {name: "" if answer.finish == "error" else answer.text for name, answer in answers.items()}
            graded = score_answers(
                [(task.kind, item, texts[item.id]) for item in items],
                finishes=[answers[item.id].finish for item in items],
            )
            scores[task.name] = sum(float(record["score"]) for record in graded) / len(graded)
        return scores

    return score
