"""A long training run with a checkpoint every 100 steps: memory, descriptors and step time must stay flat.

    python benchmarks/soak.py --out benchmarks/results/reliability_soak.json      # two hours
    python benchmarks/soak.py --minutes 5

The run is `deftune train` on a tiny model in a process of its own. Resident memory is recorded every few seconds; the
first tenth is warm-up; the slope of the rest, by least squares, is stated in MiB per 1,000 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from deftune.artifacts.runs import Run
from deftune.selftest import tiny
from deftune.selftest.records import Record, write_records

MOST_GROWTH = 0.5  # MiB per 1,000 steps
MOST_SLOWER = 1.25  # median step of the last fifth, relative to the first after the warm-up


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def last_line(path: Path) -> dict[str, float]:
    """The newest whole record of a file that grows."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        for line in reversed(file.read().splitlines()):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=5, help="seconds between two samples (default: 5)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    begun = time.monotonic()
    samples: list[tuple[float, float, int]] = []  # step, MiB, open descriptors
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = tiny.save_chat_model(folder / "model"), tiny.save_conversations(folder / "chat.jsonl")
        changes = {
            "train.max_steps": 10_000_000, "train.epochs": 10_000_000, "train.save_steps": 100, "train.keep": 2,
            "train.schedule": "constant",
        }  # fmt: skip
        config = folder / "run.yaml"
        config.write_text(json.dumps(tiny.run_content(folder / "run", model, data, changes)))
        run = Run(folder / "run")
        with (folder / "output.txt").open("w+") as output:
            command = [sys.executable, "-m", "deftune", "train", str(config)]
            process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
            while time.monotonic() - begun < args.minutes * 60 and process.poll() is None:
                time.sleep(args.every)
                if run.metrics.is_file() and (record := last_line(run.metrics)):
                    descriptors = len(os.listdir(f"/proc/{process.pid}/fd")) if process.poll() is None else 0
                    samples.append((record["step"], resident_mib(process.pid), descriptors))
            process.send_signal(signal.SIGTERM)
            code = process.wait(600)
            output.seek(0)
            text = output.read()[-800:]
        seconds = [record["step_seconds"] for record in run.read_metrics() if "step_seconds" in record]
    kept = samples[len(samples) // 10 :]
    if code != 143 or len(kept) < 10:
        print(f"exit code {code}, {len(samples)} samples\n{text}")
        return 1
    steps, memory = [s for s, _, _ in kept], [m for _, m, _ in kept]
    slope = statistics.linear_regression(steps, memory).slope * 1000
    fifth = max(1, len(seconds) // 5)
    slower = statistics.median(seconds[-fifth:]) / statistics.median(seconds[fifth : 2 * fifth])
    descriptors = max(d for _, _, d in kept) - min(d for _, _, d in kept)
    figure = (
        f"{args.minutes:g} minutes, {int(steps[-1]):,} steps: {slope:+.2f} MiB per 1,000 steps ({memory[0]:.0f} to "
        f"{memory[-1]:.0f} MiB), open files vary by {descriptors}, last steps take {slower:.2f} x the first"
    )
    holds = slope <= MOST_GROWTH and descriptors <= 8 and slower <= MOST_SLOWER
    print(figure if holds else f"FAILED: {figure}")
    if args.out:
        command = f"python benchmarks/soak.py --minutes {args.minutes:g}"
        details = {"samples": kept[:: max(1, len(kept) // 100)]}
        record = Record.of(None, "soak", figure, holds, time.monotonic() - begun, command, details)
        write_records(args.out, [record])
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
