"""What a run is made of: every bad row is written down, the fingerprint is that of the tokens, tokens fit the model."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from dataclasses import make_dataclass
from pathlib import Path

import numpy as np
import pytest
import transformers
import yaml

import tiny
from deftune.artifacts.results import encoder_options
from deftune.artifacts.runs import Run
from deftune.cli import main
from deftune.data import parallel
from deftune.data.encoding import Encoder, encode_rows
from deftune.data.examples import Examples
from deftune.data.mixing import split_places
from deftune.data.packing import Packs, pack
from deftune.data.sources import read_rows
from deftune.training import display
from deftune.training.assembly import checkpointing_argument, make_arguments
from deftune.training.data_record import facts, fingerprint, fingerprint_of_lists, record_data
from deftune.training.preparation import check_embedding, prepare


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("parallel_too", [False, True])
def test_the_fingerprint_is_that_of_the_rows_encoded_one_by_one(
    make_config, tmp_path, chat_file, monkeypatch, packing, parallel_too
):
    """Runs that were begun by an earlier version are resumed: neither digest must change."""
    if parallel_too:
        monkeypatch.setattr(parallel, "SMALL_BYTES", 0)
        monkeypatch.setattr(parallel, "CHUNK_BYTES", 2000)
        monkeypatch.setenv("DEFTUNE_DATA_WORKERS", "2")
    config = make_config(tmp_path / "run", {"data.packing": packing, "data.holdout": 0.25})
    prepared = prepare(config, silent)
    encoder = Encoder(prepared.tokenizer, **encoder_options(config.data))
    rows = read_rows(chat_file)
    train, held = (encode_rows([rows[i] for i in side], encoder) for side in split_places(rows, 0.25, 1))
    sequences = list(pack(list(train.examples), 128)) if packing else list(train.examples)
    digest = hashlib.sha256()
    for sequence in [*sequences, *held.examples]:
        digest.update(json.dumps([sequence.input_ids, sequence.labels]).encode())
    assert fingerprint_of_lists(prepared) == digest.hexdigest()
    packs = pack(train.examples, 128) if packing else None
    digest = hashlib.sha256()
    for examples, members in ((train.examples, packs.members if packs else []), (held.examples, [])):
        columns = [np.array([len(e.input_ids) for e in examples], "<i4"),
                   np.array([token for e in examples for token in e.input_ids], "<i4"),
                   np.array([label != -100 for e in examples for label in e.labels], "u1"),
                   np.array([len(m) for m in members], "<i8"),
                   np.array([i for m in members for i in m], "<i8")]  # fmt: skip
        for column in columns:
            digest.update(f"{len(column)}\n".encode() + column.tobytes())
    assert fingerprint(prepared) == f"arrays-{digest.hexdigest()}"
    assert prepared.train.facts() == train.facts()


@pytest.mark.parametrize("change", ["a token", "a mask", "a boundary", "a pack"])
def test_the_fingerprint_sees_every_change_of_the_sequences(make_config, tmp_path, change):
    prepared = prepare(make_config(tmp_path / "run", {"data.packing": True}), silent)
    before, examples = fingerprint(prepared), Examples(prepared.train.examples)  # in memory, to be changed
    columns = {name: column.copy() for name, column in examples.columns.items()}
    if change == "a token":
        columns["input_ids"][7] += 1
    elif change == "a mask":
        columns["supervised"][-1] ^= 1
    elif change == "a boundary":
        columns["rows"]["size"][:2] += np.array([1, -1], "<i4")
    members = prepared.sequences.members if change != "a pack" else prepared.sequences.members[::-1]
    examples._columns = columns
    prepared.sequences = Packs(examples, members)
    assert fingerprint(prepared) != before


def test_a_run_of_an_earlier_version_is_resumed(make_config, tmp_path):
    """Its data.json has the fingerprint of lists, which is checked and then replaced."""
    prepared = prepare(make_config(tmp_path / "run"), silent)
    run = Run(tmp_path)
    (tmp_path / "data.json").write_text(json.dumps({"fingerprint": fingerprint_of_lists(prepared)}))
    record_data(prepared, run)
    assert json.loads((tmp_path / "data.json").read_text())["fingerprint"] == fingerprint(prepared)
    for wrong in ("0" * 64, "arrays-" + "0" * 64):
        (tmp_path / "data.json").write_text(json.dumps({"fingerprint": wrong}))
        with pytest.raises(ValueError, match="the data is not what the run began with"):
            record_data(prepared, run)


@pytest.fixture
def mixed_file(tmp_path, chat_file) -> Path:
    """Good rows, and seven bad ones: one that cannot be read and six that the encoder refuses."""
    path = tmp_path / "mixed.jsonl"
    refused = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a <|im_end|> b"}]}
    first = {"messages": [{"role": "assistant", "content": "I begin."}]}
    lines = [*chat_file.read_text().splitlines(), "{oops", json.dumps(first), *[json.dumps(refused)] * 5]
    path.write_text("\n".join(lines) + "\n")
    return path


def bad_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_bad_rows(rows: list[dict[str, str]], data: Path) -> None:
    assert [row["where"] for row in rows] == [f"{data}:{line}" for line in range(61, 68)]
    assert rows[0]["reason"].startswith("not JSON") and rows[0]["raw"] == "{oops\n"
    assert "the chat template fails on these messages (roles: none)" in rows[1]["reason"]
    for row in rows[2:]:
        assert "the text spells the end-of-turn token <|im_end|>" in row["reason"]
        assert json.loads(row["raw"])["messages"][1]["content"] == "a <|im_end|> b"


def test_train_writes_every_bad_row(make_config, tmp_path, mixed_file):
    from deftune.training.train import train_run

    more = {"data.train": [{"path": str(mixed_file)}], "data.skip_bad_rows": True, "train.max_steps": 1}
    train_run(make_config(tmp_path / "run", more))
    check_bad_rows(bad_rows(tmp_path / "run" / "bad_rows.jsonl"), mixed_file)


def test_dry_run_counts_every_bad_row(make_config, tmp_path, mixed_file):
    config = make_config(tmp_path / "run", {"data.train": [{"path": str(mixed_file)}], "data.skip_bad_rows": True})
    assert (
        "7 rows skipped: 6 mask not verified, 1 not JSON; bad_rows.jsonl in the run's folder lists each with its reason"
        in facts(prepare(config, silent))
    )


def test_preview_writes_every_bad_row(tmp_path, mixed_file, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["data", "preview", str(mixed_file), "--model", str(tiny_model)]
    assert main([*command, "--rows", "60", "--skip-bad-rows"]) == 0 and not (tmp_path / "bad_rows.jsonl").exists()
    assert main(command) == 2
    capsys.readouterr()
    assert main([*command, "--skip-bad-rows"]) == 0
    assert "7 rows skipped: 6 mask not verified, 1 not JSON; see bad_rows.jsonl" in capsys.readouterr().err
    check_bad_rows(bad_rows(tmp_path / "bad_rows.jsonl"), mixed_file)


def test_a_token_without_an_embedding_is_refused(make_config, tmp_path, tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    small = tmp_path / "small"
    tiny.make_model(tokenizer, vocab_size=200).save_pretrained(small)
    tokenizer.save_pretrained(small)
    with pytest.raises(ValueError) as raised:
        prepare(make_config(tmp_path / "run", {"model.name": str(small)}), silent)
    text = str(raised.value)
    assert f"the tokenizer of {small} has {len(tokenizer)} tokens and the model's embedding 200: token " in text
    assert "chat.jsonl:1) has no embedding" in text and f"resize_token_embeddings({len(tokenizer)})" in text


def test_tokens_that_no_row_uses_need_no_embedding(make_config, tmp_path, tiny_model):
    """Gemma 3 has one more than its embedding, for images."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    size = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(folder)
    prepared = prepare(make_config(tmp_path / "run", {"model.name": str(folder)}), silent)
    assert len(prepared.tokenizer) == size + 1
    prepared.tokenizer.pad_token = "<image>"
    with pytest.raises(ValueError, match=r"token \d+ \('<image>', the padding token\) has no embedding"):
        check_embedding(prepared.train, prepared.tokenizer, str(folder))


