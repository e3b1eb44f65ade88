"""The training of `training.py` with a peer that changes transformers or pins other versions: a process of its own.

    python benchmarks/peer_training.py unsloth JOB.json      # training.py starts it; JOB.json holds a `Job`

A peer packs the tokenised rows itself, as its users have it, without dropping any; tokens are counted in the batches
that it trains. Activations are kept, as in the other rows of the table. A step is timed from the start of one step to
the start of the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

IGNORED = -100


class PeakMemory:
    """The peak of the GPU's memory where something else resets torch's count, as axolotl does at every log."""

    def __init__(self) -> None:
        self.before = 0  # the largest peak, in bytes, that a reset has forgotten

    def watch(self) -> None:
        """Keep the peak of every reset from here on."""
        import torch

        peak, reset = torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats

        def keep(*args: Any, **named: Any) -> None:
            self.before = max(self.before, peak(*args, **named))
            reset(*args, **named)

        torch.cuda.reset_peak_memory_stats = keep

    def gib(self, now: float) -> float:
        """The peak in GiB, of which ``now`` is what has been the peak since the last reset."""
        return max(now, self.before / 2**30)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a peer trains: a model folder with its tokenizer, rows as JSON lines of input_ids and labels, the sizes."""

    model: str
    rows: str
    work: str
    length: int
    micro: int
    accumulation: int
    warmup: int
    steps: int

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps + 1  # the last one only ends the one before it


class Record:
    """Step starts, tokens and losses of a run of transformers' Trainer, or of what inherits from it."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.tokens: list[int] = []
        self.supervised: list[int] = []
        self.losses: list[float] = []

    def watch(self) -> None:
        """Record every Trainer that trains from here on."""
        import torch
        import transformers

        watched: Any = transformers.Trainer
        record, training_step, log = self, watched.training_step, watched.log

        def recorded(trainer: Any, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            if trainer.state.global_step == len(record.starts):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                record.starts.append(time.perf_counter())
                record.tokens.append(0)
                record.supervised.append(0)
            mask = inputs.get("attention_mask")  # of padded rows: 0 where there is no token; packs number their rows
            record.tokens[-1] += int(inputs["input_ids"].numel() if mask is None else (mask > 0).sum())
            record.supervised[-1] += int((inputs["labels"] != IGNORED).sum())
            return training_step(trainer, model, inputs, *rest, **named)

        def logged(trainer: Any, logs: dict[str, float], *rest: Any, **named: Any) -> Any:
            if "loss" in logs:
                record.losses.append(float(logs["loss"]))
            return log(trainer, logs, *rest, **named)

        watched.training_step, watched.log = recorded, logged

    def result(self, job: Job) -> dict[str, Any]:
        timed = slice(job.warmup, job.warmup + job.steps)
        return {
            "seconds": [end - start for start, end in itertools.pairwise(self.starts)][timed],
            "tokens": sum(self.tokens[timed]) / job.steps, "supervised": sum(self.supervised[timed]) / job.steps,
            "first_loss": self.losses[0], "last_loss": self.losses[-1],
        }  # fmt: skip


def read_dataset(job: Job) -> Any:
    import datasets

    return datasets.Dataset.from_list([json.loads(line) for line in Path(job.rows).read_text().splitlines()])


def train_with_unsloth(job: Job) -> dict[str, Any]:
    """unsloth's full fine-tuning, by its FastLanguageModel and the SFTTrainer of TRL that it has changed."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    import unsloth  # pyright: ignore[reportMissingImports]  # before transformers and TRL, which it changes
    import torch  # isort: skip
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

    record, cuda = Record(), torch.cuda.is_available()
    record.watch()
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        job.model, max_seq_length=job.length, load_in_4bit=False, full_finetuning=True,
        use_gradient_checkpointing=False,
    )  # fmt: skip
    config = SFTConfig(
        output_dir=job.work, per_device_train_batch_size=job.micro, gradient_accumulation_steps=job.accumulation,
        max_steps=job.all_steps, learning_rate=1e-5, bf16=cuda, use_cpu=not cuda, logging_steps=1, report_to=[],
        save_strategy="no", optim="adamw_torch_fused", disable_tqdm=True, max_length=job.length, packing=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    SFTTrainer(model=model, args=config, train_dataset=read_dataset(job), processing_class=tokenizer).train()
    return record.result(job)


def train_with_axolotl(job: Job) -> dict[str, Any]:
    """axolotl's packing, Liger's layers and loss, by a config as a user writes it."""
    import torch
    import yaml
    from axolotl.cli.config import load_cfg  # pyright: ignore[reportMissingImports]
    from axolotl.cli.train import TrainerCliArgs, do_train  # pyright: ignore[reportMissingImports]

    record, work, cuda = Record(), Path(job.work), torch.cuda.is_available()
    record.watch()
    rows = [json.loads(line) for line in Path(job.rows).read_text().splitlines()]
    with (work / "tokens.jsonl").open("w") as file:
        file.writelines(json.dumps(row | {"attention_mask": [1] * len(row["labels"])}) + "\n" for row in rows)
    config: dict[str, Any] = {
        "base_model": job.model, "datasets": [{"path": str(work / "tokens.jsonl"), "ds_type": "json", "type": None}],
        "dataset_prepared_path": str(work / "prepared"), "dataset_num_proc": 1, "val_set_size": 0,
        "sequence_len": job.length,
        "sample_packing": True, "micro_batch_size": job.micro, "gradient_accumulation_steps": job.accumulation,
        "bf16": cuda, "max_steps": job.all_steps, "attn_implementation": "sdpa", "learning_rate": 1e-5,
        "optimizer": "adamw_torch_fused", "lr_scheduler": "linear", "gradient_checkpointing": False,
        "logging_steps": 1, "save_strategy": "no", "output_dir": str(work / "axolotl"),
    }  # fmt: skip
    if cuda:
        liger = ("rope", "rms_norm", "glu_activation", "fused_linear_cross_entropy")
        config |= {f"liger_{part}": True for part in liger}
        config |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}
    (work / "axolotl.yaml").write_text(yaml.safe_dump(config))
    do_train(load_cfg(str(work / "axolotl.yaml")), TrainerCliArgs())
    return record.result(job)


TRAIN = {"unsloth": train_with_unsloth, "axolotl": train_with_axolotl}


def main() -> None:
    peer, path = sys.argv[1:]
    job = Job(**json.loads(Path(path).read_text()))
    with contextlib.redirect_stdout(sys.stderr):  # the result alone goes to standard output
        peak = PeakMemory()
        peak.watch()
        result = TRAIN[peer](job)
        import torch

        from deftune.training.profiling import sustained_tflops
        from deftune.training.trainer import peak_gib

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        result["peak_gib"] = peak.gib(peak_gib(device))
        result["tflops"] = sustained_tflops(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
