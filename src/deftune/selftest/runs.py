"""Rows about whole training runs: determinism, resuming, kills, full disks, options."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from deftune.artifacts import checkpoints, folders
from deftune.artifacts.config import RunConfig
from deftune.artifacts.display import quiet
from deftune.artifacts.runs import Run
from deftune.losses import token_stats
from deftune.objectives import TokenStats
from deftune.objectives import objective as parse_objective
from deftune.selftest import tiny
from deftune.selftest.check import Figure, Size, counted
from deftune.selftest.process import Started, start
from deftune.training.train import Outcome, train_run

# what a clock or the machine's load decides, in metrics and summaries
CLOCK = (
    "step_seconds", "tokens_per_second", "memory_gib", "eval_runtime", "eval_samples_per_second",
    "eval_steps_per_second", "seconds", "tokens_seconds", "eval_seconds", "time", "cost",
    "prepare_seconds", "train_seconds", "save_seconds", "load_seconds", "overhead_seconds",
)  # fmt: skip


class Bench:
    """The tiny model and its conversations in a folder; configs, runs and processes over them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = tiny.save_chat_model(folder / "model")
        self.data = tiny.save_conversations(folder / "chat.jsonl")

    def config(self, name: str, changes: Mapping[str, Any]) -> RunConfig:
        content = tiny.run_content(self.folder / name, self.model, self.data, changes)
        return RunConfig.model_validate(content)

    def train(self, name: str, changes: Mapping[str, Any]) -> Path:
        """A run in this process; its folder."""
        quietly(self.config(name, changes))
        return self.folder / name

    def start(self, name: str, changes: Mapping[str, Any], **how: Any) -> Started:
        """The same run as a command in a process of its own."""
        path = self.folder / f"{name}.yaml"
        content = tiny.run_content(self.folder / name, self.model, self.data, changes)
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return start("train", path, output=path.with_suffix(".out"), watched=self.folder / name, **how)


def quietly(config: RunConfig) -> Outcome:
    with open(os.devnull, "w") as nowhere:
        return train_run(config, Console(file=nowhere))


def weights(run: Path) -> dict[str, bytes]:
    """The result's tensors, byte for byte."""
    folders.verify(run / "model")
    return {path.name: path.read_bytes() for path in sorted((run / "model").glob("*.safetensors"))}


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was recorded, but for the clock."""
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in Run(run).read_metrics()]


def same(run: Path, reference: Path) -> bool:
    return weights(run) == weights(reference) != {} and metrics(run) == metrics(reference)


def rewound(run: Path, step: int, copy: Path) -> Path:
    """A copy of the run as a kill soon after the checkpoint of ``step`` would leave it."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*", "model"))
    shutil.copytree(run / "checkpoints" / f"checkpoint-{step}", copy / "checkpoints" / f"checkpoint-{step}")
    (copy / "status.json").write_text(json.dumps({"state": "running", "step": step}))
    return copy


def last_record(run: Path) -> int:
    return max((record["step"] for record in Run(run).read_metrics()), default=0)


def last_checkpoint(run: Path) -> int:
    found = checkpoints.latest(run / "checkpoints", lambda _: None)
    return checkpoints.step_of(found) or 0 if found else 0


def unfinished_files(run: Path) -> list[str]:
    """Files that a run which has ended should not have left."""
    return sorted(path.name for path in run.rglob(".*") if path.name != ".lock")


# --- determinism, resuming --------------------------------------------------------------------------------------------


def training_twice(size: Size) -> Figure:
    """Row 10, the training part: runs of 20 steps, bitwise equal."""
    bench, number = Bench(size.folder), size(2, 10)
    runs = [bench.train(f"run-{i}", {"train.max_steps": 20, "train.save_steps": 100}) for i in range(number)]
    equal = sum(same(run, runs[0]) for run in runs)
    return Figure(f"{equal} of {number} runs of 20 training steps bitwise equal", equal == number)


