"""A check of verl's first training step, before its optimizer step: the gradient is the objective's gate x error.

verl's ``train_batch`` calls ``forward_backward_batch``, which runs ``forward_step`` and the backward pass of every
micro-batch, and then ``optimizer_step``. `FirstStep` stands in for ``forward_backward_batch``, so that its errors come
before the weights change.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deftune.adapters.logits import plain_stats
from deftune.adapters.verl_loss import ObjectiveLoss, aligned
from deftune.objectives import IGNORE_INDEX, Context
from deftune.tokens.head import base_of, head_of, head_options

SUPERVISED, IGNORED = 32, 8  # tokens of a micro-batch whose gradients are compared
# relative tolerances of the gradients in 4 and 2 bytes: bfloat16 rounds by 2^-9
LOGITS = {4: 1e-3, 2: 2e-2}
# with fused kernels the logits, of size 20 and more, are computed here a second time, and each time rounded
FUSED = {4: 1e-2, 2: 0.1}


def checked_worker(base: Any) -> Any:
    """verl's TrainingWorker with a `FirstStep` in its engine."""

    class CheckedWorker(base):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.engine.forward_backward_batch = FirstStep(self.engine)

    return CheckedWorker


class FirstStep:
    """An engine's ``forward_backward_batch``, whose first call with gradients is checked.

    Of every engine: it calls the objective's loss on all supervised tokens, and backpropagates every loss. An engine
    with one module (FSDP, not Megatron) is also checked by `Gradients`.

    Args:
        engine: verl's engine.
    """

    def __init__(self, engine: Any):
        self.engine, self.original, self.done = engine, engine.forward_backward_batch, False
        self.losses = self.backwards = 0  # losses of the objective, and how many of them were backpropagated
        self.tokens = 0.0  # sum of the mask over the losses

    def __call__(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if self.done or forward_only:
            return self.original(data, loss_function, forward_only=forward_only)
        if not isinstance(loss_function, ObjectiveLoss):
            raise RuntimeError(f"deftune: verl replaced the objective by another loss, {loss_function!r}")
        supervised = float(data["loss_mask"].values().sum())
        gradients = None
        if isinstance(self.engine.module, nn.Module):  # Megatron has a list, one for each virtual stage of a pipeline
            gradients = Gradients(self.engine, loss_function, sum(gathered(supervised)))
            self.engine.forward_step = partial(gradients.forward_step, self.engine.forward_step)
        try:
            output = self.original(data, partial(self._counted, loss_function), forward_only=forward_only)
        finally:
            self.engine.__dict__.pop("forward_step", None)
        problem = self._problem(supervised) or (gradients and gradients.problem())
        for found in gathered(problem):  # the same error on every rank, so that none waits for another
            if found is not None:
                raise RuntimeError(
                    f"deftune: `{loss_function.objective}` is not what verl trains: {found}. No weight was changed. "
                    f"Look for a fused, replaced or second loss; this verl or engine may not be supported"
                )
        self.done = True
        if "metrics" in output:  # a rank whose outputs verl collects
            output["metrics"]["deft/error"] = [gradients.error() if gradients else -1.0]
        return output

    def _counted(self, loss_function: ObjectiveLoss, **inputs: Any) -> Any:
        """The loss function, with a count of the losses that it returns and of those that are backpropagated."""
        result = loss_function(**inputs)
        if inputs.get("student_logits") is None:
            self.losses += 1
            self.tokens += float(aligned(inputs["data"])[1].sum())
            result[0].register_hook(self._note_backward)
        return result

    def _note_backward(self, _: Tensor) -> None:
        self.backwards += 1

    def _problem(self, supervised: float) -> str | None:
        """What shows that the losses are not trained, or None."""
        if not self.losses:  # as in a stage of Megatron's pipeline without the head
            called = not self.engine.is_mp_src_rank_with_outputs()
            return None if called else "the engine did not call the objective's loss"
        if self.tokens != supervised:
            return f"the loss saw {self.tokens:g} of the {supervised:g} supervised tokens of a rank"
        if self.backwards != self.losses:
            return f"the engine backpropagated {self.backwards} of {self.losses} losses"
        return None


class Sample(NamedTuple):
    """Some tokens of a micro-batch: their places among its packed tokens, targets and weights, each ``[n]``."""

    places: Tensor
    targets: Tensor
    weights: Tensor
    context: Context

    def take(self, chosen: Tensor) -> Sample:
        return Sample(self.places[chosen], self.targets[chosen], self.weights[chosen], self.context)

    def to(self, device: torch.device) -> Sample:
        return Sample(self.places.to(device), self.targets.to(device), self.weights.to(device), self.context)


class Gradients:
    """Compares gradients at the output of an engine's module with the objective's, for some tokens of a step.

        d loss / d z = w gate (P - onehot) ranks / num_tokens,  P = softmax(z)

    The right side is computed in float64 with plain torch operations from the logits z that the module returns. The
    left side is the gradient that arrives at these logits (FSDP averages gradients over the ranks). verl's fused
    kernels return log p in place of z. Then z is computed from the hidden states and the head, and log p and its
    gradient, -w gate ranks / num_tokens, are compared.

    Args:
        engine: an engine of verl with one module.
        loss: the loss function that is to be trained.
        num_tokens: the supervised tokens of the step, summed over all ranks.
    """

    def __init__(self, engine: Any, loss: ObjectiveLoss, num_tokens: float):
        self.engine, self.loss = engine, loss
        sequence_parallel = dist.get_world_size() // engine.get_data_parallel_size()  # these ranks have the same rows
        self.factor = dist.get_world_size() * sequence_parallel / max(1, num_tokens)
        self.model = base_of(getattr(engine.module, "module", engine.module))  # FSDP1 wraps the model
        self.outputs = self.arrived = 0
        self.difference = self.expected = 0.0  # squared norms
        self.log_p_error = self.tolerance = 0.0
        self.logits: Tensor | None = None  # of the sample, with fused kernels

    def forward_step(self, original: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's ``forward_step``, with hooks on the module."""
        targets, mask = aligned(micro_batch)
        chosen = torch.cat([
            spread((targets != IGNORE_INDEX).nonzero()[:, 0], SUPERVISED),
            spread((targets == IGNORE_INDEX).nonzero()[:, 0], IGNORED),
        ])  # fmt: skip
        sample = Sample(chosen, targets[chosen].clamp(min=0), mask[chosen].double(), self.loss.context(micro_batch))
        hooks = [self.engine.module.register_forward_hook(partial(self._watch_output, sample), with_kwargs=True)]
        if self.engine.engine_config.use_fused_kernels:
            watch = partial(self._watch_hidden, sample)
            hooks.append(self.model.base_model.register_forward_hook(watch, with_kwargs=True))
        try:
            return original(micro_batch, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _find(self, sample: Sample, rows: Tensor, options: dict[str, Any]) -> tuple[Sample, Tensor]:
        """The sample's tokens of this rank, and their places in the rows of an output ``[batch, sequence, ...]``."""
        sample = sample.to(rows.device)
        if options.get("attention_mask") is not None:  # padded rows
            where, first = options["attention_mask"].reshape(-1).nonzero()[:, 0], 0
        else:  # one packed row, or this rank's part
            where = torch.arange(rows.shape[1], device=rows.device)
            mesh = self.engine.ulysses_device_mesh
            first = 0 if mesh is None else mesh["sp"].get_local_rank() * rows.shape[1]
        sample = sample.take((sample.places >= first) & (sample.places < first + len(where)))
        return sample, where[sample.places - first]

    @torch.no_grad()
    def _watch_hidden(self, sample: Sample, _: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        hidden, head = output[0], head_of(self.model)
        weight: Any = head.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        _, rows = self._find(sample, hidden, options)
        scale, softcap = head_options(self.model.config)
        logits = nn.functional.linear(hidden.flatten(0, 1)[rows].to(weight.dtype), weight, head.bias).double() * scale
        self.logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        self.tolerance = FUSED[min(4, hidden.element_size(), weight.element_size())]

    def _watch_output(self, sample: Sample, _: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        watched = output.log_probs if self.logits is not None else output.logits
        sample, rows = self._find(sample, watched, options)
        with torch.no_grad():
            logits = watched.flatten(0, 1)[rows].double() if self.logits is None else self.logits
            log_P = torch.log_softmax(logits, -1)
            stats = plain_stats(log_P, sample.targets, self.loss.objective.top_k)
            expected = sample.weights * self.loss.objective.gate(stats, sample.context) * self.factor
            if self.logits is None:
                self.tolerance = LOGITS[min(4, watched.element_size())]
                error = log_P.exp()
                error[torch.arange(len(error)), sample.targets] -= 1
                expected = expected[:, None] * error
            else:
                expected = -expected
                apart = (watched.flatten(0, 1)[rows] - stats.log_p).abs() / (1 + stats.nll)
                self.log_p_error = max(self.log_p_error, *apart[sample.weights > 0].tolist(), 0.0)
        self.outputs += 1
        self.logits = None
        watched.register_hook(partial(self._compare, rows, expected))

    def _compare(self, rows: Tensor, expected: Tensor, gradient: Tensor) -> None:
        scaler = getattr(self.engine, "scaler", None)
        found = gradient.flatten(0, 1)[rows].double() / (1 if scaler is None else scaler.get_scale())
        self.arrived += 1
        self.difference += float((found - expected).square().sum())
        self.expected += float(expected.square().sum())

    def error(self) -> float:
        """The relative difference of the gradients."""
        return (self.difference / self.expected) ** 0.5 if self.expected else self.difference**0.5

    def problem(self) -> str | None:
        """What shows that another loss is trained, or None."""
        if self.arrived != self.outputs or not self.outputs:
            return f"a gradient reached the model's output in {self.arrived} of {self.outputs} micro-batches"
        if self.log_p_error > self.tolerance:
            return f"verl's log-probabilities and the model's differ by {self.log_p_error:.2g} (relative to 1 + NLL)"
        if self.error() > self.tolerance:
            return f"the gradient at the model's output differs from gate x error by {self.error():.2g} (relative)"
        return None


def spread(places: Tensor, count: int) -> Tensor:
    """At most ``count`` of the places, evenly spaced.

    >>> spread(torch.arange(10), 3).tolist()
    [0, 4, 9]
    """
    steps = torch.linspace(0, max(0, len(places) - 1), min(count, len(places)), device=places.device)
    return places[steps.long()]


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
