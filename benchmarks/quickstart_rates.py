"""Does DEFT learn fewer wrong answers only because its steps are smaller? The quickstart's task at five learning rates.

    python benchmarks/quickstart_rates.py --out benchmarks/results/quickstart_rates            # 60 runs, 40 CPU minutes
    python benchmarks/quickstart_rates.py --out benchmarks/results/quickstart_rates_clean --clean
    python benchmarks/quickstart_rates.py --out benchmarks/results/quickstart_rates --report   # tables and picture only
    python benchmarks/quickstart_rates.py --out benchmarks/results/quickstart_rates_gemma \
        --model models/gemma-3-270m.gguf --template plain --rates 2.5e-5 5e-5 1e-4 2e-4 5e-4 1e-3 2e-3

Every objective is trained at every rate and seed on the questions of `deftune quickstart`: 64 capitals, 16 of them
wrong; with --clean all of them right. A smaller rate teaches fewer wrong answers, and fewer right ones. So objectives
are compared where they have learnt equally many *new right answers*: answers that were taught right and that the
untuned model does not give greedily. At that point, interpolated between rates, the benchmark compares the probability
of the wrong answers that were taught, and of the right answers to held-out questions. Intervals are 95% percentile
bootstrap over countries, for the seeds that ran.

"Learnt" has two readings, and the report has both: the probability of the answer (how often it is sampled), and whether
it is the greedy answer. The second was added after the results were seen. NLL spreads its probability where labels are
wrong, so it gives most new right answers greedily at rates at which their probability is still small.

The second model, Gemma-3-270M (a base model, hence the template `plain`), was planned before any of its runs:

- Untuned, it gives 73% of seed 0's right training answers greedily, and 67% of the held-out ones.
- Objectives, seeds, levels, training and measures are those of SmolLM2, nothing is tuned to the outcome. The rates are
  SmolLM2's too if NLL with seed 0 has learnt less than 0.6 of the new right answers at the smallest rate and more than
  0.85 at the largest; else they move by factors of 2 until this holds. Only this measure is looked at before the rates
  are fixed.
- Primary comparison: DEFT minus NLL at the level 0.8, in the probability of wrong answers and in greedy accuracy on
  held-out questions. SmolLM2's result is confirmed if the first interval lies below 0; the second decides the claim
  about held-out questions. Other levels and objectives are secondary.
- NLL and DEFT run first, all seeds; the others as time allows. An objective that lacks a run is left out of the report.

What came of the plan: NLL with seed 0 has learnt 0.45 and 0.92 at the smallest and the largest rate, so SmolLM2's rates
were kept. At all of them but the largest DEFT has learnt more than 0.9, so its curve does not cross 0.8 and the primary
comparison cannot be made. `linear` and `deft | floor(0.2)` lack runs of some seeds.

Added after these results were seen, and before any run at the new rates: NLL and DEFT are also trained at 5e-5 and
2.5e-5, all seeds, so that the planned comparison at the level 0.8 can be made. If DEFT has learnt more than 0.8 at
both, 1.25e-5 follows. Everything else stays as planned. What came of it: DEFT has learnt 0.61 at 2.5e-5, and the
primary comparison confirms SmolLM2's result in both measures (docs/choosing.md).

Added before its runs: all four objectives with this model on one machine, with wrong labels and then with --clean, at
the seven rates, since bfloat16 rounds differently on different machines. Nothing else changes. A seed now has all
objectives before the next seed begins, so that a command that is cut off leaves whole seeds.

    python benchmarks/quickstart_rates.py --out OUT --model models/gemma-3-270m.gguf --template plain \
        --rates 2.5e-5 5e-5 1e-4 2e-4 5e-4 1e-3 2e-3 --precision bf16 --jobs 10

With --jobs several runs go on at the same time, each in a process with one thread; for the same rounding with one job
set OMP_NUM_THREADS=1. A command that was stopped or killed continues with the runs that OUT.json lacks. Needs
deftune[train].
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from deftune.artifacts.config import RunConfig, load_config
from deftune.artifacts.display import quiet
from deftune.artifacts.files import write_atomic
from deftune.artifacts.names import shown_model
from deftune.artifacts.results import load_result
from deftune.comparison.quickstart import (
    MAX_LENGTH,
    MODEL,
    TEMPLATE,
    Question,
    capital_scores,
    data_file,
    precision_for,
    questions,
    quickstart_config,
    row,
)
from deftune.data.encoding import Encoder
from deftune.tokens.passes import score_rows
from deftune.training.reuse import Reuse
from deftune.training.train import train_run

OBJECTIVES = ("nll", "linear", "deft", "deft | floor(0.2)")
PRIMARY = ("nll", "deft")
RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
SEEDS = (0, 1, 2)
RESAMPLES = 2000
LEARNT = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Mean probabilities of the new right answers at which objectives are compared. After seed 0 was seen, 0.7 to 0.9 were
added, and 0.2 and 0.3 left out, which lie below the first point of some curves."""