def resume(size: Size) -> Figure:
    """Row 14: resumed after every step, with and without data workers; once more after a second stop."""
    bench, steps = Bench(size.folder), size(9, 40)  # epochs have 8 steps: 60 rows, 8 a step
    misses: list[str] = []
    tried = 0
    for workers in (0, 2) if size.full else (0,):
        settings = {"train.max_steps": steps, "train.save_steps": 1, "train.keep": 99, "train.workers": workers}
        reference = bench.train(f"reference-{workers}", settings)
        for step in range(1, steps + 1):
            rewound(reference, step, size.folder / "copy")
            bench.train("copy", settings)
            if step == steps // 2:  # and stopped once more, on the way
                rewound(size.folder / "copy", step + 1, size.folder / "again")
                shutil.rmtree(size.folder / "copy")
                (size.folder / "again").rename(size.folder / "copy")
                bench.train("copy", settings)
            tried += 1
            if not same(size.folder / "copy", reference):
                misses.append(f"step {step}, workers {workers}")
    return counted(f"resumes bitwise the same (every step of {steps})", tried, misses)


# --- kills, signals, disks --------------------------------------------------------------------------------------------

SHORT = {"train.max_steps": 3, "train.save_steps": 1, "train.keep": 1}  # writes, replaces, removes checkpoints


