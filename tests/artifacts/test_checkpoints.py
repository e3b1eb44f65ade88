"""Checkpoints: whatever happens to the files after sealing is noticed, and an older whole one is used instead."""

import errno
import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from deftune.artifacts.checkpoints import (
    PREFIX,
    STAGING,
    checkpoints,
    clear_staging,
    latest,
    rotate,
    set_aside,
    staged,
)
from deftune.artifacts.folders import (
    MANIFEST,
    FolderError,
    UnreadableError,
    disk_error,
    render_manifest,
    seal,
    sealed_folder,
    verify,
)

FILES = {
    "model.safetensors": bytes(range(256)) * 4,
    "optimizer.pt": random.Random(0).randbytes(700),
    "trainer_state.json": b'{"global_step": 3}',
    "empty": b"",
    "one": b"\x00",
    "state/rank-0.pt": random.Random(1).randbytes(60),
    "state/rank-1.pt": random.Random(2).randbytes(60),
    "gr\u00fc\u00dfe.json": b"{}",  # escaped in the manifest
}


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write(root: Path, step: int) -> Path:
    with staged(root, step) as folder:
        fill(folder)
    return root / f"{PREFIX}{step}"


# --- sealing and verifying --------------------------------------------------------------------------------------------


def test_files_get_the_permissions_of_their_folder(tmp_path):
    """safetensors 0.8 writes files that only their owner can read, whatever the umask."""
    for mode in (0o755, 0o700):
        folder = tmp_path / f"{mode:o}"
        with sealed_folder(tmp_path / "staging", folder) as staging:
            staging.chmod(mode)
            (staging / "model.safetensors").write_bytes(b"weights")
            (staging / "model.safetensors").chmod(0o600)
        assert (folder / "model.safetensors").stat().st_mode & 0o777 == mode & 0o666
        verify(folder)


def test_a_sealed_folder_verifies(tmp_path):
    fill(tmp_path)
    seal(tmp_path, step=3, note="\u00e9")
    facts = verify(tmp_path)
    assert (facts["step"], facts["note"]) == (3, "\u00e9")
    assert facts["files"].keys() == FILES.keys()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def flip(folder: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in folder.rglob("*") if path.is_file() and path.stat().st_size])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def flip_manifest(folder: Path, draw: random.Random) -> None:
    content = bytearray((folder / MANIFEST).read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    (folder / MANIFEST).write_bytes(content)


def truncate(folder: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in folder.rglob("*") if path.is_file() and path.stat().st_size])
    os.truncate(path, draw.randrange(path.stat().st_size))


def extend(folder: Path, draw: random.Random) -> None:
    path = draw.choice([path for path in folder.rglob("*") if path.is_file()])
    with path.open("ab") as file:
        file.write(draw.choice([b"\x00", b" ", b"\n", draw.randbytes(9)]))


def delete(folder: Path, draw: random.Random) -> None:
    draw.choice([path for path in folder.rglob("*") if path.is_file()]).unlink()


def add(folder: Path, draw: random.Random) -> None:
    place = draw.choice([folder, folder / "state", folder / "more"])
    place.mkdir(exist_ok=True)
    (place / draw.choice(["model-2.safetensors", "__init__.py", ".hidden", MANIFEST + ".bak"])).write_bytes(b"x")


def swap(folder: Path, draw: random.Random) -> None:
    names = [name for name in FILES if name != "empty"]
    one, other = draw.sample(names, 2)
    (folder / one).write_bytes(FILES[other])
    (folder / other).write_bytes(FILES[one])


def rename(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(list(FILES))
    path.rename(path.with_name(path.name + "x"))


def overwrite(folder: Path, draw: random.Random) -> None:  # with as many bytes
    path = draw.choice([folder / name for name, content in FILES.items() if len(content) > 8])
    path.write_bytes(draw.randbytes(path.stat().st_size))


def link(folder: Path, draw: random.Random) -> None:  # to the same content
    path = folder / draw.choice([*FILES, MANIFEST])
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


DAMAGES = [flip, flip, flip, flip_manifest, truncate, extend, delete, add, swap, rename, overwrite, link]


def test_a_thousand_damages_are_all_detected(tmp_path):
    draw = random.Random(17)
    sealed = tmp_path / "sealed"
    fill(sealed)
    seal(sealed, step=3)
    copy = tmp_path / "copy"
    for number in range(1000):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sealed, copy)
        damage = draw.choice(DAMAGES)
        damage(copy, draw)
        with pytest.raises(FolderError):
            verify(copy)
            pytest.fail(f"damage {number} ({damage.__name__}) went unnoticed")
    verify(sealed)


