"""Tokens per second, MFU, peak memory and loss of training: deftune's trainer beside TRL's, each in its own process.

    python benchmarks/training.py MODEL_FOLDER rows.jsonl.gz --json out.jsonl     # on a GPU; bf16
    python benchmarks/training.py CONFIG.json rows.jsonl.gz --tokenizer MODEL_FOLDER --micro 4   # random weights
    python benchmarks/training.py MODEL_FOLDER rows.jsonl --only 'TRL|bf16 weights' --steps 3 --length 128 --micro 2
    python benchmarks/training.py --table out.jsonl                               # the table of what was measured

Every contender trains the same model on the same packed sequences in the same order, with fused AdamW. A step is timed
from the start of one step to the start of the next, records and data included; the first --warmup steps (compilation
too) are left out. --repeats runs the whole list again: the speed is that of the median step of all repeats, and beside
it the smallest and largest median of a repeat. Each result is appended to --json when it is there, so that a run that
is cut off loses nothing. Contenders are forks of a process that has imported what they need. One that cannot run is a
row that says why. MFU counts the products with the weights (`deftune.training.profiling.needed_flops`) against large
matrix products in the same process.

Needs deftune[train]; Liger's rows need liger-kernel, padding-free TRL needs flash-attn. unsloth and axolotl change
transformers or pin other versions of it: `--peer unsloth=FOLDER` names a folder of packages (unpacked wheels) that only
its process sees; peer_training.py says how they train. Not here: torchtitan (has its own models, data, launcher).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

DEFT, BF16, VARLEN, LAYERS = {"objective": "deft"}, {"weights": "bfloat16_with_masters"}, {"attention": "varlen"}, {
    "compile_layers": True
}  # fmt: skip
TRL, LIGER, COMPILE = {"loss_type": "nll"}, {"use_liger_kernel": True}, {"torch_compile": True}
FLAT = {"padding_free": True}
REFERENCE = "TRL nll + Liger"
CONTENDERS: dict[str, dict[str, Any]] = {
    "TRL nll": TRL,
    "TRL dft": {"loss_type": "dft"},
    REFERENCE: TRL | LIGER,
    "TRL nll + Liger; compile": TRL | LIGER | COMPILE,
    "TRL nll + Liger; padding-free": TRL | LIGER | FLAT,
    "TRL nll + Liger; compile; padding-free": TRL | LIGER | COMPILE | FLAT,
    "deftune nll": {"objective": "nll"},
    "deftune deft": DEFT,
    "deftune deft; bf16 weights": DEFT | BF16,
    "deftune deft; varlen": DEFT | VARLEN,
    "deftune deft; varlen; bf16 weights": DEFT | VARLEN | BF16,
    "deftune deft; compiled layers": DEFT | LAYERS,
    "deftune deft; varlen; compiled layers": DEFT | VARLEN | LAYERS,
    "deftune deft; varlen; compiled layers; bf16 weights": DEFT | VARLEN | LAYERS | BF16,
    "deftune deft + Liger": DEFT | LIGER,
    "deftune deft + Liger; bf16 weights": DEFT | LIGER | BF16,
    "deftune deft + Liger; varlen": DEFT | LIGER | VARLEN,
    "deftune deft + Liger; varlen; bf16 weights": DEFT | LIGER | VARLEN | BF16,
    "deftune deft + Liger; varlen; compiled layers; bf16 weights": DEFT | LIGER | VARLEN | LAYERS | BF16,
    "deftune eaft + Liger; varlen; bf16 weights": {"objective": "eaft"} | LIGER | VARLEN | BF16,
    "deftune nll; varlen; compiled layers; bf16 weights": {"objective": "nll"} | VARLEN | LAYERS | BF16,
    "deftune eaft; varlen; compiled layers; bf16 weights": {"objective": "eaft"} | VARLEN | LAYERS | BF16,
}
PEERS = {"unsloth nll": "unsloth", "axolotl nll + Liger": "axolotl"}
QUIET = {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}  # of a peer's process
OURS = ("attention", "compile_layers", "weights")  # arguments of DeftSFTTrainer


def prepared(args: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The tokenizer, and real rows, masked and packed; imports what the contenders need, but starts no CUDA."""
    sys.modules.setdefault("bitsandbytes", None)  # pyright: ignore  # PEFT imports it, and its import starts CUDA
    import trl  # noqa: F401  # pyright: ignore[reportUnusedImport]

    import deftune.training.trainer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from deftune.artifacts.models import load_tokenizer, resolve_model
    from deftune.data.encoding import Encoder, encode_rows
    from deftune.data.packing import pack
    from deftune.data.sources import read_rows

    tokenizer = load_tokenizer(resolve_model(args.tokenizer or args.model))
    rows = read_rows(args.data, format=args.format, limit=args.rows)
    encoded = encode_rows(rows, Encoder(tokenizer, mask="assistant", max_length=args.length))
    return tokenizer, list(pack(encoded.examples, args.length))


