"""Every figure that needs a GPU, in order of importance, within a budget of minutes: for a rented card.

    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --rehearse      # on a CPU: every job, small sizes
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --check         # packages, files, the GPU; no job
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --minutes 28
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --list          # the jobs, their state and seconds
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --only tests    # jobs whose name contains a word
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --again         # also jobs with committed results
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --detach        # go on after the shell has ended
    python benchmarks/gpu.py --data DATA --models MODELS --out OUT --wait 500      # until the detached one ends

DATA holds gsm8k/, math/ and medquad/ (for --study: all that benchmarks/study/data.py makes); MODELS holds smollm2.gguf,
gemma-3-270m.gguf and qwen2.5-coder-1.5b.gguf. --peers names a folder that holds the folders unsloth and axolotl of
their packages (benchmarks/gpu_unsloth.txt, benchmarks/gpu_axolotl.txt); jobs that need it are passed over without it. A
machine without a network gets its packages from elsewhere: benchmarks/gpu_requirements.txt says how. No job starts
while a package or a file is missing; --check also imports the packages.

Each job is a command of this repository that could be typed by hand. It writes its results and NAME.log to OUT and is
stopped at twice its expected seconds, or when the minutes are spent. Timed jobs run one after another; those without a
clock then run together. A job that has finished (OUT/NAME.done) is not run again, and one that would not fit into the
minutes left is passed over, so that a shorter one after it may run. So is a job whose result is in benchmarks/results,
unless --again or --rehearse is given. The exit code is 1 if a job failed.

--study gives the minutes that are left to the study's cells, --cells at a time. `data` and `models`, which the cells'
configs name, become links to DATA and MODELS where they do not exist. The cells are merged into OUT/study, which begins
as a copy of the committed results: copy its files back to benchmarks/study/results.

lora-memory writes a model of 16 GB to the temporary folder: TMPDIR=/dev/shm where the disk is small. Do not change the
checkout while jobs run: a process that starts later imports other code, or half of it.

--rehearse runs the same commands with smaller sizes and SmolLM2 in place of the larger models, in OUT/rehearsal, and
asks for no GPU. What needs one says so in the job's log.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
QWEN, GEMMA, SMOLLM2 = "MODELS/qwen2.5-coder-1.5b.gguf", "MODELS/gemma-3-270m.gguf", "MODELS/smollm2.gguf"
FILES = (QWEN, GEMMA, SMOLLM2, *(f"DATA/{name}/train.jsonl.gz" for name in ("gsm8k", "math", "medquad")),
         "DATA/gsm8k/test.jsonl.gz")  # fmt: skip
QWEN_SHAPE = "benchmarks/results/qwen2.5-coder-1.5b.json"
PACKAGES = (
    "deftune", "torch", "triton", "transformers", "accelerate", "peft", "trl", "datasets", "gguf", "pydantic", "yaml",
    "jinja2", "rich", "safetensors", "math_verify", "rapidfuzz", "liger_kernel", "bitsandbytes", "pytest", "xdist",
    "hypothesis", "mpmath", "numpy", "pyarrow", "reasoning_gym",
)  # fmt: skip
# of training.py: the reference, what users of TRL can switch on, and the steps from the default to the fast path
MAIN = r"^TRL nll \+ Liger$|Liger; compile$|^deftune deft; varlen$|deft; varlen; (bf16 weights|compiled layers)|" \
       r"deft \+ Liger; varlen; bf16 weights$"  # fmt: skip
# also beside the peers, for the ratios
BESIDE_PEERS = r"^TRL nll \+ Liger$|^deftune deft; varlen; compiled layers; bf16 weights$|^unsloth|^axolotl"
PEERS_GIVEN = "--peer unsloth=PEERS/unsloth --peer axolotl=PEERS/axolotl"
# on a CPU generate_batch would take most of the machine's memory
SMALL_GENERATION = "--sequences 2 --new-tokens 4 --contenders deftune"
SMALL_TRAINING = "--rows 20 --length 128 --micro 1 --steps 1 --warmup 1"
SMALL_RUNS = "--steps 2 --compare 1 --rows 2 --length 64 --datasets gsm8k"


@dataclass(frozen=True)
class Job:
    """A command, with DATA, MODELS and OUT in place of the folders, and the seconds that it takes on one H200."""

    name: str
    seconds: int
    command: str
    small: str  # options that make it small, for --rehearse
    timed: bool = True  # its times are results: nothing else may run
    committed: str = ""  # the file of benchmarks/results that has its result


TRAINING = {
    "qwen": f"benchmarks/training.py {QWEN_SHAPE} DATA/gsm8k/train.jsonl.gz --tokenizer {SMOLLM2} --micro 4",
    "smollm2": f"benchmarks/training.py {SMOLLM2} DATA/gsm8k/train.jsonl.gz --micro 16",
}
FEW_STEPS = " --steps 15 --warmup 4 --timeout 200 --json OUT/{0}.jsonl --markdown OUT/{0}.md --only '{1}'"
GENERATION = (
    "benchmarks/generation.py " + QWEN + " --sequences 256 --new-tokens {0} --kinds fixed --rounds 1 --contenders "
    "deftune,generate_batch --questions DATA/gsm8k/test.jsonl.gz --json OUT/generation_qwen_{0}.json --markdown "
    "OUT/generation_qwen_{0}.md"
)
FAST_PATH = f"benchmarks/fast_path.py {SMOLLM2} DATA/gsm8k/train.jsonl.gz --json OUT/{{0}}.json --markdown OUT/{{0}}.md"
SMALL_PATH = "--steps 2 --rows 1 --length 64 --objectives nll"
LORA = f"benchmarks/lora_memory.py DATA/gsm8k/train.jsonl.gz --format gsm8k --tokenizer {SMOLLM2} --steps 6"
SMALL_LORA = "--layers 1 --width 256 --vocabulary 49152 --rows 20 --length 128 --micro 1 --steps 3"
REAL_QWEN = f"benchmarks/real_runs.py 'Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)={QWEN}' --compare 5 --data DATA"
REAL_GEMMA = f"benchmarks/real_runs.py 'Gemma-3-270M (Q4_K_M)={GEMMA}' --template plain --data DATA"

# What benchmarks/results lacks comes first; the jobs with `committed` have their results there.
JOBS = (
    Job("cells", 160, f"benchmarks/cell_overhead.py {QWEN} --data DATA --json OUT/cell_overhead.json --markdown "
        "OUT/cell_overhead.md", "--rows 64 --steps 1 --micro 1 --questions 4 --cells 2 --repeats 1"),
    *(Job(f"training-peers-{model}", 200, f"{command} {PEERS_GIVEN}"
          + FEW_STEPS.format(f"training_peers_{model}", BESIDE_PEERS), SMALL_TRAINING + " --timeout 1200",
          committed="training_h200_peers.md")
      for model, command in TRAINING.items()),
    Job("lora-memory-axolotl", 150, LORA + " --only axolotl --axolotl PEERS/axolotl --out OUT/lora_memory_axolotl.json",
        SMALL_LORA, committed="lora_memory_h200_axolotl.json"),
    Job("generation-qwen-1024", 90, GENERATION.format(1024), SMALL_GENERATION),
    Job("fast-path-parts", 160, FAST_PATH.format("fast_path_parts") + " --parts --objectives deft", SMALL_PATH,
        timed=False, committed="fast_path_h200_parts.json"),
    Job("fast-path-large", 160, FAST_PATH.format("fast_path_large") + " --rows 64", SMALL_PATH, timed=False),
    Job("real-runs-gemma", 160, REAL_GEMMA + " --datasets medquad --results OUT/real_runs_gemma.jsonl", SMALL_RUNS,
        timed=False),
    Job("tests", 240, "-m pytest -n 4 -m gpu GPU_TESTS -q", "-n 1", timed=False),
    Job("shards", 65, "benchmarks/linear_loss.py --shards 8 --json OUT/shards.json --markdown OUT/shards.md",
        "--shapes 256,64,4096 --repeats 2", committed="shards_h200.json"),
    Job("generation-qwen-128", 45, GENERATION.format(128), SMALL_GENERATION,
        committed="generation_h200_batch_qwen.json"),
    Job("training-qwen", 150, TRAINING["qwen"] + FEW_STEPS.format("training_qwen", MAIN), SMALL_TRAINING,
        committed="training_h200_fast_qwen.jsonl"),
    Job("training-smollm2", 130, TRAINING["smollm2"] + FEW_STEPS.format("training_smollm2", MAIN), SMALL_TRAINING,
        committed="training_h200_fast.jsonl"),
    Job("fast-path", 110, FAST_PATH.format("fast_path"), SMALL_PATH, committed="fast_path_h200.json"),
    Job("lora-memory", 180, LORA + " --only recomputed --out OUT/lora_memory.json", SMALL_LORA,
        committed="lora_memory_h200.json"),
    Job("real-runs-qwen", 280, REAL_QWEN + " --datasets medquad --layouts packed --results OUT/real_runs_qwen.jsonl",
        SMALL_RUNS, timed=False, committed="real_runs_h200.jsonl"),
)  # fmt: skip


def filled(text: str, folders: dict[str, str]) -> str:
    """
    >>> filled("a DATA/x OUT/y", {"DATA": "/OUT/d", "OUT": "/o"})
    'a /OUT/d/x /o/y'
    """
    return re.sub(r"\b(" + "|".join(folders) + r")\b", lambda name: folders[name[0]], text)


def chosen(jobs: list[Job], folders: dict[str, str], *, again: bool) -> tuple[list[Job], dict[str, str]]:
    """The jobs to run, and why the others are passed over."""
    passed: dict[str, str] = {}
    for job in jobs:
        if job.committed and not again and (ROOT / "benchmarks/results" / job.committed).exists():
            passed[job.name] = f"benchmarks/results/{job.committed} has its result (--again)"
        elif "PEERS" in job.command and "PEERS" not in folders:
            passed[job.name] = "it needs the packages of other stacks (--peers)"
    return [job for job in jobs if job.name not in passed], passed


def line_of(job: Job, folders: dict[str, str], *, small: bool = False) -> str:
    """The command as a shell takes it; of the tests, only files that have some for a GPU, since all are imported."""
    command = job.command
    if small:  # of an option that is given twice, the last one counts
        command = re.sub("|".join(map(re.escape, (QWEN_SHAPE, QWEN, GEMMA))), SMOLLM2, command) + f" {job.small}"
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    named = " ".join(sorted(str(path.relative_to(ROOT)) for path in tests))
    return f"{sys.executable} {filled(command, folders).replace('GPU_TESTS', named)}"


def missing(folders: dict[str, str], *, need_gpu: bool = True, try_imports: bool = False) -> list[str]:
    """What the jobs need and this machine lacks."""
    found = [f"package {name}" for name in PACKAGES if importlib.util.find_spec(name) is None]
    found += [f"file {path}" for path in (filled(name, folders) for name in FILES) if not Path(path).is_file()]
    if try_imports and not found:
        found += [text for name in PACKAGES if (text := failed_import(name))]
    if need_gpu and not found and importlib.import_module("torch").cuda.is_available() is False:
        found.append("a GPU that torch can use")
    return found


def failed_import(name: str) -> str:
    """Why a package cannot be imported; "" and a line with its version where it can."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever its code raises
        return f"package {name}: {type(error).__name__}: {error}"
    print(f"{name} {getattr(module, '__version__', '')}".rstrip(), flush=True)
    return ""


