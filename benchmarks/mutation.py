"""Mutation test: change one operator or constant of the code at a time; a test must fail each time.

    nice python benchmarks/mutation.py objectives --verdicts objectives.jsonl    # every mutant, and the survivors again
    nice python benchmarks/mutation.py grading --count 200                       # a sample, the same one every time
    python benchmarks/mutation.py objectives --jobs 8                            # eight mutants at a time
    python benchmarks/mutation.py objectives --list                              # what would be changed

The first run, of the code as it is, notes the lines that each test executes. A mutant runs the tests that execute its
line, those that killed a mutant last before the others; all tests of the group if the line is in no function, or runs
while tests are collected, in another process or never. It is killed when a test fails, hangs or runs out of time; it
survives when all of them pass. Survivors are listed with their line: each one is a test to write, or a change that
changes nothing (say so in EQUIVALENT).

torch and pytest are imported once; every mutant is a fork that puts a package with one changed file before the others.
``--verdicts`` keeps finished verdicts: a run that was stopped goes on, and survivors run again with the tests of now.
A changed module begins anew; after a change that weakens tests, begin with another file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gc
import hashlib
import importlib
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Group:
    """Modules that are changed, and the tests that must notice, quickest first."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    processes: str = "-"  # tests of this file start processes whose lines are not seen
    workers: tuple[str, ...] = ()  # modules that run in other processes: their branches are not seen, and not counted


GROUPS = {
    "objectives": Group(
        ("objectives/base.py", "objectives/family.py", "objectives/modifiers.py", "objectives/stats.py",
         "objectives/step.py", "objectives/catalogue.py", "objectives/grammar.py", "losses/reduction.py"),
        ("objectives/test_objectives.py", "losses/test_reduction.py", "objectives/test_grammar.py",
         "losses/test_token_stats.py", "losses/test_token_loss.py", "losses/test_reviewed.py",
         "objectives/test_step_ranks.py"),
        processes="tests/objectives/test_step_ranks.py",
    ),
    "grading": Group(
        ("evaluation/extraction.py", "evaluation/choices.py", "evaluation/grading.py", "evaluation/grading_worker.py"),
        ("evaluation/test_extraction.py", "evaluation/test_verdicts.py", "evaluation/test_rules.py",
         "evaluation/test_grading.py"),
        workers=("evaluation/grading_worker.py",),
    ),
    "equality": Group(  # pairs of answers in this process, without workers
        ("evaluation/equality.py", "evaluation/units.py", "evaluation/notation.py", "evaluation/answers.py"),
        ("evaluation/test_verdicts.py",),
    ),
}  # fmt: skip

