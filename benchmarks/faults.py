"""Faults around a run: full and read-only disks, damaged files for every command that reads them, a rank that dies.

    python benchmarks/faults.py --out benchmarks/results/reliability_faults.json
    python benchmarks/faults.py --kind damaged --count 50

A disk is a small tmpfs, for which the right to mount is needed. A damaged file is one of a run's, a result's or a
comparison's, with bytes flipped, cut off, emptied or replaced by other JSON: every command must answer with its table
or with one clear line, never with a traceback. A rank is one of two gloo processes; when it is killed, the other ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from deftune.selftest import tiny
from deftune.selftest.check import Figure, NotHere, counted
from deftune.selftest.process import Started, start
from deftune.selftest.records import Record, write_records
from deftune.selftest.runs import Bench, last_checkpoint, last_record, unfinished_files, weights

STEPS = {"train.max_steps": 6, "train.save_steps": 1, "train.keep": 9}


@contextmanager
def disk(place: Path, kib: int) -> Generator[None]:
    """A file system of its own, some KiB large."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        raise NotHere("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, options: str) -> bool:
    return not subprocess.run(["mount", "-o", f"remount,{options}", str(place)], capture_output=True).returncode


def one_line(code: int, text: str) -> bool:
    errors = [line for line in text.splitlines() if line.startswith("deftune: ")]
    return code == 2 and len(errors) == 1 and "Traceback" not in text


def train_on(bench: Bench, place: Path) -> Started:
    """A run on the disk; its config and its output are elsewhere."""
    config = place.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(tiny.run_content(place / "run", bench.model, bench.data, STEPS)))
    return start("train", config, output=place.with_suffix(".out"))


def full_disks(folder: Path, count: int) -> Figure:
    """A disk that is full at another moment each time; with more space the run ends as if nothing had been."""
    bench = Bench(folder)
    reference = bench.train("reference", STEPS)
    misses: list[str] = []
    tried = 0
    for number in range(count):
        kib = 16 + 2400 * number // count
        place = folder / f"disk-{number}"
        with disk(place, kib):
            started = train_on(bench, place)
            code, text = started.ended(900), started.output.read_text()
            if code == 0:
                continue
            tried += 1
            kept = last_checkpoint(place / "run")
            tidy = not unfinished_files(place / "run") if (place / "run").exists() else True
            remount(place, "size=64m")
            again = train_on(bench, place)
            resumed = again.ended(900) == 0 and weights(place / "run") == weights(reference)
            if not (one_line(code, text) and tidy and resumed):
                misses.append(f"{kib} KiB (checkpoint {kept} kept): exit code {code}, resumed {resumed}: {text[-200:]}")
    return counted("full disks: one line, nothing half written, resumed bitwise", tried, misses)


def read_only_disks(folder: Path, count: int) -> Figure:
    """A disk that is read-only from the start."""
    bench = Bench(folder)
    reference = bench.train("reference", STEPS)
    misses: list[str] = []
    for number in range(count):
        place = folder / f"disk-{number}"
        with disk(place, 65536):
            path = place.with_suffix(".yaml")
            if number % 2:  # with a run that was stopped on the way
                shutil.copytree(reference, place / "run", ignore=shutil.ignore_patterns("model", "checkpoint-[56]"))
                (place / "run" / "status.json").write_text(json.dumps({"state": "running", "step": 4}))
            path.write_text(yaml.safe_dump(tiny.run_content(place / "run", bench.model, bench.data, STEPS)))
            if not remount(place, "ro"):
                raise NotHere("the file system cannot be made read-only")
            for command in (["train", path], ["runs", place]):
                started = start(*command, output=folder / "output.txt")
                code, text = started.ended(900), started.output.read_text()
                if not (one_line(code, text) if command[0] == "train" else code == 0):
                    misses.append(f"{command[0]}: exit code {code}: {text[-200:]}")
            remount(place, "rw")
            again = start("train", path, output=folder / "output.txt")
            if again.ended(900) or weights(place / "run") != weights(reference):
                misses.append(f"not resumed: {again.output.read_text()[-200:]}")
    return counted("read-only disks: one line, listing works, resumed bitwise", count, misses)


