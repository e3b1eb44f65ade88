"""The measure of a ranking: corruptions change the answer and nothing else; metrics are their definitions."""

import itertools
import json
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from deftune.data.formats import FORMATS
from deftune.data.sources import read_fields

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from corruptions import CORRUPTIONS, corrupt_final, corrupt_key, corrupt_result, ranking_quality, resamples
from corruptions import wrong_number as wrong

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = {"gsm8k": "gsm8k/train.jsonl.gz", "medmcqa": "medical_eval/medmcqa_validation.jsonl.gz"}


@pytest.mark.parametrize("number", ["7", "72", "1,072", "-30", "100"])
def test_a_wrong_number_is_written_as_the_right_one(number):
    for seed in range(50):
        other = wrong(number, Random(seed))
        differing = [i for i, (a, b) in enumerate(zip(number, other)) if a != b]
        assert len(other) == len(number) and len(differing) == 1 and other[differing[0]].isdigit()
        assert not (other.lstrip("-")[0] == "0" and len(number.lstrip("-")) > 1)


def test_final_changes_the_last_line_alone():
    row = {"question": "?", "answer": "48+24 = <<48+24=72>>72 clips\n#### 72"}
    changed = corrupt_final(row, Random(1))
    assert changed["answer"].startswith("48+24 = <<48+24=72>>72 clips\n#### ") and changed["answer"] != row["answer"]
    assert row["answer"].endswith("#### 72")
    assert corrupt_final({"question": "?", "answer": "no number"}, Random(1)) is None


def test_result_changes_what_is_said_and_what_is_marked():
    changed = corrupt_result(
        {"question": "?", "answer": "She had 72.\n48+24 = <<48+24=72>>72 clips\n#### 72"}, Random(1)
    )
    marked = changed["answer"].rsplit(" ", 1)[1]
    assert marked != "72"
    assert changed["answer"] == f"She had 72.\n48+24 = <<48+24=72>>{marked} clips\n#### {marked}"
    assert corrupt_result({"question": "?", "answer": "172 clips\n#### 72"}, Random(1)) is None


def test_key_names_another_option():
    keys = {corrupt_key({"cop": 2, "opa": "x"}, Random(seed))["cop"] for seed in range(50)}
    assert keys == {1, 3, 4}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_on_real_rows_only_the_answer_changes(name):
    path = DATA / FILES[name.split("-")[0]]
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    corruption, changed = CORRUPTIONS[name], 0
    convert = FORMATS[corruption.format].convert
    for place, (_, row) in enumerate(itertools.islice(read_fields(path), 200)):
        before = json.dumps(row)
        bad = corruption.corrupt(row, Random(place))
        assert json.dumps(row) == before  # the row given is left alone
        if bad is None:
            continue
        (*asked, good), (*still_asked, bad_answer) = convert(row)[0], convert(bad)[0]
        assert asked == still_asked and good != bad_answer
        changed += 1
    assert changed > 180


def average_precision(score, truth):
    """By its definition, for scores that differ."""
    order = np.argsort(-score)
    hits = [truth[order[: i + 1]].mean() for i in range(len(order)) if truth[order[i]]]
    return np.mean(hits)


def test_quality_is_its_definition():
    draw = np.random.default_rng(0)
    for _ in range(20):
        score, truth = draw.normal(size=30), np.arange(30) % 5 == 0
        found = ranking_quality(score, truth, np.ones((1, 30)), shares=[0.2])
        pairs = [score[a] > score[b] for a in np.flatnonzero(truth) for b in np.flatnonzero(~truth)]
        best = np.argsort(-score)[:6]
        assert found.average_precision[0] == pytest.approx(average_precision(score, truth))
        assert found.auroc[0] == pytest.approx(np.mean(pairs))
        assert found.precision[0.2][0] == pytest.approx(truth[best].mean())
        assert found.recall[0.2][0] == pytest.approx(truth[best].sum() / 6)


def test_a_resample_counts_rows_as_often_as_they_were_drawn():
    """Weights give what the drawn rows give, written out (equal scores of equal truth: any order)."""
    draw = np.random.default_rng(1)
    score, truth, weights = draw.normal(size=12), np.arange(12) % 3 == 0, resamples(12, 5, seed=2)
    assert weights.sum(1).tolist() == [12] * 6
    found = ranking_quality(score, truth, weights)
    for row, counts in enumerate(weights):
        drawn = np.repeat(np.arange(12), counts)
        pairs = [score[a] > score[b] for a in drawn[truth[drawn]] for b in drawn[~truth[drawn]]]
        assert found.auroc[row] == pytest.approx(np.mean(pairs))


def test_rows_without_a_score_come_last():
    truth = np.array([True, False, False])
    found = ranking_quality(np.array([np.nan, 1.0, 2.0]), truth, np.ones((1, 3)), shares=[1 / 3])
    assert (found.auroc[0], found.precision[1 / 3][0]) == (0.0, 0.0)


def test_equal_scores_rank_by_chance_not_by_place():
    """500 equal scores, the first 50 true: an order that kept their places would score 1."""
    truth = np.arange(500) < 50
    found = ranking_quality(np.zeros(500), truth, np.ones((1, 500)))
    assert abs(found.auroc[0] - 0.5) < 0.12
