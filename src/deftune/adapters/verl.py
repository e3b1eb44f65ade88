"""verl's SFT trainer with a deftune objective: ``torchrun -m deftune.adapters.verl ... deft.objective=deft``."""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
import re
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from deftune.adapters.versions import need_version
from deftune.data.encoding import end_tokens_of
from deftune.losses import columns_read, loss_from_log_probs, token_loss, token_stats
from deftune.objectives import IGNORE_INDEX, Context, Objective, StepStats, TokenStats, step_stats
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import from_columns

Source = Literal["logits", "columns"]
SETTINGS = {"objective": "deft", "ray": False}
ENGINES = ("fsdp", "fsdp2", "megatron")


def settings(config: Any) -> dict[str, Any]:
    """The keys below ``deft`` of verl's config, with defaults.

    >>> settings({"deft": {"objective": "cayley"}})
    {'objective': 'cayley', 'ray': False}
    """
    given = dict(config.get("deft") or {})
    if unknown := sorted(set(given) - set(SETTINGS)):
        raise ValueError(f"deftune: unknown key deft.{unknown[0]}; known: {', '.join(f'deft.{k}' for k in SETTINGS)}")
    return SETTINGS | given


def choose_source(config: Any, objective: Objective) -> Source:
    """Whether the loss reads verl's logits or the columns (log_probs, entropy, sum_pi_squared) of its model output.

    The logits are the better source: float32 statistics without verl's extra ``[tokens, V]`` tensors, and the likeliest
    tokens. verl has no whole logits with fused kernels, sequence parallel, padded packs, and Megatron.

    Args:
        config: verl's SFT config.
        objective: the objective to train.

    Raises:
        ValueError: verl cannot give what the objective reads with this config, or would train another loss beside it.
    """
    engine, model = config.engine, config.model
    if engine.strategy not in ENGINES:
        raise ValueError(
            f"deftune: engine.strategy={engine.strategy} is not supported; its engine does not return what an "
            f"objective reads. Use one of {', '.join(ENGINES)}"
        )
    if model.get("mtp") and model.mtp.get("enable_train"):
        raise ValueError(
            "deftune: model.mtp.enable_train trains the multi-token heads with NLL beside the objective; turn it off"
        )
    reasons = [
        reason
        for holds, reason in (
            (engine.strategy == "megatron", "engine.strategy=megatron"),
            (model.use_fused_kernels, "model.use_fused_kernels=True"),
            (engine.get("ulysses_sequence_parallel_size", 1) > 1, "engine.ulysses_sequence_parallel_size > 1"),
            (engine.get("pad_to_length"), "engine.pad_to_length=True"),
        )
        if holds
    ]
    if not reasons:
        return "logits"
    read = columns_read(objective)
    if "top_log_p" in read:
        raise ValueError(
            f"deftune: `{objective}` reads the likeliest tokens of each row, and verl has no whole logits with "
            f"{' and '.join(reasons)}; turn that off, or use eaft(norm=full), which reads the entropy"
        )
    if "log_collision" in read and model.use_fused_kernels:
        raise ValueError(
            f"deftune: `{objective}` reads sum P^2, which verl's fused kernels do not return; "
            f"set model.use_fused_kernels=False"
        )
    return "columns"