def load(args: argparse.Namespace, attention: str) -> Any:
    import transformers

    from deftune.artifacts.models import load_model, resolve_model

    if args.model.endswith(".json"):
        config = transformers.AutoConfig.for_model(**json.loads(Path(args.model).read_text()))
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            chosen = {} if attention == "auto" else {"attn_implementation": attention}
            model = transformers.AutoModelForCausalLM.from_config(config, **chosen).float()
        return model
    return load_model(resolve_model(args.model), attention=attention)


def measure(contender: str, args: argparse.Namespace, tokenizer: Any, packs: list[Any]) -> dict[str, Any]:
    """Train a contender for some steps; the result is what a row of the table is made of."""
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

    from deftune.artifacts.display import quiet
    from deftune.data.packing import Collator
    from deftune.training.assembly import NO_LIGER_LOSS, Batches, checkpointing_argument, make_dataset
    from deftune.training.profiling import compute_dtype, needed_flops, sustained_tflops, synchronized
    from deftune.training.trainer import DeftSFTTrainer, peak_gib

    options = dict(CONTENDERS[contender])
    objective, trl_flat = options.pop("objective", None), options.pop("padding_free", False)
    ours = {name: options.pop(name) for name in OURS if name in options}
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if objective is not None and "use_liger_kernel" in options:
        options["liger_kernel_config"] = NO_LIGER_LOSS
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            stamps.append(synchronized(device))

    with quiet(), tempfile.TemporaryDirectory() as folder:
        model = load(args, "flash_attention_2" if trl_flat else "auto")
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=args.micro, gradient_accumulation_steps=args.accumulation,
            max_steps=args.warmup + args.steps + 1, learning_rate=1e-5, bf16=cuda or "weights" in ours,
            use_cpu=not cuda, logging_steps=1, report_to=[], save_strategy="no",
            optim="adamw_torch_fused", disable_tqdm=True, remove_unused_columns=False, max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True}, **checkpointing_argument(False), **options,
        )  # fmt: skip
        flat = trl_flat or ours.get("attention") == "varlen"
        kwargs: dict[str, Any] = {
            "data_collator": Batches(packs, Collator(tokenizer.pad_token_id, padding_free=flat)),
            "train_dataset": make_dataset(range(len(packs))), "processing_class": tokenizer, "callbacks": [Clock()],
        }  # fmt: skip
        make: Any = SFTTrainer if objective is None else DeftSFTTrainer
        trainer = make(model, config, **kwargs, **({} if objective is None else {"objective": objective, **ours}))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    peak = peak_gib(device)
    rows = args.micro * args.accumulation / len(packs)  # of a step, as a share of all
    tokens = rows * sum(len(pack.input_ids) for pack in packs)
    supervised = rows * sum(label != -100 for pack in packs for label in pack.labels)
    return {
        "seconds": [end - start for start, end in itertools.pairwise(stamps)][args.warmup :], "peak_gib": peak,
        "first_loss": losses[0], "last_loss": losses[-1], "tokens": tokens,
        "flops": needed_flops(trainer.model, tokens, supervised),
        "tflops": sustained_tflops(device, compute_dtype(trainer)),
    }  # fmt: skip


