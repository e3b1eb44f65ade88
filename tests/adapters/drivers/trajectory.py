"""Train with `deftune train`, TRL, transformers or DeepSpeed: trajectory.py FOLDER KIND RUN...

FOLDER has model/, rows.json (tokens and labels), settings.json and runs.json, {RUN: arguments}. Rank R writes the
losses of the steps and the last weights to FOLDER/RUN.R.pt, as recorded.py does.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers


def train_deftune(config):
    from rich.console import Console
    from safetensors.torch import load_file

    from deftune.artifacts.config import load_config
    from deftune.training.train import train_run

    run = train_run(load_config(Path(config)), Console(quiet=True)).run
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], load_file(run.model / "model.safetensors")


def train_with_trainer(kind, spec):
    from datasets import Dataset

    import deftune

    options = {**json.loads(Path("settings.json").read_text()), "output_dir": "out", "logging_steps": 1,
               "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 1}  # fmt: skip
    if kind == "deepspeed":
        from deepspeed_steps import CONFIG

        options["deepspeed"] = {**CONFIG, "zero_optimization": {"stage": 3}}
    else:
        options["use_cpu"] = True
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    options["gradient_accumulation_steps"] //= ranks
    rows = Dataset.from_list(json.loads(Path("rows.json").read_text()))
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    shared = {"train_dataset": rows, "data_collator": transformers.DataCollatorForSeq2Seq(tokenizer)}
    if kind == "trl":
        from trl import SFTConfig

        arguments = SFTConfig(**options, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, max_length=None)
        model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
        trainer = deftune.DeftSFTTrainer(model, arguments, objective=spec, processing_class=tokenizer, **shared)
    else:
        arguments = transformers.TrainingArguments(**options)
        model = transformers.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
        trainer = transformers.Trainer(model, arguments, compute_loss_func=deftune.hf_loss(spec), **shared)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    model = trainer.accelerator.unwrap_model(trainer.model)
    if kind == "deepspeed":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return losses, {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    folder, kind, *names = sys.argv[1:]
    os.chdir(folder)
    torch.set_num_threads(1)
    if kind == "deepspeed":
        import deepspeed
        from deepspeed_steps import allow_on_cpu

        deepspeed.init_distributed("gloo")
        allow_on_cpu()
    runs = json.loads(Path("runs.json").read_text())
    for name in names:
        trained = train_deftune(*runs[name]) if kind == "deftune" else train_with_trainer(kind, *runs[name])
        losses, weights = trained
        torch.save({"steps": [], "losses": losses, "weights": weights}, f"{name}.{os.environ.get('RANK', 0)}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
