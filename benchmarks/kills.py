"""kill -9 at random moments of training, saving, evaluating and comparing; the end must be bitwise the same.

    python benchmarks/kills.py --kills 500 --out benchmarks/results/reliability_kills.json
    python benchmarks/kills.py --kills 500 --jobs 8 --out ...      # eight processes with a share of the kills each
    python benchmarks/kills.py --kills 20 --kind eval

Each kind has an undisturbed run as its reference. Then the same command is started again and again, killed after a time
drawn between nothing and what an undisturbed one takes, until one of its lives ends by itself; weights, optimizer,
random state, metrics, answers, grades and tables are compared with the reference byte for byte, but for clocks.
A command is a fork of a process that has torch and TRL imported, so that a life takes a second or two; the kind
`compare command` starts real interpreters instead. Needs deftune[eval]; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deftune.artifacts import checkpoints, folders
from deftune.artifacts.runs import Run
from deftune.selftest import tiny
from deftune.selftest.process import Started, start
from deftune.selftest.records import Record, read_records, write_records
from deftune.selftest.runs import CLOCK, last_checkpoint, last_record

Contents = dict[str, Any]
STEPS = 12


@dataclass
class Kind:
    """A command that is killed. ``command(folder)`` writes what it needs; ``contents`` is what must be the same."""

    name: str
    share: float  # of all kills
    command: Callable[[Path], list[list[str]]]  # the commands of one life, in order
    contents: Callable[[Path], Contents]
    group: bool = False  # kill its data workers too
    interval: int = 0  # training steps that a kill may cost


@dataclass
class Tally:
    """What became of a kind's lives."""

    kills: int = 0
    runs: int = 0
    same: int = 0
    while_saving: int = 0
    most_lost: int = 0
    problems: list[str] = field(default_factory=list[str])

    def add(self, other: Tally) -> None:
        self.kills, self.runs, self.same = self.kills + other.kills, self.runs + other.runs, self.same + other.same
        self.while_saving += other.while_saving
        self.most_lost = max(self.most_lost, other.most_lost)
        self.problems += other.problems


# --- what must be the same --------------------------------------------------------------------------------------------


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in CLOCK}  # pyright: ignore
    return [without_clock(v) for v in value] if isinstance(value, list) else value  # pyright: ignore


def run_contents(folder: Path) -> Contents:
    """The result, the newest checkpoint and the metrics of a run."""
    run = folder / "run"
    found: Contents = {"metrics": without_clock(Run(run).read_metrics())}
    folders.verify(run / "model")
    newest = checkpoints.checkpoints(run / "checkpoints")[-1]
    folders.verify(newest)
    for place in (run / "model", newest):
        for path in folders.files_of(place):
            if path.name not in ("trainer_state.json", "README.md", "training_args.bin"):  # have times and paths
                found[f"{place.name}/{path.relative_to(place)}"] = path.read_bytes()
    found["unfinished files"] = [p.name for p in run.rglob(".*") if p.name != ".lock"]
    return found


def result_contents(folder: Path) -> Contents:
    """Answers, grades and summary of a result; answers have no order."""
    lines = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("samples", "graded")}
    key: Callable[[Any], str] = lambda record: json.dumps(record, sort_keys=True)  # noqa: E731
    found: Contents = {name: sorted(map(json.loads, text), key=key) for name, text in lines.items()}
    return found | {"summary": without_clock(json.loads((folder / "summary.json").read_text()))}


def comparison_contents(folder: Path) -> Contents:
    """Every cell's weights, metrics, token table and results, and the comparison's summary."""
    grid = folder / "grid"
    found: Contents = {}
    for state in sorted(grid.rglob("cell.json")):
        cell = state.parent
        name = str(cell.relative_to(grid))
        found[f"{name} state"] = json.loads(state.read_text())["state"]
        found[f"{name} tokens"] = table(cell / "tokens.parquet")
        found |= {f"{name} {e.name}": result_contents(e) for e in sorted(cell.glob("eval-*"))}
        if (cell / "run").is_dir():
            if (cell / "run" / "model").exists():
                folders.verify(cell / "run" / "model")
                found[f"{name} weights"] = (cell / "run" / "model" / "model.safetensors").read_bytes()
            found[f"{name} metrics"] = without_clock(Run(cell / "run").read_metrics())
    return found


def table(path: Path) -> Any:
    import pyarrow.parquet as parquet

    return parquet.read_table(path).to_pydict()  # pyright: ignore[reportUnknownVariableType]


# --- the kinds --------------------------------------------------------------------------------------------------------


