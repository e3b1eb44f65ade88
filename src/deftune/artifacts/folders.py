"""Folders that belong to fixed settings: one writing process at a time, settings that must match, sealed contents.

Runs, evaluation results, comparisons and cells are such folders. What must be whole or absent (a checkpoint, a model,
an entry of the cache) is *sealed*: written into a folder whose name starts with a dot, its files synced to disk, then
`manifest.json` with the size and sha256 of each file, then one rename that makes the folder visible. A reader accepts
only what the manifest confirms, so a kill at any moment costs at most the folder being written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deftune.artifacts.files import sync, write_atomic

LOCK = ".lock"
LOCK_SECONDS = 1.0  # how long to wait for a lock: `deftune runs` holds it for a moment to see whether it is free
WAITING_SECONDS = 15.0  # between two lines that say what a process waits for
LEFTOVER_SECONDS = 24 * 3600.0  # without a change, after which nobody is writing into a staging folder
MANIFEST = "manifest.json"


class FolderError(ValueError):
    """A folder that holds something else, could not be written, or is not as it was written."""


class UnreadableError(FolderError):
    """A folder that may be good, but that this process cannot read: another user's, or on a failing disk."""


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of folder that is continued only with the settings that it was begun with.

    >>> Kind("run", "config.yaml", "--set run=...").refuse_changes(Path("runs/a"), {"seed": 1}, {"seed": 2})
    Traceback (most recent call last):
        ...
    deftune.artifacts.folders.FolderError: runs/a: holds another run (seed: 1 -> 2); choose another folder with \
--set run=...
    """

    name: str
    settings: str  # the file that holds the settings
    option: str  # how a user names another folder

    def is_begun(self, folder: Path, beginning: Collection[str] = ()) -> bool:
        """Whether the folder has settings. A folder with other contents is refused.

        ``beginning`` names the files that a process leaves if it is killed before it has written the settings.
        """
        if (folder / self.settings).exists():
            return True
        if os.path.lexists(folder) and not folder.is_dir():
            raise FolderError(f"{folder}: is not a folder; choose another with {self.option}")
        if folder.is_dir() and {path.name for path in folder.iterdir()} - {LOCK, *beginning}:
            raise FolderError(f"{folder}: is not empty and no {self.name}; choose another folder with {self.option}")
        return False

    def refuse_changes(self, folder: Path, before: Any, now: Any, *further: str) -> None:
        """Refuse settings that differ from those of the folder, with the differences named."""
        if changed := [*differences(before, now), *further]:
            raise FolderError(
                f"{folder}: holds another {self.name} ({'; '.join(changed[:4])}); choose another folder with "
                f"{self.option}"
            )


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """What changed between two settings, as `key: old -> new`.

    >>> differences({"train": [{"path": "a", "limit": 3}]}, {"train": [{"path": "a", "limit": 4}]})
    ['train.0.limit: 3 -> 4']
    >>> differences({"train": [{"path": "a"}]}, {"train": [{"path": "a"}, {"path": "b"}]})
    ['train: 1 entries -> 2']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [d for key in keys for d in differences(before.get(key), now.get(key), f"{place}.{key}".lstrip("."))]
    if isinstance(before, list) and isinstance(now, list) and any(isinstance(entry, dict) for entry in [*before, *now]):
        if len(before) != len(now):
            return [f"{place}: {len(before)} entries -> {len(now)}"]
        return [d for i, pair in enumerate(zip(before, now)) for d in differences(*pair, f"{place}.{i}")]
    return [] if before == now else [f"{place}: {before} -> {now}"]


# --- one writing process ----------------------------------------------------------------------------------------------

_held: set[int] = set()  # descriptors of the locks that this process holds


