"""A run's folder is looked at without being changed, is held by one process, and nothing in it reaches outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from test_faults import last_record, write_config

from deftune.artifacts import folders
from deftune.artifacts.environment import environment, git_state
from deftune.artifacts.folders import is_locked, locked
from deftune.artifacts.runs import Run, open_run
from deftune.cli import main
from deftune.selftest import tiny
from deftune.training.train import train_run
from waiting import wait_for


def snapshot(folder: Path) -> dict[str, object]:
    """Every entry below a folder with its content and times."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def hold(run: Run):
    return locked(run.folder, "training this run")


@pytest.fixture
def run(tmp_path, make_config) -> Run:
    """A run that was killed while it trained."""
    made, changed = open_run(make_config(tmp_path / "runs" / "one"))
    assert not changed
    made.set_status("running", step=3)
    return made


# --- listing ----------------------------------------------------------------------------------------------------------


def list_runs(folder: Path, capsys) -> list[dict]:
    assert main(["runs", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_listing_changes_nothing(run, capsys):
    before = snapshot(run.folder)
    assert [found["state"] for found in list_runs(run.folder.parent, capsys)] == ["interrupted"]
    assert snapshot(run.folder) == before


def test_listing_does_not_follow_a_lock_that_is_a_link(run, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    (run.folder / ".lock").symlink_to(tmp_path / "thesis.tex")
    assert [found["state"] for found in list_runs(run.folder.parent, capsys)] == ["interrupted"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ValueError, match=r"\.lock: is a link; a lock is a file of its own"), hold(run):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_dangling_link_makes_no_file(run, tmp_path, capsys):
    (run.folder / ".lock").symlink_to(tmp_path / "new")
    list_runs(run.folder.parent, capsys)
    with pytest.raises(ValueError, match="is a link"), hold(run):
        pass
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [".lock", "status.json", "config.yaml", "metrics.jsonl"])
def test_a_pipe_is_not_waited_for(run, capsys, name):
    (run.folder / name).unlink(missing_ok=True)
    os.mkfifo(run.folder / name)
    found = list_runs(run.folder.parent, capsys)
    assert len(found) == 1


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000, '{"state": {}, "step": []}', "\ud800".encode("utf-8", "surrogatepass"),
        '{"state": "running", "step": Infinity}', f'{{"state": "running", "step": 1, "nll": {"9" * 400}}}\n',
        '{"state": "\\u001b[2J", "step": 1, "nll": 1}\n',
    ],
    ids=["deep", "types", "bytes", "infinity", "huge", "escape"],
)  # fmt: skip
def test_absurd_records_are_listed(run, capsys, name, content):
    (run.folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert len(list_runs(run.folder.parent, capsys)) == 1
    for command in ("runs", "watch"):
        assert main([command, str(run.folder)]) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_a_read_only_file_system_is_listed(tmp_path, make_config, capsys):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and not subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    try:
        open_run(make_config(place / "one"))[0].set_status("running", step=1)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert [found["state"] for found in list_runs(place, capsys)] == ["interrupted"]
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_names_are_text(run, tmp_path, capsys):
    """Neither a newline nor an escape in a folder's name steers the table."""
    run.folder.rename(run.folder.with_name("a\x1b[2J[b]\nb"))
    assert main(["runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("a\\x1b[2J[b]\\nb ")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_fits_the_terminal_and_is_whole_in_a_pipe(run, tmp_path, capsys, monkeypatch, terminal):
    run.folder.rename(run.folder.with_name("long" * 30))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) == 60 and line.endswith("…") for line in lines[:2]] == [terminal] * 2
    assert [line.startswith("left out: ") for line in lines[2:]] == [True] * terminal  # columns, to save room


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_the_lock_is_not_truncated(run):
    (run.folder / ".lock").write_text("kept")
    with hold(run):
        assert is_locked(run.folder) and (run.folder / ".lock").read_text() == "kept"
    assert not is_locked(run.folder) and not (run.folder / ".lock").exists()


def test_a_second_process_is_refused(run):
    with hold(run):
        with pytest.raises(ValueError, match="another process is training this run"), hold(run):
            pass
    with hold(run):
        pass


def test_a_forked_process_does_not_hold_the_lock(run):
    """As the data workers of a run that was killed."""
    reader, writer = os.pipe()
    ready, say_ready = os.pipe()
    killed = os.fork()
    if killed == 0:
        with hold(run):
            if os.fork() == 0:
                os.close(writer)
                os.write(say_ready, b"x")
                os.read(reader, 1)  # lives until the test lets go
                os._exit(0)
            os.read(ready, 1)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    try:
        assert not is_locked(run.folder)
        with hold(run):
            assert is_locked(run.folder)
    finally:
        for handle in (writer, reader, ready, say_ready):
            os.close(handle)


def test_orphaned_data_workers_do_not_hold_the_lock(tmp_path, make_config):
    """A real run with workers is killed; a supervisor that starts it again at once finds the lock free."""
    folder = tmp_path / "run"
    rows = tiny.save_conversations(tmp_path / "rows.jsonl", 4000)  # one long epoch: each starts workers of its own
    config = write_config(make_config(folder, {
        "train.max_steps": 100_000, "train.save_steps": 10, "train.workers": 2, "data.train": [{"path": str(rows)}],
    }))  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deftune", "train", str(config)], stdout=output, stderr=output,
            start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            while last_record(folder) < 2:
                assert process.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.05)
            wait_for(lambda: len(children(process.pid)) >= 2 or process.poll() is not None)
            workers = children(process.pid)
            assert len(workers) >= 2, (tmp_path / "output").read_text()
            for worker in workers:  # they would end by themselves some seconds after their parent
                os.kill(worker, signal.SIGSTOP)
            process.kill()
            process.wait()
            assert all(Path(f"/proc/{worker}").exists() for worker in workers)
            with locked(folder, "training"):
                pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def children(process: int) -> list[int]:
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and (path / "stat").exists() and parent_of(path) == process
    ]


