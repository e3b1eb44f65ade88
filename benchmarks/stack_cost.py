"""CPU time of an optimizer step in other training stacks: the stack's own NLL, and objectives of deftune.

    DEFTUNE_STACKS=DIR .ci/stacks llamafactory swift axolotl torchtitan megatron      # builds the environments
    DEFTUNE_STACKS=DIR python benchmarks/stack_cost.py --json benchmarks/results/stack_cost_cpu.json --docs

SmolLM2-135M-Instruct (a vocabulary of 49,152) trains in float32 on 2 rows of 128 tokens a step: LLaMA-Factory, ms-swift
and axolotl on the files of `deftune export`, without deftune's keys for the stack's own NLL. torchtitan (chunked loss)
and Megatron-core train its first four layers, through the drivers of tests/adapters. Every run has a process and one
thread. A figure is the median of a run's steps after the second: user and system time of the process. A ratio
compares it with the stack's own NLL in the same round. The figures are written after every run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from trajectories import DRIVERS, ROOT, STACKS, python_of, swift_arguments, versions_of

from deftune.adapters.export import export_run
from deftune.artifacts.config import RunConfig
from deftune.artifacts.models import resolve_model
from deftune.selftest import tiny
from deftune.training.preparation import prepare

EXPORTED, DRIVEN = ("llamafactory", "swift", "axolotl"), ("torchtitan", "megatron")
CONTENDERS = {"stock": "stock", "nll": "nll", "deft": "deft", "eaft": "eaft"}
ROWS, LENGTH, STEPS, LEFT_OUT, LAYERS = 2, 128, 6, 2, 4
PAGE, MARK = ROOT / "docs" / "stacks.md", "stack cost"


def make_config(folder: Path, model: Path) -> RunConfig:
    answers = [
        " ".join(f"{n} times {n + row} is {n * (n + row)}." for n in range(2, 60)) for row in range(ROWS * STEPS)
    ]
    rows = [{"messages": [{"role": "user", "content": "Multiply."}, {"role": "assistant", "content": answer}]}
            for answer in answers]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data.max_length": LENGTH, "train.batch_size": ROWS, "train.micro_batch_size": ROWS, "train.max_steps": STEPS,
        "train.learning_rate": 1e-5, "train.schedule": "constant", "train.warmup_ratio": 0.0, "train.save_steps": 1000,
        "train.weight_decay": 0.0,
    }  # fmt: skip
    return RunConfig.model_validate(tiny.run_content(folder / "run", model, folder / "rows.jsonl", changes))


def make_exported(folder: Path, stack: str, config: RunConfig, environment: dict[str, str], python: Path) -> None:
    """The exported run for each contender; the stack's own NLL without the keys of deftune."""
    export_run(config, stack, folder / "files")
    exported = folder / "files" / f"{stack}.yaml"
    runs = {}
    for name, spec in CONTENDERS.items():
        content, path = yaml.safe_load(exported.read_text()), folder / f"{name}.yaml"
        if stack == "swift":
            content["ENV"] = {"DEFTUNE_OBJECTIVE": spec}
        else:
            content["deft_objective"] = spec
        if name == "stock":
            for key in ("deft_objective", "plugins", "loss_type"):
                content.pop(key, None)
        path.write_text(yaml.safe_dump(content))
        runs[name] = [str(path)]
        if stack == "swift":  # the plugin has the template of the rows, for the stack's own NLL too
            plugin = subprocess.run([python, "-m", "deftune.adapters.swift"], env=environment, capture_output=True,
                                    text=True, check=True).stdout.strip()  # fmt: skip
            runs[name] = swift_arguments(path, plugin)
    (folder / "runs.json").write_text(json.dumps(runs))