# Of each question: the answer that is scored, or None. "taught" contains answers that the untuned model knows.
GROUPS: dict[str, Callable[[Question], str | None]] = {
    "wrong": lambda question: question.taught if question.is_wrong else None,
    "corrected": lambda question: question.capital if question.is_wrong else None,
    "taught": lambda question: question.capital if question.taught == question.capital else None,
    "heldout": lambda question: question.capital if question.taught is None else None,
}
# heading -> (group, column, whether answers that the untuned model gives greedily are left out)
MEASURES = {
    "new right answers": ("taught", "p", True),
    "new right, greedy": ("taught", "likeliest", True),
    "wrong answers": ("wrong", "p", False),
    "right answers to these": ("corrected", "p", False),
    "held-out": ("heldout", "p", False),
    "wrong, greedy": ("wrong", "likeliest", False),
    "right to these, greedy": ("corrected", "likeliest", False),
    "held-out, greedy": ("heldout", "likeliest", False),
}
MATCHED = {  # how much was learnt -> what is compared where it is equal
    "new right answers": ("wrong answers", "held-out", "held-out, greedy"),
    "new right, greedy": ("wrong, greedy", "held-out, greedy"),
}
Curve = NDArray[np.float64]
Outcome = tuple[dict[str, dict[str, list[Any]]], float]
"""What was measured, and the seconds it took."""


# --- runs -------------------------------------------------------------------------------------------------------------


def label(objective: str, rate: float, seed: int) -> str:
    return f"{objective} {rate:g} {seed}"


def asked(seed: int, clean: bool) -> list[Question]:
    """The quickstart's questions; ``clean``: each one that is taught is taught with the right answer."""
    return [q._replace(taught=q.capital) if clean and q.taught else q for q in questions(seed)]


def settings_of(results: dict[str, Any]) -> dict[str, Any]:
    """What ran: the model's name as it is shown, the template and the rates; results of SmolLM2 need not have them."""
    default = {"model": shown_model(MODEL), "template": TEMPLATE, "rates": list(RATES)}
    return {key: results.get(key, value) for key, value in default.items()}


def config_of(
    folder: Path, objective: str, rate: float, seed: int, precision: str, model: str = MODEL, template: str = TEMPLATE
) -> RunConfig:
    """The quickstart's run with another learning rate, model and template; no checkpoints."""
    base = quickstart_config(folder, "nll", seed).model_dump(mode="json")
    base["model"]["name"], base["data"]["template"] = model, template
    base |= {"run": str(folder / f"{OBJECTIVES.index(objective)}-{rate:g}-{seed}"), "objective": objective}
    base["train"] |= {"learning_rate": rate, "save_steps": 10_000, "precision": precision}
    return load_config(None, base=base)


def measure(model: Any, tokenizer: Any, given: list[Question], template: str) -> dict[str, dict[str, list[Any]]]:
    """By group: the countries, the probability of each answer, and whether it is the greedy answer."""
    encoder = Encoder(tokenizer, template=template, max_length=MAX_LENGTH)
    found: dict[str, dict[str, list[Any]]] = {}
    for group, answer_of in GROUPS.items():
        pairs = [(question.country, answer) for question in given if (answer := answer_of(question))]
        if pairs:
            rows = [row(*pair) for pair in pairs]
            scores = score_rows(model, tokenizer, rows, encoder=encoder, objectives=["nll"])
            own = capital_scores(scores, pairs)
            found[group] = {"country": [country for country, _ in pairs], "p": [round(p, 5) for p in own["p"]],
                            "likeliest": [int(likeliest) for likeliest in own["likeliest"]]}  # fmt: skip
    return found