class ObjectiveLoss:
    """An objective as verl's loss function: sum of token losses / batch_num_tokens x dp_size.

    verl calls it in two ways. With ``student_logits`` (verl's hook for losses on logits) it returns the token losses,
    which verl gathers into the model output; with ``model_output`` it returns the loss of the micro-batch. Ray
    pickles it to the workers.

    Args:
        objective: the objective to train.
        source: from `choose_source`.
        special_ids: the end tokens of ``| eos(...)``.
        vocab_size: V, for the source "columns".
    """

    def __init__(self, objective: Objective, source: Source, special_ids: tuple[int, ...], vocab_size: int):
        self.objective, self.source, self.special_ids, self.vocab_size = objective, source, special_ids, vocab_size
        self.measured: list[TokenStats] = []  # of the no-grad pass over a step
        self.step: StepStats | None = None
        self.group: Any = None
        self.number = self.forwards = self.backwards = 0  # of the optimizer step that is under way

    def switches(self, phase: str) -> dict[str, Any]:
        """The keys of a batch that make verl hand over what the objective reads."""
        if self.source == "logits":
            # verl's own log_probs cost [tokens, V] memory: only the first step compares with them
            return {"distillation_use_topk": True, "distillation_only": phase != "check"}
        read = columns_read(self.objective)
        return {"calculate_entropy": "entropy" in read, "calculate_sum_pi_squared": "log_collision" in read}

    def __call__(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Tensor | None = None
    ) -> Any:
        # verl's own alignment: position t predicts token t + 1 of the packed rows; the mask leaves out each row's end
        mask = torch.roll(data["loss_mask"].values(), -1)
        targets = torch.roll(data["input_ids"].values(), -1).masked_fill(mask == 0, IGNORE_INDEX)
        phase: str = data["deft_phase"]
        if student_logits is not None:
            return self._on_logits(student_logits, targets[None], phase, data)
        if phase == "measure":
            self.group = dp_group
            if self.source == "columns":
                self.measured.append(self._stats(model_output, targets))
            return torch.zeros((), device=mask.device), {}
        if self.source == "logits":
            losses = model_output["deft_loss"].values()
        else:
            chosen = targets != IGNORE_INDEX
            mask, stats = mask[chosen], self._stats(model_output, targets)
            losses = loss_from_log_probs(
                model_output["log_probs"].values()[chosen], self.objective, vocab_size=self.vocab_size,
                entropy=stats.entropy, log_collision=stats.log_collision, targets=stats.targets,
                context=self._context(data),
            )  # fmt: skip
        loss = (losses * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
        self._count_backward(loss, data["deft_step"])
        return loss, self._evidence(loss, model_output, targets, data) if phase == "check" else {}

    def _on_logits(self, logits: Tensor, targets: Tensor, phase: str, data: Any) -> dict[str, Tensor]:
        if phase == "measure":
            # map: without the logits, which the record of token_stats keeps
            self.measured.append(token_stats(logits, targets).map(lambda vector: vector, self.objective.top_k))
            return {}
        losses = token_loss(logits, targets, self.objective, reduction="none", context=self._context(data))
        if phase != "check":
            return {"deft_loss": losses}
        return {"deft_loss": losses, "deft_nll": token_loss(logits.detach(), targets, "nll", reduction="none")}

    def _stats(self, model_output: Any, targets: Tensor) -> TokenStats:
        chosen = targets != IGNORE_INDEX

        def column(name: str) -> Tensor:
            if name not in model_output:
                return torch.full_like(log_p, torch.nan)
            values = model_output[name].values().detach()[chosen]
            if values.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"deftune: verl computed {name} in {values.dtype}, too coarse for a gate; "
                    f"use an engine that computes it in float32"
                )
            return values

        log_p = model_output["log_probs"].values().detach()[chosen]
        log_collision = column("sum_pi_squared").log().clamp(max=0)
        return from_columns(
            log_p, column("entropy"), log_collision, vocab_size=self.vocab_size, targets=targets[chosen]
        )

    def _context(self, data: Any) -> Context:
        context = Context(progress=data["deft_progress"], special_ids=self.special_ids)
        if self.measured:
            self.step = step_stats(self.objective, self.measured, context=context, group=self.group)
            self.measured = []
        return Context(context.progress, self.special_ids, self.step)

    def _count_backward(self, loss: Tensor, number: int) -> None:
        """Every training loss must be backpropagated before the next optimizer step."""
        if not loss.requires_grad:
            return
        if number != self.number:
            if self.forwards != self.backwards:
                raise RuntimeError(
                    f"deftune: verl backpropagated {self.backwards} of the {self.forwards} losses of "
                    f"`{self.objective}` in step {self.number}, so it trains something else; this verl is not supported"
                )
            self.number, self.forwards, self.backwards = number, 0, 0
        self.forwards += 1
        loss.register_hook(self._note_backward)

    def _note_backward(self, _: Tensor) -> None:
        self.backwards += 1

    def _evidence(self, loss: Tensor, model_output: Any, targets: Tensor, data: Any) -> dict[str, float]:
        """What `check_first_step` compares, per micro-batch."""
        chosen = targets != IGNORE_INDEX
        nll = -model_output["log_probs"].values().detach()[chosen].double()
        ours = model_output["deft_nll"].values()[chosen] if self.source == "logits" else nll
        return {
            "deft/loss": float(loss.detach()) / data["dp_size"],
            "deft/nll": float(nll.sum()) / data["batch_num_tokens"],
            "deft/share": float(torch.roll(data["loss_mask"].values(), -1)[chosen].sum()) / data["batch_num_tokens"],
            "deft/difference": float(((ours - nll).abs() / (1 + nll)).max()) if len(nll) else 0.0,
        }