# (module, line, before, after): changes that change no result that a test could see, each with its reason.
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    ("objectives/base.py", "tiny = power > -torch.finfo(power.dtype).eps / 4",
     "power > -torch.finfo(power.dtype).eps / 4", "power >= -torch.finfo(power.dtype).eps / 4"):
        "both branches round to the same value around -eps/4",
    ("objectives/base.py", "tiny = power > -torch.finfo(power.dtype).eps / 4",
     "-torch.finfo(power.dtype).eps / 4", "-torch.finfo(power.dtype).eps * 4"):
        "the two branches differ by 2 eps at most below -4 eps",
    ("objectives/base.py", "tiny = power > -torch.finfo(power.dtype).eps / 4", "4", "5"):
        "both branches round to the same value from -eps/4 to -eps/5",
    ("objectives/base.py", "value = -torch.where(tiny, log_p, torch.expm1(power) / torch.where(tiny, 1.0, focus))",
     "1.0", "2.0"): "a divisor in the branch that torch.where does not take",
    ("objectives/base.py", "if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:",
     "abs(value) < 1000000000000000.0", "abs(value) <= 1000000000000000.0"):
        "1e15 is read back alike from both of its spellings",
    ("objectives/base.py", "if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:",
     "1000000000000000.0", "1000000000000001.0"): "1e15 is read back alike from both of its spellings",
    ("objectives/family.py", "return (floor + (1 - floor) * p / (2 - p)).clamp(1e-3, 1.0)", "1.0", "2.0"):
        "floor is at most 1/2 and p/(2 - p) at most 1, so the sum is at most 1; the bound is the released code's",
    ("objectives/modifiers.py", "if len(ids) > 8:", "len(ids) > 8", "len(ids) >= 8"):
        "both ways choose the same tokens; the bound is for speed",
    ("objectives/modifiers.py", "if len(ids) > 8:", "8", "9"):
        "both ways choose the same tokens; the bound is for speed",
    ("objectives/grammar.py", 'if self.comes("name") and self.tokens[self.next + 1][0] == "=":', "0", "1"):
        "the kind of a sign is its text",
    ("objectives/modifiers.py", "scale = torch.where(mean == 0, 1.0, mean)", "1.0", "2.0"):
        "a divisor in the branch that torch.where does not take",
    ("objectives/stats.py", "u = (top[:, 1:] - top[:, :1]).clamp(min=-800)  # e^-800 is 0 in float64: 0 log 0 = 0",
     "800", "801"): "e^-800 and e^-801 are 0 in float64",
    ("objectives/stats.py", "if len({c.shape for c in columns}) != 1 or columns[0].dim() != 1:", "0", "1"):
        "the columns have the same shape there",
    ("objectives/stats.py", "if min(k, vocab_size) > top.shape[-1]:", "-1", "1"):
        "the last dimension of a matrix is dimension 1",
    ("objectives/stats.py", "rest = share.sum(-1)", "-1", "1"): "the last dimension of a matrix is dimension 1",
    ("objectives/stats.py", "return rest.log1p() - (share * u).sum(-1) / (1 + rest)", "-1", "1"):
        "the last dimension of a matrix is dimension 1",
    ("evaluation/equality.py", "EQUAL, CLOSE, DIFFERENT = 2, 1, 0", "2", "3"): "only the order of the three counts",
    ("evaluation/equality.py", "_MANY_DIGITS = 400  # to which exact irrational numbers are compared", "400", "401"):
        "equal numbers are found to differ by about 1e-400, and the bound is 1e-300",
    ("evaluation/equality.py", "_LONGEST_LIST = 64  # of answers that are not numbers: each is compared with each",
     "64", "65"): "a bound on time",
    **{
        ("evaluation/equality.py", "_POINTS = ((3, 7), (11, 13))  # symbols have multiples of these fractions",
         str(part), str(part + 1)): "any two points do" for part in (3, 7, 11, 13)
    },
    ("evaluation/equality.py", "if not apart.is_Rational and distance <= (size or 1) * _NOTHING:",
     "distance <= (size or 1) * _NOTHING", "distance < (size or 1) * _NOTHING"):
        "a number that is no fraction is not at exactly this distance",
    ("evaluation/equality.py", "if gold.has(sympy.zoo, sympy.nan) or answer.has(sympy.zoo, sympy.nan):",
     "gold.has(sympy.zoo, sympy.nan) or answer.has(sympy.zoo, sympy.nan)",
     "gold.has(sympy.zoo, sympy.nan) and answer.has(sympy.zoo, sympy.nan)"):
        "math-verify, too, finds nothing that is equal to 1/0 beside 1/0",
    **{
        ("evaluation/equality.py",
         "_ROUNDING = sympy.Rational(1, 10**25)  # of values that are computed to 30 digits, relative to them",
         str(part), str(part + 1)): "equal values that are computed to 30 digits differ by less than either"
        for part in (10, 25)
    },
    ("evaluation/equality.py", "one, other = (sympy.N(side.subs(at), 30) for side in (gold, answer))", "30", "31"):
        "30 digits are more than the bound on their difference needs",
    ("evaluation/equality.py", "names = sorted(gold.free_symbols | answer.free_symbols, key=str)",
     "gold.free_symbols | answer.free_symbols", "gold.free_symbols & answer.free_symbols"):
        "math-verify, too, tells expressions apart whose difference has a variable",
    ("evaluation/equality.py",
     "at = {name: sympy.Rational(top * (n + 1), bottom + n) for n, name in enumerate(names)}",
     "top * (n + 1)", "top / (n + 1)"): "any two points do",
    ("evaluation/units.py", "_TAIL_CHARACTERS = 200", "200", "201"): "a bound on time; no unit is as long",
    ("evaluation/grading.py", "for key, _ in selector.select(min(busy, default=now) - now):", "min", "max"):
        "a time-out is noticed when the next worker reports; the verdicts are the same",
    ("evaluation/grading.py", "for worker in [worker for worker in self._running if worker.deadline < now]:",
     "worker.deadline < now", "worker.deadline <= now"): "a clock of nanoseconds does not read exactly the deadline",
    ("evaluation/grading.py", "worker = _Worker(process, task_out, result_in, deadline=time.monotonic() + 300)",
     "300", "301"): "no test waits five minutes for a worker to start",
    ("evaluation/grading.py", "piece = os.read(worker.results, 65536)", "65536", "65537"):
        "a message has at most a hundred bytes",
    ("evaluation/grading_worker.py", "REFUSED = 77", "77", "78"): "the parent knows the number by this name",
    ("evaluation/grading_worker.py", "if one is None or other is None:  # equal text is equal, whatever it means",
     "one is None or other is None", "one is None and other is None"):
        "where one of two answers cannot be read, their texts differ, and comparing them says so too",
    ("evaluation/grading_worker.py",
     r'judge(rf"\boxed{{{text}}}", rf"\boxed{{{text}}}+0", 0.0, 0.0, "", ("", ""))', "0.0", "1.0"):
        "the verdict of the rehearsal is not used",
    ("evaluation/grading_worker.py", "at_most(0)", "0", "1"): "sending a verdict takes no second",
}  # fmt: skip

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "expm1": "exp", "log1p": "log"}


