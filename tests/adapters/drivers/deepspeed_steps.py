"""transformers' Trainer with `hf_loss` under DeepSpeed: deepspeed_steps.py FOLDER STAGE SPEC.

Rank R writes its micro-batches by step, the logged losses and the gathered weights to FOLDER/zeroSTAGE.R.pt.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset

import deftune

CONFIG = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
}  # fmt: skip


def allow_on_cpu() -> None:
    """accelerate starts DeepSpeed over GPUs only."""
    original = PartialState.__init__

    def over_gloo(self, cpu=False, **kwargs):
        original(self, True, backend="gloo")
        self.distributed_type = DistributedType.DEEPSPEED

    PartialState.__init__ = over_gloo


class Recorded(transformers.Trainer):
    def get_batch_samples(self, *args, **kwargs):
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self.steps.append([{name: value.clone() for name, value in batch.items()} for batch in batches])
        return batches, num_items


if __name__ == "__main__":
    folder, stage, spec = sys.argv[1:]
    os.chdir(folder)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    allow_on_cpu()
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    rows = []
    for line in Path("rows.jsonl").read_text().splitlines():
        prompt, answer = (message["content"] for message in json.loads(line)["messages"])
        prompt, answer = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    arguments = transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=20,
        learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch",
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, seed=1,
        deepspeed={**CONFIG, "zero_optimization": {"stage": int(stage)}},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    trainer = Recorded(
        model, arguments, train_dataset=Dataset.from_list(rows), data_collator=collator,
        compute_loss_func=deftune.hf_loss(spec),
    )  # fmt: skip
    trainer.steps = []
    trainer.train()
    assert trainer.accelerator.state.deepspeed_plugin.zero_stage == int(stage)
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    found = {"steps": trainer.steps, "losses": losses, "weights": weights}
    torch.save(found, f"zero{stage}.{dist.get_rank()}.pt")
    dist.barrier()
