"""The tables of `deftune eval`; rounding happens here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deftune.artifacts.terminal import printable
from deftune.evaluation.evaluate import describe_errors
from deftune.evaluation.items import MissingData
from deftune.evaluation.kinds import COLUMNS
from deftune.evaluation.suites import SUITES, TASKS, coverage

Record = dict[str, Any]


def render_summary(summary: Record) -> str:
    """The table of a result: scores, or token statistics."""
    return render_heldout(summary) if summary["settings"]["suite"] == "heldout" else render_sampled(summary)


def render_sampled(summary: Record) -> str:
    """Scores by task and temperature, averages, and each task at its own best temperature."""
    lines = [
        f"{'task':24}{'T':>5}{'items':>7}{'n':>4}{'score':>9}{'  95% interval':18}{'answered':>9}{'cut off':>9}  note"
    ]
    for row in summary["rows"]:
        answers = row["items"] * row["samples"]
        found = answers - sum(row["extracted"].get(how, 0) for how in ("none", "ambiguous"))
        low, high = row["interval"]
        extra = "".join(f"{column} {100 * row[column]:.2f}; " for column in COLUMNS if column in row)
        verdicts = row.get("verdicts", {})
        stopped = verdicts.get("timeout", 0) + verdicts.get("crash", 0)
        failed = row["finished"].get("error", 0)
        extra += f"{failed} errors; " if failed else ""
        extra += f"{stopped} gradings stopped; " if stopped else ""
        if constant := row.get("constant"):
            extra += f"always {constant['answer']}: {100 * constant['score']:.2f}; "
        interval = f"  [{100 * low:.2f}, {100 * high:.2f}]"
        lines.append(
            f"{row['task']:24}{row['temperature']:>5g}{row['items']:>7}{row['samples']:>4}{100 * row['score']:>9.2f}"
            f"{interval:18}{found / answers:>9.0%}{row['finished'].get('length', 0) / answers:>9.0%}  "
            f"{extra}{row['note']}".rstrip("; ")
        )
    for row in summary["rows"]:
        if errors := describe_errors(row):
            lines.append(
                f"{row['task']} T={row['temperature']:g}: {printable(errors)}; the same command asks them again"
            )
    for average in summary.get("averages", []):
        if "score" in average:
            lines.append(
                f"average at T={average['temperature']:g}, {average['covers']}: {100 * average['score']:.2f} "
                f"(standard error {100 * average['standard_error']:.2f})"
            )
    for task, best in summary.get("best_temperature", {}).items():
        score = best["score"]
        halves = " and ".join(f"T={half['temperature']:g}" for half in best["halves"])
        lines.append(f"{task} at its best temperature (chosen on the other half: {halves}): {100 * score['mean']:.2f}")
    if "best_temperature" in summary:
        few = dict.fromkeys(row["task"] for row in summary["rows"] if row["task"] not in summary["best_temperature"])
        lines += [
            f"{task}: too few items to choose a temperature on one half and score it on the other" for task in few
        ]
    return "\n".join(lines)


def render_heldout(summary: Record) -> str:
    """Token statistics, in their own units."""
    first = summary["rows"][0]
    lines = [
        *summary["facts"],
        f"{summary['settings']['data']}: {first['items']:,} rows, {first['tokens']:,} tokens, {summary['ends']:,} ends",
        f"{'metric':14}{'mean':>10}  95% interval (rows resampled)",
    ]
    for row in summary["rows"]:
        if row["score"] is None:
            lines.append(f"{row['metric']:14}{'-':>10}  no row ends: all were cut at max_length")
        else:
            low, high = row["interval"]
            lines.append(f"{row['metric']:14}{row['score']:>10.4f}  [{low:.4f}, {high:.4f}]")
    return "\n".join(lines)


def render_answer(record: Record) -> str:
    """A graded answer with its question."""
    return (
        f"--- {record['id']} T={record['temperature']:g} sample {record['sample']}: score {record['score']:g}\n"
        f"question: {record['prompt']}\nanswer:   {record['text']}\n"
        f"taken:    {record['answer']!r} ({record['how']})\ngold:     {record['gold']}"
    )


def render_rows(rows: list[Record], number: int) -> str:
    """The rows of a held-out result with the highest mean NLL."""
    worst = sorted(rows, key=lambda row: -row["nll"] / row["tokens"])[:number]
    lines = [
        f"the {len(worst)} rows with the highest NLL",
        f"{'nll':>8}{'p':>8}{'sum P^2':>8}{'tokens':>8}  row",
    ]
    for row in worst:
        means = "".join(f"{row[name] / row['tokens']:>8.3f}" for name in ("nll", "p", "concentration"))
        lines.append(f"{means}{row['tokens']:>8}  {row['where']}")
    return "\n".join(lines)


def render_tasks(located: Mapping[str, str | MissingData], data: str | None) -> str:
    """The suites with their tasks, and where the data of each task is (`locate_tasks`)."""
    present = [name for name, where in located.items() if isinstance(where, str)]
    listed = {name for suite in SUITES.values() for name in suite.tasks}
    others = tuple(name for name in TASKS if name not in listed)
    lines: list[str] = []
    for title, names, have in [
        *((f"{suite.name}: {suite.about}", suite.tasks, coverage(suite, present)) for suite in SUITES.values()),
        ("single tasks, in no suite (--task)", others, f"{len(set(present) & set(others))} of {len(others)}"),
    ]:
        lines += [title, f"  data {f'below {data}' if data else 'on the hub'}: {have}"]
        for name in names:
            task, where = TASKS[name], located[name]
            size = f"{task.size:,} in the paper" if task.size else ""
            lines += [
                f"  {name:24}v{task.version:4}{task.kind:9}{size:20}{where if isinstance(where, str) else 'no data'}",
                f"  {'':24}{task.about}{f' ({task.note})' if task.note else ''}",
            ]
    return "\n".join([*lines, "token statistics of any dataset: deftune eval heldout MODEL --data FILE"])


def render_comparison(found: Record) -> str:
    """What each run gained and lost against the base."""
    lines = [f"base: {found['base']}; every difference is run - base"]
    width = max((len(r["run"]) for r in [*found["tasks"], *found["heldout"]]), default=0)
    width = max(width, 3) + 2
    if found["tasks"]:
        lines.append("paired by item; p by sign flips, Holm over all rows; won and lost count items")
        lines.append(
            f"{'run':{width}}{'task':24}{'T':>5}{'items':>7}{'base':>8}{'run':>8}{'change':>9}{'  95% interval':20}"
            f"{'won':>6}{'lost':>6}{'p':>10}{'p Holm':>10}"
        )
    for r in found["tasks"]:
        interval = f"  [{100 * r['interval'][0]:.2f}, {100 * r['interval'][1]:.2f}]"
        lines.append(
            f"{r['run']:{width}}{r['task']:24}{r['temperature']:>5g}{r['items']:>7}{100 * r['base']:>8.2f}"
            f"{100 * r['score']:>8.2f}{100 * r['difference']:>+9.2f}{interval:20}{r['won']:>6}{r['lost']:>6}"
            f"{r['p']:>10.3g}{r['p_holm']:>10.3g}"
        )
    for r in found["averages"]:
        lines.append(
            f"{r['run']}: {r['suite']} at T={r['temperature']:g}, average over {r['covers']}: {100 * r['base']:.2f} -> "
            f"{100 * r['score']:.2f}, {100 * r['difference']:+.2f} (standard error {100 * r['standard_error']:.2f})"
        )
    if found["heldout"]:
        lines.append("held-out tokens, paired by row; p by swapping rows, Holm over the metrics of a run")
        lines.append(
            f"{'run':{width}}{'metric':14}{'rows':>7}{'base':>10}{'run':>10}{'change':>10}{'  95% interval':22}"
            f"{'p':>10}{'p Holm':>10}"
        )
    data = ""
    for r in found["heldout"]:
        if r["data"] != data:
            data = r["data"]
            lines.append(data)
        interval = f"  [{r['interval'][0]:+.4f}, {r['interval'][1]:+.4f}]"
        lines.append(
            f"{r['run']:{width}}{r['metric']:14}{r['items']:>7}{r['base']:>10.4f}{r['score']:>10.4f}"
            f"{r['difference']:>+10.4f}{interval:22}{r['p']:>10.3g}{r['p_holm']:>10.3g}"
        )
    lines += [f"not compared, the other has no such suite: {name}" for name in found["alone"]]
    lines += [printable(note) for note in found["errors"]]
    lines += [f"{note}: a difference may be the engine's, not the model's" for note in found["engines"]]
    return "\n".join(lines)