def machine() -> str:
    """The GPU's name as nvidia-smi has it: a process that has started CUDA cannot fork contenders."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
        if name := found.stdout.strip():
            return name.splitlines()[0]
    except FileNotFoundError:
        pass
    return f"CPU, {torch.get_num_threads()} threads"


def why(error: BaseException) -> str:
    """An error as a cell of the table."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split())[:160].replace("|", "/")
    missing = isinstance(error, ImportError) or "ImportError" in text  # a loader wraps it
    return f"not installed: {text}" if missing else f"{type(error).__name__}: {text}"


def measure_into(out: Path, contender: str, *rest: Any) -> None:
    try:
        result = (measure_peer if contender in PEERS else measure)(contender, *rest)
    except Exception as error:  # a row of the table
        result = {"error": why(error)}
    out.write_text(json.dumps(result))


def in_process(contender: str, args: argparse.Namespace, tokenizer: Any, packs: list[Any]) -> dict[str, Any]:
    """`measure` in a fork of this process; an error, a crash or too long a time is a result too.

    A fork cannot use CUDA if this process has started it; then the process is a new one, which imports all again.
    """
    started = torch.cuda.is_initialized()
    context = multiprocessing.get_context("spawn") if started else multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder, "result.json"), time.perf_counter()
        process = context.Process(target=measure_into, args=(out, contender, args, tokenizer, packs))
        process.start()
        process.join(args.timeout + 60 * (contender in PEERS))  # a peer's process has the time for itself
        result = {"error": f"took more than {args.timeout:g} s"}
        if process.is_alive():
            process.kill()
            process.join()
        elif not out.exists():
            result = {"error": f"the process ended with code {process.exitcode}"}
        if out.exists():
            result = json.loads(out.read_text())
    return {"contender": contender, **result, "wall_seconds": time.perf_counter() - start}


