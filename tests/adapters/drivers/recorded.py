"""Run a stack's own command in this process, and record what its Trainer was given and where it ended.

recorded.py FOLDER STACK RUN...: FOLDER/runs.json holds {RUN: the command's arguments}; rank R writes FOLDER/RUN.R.pt.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers

COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels", "loss_scale")


def record(path: Path, bypass: bool) -> None:
    """Wrap transformers' Trainer: its micro-batches by step, its logged losses and its final weights go to ``path``.

    ``bypass``: the Trainer takes the model's own NLL, as a fused cross entropy would.
    """
    steps = []
    get_batches, train = transformers.Trainer.get_batch_samples, transformers.Trainer.train

    def get_batch_samples(self, *args, **kwargs):
        batches, num_items = get_batches(self, *args, **kwargs)
        if batches:
            steps.append([{name: batch[name].clone() for name in COLUMNS if name in batch} for batch in batches])
        return batches, num_items

    def train_and_save(self, *args, **kwargs):
        output = train(self, *args, **kwargs)
        losses = [record["loss"] for record in self.state.log_history if "loss" in record]
        weights = {name: p.detach().clone() for name, p in self.accelerator.unwrap_model(self.model).named_parameters()}
        torch.save({"steps": steps, "losses": losses, "weights": weights}, path)
        return output

    def own_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**{name: inputs[name] for name in (*COLUMNS[:4], "logits_to_keep") if name in inputs}).loss

    transformers.Trainer.get_batch_samples, transformers.Trainer.train = get_batch_samples, train_and_save
    if bypass:
        transformers.Trainer.compute_loss = own_loss
    if bypass and "swift" in sys.argv:
        from swift.trainers import Seq2SeqTrainer

        Seq2SeqTrainer.compute_loss = own_loss


def train_nll() -> None:
    """The adapter's loss computes NLL, whatever objective it was given."""
    from deftune.adapters import check

    token_loss = check.token_loss
    check.token_loss = lambda logits, targets, objective, **more: token_loss(logits, targets, "nll", **more)


def run(stack: str, arguments: list[str]) -> None:
    if stack == "llamafactory":
        from deftune.adapters.llamafactory import main

        sys.argv = ["deftune-llamafactory", "train", *arguments]
        main()
    elif stack == "swift":
        from swift.pipelines import sft_main

        os.environ["DEFTUNE_OBJECTIVE"], *arguments = arguments
        sft_main(arguments)
    elif stack == "axolotl":
        from axolotl.cli.train import do_cli
        from axolotl.integrations.base import PluginManager
        from axolotl.loaders.model import ModelLoader

        PluginManager._instance = None  # plugins are registered once for each process, with their config
        torch.cuda.can_device_access_peer = lambda *_: True  # axolotl asks the driver, which a CPU machine lacks
        set_device_map = ModelLoader._set_device_map_config

        def on_cpu(self):  # axolotl puts the ranks of DDP on GPUs
            set_device_map(self)
            self.model_kwargs["device_map"] = {"": "cpu"}

        ModelLoader._set_device_map_config = on_cpu
        sys.argv = ["axolotl"]
        do_cli(arguments[0])


if __name__ == "__main__":
    folder, stack, *names = sys.argv[1:]
    torch.set_num_threads(1)
    runs = json.loads(Path(folder, "runs.json").read_text())
    originals = vars(transformers.Trainer).copy()
    for name in names:
        for method in ("get_batch_samples", "train", "compute_loss"):
            setattr(transformers.Trainer, method, originals[method])
        record(Path(folder, f"{name}.{os.environ.get('RANK', 0)}.pt"), bypass=name == "bypass")
        if name == "swapped":  # the last of its process
            train_nll()
        run(stack, runs[name])
    if "RANK" in os.environ:
        left = sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())
        print(f"threads of gloo: {left}", flush=True)
