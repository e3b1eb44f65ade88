"""FSDP2 and tensor parallel over gloo.

accelerate shards only where there are GPUs and runs DDP on CPUs (no MULTI_CPU in the list of its AcceleratorState), and
deftune refuses that. `allow_on_cpu` tells both otherwise, so that the sharded path can be tested without a GPU.
"""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from deftune.training import machine


def allow_on_cpu() -> None:
    original = AcceleratorState.__init__

    def shard_anywhere(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if (plugin := kwargs.get("fsdp_plugin")) is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = self.distributed_type
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin

    AcceleratorState.__init__ = shard_anywhere
    machine.can_shard = lambda: True


def allow_tensor_parallel_on_cpu() -> None:
    """accelerate takes a tensor-parallel model on several GPUs only."""
    Accelerator.multi_device = property(lambda self: self.num_processes > 1)
    machine.can_shard = lambda: True
