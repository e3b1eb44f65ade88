"""Peak memory of a training step beside what `deftune plan` counts: plain, checkpointed, with LoRA, in float32.

    python benchmarks/plan_memory.py --out benchmarks/results/plan_h200.json      # on a GPU

Random weights of the shapes of SmolLM2-135M and Qwen2.5-1.5B, random tokens in packs of two rows, three steps each.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from deftune.data.packing import Collator
from deftune.selftest import tiny
from deftune.training.plan import BACKBONES, Strategy, Workload, estimate, shape_of
from deftune.training.train import Batches, make_dataset
from deftune.training.trainer import DeftSFTTrainer, peak_gib

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"smollm2-135m": SMOLLM2, "qwen2.5-1.5b": BACKBONES["Qwen/Qwen2.5-1.5B"]}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "checkpointing": {"checkpointing": True},
    "lora": {"lora_rank": 16},
    "lora, checkpointing": {"lora_rank": 16, "checkpointing": True},
    "fp32": {"bf16": False},
}


class Packs:
    """Sequences of two rows of random tokens."""

    def __init__(self, length: int):
        self.length = length

    def __getitem__(self, place: int) -> Any:
        from deftune.data.examples import Encoded
        from deftune.data.packing import pack

        draw = torch.Generator().manual_seed(place)
        rows = [torch.randint(300, (self.length // 2,), generator=draw).tolist() for _ in range(2)]
        fields: dict[str, Any] = {"truncated": False, "straddled": 0, "source": "", "where": ""}
        encoded = [Encoded(input_ids=row, labels=[-100, *row[1:]], **fields) for row in rows]
        return pack(encoded, self.length)[0]


def measure(name: str, rows: int, length: int, case: dict[str, Any]) -> dict[str, Any]:
    from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

    accumulation, bf16 = case.get("accumulation", 1), case.get("bf16", True)
    strategy = Strategy(checkpointing=case.get("checkpointing", False), lora_rank=case.get("lora_rank", 0))
    config = transformers.AutoConfig.for_model(**MODELS[name])
    shape = shape_of(config, name)
    counted = estimate(shape, Workload(length, rows, accumulation, bf16), strategy).total
    tokenizer = tiny.make_tokenizer()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).float()
    peft = None
    if strategy.lora_rank:
        from peft import LoraConfig

        peft = LoraConfig(r=strategy.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation,
            max_steps=3, bf16=bf16, gradient_checkpointing=strategy.checkpointing, report_to=[], save_strategy="no",
            disable_tqdm=True, remove_unused_columns=False, max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        trainer = DeftSFTTrainer(
            model, arguments, objective="deft", train_dataset=make_dataset(range(64)), processing_class=tokenizer,
            data_collator=Batches(Packs(length), Collator(tokenizer.pad_token_id, padding_free=False)),  # pyright: ignore
            peft_config=peft,
        )  # fmt: skip
        trainer.train()
    peak = peak_gib(torch.device("cuda"))
    del model, trainer
    return {"rows": rows, "length": length, "peak_gib": peak, "counted_gib": counted, "ratio": counted / peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name, rows in (("smollm2-135m", 8), ("qwen2.5-1.5b", 4)):
        for label, case in CASES.items():
            results.append({"model": name, "case": label, **measure(name, rows, 2048, case)})
            print(json.dumps(results[-1]), flush=True)
    found = {"command": "benchmarks/plan_memory.py", "machine": torch.cuda.get_device_name(),
             "torch": torch.__version__, "results": results}  # fmt: skip
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
