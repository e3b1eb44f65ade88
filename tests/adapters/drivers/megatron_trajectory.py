"""The trajectory of trajectory.py with a GPTModel of Megatron-core: torchrun megatron_trajectory.py FOLDER KIND RUN...

The Llama of FOLDER/model becomes a GPTModel whose weights are divided among the ranks (tensor parallel).
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron_run import WrappedTorchNorm, gradient_square, megatron, parallel_state  # its imports need shims


def make_norm(cls, config, hidden_size, eps=1e-5, **_):
    return torch.nn.RMSNorm(hidden_size, eps)


WrappedTorchNorm.__new__ = staticmethod(make_norm)


def make_model(folder: Path):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    llama = json.loads((folder / "model" / "config.json").read_text())
    config = TransformerConfig(
        num_layers=llama["num_hidden_layers"], hidden_size=llama["hidden_size"],
        num_attention_heads=llama["num_attention_heads"], num_query_groups=llama["num_key_value_heads"],
        ffn_hidden_size=llama["intermediate_size"], gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=llama["rms_norm_eps"],
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, tensor_model_parallel_size=dist.get_world_size(),
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=llama["vocab_size"], max_sequence_length=256, parallel_output=True,
        position_embedding_type="rope", rotary_base=int(llama["rope_parameters"]["rope_theta"]),
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    weights = converted(torch.load(folder / "weights.pt"), llama)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), sorted(own.keys() ^ weights.keys())
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    return model


def converted(llama, config):
    """This rank's part of the weights, under Megatron's names."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def part(tensor, dim):
        return tensor.chunk(ranks, dim)[rank]

    groups, width = config["num_key_value_heads"], config["head_dim"]
    found = {"embedding.word_embeddings.weight": part(llama["model.embed_tokens.weight"], 0),
             "decoder.final_layernorm.weight": llama["model.norm.weight"]}  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (llama[f"{ours}self_attn.{name}_proj.weight"] for name in "qkv")
        parts = [tensor.view(groups, -1, width, tensor.shape[1]) for tensor in (q, k, v)]
        qkv = torch.cat(parts, 1).flatten(0, 2)  # the queries, the key and the value of a group lie together
        gate, up = (part(llama[f"{ours}mlp.{name}_proj.weight"], 0) for name in ("gate", "up"))
        found |= {
            f"{theirs}input_layernorm.weight": llama[f"{ours}input_layernorm.weight"],
            f"{theirs}pre_mlp_layernorm.weight": llama[f"{ours}post_attention_layernorm.weight"],
            f"{theirs}self_attention.linear_qkv.weight": part(qkv, 0),
            f"{theirs}self_attention.linear_proj.weight": part(llama[f"{ours}self_attn.o_proj.weight"], 1),
            f"{theirs}mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{theirs}mlp.linear_fc2.weight": part(llama[f"{ours}mlp.down_proj.weight"], 1),
        }
    return found


def train(folder: Path, spec: str) -> list[float]:
    rows, settings = (json.loads((folder / name).read_text()) for name in ("rows.json", "settings.json"))
    model = make_model(folder)
    if spec != "stock":  # Megatron's own NLL
        megatron.use_objective(model, spec)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=(settings["adam_beta1"], settings["adam_beta2"]),
        weight_decay=0.0,
    )  # fmt: skip
    size = settings["per_device_train_batch_size"]
    pad = torch.nn.utils.rnn.pad_sequence
    batches = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        ids = pad([torch.tensor(row["input_ids"]) for row in part], batch_first=True)
        labels = pad([torch.tensor(row["labels"]) for row in part], batch_first=True, padding_value=-100)
        batches.append((ids[:, :-1].contiguous(), labels[:, 1:].contiguous()))
    count, losses = sum(int((labels >= 0).sum()) for _, labels in batches), []
    for _ in range(settings["max_steps"]):
        optimizer.zero_grad()
        total = 0.0
        for ids, labels in batches:
            length = ids.shape[1]
            mask = torch.ones(1, 1, length, length).tril() < 0.5
            places = torch.arange(length).expand_as(ids)
            found = model(ids, places, mask, labels=labels.clamp(min=0))
            loss = (found * (labels >= 0)).sum() / count
            loss.backward()
            total += loss.item()
        norm = sum(gradient_square(parameter) for parameter in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, settings["max_grad_norm"] / (norm + 1e-6)))
        optimizer.step()
        losses.append(total)
    return losses


if __name__ == "__main__":
    folder, _, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    runs = json.loads(Path(folder, "runs.json").read_text())
    for name in names:
        losses = train(Path(folder), *runs[name])
        torch.save({"losses": losses}, f"{folder}/{name}.{os.environ['RANK']}.pt")
    dist.destroy_process_group()
