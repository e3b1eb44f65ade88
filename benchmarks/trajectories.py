"""One float32 trajectory of 20 steps through every training stack, compared with `deftune train`.

    DEFTUNE_STACKS=DIR .ci/stacks verl swift ...      # builds the environments of the stacks
    DEFTUNE_STACKS=DIR python benchmarks/trajectories.py --json benchmarks/results/trajectories.json

A tiny Llama trains on 8 rows. Every step holds all 8 rows, so the order in which a stack draws rows does not matter: in
four micro-batches on one rank, and in two on each of two ranks (CPU, gloo). Rows reach every stack as tokens and
labels: LLaMA-Factory, ms-swift, axolotl and verl through the files of `deftune export`, the others as tensors.
torchtitan and Megatron-core train their own models, with the weights converted. A figure is the largest relative
difference between a loss of the stack and the loss of the same step in `deftune train` on one rank, over both numbers
of ranks.

`--docs` writes the table into docs/stacks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from deftune.adapters.export import export_run
from deftune.artifacts.config import RunConfig
from deftune.selftest import tiny
from deftune.training.preparation import prepare

OBJECTIVES = {"nll": "nll", "linear": "linear", "cayley": "cayley", "deft": "deft", "eaft": "eaft",
              "floor": "deft | floor(0.2)"}  # fmt: skip
STEPS, ROWS, MICRO = 20, 8, 2
RANKS = (1, 2)
TOLERANCE = 1e-5  # float32 over 20 steps of Adam: rounding in another order, amplified
PAGE = Path("docs/stacks.md")
# stack: (label, its environment below $DEFTUNE_STACKS, packages whose versions are named)
STACKS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "deftune": ("`deftune train`", None, ("trl", "transformers")),
    "trl": ("TRL, `DeftSFTTrainer`", None, ("trl", "transformers")),
    "transformers": ("transformers, `hf_loss`", None, ("transformers",)),
    "deepspeed": ("DeepSpeed ZeRO-3, `hf_loss`", "deepspeed", ("deepspeed", "transformers")),
    "verl": ("verl, FSDP2", "verl", ("verl", "transformers")),
    "llamafactory": ("LLaMA-Factory", "llamafactory", ("llamafactory", "transformers")),
    "swift": ("ms-swift", "swift", ("ms-swift", "transformers")),
    "axolotl": ("axolotl", "axolotl", ("axolotl", "transformers")),
    "torchtitan": ("torchtitan, FSDP2", "torchtitan", ("torchtitan",)),
    "torchtitan-tp": ("torchtitan, tensor parallel", "torchtitan", ("torchtitan",)),
    "megatron": ("Megatron-core, tensor parallel", "megatron", ("megatron-core",)),
}
EXPORTED = ("verl", "llamafactory", "swift", "axolotl")
ROOT = Path(__file__).resolve().parents[1]
DRIVERS = ROOT / "tests" / "adapters" / "drivers"


def python_of(stack: str) -> Path | None:
    """The interpreter of the stack's environment, if there is one."""
    environment = STACKS[stack][1]
    if environment is None:
        return Path(sys.executable)
    path = Path(os.environ.get("DEFTUNE_STACKS", ""), environment, "bin", "python")
    return path.absolute() if path.is_file() else None


def versions_of(stack: str, python: Path) -> dict[str, str]:
    code = "import json, sys; from importlib.metadata import version as v; "
    code += "print(json.dumps({name: v(name) for name in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, "torch", *STACKS[stack][2]], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def environment_of(python: Path) -> dict[str, str]:
    """The variables of a process in a stack's environment: one thread, no GPU, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DEFTUNE"))}
    return kept | {
        "PYTHONPATH": f"{ROOT / 'src'}:{DRIVERS.parent}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }  # fmt: skip


def make_config(folder: Path, spec: str, run: str) -> RunConfig:
    changes = {
        "train.batch_size": ROWS, "train.micro_batch_size": MICRO, "train.max_steps": STEPS, "train.weight_decay": 0.0,
        "train.schedule": "constant", "train.warmup_ratio": 0.0, "train.save_steps": 1000, "objective": spec,
    }  # fmt: skip
    content = tiny.run_content(folder / run, folder / "model", folder / "conversations.jsonl", changes)
    return RunConfig.model_validate(content)


def make_files(folder: Path) -> None:
    """The model, the conversations, their tokens and labels, and the settings as arguments of transformers' Trainer."""
    text = [message["content"] for row in tiny.conversations(60) for message in row["messages"]]
    tokenizer = tiny.make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320)
    tiny.save_model(folder / "model", tokenizer, gain=20.0)  # an untrained model's gates are all alike
    tiny.save_conversations(folder / "conversations.jsonl", ROWS)
    config = make_config(folder, "deft", "run")
    examples = prepare(config, lambda _: None).train.examples
    rows = [{"input_ids": list(row.input_ids), "labels": list(row.labels)} for row in examples]
    assert len(rows) == ROWS
    (folder / "rows.json").write_text(json.dumps(rows))
    torch.save(
        load_file(folder / "model" / "model.safetensors"), folder / "weights.pt"
    )  # some stacks bring no safetensors
    train = config.train
    settings = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ROWS // MICRO, "max_steps": STEPS,
        "learning_rate": train.learning_rate, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "adam_beta1": train.betas[0], "adam_beta2": train.betas[1], "max_grad_norm": train.clip,
        "optim": "adamw_torch",
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))


