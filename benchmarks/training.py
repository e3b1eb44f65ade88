"""Tokens per second and peak memory of a training step: deftune's trainer against TRL's own, in one run.

    python benchmarks/training.py MODEL_FOLDER rows.jsonl.gz                 # on a GPU; bf16 compute over fp32 weights
    python benchmarks/training.py MODEL_FOLDER rows.jsonl.gz --steps 3 --length 256 --micro 2    # a try on a CPU
    python benchmarks/training.py CONFIG.json rows.jsonl.gz --tokenizer MODEL_FOLDER   # random weights of that shape

Each contender trains its own copy of the model, on the same packed sequences in the same order, with the same
optimizer. First each by itself: its peak memory and losses. Then all of them side by side, in rounds of a few steps
over all in turn (--rounds, --steps; the first --warmup of a round are left out): a host whose speed drifts is as fast
for one as for the next. A speed is that of the median step; the ratio to TRL's nll comes with the 95% interval of
rounds drawn again, and beside it the median of the rounds' own ratios: where the two disagree, nothing is decided.
Liger's layers replace the model's own for good, so those that use them come last, in rounds of their own. Needs
deftune[train]; Liger's rows need liger-kernel.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
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
    "deftune deft; varlen": {"objective": "deft", "attention": "varlen"},
    "deftune deft; compiled layers": {"objective": "deft", "compile_layers": True},
    "deftune deft; varlen; compiled layers": {"objective": "deft", "attention": "varlen", "compile_layers": True},
    "TRL nll": {"loss_type": "nll"},
    "TRL dft": {"loss_type": "dft"},
    "TRL nll + Liger layers": {"loss_type": "nll", "use_liger_kernel": True},
    "TRL nll + Liger layers + compile": {"loss_type": "nll", "use_liger_kernel": True, "torch_compile": True},
    "deftune deft + Liger layers": {"objective": "deft", "use_liger_kernel": True},
    "deftune deft; varlen + Liger layers": {"objective": "deft", "use_liger_kernel": True, "attention": "varlen"},
}


def sequences(args: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Real rows, masked and packed."""
    from deftune.data.encoding import Encoder, encode_rows
    from deftune.data.packing import pack
    from deftune.data.sources import read_rows

    rows = read_rows(args.data, format=args.format, limit=args.rows)
    encoded = encode_rows(rows, Encoder(tokenizer, mask="assistant", max_length=args.length))
    return list(pack(encoded.examples, args.length))


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    import transformers

    from deftune.artifacts.models import load_model, load_tokenizer

    if args.model.endswith(".json"):
        config = transformers.AutoConfig.for_model(**json.loads(Path(args.model).read_text()))
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config).float()
        return model.cpu(), load_tokenizer(args.tokenizer)
    return load_model(args.model), load_tokenizer(args.tokenizer or args.model)


class Entrant:
    """A contender's trainer, and the seconds of its steps."""

    def __init__(self, contender: str, model: Any, tokenizer: Any, packs: list[Any], args: argparse.Namespace):
        from transformers import PrinterCallback, TrainerCallback
        from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

        from deftune.artifacts.display import quiet
        from deftune.data.packing import Collator
        from deftune.training.assembly import Batches, make_dataset
        from deftune.training.trainer import DeftSFTTrainer

        options: dict[str, Any] = dict(CONTENDERS[contender])
        objective = options.pop("objective", None)
        ours = {name: options.pop(name) for name in ("attention", "compile_layers") if name in options}
        cuda = torch.cuda.is_available()
        seconds = self.seconds = list[float]()

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.start = now()

            def on_optimizer_step(self, *_: Any, **__: Any) -> None:
                seconds.append(now() - self.start)

        def now() -> float:
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

        self.folder = tempfile.TemporaryDirectory()
        with quiet():
            config = SFTConfig(
                output_dir=self.folder.name, per_device_train_batch_size=args.micro,
                gradient_accumulation_steps=args.accumulation, max_steps=args.steps, learning_rate=1e-5, bf16=cuda,
                use_cpu=not cuda, gradient_checkpointing=False, logging_steps=1, report_to=[], save_strategy="no",
                disable_tqdm=True, remove_unused_columns=False, max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True}, **options,
            )  # fmt: skip
            flat = ours.get("attention") == "varlen"
            kwargs: dict[str, Any] = {
                "data_collator": Batches(packs, Collator(tokenizer.pad_token_id, padding_free=flat)),
                "train_dataset": make_dataset(range(len(packs))), "processing_class": tokenizer, "callbacks": [Clock()],
            }  # fmt: skip
            make: Any = SFTTrainer if objective is None else DeftSFTTrainer
            extra = {} if objective is None else {"objective": objective, **ours}
            self.trainer = make(copy.deepcopy(model), config, **kwargs, **extra)
            self.trainer.remove_callback(PrinterCallback)

    def run(self) -> list[float]:
        """The seconds of a round's steps."""
        from deftune.artifacts.display import quiet

        self.seconds.clear()
        with quiet():
            self.trainer.train()
        return list(self.seconds)


