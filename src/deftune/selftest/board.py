"""The scoreboard's 28 rows: what is tested, what peers promise or where they broke, what deftune promises.

A row's check measures a figure (`check.Figure`). `deftune selftest` runs the small sizes of the checks that need
nothing but an installation; `pytest -m reliability` runs the full sizes and the tests that stand behind a row.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from deftune.selftest.check import Figure, NotHere, Size
from deftune.selftest.records import Record


@dataclass(frozen=True)
class Row:
    """``checks`` are `module.function` in `deftune.selftest`; without one, only the test suite can measure the row."""

    number: int
    test: str
    peers: str
    promise: str
    checks: tuple[str, ...] = ()
    by: str = "pytest -m reliability"  # what measures a row without a check


ROWS = [
    Row(1, "loss and gate against a float64 oracle: float32, a grid of (a, log p), log p from logits", "quack 1e-5",
        "5e-7 relative (gate: x (1 + |a log p|)); log p: 2.4e-7 (1 + max |z|)", ("losses.loss_and_gate",)),
    Row(2, "gradients of every objective, float64: gate x error, and difference quotients with the focus frozen",
        "optax only", "1e-12; 1e-9", ("losses.gradients",)),
    Row(3, "fused loss and gradients against float64, float32, V from 1 to 262,144 (GPU; CPU beside it)",
        "Liger 1e-6, quack 5e-5", "loss 2e-6, gradient 1e-5 in norm", ("losses.fused_loss",)),
    Row(4, "bfloat16 gradients of hidden states and head; head accumulated over 1 to 1,024 chunks (GPU)",
        "CCE torch + 1e-2, Liger 5e-2 (#512, #827)", "torch eager's error + 1 ulp; flat over the chunks",
        ("losses.bfloat16",)),
    Row(5, "confident token (margin +10, +20): the true class's gradient", "Liger 4 x torch's error",
        "1 x torch's error", ("losses.confident",)),
    Row(6, "log p = -80, -1e4, -inf; logits + 1e4; -inf columns; a NaN logit", "torchtitan stops",
        "finite gates and gradients; offset moves 1e-6; the NaN's token is named", ("losses.extremes",)),
    Row(7, "micro-batch, step or rank without a supervised token; T = 0; V = 1", "NaN: TRL #6668, NeMo #3796",
        "loss 0, gradient exactly 0; an empty step is an error; no hang", ("losses.nothing_supervised",)),
    Row(8, "more than 2^31 logits, rows on both sides (GPU)", "overflow: Liger #803 #1296 #1335",
        "bit-equal to the same rows alone", ("losses.beyond_int32",)),
    Row(9, 'reduction="none" with a random upstream vector', "wrong gradients: Liger #968 #678", "as row 3",
        ("losses.per_token",)),
    Row(10, "determinism: 10 calls of the kernels; runs of 20 training steps", "torchtitan bitwise", "bitwise",
        ("losses.kernels_again", "runs.training_twice")),
    Row(11, "accumulation 1x32, 2x16, 32x1, ragged, every objective; parts without the step's statistics",
        "TRL 1e-3; HF #46731, LLaMA-Factory ASFT x 4", "float64 1e-12, float32 loss 1e-5; refused",
        ("losses.accumulation",)),
    Row(12, "1, 2, 4 ranks with unequal tokens (gloo DDP and FSDP2)", "TRL 1e-3", "float64 1e-10, float32 1e-5"),
    Row(13, "the same 20 steps through deftune's trainer, TRL's and transformers'", "-", "1e-5"),
    Row(14, "resume after every step of 40, data workers 0 and 2, stopped twice", "HF, accelerate #4071 broke",
        "bitwise, all", ("runs.resume",)),
    Row(15, "SIGKILL during training and saving", "HF: the latest checkpoint may be corrupt",
        "500 of 500 resume bitwise, one interval lost at most", ("runs.kills",)),
    Row(16, "disk full while saving; SIGTERM", "HF leaves a partial folder",
        "old checkpoint intact, one clear line, exit code; 20 of 20", ("runs.full_disk", "runs.sigterm")),
    Row(17, "bit flips and truncations of checkpoint files", "a header check only",
        "1,000 of 1,000 detected, the checkpoint before taken with a notice", ("files.damages",)),
    Row(18, "attack files: pickles, YAML tags, templates, remote code, git, links, paths, deep JSON",
        "safetensors' own attacks", "0 of 40 or more executed; nothing read is unpickled, evaluated or run",
        ("attacks.attack_files",)),
    Row(19, "hostile answers to the grader", "remote code in peers; verl #5839 hung",
        "0 side effects of 200 or more, bounded, no process left", ("answers.hostile_answers",)),
    Row(20, "grader against 1,000 or more labelled pairs; 1, 4, 16 workers", "math-verify", "99.5%, the same verdicts"),
    Row(21, "30 or more kinds of bad JSONL", "LLaMA-Factory drops silently",
        "file:line and reason, all; --skip-bad-rows writes them out", ("files.bad_rows",)),
    Row(22, "12 or more real chat templates without {% generation %}", "all-zero masks (marin #7237)",
        "right mask with its end supervised, or an error", ("files.templates",)),
    Row(23, "packing: no target crosses a boundary; answers cut off are named", "verl #5797 leaked",
        "10^4 random cases", ("files.packs",)),
    Row(24, "properties (hypothesis) of objectives, data, sampler, config, specs", "0 of 20 repositories",
        "25 or more properties"),
    Row(25, "random input for five parsers: rows, configs, specs, answers, manifests", "safetensors only", "0 uncaught",
        ("files.fuzz",)),
    Row(26, "mutants of the objectives and the one reduction; branch coverage", "none", "100% killed; 95% of branches",
        by="benchmarks/mutation.py"),
    Row(27, "option honoured or refused: objective x packing x LoRA; saving; parallelism; Liger",
        "the authors' SP trains NLL silently", "100% of cells", ("runs.options",)),
    Row(28, "the same answers for batches of 1, 8, 32 (float32), T = 0 and 1", "lm-eval drifts", "identical",
        ("answers.same_answers",)),
]  # fmt: skip
SMALL = "deftune selftest"  # the command of figures that are smaller than the promise
NUMBERS = tuple(row.number for row in ROWS)


def measure(row: Row, full: bool) -> Figure:
    """A row's figures, each in a folder of its own. Raises `NotHere` where this machine or installation cannot."""
    if not row.checks:
        raise NotHere(f"measured by {row.by}")
    found: list[Figure] = []
    for name in row.checks:
        module, function = name.split(".")
        try:
            check: Callable[[Size], Figure] = getattr(importlib.import_module(f"deftune.selftest.{module}"), function)
        except ModuleNotFoundError as error:
            raise NotHere(f'needs {error.name}: pip install "deftune[eval]"') from error
        with tempfile.TemporaryDirectory() as folder:
            found.append(check(Size(full, Path(folder))))
    misses = tuple(miss for figure in found for miss in figure.misses)
    return Figure("; ".join(figure.text for figure in found), all(figure.holds for figure in found), misses)


def run_rows(numbers: Iterable[int], full: bool, show: Callable[[Row, str, float], None], command: str) -> list[Record]:
    """Measure rows one after the other; ``show`` gets each row, its figure and its seconds as they come."""
    records: list[Record] = []
    for row in (row for row in ROWS if row.number in set(numbers)):
        started = time.monotonic()
        try:
            figure = measure(row, full)
        except NotHere as reason:
            show(row, f"not run: {reason}", 0.0)
            continue
        except Exception as error:  # a broken installation is a figure, too
            figure = Figure(f"{type(error).__name__}: {error}", False)
        seconds = time.monotonic() - started
        text = f"{'ok' if figure.holds else 'FAILED'}: {figure.text}"
        misses = [" ".join(miss.split())[:300] for miss in figure.misses]
        show(row, "\n".join([text, *(f"  - {miss}" for miss in misses[:20])]), seconds)
        details = {"misses": misses} if misses else {}
        records.append(Record.of(row.number, "scoreboard", figure.text, figure.holds, seconds, command, details))
    return records
