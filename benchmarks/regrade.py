"""100,000 answers graded after a kill: nothing is graded twice, lost or graded otherwise.

    python benchmarks/regrade.py --out benchmarks/results/reliability_regrade.json
    python benchmarks/regrade.py --answers 5000 --kills 2

The answers are written as an interrupted `deftune eval` leaves them. Grading is killed at random moments of the time
that it takes, and started again; the grades must be those of an undisturbed grading, and right by construction.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deftune.evaluation.evaluate import Result, Settings, grade
from deftune.evaluation.items import Item
from deftune.evaluation.suites import task_named
from deftune.selftest.records import Record, write_records

# (answer's text for n, whether it is right)
FORMS = [
    ("The answer is \\boxed{{{n}}}.", True), ("#### {n}", True), ("so x = \\boxed{{{n}.0}}", True),
    ("\\boxed{{\\frac{{{twice}}}{{2}}}}", True), ("\\boxed{{{more}}}", False), ("I do not know", False),
    ("\\boxed{{-{n}}}", False), ("The answer is {n}", True),
]  # fmt: skip
SAMPLES = 8


def tasks_of(number: int) -> Any:
    items = [Item(str(n), f"What is {n}?", str(n)) for n in range(2, number + 2)]
    return {"gsm8k": (task_named("gsm8k"), items)}


def settings_of(tasks: Any) -> Settings:
    versions = {name: task.version for name, (task, _) in tasks.items()}
    return Settings(model="m", suite="math", tasks=versions, samples=SAMPLES, temperatures=(1.0,))


def write_samples(folder: Path, tasks: Any) -> list[bool]:
    """The result's answers; whether each is right."""
    result, labels = Result(folder), list[bool]()
    result.open(settings_of(tasks))
    with result.samples.open("w", encoding="utf-8") as file:
        for item in tasks["gsm8k"][1]:
            n = int(item.gold)
            for sample in range(SAMPLES):
                form, right = FORMS[(n + sample) % len(FORMS)]
                text = form.format(n=n, more=n + 1, twice=2 * n)
                record = {"task": "gsm8k", "id": item.id, "temperature": 1.0, "sample": sample, "text": text,
                          "num_tokens": 9, "finish": "stop"}  # fmt: skip
                file.write(json.dumps(record) + "\n")
                labels.append(right)
    return labels


def grade_folder(folder: str, number: int, workers: int) -> None:
    os.setsid()
    tasks = tasks_of(number)
    grade(Result(Path(folder)), settings_of(tasks), tasks, workers=workers)


def verdicts(folder: Path) -> list[tuple[str, int, bool]]:
    records = [json.loads(line) for line in (folder / "graded.jsonl").read_text().splitlines()]
    return sorted((record["id"], record["sample"], record["score"] == 1) for record in records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    begun, number = time.monotonic(), args.answers // SAMPLES
    folder = Path(tempfile.mkdtemp(prefix="regrade-"))
    tasks = tasks_of(number)
    labels = write_samples(folder / "whole", tasks)
    shutil.copytree(folder / "whole", folder / "killed")
    grade(Result(folder / "whole"), settings_of(tasks), tasks, workers=args.workers)
    whole_seconds = took = time.monotonic() - begun
    print(f"{len(labels):,} answers graded in {took:.0f} s", flush=True)
    draw, kills = random.Random(0), 0
    while True:
        process = multiprocessing.Process(target=grade_folder, args=(str(folder / "killed"), number, args.workers))
        process.start()
        process.join(draw.uniform(0, took / 2) if kills < args.kills else None)
        if process.exitcode is not None:
            if kills == args.kills or process.exitcode:
                break
            took /= 2  # it ended before the kill: sooner next time, from the start
            (folder / "killed" / "graded.jsonl").unlink()
            continue
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        kills += 1
        print(f"kill {kills}", flush=True)
    whole, killed = verdicts(folder / "whole"), verdicts(folder / "killed")
    wrong = sum(right != label for (_, _, right), label in zip(
        sorted(whole, key=lambda v: (int(v[0]), v[1])), labels
    ))  # fmt: skip
    problems = [
        what
        for what, holds in {
            f"exit code {process.exitcode}": process.exitcode == 0,
            f"{kills} of {args.kills} kills": kills == args.kills,
            f"{len(whole)} of {len(labels)} answers graded": len(whole) == len(labels),
            "other grades after the kills": whole == killed,
            f"{wrong} wrong grades": wrong == 0,
        }.items()
        if not holds
    ]
    figure = (
        f"{len(labels):,} answers, {kills} kills: {'the same grades' if whole == killed else 'OTHER grades'}, "
        f"{wrong} of them wrong; {whole_seconds:.0f} s undisturbed with {args.workers} workers"
    )
    print(figure, *problems, sep="\n  ")
    shutil.rmtree(folder)
    if args.out:
        command = f"python benchmarks/regrade.py --answers {args.answers}"
        record = Record.of(None, "answers graded after a kill", figure, not problems, time.monotonic() - begun, command)
        write_records(args.out, [record])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
