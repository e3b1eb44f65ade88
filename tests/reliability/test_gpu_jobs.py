"""benchmarks/gpu.py: jobs that fail, hang, were done or do not fit; rehearsals."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_jobs", ROOT / "benchmarks/gpu.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "gpu_jobs", module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_every_job_states_what_became_of_it(gpu, tmp_path, capsys):
    soon = time.monotonic() + 60
    jobs = [
        gpu.Job("good", 5, "-c 'print(\"fine\")'", ""),
        gpu.Job("bad", 5, "-c 'raise SystemExit(3)'", ""),
        gpu.Job("slow", 600, "-c pass", ""),
        gpu.Job("hangs", 4, "-c 'import time; print(\"begun\"); time.sleep(600)'", "", timed=False),
        gpu.Job("old", 5, "-c 'raise SystemExit(1)'", ""),
    ]
    (tmp_path / "old.done").write_text("4 s\n")
    folders = {"DATA": "/d", "MODELS": "/m", "OUT": str(tmp_path)}
    assert gpu.run_all(jobs, folders, tmp_path, soon) is False
    said = [line.split(" after")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["good: finished", "bad: exit code 3", "slow: passed over, 600 s are more than is left",
                    "old: done before", "hangs: stopped at its limit"]  # fmt: skip
    assert sorted(path.stem for path in tmp_path.glob("*.done")) == ["good", "old"]
    assert "begun" in (tmp_path / "hangs.log").read_text()  # a kill loses no output
    assert gpu.run_all(jobs[:1], folders, tmp_path, soon) is True


def test_the_peak_of_a_peer_survives_its_resets(monkeypatch):
    """axolotl resets torch's count at every log; a GPU is not needed to see that the largest peak is kept."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    peer_training = importlib.import_module("peer_training")
    peaks = iter([3 * 2**30, 5 * 2**30, 2**30])
    resets = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: resets.append(1))
    peak = peer_training.PeakMemory()
    peak.watch()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
    assert len(resets) == 3 and peak.gib(2.0) == 5.0 and peak.gib(7.0) == 7.0


def test_no_job_runs_beyond_the_budget(gpu, tmp_path, capsys):
    job = gpu.Job("late", 1, "-c 'import time; time.sleep(600)'", "")
    assert gpu.run(job, gpu.line_of(job, {"OUT": ""}), tmp_path, time.monotonic() + 1) is False
    assert capsys.readouterr().out.startswith("late: stopped at its limit after ")


def test_a_rehearsal_is_the_same_command_with_small_sizes(gpu, tmp_path):
    folders = {"DATA": "/OUT/data", "MODELS": "/m", "OUT": "/o", "PEERS": "/p"}
    for job in gpu.JOBS:
        line, small = gpu.line_of(job, folders), gpu.line_of(job, folders, small=True)
        assert small.endswith(job.small) and "qwen2.5-coder-1.5b" not in small and "gemma-3-270m.gguf" not in small
        assert not {"DATA", "MODELS", "PEERS", "GPU_TESTS"} & set(line.replace("/", " ").split())
    assert "/OUT/data/gsm8k" in gpu.line_of(gpu.JOBS[1], folders)  # a folder's own name is left as it is
    job = gpu.Job("good", 5, "-c pass", "")
    assert gpu.run_all([job], folders, tmp_path, time.monotonic() + 60, small=True) is True
    assert not (tmp_path / "good.done").exists()


def test_jobs_with_committed_results_or_without_their_packages_are_passed_over(gpu):
    jobs = [
        gpu.Job("new", 5, "-c pass", ""),
        gpu.Job("measured", 5, "-c pass", "", committed="shards_h200.json"),
        gpu.Job("not yet", 5, "-c pass", "", committed="nothing.json"),
        gpu.Job("peers", 5, "-c pass --peer a=PEERS/a", ""),
    ]
    left, passed = gpu.chosen(jobs, {"DATA": "/d"}, again=False)
    assert [job.name for job in left] == ["new", "not yet"]
    assert passed == {
        "measured": "benchmarks/results/shards_h200.json has its result (--again)",
        "peers": "it needs the packages of other stacks (--peers)",
    }
    left, passed = gpu.chosen(jobs, {"DATA": "/d", "PEERS": "/p"}, again=True)
    assert left == jobs and passed == {}
    assert all((ROOT / "benchmarks/results" / job.committed).exists() for job in gpu.JOBS if job.committed)


def test_one_run_at_a_time_uses_a_folder(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda *_, **__: [])
    inside = []

    def run_all(*_, **__):
        inside.append(gpu.main() if not inside else None)
        return True

    monkeypatch.setattr(gpu, "run_all", run_all)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--data", "d", "--models", "m", "--out", str(tmp_path)])
    assert gpu.main() == 0 and inside == [1]
    assert "another run is using this folder" in capsys.readouterr().err
    assert (tmp_path / "gpu.done").read_text() == "all finished\n"
