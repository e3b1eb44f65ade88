"""Attention on a GPU: no kernel whose backward returns NaN for padded batches, at the shapes where one did.

cuDNN's kernel (torch 2.11, cuDNN 9.19, H200) returned NaN gradients in layer 15 of Qwen2.5-Coder-1.5B for 16 rows of
GSM8K padded to 320 or 192 tokens. The real model is needed to see that:

    DEFTUNE_QWEN=model.gguf DEFTUNE_DATA=folder pytest tests/training/test_attention_gpu.py
"""

import os
from pathlib import Path

import pytest
import torch
import transformers
from small import make_arguments, make_model, make_trainer

from deftune.artifacts.config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here"),
]
QWEN, DATA = os.environ.get("DEFTUNE_QWEN"), os.environ.get("DEFTUNE_DATA")


@pytest.mark.parametrize("length", [320, 192])
@pytest.mark.parametrize("choice", ["auto", "cudnn"])
def test_padded_batches_never_reach_cudnn_unless_asked(tmp_path, length, choice):
    """16 padded rows through heads of Qwen's shape; the profiler names the kernels that ran."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row in range(16):
        ids = torch.randint(0, 40, (length - 7 * row,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    model = make_model(
        torch.float32, transformers.Qwen2ForCausalLM, scale=1.0, hidden_size=256, num_attention_heads=2, head_dim=128,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    arguments = make_arguments(
        tmp_path, use_cpu=False, bf16=True, per_device_train_batch_size=16, max_steps=2, max_grad_norm=1.0
    )
    trainer, _ = make_trainer(model, arguments, rows, objective="deft", attention=choice)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.train()
    used = any("cudnn" in event.key.lower() for event in profile.key_averages())
    assert used == (choice == "cudnn")


@pytest.mark.skipif(not (QWEN and DATA), reason="needs DEFTUNE_QWEN (the model) and DEFTUNE_DATA (with gsm8k/)")
@pytest.mark.parametrize("length", [320, 192])
def test_qwen_trains_through_the_steps_where_cudnn_gave_nan(tmp_path, length):
    from deftune.training.train import train_run

    def config(attention: str) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": str(tmp_path / attention),
                "objective": "deft | eos(nll)",  # its end tokens come from the GGUF file's tokenizer and template
                "model": {"name": QWEN},
                "data": {"train": [{"path": str(Path(DATA) / "gsm8k/train.jsonl.gz")}], "max_length": length},
                "train": {
                    "learning_rate": 1e-5,
                    "batch_size": 64,
                    "micro_batch_size": 16,
                    "max_steps": 24,
                    "save_steps": 1000,
                    "attention": attention,
                    "seed": 0,
                },
            }
        )

    try:
        train_run(config("cudnn"))
    except ValueError as error:  # as long as cuDNN has the fault, the error must name it
        assert "ScaledDotProductCudnnAttentionBackward" in str(error)
        assert "cudnn not finite" in str(error) and "set train.attention=auto" in str(error)
    outcome = train_run(config("auto"))
    assert outcome.state == "finished"
    records = [record for record in outcome.run.read_metrics() if record["kind"] == "train"]
    assert len(records) == 24 and all(0 < record["eos_p"] <= 1 for record in records)
