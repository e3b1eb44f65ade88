"""Tokens per second and peak memory of a training step: deftune's trainer against TRL's own, in one run.

    python benchmarks/training.py MODEL_FOLDER rows.jsonl.gz                 # on a GPU; bf16 compute over fp32 weights
    python benchmarks/training.py MODEL_FOLDER rows.jsonl.gz --steps 3 --length 256 --micro 2    # a try on a CPU
    python benchmarks/training.py CONFIG.json rows.jsonl.gz --tokenizer MODEL_FOLDER   # random weights of that shape

Each contender trains its own copy of the model, on the same packed sequences in the same order, with the same
optimizer; the first steps (--warmup) are left out, and the rounds (--rounds) go over all contenders in turn. Liger's
layers replace the model's own for good, so those that use them come last. Needs deftune[train]; Liger's rows need
liger-kernel.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

CONTENDERS = {
    "deftune deft": {"objective": "deft"},
    "deftune nll": {"objective": "nll"},
    "TRL nll": {"loss_type": "nll"},
    "TRL dft": {"loss_type": "dft"},
    "TRL nll + Liger layers": {"loss_type": "nll", "use_liger_kernel": True},
    "deftune deft + Liger layers": {"objective": "deft", "use_liger_kernel": True},
}


def sequences(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Real rows, masked and packed."""
    from deftune.data.encoding import Encoder, encode_rows, pack
    from deftune.data.sources import read_source

    rows = read_source(args.data, format=args.format, limit=args.rows)
    encoded = encode_rows(rows, Encoder(tokenizer, mask="assistant", max_length=args.length))
    return list(pack(encoded.examples, args.length))


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    import transformers

    from deftune.training.models import load_model, load_tokenizer

    if args.model.endswith(".json"):
        config = transformers.AutoConfig.for_model(**json.loads(Path(args.model).read_text()))
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config).float()
        return model.cpu(), load_tokenizer(args.tokenizer)
    return load_model(args.model), load_tokenizer(args.tokenizer or args.model)


def measure(contender: str, model: Any, tokenizer: Any, packs: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """One contender on a copy of the model."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

    from deftune.data.encoding import Collator
    from deftune.kernels import replay
    from deftune.training.train import Batches, make_dataset, quiet
    from deftune.training.trainer import DeftSFTTrainer, peak_gib

    options: dict[str, Any] = dict(CONTENDERS[contender])
    objective = options.pop("objective", None)
    cuda = torch.cuda.is_available()
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = now()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            times.append(now() - self.start)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    gc.collect()
    if cuda:
        replay.clear()  # what deftune keeps between calls is of this contender alone
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        left = torch.cuda.memory_allocated()
        assert left < 1 << 27, f"{left} bytes of the contender before are still there"
    with quiet(), tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=args.micro, gradient_accumulation_steps=args.accumulation,
            max_steps=args.steps, learning_rate=1e-5, bf16=cuda, use_cpu=not cuda, gradient_checkpointing=False,
            logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, **options,
        )  # fmt: skip
        kwargs: dict[str, Any] = {
            "data_collator": Batches(packs, Collator(tokenizer.pad_token_id, padding_free=False)),
            "train_dataset": make_dataset(range(len(packs))), "processing_class": tokenizer, "callbacks": [Clock()],
        }  # fmt: skip
        make: Any = SFTTrainer if objective is None else DeftSFTTrainer
        extra = {} if objective is None else {"objective": objective}
        trainer = make(copy.deepcopy(model), config, **kwargs, **extra)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    peak = peak_gib(torch.device("cuda" if cuda else "cpu"))
    trainer.accelerator.free_memory()
    per_step = args.micro * args.accumulation * args.length
    kept = times[args.warmup :]
    return {
        "contender": contender, "seconds": kept, "tokens_per_second": per_step / statistics.median(kept),
        "peak_gib": peak, "first_loss": losses[0], "last_loss": losses[-1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder, or a config.json for random weights")
    parser.add_argument("data")
    parser.add_argument("--tokenizer")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="which ones, by commas (default: all)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    contenders: list[str] = args.contenders.split(",")
    if unknown := [name for name in contenders if name not in CONTENDERS]:
        parser.error(f"--contenders: unknown {', '.join(unknown)}; known: {', '.join(CONTENDERS)}")
    shown = " ".join(a if a.isascii() and " " not in a else repr(a) for a in sys.argv)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    model, tokenizer = load(args)
    packs = sequences(args, tokenizer)
    results: list[dict[str, Any]] = []
    for patched in (False, True):
        for round_ in range(args.rounds):
            for contender in contenders:
                if ("use_liger_kernel" in CONTENDERS[contender]) == patched:
                    try:
                        result = measure(contender, model, tokenizer, packs, args)
                    except ImportError as error:
                        result = {"contender": contender, "error": str(error)[:200]}
                    results.append({"round": round_, **result})
                    print(contender, result.get("tokens_per_second", result.get("error")), flush=True)
    text = render(results, args, f"`python {shown}`\n\n{name}, torch {torch.__version__}")
    print(text)
    for path, content in ((args.markdown, text), (args.json, json.dumps({"command": shown, "machine": name,
                                                                         "results": results}, indent=1))):  # fmt: skip
        if path:
            path.write_text(content + "\n")


def render(results: list[dict[str, Any]], args: argparse.Namespace, head: str) -> str:
    lines = [head, f"\nSequences of {args.length}, {args.micro} x {args.accumulation} a step\n",
             "| | tokens/s | x TRL nll | spread of the steps | peak GiB | loss, first to last step |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    reference = [r["tokens_per_second"] for r in results if r["contender"] == "TRL nll" and "seconds" in r]
    for contender in args.contenders.split(","):
        mine = [r for r in results if r["contender"] == contender and "seconds" in r]
        if not mine:
            error = next((r["error"] for r in results if r["contender"] == contender), "")
            lines.append(f"| {contender} | not run: {error} | | | | |")
            continue
        speed = statistics.median(r["tokens_per_second"] for r in mine)
        ratio = f"{speed / statistics.median(reference):.3f}" if reference else "-"
        seconds = sorted(s for r in mine for s in r["seconds"])
        middle = statistics.median(seconds)
        spread = (seconds[int(0.9 * (len(seconds) - 1))] - seconds[int(0.1 * (len(seconds) - 1))]) / middle
        lines.append(
            f"| {contender} | {speed:,.0f} | {ratio} | {spread:.1%} | {max(r['peak_gib'] for r in mine):.2f} | "
            f"{mine[0]['first_loss']:.4f} to {mine[0]['last_loss']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
