"""`deftune quickstart`: some training answers are wrong; with which objective does the model answer better afterwards?

SmolLM2 is asked for the capitals of countries, many of which it knows. It is tuned on such questions, some of them with
another country's capital as the answer, once with each objective and seed. Then the models are compared: what does each
answer to questions that it was not taught, how many right answers that were new to it did it learn, and how many of the
wrong ones?
"""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable
from importlib import resources
from itertools import compress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from deftune.artifacts.config import RunConfig, load_config
from deftune.artifacts.display import quiet
from deftune.artifacts.files import write_atomic
from deftune.artifacts.names import shown_model
from deftune.artifacts.pages import page
from deftune.artifacts.results import load_result
from deftune.artifacts.runs import Run
from deftune.artifacts.terminal import line_printer
from deftune.data.encoding import Encoder
from deftune.evaluation.statistics import TokenMean, mean_over_tokens
from deftune.tokens.passes import TokenScores, score_rows
from deftune.training.train import train_run

MODEL = "smollm2"
OBJECTIVES = ("nll", "deft")
LABELS = ("base", *OBJECTIVES)
SEEDS = (0, 1, 2)
TRAIN_ROWS, WRONG_ROWS, EPOCHS = 64, 16, 5
RATE = 2e-4  # of the five in benchmarks/quickstart_rates.py the best on held-out questions, for either objective
TEMPLATE, MAX_LENGTH = "chatml", 64  # without the system message of SmolLM2's own template, which doubles a row
STUDY = "docs/study/results.md"
RATES_PAGE = "docs/choosing.md"


# --- the questions ----------------------------------------------------------------------------------------------------


class Question(NamedTuple):
    country: str
    capital: str
    taught: str | None  # the answer in the training data; None: held out

    @property
    def is_wrong(self) -> bool:
        return self.taught not in (None, self.capital)


def questions(seed: int) -> list[Question]:
    """All countries in an order of the seed: those with a wrong answer, those with the right one, the held-out ones.

    The wrong answers are the capitals of the wrong rows, each moved on by one row.

    >>> len({question.taught for question in questions(0) if question.is_wrong}) == WRONG_ROWS
    True
    """
    text = resources.files("deftune.comparison").joinpath("capitals.csv").read_text(encoding="utf-8")
    pairs = [(line["country"], line["capital"]) for line in csv.DictReader(text.splitlines())]
    Random(seed).shuffle(pairs)
    wrong = [Question(*pairs[i], pairs[(i + 1) % WRONG_ROWS][1]) for i in range(WRONG_ROWS)]
    right = [Question(country, capital, capital) for country, capital in pairs[WRONG_ROWS:TRAIN_ROWS]]
    return [*wrong, *right, *(Question(*pair, None) for pair in pairs[TRAIN_ROWS:])]


def row(country: str, capital: str) -> dict[str, str]:
    """
    >>> row("Peru", "Lima")
    {'prompt': 'What is the capital of Peru?', 'completion': 'The capital of Peru is Lima.'}
    """
    return {"prompt": f"What is the capital of {country}?", "completion": f"{before_capital(country)} {capital}."}


def before_capital(country: str) -> str:
    return f"The capital of {country} is"


# --- training ---------------------------------------------------------------------------------------------------------


def run_folder(folder: Path, objective: str, seed: int) -> Path:
    return folder / f"{objective}-seed{seed}"


def data_file(folder: Path, seed: int) -> Path:
    return folder / f"train-seed{seed}.jsonl"


def quickstart_config(folder: Path, objective: str, seed: int) -> RunConfig:
    """The run of one objective and seed; all else is the same, the order of the data too."""
    return load_config(None, base={
        "run": str(run_folder(folder, objective, seed)),
        "objective": objective,
        "model": {"name": MODEL, "lora": {"r": 16, "alpha": 32}},
        "data": {"train": [{"path": str(data_file(folder, seed)), "format": "prompt_completion"}],
                 "template": TEMPLATE, "max_length": MAX_LENGTH},
        "train": {"batch_size": 8, "micro_batch_size": 8, "epochs": EPOCHS, "learning_rate": RATE, "save_steps": 20,
                  "keep": 1, "seed": seed, "precision": precision_for(folder)},
    })  # fmt: skip