class Kinds:
    """The kinds over one model and one file of conversations."""

    def __init__(self, folder: Path):
        self.model, self.data = tiny.save_chat_model(folder / "model"), tiny.save_conversations(folder / "chat.jsonl")
        self.exam = folder / "exam.yaml"
        rows = [{"question": f"What is {n} + {n}?", "gold": str(2 * n)} for n in range(12)]
        (folder / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.exam.write_text('name: exam\nversion: "1"\nkind: math\ndata: exam.jsonl\n')

    def training(self, name: str, share: float, changes: dict[str, Any], group: bool = False) -> Kind:
        settings = {"train.max_steps": STEPS, "train.save_steps": 1, "train.keep": 2, **changes}

        def command(folder: Path) -> list[list[str]]:
            config = folder / "run.yaml"
            config.write_text(yaml.safe_dump(tiny.run_content(folder / "run", self.model, self.data, settings)))
            return [["train", str(config)]]

        return Kind(name, share, command, run_contents, group, interval=settings["train.save_steps"])

    def evaluating(self, share: float) -> Kind:
        def command(folder: Path) -> list[list[str]]:
            options = ["--task-file", str(self.exam), "--temperature", "0", "--temperature", "1", "--samples", "3"]
            options += ["--max-new-tokens", "24", "--batch-size", "4", "--workers", "1", "--out", str(folder / "out")]
            return [["eval", "run", str(self.model), *options]]

        return Kind("eval", share, command, lambda folder: result_contents(folder / "out"), group=True)

    def comparing(self, name: str, share: float, cells_here: bool, keep_models: bool = True) -> Kind:
        """``cells_here``: a life is one cell in the killed process itself; else the command, which starts the cells."""
        cells = ["regime/base", "regime/nll/lr0.001-s0", "regime/deft/lr0.001-s0"]
        evaluation = {"tasks": ["figfont"], "limit": 4, "temperatures": [0, 1], "samples": 2, "max_new_tokens": 4}

        def command(folder: Path) -> list[list[str]]:
            content = {
                "folder": str(folder / "grid"), "objectives": ["nll", "deft"], "seeds": [0],
                "learning_rates": [1e-3], "model": {"name": str(self.model)}, "keep_models": keep_models,
                "train": {"max_steps": 4, "epochs": 9, "batch_size": 8, "micro_batch_size": 4, "save_steps": 1,
                          "precision": "fp32"},
                "regimes": {"regime": {
                    "data": {"train": [{"path": str(self.data), "limit": 24}], "max_length": 128},
                    "evaluate": [evaluation], "tokens": [{"path": str(self.data), "limit": 4}],
                }},
            }  # fmt: skip
            path = folder / "compare.yaml"
            path.write_text(yaml.safe_dump(content))
            run = ["compare", "run", str(path)]
            return [[*run, "--cell", cell] for cell in cells] if cells_here else [run]

        return Kind(name, share, command, comparison_contents, group=cells_here)

    def all(self) -> list[Kind]:
        lora = {"model.lora": {"r": 4, "alpha": 8, "dropout": 0.2}, "data.packing": True, "train.workers": 2}
        held_out = {"objective": "deft | mean_one", "data.holdout": 0.2, "train.eval_steps": 4, "train.save_at": [3]}
        return [
            self.training("train", 0.4, {}),
            self.training("train, held-out rows", 0.15, held_out),
            self.training("train, LoRA, packed, 2 workers", 0.15, {**lora, "objective": "clip"}, group=True),
            self.evaluating(0.2),
            self.comparing("compare cell", 0.05, cells_here=True),
            self.comparing("compare cell, weights not kept", 0.05, cells_here=True, keep_models=False),
            self.comparing("compare command", 0.0, cells_here=False),
        ]


# --- lives ------------------------------------------------------------------------------------------------------------


def undisturbed(kind: Kind, folder: Path) -> tuple[Contents, list[float]]:
    """What a run that nobody kills leaves, and the seconds of each of its commands."""
    folder.mkdir(parents=True)
    seconds: list[float] = []
    for command in kind.command(folder):
        begun = time.monotonic()
        started = start(*command, output=folder / "output.txt")
        if started.ended(900):
            raise RuntimeError(f"{kind.name} fails undisturbed: {started.output.read_text()[-2000:]}")
        seconds.append(time.monotonic() - begun)
    return kind.contents(folder), seconds


def killed_after(started: Started, seconds: float, group: bool) -> bool:
    """SIGKILL after some seconds, to the process or to its group; False if the process ended before."""
    process = started.process
    process.join(seconds)
    if process.exitcode is not None:
        return False
    if group:
        while os.getpgid(process.pid) != process.pid:  # it has not made its group yet
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    return started.ended() == -signal.SIGKILL


def kill_until_done(kind: Kind, folder: Path, seconds: list[float], draw: random.Random, tally: Tally) -> None:
    """One run: each command is killed until one of its lives ends by itself. ``seconds`` is what each usually takes."""
    folder.mkdir(parents=True)
    for place, command in enumerate(kind.command(folder)):
        for life in range(1000):
            begun = time.monotonic()
            started = start(*command, output=folder / f"output-{life}.txt")
            if killed_after(started, draw.uniform(0, seconds[place]), kind.group):
                tally.kills += 1
                if kind.interval:
                    tally.while_saving += any((folder / "run" / "checkpoints").glob(".saving-*"))
                    tally.most_lost = max(
                        tally.most_lost, last_record(folder / "run") - last_checkpoint(folder / "run")
                    )
                continue
            code, text = started.ended(), started.output.read_text()
            if code == -11:  # a library's thread in a forked process crashed: not a life
                continue
            if "another process" in text and life < 900:  # the killed one's children have not ended yet
                time.sleep(1)
                continue
            if code:
                raise RuntimeError(f"exit code {code}: {text[-1500:]}")
            if life == 0:  # nobody killed it: as fast as it can be today
                seconds[place] = min(seconds[place], time.monotonic() - begun)
            break


def torture(kind: Kind, kills: int, folder: Path, seed: int, until: float) -> Tally:
    """Runs of a kind until there are enough kills, or until the clock says ``until``."""
    reference, seconds = undisturbed(kind, folder / "reference")
    print(f"{kind.name}: {sum(seconds):.1f} s undisturbed", flush=True)
    tally, draw = Tally(), random.Random(seed)
    while tally.kills < kills and time.monotonic() < until:
        place = folder / f"run-{tally.runs}"
        tally.runs += 1
        try:
            kill_until_done(kind, place, seconds, draw, tally)
            found = kind.contents(place)
            if different := [k for k in reference.keys() | found.keys() if found.get(k) != reference.get(k)]:
                raise RuntimeError(f"differs from the undisturbed run in {sorted(different)}")
            tally.same += 1
            shutil.rmtree(place)
        except Exception as error:
            tally.problems.append(f"{place}: {error}")
        print(f"{kind.name}: {tally.kills} kills, {tally.same} of {tally.runs} runs the same", flush=True)
        if len(tally.problems) > 3:
            break
    return tally


def torture_all(args: argparse.Namespace, kinds: list[Kind], folder: Path) -> dict[str, Tally]:
    """Each kind with its share of the kills, one after another."""
    start("--version", output=folder / "output.txt").ended(900)  # the server that is forked imports everything
    whole = sum(kind.share for kind in kinds)
    tallies: dict[str, Tally] = {}
    for number, kind in enumerate(kinds):
        share = kind.share / whole if whole else 1.0
        wanted = round(args.kills * share) if share else (3 if args.kills >= 100 else 0)
        if wanted:
            # each kind has its share of the time, too
            minutes = math.inf if args.minutes is None else args.minutes * max(share, 0.05)
            until = time.monotonic() + 60 * minutes
            tallies[kind.name] = torture(kind, wanted, folder / f"kind-{number}", args.seed + number, until)
    return tallies


def torture_in_processes(args: argparse.Namespace, folder: Path) -> dict[str, Tally]:
    """This script in ``args.jobs`` processes, each with its own seed and share of the kills; their tallies added up."""
    processes: list[tuple[subprocess.Popen[bytes], Path]] = []
    for job in range(args.jobs):
        place = folder / f"job-{job}"
        kills = args.kills // args.jobs + (job < args.kills % args.jobs)
        command = [sys.executable, __file__, "--kills", kills, "--seed", args.seed + 100 * job, "--keep", place,
                   "--out", place / "figures.json"]  # fmt: skip
        command += ["--kind", args.kind] if args.kind else []
        command += ["--minutes", args.minutes] if args.minutes else []
        processes.append((subprocess.Popen([str(word) for word in command]), place))
    tallies: dict[str, Tally] = {}
    for process, place in processes:
        process.wait()
        if not (place / "figures.json").is_file():
            raise RuntimeError(f"the process in {place} ended with exit code {process.returncode}, without figures")
        details = read_records(place / "figures.json")[0].details
        for name, values in details.items():
            if name != "misses":
                tallies.setdefault(name, Tally()).add(Tally(**values))
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--kind", help="only kinds with this in their name")
    parser.add_argument("--minutes", type=float, help="stop after this time, with the kills so far")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the kills (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    kinds = [kind for kind in Kinds(folder).all() if args.kind is None or args.kind in kind.name]
    tallies = torture_in_processes(args, folder) if args.jobs > 1 else torture_all(args, kinds, folder)
    kills, runs = sum(t.kills for t in tallies.values()), sum(t.runs for t in tallies.values())
    same, lost = sum(t.same for t in tallies.values()), max(t.most_lost for t in tallies.values())
    saving = sum(t.while_saving for t in tallies.values())
    problems = [problem for t in tallies.values() for problem in t.problems]
    for kind in kinds:
        if kind.interval and kind.name in tallies and tallies[kind.name].most_lost > kind.interval:
            lost_there = tallies[kind.name].most_lost
            problems.append(f"{kind.name}: {lost_there} steps lost, a checkpoint every {kind.interval} was asked for")
    figure = f"{kills} kills ({saving} within a save): {same} of {runs} runs bitwise the same, {lost} step lost at most"
    print(figure, *problems, sep="\n  ")
    if args.out:
        details = {"misses": problems, **{name: vars(tally) for name, tally in tallies.items()}}
        write_records(args.out, [Record.of(
            15, "kills at random moments", figure, not problems, time.time() - begun,
            f"python benchmarks/kills.py --kills {args.kills}", details,
        )])  # fmt: skip
    if not args.keep and not problems:
        shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
