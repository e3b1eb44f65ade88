"""What the runs of one process share: the data of the last run, and the untrained model, of which each run gets a copy.

The kept model is never trained, run or changed. A copy is therefore what `load_model` would load, whatever trainers
attached to an earlier copy: hooks, forwards, adapters, gradients, changes of its configs.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch
from torch import Tensor, nn

from deftune.artifacts.config import RunConfig
from deftune.artifacts.models import load_model
from deftune.training.assembly import base_options
from deftune.training.host_memory import free_memory, memory_limit
from deftune.training.machine import check_config
from deftune.training.preparation import Prepared, data_key, plan_run, read_data

# of the memory of the machine or its container: several processes may keep a model at the same time
MOST_KEPT = 1 / 8


class Reuse:
    """Keeps the data and the model of the last run; a run with other data, or another model, replaces them."""

    def __init__(self) -> None:
        self._data: tuple[str, Prepared] | None = None
        self._model: tuple[dict[str, Any], Any] | None = None

    def prepare(self, config: RunConfig, notice: Callable[[str], None], now: datetime | None = None) -> Prepared:
        """As `preparation.prepare`; the rows are read and encoded only if the last run had others."""
        check_config(config)
        key = data_key(config)
        if self._data is None or self._data[0] != key or self._data[1].now not in (None, now):
            self._data = None  # freed before the next is read
            self._data = key, read_data(config, notice, now)
        else:
            notice(f"{len(self._data[1].train.examples):,} encoded rows of an earlier run in this process")
        return plan_run(self._data[1], config)

    def load_base(self, prepared: Prepared) -> Any:
        """As `assembly.load_base`: the model that the run begins with."""
        return self.load(prepared.source, **base_options(prepared.config))

    def load(self, source: str, **options: Any) -> Any:
        """As `load_model`, on the device of the training.

        A quantised model is loaded anew each time: a copy of its packed weights is not known to be exact. So is a model
        too large to be kept.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        key = {"source": source, **options}
        if self._model is None or self._model[0] != key:
            self._model = None  # freed before the next is loaded
            gc.collect()  # parts of a model refer to each other
            model = load_model(source, **options)
            if options.get("quantization") is not None or num_bytes(model) > room_to_keep():
                return model
            self._model = key, model
        return copy_model(self._model[1], device)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Each parameter and buffer once, tied ones too."""
    return list(itertools.chain(model.parameters(), model.buffers()))


def num_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(model))


def room_to_keep() -> int:
    """Bytes that a kept model may take: a share of the memory, if so much is free."""
    return min(int(MOST_KEPT * memory_limit()), free_memory())


def copy_model(model: Any, device: torch.device) -> Any:
    """A copy of a model on a device, made there: the weights are not copied twice. Tied weights stay tied."""
    copies: dict[int, Any] = {}
    for tensor in tensors_of(model):
        data = tensor.detach().to(device, copy=True, non_blocking=True)
        new = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        vars(new).update(vars(tensor))  # transformers marks the weights that it has loaded
        copies[id(tensor)] = new
    return copy.deepcopy(model, copies)
