"""Every figure that needs a GPU, in order of importance, within a budget of minutes: for a rented card.

    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --minutes 28
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --list          # the jobs, their state and seconds
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --only tests    # jobs whose name contains a word

DATA holds gsm8k/, math/ and medquad/; MODELS holds smollm2.gguf, gemma-3-270m.gguf and qwen2.5-coder-1.5b.gguf. Each
job is a command of this repository that could be typed by hand. It writes its results and NAME.log to OUT and is
stopped at twice its expected seconds. A job that has finished (OUT/NAME.done) is not run again, and one that would not
fit into the minutes left is passed over, so that a shorter one after it may run. The study's cells, if asked for with
--study, take the time that is left. The exit code is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QWEN, GEMMA, SMOLLM2 = "MODELS/qwen2.5-coder-1.5b.gguf", "MODELS/gemma-3-270m.gguf", "MODELS/smollm2.gguf"
MAIN = "^TRL nll$|Liger$|Liger; compile$|varlen$|varlen; bf16 weights$|compiled layers; bf16 weights$"  # of training.py


@dataclass(frozen=True)
class Job:
    """A command, with DATA, MODELS and OUT in place of the folders, and the seconds that it takes on one H200."""

    name: str
    seconds: int
    command: str


JOBS = (
    Job("tests", 240, "-m pytest -n 4 -m gpu tests -q"),
    Job("real-runs-qwen", 330, "benchmarks/real_runs.py 'Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)=" + QWEN
        + "' --compare 5 --datasets medquad --layouts packed --data DATA --results OUT/real_runs_qwen.jsonl"),
    Job("real-runs-gemma", 420, "benchmarks/real_runs.py 'Gemma-3-270M (Q4_K_M)=" + GEMMA
        + "' --template plain --data DATA --results OUT/real_runs_gemma.jsonl"),
    Job("generation-qwen", 90, "benchmarks/generation.py " + QWEN + " --sequences 256 --new-tokens 128 --kinds fixed "
        "--rounds 1 --contenders deftune,generate_batch --questions DATA/gsm8k/test.jsonl.gz "
        "--json OUT/generation_qwen.json --markdown OUT/generation_qwen.md"),
    Job("shards", 60, "benchmarks/linear_loss.py --shards 8 --json OUT/shards.json --markdown OUT/shards.md"),
    Job("training-smollm2", 400, "benchmarks/training.py " + SMOLLM2 + " DATA/gsm8k/train.jsonl.gz --micro 16 --only '"
        + MAIN + "' --json OUT/training_smollm2.jsonl --markdown OUT/training_smollm2.md"),
    Job("training-qwen", 500, "benchmarks/training.py " + QWEN + " DATA/gsm8k/train.jsonl.gz --micro 4 --only '"
        + MAIN + "' --json OUT/training_qwen.jsonl --markdown OUT/training_qwen.md"),
    Job("lora-memory", 240, "benchmarks/lora_memory.py DATA/gsm8k/train.jsonl.gz --format gsm8k --tokenizer " + SMOLLM2
        + " --out OUT/lora_memory.json"),
)  # fmt: skip


def line_of(job: Job, folders: dict[str, str]) -> str:
    """The command as a shell takes it."""
    line = job.command
    for name, folder in folders.items():
        line = line.replace(name, folder)
    return f"{sys.executable} {line}"


def run(job: Job, line: str, out: Path) -> bool:
    """Whether the job finished; its output goes to OUT/NAME.log."""
    begin = time.monotonic()
    with (out / f"{job.name}.log").open("w") as log:
        log.write(f"$ {line}\n")
        log.flush()
        command = ["timeout", "--kill-after=10", str(2 * job.seconds), "bash", "-c", line]
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.monotonic() - begin
    reason = {0: "finished", 124: "stopped at its limit", 137: "killed at its limit"}.get(code, f"exit code {code}")
    print(f"{job.name}: {reason} after {seconds:.0f} s (expected {job.seconds} s)", flush=True)
    if code == 0:
        (out / f"{job.name}.done").write_text(f"{seconds:.0f} s\n")
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=28, help="the budget (default: 28)")
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the jobs and stop")
    parser.add_argument("--study", action="store_true", help="give the minutes that are left to the study's cells")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    folders = {"DATA": str(args.data.resolve()), "MODELS": str(args.models.resolve()), "OUT": str(args.out.resolve())}
    failed = False
    for job in [job for job in JOBS if args.only in job.name]:
        done = (args.out / f"{job.name}.done").exists()
        line = line_of(job, folders)
        if args.list:
            print(f"{job.name}: {'done' if done else f'{job.seconds} s'}\n  {line}")
        elif done:
            print(f"{job.name}: done before")
        elif time.monotonic() + job.seconds > end:
            print(f"{job.name}: passed over, {job.seconds} s are more than is left")
        else:
            failed = not run(job, line, args.out) or failed
    left = (end - time.monotonic()) / 60
    if args.study and not args.list and left > 2:
        command = [sys.executable, "-m", "deftune.paper.study", "run", "--minutes", f"{left:.1f}", "--jobs", "2"]
        failed = bool(subprocess.run(command, cwd=ROOT).returncode) or failed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