def check_first_step(metrics: dict[str, Any], objective: Objective) -> str:
    """Compare verl's report of its first step with what the objective's loss saw; take the latter out of ``metrics``.

    Returns:
        A line for the user: the loss, and the NLL of the same tokens.

    Raises:
        RuntimeError: verl trained another loss, only a part of the tokens, or logits of other tokens.
    """
    loss, nll, share, difference = (
        _flat(metrics.pop(f"deft/{name}", [])) for name in ("loss", "nll", "share", "difference")
    )
    if not loss or not math.isclose(sum(loss), metrics["loss"], rel_tol=1e-4, abs_tol=1e-6):
        raise RuntimeError(
            f"deftune: verl's first step has the loss {metrics['loss']:.6g}, `{objective}` has "
            f"{f'{sum(loss):.6g}' if loss else 'not been called'}; this verl or engine takes its loss from elsewhere"
        )
    if not math.isclose(sum(share), 1, rel_tol=1e-6):
        raise RuntimeError(
            f"deftune: `{objective}` saw {sum(share):.2%} of the first step's supervised tokens; verl trains the rest "
            f"with another loss"
        )
    if max(difference) > 0.01:
        raise RuntimeError(
            f"deftune: log-probabilities of verl's logits and verl's own log_probs differ by {max(difference):.2g} "
            f"(relative to 1 + NLL), so the logits belong to other tokens; this verl is not supported"
        )
    return f"deftune: verl trains `{objective}`: loss {sum(loss):.6g} in its first step, NLL {sum(nll):.6g}"


def _flat(values: Any) -> list[float]:
    """Metrics of micro-batches, in a list per rank or not."""
    return [x for value in values for x in _flat(value)] if isinstance(values, list) else [values]


def trainer_class(base: Any) -> Any:
    """verl's SFTTrainer (the torchrun or the Ray one) with the loss of ``deft.objective``.

    The class changes one step of verl's: after the engine is built, the loss function is replaced, and each batch gets
    the keys that the loss reads.
    """

    class DeftSFTTrainer(base):
        def _build_engine(self) -> None:
            super()._build_engine()
            from verl.utils import tensordict_utils as tu

            ray = settings(self.config)["ray"]
            objective = parse_objective(settings(self.config)["objective"])
            source = choose_source(self.config, objective)
            special_ids = tuple(sorted(end_tokens_of(self.model_config.tokenizer).values()))
            vocab_size = self.model_config.hf_config.get_text_config().vocab_size
            loss = self.loss_fn = ObjectiveLoss(objective, source, special_ids, vocab_size)
            client = self.training_client
            client.set_loss_fn(loss_fn=loss)
            calls = {"train": client.train_batch, "infer": client.infer_batch}
            steps = 0  # of this process

            def call(name: str, phase: str, data: Any) -> Any:
                done = self.resume_global_step + steps
                tu.assign_non_tensor(
                    data, deft_phase=phase, deft_step=done + 1, **loss.switches(phase),
                    deft_progress=min(1.0, done / max(1, self.total_training_steps)),
                )  # fmt: skip
                output = calls[name](data)
                return output.get() if ray else output

            def run(name: str, data: Any) -> Any:
                nonlocal steps
                first = name == "train" and steps == 0
                if objective.kind != "local":  # a pass without gradients over the whole step
                    call("infer", "measure", data.copy())
                output = call(name, "check" if first else "loss", data)
                if first and output is not None:  # None: a rank whose outputs verl does not collect
                    line = check_first_step(tu.get(output, "metrics"), objective)
                    if ray or self.rank == 0:
                        print(line)
                steps += name == "train"
                return SimpleNamespace(get=lambda: output) if ray else output

            client.train_batch, client.infer_batch = partial(run, "train"), partial(run, "infer")

    return DeftSFTTrainer


def train(config: Any) -> None:
    """Run verl's SFT trainer on its config; ``deft.objective`` names the objective.

    Raises:
        ValueError: the objective is unknown, or verl cannot train it with this config.
    """
    choose_source(config, parse_objective(settings(config)["objective"]))  # before the model is loaded
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    if settings(config)["ray"]:
        import ray
        from verl.trainer.sft_trainer_ray import SFTTrainer

        ray.init()
        trainer_class(SFTTrainer)(config=config).fit()
        return
    from verl.trainer.sft_trainer import SFTTrainer
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    initialize_global_process_group()
    trainer_class(SFTTrainer)(config=config).fit()
    destroy_global_process_group()


def quoted(argument: str) -> str:
    """The argument with its spec in the quotes that hydra's grammar wants around `deft | floor(0.2)`.

    >>> quoted("deft.objective=deft | floor(0.2)")
    'deft.objective="deft | floor(0.2)"'
    """
    return re.sub(r"""^(\+*deft\.objective=)([^'"].*)$""", r'\1"\2"', argument)


def main() -> None:
    """verl's SFT command with two more keys: ``deft.objective`` (a spec) and ``deft.ray`` (verl's Ray trainer)."""
    need_version("verl")
    import hydra
    from hydra.core.config_store import ConfigStore

    node = {"defaults": ["sft_trainer_engine", "_self_"], "deft": SETTINGS}
    ConfigStore.instance().store(name="deftune_sft", node=node)
    sys.argv[1:] = map(quoted, sys.argv[1:])
    hydra.main(config_path="pkg://verl.trainer.config", config_name="deftune_sft", version_base=None)(train)()


if __name__ == "__main__":
    main()