def alone(contender: str, *what: Any) -> dict[str, Any]:
    """A contender's peak memory, and its losses, with nothing else on the device."""
    from deftune.losses import graphs
    from deftune.training.trainer import peak_gib

    cuda = torch.cuda.is_available()
    gc.collect()
    if cuda:
        graphs.clear()  # the buffers that deftune keeps between calls are of this contender alone
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        left = torch.cuda.memory_allocated()
        assert left < 1 << 27, f"{left} bytes of the contender before are still there"
    entrant = Entrant(contender, *what)
    entrant.run()
    losses = [record["loss"] for record in entrant.trainer.state.log_history if "loss" in record]
    peak = peak_gib(torch.device("cuda" if cuda else "cpu"))
    entrant.trainer.accelerator.free_memory()
    return {"contender": contender, "peak_gib": peak, "first_loss": losses[0], "last_loss": losses[-1], "rounds": []}


def race(results: list[dict[str, Any]], rounds: int, warmup: int, *what: Any) -> None:
    """The seconds of each contender's steps, round by round."""
    entrants = [Entrant(result["contender"], *what) for result in results]
    for _ in range(rounds):
        for result, entrant in zip(results, entrants):
            result["rounds"].append(entrant.run()[warmup:])
    for entrant in entrants:
        entrant.trainer.accelerator.free_memory()


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
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a round that are not counted")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="which ones, by commas (default: all)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    contenders: list[str] = args.contenders.split(",")
    if unknown := [name for name in contenders if name not in CONTENDERS]:
        parser.error(f"--contenders: unknown {', '.join(unknown)}; known: {', '.join(CONTENDERS)}")
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup: {args.warmup} of a round's {args.steps} steps leave none to count")
    shown = " ".join(a if a.isascii() and " " not in a else repr(a) for a in sys.argv)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    model, tokenizer = load(args)
    packs = sequences(args, tokenizer)
    results: list[dict[str, Any]] = []
    for patched in (False, True):
        mine: list[dict[str, Any]] = []
        for contender in contenders:
            if ("use_liger_kernel" in CONTENDERS[contender]) == patched:
                try:
                    mine.append(alone(contender, model, tokenizer, packs, args))
                except ImportError as error:
                    results.append({"contender": contender, "error": str(error)[:200]})
                print(contender, "done alone", flush=True)
        race(mine, args.rounds, args.warmup, model, tokenizer, packs, args)
        results += mine
        gc.collect()
    text = render(results, args, f"`python {shown}`\n\n{name}, torch {torch.__version__}")
    print(text)
    for path, content in ((args.markdown, text), (args.json, json.dumps({"command": shown, "machine": name,
                                                                         "results": results}, indent=1))):  # fmt: skip
        if path:
            path.write_text(content + "\n")


def median_step(rounds: list[list[float]]) -> float:
    return statistics.median(second for seconds in rounds for second in seconds)


def interval(reference: list[list[float]], rounds: list[list[float]], draws: int = 4000) -> tuple[float, float]:
    """The ratio of the median steps if the rounds were drawn again, those of both contenders together."""
    source = random.Random(0)
    ratios: list[float] = []
    for _ in range(draws):
        drawn = source.choices(range(len(rounds)), k=len(rounds))
        ratios.append(median_step([reference[i] for i in drawn]) / median_step([rounds[i] for i in drawn]))
    ratios.sort()
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def render(results: list[dict[str, Any]], args: argparse.Namespace, head: str) -> str:
    per_step = args.micro * args.accumulation * args.length
    lines = [head, f"\nSequences of {args.length}, {args.micro} x {args.accumulation} a step; {args.rounds} rounds of "
             f"{args.steps - args.warmup} steps\n",
             "| | tokens/s | x TRL nll | 95% interval | by rounds (from - to) | peak GiB | loss, first to last step |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    by_name = {result["contender"]: result for result in results}
    reference = by_name.get("TRL nll", {}).get("rounds")
    for contender in args.contenders.split(","):
        mine = by_name[contender]
        if "error" in mine:
            lines.append(f"| {contender} | not run: {mine['error']} | | | | | |")
            continue
        rounds, ratio, spread, by_rounds = mine["rounds"], "-", "-", "-"
        if reference:
            own = sorted(statistics.median(theirs) / statistics.median(mine) for theirs, mine in zip(reference, rounds))
            by_rounds = f"{statistics.median(own):.3f} ({own[0]:.3f} - {own[-1]:.3f})"
            ratio = f"{median_step(reference) / median_step(rounds):.3f}"
            spread = "[{:.3f}, {:.3f}]".format(*interval(reference, rounds)) if rounds is not reference else "-"
        lines.append(
            f"| {contender} | {per_step / median_step(rounds):,.0f} | {ratio} | {spread} | {by_rounds} | "
            f"{mine['peak_gib']:.3f} | {mine['first_loss']:.4f} to {mine['last_loss']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
