"""Mutation test: change one operator or constant of the code at a time; a test must fail each time.

    nice python benchmarks/mutation.py objectives                 # every mutant; hours of one core
    nice python benchmarks/mutation.py grading --count 200        # a sample of 200, the same one every time
    python benchmarks/mutation.py objectives --jobs 8             # eight mutants at a time
    python benchmarks/mutation.py objectives --list               # what would be changed

A mutant is killed when a test fails or runs out of time; it survives when all tests of its group pass. Survivors are
listed with their line: each one is a test to write, or a change that changes nothing (say so in EQUIVALENT).
torch and pytest are imported once; every mutant is a fork that replaces one module before the tests import it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.machinery
import importlib.util
import os
import random
import re
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"


@dataclass(frozen=True)
class Group:
    """Modules that are changed, and the tests that must notice, quickest first."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    cpu_seconds: int


GROUPS = {
    "objectives": Group(
        ("objectives/base.py", "objectives/family.py", "objectives/modifiers.py", "objectives/stats.py",
         "objectives/step.py", "objectives/catalogue.py", "objectives/grammar.py", "losses/reduction.py"),
        ("objectives/test_objectives.py", "losses/test_reduction.py", "objectives/test_grammar.py",
         "losses/test_token_stats.py", "losses/test_token_loss.py", "objectives/test_step_ranks.py"),
        900,
    ),
    "grading": Group(
        ("evaluation/extraction.py", "evaluation/choices.py", "evaluation/answers.py", "evaluation/grading.py",
         "evaluation/grading_worker.py"),
        ("evaluation/test_extraction.py", "evaluation/test_rules.py", "evaluation/test_grading.py"),
        1800,
    ),
}  # fmt: skip

# (module, before, after): changes that change no result that a test could see, each with its reason.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("objectives/base.py", "power > -torch.finfo(power.dtype).eps / 4", "power >= -torch.finfo(power.dtype).eps / 4"):
        "both branches round to the same value around -eps/4",
    ("objectives/base.py", "-torch.finfo(power.dtype).eps / 4", "-torch.finfo(power.dtype).eps * 4"):
        "the two branches differ by 2 eps at most below -4 eps",
    ("objectives/base.py", "4", "5"): "both branches round to the same value from -eps/4 to -eps/5",
    ("objectives/base.py", "1.0", "2.0"): "a divisor in the branch that torch.where does not take",
    ("objectives/base.py", "abs(value) < 1000000000000000.0", "abs(value) <= 1000000000000000.0"):
        "1e15 is read back alike from both of its spellings",
    ("objectives/base.py", "1000000000000000.0", "1000000000000001.0"):
        "1e15 is read back alike from both of its spellings",
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
    """One changed module. ``before`` and ``after`` are the changed expression."""

    module: str
    line: int
    before: str
    after: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before} -> {self.after}"


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
    tree = ast.parse((SOURCE / "deftune" / module).read_text())
    found: list[Mutant] = []

    def visit(node: ast.AST) -> None:
        for name, place, child in fields_to_change(node):
            for changed in changes(child):
                ast.copy_location(changed, child)
                put(node, name, place, changed)
                mutated = ast.fix_missing_locations(copy.deepcopy(tree))
                put(node, name, place, child)
                line = getattr(child, "lineno", 0)
                found.append(Mutant(module, line, ast.unparse(child), ast.unparse(changed), mutated))
            visit(child)

    visit(tree)
    return found


def put(node: ast.AST, name: str, place: int | None, value: ast.AST) -> None:
    if place is None:
        setattr(node, name, value)
    else:
        getattr(node, name)[place] = value


class Replaced(importlib.machinery.SourceFileLoader):
    """Loads a module from a changed tree."""

    def __init__(self, name: str, path: str, tree: ast.Module):
        super().__init__(name, path)
        self.tree = tree

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, self.path, "exec"), module.__dict__)


class Finder:
    """Finds the mutated module before Python finds the file's."""

    def __init__(self, mutant: Mutant):
        self.name = "deftune." + mutant.module.removesuffix(".py").replace("/", ".")
        self.path, self.tree = str(SOURCE / "deftune" / mutant.module), mutant.tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=Replaced(name, self.path, self.tree))


