"""`deftune train CONFIG` with FSDP2 over gloo.

accelerate shards only where there are GPUs and runs DDP on CPUs (no MULTI_CPU in the list of its AcceleratorState), and
deftune refuses that. Here both are told otherwise, so that the sharded path itself can be tested without a GPU.
"""

import sys

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from deftune.cli import main
from deftune.training import train, trainer

original = AcceleratorState.__init__
wrapped = []


def shard_anywhere(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if (plugin := kwargs.get("fsdp_plugin")) is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = self.distributed_type
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = plugin


class Watched(trainer.DeftSFTTrainer):
    def training_step(self, model, *args, **kwargs):
        wrapped.append(isinstance(model, FSDPModule))
        return super().training_step(model, *args, **kwargs)


AcceleratorState.__init__ = shard_anywhere
train.can_shard = lambda: True
trainer.DeftSFTTrainer = Watched

if __name__ == "__main__":
    code = main(["train", *sys.argv[1:]])
    assert PartialState().num_processes > 1
    assert all(wrapped), "the model was not sharded"
    dist.destroy_process_group()
    sys.exit(code)