def measure_peer(contender: str, args: argparse.Namespace, tokenizer: Any, packs: list[Any]) -> dict[str, Any]:
    """`measure` for a peer: write the model and the rows, and train them in a process that sees the peer's packages."""
    from peer_training import Job

    from deftune.training.profiling import needed_flops

    peer, packages = PEERS[contender], dict(args.peer)
    if peer not in packages:
        raise ImportError(f"give the folder of its packages by --peer {peer}=FOLDER")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        model = load(args, "auto")
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        operations = needed_flops(model, 1, 0), needed_flops(model, 0, 1)
        del model
        torch.cuda.empty_cache()
        with (folder / "rows.jsonl").open("w") as file:
            for pack in packs:
                for end, size in zip(itertools.accumulate(pack.lengths), pack.lengths, strict=True):
                    row = {name: getattr(pack, name)[end - size : end] for name in ("input_ids", "labels")}
                    file.write(json.dumps(row) + "\n")
        sizes = {name: getattr(args, name) for name in ("length", "micro", "accumulation", "warmup", "steps")}
        job = Job(str(folder / "model"), str(folder / "rows.jsonl"), str(folder), **sizes)
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
        root = Path(__file__).resolve().parents[1]
        path = [str(Path(packages[peer]).resolve()), str(root / "src"), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, root / "benchmarks/peer_training.py", peer, folder / "job.json"], cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **QUIET},
            capture_output=True, text=True, timeout=args.timeout,
        )  # fmt: skip
    if done.returncode:
        print(done.stderr[-6000:], file=sys.stderr, flush=True)
        raise RuntimeError((done.stderr.strip() or "no output").splitlines()[-1])
    result = json.loads(done.stdout.splitlines()[-1])
    result["flops"] = result["tokens"] * operations[0] + result.pop("supervised") * operations[1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder or GGUF file, or a config.json for random weights")
    parser.add_argument("data", nargs="?")
    parser.add_argument("--tokenizer")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--repeats", type=int, default=1, help="how often to run the list of contenders")
    parser.add_argument("--only", default="", help="contenders whose name this regular expression finds")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a contender (default: 300)")
    parser.add_argument("--peer", type=lambda text: tuple(text.split("=", 1)), action="append", default=[],
                        metavar="NAME=FOLDER", help="packages for the processes of unsloth or axolotl")  # fmt: skip
    parser.add_argument("--json", type=Path, help="append each result to this file of JSON lines")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a --json file, and do nothing else")
    parser.add_argument("--list", action="store_true", help="print the contenders, and do nothing else")
    args = parser.parse_args()
    if args.list:
        print("\n".join([*CONTENDERS, *PEERS]))
        return
    if args.table:
        print(render([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    if args.model is None or args.data is None:
        parser.error("give a model and a data file")
    if wrong := [peer for peer in args.peer if peer[0] not in PEERS.values() or not Path(peer[-1], peer[0]).is_dir()]:
        parser.error(f"--peer {'='.join(wrong[0])}: give unsloth=FOLDER or axolotl=FOLDER, a folder with that package")
    chosen = [name for name in (*CONTENDERS, *PEERS) if re.search(args.only, name)]
    if not chosen:
        parser.error(f"--only: {args.only!r} finds none of: {', '.join([*CONTENDERS, *PEERS])}")
    shown = " ".join(a if a.isascii() and not re.search(r"[\s;|()]", a) else repr(a) for a in sys.argv)
    head = {"command": shown, "machine": f"{machine()}, torch {torch.__version__}",
            "what": f"Sequences of {args.length}, {args.micro} x {args.accumulation} a step; {args.steps} steps timed "
                    f"after {args.warmup}; {args.repeats} repeat{'s' * (args.repeats > 1)}"}  # fmt: skip
    results: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(result) + "\n")

    keep(head)
    tokenizer, packs = prepared(args)
    for repeat in range(args.repeats):
        for contender in chosen:
            keep({**in_process(contender, args, tokenizer, packs), "repeat": repeat})
            print(render_row(contender, results), flush=True)
    text = render(results)
    print(f"\n{text}")
    if args.markdown:
        args.markdown.write_text(text + "\n")


def speeds(contender: str, results: list[dict[str, Any]]) -> list[float]:
    """Tokens per second of the median step, for each repeat."""
    mine = [r for r in results if r.get("contender") == contender and "seconds" in r]
    return [r["tokens"] / statistics.median(r["seconds"]) for r in mine]


def render_row(contender: str, results: list[dict[str, Any]]) -> str:
    mine = [r for r in results if r.get("contender") == contender]
    good = [r for r in mine if "seconds" in r]
    if not good:
        return f"| {contender} | not run: {mine[-1]['error']} | | | | | |"
    seconds = statistics.median(second for r in good for second in r["seconds"])
    last = good[-1]
    speed, spread, theirs = last["tokens"] / seconds, speeds(contender, results), speeds(REFERENCE, results)
    ratio = f"{speed / statistics.median(theirs):.3f}" if theirs else "-"
    rate = statistics.median(r["tflops"] for r in good)
    return (
        f"| {contender} | {speed:,.0f} ({min(spread):,.0f} - {max(spread):,.0f}) | {ratio} | "
        f"{last['flops'] / seconds / rate / 1e12:.1%} | {max(r['peak_gib'] for r in good):.2f} | "
        f"{last['first_loss']:.4f} to {last['last_loss']:.4f} | {last['wall_seconds']:.0f} |"
    )


def render(results: list[dict[str, Any]]) -> str:
    """The results of one or more runs as a table."""
    lines: list[str] = []
    for head in (r for r in results if "command" in r):
        lines += [f"`python {head['command']}`", "", head["machine"], "", head["what"], ""]
    rates = [r["tflops"] for r in results if "tflops" in r]
    if rates:
        lines += [f"Large matrix products: {min(rates):.3g} to {max(rates):.3g} TFLOP/s", ""]
    lines += [f"| | tokens/s (of repeats) | x {REFERENCE} | MFU | peak GiB | loss, first to last step | s in all |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    names = dict.fromkeys(r["contender"] for r in results if "contender" in r)
    return "\n".join(lines + [render_row(name, results) for name in names])


if __name__ == "__main__":
    main()
