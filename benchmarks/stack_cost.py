"""CPU time of an optimizer step in other training stacks: the stack's own NLL, and objectives of deftune.

    DEFTUNE_STACKS=DIR .ci/stacks llamafactory swift axolotl torchtitan megatron      # builds the environments
    DEFTUNE_STACKS=DIR python benchmarks/stack_cost.py --json benchmarks/results/stack_cost_cpu.json --docs

SmolLM2-135M-Instruct (a vocabulary of 49,152) trains in float32 on 2 rows of 128 tokens a step: LLaMA-Factory, ms-swift
and axolotl on the files of `deftune export`, without deftune's keys for the stack's own NLL. torchtitan (chunked loss)
and Megatron-core train its first four layers. Every run has a process and one thread. A figure is the median of a run's
steps after the second: user and system time of the process. A ratio is to the stack's own NLL in the same round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import trajectories as stacks
import yaml
from safetensors.torch import load_file

from deftune.adapters.export import export_run
from deftune.artifacts.config import RunConfig
from deftune.artifacts.models import resolve_model
from deftune.selftest import tiny
from deftune.training.preparation import prepare

EXPORTED, DRIVEN = ("llamafactory", "swift", "axolotl"), ("torchtitan", "megatron")
CONTENDERS = ("stock", "nll", "deft", "eaft")  # stock: the stack's own NLL
ROWS, LENGTH, STEPS, LEFT_OUT, LAYERS = 2, 128, 6, 2, 4
OURS, PLUGIN = ("deft_objective", "plugins", "loss_type"), stacks.ROOT / "src/deftune/adapters/swift/deft_plugin.py"


def make_config(folder: Path, model: Path) -> RunConfig:
    with open(folder / "rows.jsonl", "w") as file:
        for row in range(ROWS * STEPS):
            answer = " ".join(f"{n} times {n + row} is {n * (n + row)}." for n in range(2, 60))
            messages = [{"role": "user", "content": "Multiply."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    settings = {"batch_size": ROWS, "micro_batch_size": ROWS, "max_steps": STEPS, "learning_rate": 1e-5,
             "schedule": "constant", "warmup_ratio": 0.0, "save_steps": 1000, "weight_decay": 0.0}  # fmt: skip
    changes = {"data.max_length": LENGTH, **{f"train.{key}": value for key, value in settings.items()}}
    return RunConfig.model_validate(tiny.run_content(folder / "run", model, folder / "rows.jsonl", changes))


def make_exported(folder: Path, stack: str, config: RunConfig) -> None:
    """The exported run for each contender; the stack's own NLL without the keys of deftune."""
    export_run(config, stack, folder / "files")
    exported, runs = folder / "files" / f"{stack}.yaml", {}
    for name in CONTENDERS:
        content, path = yaml.safe_load(exported.read_text()), folder / f"{name}.yaml"
        content |= {"ENV": {"DEFTUNE_OBJECTIVE": name}} if stack == "swift" else {"deft_objective": name}
        content = {key: value for key, value in content.items() if name != "stock" or key not in OURS}
        path.write_text(yaml.safe_dump(content))
        # ms-swift's own NLL keeps the plugin, which has the template of the exported rows
        runs[name] = stacks.swift_arguments(path, str(PLUGIN)) if stack == "swift" else [str(path)]
    (folder / "runs.json").write_text(json.dumps(runs))


def make_driven(folder: Path, model: Path, config: RunConfig) -> None:
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
    (folder / "runs.json").write_text(json.dumps({name: [name] for name in CONTENDERS}))


def train(folder: Path, stack: str, name: str, python: Path) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if stack in DRIVEN else []
    command = [str(python), *torchrun, str(stacks.DRIVERS / "timed.py"), str(folder), stack, name, str(STEPS)]
    environment = stacks.environment_of(python) | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    if done.returncode or ("verified from the logits" in printed) == (name == "stock"):
        raise RuntimeError(f"{stack}, {name}, ended with {done.returncode}:\n{printed[-4000:]}")
    found = json.loads((folder / f"{name}.json").read_text())
    return {**found, "step": statistics.median(found["seconds"][LEFT_OUT - 1 :])}  # from step LEFT_OUT + 1


def span(values: list[float], digits: int) -> str:
    return " - ".join(dict.fromkeys(f"{value:,.{digits}f}" for value in (min(values), max(values))))


def render(found: dict[str, Any]) -> str:
    """The table of docs/stacks.md, of whole rounds."""
    ours = [name for name in CONTENDERS if name != "stock"]
    heads = ["own NLL, CPU s", *(f"`{name}`" for name in ours), "peak MiB: own NLL", *(f"`{name}`" for name in ours)]
    lines = [f"| {' | '.join(['stack', *heads, 'rounds'])} |", "|---|" + "---:|" * (len(heads) + 1)]
    for stack in (name for name in EXPORTED + DRIVEN if name in found):
        rounds = [one for one in found[stack]["rounds"] if len(one) == len(CONTENDERS)]
        if not rounds:
            continue
        cells = [span([one["stock"]["step"] for one in rounds], 2)]
        cells += [span([one[name]["step"] / one["stock"]["step"] for one in rounds], 2) for name in ours]
        cells += [span([one[name]["peak_mib"] for one in rounds], 0) for name in CONTENDERS]
        versions = ", ".join(f"{name} {version}" for name, version in found[stack]["versions"].items())
        label = f"{stacks.STACKS[stack][0].split(',')[0]} ({versions})"
        lines.append(f"| {' | '.join([label, *cells, str(len(rounds))])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=EXPORTED + DRIVEN, default=EXPORTED + DRIVEN)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, help="the figures; rounds are added to those of the file")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {stacks.PAGE}")
    arguments = parser.parse_args()
    model = Path(resolve_model("smollm2")).absolute()
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, stack in [(n, stack) for n in range(arguments.rounds) for stack in arguments.stacks]:
            python, folder = stacks.python_of(stack), Path(temporary, stack)
            assert python is not None, f"the environment of {stack} is not built: .ci/stacks {stack}"
            if number == 0:
                folder.mkdir()
                config = make_config(folder, model)
                make_driven(folder, model, config) if stack in DRIVEN else make_exported(folder, stack, config)
            result = found.setdefault(stack, {"rounds": []})
            result |= {"date": datetime.date.today().isoformat(), "versions": stacks.versions_of(stack, python)}
            result["rounds"].append({})
            for name in CONTENDERS:
                try:
                    run = train(folder, stack, name, python)
                except RuntimeError as error:  # the other stacks go on
                    print(error, flush=True)
                    continue
                result["rounds"][-1][name] = run
                print(stack, number, name, {key: run[key] for key in ("step", "peak_mib", "gradient")}, flush=True)
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(render(found))
    if arguments.docs:
        stacks.write_table("stack cost", render(found))


if __name__ == "__main__":
    main()
