r"""`deftune eval heldout`: statistics of a model on the supervised tokens of any dataset; nothing is generated.

Over the supervised tokens of the rows, with P the model's distribution at a token and y its target:

    nll            mean of -log P[y]
    p              mean of P[y]
    concentration  mean of sum_v P_v^2
    entropy        mean of -sum_v P_v log P_v
    top1           share of tokens where no other token is likelier than the target: P[y] = max P
    ece            calibration of the likeliest token: over 15 bins of equal width by its confidence max P,
                   sum_b |B_b|/n |share of B_b with P[y] = max P - mean of max P over B_b|
    end_p          mean of P[y] at the last supervised token of a row, over the rows where that token ends a turn (a
                   row that was cut at max_length has no end)
    end_top1       share of those rows where the end token is the likeliest

A mean is over tokens (`end_p`, `end_top1`: over rows); every interval resamples rows. Rows are encoded as training
encoded them. `rows.jsonl` has a line of sums per row, appended after each row: a second call resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deftune.artifacts.display import QUIET, Display, quiet
from deftune.artifacts.files import write_atomic
from deftune.artifacts.options import OptionError, check_counts
from deftune.artifacts.results import encoding_for, reading_of, weights_digest
from deftune.data.encoding import Encoded, EncodedRows, Encoder, encode_rows
from deftune.data.rows import BadRows, Row
from deftune.evaluation import engines
from deftune.evaluation.results import NUMBER, Outcome, Record, Result, drop_cut_line, read_lines, result_folder
from deftune.evaluation.sampler import with_date
from deftune.evaluation.statistics import (
    Interval,
    Value,
    equal_differences_interval,
    holm,
    interval_of,
    resample,
    swap_p_value,
    wilson_interval,
)
from deftune.objectives import TokenStats
from deftune.tokens.passes import token_passes

VERSION = "2"  # version 1 called the concentration "focus"
BINS = 15
SAME = 1e-6  # of log p: rounding where the target is the likeliest token
ROW = {"row": int, "where": str, "targets": str, "calibration": [NUMBER]}  # and the columns, which are numbers
COLUMNS = ("tokens", "nll", "p", "concentration", "entropy", "top1", "ends", "end_p", "end_top1")


def _ratio(over: str, under: str) -> Value:
    i, j = COLUMNS.index(over), COLUMNS.index(under)
    return lambda sums: sums[..., i] / sums[..., j]


def _ece(sums: Tensor) -> Tensor:
    return sums[..., len(COLUMNS) :].abs().sum(-1) / sums[..., 0]


METRICS: dict[str, Value] = {
    **{name: _ratio(name, "tokens") for name in ("nll", "p", "concentration", "entropy", "top1")},
    "ece": _ece,
    **{name: _ratio(name, "ends") for name in ("end_p", "end_top1")},
}


@dataclass(frozen=True)
class HeldoutSettings:
    """What is measured; stored with the result. A folder with other settings is refused."""

    model: str
    data: str
    format: str = "auto"
    split: str | None = None
    rows: int | None = None
    encoding: dict[str, Any] = field(default_factory=dict[str, Any])
    fields: dict[str, str] = field(default_factory=dict[str, str])
    suite: str = "heldout"
    tasks: dict[str, str] = field(default_factory=lambda: {"heldout": VERSION})


def read_data(settings: HeldoutSettings, bad: BadRows) -> list[Row]:
    """The rows of a file, a folder, a hub id, or ``generated:NAME``; the first ``rows`` of them."""
    from deftune.data.sources import is_generated, read_rows

    if is_generated(settings.data):
        if settings.rows is None:
            raise OptionError("rows", f"{settings.data} has no end; say how many rows to generate")
        if settings.format != "auto":
            raise OptionError("format", f"{settings.data} is generated and has none; leave it out")
    split = settings.split or ("test" if is_generated(settings.data) else None)
    return read_rows(
        settings.data, format=settings.format, split=split, limit=settings.rows, bad=bad, fields=settings.fields or None
    )


def fingerprint(example: Encoded) -> str:
    """A hash of a row's tokens and labels: two results are paired by row where their hashes are equal."""
    return hashlib.sha256(json.dumps([example.input_ids, example.labels]).encode()).hexdigest()[:16]


