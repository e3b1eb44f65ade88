"""Run the cells that the study still lacks, in the order of the plan, within a budget of minutes.

A cell is started only if it is expected to end within the budget. Every finished cell is merged into its results file
at once, so that a machine that goes away costs the running cells alone, and a fresh machine goes on from the committed
results.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deftune.artifacts.models import PACKAGED
from deftune.comparison.cells import evaluation_items
from deftune.comparison.grid import BASE, Cell, Comparison, load_comparison, open_comparison
from deftune.comparison.process import Process
from deftune.comparison.schedule import CROWDED, RUNS_AGAIN, Children, Failures, Runner, check_comparison
from deftune.data.sources import is_hub_id
from deftune.evaluation.items import MissingData

from .cells import Study, collect, read_study, seconds_of
from .plan import Plan

Say = Callable[[str], None]
START_SECONDS = 20.0  # before a cell's clock begins: a process, its imports


@dataclass(frozen=True)
class Planned:
    """A cell that the plan has and no results file has yet."""

    cell: Cell
    tier: str
    config: str  # the comparison's file, as a command takes it
    results: Path
    seconds: float  # expected


@dataclass
class QueueOutcome:
    """How `run_queue` ended: names of cells, the cells that are left, and the signal that stopped it, if one did."""

    finished: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    left: list[Planned] = field(default_factory=list[Planned])
    signal: int | None = None


def planned_comparisons(plan: Plan, folder: Path) -> dict[str, tuple[Comparison, list[float]]]:
    """By config: the comparison with all objectives, seeds and rates that are planned in it, and the file's own rates.

    The folder of a comparison may grow and not shrink, so that it begins with everything that is planned.
    """
    own = {str(about["config"]): load_comparison(folder / f"{about['config']}.yaml") for about in plan.regimes.values()}
    lists: dict[str, dict[str, list[object]]] = {}
    for tier in plan.tiers:
        for config in (str(plan.regimes[regime]["config"]) for regime in tier["regimes"]):
            about = lists.setdefault(config, {})
            for key in ("objectives", "seeds", "learning_rates"):
                new = tier[key] or (own[config].learning_rates if key == "learning_rates" else [])
                about[key] = list(dict.fromkeys([*about.get(key, []), *new]))
    found: dict[str, tuple[Comparison, list[float]]] = {}
    for name, about in lists.items():
        overrides = [f"{key}={values}" for key, values in about.items() if values]
        found[name] = load_comparison(folder / f"{name}.yaml", overrides), own[name].learning_rates
    return found


def expected_seconds(cell: Cell, plan: Plan, studies: Iterable[Study]) -> float:
    """The mean of the committed cells of the same regime (of untuned or of tuned models), else what the plan says."""
    untuned = cell.objective == BASE
    known = [
        seconds_of(other) for study in studies for other in study.finished(cell.regime)
        if (other["objective"] == BASE) == untuned
    ]  # fmt: skip
    return START_SECONDS + (sum(known) / len(known) if known else float(plan.regimes[cell.regime]["seconds"]))


def missing_cells(plan: Plan, folder: Path, results: Path, only: str = "") -> list[Planned]:
    """The planned cells that no results file has, in the order of the plan.

    Args:
        plan: the plan.
        folder: of the plan and of the comparisons' files.
        results: the folder of the results files.
        only: a regular expression that the names of the cells contain.
    """
    comparisons = planned_comparisons(plan, folder)
    studies = [read_study(path) for path in sorted(results.glob("*.json"))]
    found: dict[str, Planned] = {}  # by the cell's name, which begins with its regime
    for tier in plan.tiers:
        for regime, objective, seed, rate in plan.missing(tier, studies):
            config = str(plan.regimes[regime]["config"])
            comparison, own_rates = comparisons[config]
            rates = [rate] if objective == BASE or rate is not None else own_rates
            for one in rates:
                cell = Cell(comparison, regime, objective, one, seed)
                seconds = expected_seconds(cell, plan, studies)
                file, out = str(folder / f"{config}.yaml"), results / f"{config}.json"
                found.setdefault(cell.name, Planned(cell, tier["name"], file, out, seconds))
    return [one for name, one in found.items() if re.search(only, name)]


def lacking(comparison: Comparison, regime: str) -> str:
    """Why no cell of a regime can run here: a file of its model, data or questions that is not there; "" where all are.

    A hub id is no file, unless its first part is a folder here.
    """
    cell = next(cell for cell in comparison.cells() if cell.regime == regime)
    names = [source.path for source in (*cell.config.data.train, *cell.section.tokens)]
    names += [] if cell.config.model.name in PACKAGED else [cell.config.model.name]
    for name in names:
        path = Path(name or "").expanduser()
        from_hub = name is None or (is_hub_id(name) and path.suffix != ".gguf" and not path.parent.is_dir())
        if not from_hub and not path.exists():
            return f"{name}: no such file"
    try:
        for evaluation in cell.section.evaluate:
            evaluation_items(evaluation)
    except MissingData as error:
        return str(error)
    return ""


def run_queue(
    plan: Plan, folder: Path, results: Path, *, minutes: float, jobs: int = 1, only: str = "", say: Say = print,
    runner: Runner | None = None, clock: Callable[[], float] = time.monotonic, early: Sequence[Process] = (),
) -> QueueOutcome:  # fmt: skip
    """Run missing cells until none is left or the next one would not end within the budget.

    Args:
        plan: the plan.
        folder: of the plan and of the comparisons' files.
        results: the folder of the results files; every finished or failed cell is written there at once.
        minutes: the budget. Cells that still run when it is spent are stopped; they resume on this machine.
        jobs: cells at a time.
        only: a regular expression; cells whose name it does not find are left.
        say: called with each message.
        runner: runs cells (default: `Children`, each in a process of its own).
        clock: seconds.
        early: processes for the first cells, which import meanwhile.

    Raises:
        ValueError: the plan, a config or a results file is wrong.
    """
    end = clock() + 60 * minutes
    waiting, absent = missing_cells(plan, folder, results, only), dict[str, str]()
    for one in waiting:
        regime = one.cell.regime
        if regime not in absent:
            absent[regime] = lacking(one.cell.comparison, regime)
            if absent[regime]:
                say(f"{regime}: left out: {absent[regime]}")
    outcome = QueueOutcome()
    cells = [one.cell for one in waiting if not absent[one.cell.regime]]
    planned = {one.cell.name: one for one in waiting}
    for comparison in {cell.comparison.folder: cell.comparison for cell in cells}.values():
        check_comparison(comparison, say)
        open_comparison(comparison)
    failures = Failures(cells)
    begun, took = dict[str, float](), dict[str, float]()  # took: the newest cell of each regime

    def begin(cell: Cell) -> bool:
        one, now = planned[cell.name], clock()
        seconds = one.seconds if cell.objective == BASE else took.get(cell.regime, one.seconds)
        if cell.regime in failures.given_up or now + seconds > end:
            return False
        begun[cell.name] = now
        say(f"tier {one.tier}: {cell.name}, {seconds:.0f} s expected, {(end - now) / 60:.1f} minutes left")
        return True

    spent = False

    def watch(_: Sequence[Cell]) -> None:
        nonlocal spent
        if children.signal is None and clock() > end:
            spent = True
            children.stop()

    children = Children(jobs, watch, early=early)
    for cell, state in (runner or children)(cells, begin):
        one = planned[cell.name]
        if state == CROWDED:
            say(f"  {cell.name} {RUNS_AGAIN}")
            continue
        if state == "finished":
            outcome.finished.append(cell.name)
            failures.finish(cell)
            if cell.objective != BASE:
                took[cell.regime] = clock() - begun[cell.name]
        elif state == "failed":
            error = outcome.failed[cell.name] = str(cell.state().get("error", "no reason recorded"))
            failures.add(cell, error)
            say(f"  {cell.name} failed: {error}")
        else:
            say(f"  {cell.name} was stopped")
            continue
        try:
            collect([Path(cell.comparison.folder)], one.results, file=one.config, only=[cell.name])
        except ValueError as error:  # the other cells go on; the folder keeps this one
            outcome.failed[cell.name] = str(error)
            say(f"  {cell.name} was not merged: {error}")
    outcome.left = [one for one in waiting if one.cell.name not in outcome.finished]
    outcome.signal = None if spent else children.signal
    return outcome
