"""Token tables: every number is that of the logits, whatever the batch; every text is there; nothing half-written."""

import json
import math
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import Gemma2ForCausalLM

from deftune import objective, token_stats
from deftune.artifacts.results import encoding_of, load_result, reading_of
from deftune.cli import main
from deftune.comparison.summary import table_record
from deftune.data.encoding import Encoder, encode_rows
from deftune.evaluation.heldout import evaluate_heldout
from deftune.objectives import Context
from deftune.tokens import passes
from deftune.tokens import table as tokens
from deftune.tokens.head import shifted
from deftune.tokens.passes import Measurement, batches_of, token_passes
from deftune.tokens.table import (
    METADATA_KEY,
    ROW_SCHEMA,
    TOKEN_COLUMNS,
    make_token_table,
    read_rows_table,
    read_token_table,
    rows_path,
    table_facts,
    table_objectives,
    token_batches,
    token_schema,
    write_token_table,
)
from tiny_chat import make_model, make_row

OBJECTIVES = ("nll", "linear", "cayley", "deft", "eaft", "deft | eos(nll)", "top(0.1)")


@pytest.fixture(scope="module")
def table(tmp_path_factory, model, tokenizer, rows):
    path = tmp_path_factory.mktemp("tables") / "tokens.parquet"
    written = write_token_table(
        path, model, tokenizer, rows, objectives=OBJECTIVES, batch_tokens=300, facts={"model": "tiny", "data": "rows"}
    )
    assert written.tokens == path and written.rows == rows_path(path)
    found = read_token_table(path)
    assert written.num_tokens == found.num_rows
    return path, found


def column(table, name):
    return np.asarray(table[name])


def floats(table):
    return [name for name in table.column_names if table.schema.field(name).type == pa.float32()]


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_the_schema_is_fixed(table):
    _, found = table
    assert found.schema.names[: len(TOKEN_COLUMNS)] == [
        "row", "position", "token_id", "text", "log_p", "p", "entropy", "concentration", "rank", "top_id", "top_text",
        "top_log_p", "other_id", "other_text", "other_log_p", "is_eos", "is_format",
    ]  # fmt: skip
    assert found.schema.remove_metadata() == token_schema(OBJECTIVES)
    assert table_objectives(found) == list(OBJECTIVES)
    facts = table_facts(found)
    assert facts["model"] == "tiny" and facts["objectives"] == list(OBJECTIVES) and "im_start" in facts["template"]
    assert {"version", "data", "max_length", "mask"} <= set(facts)


def test_the_numbers_are_those_of_the_logits_row_by_row(table, model, tokenizer, rows):
    _, found = table
    context = Context(special_ids=(tokenizer.eos_token_id,))
    for place, example in enumerate(encode_rows(rows, Encoder(tokenizer, max_length=2048)).examples):
        mine = found.filter(column(found, "row") == place)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([example.input_ids])).logits[0]
        targets = shifted(torch.tensor(example.labels))
        stats = token_stats(logits, targets)
        positions = (targets != -100).nonzero()[:, 0]
        z = logits[positions].double()
        assert column(mine, "position").tolist() == (positions + 1).tolist()
        assert column(mine, "token_id").tolist() == stats.targets.tolist()
        for name, expected in (
            ("log_p", stats.log_p), ("p", stats.p), ("entropy", stats.entropy), ("concentration", stats.concentration),
        ):  # fmt: skip
            assert np.allclose(column(mine, name), expected, atol=2e-5), name
        log_probs = z.log_softmax(-1)
        own = z.gather(-1, stats.targets[:, None])
        # a batch's rounding may swap two tokens that are as likely: then the rank is off by one
        assert np.abs(column(mine, "rank") - (z > own).sum(-1).numpy()).max() <= 1
        assert np.allclose(column(mine, "top_log_p"), log_probs.amax(-1), atol=2e-5)
        without = log_probs.scatter(-1, stats.targets[:, None], -math.inf)
        assert np.allclose(column(mine, "other_log_p"), without.amax(-1), atol=2e-5)
        for spec in OBJECTIVES:
            gate = objective(spec).gate(stats, context)
            assert np.allclose(column(mine, f"gate:{spec}"), gate, atol=2e-5), spec
            assert np.allclose(column(mine, f"signal:{spec}"), gate * stats.error, atol=2e-5), spec
        assert np.allclose(column(mine, "focus:deft"), stats.concentration, atol=2e-5)
    assert place == len(rows) - 1


