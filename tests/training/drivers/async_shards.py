"""A rank that saves the shards of a model which changes before they are written: ``async_shards.py FOLDER``."""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard

from deftune.training import sharded

if __name__ == "__main__":
    folder, changed, write = Path(sys.argv[1]), threading.Event(), FileSystemWriter.write_data

    def write_later(*args, **kwargs):
        changed.wait()
        return write(*args, **kwargs)

    FileSystemWriter.write_data = write_later
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    optimizer = torch.optim.AdamW(fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,))).parameters(), lr=0.1)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *(state["exp_avg_sq"] for state in optimizer.state.values())]
    expected = [tensor.full_tensor().clone() for tensor in tensors]
    future = sharded.start_saving(folder, model, optimizer, dist.new_group(backend="gloo"))
    for tensor in tensors:
        tensor.data.zero_()
    assert not future.done()
    changed.set()
    future.result()
    sharded.load(folder, model, optimizer)
    tensors = [*model.parameters(), *(state["exp_avg_sq"] for state in optimizer.state.values())]
    for tensor, before in zip(tensors, expected, strict=True):
        assert before.abs().sum() > 0 and torch.equal(tensor.full_tensor(), before)
    dist.barrier()
    dist.destroy_process_group()