class Task(NamedTuple):
    """One model to train and measure; the untuned one is only measured."""

    folder: Path
    model: str
    template: str
    precision: str
    clean: bool
    seed: int
    objective: str = "base"
    rate: float = 0.0

    @property
    def key(self) -> str:
        return f"base {self.seed}" if self.objective == "base" else label(self.objective, self.rate, self.seed)


def planned(untuned: Task, rates: list[float]) -> list[Task]:
    """All tasks in the order in which they begin: seed by seed, and within a seed rate by rate.

    >>> [task.key for task in planned(Task(Path(), "m", "plain", "bf16", False, 0), [1e-4])][:3]
    ['base 0', 'nll 0.0001 0', 'linear 0.0001 0']
    """
    found: list[Task] = []
    for seed in SEEDS:
        found.append(base := untuned._replace(seed=seed))
        found += [base._replace(rate=rate, objective=name) for rate, name in itertools.product(rates, OBJECTIVES)]
    return found


def write_data(folder: Path, clean: bool) -> None:
    for seed in SEEDS:
        taught = [row(question.country, question.taught) for question in asked(seed, clean) if question.taught]
        data_file(folder, seed).write_text("".join(json.dumps(fields) + "\n" for fields in taught))


_reuse = Reuse()  # of this process


def outcome_of(task: Task, shown: bool = False) -> Outcome:
    """Train and measure in this process; ``shown``: with the progress on stderr."""
    start, given = time.perf_counter(), asked(task.seed, task.clean)
    with quiet():
        if task.objective == "base":
            model, tokenizer = load_result(task.model)
        else:
            config = config_of(
                task.folder, task.objective, task.rate, task.seed, task.precision, task.model, task.template
            )
            console = Console(stderr=True, quiet=not shown)
            outcome = train_run(config, console, title=task.key, save=False, reuse=_reuse)
            if outcome.state != "finished":
                sys.exit("stopped; the same command continues")
            model, tokenizer = outcome.model.eval(), outcome.tokenizer
        return measure(model, tokenizer, given, task.template), time.perf_counter() - start