def test_the_entropy_at_a_temperature_is_that_of_the_divided_logits(tmp_path, model, tokenizer, rows):
    generator = torch.Generator().manual_seed(0)
    z, targets = 3 * torch.randn(50, 12, generator=generator), torch.randint(12, (50,), generator=generator)
    _, found = Measurement([], Context(), [0.25, 2.0]).measure(z, targets)
    for temperature in (0.25, 2.0):
        divided = torch.distributions.Categorical(logits=z.double() / temperature)
        assert torch.allclose(found[f"entropy:{temperature:g}"].double(), divided.entropy(), atol=1e-5)
    assert (found["entropy:0.25"] < found["entropy"]).all() and (found["entropy"] < found["entropy:2"]).all()
    path = tmp_path / "t.parquet"
    write_token_table(path, model, tokenizer, rows[:2], objectives=["deft"], temperatures=[0.25])
    assert "entropy:0.25" in read_token_table(path).column_names
    record = table_record(path)
    assert list(record["entropies"]) == ["0.25"]
    assert 0 < record["entropies"]["0.25"]["mean"] < record["entropy"]["mean"]


def test_rank_top_and_other_are_what_they_say():
    generator = torch.Generator().manual_seed(0)
    z, targets = torch.randn(200, 12, generator=generator), torch.randint(12, (200,), generator=generator)
    _, found = Measurement([], Context()).measure(z, targets)
    ordered = z.argsort(-1, descending=True)
    expected = [
        (row.index(y), row[0], row[1] if row[0] == y else row[0]) for row, y in zip(ordered.tolist(), targets.tolist())
    ]
    assert list(zip(*(found[name].tolist() for name in ("rank", "top_id", "other_id")))) == expected
    assert len({rank for rank, _, _ in expected}) == 12
    log_probs = z.double().log_softmax(-1)
    for name in ("top", "other"):
        own = log_probs.gather(-1, found[f"{name}_id"][:, None])[:, 0]
        assert torch.allclose(found[f"{name}_log_p"], own, atol=1e-6)


def test_focus_is_null_where_an_objective_has_none(table):
    _, found = table
    nulls = {spec: found[f"focus:{spec}"].null_count for spec in OBJECTIVES}
    assert {spec for spec, count in nulls.items() if count} == {"eaft", "top(0.1)"}
    assert nulls["eaft"] == found.num_rows


def test_end_and_format_tokens_are_marked(table, tokenizer):
    _, found = table
    ends = column(found, "is_eos")
    assert (column(found, "token_id")[ends] == tokenizer.eos_token_id).all() and ends.sum() == 6
    assert (column(found, "is_format") == ends).all()  # nothing else of the template is supervised here


def test_texts_join_to_the_answer(table, rows):
    path, found = table
    beside = read_rows_table(path)
    assert beside.schema.remove_metadata() == ROW_SCHEMA
    for line, row in zip(beside.to_pylist(), rows):
        texts = found.filter(column(found, "row") == line["row"])["text"].to_pylist()
        assert "".join(texts) == line["answer"] == row.messages[-1]["content"] + "<|im_end|>"
        assert line["prompt"] == f"<|im_start|>user\n{row.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert (line["where"], line["num_supervised"], line["truncated"]) == (row.where, len(texts), 0)
    assert "" in found["text"].to_pylist()  # some characters do take several tokens here


