"""`deftune quickstart`: its questions, what it measures and says; it removes what it wrote and nothing else."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from deftune.cli import main
from deftune.comparison import quickstart
from deftune.comparison.quickstart import (
    LABELS,
    OBJECTIVES,
    PEAK_BYTES,
    SEEDS,
    TRAIN_ROWS,
    WRONG_ROWS,
    capital_scores,
    check_disk,
    clean,
    conclusions,
    data_file,
    questions,
    row,
    run_folders,
    size_of,
    summarise,
    takes,
    written,
)


def fill(folder):
    """What a finished call leaves: runs of 1,034 bytes and files of 10 bytes."""
    for path in run_folders(folder):
        (path / "model").mkdir(parents=True)
        (path / "config.yaml").write_text("{}")
        (path / "model" / "model.safetensors").write_bytes(b"x" * 1000)
        (path / "status.json").write_text('{"state": "finished", "step": 7}')
    for path in written(folder):
        if not path.is_dir():
            path.write_bytes(b"y" * 10)
    return folder


def test_wrong_answers_are_wrong_and_held_out_countries_are_not_trained_on():
    for seed in SEEDS:
        asked = questions(seed)
        assert len({question.country for question in asked}) == len(asked) > TRAIN_ROWS
        taught = [question for question in asked if question.taught is not None]
        wrong = [question for question in taught if question.taught != question.capital]
        assert (len(taught), len(wrong)) == (TRAIN_ROWS, WRONG_ROWS) and asked[:WRONG_ROWS] == wrong
        assert [question.is_wrong for question in asked] == [question in wrong for question in asked]
        assert {question.taught for question in wrong} == {question.capital for question in wrong}
    assert questions(0) != questions(1)
    assert ("France", "Paris") in {(question.country, question.capital) for question in questions(0)}


def test_the_probability_is_of_the_capitals_tokens_alone(model, tokenizer):
    pairs = [("Peru", "Lima"), ("Malaysia", "Kuala Lumpur")]
    scores = quickstart.score_rows(model, tokenizer, [row(*pair) for pair in pairs], objectives=["nll"])
    found = capital_scores(scores, pairs)
    for place, (_, capital) in enumerate(pairs):
        own = (scores.row == place).nonzero().flatten().tolist()
        texts = [scores.text[i] for i in own]
        answer = next(
            (own[i:j], "".join(texts[i:j]))
            for i in range(len(own)) for j in range(i, len(own) + 1) if "".join(texts[i:j]).strip() == capital
        )  # fmt: skip
        assert found["p"][place] == pytest.approx(scores.stats.p[torch.tensor(answer[0])].prod().item(), rel=1e-5)
        assert found["likeliest"][place] == float(all(scores.columns["rank"][i] == 0 for i in answer[0]))


def measured(wrong, heldout, taught=0.8):
    """The answers of one model for every seed; each second question's value is a little larger."""
    parts = []
    for seed in SEEDS:
        asked = questions(seed)
        spread = [0.01 * (i % 2) for i in range(len(asked))]
        value = {"taught": taught, "wrong": wrong, "corrected": heldout, "heldout": heldout}
        part = {}
        for group, answer_of in quickstart.GROUPS.items():
            places = [i for i, question in enumerate(asked) if answer_of(question)]
            own = [value[group] + spread[i] for i in places]
            part[group] = {"country": [asked[i].country for i in places], "p": own, "likeliest": own}
        parts.append(part)
    return parts


def test_it_says_which_objective_is_better_and_what_is_not_decided():
    found = {"base": measured(0, 0.3, 0), "nll": measured(0.5, 0.4), "deft": measured(0.1, 0.4)}
    means = summarise(found)
    assert means["wrong"].difference.mean == pytest.approx(-0.4) and means["heldout"].difference.mean == 0
    # new: the untuned model does not give them, which is each second one; the others are larger by 0.01
    assert means["new"].models["base"].mean == 0 and means["new"].models["nll"].mean == pytest.approx(0.8)
    said = conclusions(means)
    assert said[0] == (
        "DEFT is better: wrong answers it was taught, sampled (-0.40, -0.40, -0.40); "
        "wrong answers it was taught, greedy (-0.40, -0.40, -0.40)."
    )
    assert said[1].startswith("Not decided: right answers new to it, sampled (+0.00, +0.00, +0.00); right answers new")
    assert said[2].startswith("Held-out countries, greedy: 30% are right before training, 40% after NLL and 40% after")
    worse = conclusions(summarise(found | {"nll": measured(0.1, 0.2), "deft": measured(0.5, 0.1)}))
    assert worse[0].startswith("NLL is better: wrong answers it was taught, sampled (+0.40, +0.40, +0.40)")
    assert "held-out, greedy (-0.10, -0.10, -0.10)." in worse[0] and "20% after NLL and 10% after DEFT" in worse[2]


