"""`deftune quickstart`: what it says before it starts, and that it removes what it wrote and nothing else."""

from types import SimpleNamespace

import pytest

from deftune.cli import main
from deftune.comparison import quickstart
from deftune.comparison.quickstart import PEAK_BYTES, check_disk, clean, size_of, takes


def fill(folder):
    """What a finished call leaves."""
    for objective in ("nll", "deft"):
        (folder / objective / "model").mkdir(parents=True)
        (folder / objective / "config.yaml").write_text("{}")
        (folder / objective / "model" / "model.safetensors").write_bytes(b"x" * 1000)
        (folder / objective / "status.json").write_text('{"state": "finished", "step": 7}')
    for name in ("heldout_base.json", "heldout_nll.json", "heldout_deft.json", "quickstart.png", "quickstart.json"):
        (folder / name).write_bytes(b"y" * 10)
    return folder


def test_it_says_what_it_takes_before_it_starts(tmp_path):
    assert takes(tmp_path / "new") == (
        f"This takes about 4 minutes on two free CPU cores, and 3.8 GB of disk in {tmp_path / 'new'} while it trains, "
        f"1.1 GB afterwards"
    )
    assert takes(fill(tmp_path / "old")) == f"{tmp_path / 'old'} is trained already"


def test_a_disk_that_is_too_full_is_refused_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=PEAK_BYTES - 1))
    assert main(["quickstart", "--out", str(tmp_path / "a" / "b")]) == 2
    assert f"quickstart: needs 3.8 GB of disk, and {tmp_path} has 3.8 GB; free some" in capsys.readouterr().err
    check_disk(fill(tmp_path / "old"))  # part of it is there already
    assert not (tmp_path / "a").exists()


def test_clean_removes_what_it_wrote_and_nothing_else(tmp_path, capsys):
    folder = fill(tmp_path / "quick")
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    (elsewhere / "thesis.tex").write_text("mine")
    (folder / "deft" / "link").symlink_to(elsewhere)
    (folder / "notes.txt").write_text("mine")
    assert main(["quickstart", "--out", str(folder), "--clean"]) == 0
    assert capsys.readouterr().out == f"{folder}: 0.0 GB removed\n"
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (elsewhere / "thesis.tex").read_text() == "mine"
    (folder / "notes.txt").unlink()
    fill(folder)
    assert size_of(folder) == clean(folder) == 2 * (1000 + 2 + 32) + 50 and not folder.exists()


def test_a_folder_without_a_quickstart_is_left_alone(tmp_path, capsys):
    (tmp_path / "deft").mkdir()
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["quickstart", "--out", str(folder), "--clean"]) == 2
        assert f"{folder}: holds no quickstart; nothing is removed" in capsys.readouterr().err
    assert (tmp_path / "deft").is_dir()


def test_checkpoints_go_when_a_run_is_finished(tmp_path, monkeypatch):
    """Trained by a stand-in; the first held-out measurement ends the test."""
    from deftune.artifacts.runs import Run

    def train_run(config, console, *, title):
        run = Run(tmp_path / title)
        run.checkpoints.mkdir(parents=True)
        return SimpleNamespace(state="finished", run=run)

    def measured(*args):
        raise InterruptedError

    monkeypatch.setattr(quickstart, "train_run", train_run)
    monkeypatch.setattr(quickstart, "measure", measured)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=PEAK_BYTES))
    said = SimpleNamespace(print=lambda text, **options: lines.append(text))
    lines = []
    with pytest.raises(InterruptedError):
        quickstart.quickstart(tmp_path, said)
    assert not any(Run(tmp_path / name).checkpoints.exists() for name in ("nll", "deft"))
    assert "SmolLM2-135M-Instruct (Q4_1, dequantised) on 56 generated word problems" in lines[1]
