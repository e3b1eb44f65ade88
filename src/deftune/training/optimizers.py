"""The optimizers that `train.optimizer` names, beside AdamW."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# of transformers' TrainingArguments; muon is made here
NAMES = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit", "adafactor": "adafactor"}


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
