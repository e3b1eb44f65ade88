"""Ctrl-C while torch is imported: its C++ code drops a KeyboardInterrupt, or aborts the process."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


@contextmanager
def interrupts_held() -> Generator[None]:
    """A Ctrl-C inside is raised at the end; a second one ends the process at once."""
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    is_main = threading.current_thread() is threading.main_thread()  # which alone receives signals
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the business of another
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


class ImportedWhole(MetaPathFinder):
    """Finds one module as the other finders do; it is then imported with interrupts held.

    Args:
        name: of the module.
    """

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def held(module: Any) -> None:
                with interrupts_held():
                    execute(module)

            loader.exec_module = held
        return spec


def hold_interrupts_of(name: str) -> None:
    """Hold interrupts while a module is imported, whenever that will be; nothing where it has been."""
    known = any(isinstance(finder, ImportedWhole) and finder.name == name for finder in sys.meta_path)
    if name not in sys.modules and not known:
        sys.meta_path.insert(0, ImportedWhole(name))
