"""Ctrl-C while a module is imported whose code drops the KeyboardInterrupt, as torch's does."""

import signal
import subprocess
import sys
import threading

import pytest

from deftune.cli import main
from deftune.cli.interrupts import ImportedWhole, hold_interrupts_of, interrupts_held

MODULE = """
import signal
done = False
for _ in range({count}):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("dropped", flush=True)
print("imported", flush=True)
done = True
"""


def run_python(folder, count: int, code: str) -> subprocess.CompletedProcess:
    """Without bytecode: in one second, modules of one size have the same."""
    (folder / "stubborn.py").write_text(MODULE.format(count=count))
    code = f"from deftune.cli.interrupts import hold_interrupts_of\n{code}"
    return subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=folder, capture_output=True, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_an_interrupt_is_raised_when_the_module_is_imported(tmp_path):
    hold = "hold_interrupts_of('stubborn')\n"
    code = "try:\n    import stubborn\nexcept KeyboardInterrupt:\n    print('raised')"
    assert run_python(tmp_path, 1, hold + code).stdout.split() == ["imported", "raised"]
    assert run_python(tmp_path, 1, code).stdout.split() == ["dropped", "imported"]
    assert run_python(tmp_path, 0, f"{hold}{code}\nprint(stubborn.done)").stdout.split() == ["imported", "True"]


def test_a_second_interrupt_ends_the_process(tmp_path):
    done = run_python(tmp_path, 2, "hold_interrupts_of('stubborn')\nimport stubborn")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupt_after_the_import_is_raised_at_once():
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_the_handler_of_a_caller_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) is handler
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_receives_no_signals():
    seen = []

    def work():
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_missing_module_is_still_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hold_interrupts_of("no_such_module")
    hold_interrupts_of("no_such_module")
    names = [finder.name for finder in sys.meta_path if isinstance(finder, ImportedWhole)]
    assert names.count("no_such_module") == 1
    with pytest.raises(ModuleNotFoundError):
        import no_such_module  # noqa: F401


def test_the_command_line_imports_torch_whole(monkeypatch, capsys):
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, ImportedWhole)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    try:
        assert main([]) == 0
    finally:
        names = [finder.name for finder in sys.meta_path if isinstance(finder, ImportedWhole)]
    assert names == ["torch"]