def row_record(place: int, example: Encoded, stats: TokenStats, end_ids: frozenset[int]) -> Record:
    """The sums of one row."""
    log_top = stats.top_log_p(1)[:, 0]
    confidence, top1 = log_top.exp().clamp(max=1), (stats.log_p >= log_top - SAME).double()
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, top1 - confidence)
    record: Record = {
        "row": place, "where": example.where, "targets": fingerprint(example), "tokens": len(stats),
        "nll": float(stats.nll.sum()), "p": float(stats.p.sum()), "concentration": float(stats.concentration.sum()),
        "entropy": float(stats.entropy.sum()), "top1": float(top1.sum()), "calibration": gaps.tolist(),
    }  # fmt: skip
    ended = int(stats.targets[-1]) in end_ids
    return {**record, "ends": int(ended), "end_p": float(stats.p[-1]) * ended, "end_top1": float(top1[-1]) * ended}


def measure(
    result: Result, model: Any, tokenizer: Any, encoded: EncodedRows, end_ids: frozenset[int], *,
    batch_rows: int | None = None, progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Record]:  # fmt: skip
    """Write one line per row to `rows.jsonl`, for the rows that it lacks; returns the records of all rows."""
    path = result.folder / "rows.jsonl"
    drop_cut_line(path)
    have = {record["row"]: record for record in _read_rows(path, "delete that line and run the same command")}
    changed = [
        record
        for place, record in have.items()
        if place >= len(encoded.examples) or fingerprint(encoded.examples[place]) != record["targets"]
    ]
    if changed:
        raise ValueError(
            f"{path}: {len(changed)} of {len(have)} rows have other tokens now, such as {changed[0]['where']}; pass "
            f"the data that this result was made with, or choose another folder with --out"
        )
    missing = [place for place in range(len(encoded.examples)) if place not in have]
    progress(len(have), len(encoded.examples))
    with path.open("a", encoding="utf-8") as file:
        examples = [encoded.examples[place] for place in missing]
        for tokens in token_passes(model, tokenizer, examples, top_k=1, batch_rows=batch_rows):
            place = missing[tokens.place]
            have[place] = row_record(place, encoded.examples[place], tokens.stats, end_ids)
            file.write(json.dumps(have[place]) + "\n")
            file.flush()
            progress(len(have), len(encoded.examples))
    return [have[place] for place in sorted(have)]


def sums_of(records: Sequence[Record]) -> Tensor:
    """[rows, columns]: `COLUMNS`, then the calibration's bins."""
    return torch.tensor(
        [[*(record[name] for name in COLUMNS), *record["calibration"]] for record in records], dtype=torch.float64
    )


def summarize(settings: HeldoutSettings, records: Sequence[Record], facts: Sequence[str]) -> Record:
    """Every metric with its interval; None where no row has it."""
    sums = sums_of(records)
    drawn = resample(sums)
    rows: list[Record] = []
    for name, value in METRICS.items():
        score = float(value(sums.sum(0)))
        has = score == score  # 0 / 0: no row ends
        interval = metric_interval(name, score, sums, interval_of(value(drawn))) if has else Interval(0, 0)
        rows.append({
            "task": "heldout", "metric": name, "items": len(records), "tokens": int(sums[:, 0].sum()),
            "score": score if has else None, "interval": [interval.low, interval.high] if has else None,
        })  # fmt: skip
    return {"settings": dataclasses.asdict(settings), "rows": rows, "ends": int(sums[:, 6].sum()), "facts": list(facts)}


def metric_interval(name: str, score: float, sums: Tensor, drawn: Interval) -> Interval:
    """The interval of a metric, of which ``drawn`` is the bootstrap's.

    `end_top1` is a proportion of rows, so its interval is Wilson's; `top1`'s is where every row has the same share.
    """
    ends = float(sums[:, COLUMNS.index("ends")].sum())
    if name == "end_top1":
        return wilson_interval(score, ends)
    return wilson_interval(score, len(sums)) if name == "top1" and drawn.low == drawn.high else drawn


def _read_rows(path: Path, remedy: str) -> list[Record]:
    return read_lines(path, {**ROW, **dict.fromkeys(COLUMNS, NUMBER)}, remedy) if path.is_file() else []


def read_rows(result: Result) -> list[Record]:
    """The rows of a finished result."""
    summary = result.summary()  # raises where the result is not finished
    if (version := summary["settings"]["tasks"]["heldout"]) != VERSION:
        raise ValueError(
            f"{result.folder}: was measured by an older deftune (held-out version {version}, now {VERSION}: `focus` is "
            f"now `concentration`); run the same `deftune eval heldout` with another --out"
        )
    expected = summary["rows"][0]["items"]
    path = result.folder / "rows.jsonl"
    remedy = "run the same `deftune eval heldout` again, it measures the missing rows"
    rows = _read_rows(path, remedy)
    if len({record["row"] for record in rows}) != expected or len(rows) != expected:
        raise ValueError(f"{path}: has {len(rows)} of {expected} rows; it was cut or changed; {remedy}")
    return sorted(rows, key=lambda record: record["row"])