def environment() -> dict[str, str]:
    """The variables of a job: this checkout before any other, output that a kill does not lose, no look at the hub."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def run(job: Job, line: str, out: Path, end: float, *, small: bool = False) -> bool:
    """Whether the job finished; its output goes to OUT/NAME.log."""
    begin = time.monotonic()
    limit = max(1, round(end - begin if small else min(2 * job.seconds, end - begin)))
    with (out / f"{job.name}.log").open("w") as log:
        log.write(f"$ {line}\n")
        log.flush()
        command = ["timeout", "--kill-after=10", str(limit), "bash", "-c", line]
        code = subprocess.run(command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT).returncode
    seconds = time.monotonic() - begin
    reason = {0: "finished", 124: "stopped at its limit", 137: "killed at its limit"}.get(code, f"exit code {code}")
    print(f"{job.name}: {reason} after {seconds:.0f} s (expected {job.seconds} s)", flush=True)
    if code == 0 and not small:
        (out / f"{job.name}.done").write_text(f"{seconds:.0f} s\n")
    return code == 0


def run_all(jobs: list[Job], folders: dict[str, str], out: Path, end: float, *, small: bool = False) -> bool:
    """Run what fits before ``end``; whether all of it finished."""
    good, together = True, list[Job]()

    def run_one(job: Job) -> bool:
        return run(job, line_of(job, folders, small=small), out, end, small=small)

    for job in jobs:
        if (out / f"{job.name}.done").exists():
            print(f"{job.name}: done before", flush=True)
        elif time.monotonic() + job.seconds > end:
            print(f"{job.name}: passed over, {job.seconds} s are more than is left", flush=True)
        elif job.timed or small:
            good = run_one(job) and good
        else:
            together.append(job)
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        return all([*pool.map(run_one, together), good])


def run_study(out: Path, folders: dict[str, str], minutes: float, cells: int) -> bool:
    """Run missing cells of the study, ``cells`` at a time, into a copy of the committed results, OUT/study."""
    for name in ("DATA", "MODELS"):
        if not (ROOT / name.lower()).exists():
            (ROOT / name.lower()).symlink_to(folders[name])
    results = out / "study"
    results.mkdir(exist_ok=True)
    for path in (ROOT / "benchmarks/study/results").glob("*.json"):
        if not (results / path.name).exists():
            shutil.copyfile(path, results / path.name)
    command = [sys.executable, "-m", "benchmarks.study", "run", "--minutes", f"{minutes:.1f}", "--jobs", str(cells),
               "--results", str(results)]  # fmt: skip
    return not subprocess.run(command, cwd=ROOT, env=environment()).returncode


def detach(out: Path) -> None:
    """Start this script again in a session of its own, which a closed shell does not end."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    with (out / "gpu.log").open("w") as log:
        subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.DEVNULL, stdout=log,
                         stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    print(f"started; its output goes to {out / 'gpu.log'}, and {out / 'gpu.done'} says that it has ended")


