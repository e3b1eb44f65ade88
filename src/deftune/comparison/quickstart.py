"""`deftune quickstart`: two objectives on a real model and a generated task, on a laptop's CPU, in a few minutes.

It shows how the pieces fit and what a gate does during training. It is far too small to rank objectives, and says so.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deftune.artifacts.config import RunConfig, load_config
from deftune.artifacts.display import quiet
from deftune.artifacts.files import write_atomic
from deftune.artifacts.names import shown_model
from deftune.artifacts.results import load_result
from deftune.artifacts.runs import Run
from deftune.artifacts.terminal import line_printer
from deftune.data.encoding import Encoder
from deftune.data.sources import read_rows
from deftune.evaluation.clustered import TokenMean, mean_over_tokens
from deftune.tokens.passes import score_rows
from deftune.training.results import complete
from deftune.training.train import train_run

MODEL = "smollm2"
OBJECTIVES = ("nll", "deft")
REGIME = "gsm_symbolic"
TRAIN_ROWS, TEST_ROWS, SHOWN, ANSWER_TOKENS = 56, 24, 2, 64
COLUMNS = {"nll": "NLL", "p": "mean p", "concentration": "concentration sum P^2", "entropy": "entropy"}
CAUTION = (
    "This is a demonstration: one seed, {rows} rows, a model of 135M parameters. It cannot rank objectives. NLL is "
    "expected to win on NLL, and DEFT's may be above the untuned model's: DEFT gives up tokens where the model is "
    "confident in another one, and those dominate NLL. To compare objectives, use your own data, several seeds and a "
    "task's own score."
)


def quickstart_config(folder: Path, objective: str) -> RunConfig:
    """The run of one objective; all else is the same, the order of the data too."""
    return load_config(None, base={
        "run": str(folder / objective),
        "objective": objective,
        "model": {"name": MODEL},
        "data": {"train": [{"generate": REGIME, "limit": TRAIN_ROWS}], "max_length": 384},
        "train": {"batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-4, "save_steps": 5, "keep": 1, "seed": 0,
                  "precision": precision_for(folder)},
    })  # fmt: skip


def precision_for(folder: Path) -> str:
    """The precision of an earlier call, else the faster one on this machine: not every CPU gains by bfloat16."""
    for objective in OBJECTIVES:
        run = Run(folder / objective)
        if run.config.is_file():
            return run.read_config().train.precision
    if torch.cuda.is_available():
        return "auto"
    return "bf16" if product_seconds(torch.bfloat16) < product_seconds(torch.float32) else "fp32"


def product_seconds(dtype: torch.dtype) -> float:
    a, b = torch.ones(512, 576, dtype=dtype), torch.ones(576, 4096, dtype=dtype)
    torch.mm(a, b)
    start = time.perf_counter()
    for _ in range(10):
        torch.mm(a, b)
    return time.perf_counter() - start


def quickstart(folder: Path, console: Console) -> None:
    """Train, compare, draw, and say what to do next; a second call resumes the first."""
    say: Callable[[str], None] = lambda text: console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
    check_disk(folder)
    say(escape(f"{takes(folder)}; `deftune quickstart --out {folder} --clean` removes all of it"))
    say(f"[bold]1. Train[/bold] {shown_model(MODEL)} on {TRAIN_ROWS} generated word problems, once with each objective")
    for objective in OBJECTIVES:
        outcome = train_run(quickstart_config(folder, objective), console, title=objective)
        if outcome.state != "finished":
            raise SystemExit(143)
        shutil.rmtree(outcome.run.checkpoints, ignore_errors=True)  # the result is in model/
    say(f"\n[bold]2. Compare[/bold] on {TEST_ROWS} problems that were not trained on")
    models = {"base": MODEL, **{objective: str(folder / objective) for objective in OBJECTIVES}}
    results = {label: measure(label, name, folder, console) for label, name in models.items()}
    say("")
    console.print(comparison_table(results))
    picture = plot_quickstart(folder, results)
    say("\n[bold]3. A few answers[/bold] (greedy)")
    for i in range(SHOWN):
        say(f"\n[dim]{escape(results['base']['questions'][i][:300])}[/dim]")
        for label in models:
            say(
                f"[bold]{label:5}[/bold] {escape(repr(results[label]['answers'][i].strip()[:400]))}",
            )
    say(f"\n[yellow]{CAUTION.format(rows=TRAIN_ROWS)}[/yellow]")
    line_printer(console)(
        f"\nuses {gigabytes(size_of(folder))} of disk; `deftune quickstart --out {folder} --clean` removes it\n"
        f"\npicture: {picture}\nruns:    deftune runs {folder}\nchat:    deftune chat {folder / 'deft'}"
    )
    say("next:    deftune init run.yaml, put your data in it, deftune train run.yaml")


# --- disk and time ----------------------------------------------------------------------------------------------------

WEIGHTS_BYTES = 540_000_000  # of SmolLM2-135M in float32
PEAK_BYTES = 7 * WEIGHTS_BYTES  # the first model, and two checkpoints of the second run, each with Adam's two moments
MINUTES = "about 4 minutes on two free CPU cores"
WRITTEN = (*OBJECTIVES, "heldout_base.json", *(f"heldout_{name}.json" for name in OBJECTIVES), "quickstart.png",
           "quickstart.json")  # fmt: skip


def takes(folder: Path) -> str:
    """What a call needs, before it begins: disk and time."""
    if all(Run(folder / objective).status()["state"] == "finished" for objective in OBJECTIVES):
        return f"{folder} is trained already"
    return (
        f"This takes {MINUTES}, and {gigabytes(PEAK_BYTES)} of disk in {folder} while it trains, "
        f"{gigabytes(2 * WEIGHTS_BYTES)} afterwards"
    )


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
    if not any(Run(folder / objective).config.is_file() for objective in OBJECTIVES):
        raise ValueError(f"{folder}: holds no quickstart; nothing is removed")
    before = size_of(folder)
    for name in WRITTEN:
        path = folder / name
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


def measure(label: str, name: str, folder: Path, console: Console) -> dict[str, Any]:
    """Held-out token statistics and a few answers of one model, kept in a file for the next call."""
    path = folder / f"heldout_{label}.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if "concentration" in found["columns"]:  # older versions called it "focus": measured again
            return found
    with quiet():
        model, tokenizer = load_result(name)
        encoder = Encoder(tokenizer, mask="assistant", max_length=384)
        rows = read_rows(f"generated:{REGIME}", split="test", limit=TEST_ROWS)
        columns = (TextColumn(f"{label:5} {{task.description}}"), BarColumn(bar_width=20), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("scores", total=len(rows))
            advance: Callable[[int], None] = lambda n: progress.advance(task, n)  # noqa: E731
            scores = score_rows(model, tokenizer, rows, encoder=encoder, progress=advance)
            progress.add_task("writes", total=None)
            prompts = [encoder.encode_prompt(row) for row in rows[:SHOWN]]
            answers = complete(
                model, tokenizer, prompts, end_ids=encoder.end_ids.values(), max_new_tokens=ANSWER_TOKENS
            )
    stats = scores.stats
    result = {
        "questions": [str(row.messages[-2]["content"]) for row in rows[:SHOWN]],
        "answers": answers,
        "rows": scores.row.tolist(),
        "columns": {name: getattr(stats, name).tolist() for name in COLUMNS},
    }
    write_atomic(path, json.dumps(result))
    return result


def comparison_table(results: dict[str, dict[str, Any]]) -> Table:
    """Means with 95% intervals, and the paired difference of the two objectives."""
    first, second = OBJECTIVES
    table = Table(title="held-out tokens: mean, and its 95% interval (rows resampled)")
    for heading in ("", *results, f"{second} - {first}"):
        table.add_column(heading, justify="left" if not heading else "right")
    for column, title in COLUMNS.items():
        cells = [cell(estimate(results[label], column)) for label in results]
        rows = torch.tensor(results[first]["rows"])
        difference = torch.tensor(results[second]["columns"][column]) - torch.tensor(results[first]["columns"][column])
        table.add_row(title, *cells, cell(mean_over_tokens(difference, rows)))
    return table


def cell(found: TokenMean) -> str:
    """Two lines, so that five of them fit into eighty columns."""
    return f"{found.mean:.3f}\n[dim]{found.low:.3f}, {found.high:.3f}[/dim]"


def estimate(result: dict[str, Any], column: str) -> TokenMean:
    return mean_over_tokens(torch.tensor(result["columns"][column]), torch.tensor(result["rows"]))


def plot_quickstart(folder: Path, results: dict[str, dict[str, Any]]) -> Path:
    """p and concentration over the training steps, and held-out probabilities before and after; saves the table too."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"base": "#7F7F7F", "nll": "#000000", "deft": "#009E73"}  # as in every other figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    table: dict[str, Any] = {}
    for objective in OBJECTIVES:
        records = [r for r in Run(folder / objective).read_metrics() if r["kind"] == "train"]
        steps = [r["step"] for r in records]
        table[objective] = {
            key: [r[key] for r in records] for key in ("step", "p", "concentration", "gate", "nll", "loss")
        }
        left.plot(steps, [r["p"] for r in records], color=colours[objective], label=f"{objective}: p")
        left.plot(steps, [r["concentration"] for r in records], color=colours[objective], ls="--",
                  label=f"{objective}: concentration sum P²")  # fmt: skip
    left.set(xlabel="optimizer step", ylabel="mean over the step's tokens", title="p and concentration while training")
    left.legend(fontsize=8)
    edges = torch.logspace(-5, 0, 26)
    for label, result in results.items():
        counts = torch.histc(torch.tensor(result["columns"]["p"]).clamp(1e-5, 1).log10(), 25, -5, 0)
        right.stairs((counts / counts.sum()).tolist(), edges.tolist(), color=colours[label], label=label)
        table[f"heldout_{label}"] = counts.tolist()
    right.set(
        xscale="log", xlabel="p of the held-out target", ylabel="share of tokens", title="what the model believes"
    )
    right.legend(fontsize=8)
    figure.suptitle(f"{shown_model(MODEL)} on {REGIME}: {TRAIN_ROWS} rows, one seed; too small to rank objectives")
    path = folder / "quickstart.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    write_atomic(folder / "quickstart.json", json.dumps(table))
    return path
