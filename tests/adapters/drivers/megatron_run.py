"""Train a tiny GPTModel of Megatron-core on a CPU: ``torchrun megatron_run.py OUT KEY=VALUE...``; rank 0 writes OUT.

Nothing of the first lines is needed on a machine with a GPU.
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
torch.cuda.current_device = lambda: "cpu"  # Megatron allocates on the current CUDA device

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import random as rng  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from deftune.adapters import megatron  # noqa: E402

rng.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def make_norm(cls, config, hidden_size, eps=1e-5, **_):
    """torch's norm, also under sequence parallelism, for which Megatron asks for Apex or Transformer Engine."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


WrappedTorchNorm.__new__ = staticmethod(make_norm)

VOCAB, STEPS, BATCHES = 90, 6, 2


def make_model(sequence_parallel=False, parallel_output=True, **more):
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, sequence_parallel=sequence_parallel, init_method_std=0.4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(), **more,
    )  # fmt: skip
    return GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=32,
        parallel_output=parallel_output, share_embeddings_and_output_weights=False,
    )  # fmt: skip


def written_out(z, labels):
    """DEFT by its equation, through autograd."""
    log_probs = z.double().log_softmax(-1)
    a = log_probs.exp().square().sum(-1).detach()
    return ((1 - (a * log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]).exp()) / a).float()


def main(out, **options):
    dist.init_process_group("gloo")
    how, objective = options.pop("how"), options.pop("objective", "deft")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model = make_model(**{name: value == "True" for name, value in options.items()})
    if how == "swapped":  # the adapter computes NLL, whatever objective it was given
        token_loss = megatron.token_loss
        megatron.token_loss = lambda logits, labels, _, **more: token_loss(logits, labels, "nll", **more)
    if how in ("model", "swapped"):
        megatron.use_objective(model, objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, places = torch.Generator().manual_seed(1), torch.arange(16)[None].expand(3, -1)
    mask, trajectory = torch.ones(1, 1, 16, 16).tril() < 0.5, []
    for _ in range(STEPS):
        optimizer.zero_grad()
        batches = [torch.randint(0, VOCAB, (3, 17), generator=generator) for _ in range(BATCHES)]
        keep = [(torch.rand(3, 16, generator=generator) < 0.7).float() for _ in range(BATCHES)]
        count, total = sum(float(kept.sum()) for kept in keep), 0.0
        for ids, kept in zip(batches, keep):
            ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            if how in ("model", "swapped", "stock"):
                losses = model(ids, places, mask, labels=labels)
            elif how == "logits":
                losses = megatron.token_losses(model(ids, places, mask), labels, objective, loss_mask=kept)
            else:
                losses = written_out(model(ids, places, mask), labels)
            loss = (losses * kept).sum() / count
            loss.backward()
            total += loss.item()
        if options.get("sequence_parallel") == "True":  # norms see a part of the sequence: Megatron's DDP sums these
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad)
        squares = sum(gradient_square(parameter) for parameter in model.parameters())
        optimizer.step()
        trajectory.append((total, squares**0.5))
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(trajectory, file)
    dist.destroy_process_group()


def gradient_square(parameter):
    """Of the whole parameter: shards are summed over the ranks, replicas counted once."""
    square = parameter.grad.double().square().sum()
    if getattr(parameter, "tensor_model_parallel", False) and dist.get_world_size() > 1:
        dist.all_reduce(square)
    return float(square)


if __name__ == "__main__":
    main(sys.argv[1], **dict(argument.split("=") for argument in sys.argv[2:]))