def swift_arguments(path: Path, plugin: str) -> list[str]:
    """The objective, and the exported file as the arguments that `swift sft` makes of it."""
    content = yaml.safe_load(path.read_text())
    spec = content.pop("ENV")["DEFTUNE_OBJECTIVE"]
    found = [spec, "--external_plugins", plugin]
    for key, value in content.items():
        found += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return found


def train(folder: Path, stack: str, python: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """{objective: losses and weights} of the stack on some ranks; all objectives in one set of processes."""
    work = folder / f"{stack}-{ranks}"
    work.mkdir()
    for name in ("model", "rows.json", "settings.json", "weights.pt"):
        (work / name).symlink_to(folder / name)
    environment = environment_of(python)
    if stack != "deepspeed":
        environment["ACCELERATE_USE_CPU"] = "true"
    runs: Any = {name: [spec] for name, spec in OBJECTIVES.items()}
    driver = [str(DRIVERS / "trajectory.py"), str(work), stack, *OBJECTIVES]
    if stack == "deftune":
        for name, spec in OBJECTIVES.items():
            config = make_config(folder, spec, f"{work.name}/run-{name}")
            (work / f"{name}.yaml").write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
            runs[name] = [str(work / f"{name}.yaml")]
    elif stack == "megatron":
        driver[0] = str(DRIVERS / "megatron_trajectory.py")
    elif stack.startswith("torchtitan"):
        driver[0] = str(DRIVERS / "titan_trajectory.py")
    elif stack == "deepspeed":
        environment |= {"DS_ACCELERATOR": "cpu", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    elif stack in EXPORTED:
        for name, spec in OBJECTIVES.items():
            export_run(make_config(folder, spec, "run"), stack, work / f"{name}.files", ranks=ranks)
        if stack == "swift":
            printed = subprocess.run([python, "-m", "deftune.adapters.swift"], env=environment, capture_output=True,
                                     text=True, check=True).stdout.strip()  # fmt: skip
            runs = {name: swift_arguments(work / f"{name}.files" / "swift.yaml", printed) for name in OBJECTIVES}
        elif stack == "verl":
            environment |= {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_PLATFORM": "cpu",
                            "VERL_ENGINE_DEVICE": "cuda"}  # fmt: skip
            more = ["--config-name", "verl", "trainer.device=cpu", "trainer.logger=[file]",  # options before overrides
                    "checkpoint.save_contents=[extra]", f"hydra.run.dir={work}/hydra"]  # fmt: skip
            runs = [
                {"name": name, "args": ["--config-path", str(work / f"{name}.files"), *more]} for name in OBJECTIVES
            ]
            driver = [str(DRIVERS.parent / "verl_on_cpu.py"), "runs.json"]
        else:
            runs = {name: [str(work / f"{name}.files" / f"{stack}.yaml")] for name in OBJECTIVES}
        if stack != "verl":
            driver[0] = str(DRIVERS / "recorded.py")
    (work / "runs.json").write_text(json.dumps(runs))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    alone = ranks == 1 and stack not in ("deepspeed", "verl", "megatron", "torchtitan", "torchtitan-tp")
    # torchtitan trains once in a process; LLaMA-Factory and axolotl leave the process group after a run
    once = stack.startswith("torchtitan") or (stack in ("llamafactory", "axolotl") and ranks > 1)
    for number, one in enumerate([[*driver[:3], name] for name in OBJECTIVES] if once else [driver]):
        command = [str(python), *([] if alone else torchrun), *one]
        done = subprocess.run(
            command, env=environment, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        (work / f"output-{number}.txt").write_text(done.stdout)
        if done.returncode:
            raise RuntimeError(f"{stack} on {ranks} ranks failed:\n{done.stdout[-4000:]}")
    if stack == "verl":
        return {name: verl_losses(work / name) for name in OBJECTIVES}
    return {name: torch.load(work / f"{name}.0.pt") for name in OBJECTIVES}


def verl_losses(path: Path) -> dict[str, Any]:
    error = path.with_name(path.name + ".error")
    if error.exists():
        raise RuntimeError(f"verl: {error.read_text()}")
    steps = [json.loads(line)["data"] for line in path.with_name(path.name + ".jsonl").read_text().splitlines()]
    return {"losses": [step["train/loss"] for step in steps if "train/loss" in step]}


def compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of a loss, and the largest difference of a weight where those are at hand."""
    losses, expected = found["losses"], reference["losses"]
    assert len(losses) == len(expected) == STEPS, f"{len(losses)} losses, {len(expected)} expected"
    result = {"loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected))}
    if "weights" in found:
        weights, others = found["weights"], reference["weights"]
        names = weights.keys() & others.keys()  # a tied head is saved once
        assert len(names) >= len(others), sorted(weights.keys() ^ others.keys())
        result["weight"] = max(float((weights[name] - others[name]).abs().max()) for name in names)
    return result


def measure(stacks: list[str], folder: Path) -> dict[str, Any]:
    make_files(folder)
    reference = train(folder, "deftune", Path(sys.executable), 1)
    apart = min(compare(reference[a], reference[b])["loss"] for a in OBJECTIVES for b in OBJECTIVES if a != b)
    found: dict[str, Any] = {}
    for stack in stacks:
        python = python_of(stack)
        if python is None:
            found[stack] = {"missing": "its environment is not built"}
            continue
        today = datetime.date.today().isoformat()
        result: dict[str, Any] = {"date": today, "versions": versions_of(stack, python), "ranks": {}}
        try:
            for ranks in RANKS:
                if stack in ("deftune", "torchtitan-tp") and ranks == 1:
                    continue  # the reference; and what torchtitan's other row has
                runs = train(folder, stack, python, ranks)
                result["ranks"][str(ranks)] = {name: compare(runs[name], reference[name]) for name in OBJECTIVES}
                print(stack, ranks, {n: f"{r['loss']:.1e}" for n, r in result["ranks"][str(ranks)].items()}, flush=True)
        except (RuntimeError, AssertionError) as error:
            print(error, flush=True)
            result["failed"] = str(error).splitlines()[0]
        found[stack] = result
    return {
        "steps": STEPS, "rows": ROWS, "micro_batch": MICRO,
        "objectives": OBJECTIVES, "closest_objectives": apart,
        "reference": {name: run["losses"] for name, run in reference.items()}, "stacks": found,
    }  # fmt: skip


def render(found: dict[str, Any]) -> str:
    """The table of docs/stacks.md."""
    names = list(found["objectives"])
    titles = [f"`{found['objectives'][name]}`".replace("|", "\\|") for name in names]
    lines = ["| stack | " + " | ".join(titles) + " | weights | date |", "|---|" + "---:|" * (len(names) + 2)]
    for stack, result in found["stacks"].items():
        versions = ", ".join(
            f"{name} {version}" for name, version in result.get("versions", {}).items() if name != "torch"
        )
        label = f"{STACKS[stack][0]} ({versions})" if versions else STACKS[stack][0]
        if "ranks" not in result or "failed" in result:
            reason = result.get("missing") or f"failed: {result['failed']}"
            lines.append(f"| {label} | {reason} |" + " |" * (len(names) + 1))
            continue
        runs = list(result["ranks"].values())
        cells = [f"{max(run[name]['loss'] for run in runs):.1e}" for name in names]
        weights = [run[name]["weight"] for run in runs for name in names if "weight" in run[name]]
        cells += [f"{max(weights):.1e}" if weights else "-", result["date"]]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(mark: str, table: str) -> None:
    """Put a table between the marks of docs/stacks.md."""
    before, rest = (ROOT / PAGE).read_text().split(f"<!-- {mark} -->\n")
    after = rest.split(f"<!-- /{mark} -->")[1]
    (ROOT / PAGE).write_text(f"{before}<!-- {mark} -->\n{table}\n<!-- /{mark} -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--json", type=Path, help="write the figures there; stacks that are not trained now are kept")
    parser.add_argument("--work", type=Path, help="keep the files of the runs there")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(arguments.stacks, folder)
    if arguments.json:
        if arguments.json.exists():
            before = json.loads(arguments.json.read_text())["stacks"]
            merged = before | found["stacks"]
            found["stacks"] = {stack: merged[stack] for stack in STACKS if stack in merged}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(render(found))
    if arguments.docs:
        write_table("trajectories", render(found))
    worst = [stack for stack, result in found["stacks"].items() if not within(result)]
    sys.exit(f"not within {TOLERANCE}: {', '.join(worst)}" if worst else 0)


def within(result: dict[str, Any]) -> bool:
    runs = [run for ranks in result.get("ranks", {}).values() for run in ranks.values()]
    return "failed" not in result and bool(runs) and all(run["loss"] <= TOLERANCE for run in runs)


if __name__ == "__main__":
    main()
