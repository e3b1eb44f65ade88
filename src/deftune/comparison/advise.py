"""`advise`: a model and data of yours beside the cells that were measured, and what follows for the objective.

The advice never says more than the evidence: where no cell was measured, it says so and names the paper's claim as the
paper's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from deftune.artifacts.config import explain
from deftune.artifacts.display import QUIET, Display
from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import FolderError
from deftune.artifacts.names import shown_model
from deftune.artifacts.options import OptionError, check_counts
from deftune.artifacts.runs import Run
from deftune.comparison.evidence import BEST, GREEDY, HOT, NLL, Evidence, evidence
from deftune.comparison.grid import BASE, COMPARISON, Cell, Comparison
from deftune.comparison.schedule import Children, run_grid
from deftune.comparison.summary import table_record, token_columns
from deftune.data.rows import BadRows
from deftune.data.sources import read_rows
from deftune.evaluation.statistics import mean_over_tokens
from deftune.tokens.table import make_token_table

Record = dict[str, Any]
WEAK_BELOW, STRONG_FROM = 0.2, 0.45
"""Bounds of the regimes in the untuned model's mean p: midway between the known cells (FigFont .01, MedQuAD .36, GSM8K
.55, all on SmolLM2-135M-Instruct)."""
COST_OF_GREEDY, GAIN_AT_HOT = 1.0, 5.0  # points: the study's rule for an objective where answers are sampled
MANY_CONFLICTS = 0.05  # share of tokens
PROBE_OBJECTIVES = (NLL, "deft", "deft | floor(0.2)")
PROBE_HELD_OUT = 4  # every fourth row


@dataclass(frozen=True)
class Advice:
    """What `advise` found.

    ``measured`` are the numbers of the token table (`deftune.comparison.summary.table_record`). ``objective`` is for
    greedy or cold answers, ``sampled`` for answers at T = 1 (None: the same). ``learning_rates`` are those of the cells
    behind the advice, of ``sampled`` where there is one. ``strength`` is none, weak, moderate or strong, and why.
    """

    model: str
    data: str
    measured: Record
    regime: str
    place: str
    objective: str
    sampled: str | None
    learning_rates: tuple[float, ...]
    strength: str
    because: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    watch: tuple[str, ...]


def advise(model: str, data: str, *, display: Display = QUIET, **options: Any) -> Advice:
    """Measure a model on rows (one pass, no training) and say which objective the evidence supports.

        advice = advise("smollm2", "train.jsonl", rows=100)
        advice.regime, advice.objective, advice.because

    Args:
        model: a run, ``RUN:STEP``, or any model that `deftune train` takes.
        data: a file, a folder, a hub id, or ``generated:NAME``.
        display: receives the progress.
        options: further arguments of `deftune.tokens.table.make_token_table` (rows, format, fields, split, template,
            mask, max_length, ...).

    Raises:
        ValueError: an argument is wrong, a row cannot be used, or no token is supervised.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.parquet"
        make_token_table(path, model, data, objectives=[NLL], display=display, **options)
        measured = table_record(path)
    return advice_from(measured, model=shown_model(model), data=data)


def advice_from(
    measured: Record, *, model: str = "", data: str = "", known: Sequence[Evidence] | None = None
) -> Advice:
    """The advice for the numbers of a token table; ``known``: the evidence (default: what the package ships)."""
    known = evidence() if known is None else known
    regime, place = place_of(measured, known)
    here = [row for row in known if row.regime == regime]
    against_nll = [row for row in here if row.measured and row.against == NLL]
    ours = [row for row in against_nll if row.counts]
    objective = best_of(ours)
    hot = best_when_sampled(ours, objective)
    sampled = hot.objective if hot else None
    if hot:  # its own learning rate, on any model
        about = [
            row for row in gains_at_hot(ours) if (row.objective, row.learning_rates) == (sampled, hot.learning_rates)
        ]
    else:
        about = [row for row in ours if row.objective == objective] or ours
    rates = sorted({rate for row in about for rate in row.learning_rates})
    return Advice(
        model=model, data=data, measured=measured, regime=regime, place=place, objective=objective, sampled=sampled,
        learning_rates=tuple(rates), strength=strength_of(about),
        because=tuple(reasons(against_nll, objective, hot, gain(hot, ours) if hot else 0.0)),
        evidence=tuple([*(row for row in here if row.measured), *(row for row in here if not row.measured)]),
        watch=tuple(watch(measured, regime, [name for name in (objective, sampled) if name and name != NLL], here)),
    )  # fmt: skip


