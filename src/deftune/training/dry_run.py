"""`deftune train --dry-run`: what a run would take, by one micro-batch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deftune.artifacts.config import RunConfig
from deftune.artifacts.display import quiet
from deftune.artifacts.runs import Run
from deftune.training.assembly import make_trainer
from deftune.training.data_record import facts
from deftune.training.guard import StepInputs
from deftune.training.machine import data_ranks, precision_of
from deftune.training.plan import MOMENT_BYTES
from deftune.training.preparation import prepare
from deftune.training.trainer import peak_gib


def dry_run(config: RunConfig, say: Callable[[str], None]) -> None:
    """One micro-batch forward and backward: what a run would take, without a run's folder."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, say)
        for line in facts(prepared):
            say(line)
        trainer = make_trainer(prepared, Run(Path(folder)), [])
        model = trainer.model
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        everything = sum(p.numel() for p in model.parameters())
        batches = iter(trainer.get_train_dataloader())
        first, seconds = next(batches), 0.0
        supervised = int((first["labels"] != -100).sum())
        say(f"first micro-batch: {tuple(first['input_ids'].shape)} tokens, {supervised:,} of them supervised")
        for _ in range(2):  # the first time warms up
            trainer._inputs = StepInputs(1, [first], max(1, supervised))
            start = time.perf_counter()
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(model.train(), trainer._prepare_inputs(dict(first)))
            loss.backward()
            seconds = time.perf_counter() - start if not torch.cuda.is_available() else _synced(start)
            model.zero_grad(set_to_none=False)
        state = MOMENT_BYTES[config.train.optimizer] * trainable / 2**30
        accumulation = config.train.batch_size // (config.train.micro_batch_size * data_ranks(config))
        say(f"{trainable:,} of {everything:,} parameters are trained, in {precision_of(config)}")
        say(f"memory about {peak_gib(trainer.accelerator.device) + state:.1f} GiB, {state:.1f} of it the optimizer's")
        step = seconds * accumulation
        say(f"a step takes about {step:.1f} s, the run {step * prepared.steps / 60:.0f} min")


def _synced(start: float) -> float:
    torch.cuda.synchronize()
    return time.perf_counter() - start