def test_every_bit_of_the_manifest_counts(tmp_path):
    (tmp_path / "gr\u00fc\u00dfe").write_bytes(b"x")
    seal(tmp_path)
    manifest = tmp_path / MANIFEST
    content = manifest.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            manifest.write_bytes(changed)
            with pytest.raises(FolderError):
                verify(tmp_path)


def signed(content: object) -> str:
    """A manifest whose checksum is right, whatever is in it."""
    return render_manifest(content if isinstance(content, str) else json.dumps(content))


ABSURD = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a number": "3",
    "not UTF-8": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "huge number": '{"content": ' + "9" * 5000 + "}",
    "no content": '{"sha256": ""}',
    "content no text": '{"sha256": "", "content": 3}',
    "lone surrogate": '{"sha256": "", "content": "\\ud800"}',
    "signed null": signed("null"),
    "signed list": signed([]),
    "signed deep": signed("[" * 100_000),
    "no files": signed({"step": 3}),
    "files a list": signed({"files": ["a", "b"]}),
    "files a number": signed({"files": 3}),
    "entry a number": signed({"files": {"a": 3}}),
    "entry a list": signed({"files": {"a": [1, 2]}}),
    "entry a text": signed({"files": {"a": "bytes"}}),
    "entry empty": signed({"files": {"a": {}}}),
    "bytes a text": signed({"files": {"a": {"bytes": "1", "sha256": "x"}}}),
    "sha256 a list": signed({"files": {"a": {"bytes": 1, "sha256": []}}}),
    "traversal": signed({"files": {"../outside": {"bytes": 1, "sha256": "x"}}}),
    "traversal inside": signed({"files": {"a/../a": {"bytes": 1, "sha256": "x"}}}),
    "absolute": signed({"files": {"/etc/passwd": {"bytes": 1, "sha256": "x"}}}),
    "itself": signed({"files": {"manifest.json": {"bytes": 1, "sha256": "x"}}}),
    "empty name": signed({"files": {"": {"bytes": 1, "sha256": "x"}}}),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_manifest_is_an_error(tmp_path, name):
    (tmp_path / "outside").write_bytes(b"x")
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "a").write_bytes(b"x")
    content = ABSURD[name]
    (folder / MANIFEST).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FolderError, match="checkpoint-3"):
        verify(folder)


def test_links_and_pipes_are_refused(tmp_path):
    whole = write(tmp_path, 1)
    (tmp_path / f"{PREFIX}2").symlink_to(whole)  # a checkpoint that is a link itself
    notices: list[str] = []
    assert latest(tmp_path, notices.append) == whole
    assert "is a link; a sealed folder holds none" in notices[0]
    os.mkfifo(whole / "pipe")
    with pytest.raises(FolderError, match="pipe: is neither a file nor a folder"):
        verify(whole)
    (whole / "pipe").unlink()
    (whole / "state" / "away").symlink_to(tmp_path)
    with pytest.raises(FolderError, match="away: is a link; a sealed folder holds none"):
        verify(whole)
    with pytest.raises(FolderError, match="away: is a link; a sealed folder holds none"):
        seal(whole)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_latest_falls_back_with_a_notice(tmp_path):
    for step in (2, 10, 9):
        write(tmp_path, step)
    notices: list[str] = []
    assert latest(tmp_path, notices.append) == tmp_path / "checkpoint-10"
    assert notices == []
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_bytes(b"short")
    (tmp_path / "checkpoint-9" / MANIFEST).unlink()
    assert latest(tmp_path, notices.append) == tmp_path / "checkpoint-2"
    assert notices == [
        f"passing over a checkpoint: {tmp_path}/checkpoint-10/optimizer.pt: is damaged (5 bytes where 700 were "
        "written)",
        f"passing over a checkpoint: {tmp_path}/checkpoint-9: has no manifest.json; it was not written to the end",
    ]
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(FolderError, match=r"none of its checkpoints \(2\) is as it was written.* with --restart"):
        latest(tmp_path, notices.append)
    assert steps(tmp_path) == [9, 10]