def regime_of(p: float) -> str:
    """
    >>> regime_of(0.01), regime_of(0.36), regime_of(0.55)
    ('weak', 'intermediate', 'strong')
    """
    return "weak" if p < WEAK_BELOW else "intermediate" if p < STRONG_FROM else "strong"


def place_of(measured: Record, known: Sequence[Evidence]) -> tuple[str, str]:
    """The regime by the model's mean p, and a sentence with the nearest known cells."""
    p = measured["p"]
    regime = regime_of(p["mean"])
    cells = {(row.model, row.data): row for row in known if row.base_p is not None}.values()
    near = sorted(cells, key=lambda row: abs((row.base_p or 0.0) - p["mean"]))[:2]
    texts = [f"{row.data} with {row.model.split(' (')[0]} ({row.base_p:.2f})" for row in near]
    text = f"mean p {p['mean']:.2f} [{p['low']:.2f}, {p['high']:.2f}] is {regime}"
    others = dict.fromkeys(name for name in (regime_of(p["low"]), regime_of(p["high"])) if name != regime)
    if others:
        text += f", and within its interval {' or '.join(others)}"
    return regime, text + (f"; the nearest measured cells: {', '.join(texts)}" if texts else "; no cell was measured")


def best_of(ours: Sequence[Evidence]) -> str:
    """The objective with the largest decided gain over NLL at the best temperature; NLL where there is none."""
    above = [row for row in ours if row.measure == BEST and row.decided > 0]
    below = {row.objective for row in ours if row.measure == BEST and row.decided < 0}
    above = [row for row in above if row.objective not in below]
    return max(above, key=lambda row: row.difference).objective if above else NLL


def gain(row: Evidence, ours: Sequence[Evidence]) -> float:
    """How many points a row's score is above NLL's best score of the same measure, over all learning rates.

    A difference at one rate may be large because NLL is poor there. Where no score is recorded, it is the difference.
    """
    if row.score is None:
        return row.difference
    like = [other for other in ours if (other.cells, other.measure) == (row.cells, row.measure)]
    return row.score - max(other.score - other.difference for other in [row, *like] if other.score is not None)


def best_when_sampled(ours: Sequence[Evidence], objective: str) -> Evidence | None:
    """The row of the objective and learning rate that gain most at T = 1.

    None where none gains 5 points, or the objective is the same one. Those that cost at most 1 point greedily, measured
    on the same cells, go first. A row without an interval counts by its difference alone.
    """
    greedy = {(row.cells, row.objective, row.learning_rates): row for row in ours if row.measure == GREEDY}
    hot = gains_at_hot(ours)
    costs = {row: greedy.get((row.cells, row.objective, row.learning_rates)) for row in hot}
    cheap = [row for row, cost in costs.items() if cost is not None and gain(cost, ours) >= -COST_OF_GREEDY]
    found = max(cheap or hot, key=lambda row: gain(row, ours), default=None)
    return found if found and found.objective != objective else None


def gains_at_hot(ours: Sequence[Evidence]) -> list[Evidence]:
    """The rows of objectives that gain at T = 1."""
    return [
        row for row in ours
        if row.measure == HOT and gain(row, ours) >= GAIN_AT_HOT and (row.low is None or row.decided > 0)
    ]  # fmt: skip


def strength_of(rows: Sequence[Evidence]) -> str:
    """How strong the rows are that an advice rests on, in a word and its reason."""
    if not rows:
        return "none: no cell of this regime was measured; what the paper claims is the paper's"
    seeds = max(row.seeds for row in rows)
    models = list(dict.fromkeys(row.model.split(" (")[0] for row in rows if row.seeds == seeds))
    word = "weak" if seeds < 2 else "strong" if seeds >= 3 and len(models) > 1 else "moderate"
    number = f"{seeds} seed{'s' * (seeds > 1)} of {len(models)} model{'s' * (len(models) > 1)}"
    return f"{word}: {number} at most ({', '.join(models)})"


