"""Generated regimes: drawn by index, answers that are right, splits that share nothing they should not."""

import hashlib
import sys

import pytest

from deftune.data.formats import check_conversation
from deftune.data.generated import FIGLET_TEST, FIGLET_TRAIN, GENERATORS, generate

gym = pytest.importorskip("reasoning_gym")

ALL = [(name, split) for name, generator in GENERATORS.items() for split in generator.splits]


def texts(rows):
    return [(row.messages[0]["content"], row.messages[1]["content"]) for row in rows]


def index(row):
    return int(row.where.rpartition("[")[2][:-1])


@pytest.mark.parametrize(("name", "split"), ALL)
def test_rows_are_whole_the_same_again_and_a_prefix_of_more(name, split):
    rows = generate(name, split=split, size=30)
    assert [check_conversation(list(row.messages)) for row in rows] == [row.messages for row in rows]
    assert rows == generate(name, split=split, size=40)[:30]
    assert rows != generate(name, split=split, size=30, seed=7)
    assert {row.source for row in rows} == {name} and len({row.where for row in rows}) == 30


@pytest.mark.parametrize("name", sorted(set(GENERATORS) - {"figlet_font"}))
def test_items_are_reasoning_gyms_own(name):
    items = gym.create_dataset(name, seed=42, size=500)
    for row in generate(name, size=200):
        item = items[index(row)]
        assert row.messages[0]["content"] == item["question"].strip()
        assert row.messages[1]["content"].endswith(item["answer"])


@pytest.mark.parametrize("name", ["gsm_symbolic", "word_sorting", "sentence_reordering"])
def test_train_and_test_share_nothing(name):
    train, test = generate(name, size=3000), generate(name, split="test", size=300)
    assert not {index(row) for row in train} & {index(row) for row in test}
    assert not {question for question, _ in texts(train)} & {question for question, _ in texts(test)}
    if name != "gsm_symbolic":  # where answers are short and few
        assert not {answer for _, answer in texts(train)} & {answer for _, answer in texts(test)}


def test_gsm_symbolic_reasons_and_ends_in_its_answer():
    items = gym.create_dataset("gsm_symbolic", seed=42, size=1000)
    for row in generate("gsm_symbolic", size=500):
        steps, end = row.messages[1]["content"].rsplit("\n", 1)
        assert end == f"#### {items[index(row)]['answer']}" and "####" not in steps and steps.strip()


def test_sentences_are_put_back_in_order():
    source = gym.create_dataset("sentence_reordering", seed=42, size=1).sentences
    sentences = {" ".join(sentence.split()) for sentence in source}
    for question, answer in texts(generate("sentence_reordering", size=300)):
        assert answer in sentences  # reasoning_gym's own answer is not, where a word occurs twice
        assert sorted(
            question.removeprefix("Restore the correct order of words in the following sentence: ").split()
        ) == (sorted(answer.split()))


# figlet_font: the paper's weak regime --------------------------------------------------------------------------------


def figlet(split, size, seed=42):
    return generate("figlet_font", split=split, size=size, seed=seed)


def test_figlet_ranges_are_the_papers():
    assert (FIGLET_TRAIN, FIGLET_TEST) == (range(0, 40_000), range(40_000, 45_000))
    assert [index(row) for row in figlet("train", 50)] == list(range(50))
    assert [index(row) for row in figlet("test", 50)] == list(range(40_000, 40_050))
    assert all(2 <= len(answer) <= 5 and answer.isupper() for _, answer in texts(figlet("train", 300)))


def test_figlet_items_are_reasoning_gyms_with_sorted_fonts(monkeypatch):
    from reasoning_gym.cognition import figlet_fonts

    monkeypatch.setattr(figlet_fonts, "OK_FONTS", sorted(set(figlet_fonts.OK_FONTS)))
    items = gym.create_dataset("figlet_font", seed=42, size=1, min_word_len=2, max_word_len=5, space_letters=True)
    assert texts(figlet("train", 100)) == [(items[i]["question"], items[i]["answer"]) for i in range(100)]


def test_figlet_is_the_same_everywhere():
    digest = hashlib.sha256(repr(texts(figlet("train", 50))).encode()).hexdigest()
    assert digest[:16] == "f1e7ad25c5bb5a79"


def test_figlet_heldout_words_never_occur_in_train():
    rows = figlet("heldout_words", 200)
    from deftune.data.generated import _train_words

    assert all(index(row) >= FIGLET_TEST.stop for row in rows)
    assert not {answer for _, answer in texts(rows)} & _train_words(42)
    assert {answer for _, answer in texts(figlet("train", 300))} <= _train_words(42)


def test_figlet_heldout_fonts_never_occur_in_reduced_train(monkeypatch):
    from deftune.data import generated as regimes

    used = []
    real = regimes._figlet
    monkeypatch.setattr(regimes, "_figlet", lambda font: used.append(font) or real(font))
    held = figlet("heldout_fonts", 400)
    held_fonts, used = set(used), []
    reduced = figlet("train_reduced", 3000)
    assert len(held_fonts) > 30 and not held_fonts & set(used) and len(set(used)) > 300
    assert all(index(row) >= FIGLET_TEST.stop for row in held)
    assert {index(row) for row in reduced} < set(FIGLET_TRAIN) and index(reduced[-1]) < 3000 * 1.25


def test_a_range_has_an_end(monkeypatch):
    from deftune.data import generated as regimes

    monkeypatch.setattr(regimes, "FIGLET_TEST", range(40_000, 40_003))
    with pytest.raises(
        ValueError, match="figlet_font: split 'test' has 3 rows, 4 were asked for; ask for at most those"
    ):
        figlet("test", 4)


# Errors and the table ------------------------------------------------------------------------------------------------


def test_what_cannot_be_generated():
    with pytest.raises(
        ValueError, match=r"unknown generated regime 'figlet'\. Did you mean 'figlet_font'\? Known: gsm_symbolic, "
    ):
        generate("figlet", size=1)
    with pytest.raises(ValueError, match=r"word_sorting: unknown split 'heldout_words'\. Known: train, test"):
        generate("word_sorting", split="heldout_words", size=1)
    with pytest.raises(ValueError, match="word_sorting: size is at least 1, got 0"):
        generate("word_sorting", size=0)


@pytest.mark.parametrize("name", GENERATORS)
def test_without_reasoning_gym_it_says_what_to_install(monkeypatch, name):
    from deftune.data import generated as regimes

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    regimes._figlet_words.cache_clear()
    regimes._figlet_fonts.cache_clear()
    with pytest.raises(ImportError, match=rf'{name}: generated by reasoning_gym, .*; pip install "deftune\[train\]"'):
        generate(name, size=1)