def compare(base: Result, other: Result) -> list[Record]:
    """other - base for every metric, paired by row, p-values by swapping rows, Holm over the metrics."""
    before, after = read_rows(base), read_rows(other)
    if len(before) != len(after):
        raise ValueError(
            f"{base.folder} has {len(before)} rows and {other.folder} has {len(after)}; measure both on the same rows"
        )
    differ = sum(x["targets"] != y["targets"] for x, y in zip(before, after))
    if differ:
        raise ValueError(
            f"{base.folder} and {other.folder}: {differ} rows have other tokens; measure both on the same data, with "
            f"the same tokenizer, and the base as the run was encoded (--like RUN)"
        )
    a, b = sums_of(before), sums_of(after)
    drawn = resample(torch.cat([a, b], 1))
    width = a.shape[1]
    rows: list[Record] = []
    for name, value in METRICS.items():
        old, new = float(value(a.sum(0))), float(value(b.sum(0)))
        if old != old or new != new:
            continue
        interval = interval_of(value(drawn[:, width:]) - value(drawn[:, :width]))
        if name in ("top1", "end_top1") and interval.low == interval.high:
            number = len(before) if name == "top1" else int(a[:, COLUMNS.index("ends")].sum())
            interval = equal_differences_interval(new - old, number)
        rows.append({
            "task": "heldout", "metric": name, "items": len(before), "base": old, "score": new, "difference": new - old,
            "interval": [interval.low, interval.high], "p": swap_p_value(b, a, value),
        })  # fmt: skip
    for row, adjusted in zip(rows, holm([row["p"] for row in rows])):
        row["p_holm"] = adjusted
    return rows


def evaluate_heldout(
    model: str, data: str, *, format: str = "auto", fields: Mapping[str, str] | None = None,
    split: str | None = None, rows: int | None = None,
    skip_bad_rows: bool = False, template: str | None = None, like: str | Path | None = None,
    batch_size: int | None = None, trust_remote_code: bool = False, out: str | Path | None = None,
    display: Display = QUIET,
) -> Outcome:  # fmt: skip
    """Measure a model on every supervised token of a dataset, and write a result folder; the same call resumes.

        outcome = evaluate_heldout("runs/first", "test.jsonl", rows=100)
        outcome.summary["rows"][0]["score"]  # the NLL

    Args:
        model: a run, a checkpoint (RUN:200), or a model that `deftune train` takes.
        data: a file, a folder, a hub id, or ``generated:NAME``.
        format: the format of the rows.
        fields: the format's names of fields -> those of the data: ``{"prompt": "q", "completion": "a"}``.
        split: the split of the data.
        rows: the first rows only.
        skip_bad_rows: write rows that cannot be used to `bad_rows.jsonl` instead of raising an error.
        template: chatml, plain, or a .jinja file (default: the run's, or the tokenizer's).
        like: encode the rows as this run does; for the base model of a run.
        trust_remote_code: run the code of the model's repository.
        display: receives progress and messages.
        batch_size: the most rows at a time; default: as many as fit into 8,192 tokens.
        out: the result's folder (default: results/MODEL-heldout).
    """
    check_counts(rows=rows, batch_size=batch_size)
    encoding = encoding_for(model, template, like)
    reading = reading_of(model, data, format=format, fields=fields)
    settings = HeldoutSettings(
        model=model, data=data, format=reading["format"], split=split, rows=rows, encoding=encoding,
        fields=dict(reading["fields"] or {}),
    )  # fmt: skip
    bad = BadRows(skip=skip_bad_rows)
    display.show("reading the rows")
    found = read_data(settings, bad)
    result = Result(result_folder(out, model, "heldout"))
    with result.writing(settings, weights=weights_digest(model)):
        display.show(f"loading {model}")
        loaded, tokenizer = engines.load(model, trust_remote_code=trust_remote_code, display=display)
        display.show("encoding the rows")
        with quiet():
            encoder = Encoder(tokenizer, **with_date(encoding))
            encoded = encode_rows(found, encoder, bad=bad)
        if bad.rows:
            bad.write(result.folder / "bad_rows.jsonl")
            display.say(f"{bad.summary()}; see {result.folder / 'bad_rows.jsonl'}")
        records = measure(
            result, loaded, tokenizer, encoded, frozenset(encoder.end_ids.values()), batch_rows=batch_size,
            progress=lambda done, total: display.show("rows", done, total),
        )  # fmt: skip
        summary = summarize(settings, records, encoded.facts())
        write_atomic(result.folder / "summary.json", json.dumps(summary, indent=1))
    return Outcome(result.folder, summary)
