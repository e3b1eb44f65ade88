"""Tasks that are scored while a model is trained, and the best step by their score."""

import os

import pytest
from rich.console import Console

import tiny
from deftune.artifacts.config import RunConfig
from deftune.evaluation import in_training
from deftune.training.train import train_run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = tiny.make_tokenizer(["user assistant system What is one plus two? Three it is. Answer"], size=300)
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


def config_of(folder, model, **more) -> RunConfig:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "What is {i} plus two?", "completion": "Three"}}\n' for i in range(12)))
    train = {"max_steps": 4, "epochs": 10, "batch_size": 4, "micro_batch_size": 4, "eval_steps": 2, "save_steps": 100,
             "precision": "fp32", **more}  # fmt: skip
    return RunConfig.model_validate(
        {
            "run": str(folder / "run"), "model": {"name": str(model)}, "train": train,
            "data": {"train": [{"path": str(rows)}], "eval": [{"path": str(rows), "limit": 2}], "max_length": 64,
                     "tasks": [{"name": "figfont", "limit": 2, "max_new_tokens": 4}]},
        }
    )  # fmt: skip


def train(config, score_tasks):
    with open(os.devnull, "w") as nowhere:
        return train_run(config, Console(file=nowhere), score_tasks=score_tasks)


def test_a_task_is_answered_by_the_model_in_memory_at_every_evaluation(tmp_path, model):
    config = config_of(tmp_path, model)
    records = train(config, in_training.task_scorer(config)).run.read_metrics()
    assert [(r["step"], r["eval_figfont"]) for r in records if r["kind"] == "eval"] == [(2, 0.0), (4, 0.0), (4, 0.0)]
    assert "eval_nll" in records[-1]


def test_the_best_step_by_a_task_is_the_highest_score(tmp_path, model):
    scores = iter([0.75, 0.5, 0.75])  # of steps 2 and 4, then of the weights that were kept
    outcome = train(config_of(tmp_path, model, best="figfont"), lambda model, tokenizer: {"figfont": next(scores)})
    status = outcome.run.status()
    assert (status["kept"], status["by"], status["value"], status["last"]) == (2, "figfont", 0.75, 0.5)


def test_the_scores_do_not_move_the_training(tmp_path, model):
    """Bit for bit: what a task draws at random is not taken from the run's random state."""
    import torch

    weights = []
    for number, score_tasks in enumerate([lambda *_: {"figfont": float(torch.rand(()))}, lambda *_: {"figfont": 0.0}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = train(config_of(folder, model), score_tasks).run
        weights.append((run.model / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_tasks_without_a_scorer_are_refused(tmp_path, model):
    with pytest.raises(ValueError, match=r"data\.tasks: pass score_tasks=deftune\.evaluation\.in_training"):
        train(config_of(tmp_path, model), None)