def test_the_text_between_answers_is_kept(tmp_path, model, tokenizer):
    path = tmp_path / "tokens.parquet"
    write_token_table(path, model, tokenizer, [make_row("one?", "1", "two?", "2")])
    line, found = read_rows_table(path).to_pylist()[0], read_token_table(path)
    assert line["between"] == ["\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"]
    assert line["answer"] == "1<|im_end|>2<|im_end|>" == "".join(found["text"].to_pylist())
    assert line["num_tokens"] > column(found, "position").max()


def test_rows_left_out_keep_the_places_of_the_others(tmp_path, model, tokenizer):
    rows = [
        make_row("a?", "b", where="x:1"),
        make_row("only a question", where="x:2"),
        make_row("c?", "d", where="x:3"),
    ]
    written = write_token_table(tmp_path / "t.parquet", model, tokenizer, rows)
    assert read_rows_table(tmp_path / "t.parquet")["row"].to_pylist() == [0, 2]
    assert any("x:2" in fact for fact in written.facts)


def test_a_cut_answer_says_so(tmp_path, model, tokenizer):
    encoder = Encoder(tokenizer, max_length=60)
    write_token_table(tmp_path / "t.parquet", model, tokenizer, [make_row("Long?", "is " * 60)], encoder=encoder)
    line = read_rows_table(tmp_path / "t.parquet").to_pylist()[0]
    assert line["num_tokens"] == 60 and line["truncated"] > 0 and not line["answer"].endswith("<|im_end|>")


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_tokens", "window", "chunk_bytes"),
    [(1, 1, 1 << 20), (97, 2, 1 << 20), (10**6, 8, 1 << 20), (300, 8, 1)],
    ids=["a row at a time", "several windows", "one batch", "a token at a time through the head"],
)
def test_batches_windows_and_chunks_change_nothing(
    table, model, tokenizer, rows, monkeypatch, batch_tokens, window, chunk_bytes
):
    _, expected = table
    monkeypatch.setattr(tokens, "WINDOW_BATCHES", window)
    monkeypatch.setitem(passes.CHUNK_BYTES, "cpu", chunk_bytes)
    encoder = Encoder(tokenizer, max_length=2048)
    examples = list(enumerate(encode_rows(rows, encoder).examples))
    parts = list(token_batches(model, tokenizer, examples, encoder, objectives=OBJECTIVES, batch_tokens=batch_tokens))
    assert (len(parts) > 1) == (batch_tokens < 300)
    found = pa.Table.from_batches([part for part, _ in parts])
    for name in expected.column_names:
        if name in floats(expected):
            one, other = (np.asarray(t[name].fill_null(-1)) for t in (found, expected))
            assert np.allclose(one, other, atol=3e-5), name
        elif name in ("row", "position", "token_id", "text", "is_eos", "is_format"):
            assert found[name].to_pylist() == expected[name].to_pylist(), name


def test_a_row_longer_than_a_batch_goes_alone():
    assert list(batches_of([5, 50, 4], 12)) == [[2, 0], [1]]
    assert sorted(i for batch in batches_of(list(range(1, 40)), 64) for i in batch) == list(range(39))


def test_softcap_and_scale_are_the_models_own(tokenizer):
    model = make_model(
        tokenizer,
        Gemma2ForCausalLM,
        final_logit_softcapping=3.0,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=64,
    )
    examples = encode_rows([make_row("What?", "That.")], Encoder(tokenizer, max_length=64)).examples
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([examples[0].input_ids])).logits
    (found,) = token_passes(model, tokenizer, examples, measurement=Measurement([], Context()), batch_tokens=100)
    (plain,) = token_passes(model, tokenizer, examples)
    expected = token_stats(logits, shifted(torch.tensor([examples[0].labels])))
    assert float(logits.abs().max()) <= 3.0
    assert np.allclose(found.columns["log_p"], expected.log_p, atol=1e-5)
    assert np.allclose(plain.stats.log_p, expected.log_p, atol=1e-5)