def make_driven(folder: Path, config: RunConfig, model: Path) -> None:
    """The first layers of the model, two rows of tokens, and settings, as files of the drivers."""
    examples = prepare(config, lambda _: None).train.examples[:ROWS]
    rows = [{"input_ids": list(row.input_ids), "labels": list(row.labels)} for row in examples]
    (folder / "rows.json").write_text(json.dumps(rows))
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    shape = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    weights = load_file(model / "model.safetensors")
    kept = {n: w.float() for n, w in weights.items() if ".layers." not in n or int(n.split(".")[2]) < LAYERS}
    torch.save(kept, folder / "weights.pt")
    settings = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1, "max_steps": STEPS,
                "learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0}  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "runs.json").write_text(json.dumps({name: [spec] for name, spec in CONTENDERS.items()}))


def train(folder: Path, stack: str, name: str, python: Path, environment: dict[str, str]) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if stack in DRIVEN else []
    command = [str(python), *torchrun, str(DRIVERS / "timed.py"), str(folder), stack, name, str(STEPS)]
    done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)  # fmt: skip
    if done.returncode or ("verified from the logits" in done.stdout) == (name == "stock"):
        raise RuntimeError(f"{stack}, {name}, ended with {done.returncode}:\n{done.stdout[-4000:]}")
    found = json.loads((folder / f"{name}.json").read_text())
    return {**found, "step": statistics.median(found["seconds"][LEFT_OUT - 1 :])}  # from step LEFT_OUT + 1


def render(found: dict[str, Any]) -> str:
    lines = ["| stack | own NLL, CPU s | " + " | ".join(f"`{n}`" for n in list(CONTENDERS)[1:]) + " | peak MiB: own NLL | "
             "`deft` | `eaft` |", "|---|" + "---:|" * 7]  # fmt: skip
    for stack, result in found.items():
        rounds = [one for one in result["rounds"] if one.keys() == CONTENDERS.keys()]
        if not rounds:
            continue
        cells = [" - ".join(f"{s:.2f}" for s in sorted({min(x), max(x)})) for x in [
            [one["stock"]["step"] for one in rounds],
            *([one[name]["step"] / one["stock"]["step"] for one in rounds] for name in list(CONTENDERS)[1:]),
        ]]  # fmt: skip
        cells += [f"{max(one[name]['peak_mib'] for one in rounds):,.0f}" for name in ("stock", "deft", "eaft")]
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "torch")
        lines.append(f"| {STACKS[stack][0].split(',')[0]} ({versions}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=EXPORTED + DRIVEN, default=EXPORTED + DRIVEN)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, help="the figures; other stacks in the file are kept")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    model = Path(resolve_model("smollm2")).absolute()
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds):
            for stack in arguments.stacks:
                python, folder = python_of(stack), Path(temporary, stack)
                assert python is not None, f"the environment of {stack} is not built: .ci/stacks {stack}"
                environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST", "DEFTUNE"))} | {
                    "PYTHONPATH": f"{ROOT / 'src'}:{DRIVERS.parent}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                    "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true",
                    "DO_NOT_TRACK": "1", "PATH": f"{python.parent}:{os.environ['PATH']}",
                }  # fmt: skip
                if number == 0:
                    folder.mkdir()
                    config = make_config(folder, model)
                    if stack in DRIVEN:
                        make_driven(folder, config, model)
                    else:
                        make_exported(folder, stack, config, environment, python)
                    found[stack] = {"date": datetime.date.today().isoformat(),
                                    "versions": versions_of(stack, python), "rounds": []}  # fmt: skip
                found[stack]["rounds"].append({})
                for name in CONTENDERS:
                    try:
                        run = train(folder, stack, name, python, environment)
                    except RuntimeError as error:  # the other stacks go on
                        print(error, flush=True)
                        continue
                    found[stack]["rounds"][-1][name] = run
                    print(stack, number, name, {key: run[key] for key in ("step", "peak_mib", "gradient")}, flush=True)
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(render(found))
    if arguments.docs:
        before, rest = PAGE.read_text().split(f"<!-- {MARK} -->\n")
        after = rest.split(f"<!-- /{MARK} -->")[1]
        PAGE.write_text(f"{before}<!-- {MARK} -->\n{render(found)}\n<!-- /{MARK} -->{after}")


if __name__ == "__main__":
    main()
