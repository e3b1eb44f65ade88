"""A CPU in place of the GPU that torchtitan expects, and configs: ``torchtitan --module titan_on_cpu --config NAME``.

``torchrun titan_on_cpu.py --module titan_on_cpu --config plain`` trains on rows.jsonl with the tokenizer in tokenizer/.
Nothing here is needed on a machine with a GPU.
"""

import os
import types
from dataclasses import dataclass

import torch
import torch._utils
import torch.nn.functional as F


def stand_in():
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan falls back to cuda
    properties = types.SimpleNamespace(total_memory=2**34)
    shims = {
        "get_device_name": lambda *_: "cpu", "set_device": lambda *_: None, "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None, "get_device_properties": lambda *_: properties,
        "memory_stats": lambda *_: {}, "memory_allocated": lambda *_: 0,
    }  # fmt: skip
    for name, shim in shims.items():
        setattr(torch.cpu, name, shim)
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.distributed.utils as utils
    import torchtitan.models.common.attention as attention
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
        """flex_attention has no backward on a CPU."""
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out, types.SimpleNamespace(lse=None)

    attention.FlexAttention._compiled_flex_attn = staticmethod(dense)
    for name in [name for name in dir(attention) if "create_block_mask" in name]:
        setattr(attention, name, create_block_mask)
    utils.set_pg_timeouts = lambda *args, **more: None
    divide = fsdp.disable_fsdp_gradient_division

    def without_premultiplied_sums(model):
        """gloo has no PREMUL_SUM."""
        divide(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = without_premultiplied_sums


if __name__ != "__main__":
    import spmd_types as spmd
    from torch.distributed.tensor import DTensor, Replicate
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
    from torchtitan.distributed.utils import get_spmd_backend
    from torchtitan.hf_datasets.text_datasets import ChatDataLoader
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    from deftune.adapters.torchtitan import ObjectiveLoss

    def whole(tensor):
        """All classes on every rank, of logits that tensor parallel has divided."""
        if isinstance(tensor, DTensor):
            placements = [Replicate() if p.is_shard(2) or p.is_shard(-1) else p for p in tensor.placements]
            return tensor.redistribute(placements=placements).to_local()
        if tensor.is_floating_point() and get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
            return spmd.redistribute(tensor, current_spmd_mesh().get_group("tp"), src=spmd.S(-1), dst=spmd.I)
        return tensor

    class WrittenOut(BaseLoss):
        """DEFT by its equation, through autograd: a = sum P^2 detached, L = (1 - p^a) / a."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseLoss.Config):
            pass

        def __init__(self, config, *, compile_config=None):
            self.fn = self.summed

        @staticmethod
        def summed(pred, labels):
            pred, labels = whole(pred), whole(labels)
            kept = labels != -100
            log_probs = pred[kept].double().log_softmax(-1)
            a = log_probs.exp().square().sum(-1).detach()
            return ((1 - (a * log_probs.gather(-1, labels[kept][:, None])[:, 0]).exp()) / a).sum().float()

    def messages(row):
        return row["messages"]

    def config(make_loss):
        spec = model_registry("debugmodel", attn_backend="flex")
        return Trainer.Config(
            loss=make_loss(spec), hf_assets_path="tokenizer", model_spec=spec, optimizer=default_adamw(lr=1e-3),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(local_batch_size=2, global_batch_size=8, seq_len=128, steps=5),
            dataloader=ChatDataLoader.Config(
                dataset_path="json", load_dataset_kwargs={"data_files": "rows.jsonl", "split": "train"},
                sample_processor=messages,
            ),
            metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True), dump_folder=os.environ["TITAN_OUT"],
            checkpoint=CheckpointManager.Config(enable=False),
        )  # fmt: skip

    def stock():
        return config(lambda spec: CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)))

    def written_out():
        return config(lambda spec: WrittenOut.Config())

    def ours(spec):
        return ObjectiveLoss.Config(global_vocab_size=decoder_vocab_size(spec))

    def plain():
        return config(ours)

    def chunked():
        return config(lambda spec: ChunkedLossWrapper.Config(loss_fn=ours(spec)))


if __name__ == "__main__":
    stand_in()
    from torchtitan.train import main

    main()