def begin_worker() -> None:
    """One thread for torch, and the end of this process when the one that started it is gone."""
    torch.set_num_threads(1)
    if parent := multiprocessing.parent_process():

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def outcomes(tasks: list[Task], jobs: int) -> Iterator[tuple[Task, Outcome | Exception]]:
    """Of each task what it gave, or its error; with several jobs in the order in which they end."""
    if jobs == 1:
        for task in tasks:
            yield task, outcome_of(task, shown=True)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=begin_worker)
    try:
        futures = {pool.submit(outcome_of, task): task for task in tasks}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error  # a worker was told to stop
            yield futures[future], error or future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def run_all(
    path: Path, clean: bool, model: str, template: str, rates: list[float], jobs: int = 1, precision: str | None = None
) -> None:
    """Train and measure what ``path`` does not have yet; it is written after each run."""
    settings = {"model": shown_model(str(Path(model).absolute()) if Path(model).is_file() else model),
                "template": template, "rates": rates}  # fmt: skip
    if path.is_file():
        results: dict[str, Any] = json.loads(path.read_text())
        found = {**settings_of(results), "precision": results["precision"]}
        if found != (wanted := {**settings, "precision": precision or results["precision"]}):
            sys.exit(f"{path} has results of {found}, not of {wanted}; choose another --out")
    else:
        precision = precision or precision_for(path.parent)
        gpu = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
        results = {"torch": torch.__version__, "precision": precision, **gpu, **settings, "runs": {}}
    runs: dict[str, Any] = results["runs"]
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, clean)
        tasks = planned(Task(folder, model, template, results["precision"], clean, seed=0), rates)
        waiting = [task for task in tasks if task.key not in runs]
        for task, outcome in outcomes(waiting, jobs):
            if isinstance(outcome, Exception):
                failed.append(f"{task.key}: {type(outcome).__name__}: {outcome}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            runs[task.key], seconds = outcome
            write_atomic(path, json.dumps(results))
            print(f"{len(runs)} of {len(tasks)}: {task.key}, {seconds:.0f} s", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"{len(failed)} runs failed, the same command tries them again: {'; '.join(failed)}")


# --- curves over rates ------------------------------------------------------------------------------------------------


class Table:
    """One measure: for each objective an array ``[rates, answers]`` of probabilities, or of 0 and 1 for greedy answers.

    An answer is a country and a seed; ``countries`` has the country of each answer. Seeds that lack a run of NLL or
    DEFT are left out, then objectives that lack a run of these seeds.
    """

    def __init__(self, runs: dict[str, Any], measure: str, rates: list[float]):
        group, own, new = MEASURES[measure]
        names = sorted({question.country for question in questions(0)})
        self.num_countries = len(names)

        def complete(objective: str, seed: int) -> bool:
            return all(label(objective, rate, seed) in runs for rate in rates)

        self.seeds = [s for s in SEEDS if all(complete(objective, s) for objective in PRIMARY)]
        self.objectives = [o for o in OBJECTIVES if all(complete(o, s) for s in self.seeds)]
        known = {s: np.array(runs[f"base {s}"][group]["likeliest"], dtype=bool) & new for s in self.seeds}

        def column(key: Callable[[int], str], name: str = own) -> NDArray[Any]:
            return np.concatenate([np.array(runs[key(s)][group][name])[~known[s]] for s in self.seeds])

        def by_rate(objective: str) -> NDArray[Any]:
            return np.stack([column(lambda s, rate=rate: label(objective, rate, s)) for rate in rates])

        self.countries = np.array([names.index(name) for name in column("base {}".format, "country")])
        self.base = float(column("base {}".format).mean())
        self.values = {objective: by_rate(objective) for objective in self.objectives}

    def curves(self, counts: NDArray[np.int64] | None = None) -> dict[str, Curve]:
        """By objective: the mean at each rate, each country counted ``counts[country]`` times, once by default."""
        weights = np.ones(len(self.countries)) if counts is None else counts[self.countries]
        return {objective: values @ weights / weights.sum() for objective, values in self.values.items()}


def read_tables(results: dict[str, Any]) -> dict[str, Table]:
    """The measures that the results have: those of wrong answers are not in results of --clean."""
    runs, rates = results["runs"], settings_of(results)["rates"]
    groups = runs[f"base {SEEDS[0]}"]
    return {name: Table(runs, name, rates) for name, (group, _, _) in MEASURES.items() if group in groups}


def at_learnt(x: Curve, y: Curve, learnt: float) -> float:
    """The y of a curve where x first reaches ``learnt``, linear between rates; NaN where x does not reach it.

    >>> at_learnt(np.array([0.25, 0.75]), np.array([0.0, 0.5]), 0.5)
    0.25
    """
    for i in range(1, len(x)):
        if x[i - 1] == learnt:
            return float(y[i - 1])
        if x[i - 1] < learnt <= x[i]:
            return float(y[i - 1] + (learnt - x[i - 1]) / (x[i] - x[i - 1]) * (y[i] - y[i - 1]))
    return float("nan")


class Matched(NamedTuple):
    """A measure of an objective where it has learnt a given share of the new right answers."""

    learnt: float
    objective: str
    value: float
    difference: float  # to NLL
    low: float
    high: float


def matched(new: Table, other: Table) -> list[Matched]:
    """The other measure at each share of new right answers that a curve reaches in 95% of the resamples."""
    generator = np.random.default_rng(0)
    n = new.num_countries
    draws = [np.bincount(generator.integers(0, n, n), minlength=n) for _ in range(RESAMPLES)]
    pairs = [(new.curves(counts), other.curves(counts)) for counts in [np.ones(n, dtype=np.int64), *draws]]
    found: list[Matched] = []
    for learnt, objective in itertools.product(LEARNT, new.objectives):
        values = np.array([at_learnt(x[objective], y[objective], learnt) for x, y in pairs])
        difference = values - np.array([at_learnt(x["nll"], y["nll"], learnt) for x, y in pairs])
        reached = difference[1:][~np.isnan(difference[1:])]
        if np.isnan(difference[0]) or len(reached) < 0.95 * RESAMPLES:
            continue
        low, high = np.quantile(reached, [0.025, 0.975])
        found.append(Matched(learnt, objective, float(values[0]), float(difference[0]), float(low), float(high)))
    return found


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: dict[str, Any], command: str) -> str:
    """The tables as Markdown."""
    tables, settings = read_tables(results), settings_of(results)
    new = tables["new right answers"]
    counts = {name: len(table.countries) for name, table in tables.items()}
    seeds = ", ".join(map(str, new.seeds))
    lines = [
        f"`{command}`", "",
        f"{settings['model']}, {results.get('device', 'CPU')}, {results['precision']}, torch {results['torch']}; "
        f"seeds {seeds}. Means over answers: "
        f"{', '.join(f'{name} {counts[name]}' for name in tables if 'greedy' not in name)}.", "",
        "| objective | rate | " + " | ".join(tables) + " |",
        "|---|---:|" + "---:|" * len(tables),
        "| untuned | | " + " | ".join(f"{table.base:.3f}" for table in tables.values()) + " |",
    ]  # fmt: skip
    for objective in new.objectives:
        for place, rate in enumerate(settings["rates"]):
            cells = " | ".join(f"{table.curves()[objective][place]:.3f}" for table in tables.values())
            lines.append(f"| {code(objective)} | {rate:g} | {cells} |")
    pairs = [(learnt, name) for learnt, names in MATCHED.items() for name in names if name in tables]
    for learnt, name in pairs:
        lines += ["", f"Where `{learnt}` is equal: {name}, and the difference to NLL [95%].", "",
                  f"| {learnt} | objective | mean | minus NLL |", "|---:|---|---:|---:|"]  # fmt: skip
        for cell in matched(tables[learnt], tables[name]):
            interval = f"{cell.difference:+.3f} [{cell.low:+.3f}, {cell.high:+.3f}]"
            difference = "-" if cell.objective == "nll" else interval
            lines.append(f"| {cell.learnt:.1f} | {code(cell.objective)} | {cell.value:.3f} | {difference} |")
    return "\n".join(lines) + "\n"