def wait(out: Path, seconds: float) -> int:
    """Wait for a detached run; print what it has said so far."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (out / "gpu.done").exists():
        time.sleep(1)
    log = out / "gpu.log"
    print(log.read_text() if log.exists() else f"no run was started: there is no {log}")
    return 0 if (out / "gpu.done").exists() else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="a folder that holds the folders unsloth and axolotl")
    parser.add_argument("--again", action="store_true", help="run jobs whose results are committed, too")
    parser.add_argument("--minutes", type=float, default=28, help="the budget (default: 28)")
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--study", action="store_true", help="give the minutes that are left to the study's cells")
    parser.add_argument("--cells", type=int, default=2, help="cells of the study at a time (default: 2)")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, no GPU: does every job get to its end?")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="print the jobs and stop")
    how.add_argument("--check", action="store_true", help="say what this machine lacks and stop")
    how.add_argument("--detach", action="store_true", help="run in the background")
    how.add_argument("--wait", type=float, metavar="SECONDS", help="wait for a detached run, and print its output")
    args = parser.parse_args()
    if args.rehearse:
        args.out /= "rehearsal"
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    folders = {"DATA": str(args.data.resolve()), "MODELS": str(args.models.resolve()), "OUT": str(args.out.resolve())}
    jobs = [job for job in JOBS if args.only in job.name]
    if args.peers:
        folders["PEERS"] = str(args.peers.resolve())
    if not jobs:
        parser.error(f"--only: {args.only!r} is in no name of: {', '.join(job.name for job in JOBS)}")
    if args.wait is not None:
        return wait(args.out, args.wait)
    jobs, passed = chosen(jobs, folders, again=args.again or args.rehearse)
    if args.list:
        print("".join(f"{name}: {why}\n" for name, why in passed.items()), end="")
        for job in jobs:
            state = "done" if (args.out / f"{job.name}.done").exists() else f"{job.seconds} s"
            print(f"{job.name}: {state}\n  {line_of(job, folders)}")
        return 0
    lacking = missing(folders, need_gpu=not args.rehearse, try_imports=args.check)
    if lacking or args.check:
        print("\n".join(f"missing: {name}" for name in lacking) or "nothing is missing")
        return int(bool(lacking))
    lock = (args.out / "gpu.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{args.out}: another run is using this folder; --wait waits for it", file=sys.stderr)
        return 1
    (args.out / "gpu.done").unlink(missing_ok=True)
    if args.detach:
        lock.close()
        detach(args.out)
        return 0
    print("".join(f"{name}: passed over, {why}\n" for name, why in passed.items()), end="", flush=True)
    good = False
    try:
        good = run_all(jobs, folders, args.out, end, small=args.rehearse)
        left = (end - time.monotonic()) / 60
        if args.study and not args.rehearse and left > 2:
            good = run_study(args.out, folders, left, args.cells) and good
    finally:
        (args.out / "gpu.done").write_text("all finished\n" if good else "something failed\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