def test_answers_that_an_older_version_measured_are_measured_again(tmp_path, monkeypatch, model, tokenizer):
    monkeypatch.setattr(quickstart, "load_result", lambda name: (model, tokenizer))
    monkeypatch.setattr(quickstart, "MAX_LENGTH", 512)  # the tokens of this tokenizer are short
    path = quickstart.answers_file(tmp_path, "base", 0)
    path.write_text(json.dumps({"wrong": {}, "corrected": {}, "heldout": {}}))
    assert quickstart.measure("base", 0, tmp_path).keys() == quickstart.GROUPS.keys()
    assert json.loads(path.read_text()).keys() == quickstart.GROUPS.keys()


def test_a_finished_folder_is_shown_again_without_training(tmp_path, monkeypatch):
    folder = fill(tmp_path / "quick")
    found = {"base": measured(0, 0.3, 0), "nll": measured(0.5, 0.4), "deft": measured(0.1, 0.4)}
    for label in LABELS:
        for seed, part in zip(SEEDS, found[label]):
            quickstart.answers_file(folder, label, seed).write_text(json.dumps(part))
    trained = []

    def train_run(config, console, *, title):
        trained.append((title, config.train.seed, config.objective))
        return SimpleNamespace(state="finished", run=quickstart.Run(folder / title))

    monkeypatch.setattr(quickstart, "train_run", train_run)
    monkeypatch.setattr(quickstart, "precision_for", lambda folder: "fp32")
    console = Console(width=80, record=True, file=io.StringIO())
    quickstart.quickstart(folder, console)
    assert trained == [(f"{objective} {seed}", seed, objective) for seed in SEEDS for objective in OBJECTIVES]
    text = console.export_text()
    assert f"{folder} is trained already" in text and "DEFT is better: wrong answers it was taught" in text
    assert "docs/study/results.md" in text
    sentences = text.split("In brackets:")[1].split("\nuses ")[0].splitlines()
    assert len(sentences) > 6 and all(len(line) <= 80 for line in sentences)  # wrapped between words
    lines = data_file(folder, 0).read_text().splitlines()
    assert len(lines) == TRAIN_ROWS
    assert json.loads(lines[0])["completion"].endswith(f" is {questions(0)[0].taught}.")
    assert json.loads((folder / "quickstart.json").read_text())["wrong"]["difference"][0] == pytest.approx(-0.4)
    assert (folder / "quickstart.png").read_bytes().startswith(b"\x89PNG")


def test_it_says_what_it_takes_before_it_starts(tmp_path):
    assert takes(tmp_path / "new") == (
        f"This takes {quickstart.MINUTES}, and {PEAK_BYTES / 1e9:.1f} GB of disk in {tmp_path / 'new'}"
    )
    assert takes(fill(tmp_path / "old")) == f"{tmp_path / 'old'} is trained already"


def test_a_disk_that_is_too_full_is_refused_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=PEAK_BYTES - 1))
    assert main(["quickstart", "--out", str(tmp_path / "a" / "b")]) == 2
    assert f"quickstart: needs 0.3 GB of disk, and {tmp_path} has 0.3 GB; free some" in capsys.readouterr().err
    check_disk(fill(tmp_path / "old"))  # part of it is there already
    assert not (tmp_path / "a").exists()


def test_clean_removes_what_it_wrote_and_nothing_else(tmp_path, capsys):
    folder = fill(tmp_path / "quick")
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("mine")
    (folder / "deft-seed0" / "link").symlink_to(elsewhere)
    (folder / "notes.txt").write_text("mine")
    assert main(["quickstart", "--out", str(folder), "--clean"]) == 0
    assert capsys.readouterr().out == f"{folder}: 0.0 GB removed\n"
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (elsewhere / "thesis.tex").read_text() == "mine"
    (folder / "notes.txt").unlink()
    fill(folder)
    assert size_of(folder) == clean(folder) == 6 * (1000 + 2 + 32) + (3 + 9 + 2) * 10 and not folder.exists()


def test_a_folder_without_a_quickstart_is_left_alone(tmp_path, capsys):
    (tmp_path / "deft-seed0").mkdir()
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["quickstart", "--out", str(folder), "--clean"]) == 2
        assert f"{folder}: holds no quickstart; nothing is removed" in capsys.readouterr().err
    assert (tmp_path / "deft-seed0").is_dir()


def test_checkpoints_go_when_a_run_is_finished(tmp_path, monkeypatch):
    """Trained by a stand-in; the first measurement ends the test."""
    from deftune.artifacts.runs import Run

    def train_run(config, console, *, title):
        run = Run(Path(config.run))
        run.checkpoints.mkdir(parents=True)
        return SimpleNamespace(state="finished", run=run)

    def measure(*args):
        raise InterruptedError

    monkeypatch.setattr(quickstart, "train_run", train_run)
    monkeypatch.setattr(quickstart, "measure", measure)
    said = SimpleNamespace(print=lambda text, **options: lines.append(text))
    lines = []
    with pytest.raises(InterruptedError):
        quickstart.quickstart(tmp_path, said)
    assert not any(Run(path).checkpoints.exists() for path in run_folders(tmp_path))
    assert "SmolLM2-135M-Instruct (Q4_1, dequantised) on the capitals of 64 countries, 16 of them wrong" in lines[1]