# --- the gradient's norm ----------------------------------------------------------------------------------------------

LOCAL = ("nll", "linear", "alpha(0.3)", "cayley", "deft", "eaft", "deft | floor(0.1)")


def closed_form(z, targets, spec):
    """s ||P - e_y|| in float64 from the definition: P - e_y is made without its cancellation at the target."""
    z = z.double()
    p = z.softmax(-1)
    others = p.scatter(-1, targets[:, None], 0)
    difference = others.scatter(-1, targets[:, None], -others.sum(-1, keepdim=True))
    gate = objective(spec).gate(token_stats(z, targets))
    return gate * difference.norm(dim=-1)


@pytest.mark.parametrize("spec", LOCAL)
@pytest.mark.parametrize("margin", [-30.0, -5.0, 0.0, 3.0, 12.0, 27.0])
def test_gradients_are_the_closed_form(spec, margin):
    generator = torch.Generator().manual_seed(int(margin) + 100)
    z = torch.randn(64, 500, generator=generator)
    targets = torch.randint(500, (64,), generator=generator)
    z[torch.arange(64), targets] += margin
    _, found = Measurement([objective(spec)], Context()).measure(z, targets)
    expected = closed_form(z, targets, spec)
    assert float(((found[f"gradient:{spec}"] - expected).abs() / expected).max()) < 1e-6
    if margin == 27:  # the textbook form has no digits left here
        naive = (found["concentration"].float() - 2 * found["p"].float() + 1).clamp(min=0).sqrt()
        assert float(((naive - closed_form(z, targets, "nll")).abs() / closed_form(z, targets, "nll")).min()) > 0.5