def reasons(ours: Sequence[Evidence], objective: str, hot: Evidence | None, above_best: float) -> list[str]:
    """Why these objectives, in sentences about measured rows; ``above_best`` is the `gain` of ``hot``."""
    lines: list[str] = []
    best = [row for row in ours if row.measure == BEST]
    notes = dict.fromkeys(f"{row.note} ({row.data})" for row in best if row.note)
    best = [row for row in best if row.counts]
    if objective != NLL:
        lines.append(f"{objective} is above NLL at the best temperature of each, and the interval excludes 0")
    elif lost := [row for row in best if row.decided < 0]:
        names = ", ".join(dict.fromkeys(row.objective for row in lost))
        rates = ", ".join(f"{rate:g}" for rate in sorted({rate for row in lost for rate in row.learning_rates}))
        lines.append(f"measured below NLL at the best temperature of each (learning rate {rates}): {names}")
    else:
        lines.append("no objective was measured above NLL at the best temperature of each")
    lines += notes
    if hot:
        interval = "no interval was recorded" if hot.low is None else "the interval excludes 0"
        rates = ", ".join(f"{rate:g}" for rate in hot.learning_rates)
        seeds = f"{hot.seeds} seed{'s' * (hot.seeds != 1)}"
        best = "" if hot.score is None else f", and {above_best:.1f} above NLL at its best rate"
        lines.append(f"at T = 1 {hot.objective} is {hot.difference:.1f} points above NLL at the same learning rate, "
                     f"{rates} ({seeds}; {interval}){best}")  # fmt: skip
    return lines


def watch(measured: Record, regime: str, gated: Sequence[str], known: Sequence[Evidence]) -> list[str]:
    """What to look at while and after training, from the numbers of the user's own data.

    ``gated`` are the advised objectives other than NLL.
    """
    lines: list[str] = []
    if measured["end_rows"] == 0:
        lines.append("no row has a supervised end token, so the tuned model will not learn to stop: check template and "
                     "mask with `deftune data preview`")  # fmt: skip
    elif measured["end_rows"] < 1:
        lines.append(f"{1 - measured['end_rows']:.0%} of the rows have no supervised end token (cut off at the maximum "
                     f"length?)")  # fmt: skip
    kinds: Mapping[str, int] = measured["conflict_kinds"]
    conflicts, marks = sum(kinds.values()), kinds["end"] + kinds["format"]
    if marks and gated:
        cure = "measured above" if any("eos(" in row.objective for row in known) else "not measured as a cure"
        lines.append(f"{marks:,} of {conflicts:,} confident conflicts are end or format tokens, where the gate of "
                     f"{gated[-1]} is small: check that the tuned model stops; `| eos(nll)` keeps NLL's gradient there "
                     f"({cure})")  # fmt: skip
    if measured["conflicts"]["mean"] >= MANY_CONFLICTS:
        lines.append(f"confident conflicts are {measured['conflicts']['mean']:.1%} of the tokens: `deftune inspect` "
                     f"shows whether they are errors or another style")  # fmt: skip
    if regime == "strong":
        lines.append("a high p says that the answers read as the model would write them, not that it solves the task")
    return [*lines, "score the untuned model too, greedily and over temperatures: at T = 1 a sharper model gains by "
            "that alone"]  # fmt: skip


# --- the probe --------------------------------------------------------------------------------------------------------