def test_rows_longer_than_the_models_context_are_a_warning(make_config, tmp_path, tiny_model):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    content = json.loads((folder / "config.json").read_text())
    prepared = prepare(make_config(tmp_path / "run", {"model.name": str(folder)}), silent)
    longest = max(prepared.train.examples.sizes)
    for context, warned in ((longest, False), (longest - 1, True)):
        (folder / "config.json").write_text(json.dumps({**content, "max_position_embeddings": context}))
        expected = f"WARNING: the longest row has {longest} tokens, and the model was made for {context} "
        assert any(line.startswith(expected) for line in facts(prepared)) is warned


@pytest.mark.parametrize(
    ("eval_steps", "stop_after", "warning"),
    [
        (7, None, "WARNING: train.eval_steps 7 is more than the run's 6 steps: it is evaluated only at the end"),
        (3, 2, "WARNING: train.stop_after 2 cannot stop a run of 6 steps that is evaluated every 3; lower"),
        (2, 2, None),
        (6, None, None),
    ],
)
def test_evaluations_that_come_too_late_are_named(make_config, tmp_path, eval_steps, stop_after, warning):
    more = {"data.holdout": 0.25, "train.max_steps": 6, "train.epochs": 50, "train.eval_steps": eval_steps}
    more |= {"train.best": "eval_nll", "train.stop_after": stop_after} if stop_after else {}
    found = [line for line in facts(prepare(make_config(tmp_path / "run", more), silent)) if "WARNING: train." in line]
    assert [line[: len(warning or "")] for line in found] == ([warning] if warning else [])


