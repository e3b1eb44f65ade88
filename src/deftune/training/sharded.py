"""Checkpoints of torch.distributed.checkpoint: each rank writes its shards, and any number of ranks reads them back."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FOLDER = "distributed"  # inside a checkpoint


def is_sharded(checkpoint: Path) -> bool:
    """Whether the checkpoint was written by `save`."""
    return (checkpoint / FOLDER).is_dir()


def save(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Write the trained weights and the optimizer's state; every rank calls this."""
    weights, state = get_state_dict(model, inner(optimizer), options=options(model))
    with quiet_alone() as alone:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=checkpoint / FOLDER, no_dist=alone)


def load(checkpoint: Path, model: Any, optimizer: Any = None) -> None:
    """Read the weights, and the optimizer's state if an optimizer is given, into whatever shards this rank holds."""
    optimizers = () if optimizer is None else inner(optimizer)
    weights, state = get_state_dict(model, optimizers, options=options(model))
    wanted = {"model": weights} | ({} if optimizer is None else {"optimizer": state})
    with quiet_alone() as alone:
        dcp.load(wanted, checkpoint_id=checkpoint / FOLDER, no_dist=alone)
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state, options=options(model))


def options(model: Any) -> StateDictOptions:
    """Frozen weights are those of the base model, which an adapter's checkpoint leaves out."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)


def inner(optimizer: Any) -> Any:
    """The optimizer of torch inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def quiet_alone() -> Generator[bool]:
    """Whether this process is the only one, of which torch would warn at every checkpoint."""
    alone = not (dist.is_available() and dist.is_initialized())
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield alone