@dataclass(frozen=True)
class Mutant:
    """One changed module. ``before`` and ``after`` are the changed expression, ``lines`` those of its statement.

    ``called``: whether the expression runs in a call of a function, not on import.
    """

    module: str
    line: int
    column: int
    lines: range
    before: str
    after: str
    tree: ast.Module
    called: bool = True

    def __str__(self) -> str:
        return f"{self.module}:{self.line}:{self.column}: {self.before} -> {self.after}"

    @property
    def equivalent(self) -> bool:
        text = source(self.module).splitlines()[self.line - 1].strip()
        return (self.module, text, self.before, self.after) in EQUIVALENT

    @property
    def key(self) -> str:
        """The mutant and the version of its module."""
        return f"{hashlib.sha256(source(self.module).encode()).hexdigest()[:12]} {self}"


@functools.cache
def source(module: str) -> str:
    return (SOURCE / "deftune" / module).read_text()


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one thing in it changed, for every such thing."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[place] = COMPARISONS[type(operator)]()
            yield changed
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield ast.IfExp(copy.deepcopy(node.test), copy.deepcopy(node.orelse), copy.deepcopy(node.body))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach":
        yield copy.deepcopy(node.func.value)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id], ast.Load())
    elif isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Attribute(copy.deepcopy(node.value), NAMES[node.attr], ast.Load())