def test_a_second_start_takes_the_encoded_rows_from_the_cache(make_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", "1")
    config = make_config(tmp_path / "run", {"data.holdout": 0.25})
    said: list[str] = []
    first = prepare(config, silent)
    second = prepare(config, said.append)
    assert sum("rows were encoded before" in text for text in said) == 2
    assert fingerprint(first) == fingerprint(second) and facts(first) == facts(second)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "rows were encoded before" in capsys.readouterr().out
    assert main(["train", str(path), "--dry-run", "--no-cache"]) == 0
    assert "rows were encoded before" not in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "rest"), [(None, ""), (3, ", without its evaluations")])
def test_a_dry_run_estimates_short_runs_too(make_config, tmp_path, capsys, steps, rest):
    """A run of some seconds was "the run 0 min"."""
    config = make_config(tmp_path / "run", {"data.holdout": 0.2, "train.eval_steps": steps})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert main(["train", str(path), "--dry-run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"a step takes about [1-9]\S* m?s, the run [1-9]\d* (ms|s|min \d+ s){rest}", last), last


def test_an_error_about_the_rows_to_evaluate_on_names_them(make_config, tmp_path, chat_file):
    long = tmp_path / "long.jsonl"
    prompt = {"role": "user", "content": "What is 12 plus 30? " * 200}
    long.write_text(json.dumps({"messages": [prompt, {"role": "assistant", "content": "42"}]}) + "\n")
    config = make_config(tmp_path / "run", {"data.eval": [{"path": str(long)}]})
    with pytest.raises(ValueError, match=r"rows to evaluate on \(data.eval\): no row has a supervised token left"):
        prepare(config, silent)


def test_a_long_preparation_says_something_every_ten_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    said: list[str] = []
    with display.RowProgress("encoding rows", 40, said.append) as progress:
        for row in range(40):
            clock[0] += 1
            progress.update(row + 1)
    assert said == [
        "encoding rows: 10 of 40 (25%), 10 s", "encoding rows: 20 of 40 (50%), 20 s",
        "encoding rows: 30 of 40 (75%), 30 s", "encoding rows: 40 of 40 (100%), 40 s",
    ]  # fmt: skip
    with display.RowProgress("reading a.jsonl", None, said.append, shown=False) as progress:
        clock[0] += 100
        progress.update(1)
    assert len(said) == 4


# --- transformers' arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [False, True])
def test_the_arguments_use_no_name_that_transformers_will_remove(make_config, tmp_path, on):
    prepared = prepare(make_config(tmp_path / "run", {"train.gradient_checkpointing": on}), silent)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert make_arguments(prepared, Run(tmp_path / "run")).gradient_checkpointing is on


def test_an_older_transformers_gets_its_own_name(monkeypatch):
    monkeypatch.setattr("trl.SFTConfig", make_dataclass("Older", [("gradient_checkpointing", bool)]))
    assert checkpointing_argument(True) == {"gradient_checkpointing": True}