def test_latest_of_nothing(tmp_path):
    assert latest(tmp_path / "none", pytest.fail) is None
    (tmp_path / "checkpoint-7").write_text("a file")
    for name in ("checkpoint-", "checkpoint-x", "checkpoint--1", "other-3", f"{STAGING}4"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path, pytest.fail) is None


def test_a_renamed_checkpoint_is_passed_over(tmp_path):
    write(tmp_path, 3)
    write(tmp_path, 5).rename(tmp_path / "checkpoint-50")
    notices: list[str] = []
    assert latest(tmp_path, notices.append) == tmp_path / "checkpoint-3"
    assert "checkpoint-50: holds step 5, not the one in its name" in notices[0]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EPERM])
@pytest.mark.parametrize("place", ["a file", "the manifest", "a folder"])
def test_an_unreadable_checkpoint_stops(tmp_path, monkeypatch, number, place):
    """It may be a good one: an older one, or the beginning, would replace it."""
    write(tmp_path, 3)
    write(tmp_path, 5)
    bad = tmp_path / "checkpoint-5" / {"a file": "optimizer.pt", "the manifest": MANIFEST, "a folder": "state"}[place]
    real_open, real_scandir = io.open, os.scandir

    def fail(path):
        if str(path) == str(bad):
            raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(io, "open", lambda path, *a, **k: (fail(path), real_open(path, *a, **k))[1])
    monkeypatch.setattr(os, "scandir", lambda path: (fail(path), real_scandir(path))[1])
    with pytest.raises(UnreadableError) as caught:
        latest(tmp_path, pytest.fail)
    assert str(caught.value) == (
        f"{bad}: cannot be read ({os.strerror(number)}), so whether it is damaged is not known; make it readable to "
        f"this user, or move it away"
    )
    assert steps(tmp_path) == [3, 5]


def test_checkpoints_are_set_aside(tmp_path):
    root = tmp_path / "checkpoints"
    assert set_aside(root) is None
    for number in (1, 2):
        write(root, 3)
        assert set_aside(root) == tmp_path / f"checkpoints.old-{number}"
        assert not root.exists()
        verify(tmp_path / f"checkpoints.old-{number}" / "checkpoint-3")
    (root / f"{STAGING}4").mkdir(parents=True)
    assert set_aside(root) is None


# --- removing ---------------------------------------------------------------------------------------------------------


def steps(root: Path) -> list[int]:
    return [int(folder.name.removeprefix(PREFIX)) for folder in checkpoints(root)]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (9, 1, [1, 2, 3, 4, 5]),
        (2, None, [4, 5]),
        (1, None, [5]),
        (2, 2, [2, 4, 5]),  # the best one stays besides
        (1, 2, [2, 5]),  # the newest is what a resume needs
        (3, 5, [3, 4, 5]),
        (1, 5, [5]),
        (2, 77, [4, 5]),  # a best one that is gone takes no room
    ],
)
def test_rotate_keeps_the_newest_and_the_best(tmp_path, keep, best, left):
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    rotate(tmp_path, keep, best, newest=5)
    assert steps(tmp_path) == left
    for folder in checkpoints(tmp_path):
        verify(folder)


@pytest.mark.parametrize(("best", "left"), [(None, [1, 3, 5]), (2, [1, 2, 3, 5]), (3, [1, 3, 5])])
def test_rotate_keeps_what_is_pinned(tmp_path, best, left):
    """Beside the one that is kept, and without taking its room."""
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    rotate(tmp_path, 1, best, newest=5, pinned=(1, 3))
    assert steps(tmp_path) == left


