"""The trajectory of trajectory.py with torchtitan's trainer: torchrun titan_trajectory.py FOLDER KIND RUN

The Llama of FOLDER/model becomes torchtitan's. Two ranks share weights and rows (FSDP2, chunked loss), or halves of
the layers and of the vocabulary where KIND is torchtitan-tp (plain loss).
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from titan_shims import stand_in

stand_in()

from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from deftune.adapters.torchtitan import ObjectiveLoss  # noqa: E402

LENGTH = 128


class TokenLoader(BaseDataLoader):
    """The rows of rows.json again and again, each micro-batch of the data-parallel rank padded to LENGTH."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        rows = json.loads(Path("rows.json").read_text())[dp_rank::dp_world_size]
        self.batches = [rows[start : start + local_batch_size] for start in range(0, len(rows), local_batch_size)]

    def __iter__(self):
        while True:
            for rows in self.batches:
                ids, labels = torch.zeros(len(rows), LENGTH + 1).long(), torch.full((len(rows), LENGTH + 1), -100)
                for place, row in enumerate(rows):
                    ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
                    labels[place, : len(row["labels"])] = torch.tensor(row["labels"])
                places = torch.arange(LENGTH).repeat(len(rows), 1)
                yield {"input": ids[:, :-1].clone(), "positions": places}, labels[:, 1:].clone()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def make_spec():
    """torchtitan's Llama in the shape of FOLDER/model."""
    llama = json.loads(Path("model", "config.json").read_text())
    dim, vocab = llama["hidden_size"], llama["vocab_size"]
    rope = llama3.ComplexRoPE.Config(
        dim=llama["head_dim"], max_seq_len=256, theta=llama["rope_parameters"]["rope_theta"], scaling="none"
    )
    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    model = spec.model
    model.dim, model.vocab_size, model.enable_weight_tying = dim, vocab, llama["tie_word_embeddings"]
    model.tok_embeddings = llama3.Embedding.Config(
        num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_SKIP_INIT
    )
    model.lm_head = llama3.Linear.Config(
        in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)
    )
    model.layers = llama3._build_llama3_layers(
        n_layers=llama["num_hidden_layers"], dim=dim, n_heads=llama["num_attention_heads"],
        n_kv_heads=llama["num_key_value_heads"], hidden_dim=llama["intermediate_size"], rope=rope, fuse_qkv=False,
        attn_backend="flex",
    )  # fmt: skip
    model.norm.normalized_shape = dim
    for norm in (model.norm, *(n for layer in model.layers for n in (layer.attention_norm, layer.ffn_norm))):
        norm.eps = llama["rms_norm_eps"]
    return spec


def make_config(spec, kind, objective):
    settings = json.loads(Path("settings.json").read_text())
    ranks, parallel = int(os.environ["WORLD_SIZE"]), {}
    size = spec.model.vocab_size
    loss = ObjectiveLoss.Config(objective=objective, global_vocab_size=size)
    if objective == "stock":  # torchtitan's own NLL
        loss = CrossEntropyLoss.Config(global_vocab_size=size)
    if kind == "torchtitan-tp":
        parallel = {"tensor_parallel_degree": ranks, "spmd_backend": "full_dtensor"}
    else:
        loss = ChunkedLossWrapper.Config(loss_fn=loss)
        if ranks > 1:  # torchtitan 0.3.0 cannot use FSDP2 of torch 2.13 with its default, spmd_types
            parallel = {"spmd_backend": "partial_dtensor"}
    size = settings["per_device_train_batch_size"]
    return Trainer.Config(
        loss=loss, hf_assets_path="model", model_spec=spec, dataloader=TokenLoader.Config(),
        optimizer=default_adamw(
            lr=settings["learning_rate"], betas=(settings["adam_beta1"], settings["adam_beta2"]), weight_decay=0.0
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=size, global_batch_size=size * settings["gradient_accumulation_steps"], seq_len=LENGTH,
            steps=settings["max_steps"], max_norm=settings["max_grad_norm"], mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(**parallel), metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False), dump_folder="out", debug=DebugConfig(seed=0),
    )  # fmt: skip


if __name__ == "__main__":
    folder, kind, name = sys.argv[1:]
    os.chdir(folder)
    losses = []
    log = MetricsProcessor.log

    def recorded(self, step, global_avg_loss, *args, **kwargs):
        losses.append(float(global_avg_loss))
        log(self, step, global_avg_loss, *args, **kwargs)

    MetricsProcessor.log = recorded
    spec = make_spec()
    trainer = make_config(spec, kind, json.loads(Path("runs.json").read_text())[name][0]).build()
    (model,) = trainer.model_parts
    weights = llama3.Llama3StateDictAdapter(spec.model, None).from_hf(torch.load("weights.pt"))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    trainer.train()
    trainer.close()
    torch.save({"losses": losses}, f"{name}.{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