def code(objective: str) -> str:
    """An objective in a cell of a Markdown table."""
    return "`" + objective.replace("|", "\\|") + "`"


def draw(results: dict[str, Any], path: Path) -> None:
    """Wrong answers, and held-out answers, against new right answers: a curve an objective, a point a rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables, settings = read_tables(results), settings_of(results)
    new = tables["new right answers"]
    styles = {"nll": ("#000000", "o", "-"), "linear": ("#E69F00", "^", ":"), "deft": ("#009E73", "D", "-"),
              "deft | floor(0.2)": ("#0072B2", "s", "--")}  # fmt: skip
    titles = {"wrong answers": "wrong answers that were taught", "held-out": "right held-out answers, sampled",
              "held-out, greedy": "right held-out answers, greedy"}  # fmt: skip
    shown = [name for name in titles if name in tables]
    figure, grid = plt.subplots(1, len(shown), figsize=(4.2 * len(shown), 3.8), layout="constrained", squeeze=False)
    highest = max(curve.max() for name in shown for curve in tables[name].curves().values())
    top = 0.82 if highest < 0.8 else 1.02
    for axis, name in zip(grid[0], shown):
        for objective in sorted(new.objectives, key=list(styles).index):
            colour, marker, dash = styles[objective]
            x, y = new.curves()[objective], tables[name].curves()[objective]
            axis.plot(x, y, color=colour, marker=marker, ls=dash, ms=5, label=objective)
        axis.plot(new.base, tables[name].base, color="#7F7F7F", marker="*", ms=10, ls="", label="untuned")
        axis.set(title=titles[name], xlabel="new right answers that were learnt", ylabel="share of answers")
        axis.set(xlim=(-0.03, 1.03), ylim=(-0.02, top))
    grid[0][0].legend(fontsize=8)
    rates = f"{settings['rates'][0]:g} to {settings['rates'][-1]:g}"
    figure.suptitle(f"{settings['model']}: a point is a learning rate, {rates}; {len(new.seeds)} seeds")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="OUT.json, OUT.md and OUT.png are written")
    parser.add_argument("--clean", action="store_true", help="teach the right answer to every question")
    parser.add_argument("--model", default=MODEL, help="as in model.name of a config (default: %(default)s)")
    parser.add_argument("--template", default=TEMPLATE, help="`plain` for a base model (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="default: %(default)s")
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: the faster one on this machine")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each with one thread")
    parser.add_argument("--report", action="store_true", help="only write OUT.md and OUT.png again")
    options = parser.parse_args()
    path: Path = options.out.with_suffix(".json")
    if not options.report:
        run_all(path, options.clean, options.model, options.template, options.rates, options.jobs, options.precision)
    results = json.loads(path.read_text())
    command = " ".join(
        ["python benchmarks/quickstart_rates.py", *(text for text in sys.argv[1:] if text != "--report")]
    )
    text = report(results, command)
    options.out.with_suffix(".md").write_text(text)
    draw(results, options.out.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