def fields_to_change(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """(field, index, child), leaving out annotations, decorators, error texts and imports."""
    skipped = {"annotation", "returns", "decorator_list", "type_comment"}
    for name, value in ast.iter_fields(node):
        if name in skipped or isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            continue
        if isinstance(value, ast.AST):
            yield name, None, value
        elif isinstance(value, list):
            for place, item in enumerate(value):  # pyright: ignore[reportUnknownVariableType]
                if isinstance(item, ast.AST):
                    yield name, place, item


def mutants_of(module: str) -> list[Mutant]:
    tree = ast.parse(source(module))
    found: list[Mutant] = []

    def visit(node: ast.AST, lines: range, called: bool) -> None:
        if isinstance(node, ast.stmt):  # of a compound statement its head
            body: list[ast.stmt] = getattr(node, "body", [])
            lines = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
        for name, place, child in fields_to_change(node):
            inside = called or (isinstance(node, ast.FunctionDef | ast.Lambda) and name == "body")
            for changed in changes(child):
                ast.copy_location(changed, child)
                put(node, name, place, changed)
                mutated = ast.fix_missing_locations(copy.deepcopy(tree))
                put(node, name, place, child)
                line, column = getattr(child, "lineno", 0), getattr(child, "col_offset", 0)
                before, after = ast.unparse(child), ast.unparse(changed)
                found.append(Mutant(module, line, column, lines, before, after, mutated, inside))
            visit(child, lines, inside)

    visit(tree, range(0), called=False)
    return found


def put(node: ast.AST, name: str, place: int | None, value: ast.AST) -> None:
    if place is None:
        setattr(node, name, value)
    else:
        getattr(node, name)[place] = value


def write_package(mutant: Mutant, folder: Path) -> None:
    """A package of links to the files of deftune, with the changed module; processes of a test import it as well."""
    shutil.copytree(
        SOURCE / "deftune", folder / "deftune", ignore=shutil.ignore_patterns("*.pyc"), copy_function=os.symlink
    )
    changed = folder / "deftune" / mutant.module
    changed.unlink()
    changed.write_text(ast.unparse(mutant.tree))


@dataclass
class Survey:
    """What the run of the code as it is found: seconds of each test, the tests that execute a line, the branches."""

    cpu_seconds: dict[str, float]
    wall_seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]  # of a module; "" executes what runs on import and collection
    branches: tuple[int, int]  # covered, all

    def tests(self, mutant: Mutant, group: Group, killers: list[str]) -> list[str]:
        """The tests that a mutant must pass, in the order in which they run."""
        executed = self.lines[mutant.module]
        near = set[str]().union(*(executed.get(line, ()) for line in mutant.lines))
        unseen = {test for test in self.cpu_seconds if test.startswith(group.processes)}
        everything = not mutant.called or "" in near or not near | unseen
        chosen = [test for test in self.cpu_seconds if everything or test in near | unseen]

        def order(test: str) -> tuple[bool, int, bool]:
            last = killers.index(test) if test in killers else len(killers)
            return test not in near, last, self.cpu_seconds[test] > 0.3

        return sorted(chosen, key=order)  # otherwise by file, for a module's fixtures are made anew on every change


def survey(group: Group, folder: Path) -> Survey | None:
    """Run all tests on the code as it is; None if one fails."""
    paths = {str(SOURCE / "deftune" / module): module for module in group.modules}
    result = folder / "survey.json"

    class Watch:
        def __init__(self) -> None:
            self.seconds: dict[str, tuple[float, float]] = {}
            self.caches: list[Any] = []

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            wrapper = type(functools.cache(len))
            self.caches = [o for o in gc.get_objects() if type(o) is wrapper and "deftune" in o.__module__]

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            for cached in self.caches:  # a line that ran for another test would not run for this one
                cached.cache_clear()
            coverage.switch_context(nodeid)
            self.seconds[nodeid] = (sum(os.times()[:4]), time.monotonic())

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            cpu, wall = self.seconds[nodeid]
            self.seconds[nodeid] = (sum(os.times()[:4]) - cpu, time.monotonic() - wall)

    from coverage import Coverage

    coverage = Coverage(data_file=None, branch=True, include=list(paths), config_file=False)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            watch = Watch()
            coverage.start()
            code = run_tests([str(ROOT / "tests" / name) for name in group.tests], watch)
            coverage.stop()
            data = coverage.get_data()
            lines = {module: data.contexts_by_lineno(path) for path, module in paths.items()}
            coverage.json_report(outfile=str(folder / "coverage.json"))
            files = json.loads((folder / "coverage.json").read_text())["files"]
            counted = [file["summary"] for path, file in files.items() if not path.endswith(group.workers)]
            branches = [sum(file[name] for file in counted) for name in ("covered_branches", "num_branches")]
            result.write_text(json.dumps([watch.seconds, lines, branches]))
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        return None
    seconds, lines, branches = json.loads(result.read_text())
    by_line = {module: {int(line): set(tests) for line, tests in found.items()} for module, found in lines.items()}
    return Survey(
        {test: cpu for test, (cpu, _) in seconds.items()},
        {test: wall for test, (_, wall) in seconds.items()},
        by_line, tuple(branches),
    )  # fmt: skip