def parent_of(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


# --- checkpoints that cannot be read ----------------------------------------------------------------------------------


def test_a_run_whose_checkpoints_cannot_be_read_stops(tmp_path, make_config):
    """Another user's files: one line, and every file as it was."""
    folder = tmp_path / "run"
    config = make_config(folder, {"train.save_steps": 1, "train.keep": 1, "train.max_steps": 2})
    with open(os.devnull, "w") as nowhere:
        train_run(config, Console(file=nowhere))
    shutil.rmtree(folder / "model")
    Run(folder).set_status("running", step=2)
    weights = folder / "checkpoints" / "checkpoint-2" / "model.safetensors"
    command = [sys.executable, "-m", "deftune", "train", str(write_config(config))]
    if os.geteuid() == 0:  # root reads everything, unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to be refused a file")
        os.chown(weights, 12345, 12345)
        lost = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={lost}", f"--inh-caps={lost}", *command]
    weights.chmod(0 if os.geteuid() else 0o600)
    metrics = (folder / "metrics.jsonl").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    errors = [line for line in done.stderr.splitlines() if line.startswith("deftune: ")]
    assert done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"{weights}: cannot be read (Permission denied), so whether it is damaged is not known" in errors[0]
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    weights.chmod(0o600)
    folders.verify(weights.parent)


# --- the environment record -------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def repository(folder: Path, head: str = "ref: refs/heads/main\n", **files: str) -> Path:
    git = folder / ".git"
    for name, text in {"HEAD": head, "config": "[core]\n", **files}.items():
        path = git / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("head", "files"),
    [
        (f"{COMMIT}\n", {}),
        ("ref: refs/heads/main\n", {"refs/heads/main": f"{COMMIT}\n"}),
        ("ref: refs/heads/a/b\n", {"packed-refs": f"# peeled\n{'1' * 40} refs/tags/v\n{COMMIT} refs/heads/a/b\n"}),
    ],
)
def test_the_commit_is_read_without_git(tmp_path, monkeypatch, head, files):
    repository(tmp_path, head, **files)
    monkeypatch.setenv("PATH", "")
    (tmp_path / "src" / "deep").mkdir(parents=True)
    assert git_state(tmp_path / "src" / "deep") == {"commit": COMMIT}


def test_a_worktree(tmp_path):
    repository(tmp_path / "main", **{"worktrees/w/HEAD": "ref: refs/heads/w\n", "worktrees/w/commondir": "../..\n",
                                     "refs/heads/w": COMMIT})  # fmt: skip
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / ".git").write_text(f"gitdir: {tmp_path / 'main' / '.git' / 'worktrees' / 'w'}\n")
    assert git_state(tmp_path / "w") == {"commit": COMMIT}


def test_a_variable_names_the_commit_of_a_folder_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
    monkeypatch.setenv("DEFTUNE_COMMIT", COMMIT)
    assert environment()["git"] == {"commit": COMMIT}
    repository(tmp_path, **{"HEAD": COMMIT[::-1] + "\n"})  # a copy inside another repository
    assert git_state(tmp_path) == {"commit": COMMIT[::-1]} != environment()["git"] == {"commit": COMMIT}
    monkeypatch.setenv("DEFTUNE_COMMIT", COMMIT[:7])
    with pytest.raises(ValueError, match=f"DEFTUNE_COMMIT: a whole commit hash, .*; got '{COMMIT[:7]}'"):
        environment()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_gits_own(tmp_path):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert git_state(tmp_path) is None  # no commit yet
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    told = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert git_state(tmp_path) == {"commit": told.stdout.strip()}
    subprocess.run(["git", "-C", str(tmp_path), "pack-refs", "--all"], check=True)
    assert git_state(tmp_path) == {"commit": told.stdout.strip()}


@pytest.mark.parametrize(
    ("head", "files"),
    [
        ("ref: refs/../../../secret\n", {}),
        ("ref: /etc/hostname\n", {}),
        ("not a commit\n", {}),
        ("", {}),
        ("x" * 100_000, {}),
        ("ref: refs/heads/main\n", {"refs/heads/main": "ref: refs/heads/main\n"}),
    ],
)
def test_an_odd_repository_has_no_commit(tmp_path, head, files):
    repository(tmp_path, head, **files)
    (tmp_path / "secret").write_text(COMMIT)
    assert git_state(tmp_path) is None


def test_a_pipe_as_head_is_not_waited_for(tmp_path):
    repository(tmp_path)
    (tmp_path / ".git" / "HEAD").unlink()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    assert git_state(tmp_path) is None


def test_a_config_with_a_duplicate_key_is_not_resumed(run, make_config):
    text = run.config.read_text()
    run.config.write_text(text + "objective: nll\n")
    assert yaml.safe_load(run.config.read_text())["objective"] == "nll"  # PyYAML takes the last one
    with pytest.raises(ValueError, match=r"config\.yaml:\d+: duplicate key 'objective', first on line 2"):
        run.read_config()
    assert main(["train", str(run.folder)]) == 2
