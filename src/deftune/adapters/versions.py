"""The oldest version of each stack that its adapter was tested with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {
    "llamafactory": "0.9.5", "ms-swift": "4.6.0", "axolotl": "0.21.0", "verl": "0.9.1", "torchtitan": "0.3.0",
    "megatron-core": "0.16.1",
}  # fmt: skip


def need_version(package: str) -> None:
    """Refuse a stack that is older than its adapter's tests: its trainer may compute another loss.

    A checkout that is not installed has no version and passes; the check of the first step remains.

    Args:
        package: a name of `OLDEST`.

    Raises:
        ImportError: the installed version is older.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    oldest = OLDEST[package]
    if release(found) < release(oldest):
        raise ImportError(
            f"deftune: {package} {found} is older than {oldest}, the oldest version that was tested, and may train "
            f'another loss than the objective; pip install "{package}>={oldest}"'
        )


def release(text: str) -> tuple[int, ...]:
    """The first three numbers of a version.

    >>> release("0.16.1rc2"), release("4.6")
    ((0, 16, 1), (4, 6, 0))
    """
    return tuple(map(int, [*re.findall(r"\d+", text), "0", "0"][:3]))
