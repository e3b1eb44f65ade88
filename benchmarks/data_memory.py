"""Memory of reading, encoding and packing data, by the number of rows: does data larger than memory work?

    python benchmarks/data_memory.py --rows 50000 200000 800000 --out data_memory.json

Each size is a process of its own, which reads generated JSONL rows, encodes them into an empty cache, takes their
fingerprint and makes a few batches, as `deftune train` does before its first step; a model is not loaded. Anonymous
memory is what the process must hold. Pages of mapped files count as resident too, until the system needs their memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


def status(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


class Peak:
    """The largest anonymous memory of this process, sampled every 20 ms."""

    def __init__(self) -> None:
        self.bytes = status("RssAnon")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, status("RssAnon"))
            time.sleep(0.02)


def write_rows(path: Path, number: int) -> None:
    """Questions and answers of 10 to 60 words."""
    draw = random.Random(0)
    words = "the answer is what plus twelve thirty system user and then we add them".split()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            size = draw.randint(10, 60)
            prompt, answer = (" ".join(draw.choices(words, k=part)) for part in (size // 2, size - size // 2))
            file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")


def measure(folder: Path, number: int, packing: bool) -> dict[str, Any]:
    from deftune.artifacts.config import RunConfig
    from deftune.data.packing import Collator
    from deftune.selftest import tiny
    from deftune.training.assembly import Batches, make_dataset
    from deftune.training.data_record import fingerprint
    from deftune.training.preparation import prepare

    os.environ["DEFTUNE_CACHE"] = str(folder / "cache")
    write_rows(folder / "rows.jsonl", number)
    tiny.save_chat_model(folder / "model")
    content = tiny.run_content(folder / "run", folder / "model", folder / "rows.jsonl", {"data.packing": packing})
    config = RunConfig.model_validate(content)
    before, peak, begin = status("RssAnon"), Peak(), time.perf_counter()
    prepared = prepare(config, lambda _: None)
    fingerprint(prepared)
    dataset = make_dataset(range(len(prepared.sequences)))
    batches = Batches(prepared.sequences, Collator(prepared.tokenizer.pad_token_id, padding_free=False))
    for start in range(0, min(800, len(dataset)), 8):
        batches([dataset[i] for i in range(start, min(start + 8, len(dataset)))])
    return {
        "rows": number, "packing": packing, "tokens": prepared.train.examples.num_tokens,
        "steps": prepared.steps, "before": before, "peak_anonymous": peak.bytes, "after": status("RssAnon"),
        "peak_resident": status("VmHWM"), "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 200_000, 800_000])
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.rows[0], args.packing)))
        return
    found: list[dict[str, Any]] = []
    for number in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--child", folder, "--rows", str(number)]
            done = subprocess.run([*command, *["--packing"] * args.packing], stdout=subprocess.PIPE, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        row = found[-1]
        print(
            f"{row['rows']:>9,} rows  {row['tokens'] / 1e6:7.1f}M tokens  anonymous {row['before'] / 2**20:5.0f} -> "
            f"{row['peak_anonymous'] / 2**20:5.0f} MiB  resident {row['peak_resident'] / 2**20:5.0f} MiB  "
            f"{row['seconds']:6.1f} s", flush=True,
        )  # fmt: skip
    if len(found) > 1:
        grown = np.array([row["peak_anonymous"] for row in found], dtype=float)
        slopes = {unit: float(np.polyfit([row[unit] for row in found], grown, 1)[0]) for unit in ("rows", "tokens")}
        print(f"slope of anonymous memory: {slopes['rows']:.0f} bytes a row, {slopes['tokens']:.2f} bytes a token")
        found.append({"slope": slopes})
    if args.out:
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        args.out.write_text(json.dumps({"machine": machine, "sizes": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
