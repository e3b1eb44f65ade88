"""A CPU in place of the GPU that torchtitan expects, and configs: ``torchtitan --module titan_on_cpu --config NAME``.

``torchrun titan_on_cpu.py --module titan_on_cpu --config plain`` trains on rows.jsonl with the tokenizer in tokenizer/.
Nothing here is needed on a machine with a GPU.
"""

import os
from dataclasses import dataclass

from titan_shims import stand_in

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

    def swapped():
        """The adapter computes NLL, whatever objective it was given."""
        import deftune.adapters.torchtitan as adapter

        token_loss = adapter.token_loss
        adapter.token_loss = lambda pred, labels, objective, **more: token_loss(pred, labels, "nll", **more)
        return plain()

    def chunked():
        return config(lambda spec: ChunkedLossWrapper.Config(loss_fn=ours(spec)))


if __name__ == "__main__":
    stand_in()
    from torchtitan.train import main

    main()