def test_a_target_that_ties_with_the_largest_is_the_argmax():
    z, targets = torch.zeros(4, 4), torch.arange(4)
    _, found = Measurement([], Context()).measure(z, targets)
    assert found["rank"].tolist() == [0] * 4 and torch.equal(found["top_id"], targets)
    assert (found["other_id"] != targets).all()
    assert torch.equal(found["top_log_p"], found["log_p"])
    _, below = Measurement([], Context()).measure(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), torch.tensor([0]))
    assert below["rank"].tolist() == [2]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mile(1)", "depends on a whole optimizer step"),
        ("deft | mean_one", "the same but for a factor"),
        ("clip", "depends on a whole optimizer step"),
        ("deft | warmup(0.1)", "depends on the training progress"),
        ("defft", "Did you mean 'deft'?"),
    ],
)
def test_objectives_that_a_token_does_not_determine_are_refused(tmp_path, model, tokenizer, rows, spec, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        write_token_table(tmp_path / "t.parquet", model, tokenizer, rows, objectives=[spec])
    assert not list(tmp_path.iterdir())


def test_no_rows_and_no_answers_are_errors(tmp_path, model, tokenizer):
    with pytest.raises(ValueError, match="no rows to encode"):
        write_token_table(tmp_path / "t.parquet", model, tokenizer, [])
    with pytest.raises(ValueError, match="no row has a supervised token left"):
        write_token_table(tmp_path / "t.parquet", model, tokenizer, [make_row("only a question")])
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_old_table_as_it_was(tmp_path, model, tokenizer, rows):
    path = tmp_path / "t.parquet"
    write_token_table(path, model, tokenizer, rows[:1])
    before = path.read_bytes(), rows_path(path).read_bytes()

    def fail(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_table(path, model, tokenizer, rows, progress=fail)
    assert (path.read_bytes(), rows_path(path).read_bytes()) == before
    assert len(list(tmp_path.iterdir())) == 2


def test_nan_logits_name_the_rows(tmp_path, tokenizer, rows):
    broken = make_model(tokenizer)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"rows:\d to rows:\d: .*NaN"):
        write_token_table(tmp_path / "t.parquet", broken, tokenizer, rows)


def test_files_that_are_no_token_tables_are_refused(tmp_path, table):
    path, _ = table
    (tmp_path / "text.parquet").write_text("no")
    pq.write_table(pa.table({"row": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="no such file; `deftune analyze tokens` writes it"):
        read_token_table(tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"text\.parquet: is no Parquet file"):
        read_token_table(tmp_path / "text.parquet")
    for damaged in (b"", b"[" * 100_000, b"[1]"):
        with pytest.raises(ValueError, match="the facts that the token table was written with are damaged"):
            table_facts(pa.table({}).replace_schema_metadata({METADATA_KEY: damaged}))
    with pytest.raises(ValueError, match="is no token table of deftune \\(it has no column 'position'\\)"):
        read_token_table(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="has no column 'gate:clip'; it has row, position"):
        read_token_table(path, ["gate:clip"])


# --- runs and the command ---------------------------------------------------------------------------------------------


def test_a_runs_steps_are_models(run, model_folder, rows):
    weights = {}
    for name in (
        f"{run.folder}:0",
        f"{run.folder}:2",
        f"{run.folder}:checkpoint-4",
        str(run.folder),
        str(model_folder),
    ):
        weights[name.removeprefix(str(run.folder))] = load_result(name)[0].model.norm.weight.detach()
    assert torch.equal(weights[":0"], weights[str(model_folder)])
    assert not torch.equal(weights[":0"], weights[":2"]) and not torch.equal(weights[":2"], weights[":checkpoint-4"])
    assert torch.equal(weights[":checkpoint-4"], weights[""])


def test_an_adapters_steps_are_models(make_run, tokenizer, rows, tmp_path):
    run = make_run("nll", lora={"r": 4, "alpha": 8})
    tables = {}
    for step in (0, 2, 4):
        model, own = load_result(f"{run.folder}:{step}")
        write_token_table(tmp_path / f"{step}.parquet", model, own, rows[:2])
        tables[step] = column(read_token_table(tmp_path / f"{step}.parquet"), "log_p")
    assert not np.allclose(tables[0], tables[2]) and not np.allclose(tables[2], tables[4])


def test_a_step_that_was_not_kept_is_named(run):
    with pytest.raises(
        ValueError, match=r"has no checkpoint of step 3 \(it has 2, 4, and 0 is the model it began with"
    ):
        load_result(f"{run.folder}:3")
    with pytest.raises(ValueError, match="'last' is no step; write RUN:200"):
        load_result(f"{run.folder}:last")


def test_a_run_is_read_as_it_was_trained(run, tokenizer):
    assert encoding_of(str(run.folder))["max_length"] == 256
    assert "User: " in Encoder(tokenizer, **encoding_of(f"{run.folder}:2")).template  # the plain template
    assert encoding_of(str(run.folder), template="chatml", max_length=99)["max_length"] == 99
    assert "im_start" in Encoder(tokenizer, **encoding_of(str(run.folder), template="chatml")).template
    assert encoding_of("smollm2") == {
        "template": None, "template_options": {}, "end_tokens": [], "bos": None, "mask": "assistant",
        "max_length": 2048, "overlong": "truncate",
    }  # fmt: skip


def test_a_file_of_a_run_is_read_with_the_runs_own_fields(run, tmp_path):
    """Rows of any names: whoever trained on them need not name their fields again."""
    path, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    for file in (path, other):
        file.write_text('{"frage": "1 + 1?", "antwort": "2"}\n')
    fields = {"prompt": "frage", "completion": "antwort"}
    config = run.read_config()
    source = config.data.train[0].model_copy(update={"path": str(path), "format": "auto", "fields": fields})
    data = config.data.model_copy(update={"train": [*config.data.train, source]})
    copy = tmp_path / "run"
    shutil.copytree(run.folder, copy)
    (copy / "config.yaml").write_text(yaml.safe_dump(config.model_copy(update={"data": data}).model_dump(mode="json")))
    assert reading_of(str(copy), str(path)) == {"format": "auto", "fields": fields}
    assert reading_of(f"{copy}:2", str(path))["fields"] == fields
    make_token_table(tmp_path / "tokens.parquet", str(copy), str(path))
    heldout = evaluate_heldout(str(copy), str(path), out=tmp_path / "heldout")
    assert heldout.summary["settings"]["fields"] == fields
    with pytest.raises(ValueError, match="--fields"):
        make_token_table(tmp_path / "tokens.parquet", str(copy), str(other))
    given = {"prompt": "antwort", "completion": "frage"}
    assert reading_of(str(copy), str(path), fields=given) == {"format": "auto", "fields": given}
    assert reading_of(str(copy), str(path), format="messages") == {"format": "messages", "fields": None}
    assert reading_of("smollm2", str(path)) == {"format": "auto", "fields": None}


def test_the_command_writes_what_python_does(tmp_path, capsys, model_folder, data_file, table):
    out = tmp_path / "new" / "tokens.parquet"
    argv = [
        "analyze",
        "tokens",
        str(model_folder),
        str(data_file),
        "--out",
        str(out),
        "--objectives",
        ",".join(OBJECTIVES),
    ]
    assert main(argv) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}: {table[1].num_rows:,} tokens; {rows_path(out)}: their rows\n"
    assert "6 rows; 0 dropped" in said.err
    found = read_token_table(out)
    assert found["text"].to_pylist() == table[1]["text"].to_pylist()
    assert np.allclose(column(found, "log_p"), column(table[1], "log_p"), atol=3e-5)
    facts = table_facts(found)
    assert facts["model"] == str(model_folder) and facts["data"] == str(data_file)
    assert facts["command"].startswith("deftune ")


def test_the_command_limits_rows_and_generates(tmp_path, capsys, model_folder):
    out = tmp_path / "t.parquet"
    assert (
        main(["analyze", "tokens", str(model_folder), "generated:word_sorting", "--rows", "3", "--out", str(out)]) == 0
    )
    assert set(read_token_table(out)["row"].to_pylist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", "t.csv"], "--out: t.csv is not named .parquet"),
        (["--batch-tokens", "0"], "--batch-tokens: at least 1"),
        (["--objectives", "nll,mile(1)"], "depends on a whole optimizer step"),
        (["--objectives", "nll,,deft"], "objective spec is empty"),
        (["--rows", "0"], "--rows: at least 1, got 0"),
        (["--max-length", "1"], "max_length: a token and its target need at least 2"),
        (["--template", "chatlm"], "Did you mean 'chatml'?"),
    ],
)
def test_the_command_says_what_is_wrong_in_a_line(
    tmp_path, monkeypatch, capsys, model_folder, data_file, argv, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "tokens", str(model_folder), str(data_file), *argv]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("deftune: ") and message in said
    assert not list(tmp_path.iterdir())


def test_bad_rows_are_set_aside_on_request(tmp_path, capsys, model_folder, data_file):
    path, out = tmp_path / "bad.jsonl", tmp_path / "t.parquet"
    path.write_text(data_file.read_text() + '{"messages": 3}\n' + json.dumps({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "<|im_end|>"}]}) + "\n")  # fmt: skip
    argv = ["analyze", "tokens", str(model_folder), str(path), "--out", str(out)]
    assert main(argv) == 2
    assert f"{path}:7: " in capsys.readouterr().err
    assert main([*argv, "--skip-bad-rows"]) == 0
    aside = [json.loads(line) for line in (tmp_path / "t.bad_rows.jsonl").read_text().splitlines()]
    assert [line["where"] for line in aside] == [f"{path}:7", f"{path}:8"]
    assert "2 rows skipped" in capsys.readouterr().err
