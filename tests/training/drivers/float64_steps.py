"""Gradients and losses of every step of an epoch in float64, and an evaluation, over the ranks of a launch.

float64_steps.py FOLDER ddp|fsdp MICRO ACCUMULATED SPEC...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from sharding import allow_on_cpu
from small import Gradients, make_arguments, make_model, make_tokenizer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from deftune.training.machine import leave_ranks
from deftune.training.trainer import DeftSFTTrainer

FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}


class Whole(Gradients):
    """The gradients that every optimizer step begins with, gathered where they are sharded."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        super().on_pre_optimizer_step(args, state, control, model=model)
        self.steps[-1] = {
            name.removeprefix("module."): (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
            for name, grad in self.steps[-1].items()
        }


def run(folder: Path, how: str, micro: int, accumulated: int, spec: str, rows: list, held_out: list, **model) -> dict:
    arguments = make_arguments(
        folder / "out", per_device_train_batch_size=micro, per_device_eval_batch_size=micro, optim="sgd",
        gradient_accumulation_steps=accumulated, learning_rate=0.0, ddp_find_unused_parameters=False,
        **({"fsdp": True, "fsdp_config": dict(FSDP)} if how == "fsdp" else {}),
    )  # fmt: skip
    watch = Whole()
    trainer = DeftSFTTrainer(
        make_model(**model), arguments, objective=spec, train_dataset=Dataset.from_list(rows), callbacks=[watch],
        eval_dataset=Dataset.from_list(held_out), processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule) == (how == "fsdp")
    metrics = trainer.evaluate()
    records = [record for record in trainer.state.log_history if "loss" in record]
    AcceleratorState._reset_state()
    return {"steps": watch.steps, "records": records, "eval": metrics}


if __name__ == "__main__":
    folder, how, micro, accumulated, *specs = sys.argv[1:]
    torch.set_num_threads(1)
    PartialState(cpu=True, backend="gloo")
    if how == "fsdp":
        allow_on_cpu()
    rows, held_out = torch.load(Path(folder) / "rows.pt")
    found = {}
    for spec in specs:
        for tied in (True, False):
            found[spec, tied] = run(
                Path(folder), how, int(micro), int(accumulated), spec, rows, held_out, tie_word_embeddings=tied
            )
    if dist.get_rank() == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    leave_ranks()
