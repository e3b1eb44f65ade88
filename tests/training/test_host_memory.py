"""The memory that a process may take: the machine's, or what the limits of its control groups leave."""

import os

import pytest

from deftune.training.host_memory import free_memory, memory_limit

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def write_group(folder, names, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


def write_process(root, available, groups):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)


@pytest.mark.parametrize("names", [V1, V2])
def test_a_limit_of_the_container_counts(tmp_path, names):
    v1 = names is V1
    write_process(tmp_path, 3 << 20, "4:cpu,cpuacct:/a\n3:memory:/box/job\n0::/\n" if v1 else "0::/box/job\n")
    top = tmp_path / "sys/fs/cgroup" / ("memory" if v1 else "")
    write_group(top / "box/job", names, "max" if not v1 else 1 << 62, 10 << 10)
    write_group(top / "box", names, 4 << 20, 3 << 20, cached=1 << 20)  # the limit is that of a group above
    assert memory_limit(tmp_path) == 4 << 20
    assert free_memory(tmp_path) == 2 << 20  # pages of files can go
    write_group(top / "box", names, 4 << 20, 1 << 10)
    assert free_memory(tmp_path) == 3 << 20  # the machine has less


@pytest.mark.parametrize(("names", "line"), [(V1, "3:memory:/docker/1f\n"), (V2, "0::/../../1f\n")])
def test_a_container_sees_its_own_group_at_the_top(tmp_path, names, line):
    """The path of the group is the host's, which is not there."""
    write_process(tmp_path, 1 << 20, line)
    write_group(tmp_path / "sys/fs/cgroup" / ("memory" if names is V1 else ""), names, 2 << 20, 3 << 19)
    assert (memory_limit(tmp_path), free_memory(tmp_path)) == (2 << 20, 1 << 19)


def test_without_limits_the_machine_counts(tmp_path):
    assert memory_limit(tmp_path) == free_memory(tmp_path) == MACHINE
    write_process(tmp_path, 1 << 20, "0::/\n")
    assert (memory_limit(tmp_path), free_memory(tmp_path)) == (MACHINE, 1 << 20)
    assert 0 < free_memory() <= memory_limit() <= MACHINE