def _close_held() -> None:
    """In a forked process, such as a data worker: a descriptor left open would keep the lock of a killed parent."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_held)


@contextmanager
def locked(folder: Path, doing: str) -> Generator[None]:
    """Keep other processes out of a folder; ``doing`` ends the sentence "another process is ...".

    Raises:
        FolderError: another process holds the lock, or the lock is a link.
    """

    def wait(seconds: float) -> None:
        if seconds > LOCK_SECONDS:
            raise FolderError(f"{folder}: another process is {doing}; wait until it ends, or choose another folder")

    folder.mkdir(parents=True, exist_ok=True)
    with locked_file(folder / LOCK, wait):
        yield


@contextmanager
def locked_file(path: Path, wait: Callable[[float], None]) -> Generator[None]:
    """Hold the lock that a file stands for. The file is made, never followed as a link, and removed at the end.

    The lock ends with its process, however that ends, and forked processes do not hold it. ``wait`` is called with the
    seconds waited so far each time another process holds the lock; it raises to give up.
    """
    start = time.monotonic()
    while True:
        handle = _open_lock(path)
        try:
            while not _try_lock(path, handle, fcntl.LOCK_EX):
                wait(time.monotonic() - start)
                time.sleep(0.02)
            if _is_file(path, handle):
                break
        except BaseException:
            _release(handle)
            raise
        _release(handle)  # the process that held the lock removed its file: this lock keeps nobody out
    try:
        yield
    finally:
        if handle in _held:  # not in a forked process, which has closed it
            with suppress(OSError):
                if _is_file(path, handle):  # the holder may have removed it with its folder, and another made a new one
                    path.unlink()
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # for a process forked this moment, too
            _release(handle)


def waiting(notice: Callable[[str], None], doing: str) -> Callable[[float], None]:
    """A function for `locked_file` that says now and then: another process is ``doing``."""
    last = -WAITING_SECONDS

    def wait(seconds: float) -> None:
        nonlocal last
        if seconds - last >= WAITING_SECONDS:
            notice(f"another process is {doing}: waiting for it")
            last = seconds

    return wait


@contextmanager
def one_at_a_time(path: Path, notice: Callable[[str], None], doing: str) -> Generator[None]:
    """Wait for other processes inside with the same ``path``; nobody waits where its folder cannot be written."""
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked_file(path, waiting(notice, doing)))
        yield


def _open_lock(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FolderError(f"{path}: is a link; a lock is a file of its own. Remove the link") from error
        raise
    _held.add(handle)
    return handle


def _release(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _is_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _try_lock(path: Path, handle: int, kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"cannot be locked ({error.strerror})", str(path)) from error


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder's lock now. Nothing is written, and no link is followed."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return False
        raise
    try:
        return not _try_lock(path, handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


# --- sealed contents --------------------------------------------------------------------------------------------------


@contextmanager
def sealed_folder(staging: Path, final: Path, **facts: Any) -> Generator[Path]:
    """A folder to write into. On success it is sealed and becomes ``final``; on failure nothing of it is left."""
    shutil.rmtree(staging, ignore_errors=True)  # of a killed run
    staging.mkdir(parents=True)
    try:
        yield staging
        seal(staging, **facts)
        if final.exists():  # a damaged one, or the same once more
            remove(final)
        os.replace(staging, final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def seal(folder: Path, **facts: Any) -> None:
    """Give a folder's files the folder's own permissions, sync them, and write the manifest."""
    entries: dict[str, dict[str, Any]] = {}
    mode = folder.stat().st_mode & 0o666  # that of the umask; safetensors writes files that only their owner can read
    for path in files_of(folder):
        with suppress(OSError):  # of a file system without permissions
            path.chmod(mode)
        sync(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    text = json.dumps({**facts, "files": entries}, indent=1, sort_keys=True)
    write_atomic(folder / MANIFEST, render_manifest(text))


def verify(folder: Path, *, hashes: bool = True) -> dict[str, Any]:
    """Check that a folder is as it was sealed: its manifest, the names and sizes of its files, and their sha256.

    Args:
        folder: a sealed folder.
        hashes: False leaves the sha256 out, which takes a second or more for each GB of weights; files are opened only.

    Returns:
        The facts that the folder was sealed with, and under "files" the size and sha256 of each file.

    Raises:
        FolderError: the folder is not as it was sealed.
        UnreadableError: the system did not let this process read the folder.
    """
    facts, entries = read_manifest(folder / MANIFEST)
    try:
        found = {path.relative_to(folder).as_posix() for path in files_of(folder)}
        if found != set(entries):
            odd = ", ".join(sorted(found ^ set(entries))[:3])
            raise FolderError(f"{folder}: files missing or too many: {odd}")
        for name, (size, digest) in entries.items():
            path = folder / name
            if path.stat().st_size != size:
                raise FolderError(f"{path}: is damaged ({path.stat().st_size} bytes where {size} were written)")
            if not hashes:
                path.open("rb").close()  # safetensors reports a file that it may not read as missing
            elif sha256(path) != digest:
                raise FolderError(f"{path}: is damaged (its sha256 is not the one written)")
    except OSError as error:
        raise _unverified(folder, error) from error
    except RecursionError as error:
        raise FolderError(f"{folder}: folders nested too deep") from error
    return facts


def read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """(facts, {file: (bytes, sha256)}) of a manifest that is as it was written."""
    try:
        raw = path.read_text(encoding="utf-8")
        text = json.loads(raw)["content"]
        if raw != render_manifest(text):
            raise FolderError(f"{path}: does not match its own checksum")
        facts = json.loads(text)
        entries = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in facts["files"].items()}
    except FileNotFoundError as error:
        raise FolderError(f"{path.parent}: has no {MANIFEST}; it was not written to the end") from error
    except FolderError:
        raise
    except OSError as error:
        raise _unverified(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FolderError(f"{path}: is damaged ({error})") from error
    return facts, entries


def render_manifest(text: str) -> str:
    """The manifest's content with its own checksum."""
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})