def run_tests(tests: list[str], plugin: object) -> int:
    import pytest

    options = ["-x", "-q", "--tb=short", "--assert=plain", "--hypothesis-seed=0", f"--rootdir={ROOT}"]
    return int(pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:randomly", *tests], plugins=[plugin]))


class Trial:
    """One mutant and its tests in a fork. The file ``at`` has the name of the test that runs."""

    def __init__(self, mutant: Mutant, tests: list[str], survey: Survey, at: Path):
        self.mutant, self.tests, self.survey, self.at = mutant, tests, survey, at

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        place = {test: place for place, test in enumerate(self.tests)}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.at.write_text(nodeid)
        signal.setitimer(signal.ITIMER_PROF, 10 + 20 * self.survey.cpu_seconds[nodeid])  # ends the process

    def run(self) -> tuple[bool, str]:
        """(whether it survives, the test that killed it)."""
        self.at.write_text("collection")
        package = self.at.with_name(f"{self.at.name}.src")
        write_package(self.mutant, package)
        child = os.fork()
        if child == 0:
            code = 99
            try:
                resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
                signal.setitimer(signal.ITIMER_PROF, 60)
                handle = os.open(os.devnull, os.O_WRONLY)
                os.dup2(handle, 1)
                os.dup2(handle, 2)
                sys.path.insert(0, str(package))
                os.environ["PYTHONPATH"] = str(package)  # for processes of the tests
                files = dict.fromkeys(test.split("::")[0] for test in self.tests)
                code = run_tests([str(ROOT / file) for file in files], self)
            finally:
                os._exit(code)
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            time.sleep(0.02)
            test = self.at.read_text()
            if time.time() - self.at.stat().st_mtime > 120 + 20 * self.survey.wall_seconds.get(test, 0):
                os.kill(child, signal.SIGKILL)
                return False, f"{test} (hangs)"
        shutil.rmtree(package)
        code = os.waitstatus_to_exitcode(ended[1])
        assert code != 99, "pytest did not run"
        return code == 0, self.at.read_text() + (" (out of time)" if code == -signal.SIGPROF else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--count", type=int, help="a sample of this many mutants (default: all)")
    parser.add_argument("--module", help="only mutants of this module, e.g. objectives/base.py")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--verdicts", type=Path, help="JSON lines of finished mutants, read and added to")
    parser.add_argument("--out", type=Path, help="write the figure of the scoreboard as JSON")
    args = parser.parse_args()
    group = GROUPS[args.group]
    mutants = [m for module in group.modules if args.module in (None, module) for m in mutants_of(module)]
    if args.count is not None and args.count < len(mutants):
        chosen = sorted(random.Random(0).sample(range(len(mutants)), args.count))
        mutants = [mutants[place] for place in chosen]
    if args.list:
        print("\n".join(f"{m}{' (equivalent)' if m.equivalent else ''}" for m in mutants), f"\n{len(mutants)} mutants")
        return 0
    out, verdicts = (path.resolve() if path else None for path in (args.out, args.verdicts))
    equivalent = sum(m.equivalent for m in mutants)
    mutants = [m for m in mutants if not m.equivalent]
    found: dict[str, dict[str, Any]] = {}
    if verdicts and verdicts.is_file():
        found = {entry["key"]: entry for entry in map(json.loads, verdicts.read_text().splitlines())}

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # hypothesis and the tests may write here
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        prepare()
        start = time.time()
        known = survey(group, Path(folder))
        if known is None:
            print("the tests fail on the code as it is", file=sys.stderr)
            return 2
        print(f"{len(known.cpu_seconds)} tests pass in {sum(known.cpu_seconds.values()):.0f} cpu seconds", flush=True)
        unchanged = Mutant(group.modules[0], 0, 0, range(0), "", "", ast.parse(source(group.modules[0])))
        one_per_file = list({test.split("::")[0]: test for test in known.cpu_seconds}.values())
        if not Trial(unchanged, one_per_file, known, Path(folder, "at")).run()[0]:
            print("a mutant that changes nothing is killed", file=sys.stderr)
            return 2
        killers = [entry["by"] for entry in found.values() if entry["by"]][::-1]
        places = itertools.count()

        def judge(mutant: Mutant) -> None:
            if mutant.key in found and not found[mutant.key]["survived"]:
                return
            if time.time() - start > 60 * args.minutes:
                return
            begun = time.time()
            tests = known.tests(mutant, group, list(dict.fromkeys(killers))[:20])
            survived, test = Trial(mutant, tests, known, Path(folder, f"at.{next(places)}")).run()
            by = "" if survived else test
            killers.insert(0, by)
            entry = {"key": mutant.key, "survived": survived, "by": by, "seconds": round(time.time() - begun, 1)}
            found[mutant.key] = entry
            if verdicts:
                with verdicts.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            print(f"{'SURVIVED' if survived else 'killed'} {mutant} [{len(tests)} tests; {by}]", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:  # a thread waits for its fork
            list(pool.map(judge, mutants))
        os.chdir(ROOT)

    ran = [mutant for mutant in mutants if mutant.key in found]
    survivors = [str(mutant) for mutant in ran if found[mutant.key]["survived"]]
    covered, branches = known.branches
    unseen = f" without {', '.join(group.workers)}" if group.workers else ""
    text = (
        f"{args.group}: {len(ran) - len(survivors)} of {len(ran)} mutants killed, {equivalent} equivalent ones left "
        f"out{f', {len(mutants) - len(ran)} not run' if len(ran) < len(mutants) else ''}; "
        f"{covered / branches:.1%} of {branches} branches{unseen}"
    )
    print(text)
    for mutant in survivors:
        print(f"  survived: {mutant}")
    if out:
        from deftune.selftest.records import Record, write_records

        command = f"python benchmarks/mutation.py {args.group}{f' --count {args.count}' if args.count else ''}"
        passed = not survivors and len(ran) == len(mutants) and covered >= 0.95 * branches
        record = Record.of(
            row=26 if args.group == "objectives" else None, test=f"mutants of {args.group}", command=command,
            figure=text, passed=passed, seconds=sum(found[m.key]["seconds"] for m in ran),
            details={"survivors": survivors},
        )  # fmt: skip
        write_records(out, [record])
    return 0 if not survivors else 1


def prepare() -> None:
    """Import for the forks what they would import each; nothing of deftune."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis
    import mpmath
    import torch
    import transformers

    assert mpmath and transformers.LlamaForCausalLM
    warm_up_math_verify()
    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "mutation",
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),  # a counterexample need not be the smallest
        database=None,
        deadline=None,
        suppress_health_check=(hypothesis.HealthCheck.too_slow,),  # the machine may be busy
    )
    hypothesis.settings.load_profile("mutation")
    sys.path.insert(0, str(SOURCE))
    assert not any(name.split(".")[0] == "deftune" for name in sys.modules)


def warm_up_math_verify() -> None:
    """Fill the caches of its parser, and import what sympy's solvers import; otherwise every fork would."""
    math_verify, sympy = (importlib.import_module(name) for name in ("math_verify", "sympy"))
    logging.disable(logging.CRITICAL)
    for text in (
        r"-\frac{1}{2}+3.5 \times 10^{-5}", r"2\sqrt{3}, \sqrt[3]{x}", r"x^2+y^{10}=4", r"a \leq x < b", "(1, 2)",
        r"(-\infty,2]\cup[3,\infty)", r"\{1, 2\}", r"x \in \mathbb{R} \setminus \{2\}", "f(x)=x+1", r"\sin x \ne \ln 2",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\text{even}", r"2\pi e^{i x}", r"\dot{x}=kx-a", "|x|>3",
        r"90^\circ", r"4! \binom{5}{2}", r"2 \cdot 3", "1:2", "x_1 = 5, x_2 = 6", r"\pm 3", "E = m c^2 = 9",
    ):  # fmt: skip
        read = math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None)
        math_verify.verify(read, read, timeout_seconds=None)
    x = sympy.Symbol("x", real=True)
    assert sympy.solve(sympy.exp(x) - 1, x) == [0] and sympy.cancel(sympy.together(1 / x + x) * x) == 1 + x**2
    assert (x**2 < 4).as_set() == sympy.Interval.open(-2, 2) and sympy.simplify(x / 2 + x) == 3 * x / 2
    logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
