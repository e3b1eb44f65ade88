"""Checkpoints of torch.distributed.checkpoint: each rank writes its shards, and any number of ranks reads them back.

torch pickles the index of such a checkpoint and the numbers beside its tensors. Somebody else's checkpoint must not run
code, so both are read with lists of the classes that torch writes there: `SafeReader` and `SafePlanner`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import async_save as copy_and_write_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

FOLDER = "distributed"  # inside a checkpoint
METADATA = "torch.distributed.checkpoint.metadata"
INDEX_CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
ALLOWED = {  # the classes and functions in torch's pickled index
    *((METADATA, name) for name in INDEX_CLASSES),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


def is_sharded(checkpoint: Path) -> bool:
    """Whether the checkpoint was written by `save`."""
    return (checkpoint / FOLDER).is_dir()


def save(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Write the trained weights and the optimizer's state; every rank calls this."""
    weights, state = get_state_dict(model, inner(optimizer), options=options(model))
    with quiet_alone() as alone:
        write_shards({"model": weights, "optimizer": state}, checkpoint_id=checkpoint / FOLDER, no_dist=alone)


def start_saving(checkpoint: Path, model: Any, optimizer: Any, group: Any) -> Future[Any]:
    """As `save`, from a copy in the host's memory, by a thread: afterwards the weights may change.

    Every one of several ranks calls this. A rank's future is done when the shards of all ranks are written.

    Args:
        checkpoint: the folder.
        model: the model whose weights are written.
        optimizer: its optimizer.
        group: a process group with a CPU backend that nothing else uses meanwhile.
    """
    weights, state = get_state_dict(model, inner(optimizer), options=options(model))
    future: Any = copy_and_write_shards(
        {"model": weights, "optimizer": state}, checkpoint_id=checkpoint / FOLDER, process_group=group
    )
    return future


def load(checkpoint: Path, model: Any, optimizer: Any = None) -> None:
    """Read the weights, and the optimizer's state if an optimizer is given, into whatever shards this rank holds."""
    optimizers = () if optimizer is None else inner(optimizer)
    weights, state = get_state_dict(model, optimizers, options=options(model))
    wanted = {"model": weights} | ({} if optimizer is None else {"optimizer": state})
    reader = SafeReader(checkpoint / FOLDER)
    reader.read_metadata()  # an error of its own; below, torch would wrap it in others
    try:
        with quiet_alone() as alone:
            read_shards(wanted, storage_reader=reader, planner=SafePlanner(), no_dist=alone)
    except CheckpointException as error:  # no Exception of Python's, and pages long
        causes = dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        raise ValueError(f"{checkpoint / FOLDER}: cannot be read: {'; '.join(causes)[:500]}") from error
    set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state, options=options(model))


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint: `ALLOWED`, and the dtypes of torch."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise ValueError(f"{module}.{name} is no part of a checkpoint's index; the checkpoint is damaged or hostile")


class SafeReader(FileSystemReader):
    """Reads the index without running code, and shards of the checkpoint's folder only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = Path(self.path) / ".metadata"
        try:
            metadata = IndexUnpickler(io.BytesIO(index.read_bytes())).load()
        except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, TypeError) as error:
            raise ValueError(f"{index}: is damaged ({type(error).__name__}: {error})") from error
        if not isinstance(metadata, Metadata) or metadata.storage_meta is None:
            raise ValueError(f"{index}: is no index of a checkpoint")
        for entry in (metadata.storage_data or {}).values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise ValueError(f"{index}: names a file outside the checkpoint: {entry.relative_path!r}")
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Reads what is no tensor (learning rates, flags) without running code."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch's planner unpickles anything: it gets a copy of what torch.load accepts as plain values
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


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
