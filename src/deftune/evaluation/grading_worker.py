"""The worker process of a `Grader`: this file runs as a program and imports nothing of deftune.

It reads a line of JSON per pair, [gold, answer, relative, absolute, `Pair.percentage`, the words between the parts of
each], and answers ["equal" | "close" | "different", what math-verify could read]. Its limits and its audit
hook are described in `deftune.evaluation.grading`, what is equal in `equality`, the only other file of deftune's that
is loaded here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

REFUSED = 77
# What no answer needs. An event of these ends the worker at once, whoever catches exceptions above it.
_FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
    "os.putenv",
    "os.setxattr",
    "shutil.",
    "tempfile.",
    "ctypes.",
    "urllib.",
    "http.",
    "ftplib.",
    "smtplib.",
    "pty.",
    "resource.setrlimit",
    "sys.addaudithook",
    "code.__new__",
    "webbrowser.",
    "builtins.input",
    "builtins.breakpoint",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _refuse(libraries: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
            if flags & _WRITES or not os.path.normpath(name).startswith(libraries):
                os._exit(REFUSED)
        elif event.startswith(_FORBIDDEN):
            os._exit(REFUSED)

    return hook


def _limit(memory_mib: int) -> None:
    import resource

    for name, value in (
        ("RLIMIT_AS", memory_mib << 20),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", 0),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            if name != "RLIMIT_NPROC" and sys.platform == "linux":
                raise


def _expression(parsed: list[Any]) -> Any:
    """The expression that math-verify parsed, or None."""
    return next((part for part in parsed if not isinstance(part, str)), None)


def _load_equality() -> Any:
    """The module beside this file, without importing deftune (and torch with it)."""
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "equality.py")
    spec = importlib.util.spec_from_file_location("equality", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_judge() -> Callable[..., list[str]]:
    """What decides on a task, with the same arguments as a line for the worker; it imports math-verify."""
    import dataclasses

    from math_verify import LatexExtractionConfig, parse, verify

    equality = _load_equality()
    # The whole box, as LaTeX, or nothing: by default math-verify picks numbers out of text that it cannot parse.
    # Units are split off before: math-verify would take the m of 6m for a unit.
    normalization = dataclasses.replace(LatexExtractionConfig().normalization_config, units=False)
    whole = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)]

    def read(text: str) -> list[Any]:
        return parse(text, whole, extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]

    def same(gold: Any, answer: Any) -> bool:
        return verify(gold, answer, timeout_seconds=None)

    def compare(
        gold: list[Any], answer: list[Any], relative: float, absolute: float, percentage: str, words: tuple[str, str]
    ) -> str:
        comparison = equality.Comparison(same, relative, absolute)
        one, other = _expression(gold), _expression(answer)
        if one is None or other is None:  # equal text is equal, whatever it means
            return "equal" if not percentage and same(gold, answer) else "different"
        try:
            one, other = equality.joined(one, words[0]), equality.joined(other, words[1])
            found = equality.DIFFERENT if percentage == "gold" else comparison.compare(one, other)
            if percentage and found == equality.DIFFERENT:  # 50% is 1/2
                one, other = (one, other / 100) if percentage == "answer" else (equality.hundredth(one), other)
                found = comparison.compare(one, other)
        except Exception:  # sympy raises whatever it likes on odd expressions
            return "different"
        return {equality.EQUAL: "equal", equality.CLOSE: "close"}.get(found, "different")

    def judge(
        gold_text: str, answer_text: str, relative: float, absolute: float, percentage: str, words: tuple[str, str]
    ) -> list[str]:
        gold, answer = read(gold_text), read(answer_text)
        unread = [name for name, parsed in (("gold", gold), ("answer", answer)) if _expression(parsed) is None]
        return [compare(gold, answer, relative, absolute, percentage, words), " and the ".join(unread) or "both"]

    return judge


def _work(tasks_fd: int, results_fd: int, seconds: float, memory_mib: int) -> None:
    def say(message: object) -> None:
        os.write(results_fd, json.dumps(message).encode() + b"\n")

    def at_most(cpu_seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF has no handler: the kernel ends the process

    tasks = os.fdopen(tasks_fd, "r")
    _limit(memory_mib)
    try:
        import logging

        judge = make_judge()
        logging.disable(logging.CRITICAL)  # math-verify logs what it parses
        for text in (r"\frac{\sqrt{2}}{2}x^2", r"\{1, 2\}", "(1, 2]"):  # load lazy modules before the first answer
            judge(rf"\boxed{{{text}}}", rf"\boxed{{{text}}}+0", 0.0, 0.0, "", ("", ""))
    except Exception as problem:
        say(f"{type(problem).__name__}: {problem}")
        return
    libraries = tuple({os.path.normpath(path) + os.sep for path in (*sys.path, sys.prefix, sys.base_prefix) if path})
    sys.addaudithook(_refuse(libraries))
    say("ready")
    for line in tasks:
        at_most(seconds)
        found = judge(*json.loads(line))
        at_most(0)
        say(found)


if __name__ == "__main__":
    _work(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
