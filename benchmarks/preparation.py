"""Prepare a large file for training: seconds, CPU seconds and peak memory of reading, encoding and packing.

    python benchmarks/preparation.py --rows 300000 --out benchmarks/results/preparation.json
    python benchmarks/preparation.py --rows 1000000 --packing --out ...
    python benchmarks/preparation.py --rows 200000 --packing --workers 1 2 4 8 --out ...

Rows are generated: two messages, some 490 bytes and 110 tokens each, the same for every machine. Each start is a
process of its own; the first one encodes, the second one finds the encoded rows in the cache (an empty folder before
the first). Memory is the sum of the resident memory of the process and its children, sampled every 50 ms: pages that
several processes share are counted once for each of them.

With --workers the first start is measured with each number of encoding processes (DEFTUNE_DATA_WORKERS), --rounds
times in turn, each time with an empty cache; OUT.json is written after each start, and OUT.md has the table. All starts
may use all cores: besides the encoding processes the one that feeds them is busy. With --pin a start may use as many
cores as it has encoding processes, the first ones that this process may use.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
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


CONVERT = "import sys; from deftune.artifacts.models import resolve_model; resolve_model(sys.argv[1], print)"


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


def new_cache(folder: Path) -> dict[str, str]:
    """The environment of starts that share a cache, which is empty but for the models."""
    folder.mkdir()
    home = os.environ.get("DEFTUNE_CACHE") or Path.home() / ".cache" / "deftune"
    models = Path(home).absolute() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    return {**os.environ, "DEFTUNE_CACHE": str(folder)}


def machine() -> str:
    named = Path("/proc/cpuinfo")
    lines = named.read_text().splitlines() if named.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def by_workers(args: argparse.Namespace, command: list[str], folder: Path, report: dict[str, Any]) -> None:
    """First starts with each number of processes, in rounds; ``report`` is written after each."""
    cores = sorted(os.sched_getaffinity(0))
    report["pinned"], report["starts"] = args.pin, []
    for place in range(args.rounds):
        for workers in args.workers:
            cache = folder / f"cache-{place}-{workers}"
            environment = {**new_cache(cache), "DEFTUNE_DATA_WORKERS": str(workers)}
            pinned = ["taskset", "-c", ",".join(map(str, cores[:workers]))] if args.pin else []
            load = os.getloadavg()[0]
            start = measure([*pinned, *command], environment)
            shutil.rmtree(cache)
            report["starts"].append({"workers": workers, "load": round(load, 1), **start})
            print(json.dumps(report["starts"][-1]), file=sys.stderr, flush=True)
            if args.out:
                args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                args.out.with_suffix(".md").write_text(table(report), encoding="utf-8")


def table(report: dict[str, Any]) -> str:
    """By number of processes: the fastest start, and its rate compared with that of the first number."""
    starts: list[dict[str, Any]] = report["starts"]
    tokens = starts[0]["tokens"]
    cores = "as many cores as processes" if report["pinned"] else "all cores"
    lines = [
        f"{report['machine']}; {report['rows']:,} rows, {report['bytes'] / 1e6:.0f} MB, {tokens:,} tokens, "
        f"{'packed' if report['packing'] else 'not packed'}; an empty cache; {cores}. "
        "The fastest start of each number.",
        "",
        "| processes | starts | seconds | rows/s | times the first | CPU s | peak of all, MiB | of the main one |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    base = 0.0
    for workers in dict.fromkeys(start["workers"] for start in starts):
        own = [start for start in starts if start["workers"] == workers]
        best = min(own, key=lambda start: start["prepare_seconds"])
        seconds = best["prepare_seconds"]
        base = base or seconds
        lines.append(
            f"| {workers} | {len(own)} | {seconds} | {report['rows'] / seconds:,.0f} | {base / seconds:.2f} "
            f"| {best['cpu_seconds']} | {best['peak_mib']:,} | {best['peak_mib_of_this_process']:,} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", help="measure first starts with these numbers of processes")
    parser.add_argument("--rounds", type=int, default=2, help="with --workers (default: %(default)s)")
    parser.add_argument("--pin", action="store_true", help="with --workers: as many cores as processes")
    parser.add_argument("--out", type=Path, help="with --workers OUT.json and OUT.md are written, else OUT")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(prepare_once(args.once, args.model, args.packing)))
        return
    # Converted before a start is measured, and not in this process: the peak of a process begins with its parent's.
    subprocess.run([sys.executable, "-c", CONVERT, args.model], check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        size = write_rows(data, args.rows)
        command = [sys.executable, __file__, "--once", str(data), "--model", args.model]
        command += ["--packing"] * args.packing
        report: dict[str, Any] = {
            "rows": args.rows, "bytes": size, "packing": args.packing, "model": args.model, "machine": machine(),
        }  # fmt: skip
        if args.workers:
            by_workers(args, command, Path(folder), report)
        else:
            environment = new_cache(Path(folder) / "cache")
            report |= {
                "load": os.getloadavg()[0],
                "starts": [measure(command, environment) for _ in range(args.starts)],
            }
    assert len({start.pop("fingerprint") for start in report["starts"]}) == 1, "two starts gave different tokens"
    print(json.dumps(report, indent=1))
    if args.out and args.workers:
        print(table(report))
    if args.out:
        path = args.out.with_suffix(".json") if args.workers else args.out
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
