"""What a long command says where there is no terminal: something at least every 20 seconds."""

import itertools
import re
import threading

import pytest

from deftune.cli import progress as module
from deftune.cli.progress import QUIET_SECONDS, Lines, progress
from waiting import HANG_SECONDS


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def test_a_line_at_least_every_fifteen_seconds_even_where_nothing_moves(clock):
    written = []
    lines = Lines(lambda text: written.append((clock.seconds, text)), clock)
    lines.show("loading m")
    for second in range(1, 121):
        clock.seconds = float(second)
        if second == 30:
            lines.show("gsm8k T=0", 0, 1319)
        if second == 50:
            lines.show("gsm8k T=0", 7, 1319)
        lines.tick()
    times = [0.0, *(time for time, _ in written), 120.0]
    assert max(b - a for a, b in itertools.pairwise(times)) <= QUIET_SECONDS
    assert [text for _, text in written] == [
        "loading m (15 s)", "gsm8k T=0: 0 of 1,319 (30 s)", "gsm8k T=0: 0 of 1,319 (45 s)",
        "gsm8k T=0: 7 of 1,319 (1 min 0 s)", "gsm8k T=0: 7 of 1,319 (1 min 15 s)", "gsm8k T=0: 7 of 1,319 (1 min 30 s)",
        "gsm8k T=0: 7 of 1,319 (1 min 45 s)", "gsm8k T=0: 7 of 1,319 (2 min 0 s)",
    ]  # fmt: skip


def test_a_short_command_says_nothing_and_a_line_that_was_said_counts(clock):
    written = []
    lines = Lines(written.append, clock)
    lines.show("gsm8k T=0", 1, 2)
    clock.seconds = 14.0
    lines.tick()
    assert written == []
    lines.say("left out: nejm")
    clock.seconds = 28.0
    lines.tick()
    assert written == ["left out: nejm"]


def test_what_repeats_is_said_seldom(clock):
    written = []
    lines = Lines(written.append, clock)
    for second in range(45):
        clock.seconds = float(second)
        lines.say_seldom(f"attempt at {second}")
    assert written == ["attempt at 0", "attempt at 15", "attempt at 30"]


def test_a_thread_says_it_while_the_command_waits(monkeypatch, capsys, clock):
    """The clock is 25 seconds ahead whenever it is read: the first tick writes."""
    written = threading.Event()

    def ahead():
        clock.seconds += 25
        return clock.seconds

    class Watched(Lines):
        def __init__(self, write):
            super().__init__(lambda text: (write(text), written.set()), ahead)

    monkeypatch.setattr(module, "Lines", Watched)
    with progress():
        assert written.wait(HANG_SECONDS)
    assert re.match(r"starting \(", capsys.readouterr().err)


def test_a_terminal_has_bars_and_results_on_stdout(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress() as working:
        working.show("loading m")
        working.show("gsm8k[T=0]", 1, 2)
        working.say("left out: [red]nejm")
        working.print("the table")
        working.show("medqa", 1, 2)
    out = capsys.readouterr()
    assert out.out == "the table\n" and "left out: [red]nejm" in out.err and "gsm8k[T=0]" in out.err