def kills(size: Size) -> Figure:
    """Row 15: SIGKILL at changes of the file system, spread over a run; `benchmarks/kills.py` has random moments."""
    bench, wanted = Bench(size.folder), size(6, 60)
    started = bench.start("reference", SHORT, count_in=size.folder / "count")
    if started.ended(600):
        return Figure(f"the undisturbed run fails: {started.output.read_text()[-300:]}", False)
    number, draw = int((size.folder / "count").read_text()), random.Random(0)
    misses: list[str] = []
    lost = 0
    for part in range(wanted):
        place, name = draw.randint(1 + part * number // wanted, (part + 1) * number // wanted), f"run-{part}"
        first = bench.start(name, SHORT, kill_at=place).ended(600)
        run = size.folder / name
        lost = max(lost, last_record(run) - last_checkpoint(run))
        second = bench.start(name, SHORT).ended(600)
        whole = second == 0 and same(run, size.folder / "reference") and not unfinished_files(run)
        if first != -signal.SIGKILL or not whole:
            misses.append(f"change {place} of {number}: exit codes {first}, {second}")
        else:
            shutil.rmtree(run)
    figure = counted("killed runs end bitwise the same", wanted, misses)
    return Figure(f"{figure.text}, {lost} step lost at most", figure.holds and lost <= 1, figure.misses)


def full_disk(size: Size) -> Figure:
    """Row 16: a file that cannot grow while a checkpoint is written."""
    bench, settings = Bench(size.folder), {"train.max_steps": 4, "train.save_steps": 1, "train.keep": 9}
    reference = bench.train("reference", settings)
    misses: list[str] = []
    tried = 0
    for limit in [2_000, 10_000, 30_000, *range(50_000, 330_000, 20_000)] if size.full else [150_000]:
        run = rewound(reference, 2, size.folder / f"disk-{limit}")
        (run / "metrics.jsonl").write_text("")  # short, so that a checkpoint is the first file that is too large
        started = bench.start(run.name, settings, file_limit=limit)
        code, text = started.ended(600), started.output.read_text()
        if code == 0:  # everything fits
            continue
        tried += 1
        errors = [line for line in text.splitlines() if line.startswith("deftune: ")]
        clear = code == 2 and len(errors) == 1 and "could not be written" in errors[0] and "Traceback" not in text
        intact = last_checkpoint(run) == 2 and not unfinished_files(run)
        again = bench.start(run.name, settings).ended(600)
        if not (clear and intact and again == 0 and weights(run) == weights(reference)):
            misses.append(f"file limit {limit}: exit code {code}, {errors[:1]}")
    return counted("full disks: clear message, old checkpoint intact, resumed bitwise", tried, misses)


def sigterm(size: Size) -> Figure:
    """Row 16: SIGTERM ends a run with a checkpoint of its last step."""
    bench, settings = Bench(size.folder), {"train.max_steps": 60, "train.save_steps": 1000}
    reference, number = bench.train("reference", settings), size(1, 5)
    misses: list[str] = []
    for part in range(number):
        run = size.folder / f"run-{part}"
        started = bench.start(run.name, settings)
        until = time.monotonic() + 600
        while last_record(run) < 3 + 8 * part and started.process.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(started.process.pid, signal.SIGTERM)
        code, stopped = started.ended(600), last_checkpoint(run)
        again = bench.start(run.name, settings).ended(600)
        if code != 143 or not 0 < stopped < 60 or again or not same(run, reference):
            misses.append(f"SIGTERM {part}: exit codes {code}, {again}, checkpoint {stopped}")
    return counted("SIGTERMs: checkpoint written, resumed bitwise", number, misses)


# --- options ----------------------------------------------------------------------------------------------------------


def options(size: Size) -> Figure:
    """Row 27: an option changes the run as it says, or is refused; never ignored. Tests have the options of saving."""
    bench = Bench(size.folder)
    misses: list[str] = []
    tried = 0
    specs = ["nll", "deft", "clip"] + (["linear", "cayley", "mile", "deft | mean_one", "eaft"] if size.full else [])
    for spec in specs:
        want = loss_of_all_rows(bench, spec)
        for packing in (False, True):
            for lora in (None, {"r": 4, "alpha": 8, "dropout": 0.0}):
                tried += 1
                name = f"cell-{tried}"
                # one step over all rows: its loss does not depend on their order
                run = bench.train(name, {
                    "objective": spec, "data.packing": packing, "model.lora": lora, "train.max_steps": 1,
                    "train.batch_size": 60, "train.micro_batch_size": 20,
                })  # fmt: skip
                got = next(r["loss"] for r in Run(run).read_metrics() if r["kind"] == "train")
                if abs(got - want) > 1e-5 * max(1, abs(want)):
                    misses.append(f"{spec}, packing {packing}, LoRA {bool(lora)}: loss {got:.6f}, expected {want:.6f}")
    for name, options in REFUSED.items():
        tried += 1
        if not refused(size.folder / "trainer", options):
            misses.append(f"{name}: not refused")
    return counted("cells honoured or refused", tried, misses)


def loss_of_all_rows(bench: Bench, spec: str) -> float:
    """The objective's mean over every supervised token, from the model's own float64 logits."""
    from deftune.artifacts.models import load_model, load_tokenizer
    from deftune.data.encoding import Encoder, encode_rows
    from deftune.data.sources import read_rows

    with quiet():
        tokenizer, model = load_tokenizer(str(bench.model)), load_model(str(bench.model)).double()
    encoded = encode_rows(read_rows(bench.data), Encoder(tokenizer, max_length=128)).examples
    stats: list[TokenStats] = []
    with torch.no_grad():
        for example in encoded:
            logits = model(torch.tensor([example.input_ids])).logits[0, :-1]
            stats.append(token_stats(logits, torch.tensor(example.labels[1:])))
    objective = parse_objective(spec)
    return float(objective.loss(TokenStats.cat(stats)).mean())


REFUSED: dict[str, dict[str, Any]] = {
    "TRL's loss_type": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "Liger's cross-entropy": {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}},
    "Liger's fused head": {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
    "a mean of rank means": {"average_tokens_across_devices": False},
    "sequence parallelism": {"parallelism_config": type("Parallel", (), {"sp_enabled": True})},
    "context parallelism": {"parallelism_config": type("Parallel", (), {"cp_enabled": True})},
    "tensor parallelism of a whole model": {"parallelism_config": type("Parallel", (), {"tp_enabled": True})},
}
REFUSALS = ("cannot be combined", "average_tokens", "needs a model that transformers divided")  # of `DeftSFTTrainer`


def refused(folder: Path, options: dict[str, Any]) -> bool:
    """Whether the trainer refuses an option that it could not honour."""
    from trl.trainer.sft_config import SFTConfig

    from deftune.training.assembly import checkpointing_argument
    from deftune.training.trainer import DeftSFTTrainer

    tokenizer = tiny.make_tokenizer()
    plain = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False}
    if "parallelism_config" in options:
        arguments: Any = type("Arguments", (), options)
    else:
        arguments = SFTConfig(**plain, **checkpointing_argument(False), **options)
    try:
        DeftSFTTrainer(tiny.make_model(tokenizer), arguments, processing_class=tokenizer)
    except ValueError as error:
        return any(text in str(error) for text in REFUSALS)
    except ImportError:  # Liger is not installed: nothing could be ignored
        return True
    return False
