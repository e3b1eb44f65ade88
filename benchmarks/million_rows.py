"""A million generated rows previewed, tokenised, packed and trained on for 50 steps, with the peak memory of each part.

    python benchmarks/million_rows.py --out benchmarks/results/reliability_rows.json
    python benchmarks/million_rows.py --rows 20000

Each part is a `deftune` command in a process of its own; its peak is what the system measured for it and its children
together (VmHWM of each). The bound is stated per row: a run may hold every token as one integer, and not the text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from deftune.artifacts.runs import Run
from deftune.selftest import tiny
from deftune.selftest.records import Record, write_records

BYTES_PER_ROW = 1_500  # beyond what 1,000 rows take: about 50 tokens a row, ids and labels, and its place
WORDS = "sum total plus minus apples pears trains leave arrive hour minute metre second price each".split()


def write_rows(path: Path, number: int) -> int:
    """Questions with their answers, all different; the bytes written."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for place in range(number):
            words = " ".join(draw.choices(WORDS, k=draw.randint(4, 12)))
            messages = [
                {"role": "user", "content": f"Question {place}: {words}?"},
                {"role": "assistant", "content": f"{' '.join(draw.choices(WORDS, k=draw.randint(4, 16)))} {place}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path.stat().st_size


def family(pid: int) -> list[int]:
    """A process and those below it."""
    found = [pid]
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            child, parent = int(place.parent.name), int(place.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if parent == pid:
            found += family(child)
    return found


def resident(pid: int) -> int:
    """Bytes of a process that are its own share of memory: pages that several hold count by parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measured(arguments: list[str], folder: Path) -> tuple[int, float, int, str]:
    """(exit code, seconds, peak bytes of it and its children, the end of its output) of a `deftune` command."""
    begun, peak = time.monotonic(), 0
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deftune", *arguments], stdout=output, stderr=output, cwd=folder, env=os.environ
        )
        over = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.5):
                peak = max(peak, sum(resident(pid) for pid in family(process.pid)))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        code = process.wait()
        over.set()
        thread.join()
        output.seek(0)
        return code, time.monotonic() - begun, peak, output.read()[-600:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    begun = time.monotonic()
    figures: list[str] = []
    holds = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.save_chat_model(folder / "model")
        peaks: dict[str, int] = {}
        for rows in (1_000, args.rows):
            data = folder / f"rows-{rows}.jsonl"
            size = write_rows(data, rows)
            changes = {"data.packing": True, "train.max_steps": args.steps, "train.save_steps": args.steps}
            config = folder / f"run-{rows}.yaml"
            config.write_text(json.dumps(tiny.run_content(folder / f"run-{rows}", model, data, changes)))
            parts = {
                "preview": ["data", "preview", str(data), "--model", str(model), "--rows", str(rows), "--show", "1"],
                "train": ["train", str(config)],
            }
            for part, command in parts.items():
                code, seconds, peak, text = measured(command, folder)
                ended = code == 0
                if part == "train" and ended:
                    ended = Run(folder / f"run-{rows}").status()["state"] == "finished"
                grown = (peak - peaks.get(part, peak)) / rows
                peaks.setdefault(part, peak)
                line = f"{part}: {seconds:.0f} s, peak {peak / 2**30:.2f} GiB"
                print(f"{rows:,} rows ({size / 2**20:.0f} MiB), {line}, {grown:.0f} bytes a row; exit code {code}")
                if not ended:
                    print(text)
                holds = holds and ended and (rows < 100_000 or grown <= BYTES_PER_ROW)  # fewer: noise
                if rows == args.rows:
                    figures.append(line)
            data.unlink()
    figure = f"{args.rows:,} rows, packed, {args.steps} steps: {'; '.join(figures)}"
    print(figure if holds else f"FAILED: {figure}")
    if args.out:
        command = f"python benchmarks/million_rows.py --rows {args.rows}"
        record = Record.of(None, "a million rows", figure, holds, time.monotonic() - begun, command)
        write_records(args.out, [record])
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
