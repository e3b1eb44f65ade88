"""Peak memory and speed of LoRA and QLoRA on a model of 8B parameters: `deftune train` beside TRL and axolotl.

    python benchmarks/lora_memory.py rows.jsonl.gz --tokenizer MODEL_FOLDER --out results.json      # on a GPU
    python benchmarks/lora_memory.py rows.jsonl.gz --tokenizer MODEL_FOLDER --layers 2 --width 256  # a try on a CPU

The model has Llama-3.1-8B's shape and random weights: memory and speed do not depend on their values. It is written
to a temporary folder once (16 GB), as users have it, and each contender loads it in a process of its own, trains
adapters of rank 16 on all linear layers for a few steps on the same packed rows, and reports the peak of the device's
memory (on a CPU: of the process) and the median step. A contender that cannot run is a row with its reason. Every
result is written when it ends. Needs deftune[train]; the rows with 4 bits need bitsandbytes and a GPU.

axolotl 0.21.0 pins other versions of transformers and TRL: `--axolotl FOLDER` names a folder of packages (unpacked
wheels) that only its processes see, before the others. It runs with its defaults, its LoRA kernels on a GPU among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTENDERS: dict[str, dict[str, Any]] = {
    "deftune, LoRA over bfloat16": {"stack": "deftune"},
    "deftune, LoRA over bfloat16, recomputed activations": {"stack": "deftune", "checkpointing": True},
    "deftune, QLoRA": {"stack": "deftune", "bits": 4},
    "deftune, QLoRA, recomputed activations": {"stack": "deftune", "bits": 4, "checkpointing": True},
    "TRL, LoRA over bfloat16": {"stack": "trl"},
    "TRL, LoRA over bfloat16, recomputed activations": {"stack": "trl", "checkpointing": True},
    "TRL, QLoRA": {"stack": "trl", "bits": 4},
    "TRL, QLoRA, recomputed activations": {"stack": "trl", "bits": 4, "checkpointing": True},
    "axolotl, LoRA over bfloat16, recomputed activations": {"stack": "axolotl", "checkpointing": True},
    "axolotl, QLoRA, recomputed activations": {"stack": "axolotl", "bits": 4, "checkpointing": True},
}
RANK, ALPHA = 16, 32


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """Llama-3.1-8B's shape, or a smaller one, with random bfloat16 weights and the given tokenizer."""
    import torch
    import transformers

    from deftune.artifacts.models import load_tokenizer

    heads = max(1, args.width // 128)
    config = transformers.LlamaConfig(
        hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), intermediate_size=args.width * 7 // 2, vocab_size=args.vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load_tokenizer(args.tokenizer).save_pretrained(folder)


def train_with_deftune(folder: Path, work: Path, options: dict[str, Any], args: argparse.Namespace) -> None:
    from deftune.artifacts.config import RunConfig
    from deftune.training.train import train_run

    model: dict[str, Any] = {"name": str(folder), "lora": {"r": RANK, "alpha": ALPHA}, "dtype": "bfloat16"}
    if "bits" in options:
        model["quantization"] = "4bit"
    train_run(
        RunConfig.model_validate({
            "run": str(work / "run"), "objective": "deft", "model": model,
            "data": {"train": [{"path": args.data, "format": args.format, "limit": args.rows}],
                     "max_length": args.length, "packing": True},
            "train": {"max_steps": args.steps, "batch_size": args.micro, "micro_batch_size": args.micro,
                      "learning_rate": 1e-4, "save_steps": 10_000, "precision": "auto",
                      "gradient_checkpointing": bool(options.get("checkpointing"))},
        })
    )  # fmt: skip


def train_with_trl(folder: Path, work: Path, options: dict[str, Any], args: argparse.Namespace) -> None:
    import datasets
    import peft
    import torch
    import transformers
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

    from deftune.data.sources import read_rows
    from deftune.training.assembly import checkpointing_argument

    cuda = torch.cuda.is_available()
    loading: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if "bits" in options:
        loading["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        loading["device_map"] = {"": 0}
    rows = [{"messages": list(row.messages)} for row in read_rows(args.data, format=args.format, limit=args.rows)]
    config = SFTConfig(
        output_dir=str(work / "trl"), max_steps=args.steps, per_device_train_batch_size=args.micro, bf16=cuda,
        use_cpu=not cuda, packing=True, logging_steps=1, max_length=args.length, learning_rate=1e-4, report_to=[],
        save_strategy="no", model_init_kwargs=loading, **checkpointing_argument(bool(options.get("checkpointing"))),
    )  # fmt: skip
    SFTTrainer(
        str(folder), config, train_dataset=datasets.Dataset.from_list(rows),
        peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).train()  # fmt: skip


def train_with_axolotl(folder: Path, work: Path, options: dict[str, Any], args: argparse.Namespace) -> None:
    import torch
    import yaml
    from axolotl.cli.config import load_cfg  # pyright: ignore[reportMissingImports]
    from axolotl.cli.train import TrainerCliArgs, do_train  # pyright: ignore[reportMissingImports]

    from deftune.data.sources import read_rows

    rows = [{"messages": list(row.messages)} for row in read_rows(args.data, format=args.format, limit=args.rows)]
    cuda = torch.cuda.is_available()
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "base_model": str(folder), "adapter": "qlora" if "bits" in options else "lora", "lora_r": RANK,
        "lora_alpha": ALPHA, "lora_target_linear": True, "load_in_4bit": "bits" in options,
        "datasets": [{"path": str(work / "rows.jsonl"), "ds_type": "json", "type": "chat_template"}],
        "dataset_prepared_path": str(work / "prepared"), "dataset_num_proc": 1, "val_set_size": 0,
        "sequence_len": args.length,
        "sample_packing": True, "micro_batch_size": args.micro, "gradient_accumulation_steps": 1, "bf16": cuda,
        "max_steps": args.steps, "gradient_checkpointing": bool(options.get("checkpointing")),
        "attn_implementation": "sdpa", "learning_rate": 1e-4, "logging_steps": 1, "save_strategy": "no",
        "output_dir": str(work / "axolotl"),
    }  # fmt: skip
    if not cuda:  # the kernels are Triton's; the weights are float32 then
        config |= {f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o", "embedding")}
    (work / "axolotl.yaml").write_text(yaml.safe_dump(config))
    do_train(load_cfg(str(work / "axolotl.yaml")), TrainerCliArgs())


TRAIN = {"deftune": train_with_deftune, "trl": train_with_trl, "axolotl": train_with_axolotl}


def run_one(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train one contender in this process; its peak memory and median step."""
    import torch
    import transformers
    from peer_training import PeakMemory

    from deftune.training.trainer import peak_gib

    options = CONTENDERS[name]
    peak = PeakMemory()
    peak.watch()
    seconds: list[float] = []

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    step = transformers.Trainer.training_step  # the first call of each step is timed from here to the next one
    last = [0.0]

    def timed(self: Any, *rest: Any, **named: Any) -> Any:
        begin = now()
        if last[0]:
            seconds.append(begin - last[0])
        last[0] = begin
        return step(self, *rest, **named)

    transformers.Trainer.training_step = timed
    with tempfile.TemporaryDirectory() as work:
        TRAIN[options["stack"]](folder, Path(work), options, args)
    memory = peak.gib(peak_gib(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    step_seconds = statistics.median(seconds[1:])
    return {"contender": name, "peak_gib": memory, "step_seconds": step_seconds,
            "tokens_per_second": args.micro * args.length / step_seconds}  # fmt: skip


def environment(name: str, packages: Path | None) -> dict[str, str]:
    """The variables of a contender's process."""
    variables = dict(os.environ)
    if CONTENDERS[name]["stack"] == "axolotl":
        variables |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        if packages:
            variables["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(packages.resolve()), variables.get("PYTHONPATH")])
            )
    return variables


def render(results: list[dict[str, Any]]) -> str:
    lines = ["| | peak GiB | tokens/s |", "|---|---|---|"]
    for result in results:
        name = result["contender"]
        if "error" in result:
            lines.append(f"| {name} | not run: {result['error']} | |")
        else:
            lines.append(f"| {name} | {result['peak_gib']:.1f} | {result['tokens_per_second']:,.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="rows to train on")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--tokenizer", required=True, help="a model folder or name; its tokenizer with a chat template")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=4, help="packed sequences of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--axolotl", type=Path, metavar="FOLDER", help="packages for axolotl's processes only")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every contender")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in the process of a contender
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_one(args.one, args.model, args)))
        return 0
    if args.steps < 3:
        parser.error("--steps: at least 3; the first step is not timed")
    if args.axolotl and not (args.axolotl / "axolotl").is_dir():
        parser.error(f"--axolotl: {args.axolotl} holds no package axolotl; give the folder of unpacked wheels")
    from deftune.artifacts.models import resolve_model

    args.tokenizer = resolve_model(args.tokenizer)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args)
        for name in [name for name in CONTENDERS if args.only in name]:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--model", folder]
            done = subprocess.run(command, capture_output=True, text=True, env=environment(name, args.axolotl))
            said = done.stderr if done.returncode else done.stdout
            last = (said.strip() or "no output").splitlines()[-1]
            results.append(json.loads(last) if done.returncode == 0 else {"contender": name, "error": last[:200]})
            print(results[-1], flush=True)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
            if args.out:
                import torch

                machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
                text = json.dumps({"command": " ".join(sys.argv), "machine": machine, "results": results}, indent=1)
                args.out.write_text(text + "\n")
    print(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
