r"""`--suite heldout`: what a model thinks of the answers of any dataset, token by token; nothing is generated.

Over the supervised tokens of the rows, with P the model's distribution at a token and y its target:

    nll        mean of -log P[y]
    p          mean of P[y]
    focus      mean of sum_v P_v^2
    entropy    mean of -sum_v P_v log P_v
    top1       share of tokens whose target no other token beats: P[y] = max P
    ece        calibration of the likeliest token: over 15 bins of equal width by its confidence max P,
               sum_b |B_b|/n |share of B_b with P[y] = max P - mean of max P over B_b|
    end_p      mean of P[end] where a row ends: at its last supervised token, if that ends a turn (a row that was cut
               at max_length has no end)
    end_top1   share of those ends where the end token is the likeliest

A mean is over tokens (of the ends: over rows); every interval resamples rows. Rows are encoded as training encoded
them. `rows.jsonl` has a line of sums per row, appended as it is made: a second call goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deftune.data.encoding import Encoded, EncodedRows
from deftune.data.rows import BadRows, Row
from deftune.evaluation.clustered import Value, interval_of, resample, swap_p_value
from deftune.evaluation.results import NUMBER, Record, Result, drop_cut_line, read_lines
from deftune.evaluation.statistics import Interval, equal_differences_interval, holm, wilson_interval
from deftune.objectives.stats import TokenStats
from deftune.tokens.scoring import score_batches

VERSION = "1"
BINS = 15
SAME = 1e-6  # of log p: rounding, where the likeliest token is the target itself
ROW = {"row": int, "where": str, "targets": str, "calibration": [NUMBER]}  # and the columns, which are numbers
COLUMNS = ("tokens", "nll", "p", "focus", "entropy", "top1", "ends", "end_p", "end_top1")


def _ratio(over: str, under: str) -> Value:
    i, j = COLUMNS.index(over), COLUMNS.index(under)
    return lambda sums: sums[..., i] / sums[..., j]


def _ece(sums: Tensor) -> Tensor:
    return sums[..., len(COLUMNS) :].abs().sum(-1) / sums[..., 0]


METRICS: dict[str, Value] = {
    **{name: _ratio(name, "tokens") for name in ("nll", "p", "focus", "entropy", "top1")},
    "ece": _ece,
    **{name: _ratio(name, "ends") for name in ("end_p", "end_top1")},
}


@dataclass(frozen=True)
class HeldoutSettings:
    """What is measured; part of the result, and refused where a folder holds something else."""

    model: str
    data: str
    format: str = "auto"
    split: str | None = None
    rows: int | None = None
    encoding: dict[str, Any] = field(default_factory=dict[str, Any])
    suite: str = "heldout"
    tasks: dict[str, str] = field(default_factory=lambda: {"heldout": VERSION})


def read_data(settings: HeldoutSettings, bad: BadRows) -> list[Row]:
    """The rows of a file, a folder, a hub id, or ``generated:NAME``; the first ``rows`` of them."""
    from deftune.data.generated import generate
    from deftune.data.sources import read_source

    kind, _, name = settings.data.partition(":")
    if kind != "generated":
        return read_source(
            settings.data, format=settings.format, split=settings.split, limit=settings.rows, bad=bad
        )  # fmt: skip
    if settings.rows is None:
        raise ValueError(f"{settings.data}: has no end; say how many with --rows N")
    if settings.format != "auto":
        raise ValueError(f"--format: {settings.data} is generated and has none; leave it out")
    return generate(name, split=settings.split or "test", size=settings.rows)


def fingerprint(example: Encoded) -> str:
    """Of a row's targets: two results are paired where these are the same."""
    return hashlib.sha256(json.dumps([example.input_ids, example.labels]).encode()).hexdigest()[:16]


def row_record(place: int, example: Encoded, stats: TokenStats, end_ids: frozenset[int]) -> Record:
    """The sums of one row."""
    log_top = stats.top_log_p(1)[:, 0]
    confidence, top1 = log_top.exp().clamp(max=1), (stats.log_p >= log_top - SAME).double()
    bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, top1 - confidence)
    record: Record = {
        "row": place, "where": example.where, "targets": fingerprint(example), "tokens": len(stats),
        "nll": float(stats.nll.sum()), "p": float(stats.p.sum()), "focus": float(stats.concentration.sum()),
        "entropy": float(stats.entropy.sum()), "top1": float(top1.sum()), "calibration": gaps.tolist(),
    }  # fmt: skip
    ended = int(stats.targets[-1]) in end_ids
    return {**record, "ends": int(ended), "end_p": float(stats.p[-1]) * ended, "end_top1": float(top1[-1]) * ended}


def measure(
    result: Result, model: Any, tokenizer: Any, encoded: EncodedRows, end_ids: frozenset[int], *, batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Record]:  # fmt: skip
    """Fill `rows.jsonl`: every row is there once, whatever was there before."""
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
        for index, stats in score_batches(
            model, tokenizer, examples, batch_size=batch_size, top_k=1
        ):  # fmt: skip
            place = missing[index]
            have[place] = row_record(place, encoded.examples[place], stats, end_ids)
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
    expected = result.summary()["rows"][0]["items"]  # or an error that says it is not finished
    path, remedy = result.folder / "rows.jsonl", "run the same `deftune eval` again, it measures what is missing"
    rows = _read_rows(path, remedy)
    if len({record["row"] for record in rows}) != expected or len(rows) != expected:
        raise ValueError(f"{path}: has {len(rows)} of {expected} rows; it was cut or changed; {remedy}")
    return sorted(rows, key=lambda record: record["row"])


def compare(base: Result, other: Result) -> list[Record]:
    """other - base for every metric, paired by row, p-values by swapping rows, Holm over the metrics."""
    before, after = read_rows(base), read_rows(other)
    differ = sum(x["targets"] != y["targets"] for x, y in zip(before, after)) + abs(len(before) - len(after))
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
