"""The record of a training step: means over its tokens, on all micro-batches and ranks, and a histogram of p.

`RunCallback` writes the records of a run into its folder.

The loss of a gated objective may be twenty times smaller than NLL at the same model. So every record has the plain NLL
beside the objective, and the mean gate.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from deftune.artifacts.runs import Run
from deftune.objectives import Context, Objective, TokenStats
from deftune.tokens.conflict import is_confident_conflict
from deftune.tokens.head import Gated
from deftune.training.display import StepDisplay
from deftune.training.stopping import StopSignal

# p falls into (0, 1e-6], (1e-6, 1e-5], ..., (0.1, 0.2], ..., (0.9, 1]
P_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SUMS = (
    "tokens", "objective", "nll", "p", "focus", "gate", "signal", "entropy", "concentration", "suppressed", "conflicts",
    "eos_tokens", "eos_p", "input_tokens",
)  # fmt: skip
SUPPRESSED_GATE = 0.1  # a token is suppressed where its gradient is less than a tenth of NLL's


def input_tokens(inputs: dict[str, Any]) -> Tensor:
    """How many tokens went into the model, padding left out."""
    mask = inputs["row_of"] >= 0 if "row_of" in inputs else inputs.get("attention_mask")
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), device=ids.device) if mask is None else mask.sum()  # made there: no waiting


class StepRecord:
    """Sums over the supervised tokens since the last `take`."""

    def __init__(self, objective: Objective, special_ids: Sequence[int], copies: int = 1):
        """``copies``: how many ranks have the same rows (tensor parallel)."""
        self.objective = objective
        self.special_ids = tuple(special_ids)
        self.copies = copies
        self.sums: Tensor | None = None
        self.constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def beside(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """(edges, special ids) on the device of p: copied once, because a copy to a GPU waits for its queue."""
        if p.device not in self.constants:
            ids = torch.tensor(self.special_ids, dtype=torch.int64, device=p.device)
            self.constants[p.device] = p.new_tensor(P_EDGES), ids
        return self.constants[p.device]

    @torch.no_grad()
    def add(self, stats: TokenStats, context: Context, input_tokens: Tensor, gated: Gated | None = None) -> None:
        """Add one micro-batch without waiting for the GPU.

        Args:
            stats: its supervised tokens.
            context: the context of its loss.
            input_tokens: how many tokens went into the model.
            gated: the gates and losses that the fused loss used; None evaluates the objective here.
        """
        gate, value = self.objective.evaluate(stats, context) if gated is None else (gated.gate, gated.value)
        p, concentration = stats.p, stats.concentration
        edges, ids = self.beside(p)
        special = (stats.targets[:, None] == ids).any(1).to(p.dtype)
        conflicts = is_confident_conflict(stats.log_p, concentration)
        columns = torch.stack([
            torch.ones_like(p), value, stats.nll, p, self.objective.focus(stats, context), gate, gate * stats.error,
            stats.entropy, concentration, (gate < SUPPRESSED_GATE).to(p.dtype), conflicts.to(p.dtype),
            special, special * p,
        ])  # fmt: skip
        above = (p[:, None] > edges).sum(0)
        sums = torch.cat([columns.sum(1), input_tokens.to(p.dtype).reshape(1), above.to(p.dtype)])
        self.sums = sums if self.sums is None else self.sums + sums

    def take(self) -> dict[str, float | list[int]]:
        """The means since the last call, over all ranks; every rank must call. {} where nothing was added."""
        sums, self.sums = self.sums, None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            assert sums is not None, "every rank counts every micro-batch, even one without supervised tokens"
            dist.all_reduce(sums)
            sums /= self.copies
        return {} if sums is None else means(sums.tolist())


def means(sums: list[float]) -> dict[str, float | list[int]]:
    """A record from its sums."""
    total = dict(zip(SUMS, sums))
    tokens = total["tokens"]
    record: dict[str, float | list[int]] = {"tokens": int(tokens), "input_tokens": int(total["input_tokens"])}
    if not tokens:
        return record
    for name in SUMS[1 : SUMS.index("eos_tokens")]:
        record[name] = total[name] / tokens
    if total["eos_tokens"]:
        record["eos_p"] = total["eos_p"] / total["eos_tokens"]
    above = [tokens, *sums[len(SUMS) :], 0]
    record["p_histogram"] = [int(low - high) for low, high in itertools.pairwise(above)]
    return record


def scalars(record: dict[str, float | list[int]]) -> dict[str, float]:
    """The fields of a record that are numbers."""
    return {name: float(value) for name, value in record.items() if not isinstance(value, list)}


class RunCallback(TrainerCallback):
    """Writes the record of each step into the run's folder, updates the display, and stops the run after a signal.

    Args:
        trainer: the `DeftSFTTrainer` of the run.
        run: its folder.
        display: shows the steps.
        stop: the signals that stop the run.
        save: False: the last step has no checkpoint, unless a signal asks for one.
    """

    def __init__(self, trainer: Any, run: Run, display: StepDisplay, stop: StopSignal, save: bool):
        self.trainer, self.run, self.display, self.stop, self.save = trainer, run, display, stop, save

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.save_steps = args.save_steps  # transformers would go on with that of the checkpoint
        if state.is_world_process_zero:
            self.display.start(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        kind = "eval" if "eval_loss" in logs else "train"
        record: dict[str, Any] = {"step": state.global_step, "kind": kind, **logs}
        if kind == "train":
            record["p_histogram"] = self.trainer.last_record.get("p_histogram")
            self.display.step(state.global_step, state.max_steps, logs)
        else:
            final = not self.trainer.is_in_train
            record |= {"final": True} if final else {}  # of the result, after the last step
            self.display.evaluation(state.global_step, state.max_steps, logs, final=final)
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            if control.should_save:  # no checkpoint survives a power cut without the records before it
                file.flush()
                os.fsync(file.fileno())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.trainer.pinned:
            control.should_save = True
        if state.global_step == state.max_steps and args.metric_for_best_model is not None:
            control.should_evaluate = True  # the last step is a candidate too
        if state.global_step >= state.max_steps and not self.save:
            control.should_save = False
        if self.stop.received_anywhere(args.device):
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.display.stop()
