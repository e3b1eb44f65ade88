"""The optimizers that `train.optimizer` names beside AdamW, and float32 copies of bfloat16 weights (`train.weights`).

Under autocast every forward pass rounds every float32 weight to bfloat16 again. With masters the rounded weights stay
in the model. The optimizer updates float32 copies, the masters, and each update is rounded into the model:

    master <- AdamW(master, gradient),  weight = bfloat16(master)

Small updates are not lost, because they add up in the masters. The rest of the computation is that of autocast, which
stays on: a forward pass has the same values, and each micro-batch the same bfloat16 gradient, summed in float32.

On a GPU one kernel (`MasterAdamW`) scales the gradients, updates the masters and rounds them; the gradient of a step
with a single micro-batch stays bfloat16 until then.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# of transformers' TrainingArguments; muon is made here
NAMES = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit", "adafactor": "adafactor"}
FLOAT32, WITH_MASTERS = "float32", "bfloat16_with_masters"  # what `train.weights` may be
# parameters from which `MasterAdamW` takes torch's place: Qwen2.5-Coder-1.5B gained, SmolLM2-135M lost
ONE_KERNEL_FROM = 500_000_000


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for all else: embeddings, head, norms and biases.

    Muon's update of an A x B matrix is an orthogonal matrix times 0.2 sqrt(max(A, B)), whose root mean square is
    that of a usual AdamW update: one learning rate serves both.

    Args:
        model: its parameters that require gradients.
        lr: the learning rate of both.
        betas: of AdamW.
        weight_decay: of both; none for parameters of one dimension.
    """

    def __init__(self, model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float):
        ends = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        ends |= {id(p) for name, p in model.named_parameters() if "lm_head" in name.split(".")}
        trained = [p for p in model.parameters() if p.requires_grad]
        hidden = [p for p in trained if p.dim() == 2 and id(p) not in ends]
        if not hidden:
            raise ValueError("train.optimizer: muon is for matrices of the layers, and none is trained; use adamw")
        muon = torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        rest = [p for p in trained if p.dim() != 2 or id(p) in ends]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.parts: list[torch.optim.Optimizer] = [muon]
        if groups:
            self.parts.append(torch.optim.AdamW(groups, lr=lr, betas=betas))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give the parts the groups and the state of the whole, which is what schedulers and checkpoints change."""
        place = 0
        for part in self.parts:
            number = len(part.param_groups)
            part.param_groups, part.state = self.param_groups[place : place + number], self.state
            place += number

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def muon_factory(lr: float, betas: tuple[float, float], weight_decay: float) -> tuple[Any, dict[str, Any]]:
    """Muon as the argument ``optimizer_cls_and_kwargs`` of a trainer."""
    return (lambda: functools.partial(MuonAdamW, lr=lr, betas=betas, weight_decay=weight_decay)), {}


class Masters:
    """The float32 masters of a model's linear layers, whose parameters become bfloat16.

    Embeddings, norms and the head stay float32: autocast does not round the first two, so that the layers pass float32
    to each other, and the fused loss has a float32 gradient of the head.

    Args:
        model: a causal LM with float32 parameters, on its device.
    """

    def __init__(self, model: Any):
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.rounded: dict[nn.Parameter, Tensor] = {}
        self.held: dict[nn.Parameter, Tensor] = {}  # by master: the bfloat16 gradient of the step's first micro-batch
        self.optimizer: MasterAdamW | None = None  # where one kernel does the whole update
        self.hooks: list[Any] = []
        ends = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
        linear = [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters() if id(p) not in ends]
        for weight in dict.fromkeys(linear):
            master = nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
            self.masters[weight] = master
            weight.data = self.rounded[weight] = master.detach().bfloat16()
            if weight.requires_grad:
                self.hooks.append(weight.register_post_accumulate_grad_hook(self._take_gradient))
        # in the model's order: a norm summed in another one differs in its last bit
        weights: Iterator[nn.Parameter] = model.parameters()
        self.trained: list[nn.Parameter] = [self.masters.get(weight, weight) for weight in weights]

    @torch.no_grad()
    def _take_gradient(self, weight: Any) -> None:
        """Add a micro-batch's gradient to the master's, in float32, and free it."""
        gradient, master = weight.grad, self.masters[weight]
        weight.grad = None
        if gradient is None:
            return
        first = self.held.pop(master, None)
        if master.grad is not None:
            master.grad.add_(gradient)
        elif first is not None:
            master.grad = first.float().add_(gradient)
        elif self.optimizer is not None:
            self.held[master] = gradient
        else:
            master.grad = gradient.float()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters and the float32 parameters, in the model's order, with their gradients in float32."""
        for master, gradient in self.held.items():
            master.grad = gradient.float()
        self.held = {}
        return iter(self.trained)

    def drive(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that updates the masters, made of one that has the model's parameters and no state yet."""
        for group in optimizer.param_groups:
            group["params"] = [self.masters.get(weight, weight) for weight in group["params"]]
        if MasterAdamW.serves(optimizer):
            self.optimizer = MasterAdamW(optimizer.param_groups, self)
            return self.optimizer
        optimizer.register_step_post_hook(lambda *_: self._after_step())
        return optimizer

    def clip(self, largest: float | None) -> Tensor:
        """The norm of the step's gradients; the optimizer's next step scales them down to the norm ``largest``."""
        assert self.optimizer is not None
        norm = self.optimizer.norm()
        self.optimizer.scale = None if largest is None else (largest / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def _after_step(self) -> None:
        self.round()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        self.held = {}
        for master in self.masters.values():
            master.grad = None

    def follow(self) -> bool:
        """Find the model's weights again where they have moved; return whether any has.

        A model that is moved to another device and back has its weights in other memory.

        Raises:
            ValueError: a weight is on another device than its master.
        """
        moved = [w for w, known in self.rounded.items() if w.dtype == known.dtype and w.data_ptr() != known.data_ptr()]
        for weight in moved:
            if weight.device != (device := self.masters[weight].device):
                raise ValueError(
                    f"train.weights: the model was moved from {device} to {weight.device} while it trains; move it "
                    f"back before the next step, or train with train.weights=float32"
                )
            self.rounded[weight] = weight.data
        return bool(moved)

    @torch.no_grad()
    def round(self) -> None:
        """Set the model's weights to the rounded masters."""
        self.follow()
        rounded, masters = list(self.rounded.values()), [master.data for master in self.masters.values()]
        torch._foreach_copy_(rounded, masters)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    @contextmanager
    def in_model(self) -> Generator[None]:
        """Inside, the model's parameters are the masters themselves: to save them, or to load others into them."""
        for weight, master in self.masters.items():
            weight.data = master.data
        try:
            yield
        finally:
            self.round()
            for weight, rounded in self.rounded.items():
                weight.data = rounded

    def release(self) -> None:
        """Leave the masters in the model for good, as its float32 weights."""
        for hook in self.hooks:
            hook.remove()
        for weight, master in self.masters.items():
            weight.data, weight.grad = master.data, None
        self.masters, self.rounded, self.held, self.trained, self.optimizer = {}, {}, {}, [], None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Inside, gradients stay at the model's parameters: for passes whose gradients are looked at, not applied."""
        for hook in self.hooks:
            hook.remove()
        try:
            yield
        finally:
            self.hooks = [
                weight.register_post_accumulate_grad_hook(self._take_gradient)
                for weight in self.masters
                if weight.requires_grad
            ]


class MasterAdamW(torch.optim.AdamW):
    """Torch's AdamW, its state included; a step is one kernel (`deftune.training.triton_adamw`) over many tensors.

        m <- b1 m + (1 - b1) c g,   v <- b2 v + (1 - b2) (c g)^2,   c = `scale`
        p <- p - lr wd p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps),   weight <- bfloat16(p)

    As torch's fused AdamW does, a step changes nothing where ``found_inf`` is not 0.

    Args:
        groups: of `torch.optim.AdamW`; their parameters are float32.
        masters: which of the parameters are masters, their rounded weights and their gradients.
    """

    scale: Tensor | None = None  # of the next step's gradients: clipping

    def __init__(self, groups: list[dict[str, Any]], masters: Masters):
        super().__init__(groups, fused=True)
        self.masters = masters
        self.every: list[nn.Parameter] = [parameter for group in self.param_groups for parameter in group["params"]]
        self.table: Any = None  # `triton_adamw.Table`, once there is a state
        self.steps = torch.empty(0)  # of all parameters; the state has views of it

    @staticmethod
    def serves(optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of this optimizer can be one kernel: torch's fused AdamW, all on one GPU, with Triton.

        A step of a small model waits for the host, which takes longer for one kernel than for torch's.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return (
            type(optimizer) is torch.optim.AdamW
            and all(g["fused"] and not (g["amsgrad"] or g["maximize"]) for g in optimizer.param_groups)
            and len(devices := {parameter.device for parameter in parameters}) == 1
            and devices.pop().type == "cuda"
            and all(parameter.is_contiguous() for parameter in parameters)
            and sum(parameter.numel() for parameter in parameters) >= ONE_KERNEL_FROM
            and importlib.util.find_spec("triton") is not None
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.masters.forget_gradients()

    def gradients(self) -> list[Tensor | None]:
        held = self.masters.held
        return [held.get(parameter, parameter.grad) for parameter in self.every]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The Euclidean norm of all gradients, in float32."""
        table = self.table or self._table()
        return table.norm(self.gradients())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        loss = None if closure is None else torch.enable_grad()(closure)()
        table, gradients = self._table(), self.gradients()
        skipped: Tensor | None = getattr(self, "found_inf", None)
        has_gradient = table.has_gradient(gradients)
        self.steps += has_gradient if skipped is None else has_gradient * (1 - skipped)
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            if first < last:
                table.update(gradients, range(first, last), self.steps[first:last], group, self.scale, skipped)
            first = last
        table.forget_gradients()
        self.masters.forget_gradients()
        self.scale = None
        return loss

    def _table(self) -> Any:
        """The addresses of the parameters and of their state, which is made in the first step, or was loaded.

        They are looked up anew where a tensor has moved, as `model.to` moves it.
        """
        from deftune.training.triton_adamw import Table

        states = [self.state[parameter] for parameter in self.every]
        firsts = [state.get("exp_avg") for state in states]
        moved, table = self.masters.follow(), self.table
        if moved or table is None or table.has_moved() or not all(map(operator.is_, table.first, firsts)):
            device = self.every[0].device
            self.steps = torch.tensor([float(state.get("step", 0)) for state in states], device=device)
            for parameter, state, step in zip(self.every, states, self.steps, strict=True):
                state["step"] = step  # a view
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment not in state:
                        state[moment] = torch.zeros_like(parameter)
            first, second = ([state[moment] for state in states] for moment in ("exp_avg", "exp_avg_sq"))
            rounded = {master: self.masters.rounded[weight] for weight, master in self.masters.masters.items()}
            self.table = Table(self.every, first, second, [rounded.get(parameter) for parameter in self.every])
        return self.table
