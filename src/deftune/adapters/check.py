"""An objective as the loss of a transformers Trainer, and a check at the first micro-batch that it is in force."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deftune.adapters.logits import TOLERANCE, plain_losses
from deftune.data.encoding import end_tokens_of
from deftune.data.packing import fill_step
from deftune.losses import token_loss
from deftune.objectives import IGNORE_INDEX, Context, Objective
from deftune.objectives import objective as parse_objective
from deftune.tokens.head import base_of, shifted


def parse_supported(stack: str, spec: str | Objective) -> Objective:
    """The objective, if a loss that sees one micro-batch at a time can compute it exactly.

    Raises:
        ValueError: the spec is not an objective, or the objective depends on the whole optimizer step.
    """
    objective = parse_objective(spec)
    if objective.kind != "local":
        raise ValueError(
            f"{stack}: `{objective}` depends on the whole optimizer step, and the loss of a micro-batch cannot see it; "
            f"train it with `deftune train`"
        )
    return objective


class TrainerLoss:
    """An objective as the ``compute_loss_func`` of a transformers Trainer.

        loss = (1 / num_items) sum_t w_t L(p_t),  d loss / d z = w gate (P - onehot) / num_items

    ``num_items`` is the Trainer's count of supervised tokens over all micro-batches and ranks of the optimizer step.
    The first micro-batch with a supervised token is checked: the loss that the Trainer used must be the objective
    of the logits that the model returned, or training stops before the weights change.

    Args:
        stack: the name of the training stack, for messages.
        trainer: the transformers Trainer; its ``compute_loss_func`` becomes this loss.
        objective: a name, a spec such as ``"deft | floor(0.2)"``, or an `Objective`.
        tokenizer: the tokenizer, or a processor that holds one; it gives the end tokens of ``eos(...)``.
        end_tokens: further tokens that end an answer in the stack's template; text that is no token is left out.
        suspects: options of the stack that replace the loss, {what a message calls them: whether they are on}.

    Raises:
        ValueError: the objective needs the whole optimizer step; or ``eos(...)`` and no token ends an answer.
    """

    def __init__(
        self,
        stack: str,
        trainer: Any,
        objective: str | Objective,
        tokenizer: Any,
        *,
        end_tokens: Iterable[str] = (),
        suspects: dict[str, bool] | None = None,
    ):
        self.stack, self.trainer, self.suspects = stack, trainer, suspects or {}
        self.objective = parse_supported(stack, objective)
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        known = [token for token in end_tokens if token in tokenizer.get_added_vocab()]
        self.special_ids = tuple(sorted(end_tokens_of(tokenizer, declared=known).values()))
        if "special_ids" in self.objective.requires and not self.special_ids:
            raise ValueError(f"{stack}: `{self.objective}` needs a token that ends an answer; the tokenizer has none")
        if trainer.compute_loss_func is not None:
            raise ValueError(
                f"{stack}: the trainer already has a loss ({trainer.compute_loss_func!r}); drop one of them"
            )
        self.called = self.checked = False
        self.expected: Tensor | None = None
        self._compute_loss, self._training_step = trainer.compute_loss, trainer.training_step
        self._get_batch_samples = trainer.get_batch_samples
        trainer.get_batch_samples = self._fill_step
        trainer.compute_loss = self._watch_loss
        trainer.training_step = self._check_step
        trainer.compute_loss_func = self

    def __call__(
        self,
        outputs: Any,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        loss_scale: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The loss of a micro-batch; ``loss_scale`` holds weights that are shifted as the targets are."""
        self.called = True
        logits = logits_of(outputs, labels)
        if logits is None:
            raise self._bypassed("the model returned no logits that match the labels")
        weights = None if loss_scale is None else loss_scale.view(labels.shape)
        return token_loss(
            logits, shifted(labels), self.objective, num_items=num_items_in_batch, weights=weights,
            context=self._context(),
        )  # fmt: skip

    def _context(self) -> Context:
        state = self.trainer.state
        return Context(progress=min(1.0, state.global_step / max(1, state.max_steps)), special_ids=self.special_ids)

    def _fill_step(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The trainer's get_batch_samples; the rest of a stream becomes a step of its own."""
        batches, num_items = self._get_batch_samples(epoch_iterator, num_batches, device)
        return fill_step(batches, num_batches) if batches else batches, num_items

    def _watch_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's compute_loss; at the first micro-batch the objective is computed beside it."""
        if self.checked or not (model.training and torch.is_grad_enabled()):
            return self._compute_loss(model, inputs, *args, **kwargs)
        self.called, self.expected = False, None
        labels, weights = inputs.get("labels"), inputs.get("loss_scale")
        handle = model.register_forward_hook(lambda *call: self._expect(call[-1], labels, weights))
        try:
            return self._compute_loss(model, inputs, *args, **kwargs)
        finally:
            handle.remove()

    @torch.no_grad()
    def _expect(self, outputs: Any, labels: Tensor | None, weights: Tensor | None) -> None:
        """Sum of the objective's losses, from the logits that the model returns."""
        logits = logits_of(outputs, labels)
        if labels is None or logits is None:
            return
        targets = shifted(labels)
        losses = plain_losses(logits, targets, self.objective, self._context())
        if weights is not None:
            losses = losses * torch.roll(weights, -1, -1)[targets != IGNORE_INDEX]
        self.expected = losses.sum()

    def _check_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The trainer's training_step; at the first micro-batch its loss is compared with the objective's."""
        if self.checked:
            return self._training_step(model, inputs, *args, **kwargs)
        check_trainer(self.stack, self.trainer, self.objective)
        num_items = kwargs.get("num_items_in_batch", args[0] if args else None)
        labels = inputs.get("labels")
        supervised = 0 if labels is None else int((labels[..., 1:] != IGNORE_INDEX).sum())
        loss = self._training_step(model, inputs, *args, **kwargs)
        if not self.called:
            raise self._bypassed("the trainer did not call the loss")
        if self.expected is None:
            raise self._bypassed("the trainer did not call the model on the labels that it was given")
        if num_items is None:
            raise self._bypassed("the trainer did not count the supervised tokens of the optimizer step")
        # the mean is over all ranks' tokens, and DDP and FSDP divide the gradient by the number of ranks
        expected, used = float(self.expected / num_items) * self.trainer.accelerator.num_processes, float(loss)
        if not math.isclose(used, expected, rel_tol=TOLERANCE, abs_tol=1e-12) and math.isfinite(expected):
            raise self._bypassed(f"the trainer used the loss {used:.6g}, the objective of its logits is {expected:.6g}")
        if supervised:
            self.checked = True
            if self.trainer.is_world_process_zero():
                mean = float(self.expected) / supervised  # `used` is divided by the tokens of the whole step
                print(
                    f"deftune: {self.stack} trains `{self.objective}`: loss {mean:.6g} of the first micro-batch "
                    f"verified from the logits"
                )
        return loss

    def _bypassed(self, what: str) -> ValueError:
        args = self.trainer.args
        found = {
            "Liger's cross entropy": bool(getattr(args, "use_liger_kernel", False)),
            "label smoothing": self.trainer.label_smoother is not None,
            f"another loss ({self.trainer.compute_loss_func!r})": self.trainer.compute_loss_func is not self,
            **self.suspects,
        }
        switched_on = ", ".join(name for name, on in found.items() if on)
        return ValueError(
            f"{self.stack}: `{self.objective}` is not what is trained: {what}. "
            + (
                f"Switched on and able to replace the loss: {switched_on}; turn it off."
                if switched_on
                else "Look for a fused or cut cross entropy, context or sequence parallelism, or a plugin with a loss."
            )
        )


def logits_of(outputs: Any, labels: Tensor | None) -> Tensor | None:
    """The model's logits, if it returned a row for each label; a fused cross entropy returns none."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    matching = isinstance(logits, Tensor) and labels is not None and logits.shape[:-1] == labels.shape
    return logits if matching else None


def check_trainer(stack: str, trainer: Any, objective: Objective) -> None:
    """Refuse options of the Trainer under which the objective would be left out or divided by the wrong count.

    Raises:
        ValueError: label smoothing, several GPUs in one process, ranks averaged without their token counts,
            context, sequence or tensor parallelism, or a router loss.
    """

    def refuse(what: str, why: str) -> None:
        raise ValueError(f"{stack}: {what} cannot be combined with the objective `{objective}`: {why}")

    args = trainer.args
    if trainer.label_smoother is not None:
        refuse("label_smoothing_factor", "a smoothed target is not gate x error; set it to 0")
    if args.n_gpu > 1:
        refuse("DataParallel", "one process with several GPUs averages unequal shares; start one process per GPU")
    if args.world_size > 1 and not args.average_tokens_across_devices:
        refuse("average_tokens_across_devices=False", "ranks with few tokens would weigh as much as full ones")
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("cp", "sp", "tp"):
        if parallel is not None and getattr(parallel, f"{name}_enabled", False):
            refuse(f"{name}_size > 1", "a rank would see a part of a row or of the vocabulary; use FSDP or DDP")
    config = base_of(trainer.model).config.get_text_config()
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        refuse("the router loss", "the labels do not reach the model, which would leave it out; set its factor to 0")