def test_rotate_leaves_a_later_checkpoint_until_the_run_is_past_it(tmp_path):
    write(tmp_path, 40)  # damaged, so that the run was resumed from before it
    (tmp_path / "checkpoint-40" / "optimizer.pt").unlink()
    write(tmp_path, 10)
    rotate(tmp_path, 1, None, newest=10)
    assert steps(tmp_path) == [10, 40]
    write(tmp_path, 41)
    rotate(tmp_path, 1, None, newest=41)
    assert steps(tmp_path) == [41]


@pytest.mark.parametrize("what", ["missing", "without a manifest", "a file short"])
def test_rotate_removes_nothing_without_a_whole_newest(tmp_path, what):
    for step in (1, 2, 3):
        write(tmp_path, step)
    newest = tmp_path / "checkpoint-3"
    if what == "missing":
        shutil.rmtree(newest)
    else:
        (newest / (MANIFEST if what == "without a manifest" else "optimizer.pt")).unlink()
    before = steps(tmp_path)
    rotate(tmp_path, 1, None, newest=3)
    assert steps(tmp_path) == before


def test_a_removal_cut_short_leaves_nothing_that_verifies(tmp_path, monkeypatch):
    for step in (1, 2):
        write(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # the kill comes here
    rotate(tmp_path, 1, None, newest=2)
    with pytest.raises(FolderError, match="has no manifest"):
        verify(tmp_path / "checkpoint-1")


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt), staged(tmp_path, 2) as folder:
        fill(folder)
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    verify(tmp_path / "checkpoint-1")


def test_what_a_killed_run_left_is_cleared(tmp_path):
    for name in (f"{STAGING}2", f"{STAGING}3"):
        (tmp_path / name / "checkpoint-3").mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    write(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert "checkpoint-3" not in verify(tmp_path / "checkpoint-3")["files"]
    (tmp_path / f"{STAGING}9").mkdir()
    clear_staging(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_sealed_folder_takes_over_a_stale_one(tmp_path):
    (tmp_path / ".model").mkdir()
    (tmp_path / ".model" / "half").write_bytes(b"x")
    with sealed_folder(tmp_path / ".model", tmp_path / "model") as folder:
        fill(folder)
    assert verify(tmp_path / "model")["files"].keys() == FILES.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_same_step_again_replaces_a_damaged_one(tmp_path):
    (write(tmp_path, 3) / "optimizer.pt").unlink()
    verify(write(tmp_path, 3))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "Disk quota exceeded"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "File too large"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 198272 vs 198160"), "may be full"),
        (RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"), "may be full"),
        (RuntimeError("basic_ios::clear: iostream error"), "may be full"),
    ],
)
def test_a_full_disk_is_named(tmp_path, error, reason):
    write(tmp_path, 1)
    with pytest.raises(FolderError, match=f"the checkpoint of step 2 could not be written .*{reason}") as found:
        with staged(tmp_path, 2):
            raise error
    assert "the last one, checkpoint-1, is untouched" in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    assert disk_error(RuntimeError("CUDA out of memory")) == ""
    with pytest.raises(RuntimeError, match="CUDA"), staged(tmp_path, 2):
        raise RuntimeError("CUDA out of memory")


def test_files_are_synced_before_the_manifest_and_the_rename(tmp_path, monkeypatch):
    """What a power cut could lose: nothing that the manifest names, and no name."""
    seen: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle):
        seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).relative_to(tmp_path)}")
        real_fsync(handle)

    def replace(source, target):
        seen.append(f"rename {Path(target).relative_to(tmp_path)}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with staged(tmp_path, 5) as folder:
        (folder / "sub").mkdir()
        (folder / "a").write_bytes(b"x")
        (folder / "sub" / "b").write_bytes(b"x")
    assert seen == [
        f"sync {STAGING}5/a",
        f"sync {STAGING}5/sub/b",
        f"sync {STAGING}5/sub",
        f"sync {STAGING}5/.manifest.json.writing",
        f"rename {STAGING}5/manifest.json",
        f"sync {STAGING}5",
        "rename checkpoint-5",
        "sync .",
    ]