class Killers:
    """The tests that killed a mutant last: they are tried first on the next one, which often is beside it."""

    def __init__(self, most: int = 20):
        self.most, self.tests = most, list[str]()

    def add(self, output: str) -> None:
        for test in re.findall(r"^(?:FAILED|ERROR) (\S+::[^\n]*?)(?: - |$)", output, re.MULTILINE)[:1]:
            self.tests = [test, *(other for other in self.tests if other != test)][: self.most]


def survives(mutant: Mutant | None, group: Group, output: str, killers: Killers) -> bool:
    """Whether all tests pass with the mutant in place; None is the code as it is."""
    output = f"{output}.{threading.get_ident()}"
    for tests in [killers.tests, *([str(ROOT / "tests" / name)] for name in group.tests)]:
        if tests and not passes(mutant, tests, group.cpu_seconds, output):
            killers.add(Path(output).read_text(errors="replace"))
            return False
    return True


def passes(mutant: Mutant | None, tests: list[str], cpu_seconds: int, output: str) -> bool:
    """Files of tests, or single tests, in a fork."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            if mutant is not None:
                sys.meta_path.insert(0, Finder(mutant))  # pyright: ignore[reportArgumentType]
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line"]
            code = int(pytest.main([*options, f"--rootdir={ROOT}", *tests]))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--count", type=int, help="a sample of this many mutants (default: all)")
    parser.add_argument("--module", help="only mutants of this module, e.g. objectives/base.py")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    out = args.out.resolve() if args.out else None
    group = GROUPS[args.group]
    mutants = [m for module in group.modules if args.module in (None, module) for m in mutants_of(module)]
    if args.count is not None and args.count < len(mutants):
        chosen = sorted(random.Random(0).sample(range(len(mutants)), args.count))
        mutants = [mutants[place] for place in chosen]
    if args.list:
        print("\n".join(map(str, mutants)), f"\n{len(mutants)} mutants")
        return 0

    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(tempfile.mkdtemp())  # hypothesis and the tests may write here
    import hypothesis
    import mpmath
    import pytest
    import torch

    assert mpmath and pytest  # imported for the forks
    torch.set_num_threads(1)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a counterexample need not be the smallest
    hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)
    hypothesis.settings.load_profile("mutation")
    sys.path.insert(0, str(SOURCE))
    assert not any(name.split(".")[0] == "deftune" for name in sys.modules)

    start = time.time()
    output = str(Path.cwd() / "output.txt")
    killers = Killers()
    if not survives(None, group, output, killers):
        print(Path(f"{output}.{threading.get_ident()}").read_text()[-3000:], file=sys.stderr)
        print("the tests fail on the code as it is", file=sys.stderr)
        return 2
    survivors: list[Mutant] = []
    equivalent = [m for m in mutants if (m.module, m.before, m.after) in EQUIVALENT]
    mutants = [m for m in mutants if (m.module, m.before, m.after) not in EQUIVALENT]
    with ThreadPoolExecutor(args.jobs) as pool:  # a thread waits for its fork
        verdicts = pool.map(lambda mutant: survives(mutant, group, output, killers), mutants)
        for number, (mutant, survived) in enumerate(zip(mutants, verdicts), 1):
            print(f"[{number}/{len(mutants)}] {'SURVIVED' if survived else 'killed'} {mutant}", flush=True)
            if survived:
                survivors.append(mutant)
    killed = len(mutants) - len(survivors)
    print(
        f"{killed} of {len(mutants)} killed in {time.time() - start:.0f} s; {len(equivalent)} equivalent ones left out"
    )
    for mutant in survivors:
        print(f"  survived: {mutant}")
    if out:
        from deftune.selftest.records import Record, write_records

        lines = [str(mutant) for mutant in survivors]
        text = f"{args.group}: {killed} of {len(mutants)} mutants killed, {len(equivalent)} equivalent ones left out"
        record = Record.of(
            row=26, test=f"mutants of {args.group}", command=f"python benchmarks/mutation.py {args.group}",
            figure=text, passed=not survivors, seconds=time.time() - start, details={"survivors": lines},
        )  # fmt: skip
        write_records(out, [record])
    return 0 if not survivors else 1


if __name__ == "__main__":
    sys.exit(main())
