"""How much of this machine's memory a process may still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# in cgroup v2 and v1: the files with a group's limit and use, and the entry of memory.stat that can be reclaimed
GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of memory that this process could ever have: the machine's, or the limit of its container."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _groups(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the machine has available, or what its container's limit leaves."""
    free = [max(0, limit - used) for limit, used in _groups(root)]
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except OSError:  # not Linux
        pass
    return min([memory_limit(root), *free])


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes used) of each control group that this process is in, and of the groups above it; Linux only."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        kind = "" if not controllers else "memory" if "memory" in controllers.split(",") else None
        if kind is None:
            continue
        top = root / "sys/fs/cgroup" / kind
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            if found := _group(place, *GROUP_FILES[kind]):
                yield found
            if place == top:
                break


def _group(folder: Path, limit: str, used: str, reclaimable: str) -> tuple[int, int] | None:
    try:
        most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if most == "max" else (int(most), taken - int(counts.get(reclaimable, 0)))
    except (OSError, ValueError):  # the host's group, which a container does not see
        return None
