"""Prepare a large file for training: seconds, CPU seconds and peak memory of reading, encoding and packing.

    python benchmarks/preparation.py --rows 300000 --out benchmarks/results/preparation.json
    python benchmarks/preparation.py --rows 1000000 --packing --out ...

Rows are generated: two messages, some 490 bytes and 110 tokens each, the same for every machine. Each start is a
process of its own; the first one encodes, the second one finds the encoded rows in the cache (an empty folder before
the first). Memory is the sum of the resident memory of the process and its children, sampled every 50 ms: pages that
several processes share are counted once for each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORDS = (
    "the of and to in is that for it was on as with are be this by from have or which one would all will there can "
    "more if people time other than into only new some could these two may first then do any like my now over such "
    "our man me even most made after also did many before must through years where much way well down should because "
    "long each just those how too little state good very make world still see own work men day get here between both "
    "life being under never same another know while last might us great old year off come since against go came right"
).split()


def write_rows(path: Path, count: int) -> int:
    """Questions of 10 to 59 words and answers of 20 to 109."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            question = f"Question {i}: {' '.join(draw.choices(WORDS, k=draw.randrange(10, 60)))}?"
            answer = f"{' '.join(draw.choices(WORDS, k=draw.randrange(20, 110))).capitalize()}: {i * 7}."
            row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            file.write(json.dumps(row) + "\n")
    return path.stat().st_size


def prepare_once(data: Path, model: str, packing: bool) -> dict[str, Any]:
    """In this process: what `deftune train` does before it loads the model."""
    from deftune.artifacts.config import load_config
    from deftune.training.data_record import fingerprint
    from deftune.training.preparation import prepare

    content = {"model": {"name": model}, "data": {"train": [{"path": str(data)}], "packing": packing}}
    config = load_config(None, base=content)
    start = time.perf_counter()
    prepared = prepare(config, lambda text: print(text, file=sys.stderr))
    prepared_seconds = time.perf_counter() - start
    digest = fingerprint(prepared)
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "prepare_seconds": round(prepared_seconds, 1),
        "fingerprint_seconds": round(time.perf_counter() - start - prepared_seconds, 1),
        "cpu_seconds": round(own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, 1),
        "peak_mib_of_this_process": round(own.ru_maxrss / 1024),
        "examples": len(prepared.train.examples),
        "tokens": prepared.train.examples.num_tokens,
        "sequences": len(prepared.sequences),
        "fingerprint": digest,
    }


def resident_mib(root: int) -> float:
    """The resident memory of a process and its descendants."""
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(") ", 1)[1].split()
            except (OSError, IndexError):
                continue
            parents[int(entry.name)], sizes[int(entry.name)] = int(fields[1]), int(fields[21])
    family, size = {root}, 0
    for pid in sorted(parents):  # children have larger ids, or are found in the next sample
        if pid in family or parents[pid] in family:
            family.add(pid)
            size += sizes[pid]
    return size * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    start, peak, done = time.perf_counter(), 0.0, threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, resident_mib(process.pid))

    watcher = threading.Thread(target=sample)
    watcher.start()
    text, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {"wall_seconds": round(time.perf_counter() - start, 1), "peak_mib": round(peak), **json.loads(text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(prepare_once(args.once, args.model, args.packing)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        size = write_rows(data, args.rows)
        command = [sys.executable, __file__, "--once", str(data), "--model", args.model]
        command += ["--packing"] * args.packing
        cache = Path(folder) / "cache"  # empty but for the models
        cache.mkdir()
        home = os.environ.get("DEFTUNE_CACHE") or Path.home() / ".cache" / "deftune"
        (cache / "models").symlink_to(Path(home).absolute() / "models")
        environment = {**os.environ, "DEFTUNE_CACHE": str(cache)}
        starts = [measure(command, environment) for _ in range(args.starts)]
    assert len({start.pop("fingerprint") for start in starts}) == 1, "two starts gave different tokens"
    report = {
        "rows": args.rows, "bytes": size, "packing": args.packing, "model": args.model,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", "load": os.getloadavg()[0],
        "starts": starts,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
