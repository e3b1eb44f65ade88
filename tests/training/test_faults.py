"""What goes wrong around a run: kills, signals, full disks, wrong inputs. One clear line, nothing lost, no litter."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from run_process import Started, start
from test_resume import check_same, rewound, train, weights
from torch.utils.data import DataLoader

from deftune.artifacts import checkpoints, folders
from deftune.artifacts.config import render_yaml
from deftune.artifacts.runs import Run, find_run
from deftune.training.stopping import STOPS, StopSignal, leave_workers_undisturbed
from waiting import HANG_SECONDS, wait_for


def write_config(config) -> Path:
    """A run's config beside its folder."""
    path = Path(f"{config.run}.yaml")
    path.write_text(render_yaml(config))
    return path


def last_record(run: Path) -> int:
    return max((record["step"] for record in Run(run).read_metrics()), default=0)


def last_checkpoint(run: Path) -> int:
    found = checkpoints.latest(run / "checkpoints", lambda _: None)
    return checkpoints.step_of(found) or 0 if found else 0


def litter(run: Path) -> list[str]:
    """What should not be there when a run has ended."""
    found = [path for path in run.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
    return sorted(str(path.relative_to(run)) for path in found)


# --- SIGKILL ----------------------------------------------------------------------------------------------------------

KILLED = {"train.max_steps": 3, "train.save_steps": 1, "train.keep": 1}  # writes, replaces, removes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, make_config) -> tuple[Path, int]:
    """A run, and how many times it changed something in its folder."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    started = start(write_config(make_config(run, KILLED)), count_in=run.parent / "count")
    assert started.ended() == 0, started.output.read_text()
    assert litter(run) == []
    return run, int((run.parent / "count").read_text())


def check_killed_at(place: int, run: Path, make_config, reference: Path) -> None:
    config = write_config(make_config(run, KILLED))
    started = start(config, kill_at=place)
    if started.ended() == -signal.SIGSEGV:  # seen once in thousands: a library's thread in a forked process; not twice
        shutil.rmtree(run, ignore_errors=True)
        started = start(config, kill_at=place)
    assert started.ended() == -signal.SIGKILL, started.output.read_text()
    assert last_checkpoint(run) >= last_record(run) - 1, "more than one interval is lost"
    again = start(config)
    assert again.ended() == 0, again.output.read_text()
    check_same(run, reference, steps=3)
    assert litter(run) == []
    assert [folder.name for folder in checkpoints.checkpoints(run / "checkpoints")] == ["checkpoint-3"]
    assert Run(run).status()["state"] == "finished"


@pytest.mark.parametrize(
    "part", [k if k in (0, 6, 13, 19) else pytest.param(k, marks=pytest.mark.slow) for k in range(20)]
)
def test_killed_at_any_moment(tmp_path, make_config, undisturbed, part):
    """SIGKILL at some of the moments at which the run changes something on the disk, at most one in each twentieth."""
    reference, number = undisturbed
    place = random.Random(part).randint(1 + part * number // 20, (part + 1) * number // 20)
    check_killed_at(place, tmp_path / "run", make_config, reference)


@pytest.mark.slow
def test_killed_at_every_moment(tmp_path, make_config, undisturbed):
    reference, number = undisturbed
    for place in range(1, number + 1):
        check_killed_at(place, tmp_path / f"run-{place}", make_config, reference)
        shutil.rmtree(tmp_path / f"run-{place}")


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, make_config):
    """One run, killed by the clock until it is done, 60 times or more."""
    settings = {"train.max_steps": 60, "train.save_steps": 1}
    train(make_config(tmp_path / "reference", settings))
    run, draw, kills = tmp_path / "run", random.Random(5), 0
    config = write_config(make_config(run, settings))
    while True:
        before, started = last_checkpoint(run), start(config)
        while started.process.is_alive() and last_checkpoint_name(run) <= before:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        started.process.kill()
        if started.ended() == 0:
            break
        kills += 1
        assert last_checkpoint(run) >= last_record(run) - 1
    assert kills >= 30
    check_same(run, tmp_path / "reference", steps=60)
    assert litter(run) == []


def last_checkpoint_name(run: Path) -> int:
    found = checkpoints.checkpoints(run / "checkpoints")
    return checkpoints.step_of(found[-1]) or 0 if found else 0


# --- SIGTERM ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        ("process", signal.SIGTERM, 143),
        pytest.param("process", signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param("group with data workers", signal.SIGTERM, 143, marks=pytest.mark.long),
    ],
)
def test_sigterm_and_ctrl_c_save_and_stop(tmp_path, make_config, whom, number, code):
    steps = 200
    settings = {"train.max_steps": steps, "train.save_steps": 1000, "train.workers": 0 if whom == "process" else 2}
    run = tmp_path / "run"
    config = write_config(make_config(run, settings))
    command = [sys.executable, "-m", "deftune", "train", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output, start_new_session=True, env=environment)
        wait_for(lambda: last_record(run) >= 3 or process.poll() is not None)
        (os.kill if whom == "process" else os.killpg)(process.pid, number)
        assert process.wait(HANG_SECONDS) == code, (tmp_path / "output").read_text()
    text = (tmp_path / "output").read_text()
    status = Run(run).status()
    step = status["step"]
    assert f"stopped at step {step} with a checkpoint; the same command resumes" in text
    assert "Traceback" not in text
    assert ("\nfinishing the step, then saving; Ctrl-C again" in text) is (number == signal.SIGINT)
    assert status["state"] == "stopped" and 3 <= step == last_checkpoint(run) == last_record(run) < steps
    assert not (run / "model").exists() and litter(run) == []
    again = start(config)
    assert again.ended() == 0, again.output.read_text()
    assert f"resuming from {run}/checkpoints/checkpoint-{step}" in again.output.read_text()
    train(make_config(tmp_path / "reference", settings | {"train.workers": 0}))
    check_same(run, tmp_path / "reference", steps)


class EarlySignal(multiprocessing.context.ForkProcess):
    """A data worker that gets SIGTERM and SIGINT before its first line of Python."""

    def run(self) -> None:
        for number in STOPS:
            os.kill(os.getpid(), number)
        super().run()


@pytest.mark.parametrize("undisturbed", [True, False])
def test_a_data_worker_that_is_being_born_is_not_disturbed(monkeypatch, undisturbed):
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(context, "Process", EarlySignal, raising=False)
    loader = DataLoader([torch.tensor(1), torch.tensor(2)], num_workers=1, multiprocessing_context=context)
    if not undisturbed:
        with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly|killed by signal"):
            list(loader)
        return
    leave_workers_undisturbed(loader)
    assert [int(row) for row in loader] == [1, 2] == [int(row) for row in loader]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOPS)


def test_a_second_sigterm_changes_nothing():
    """Slurm sends one to torchrun and to its ranks, and torchrun sends it on to them."""
    stop, before = StopSignal(), signal.getsignal(signal.SIGTERM)
    with stop.handling():
        signal.raise_signal(signal.SIGTERM)
        assert stop.received and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # the default would end the tests
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_leaves_signals_alone():
    """Ray Train calls the training function in a thread."""
    stop, before = StopSignal(), signal.getsignal(signal.SIGTERM)

    def handle() -> bool:
        with stop.handling():
            return signal.getsignal(signal.SIGTERM) is before

    with ThreadPoolExecutor() as pool:
        assert pool.submit(handle).result()


# --- a launcher that starts the ranks again ---------------------------------------------------------------------------

ELASTIC = (
    *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "test"),
    *("--rdzv-conf", "last_call_timeout=1"),  # the seconds that it waits for a second node
)


@contextmanager
def torchrun(config: Path) -> Generator[subprocess.Popen[bytes]]:
    """`deftune train` on two ranks, launched as docs/launch.md says, to the end; what it prints is in CONFIG.txt."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **hidden, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, *ELASTIC, "-m", "deftune", "train", str(config)]
    path = config.with_suffix(".txt")
    with path.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            yield process
            assert process.wait(HANG_SECONDS) == 0, path.read_text()[-6000:]
        finally:
            process.terminate()  # it ends its workers, too
            process.wait(HANG_SECONDS)


def worker_of(launcher: int, rank: int) -> int:
    """The process id of a torchrun's worker."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(f"torchrun {launcher} has no worker of rank {rank}")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the workers of torchrun are found in /proc")
def test_torchrun_starts_killed_ranks_again(tmp_path, make_config):
    """With --max-restarts the ranks go on at the newest checkpoint, and train what they would have trained."""
    settings = {"train.max_steps": 60, "train.save_steps": 5, "train.batch_size": 4, "train.micro_batch_size": 2}
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    with torchrun(write_config(make_config(undisturbed, settings))):
        pass
    with torchrun(write_config(make_config(run, settings))) as process:
        wait_for(lambda: last_checkpoint(run) >= 10 or process.poll() is not None)
        killed_at = last_record(run)
        os.kill(worker_of(process.pid, 1), signal.SIGKILL)
    resumed = re.findall(r"resuming from \S+/checkpoint-(\d+)", (tmp_path / "run.txt").read_text())
    assert resumed and 10 <= int(resumed[0]) < 60 and killed_at < 60
    assert " 2 ranks x 2 x 1" in (run / "data.json").read_text()
    check_same(run, undisturbed, 60)
    assert litter(run) == []


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_config) -> Path:
    """A run of 4 steps with all its checkpoints."""
    run = tmp_path_factory.mktemp("runs") / "saved"
    train(make_config(run, {"train.save_steps": 1, "train.keep": 9}))
    return run


def check_refused(started: Started, *words: str) -> str:
    """Exit code 2 and one line of error."""
    code, text = started.ended(), started.output.read_text()
    assert code == 2, text
    errors = [line for line in text.splitlines() if line.startswith("deftune: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    for word in words:
        assert word in errors[0], errors[0]
    return errors[0]


# 2 kB holds no tokenizer, 100 kB no weights, 200 kB no optimizer
@pytest.mark.parametrize("limit", [2_000, 100_000, 200_000])
def test_a_file_that_cannot_be_written(tmp_path, make_config, saved, limit):
    settings = {"train.save_steps": 1, "train.keep": 9}
    run = rewound(saved, 2, tmp_path / "run")
    (run / "metrics.jsonl").write_text("")  # a short one, which is not what the disk is too small for
    config = write_config(make_config(run, settings))
    check_refused(
        start(config, file_limit=limit),
        f"{run}/checkpoints: the checkpoint of step 3 could not be written",
        "the last one, checkpoint-2, is untouched. Free some space and run the same command again: it resumes",
    )
    folders.verify(run / "checkpoints" / "checkpoint-2")
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert litter(run) == []
    assert Run(run).status()["state"] == "failed"
    again = start(config)
    assert again.ended() == 0, again.output.read_text()
    assert weights(run) == weights(saved)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB, where we may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(make_config, saved, small_disk):
    """The third checkpoint no longer fits; no byte is left even for status.json."""
    run = small_disk / "run"
    config = write_config(make_config(run, {"train.save_steps": 1, "train.keep": 9}))
    message = check_refused(start(config), "could not be written", "is untouched")
    assert "No space left on device" in message or "the disk may be full" in message
    kept = last_checkpoint(run)
    assert kept >= 1 and litter(run) == []
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    again = start(config)
    assert again.ended() == 0, again.output.read_text()
    assert weights(run) == weights(saved)


# --- wrong inputs -----------------------------------------------------------------------------------------------------


def changed(config: Path, edit) -> Path:
    content = yaml.safe_load(config.read_text())
    edit(content)
    config.write_text(yaml.safe_dump(content))
    return config


def test_an_unknown_key(tmp_path, make_config):
    config = write_config(make_config(tmp_path / "run"))
    changed(config, lambda content: content["train"].update(learning_rat=1))
    check_refused(start(config), f"{config}: train.learning_rat: unknown key. Did you mean 'learning_rate'?")
    assert not (tmp_path / "run").exists()


def test_no_config(tmp_path):
    check_refused(start(tmp_path / "none.yaml"), "none.yaml: no such file or run; `deftune init` writes a config")


def test_no_data(tmp_path, make_config):
    config = write_config(make_config(tmp_path / "run", {"data.train": [{"path": str(tmp_path / "none.jsonl")}]}))
    check_refused(start(config), f"{tmp_path}/none.jsonl: no such file or folder")
    assert not (tmp_path / "run").exists()


def test_nothing_supervised(tmp_path, make_config):
    config = write_config(make_config(tmp_path / "run", {"data.max_length": 8}))
    check_refused(start(config), "over 8 tokens with no answer left")
    assert not (tmp_path / "run").exists()


def test_no_chat_template(tmp_path, make_config, tiny_model):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("chat_template*"))
    config = write_config(make_config(tmp_path / "run", {"model.name": str(model)}))
    check_refused(
        start(config), f"the tokenizer of {model} has no chat template; set data.template (--template) to one of chatml"
    )
    assert not (tmp_path / "run").exists()


def test_a_pickled_model(tmp_path, make_config, tiny_model):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "pytorch_model.bin").write_bytes(b"never read")
    config = write_config(make_config(tmp_path / "run", {"model.name": str(model)}))
    check_refused(start(config), f"{model}: has no .safetensors file (pytorch_model.bin is a pickle")
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder(tmp_path, make_config, saved):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    config = write_config(make_config(run, {"train.save_steps": 1, "train.keep": 9, "train.seed": 7}, objective="nll"))
    check_refused(start(config), f"{run}: holds another run (objective: deft -> nll; train.seed: 1 -> 7)")


def test_a_run_from_before_a_key_was_there(tmp_path, make_config, saved):
    """What it does not name has the default: today's config is the same run, another value is not."""
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["train"].pop("sparse") is None
    (run / "config.yaml").write_text(yaml.safe_dump(written))
    options = {"train.save_steps": 1, "train.keep": 9}
    assert find_run(make_config(run, options)).folder == run
    with pytest.raises(folders.FolderError, match=r"another run \(train.sparse: None -> 0.5\)"):
        find_run(make_config(run, {**options, "train.sparse": 0.5}))


def test_a_folder_that_is_no_run(tmp_path, make_config):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    check_refused(start(write_config(make_config(tmp_path / "run"))), "is not empty and no run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file")
    check_refused(start(tmp_path / "run.yaml"), "run: is not a folder")


def test_a_finished_run(tmp_path, make_config, saved):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = start(write_config(make_config(run, {"train.save_steps": 1, "train.keep": 9})))
    assert again.ended() == 0, again.output.read_text()
    assert f"{run}: already finished; its model is in {run}/model" in again.output.read_text()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    shutil.rmtree(run / "model")  # finished it is not without its result
    again = start(tmp_path / "run.yaml")
    assert again.ended() == 0, again.output.read_text()
    assert weights(run) == weights(saved)


@pytest.mark.parametrize("part", ["train", "eval"])
def test_changed_data(tmp_path, make_config, chat_file, part):
    data = tmp_path / "data.jsonl"
    shutil.copy(chat_file, data)
    settings = {f"data.{part}": [{"path": str(data)}], "train.save_steps": 1, "train.max_steps": 2}
    run = tmp_path / "run"
    config = make_config(run, settings)
    train(config)
    Run(run).set_status("running", step=1)
    data.write_text(data.read_text().replace(" plus ", " and ", 1))
    check_refused(start(write_config(config)), f"{run}: the data is not what the run began with")
    shutil.copy(chat_file, data)
    (run / "data.json").write_text('{"fingerprint": ')
    check_refused(start(tmp_path / "run.yaml"), f"{run}/data.json: is damaged; restore it")


def test_two_processes_in_one_run(tmp_path, make_config):
    run = tmp_path / "run"
    config = write_config(make_config(run, {"train.max_steps": 3000, "train.save_steps": 3000}))
    first = start(config)
    try:
        wait_for(lambda: last_record(run) > 0 or not first.process.is_alive())
        assert first.process.is_alive(), first.output.read_text()
        check_refused(second(config, tmp_path), f"{run}: another process is training this run")
    finally:
        first.process.kill()
    assert first.ended() == -signal.SIGKILL
    assert last_record(run) > 0


def second(config: Path, folder: Path) -> Started:
    copy = folder / "second.yaml"
    shutil.copy(config, copy)
    return start(copy)


def test_a_bad_row(tmp_path, make_config, chat_file):
    data = tmp_path / "data.jsonl"
    lines = chat_file.read_text().splitlines()
    lines[6] = '{"messages": [{"role": "user", "content": "no ans'
    data.write_text("\n".join(lines) + "\n")
    run = tmp_path / "run"
    config = write_config(make_config(run, {"data.train": [{"path": str(data)}]}))
    check_refused(start(config), f"{data}:7: ", "--skip-bad-rows")
    assert not run.exists()
    skipping = start(config, "--skip-bad-rows")
    assert skipping.ended() == 0, skipping.output.read_text()
    bad = [json.loads(line) for line in (run / "bad_rows.jsonl").read_text().splitlines()]
    assert len(bad) == 1 and f"{data}:7" in json.dumps(bad[0])
    assert "59 rows" in skipping.output.read_text()