def probe(
    model: str, data: str, folder: Path, *, rows: int = 400, steps: int = 20, seeds: Sequence[int] = (0,),
    learning_rate: float = 1e-5, batch_size: int = 8, format: str = "auto", fields: Mapping[str, str] | None = None,
    split: str | None = None, template: str | None = None, mask: str | None = None, max_length: int | None = None,
    skip_bad_rows: bool = False, trust_remote_code: bool = False, display: Display = QUIET,
) -> list[Record]:  # fmt: skip
    """Train NLL, DEFT and DEFT with a floor for some steps on the data, and compare them on rows that were held out.

    Every fourth row is held out. The comparison is an ordinary one in ``folder`` (`deftune compare show` and `report`
    read it), and the same call resumes it. Token statistics are compared, not answers: a probe does not say which
    objective answers better.

    Args:
        model: what `deftune train` takes as a model.
        data: a file, a folder, a hub id, or ``generated:NAME``.
        folder: of the comparison.
        rows: how many rows of the data to use.
        steps: optimizer steps of each run.
        seeds: one run of each objective for each.
        learning_rate: of all runs.
        batch_size: rows of a step.
        format: of the data, and ``fields``, ``split``, ``template``, ``mask``, ``max_length``, ``skip_bad_rows``, as
            in `make_token_table`.
        trust_remote_code: run the code of the model's repository.
        display: receives the progress.

    Returns:
        A line for the untuned model and each objective: held-out means with 95% intervals over rows (not over seeds),
        how many rows these are, and under ``minus_nll`` the paired differences from NLL.

    Raises:
        ValueError: an argument is wrong, the folder holds a probe of other rows, or a cell failed.
    """
    check_counts(rows=rows, steps=steps, batch_size=batch_size)
    if Run(Path(model.rpartition(":")[0] or model)).config.is_file() or Run(Path(model)).config.is_file():
        raise OptionError("probe", f"{model} is a run; name its base model, which the probe trains")
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "held_out")}
    encoding = {"template": template, "mask": mask, "max_length": max_length}
    try:
        comparison = Comparison.model_validate({
            "folder": str(folder / "comparison"), "objectives": list(PROBE_OBJECTIVES), "seeds": list(seeds),
            "learning_rates": [learning_rate], "keep_models": False,
            "model": {"name": model, "trust_remote_code": trust_remote_code},
            "train": {"max_steps": steps, "epochs": 1000, "batch_size": batch_size,
                      "micro_batch_size": min(2, batch_size), "save_steps": 10 * steps},
            "regimes": {"probe": {
                "data": {"train": [{"path": str(paths["train"]), "format": "messages"}],
                         **{key: value for key, value in encoding.items() if value is not None}},
                "tokens": [{"path": str(paths["held_out"]), "format": "messages"}],
            }},
        })  # fmt: skip
    except ValidationError as error:
        raise ValueError(f"probe: {'; '.join(explain(error))}") from None
    bad = BadRows(skip=skip_bad_rows)
    found = read_rows(data, format=format, split=split, limit=rows, bad=bad, fields=fields)
    if len(found) < 2 * PROBE_HELD_OUT:
        raise OptionError("rows", f"{len(found)} rows are too few to train and to hold out; give at least "
                          f"{2 * PROBE_HELD_OUT}")  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        part = [r for i, r in enumerate(found) if (i % PROBE_HELD_OUT == PROBE_HELD_OUT - 1) == (name == "held_out")]
        lines = [{"messages": row.messages, **({"tools": row.tools} if row.tools else {})} for row in part]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if path.is_file() and path.read_text(encoding="utf-8") != text:  # its cells would be shown as these rows'
            raise FolderError(f"{folder}: holds a probe of other rows; choose another folder with --out")
        write_atomic(path, text)
    display.show("training and measuring the probe")
    try:
        outcome = run_grid(comparison, Children(1), display.say)
    except FolderError as error:  # of another probe, whose options are named; the folder is one of --out
        raise FolderError(str(error).replace(COMPARISON.option, "--out")) from None
    outcome.pass_on_stop()
    if outcome.failed:
        raise ValueError(f"{comparison.folder}: the probe did not finish: {next(iter(outcome.failed.values()))}")
    return probe_lines(comparison)


PROBED = ("nll", "p", "concentration", "top1")


def probe_lines(comparison: Comparison) -> list[Record]:
    """Held-out means of the untuned model and of each objective over its seeds, and paired differences from NLL."""
    cells: dict[str, list[Cell]] = {}
    for cell in comparison.cells():
        cells.setdefault(cell.objective, []).append(cell)
    means = {name: token_columns(own)[1] for name, own in cells.items()}
    rows, nll = token_columns(cells[NLL])

    def mean(values: Tensor) -> Record:
        return mean_over_tokens(values, rows)._asdict()

    return [
        {
            "objective": name, "seeds": 0 if name == BASE else len(cells[name]), "rows": int(rows.unique().numel()),
            **{key: mean(values[key]) for key in PROBED},
            "minus_nll": {} if name in (BASE, NLL) else {key: mean(values[key] - nll[key]) for key in PROBED},
        }
        for name, values in means.items()
    ]  # fmt: skip