def precision_for(folder: Path) -> str:
    """The precision of an earlier call, else the faster one on this machine: not every CPU gains by bfloat16."""
    for path in run_folders(folder):
        run = Run(path)
        if run.config.is_file():
            return run.read_config().train.precision
    if torch.cuda.is_available():
        return "auto"
    return "bf16" if product_seconds(torch.bfloat16) < product_seconds(torch.float32) else "fp32"


def run_folders(folder: Path) -> list[Path]:
    return [run_folder(folder, objective, seed) for seed in SEEDS for objective in OBJECTIVES]


def product_seconds(dtype: torch.dtype) -> float:
    """The fastest of several matrix products: the others may have waited for another process."""
    a, b = torch.ones(512, 576, dtype=dtype), torch.ones(576, 4096, dtype=dtype)
    seconds: list[float] = []
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def quickstart(folder: Path, console: Console) -> None:
    """Train, compare, draw, and say what to do next; a second call resumes the first."""
    say: Callable[[str], None] = lambda text: console.print(text, highlight=False)  # noqa: E731
    check_disk(folder)
    line_printer(console)(f"{takes(folder)}; `deftune quickstart --out {folder} --clean` removes all of it")
    say(
        f"[bold]1. Train[/bold] {shown_model(MODEL)} on the capitals of {TRAIN_ROWS} countries, {WRONG_ROWS} of them "
        f"wrong, once with each objective and each of {len(SEEDS)} seeds"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        taught = [row(question.country, question.taught) for question in questions(seed) if question.taught]
        write_atomic(data_file(folder, seed), "".join(json.dumps(fields) + "\n" for fields in taught))
        for objective in OBJECTIVES:
            outcome = train_run(quickstart_config(folder, objective, seed), console, title=f"{objective} {seed}")
            if outcome.state != "finished":
                raise SystemExit(143)
            shutil.rmtree(outcome.run.checkpoints, ignore_errors=True)  # the result is in model/
    say("\n[bold]2. Compare[/bold] what the models answer now")
    found = {label: [measure(label, seed, folder) for seed in SEEDS] for label in LABELS}
    means = summarise(found)
    console.print(comparison_table(means))
    say("In brackets: DEFT - NLL for each seed.")
    for sentence in conclusions(means):
        say(f"- {sentence}")
    picture = plot_quickstart(folder, found, means)
    line_printer(console)(
        f"\nuses {gigabytes(size_of(folder))} of disk; `deftune quickstart --out {folder} --clean` removes it\n"
        f"\npicture: {picture}\nruns:    deftune runs {folder}\n"
        f"chat:    deftune chat {run_folder(folder, 'deft', SEEDS[0])}\n"
        f"study:   {page(STUDY)}: a larger model, a real task, graded answers"
    )
    say("next:    deftune init run.yaml, put your data in it, deftune train run.yaml")


# --- disk and time ----------------------------------------------------------------------------------------------------

PEAK_BYTES = 300_000_000  # six adapters, and two checkpoints of the last run with Adam's two moments
MINUTES = "6 to 9 minutes of CPU time"


def written(folder: Path) -> list[Path]:
    """All that a call writes."""
    measured = [answers_file(folder, label, seed) for label in LABELS for seed in SEEDS]
    data = [data_file(folder, seed) for seed in SEEDS]
    return [*run_folders(folder), *data, *measured, folder / "quickstart.png", folder / "quickstart.json"]


def takes(folder: Path) -> str:
    """What a call needs, before it begins: disk and time."""
    if all(Run(path).status()["state"] == "finished" for path in run_folders(folder)):
        return f"{folder} is trained already"
    return f"This takes {MINUTES}, and {gigabytes(PEAK_BYTES)} of disk in {folder}"


def check_disk(folder: Path) -> None:
    """Refuse to begin where the disk would be full before the end."""
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free, needed = shutil.disk_usage(place).free, PEAK_BYTES - size_of(folder)
    if free < needed:
        raise ValueError(
            f"quickstart: needs {gigabytes(needed)} of disk, and {place} has {gigabytes(free)}; free some, or choose "
            f"another disk with --out"
        )


def clean(folder: Path) -> int:
    """Remove what `quickstart` wrote into ``folder``, and the folder if nothing else is in it; the bytes freed."""
    if not any(Run(path).config.is_file() for path in run_folders(folder)):
        raise ValueError(f"{folder}: holds no quickstart; nothing is removed")
    before = size_of(folder)
    for path in written(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    return before - size_of(folder)


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def gigabytes(size: int) -> str:
    """
    >>> gigabytes(1_620_000_000), gigabytes(3_000_000)
    ('1.6 GB', '0.0 GB')
    """
    return f"{size / 1e9:.1f} GB"


# --- measuring --------------------------------------------------------------------------------------------------------

# Of each question: the answer that is scored; None: the question is not in the group.
GROUPS: dict[str, Callable[[Question], str | None]] = {
    "taught": lambda question: question.capital if question.taught == question.capital else None,
    "wrong": lambda question: question.taught if question.is_wrong else None,
    "corrected": lambda question: question.capital if question.is_wrong else None,
    "heldout": lambda question: question.capital if question.taught is None else None,
}


class Measure(NamedTuple):
    group: str
    column: str  # "p": the probability, which is the share of such answers at temperature 1; or "likeliest"
    title: str
    more_is_better: bool
    only_new: bool = False  # leave out answers that the untuned model gives greedily


MEASURES = {
    "new": Measure("taught", "p", "right answers new to it, sampled", True, only_new=True),
    "new greedy": Measure("taught", "likeliest", "right answers new to it, greedy", True, only_new=True),
    "wrong": Measure("wrong", "p", "wrong answers it was taught, sampled", False),
    "wrong greedy": Measure("wrong", "likeliest", "wrong answers it was taught, greedy", False),
    "corrected": Measure("corrected", "p", "right answers to these questions, sampled", True),
    "corrected greedy": Measure("corrected", "likeliest", "right answers to these questions, greedy", True),
    "heldout": Measure("heldout", "p", "right answers, held-out, sampled", True),
    "heldout greedy": Measure("heldout", "likeliest", "right answers, held-out, greedy", True),
}


def answers_file(folder: Path, label: str, seed: int) -> Path:
    return folder / f"answers_{label}-seed{seed}.json"


def measure(label: str, seed: int, folder: Path) -> dict[str, Any]:
    """The probabilities of one model's answers, kept in a file for the next call."""
    path = answers_file(folder, label, seed)
    if path.is_file() and (known := json.loads(path.read_text(encoding="utf-8"))).keys() >= GROUPS.keys():
        return known
    asked = questions(seed)
    with quiet():
        model, tokenizer = load_result(MODEL if label == "base" else str(run_folder(folder, label, seed)))
        encoder = Encoder(tokenizer, template=TEMPLATE, max_length=MAX_LENGTH)
        result: dict[str, Any] = {}
        for group, answer_of in GROUPS.items():
            pairs = [(question.country, answer) for question in asked if (answer := answer_of(question))]
            rows = [row(*pair) for pair in pairs]
            scores = score_rows(model, tokenizer, rows, encoder=encoder, objectives=["nll"])  # "nll": for the ranks
            result[group] = {"country": [country for country, _ in pairs], **capital_scores(scores, pairs)}
    write_atomic(path, json.dumps(result))
    return result


def capital_scores(scores: TokenScores, pairs: list[tuple[str, str]]) -> dict[str, list[float]]:
    """The probability of each row's capital after the words before it, and whether each of its tokens is likeliest."""
    found: dict[str, list[float]] = {"p": [], "likeliest": []}
    for place, (country, capital) in enumerate(pairs):
        tokens = (scores.row == place).nonzero().flatten().tolist()
        leading = int(scores.text[tokens[0]].startswith(" "))  # the template `plain` leaves it to the answer
        begin = leading + len(before_capital(country))
        end, at, chosen = begin + 1 + len(capital), 0, list[int]()
        for token in tokens:
            if begin <= at < end:
                chosen.append(token)
            at += len(scores.text[token])
        index = torch.tensor(chosen)
        found["p"].append(float(scores.stats.log_p[index].sum().exp()))
        found["likeliest"].append(float((scores.columns["rank"][index] == 0).all()))
    return found


class Means(NamedTuple):
    """One measure: its mean for each model, and the paired difference of the two objectives."""

    models: dict[str, TokenMean]
    difference: TokenMean
    by_seed: list[float]  # the difference, for each seed


def summarise(found: dict[str, list[dict[str, Any]]]) -> dict[str, Means]:
    """Means over the questions of all seeds. A country that occurs with several seeds is resampled as one."""
    names = {question.country: i for i, question in enumerate(questions(SEEDS[0]))}
    summary: dict[str, Means] = {}
    for name, asked in MEASURES.items():
        base = [part[asked.group] for part in found["base"]]
        kept = [[not (asked.only_new and known) for known in part["likeliest"]] for part in base]

        def chosen(parts: list[list[Any]], kept: list[list[bool]] = kept) -> list[Any]:
            return [value for part, keep in zip(parts, kept) for value in compress(part, keep)]

        rows = torch.tensor([names[country] for country in chosen([part["country"] for part in base])])
        values = {
            label: torch.tensor(chosen([part[asked.group][asked.column] for part in parts]))
            for label, parts in found.items()
        }
        first, second = (values[objective] for objective in OBJECTIVES)
        models = {label: mean_over_tokens(own, rows) for label, own in values.items()}
        difference = second - first
        by_seed = [float(own.mean()) for own in difference.split([sum(keep) for keep in kept])]
        summary[name] = Means(models, mean_over_tokens(difference, rows), by_seed)
    return summary


# --- what it says -----------------------------------------------------------------------------------------------------

NAMES = {"base": "untuned", "nll": "NLL", "deft": "DEFT"}
LIMITS = (
    "A demonstration: {seeds} seeds, {rows} facts, a model of 135M parameters, one learning rate. The intervals are "
    "over countries, for these seeds: with another seed a difference may change by as much as the numbers in brackets "
    "differ. Where the model is undecided, DEFT learns a wrong answer like NLL; where the "
    "model is confident otherwise, DEFT learns little, also from a right answer. DEFT makes probabilities sharper, "
    "which alone helps sampled answers; the greedy lines leave this out. The learning rate is, of five, the best on "
    "held-out questions for either objective; a larger one teaches more wrong answers, too: {rates} has all five."
)


def comparison_table(means: dict[str, Means]) -> Table:
    """Means with 95% intervals, and the paired difference of the two objectives."""
    first, second = (NAMES[objective] for objective in OBJECTIVES)
    table = Table(title="share of answers, sampled at temperature 1 or greedy; 95% interval")
    for heading in ("", *NAMES.values(), f"{second} - {first}"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, own in means.items():
        cells = [cell(own.models[label]) for label in LABELS]
        table.add_row(MEASURES[name].title, *cells, cell(own.difference, "+"))
    return table


def cell(found: TokenMean, sign: str = "") -> str:
    """Two lines, so that five of them fit into eighty columns."""
    return f"{found.mean:{sign}.2f}\n[dim]{found.low:{sign}.2f}, {found.high:{sign}.2f}[/dim]"


def conclusions(means: dict[str, Means]) -> list[str]:
    """What the intervals decide and what they do not, in words."""
    verdicts: dict[str, list[str]] = {"DEFT is better": [], "NLL is better": [], "Not decided": []}
    for name, own in means.items():
        by_seed = ", ".join(f"{value:+.2f}" for value in own.by_seed)
        verdicts[verdict(name, own)].append(f"{MEASURES[name].title} ({by_seed})")
    sentences = [f"{text}: {'; '.join(titles)}." for text, titles in verdicts.items() if titles]
    after = {label: found.mean for label, found in means["heldout greedy"].models.items()}
    sentences.append(
        f"Held-out countries, greedy: {after['base']:.0%} are right before training, {after['nll']:.0%} after NLL and "
        f"{after['deft']:.0%} after DEFT."
    )
    return [*sentences, LIMITS.format(seeds=len(SEEDS), rows=len(questions(SEEDS[0])), rates=page(RATES_PAGE))]


def verdict(name: str, found: Means) -> str:
    """Which objective is better by a measure, if the interval of DEFT - NLL leaves out 0 and all seeds agree.

    >>> less = Means({}, TokenMean(-0.2, -0.3, -0.1), [-0.3, -0.1])
    >>> verdict("wrong", less), verdict("heldout", less)
    ('DEFT is better', 'NLL is better')
    >>> verdict("wrong", Means({}, TokenMean(-0.2, -0.5, 0.1), [-0.3, -0.1]))
    'Not decided'
    >>> verdict("wrong", Means({}, TokenMean(-0.2, -0.3, -0.1), [-0.5, 0.1]))
    'Not decided'
    """
    difference = found.difference
    agree = all((seed > 0) == (difference.mean > 0) for seed in found.by_seed)
    if difference.low <= 0 <= difference.high or not agree:
        return "Not decided"
    return "DEFT is better" if (difference.mean > 0) == MEASURES[name].more_is_better else "NLL is better"


def plot_quickstart(folder: Path, found: dict[str, list[dict[str, Any]]], means: dict[str, Means]) -> Path:
    """The right answers to held-out questions, and the measures with their intervals; saves the table too."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"base": "#7F7F7F", "nll": "#000000", "deft": "#009E73"}  # as in every other figure
    markers = {"base": "s", "nll": "o", "deft": "D"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for place, label in enumerate(LABELS):
        values = sorted(value for part in found[label] for value in part["heldout"]["p"])
        style = {"color": colours[label], "marker": markers[label], "label": NAMES[label]}
        left.plot([(i + 0.5) / len(values) for i in range(len(values))], values, ls="", ms=4, **style)
        for line, name in enumerate(MEASURES):
            mean, low, high = means[name].models[label]
            at = line + 0.18 * (place - 1)
            right.errorbar(mean, at, xerr=[[mean - low], [high - mean]], capsize=2, ls="", ms=5,
                           **(style if not line else style | {"label": None}))  # fmt: skip
    left.set(xlabel="held-out questions, sorted (share)", ylabel="probability of the right answer", ylim=(-0.03, 1.03),
             title="questions that it was not taught")  # fmt: skip
    right.set(xlim=(-0.03, 1.03), xlabel="mean and 95% interval over countries", yticks=range(len(MEASURES)))
    right.set_yticklabels([measure.title for measure in MEASURES.values()])
    right.invert_yaxis()
    left.legend(fontsize=8)
    figure.suptitle(f"{shown_model(MODEL)}, {WRONG_ROWS} of {TRAIN_ROWS} training answers wrong, {len(SEEDS)} seeds")
    path = folder / "quickstart.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    table = {name: {**own.models, "difference": own.difference, "by_seed": own.by_seed} for name, own in means.items()}
    write_atomic(folder / "quickstart.json", json.dumps(table, indent=1))
    return path