# errors of the system that show damage; after any other error a file may still be whole
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def _unverified(path: Path, error: OSError) -> FolderError:
    """The error of a file that the system did not let this process read."""
    if error.errno in _DAMAGE:
        return FolderError(f"{path}: is damaged ({error})")
    return UnreadableError(
        f"{error.filename or path}: cannot be read ({error.strerror or error}), so whether it is damaged is not known; "
        f"make it readable to this user, or move it away"
    )


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder but its manifest, sorted by name; links, pipes and devices are refused."""
    found: list[Path] = []
    inside = [Path(place) / name for place, folders, files in _walk(folder) for name in (*folders, *files)]
    for path in [folder, *sorted(inside)]:
        if path.is_symlink():
            raise FolderError(f"{path}: is a link; a sealed folder holds none")
        if path.is_file():
            found.append(path)
        elif not path.is_dir():
            raise FolderError(f"{path}: is neither a file nor a folder")
    return [path for path in found if path != folder / MANIFEST]


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk, which would leave out a folder that it cannot read."""

    def fail(error: OSError) -> None:
        raise error

    return os.walk(folder, onerror=fail)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(folder: Path) -> None:
    """Remove a sealed folder: first its manifest, without which it no longer counts, then the rest."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def clear_leftovers(root: Path) -> None:
    """Remove the staging folders (.NAME-PID) of killed processes from a cache: those without a change for a day."""
    for folder in root.glob(".*-*"):
        with suppress(OSError):
            is_old = time.time() - folder.stat().st_mtime > LEFTOVER_SECONDS
            if is_old and folder.is_dir() and not folder.is_symlink() and folder.name.rpartition("-")[2].isdecimal():
                shutil.rmtree(folder)


def disk_error(error: BaseException) -> str:
    """The message of a full or failing disk, through whatever library it came; '' for any other error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
        if os.strerror(number) in text:
            return os.strerror(number)
    # torch's writer does not pass on the message of the system
    torch_failed = any(words in text for words in ("PytorchStreamWriter", "inline_container.cc", "iostream error"))
    return "torch could not write a file; the disk may be full" if torch_failed else ""