# --- damaged files ----------------------------------------------------------------------------------------------------


def damage(path: Path, draw: random.Random) -> str:
    """Change a file in place; how."""
    content = path.read_bytes()
    how = draw.choice(["flip", "cut", "empty", "null", "list", "object", "text", "zeros"])
    if how == "flip" and content:
        changed = bytearray(content)
        for _ in range(draw.randint(1, 5)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif how == "cut":
        path.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif how == "zeros":
        path.write_bytes(b"\0" * min(len(content), 4096))
    else:
        kinds = {"empty": b"", "null": b"null", "list": b"[1, [2]]", "object": b'{"a": {"b": 1}}', "text": b"hello\n"}
        path.write_bytes(kinds.get(how, b""))
    return how


def damaged_files(folder: Path, count: int) -> Figure:
    """Every command that reads a run, a result or a comparison, with one of its files damaged."""
    bench = Bench(folder)
    original = folder / "original"
    original.mkdir()
    changes = {"train.max_steps": 2, "train.save_steps": 1, "train.keep": 9, "model.lora": {"r": 2, "alpha": 4}}
    config = original / "run.yaml"
    config.write_text(yaml.safe_dump(tiny.run_content(original / "run", bench.model, bench.data, changes)))
    exam = original / "exam.yaml"
    rows = [{"question": f"What is {n} + 1?", "gold": str(n + 1)} for n in range(6)]
    (original / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exam.write_text('name: exam\nversion: "1"\nkind: math\ndata: exam.jsonl\n')
    answer = ["eval", "run", bench.model, "--task-file", exam, "--max-new-tokens", "8", "--out"]
    comparison = original / "compare.yaml"
    comparison.write_text(yaml.safe_dump({
        "folder": str(original / "grid"), "objectives": ["nll"], "model": {"name": str(bench.model)},
        "train": {"max_steps": 1, "epochs": 9, "batch_size": 8, "micro_batch_size": 8, "precision": "fp32"},
        "regimes": {"r": {"data": {"train": [{"path": str(bench.data)}], "max_length": 128},
                          "evaluate": [{"task_files": [str(exam)], "max_new_tokens": 4}],
                          "tokens": [{"path": str(bench.data), "limit": 4}]}},
    }))  # fmt: skip
    cells = [["compare", "run", comparison, "--cell", cell] for cell in ("r/base", "r/nll/lr5e-05-s0")]
    before = [["train", config], [*answer, original / "one"], [*answer, original / "other"], *cells]
    for command in before:
        started = start(*command, output=folder / "output.txt")
        if started.ended(900):
            raise RuntimeError(f"{command}: {started.output.read_text()[-1500:]}")
    files = [p for p in sorted(original.rglob("*")) if p.is_file() and p.name not in (".lock", "log.txt")]
    place, draw, misses = folder / "place", random.Random(0), list[str]()
    tally = dict[str, int]()
    for number in range(count):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(original, place)
        for path in (place / "run.yaml", place / "compare.yaml", *place.rglob("comparison.yaml")):
            path.write_text(path.read_text().replace(str(original), str(place)))
        for path in place.rglob("config.yaml"):
            path.write_text(path.read_text().replace(str(original), str(place)))
        chosen = place / files[number % len(files)].relative_to(original)
        how = damage(chosen, draw)
        for command in reading(place, chosen, bench):
            started = start(*command, output=folder / "output.txt")
            code, text = started.ended(900), started.output.read_text()
            tally[str(code)] = tally.get(str(code), 0) + 1
            if code not in (0, 1, 2, 143) or "Traceback" in text:
                last = text.strip().splitlines()[-1:] or [""]
                name = chosen.relative_to(place)
                misses.append(
                    f"deftune {' '.join(map(str, command[:2]))}: {name} {how}: exit code {code}: {last[0][:160]}"
                )
    total = sum(tally.values())
    return counted(f"commands on damaged files without a traceback ({count} damages)", total, misses)


def reading(place: Path, chosen: Path, bench: Bench) -> Iterator[list[object]]:
    """The commands that read the damaged file."""
    part = chosen.relative_to(place).parts[0]
    if part in ("run", "run.yaml"):
        yield ["runs", place]
        yield ["train", place / "run.yaml"]
        yield ["merge", place / "run", "--out", place / "merged"]
        yield ["inspect", place / "run", bench.data, "--rows", "2"]
    elif part in ("one", "other", "exam.yaml", "exam.jsonl"):
        yield ["eval", "show", place / "one"]
        yield ["eval", "compare", place / "other", place / "one"]
        options = ["--task-file", place / "exam.yaml", "--max-new-tokens", "8", "--out", place / part]
        yield ["eval", "run", bench.model, *options]
    else:
        yield ["compare", "show", place / "grid"]
        yield ["report", place / "grid"]


# --- ranks ------------------------------------------------------------------------------------------------------------


def dying_ranks(folder: Path, count: int) -> Figure:
    """One of two gloo ranks is killed; the other ends, and the run resumes on two ranks."""
    bench = Bench(folder)
    misses: list[str] = []
    slowest = 0.0
    steps = {"train.max_steps": 200, "train.save_steps": 5, "train.micro_batch_size": 4}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for number in range(count):
        config = folder / f"run-{number}.yaml"
        config.write_text(yaml.safe_dump(tiny.run_content(folder / f"run-{number}", bench.model, bench.data, steps)))
        port = 20_000 + (os.getpid() + number) % 20_000
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "deftune", "train", str(config)], stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            )
            for rank in (0, 1)
        ]  # fmt: skip
        until = time.monotonic() + 600
        while last_record(folder / f"run-{number}") < 6 and time.monotonic() < until:
            time.sleep(0.1)
        killed, other = (ranks[1], ranks[0]) if number % 2 == 0 else (ranks[0], ranks[1])
        killed.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        try:
            code = other.wait(300)
            slowest = max(slowest, time.monotonic() - begun)
            if code == 0 or last_checkpoint(folder / f"run-{number}") < 5:
                misses.append(f"run {number}: exit code {code}, checkpoint {last_checkpoint(folder / f'run-{number}')}")
        except subprocess.TimeoutExpired:
            other.kill()
            misses.append(f"run {number}: the other rank did not end within 300 s")
        killed.wait()
    figure = counted("ranks killed: the other ends, its checkpoints verify", count, misses)
    return Figure(f"{figure.text}, after {slowest:.0f} s at most", figure.holds, figure.misses)


KINDS: dict[str, tuple[Callable[[Path, int], Figure], int]] = {
    "full disk": (full_disks, 26),
    "read-only disk": (read_only_disks, 4),
    "damaged files": (damaged_files, 200),
    "dying rank": (dying_ranks, 2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", help=f"only kinds with this in their name: {', '.join(KINDS)}")
    parser.add_argument("--count", type=int, help="how many of each (default: " + ", ".join(
        f"{count} {kind}" for kind, (_, count) in KINDS.items()) + ")")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    failed = False
    for kind, (check, usual) in KINDS.items():
        if args.kind and args.kind not in kind:
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            try:
                figure = check(Path(folder), args.count or usual)
            except NotHere as reason:
                print(f"{kind}: not run: {reason}")
                continue
        failed = failed or not figure.holds
        print(f"{kind}: {figure.text}", *figure.misses, sep="\n  ", flush=True)
        if args.out:
            command = f"python benchmarks/faults.py --kind '{kind}' --count {args.count or usual}"
            details = {"misses": list(figure.misses)}
            seconds = time.monotonic() - begun
            record = Record.of(None, kind, figure.text, figure.holds, seconds, command, details)
            write_records(args.out, [record])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
