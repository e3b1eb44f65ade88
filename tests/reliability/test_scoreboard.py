"""The scoreboard at its full sizes: `pytest -m reliability --scoreboard FILE` writes the figures.

A row is the check of `deftune selftest` at its full size, and the tests of the suite that stand behind it, run by
themselves. Rows that need a GPU are skipped without one; row 26 is `benchmarks/mutation.py`.
"""

import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from deftune.selftest.board import ROWS, measure
from deftune.selftest.check import Figure, NotHere, Size
from deftune.selftest.records import Record, write_records

ROOT = Path(__file__).resolve().parents[2]

# the tests of the suite behind each row: files, and pytest's -k for a part of one
TESTS: dict[int, list[tuple[str, str]]] = {
    1: [("objectives/test_objectives.py", "float32 or oracle or twin"), ("losses/test_token_stats.py", "")],
    2: [("losses/test_token_loss.py", "closed_form or difference_quotient or gradcheck or float32_logits")],
    3: [("losses/test_linear_loss.py", "float32 or float64"), ("losses/test_triton_rows.py", "")],
    5: [("losses/test_token_loss.py", "confident")],
    6: [("objectives/test_objectives.py", "extreme"), ("losses/test_token_loss.py", "impossible or offset or bad")],
    7: [("losses/test_token_loss.py", "nothing_supervised or one_class"),
        ("losses/test_linear_loss.py", "nothing_supervised or one_class"),
        ("training/test_trainer.py", "without_supervised"),
        ("training/test_distributed.py", "two_ranks_of_ddp")],
    9: [("losses/test_linear_loss.py", "test_none"), ("losses/test_token_loss.py", "test_none")],
    10: [("losses/test_token_loss.py", "bitwise"), ("training/test_resume.py", "two_fresh_runs")],
    11: [("losses/test_token_loss.py", "accumulation or deferred or part_of_the_step"),
         ("training/test_trainer.py", "accumulated or five_digits or rescaled")],
    12: [("training/test_distributed.py", "not smollm2"), ("objectives/test_step_ranks.py", "")],
    13: [("training/test_hf.py", "")],
    14: [("training/test_resume.py", "")],
    15: [("training/test_faults.py", "killed_at_every or killed_again")],
    16: [("training/test_faults.py", "sigterm or full_disk or cannot_be_written")],
    17: [("artifacts/test_checkpoints.py", "")],
    18: [("training/test_attacks.py", "")],
    19: [("evaluation/test_grading.py", "not agreement and not any_number")],
    20: [("evaluation/test_grading.py", "agreement or any_number")],
    21: [("data/test_rows.py", ""), ("data/test_formats.py", ""), ("data/test_sources.py", "")],
    22: [("data/test_encoding.py", "")],
    23: [("data/test_packing.py", ""), ("training/test_trainer.py", "packed")],
    25: [("objectives/test_grammar.py", "value_error"), ("artifacts/test_config.py", ""),
         ("artifacts/test_checkpoints.py", "manifest"), ("evaluation/test_extraction.py", "")],
    27: [("training/test_trainer.py", "refused or silently"), ("tokens/test_head.py", ""),
         ("losses/test_sparse.py", ""), ("training/test_resume.py", "leave_the_checkpoints or kept"),
         ("artifacts/test_models.py", "revision"), ("training/test_runs.py", "duplicate_key")],
    28: [("evaluation/test_generation.py", "batch or alone or generate")],
}  # fmt: skip
GPU = {4, 8}


def run_tests(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """(how many passed, the names of those that did not), of tests run by themselves."""
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    if not report.exists():
        return 0, [f"pytest {' '.join(arguments)}: {done.stdout[-500:]}{done.stderr[-500:]}"]
    cases = list(xml.parse(report).iter("testcase"))
    report.unlink()
    failed = [f"{c.get('classname')}.{c.get('name')}" for c in cases if any(x.tag in ("failure", "error") for x in c)]
    skipped = sum(any(x.tag == "skipped" for x in c) for c in cases)
    return len(cases) - len(failed) - skipped, failed


def behind(number: int, folder: Path) -> Figure | None:
    """How many of the tests behind a row pass; slow ones too, but none that needs a GPU."""
    if number not in TESTS:
        return None
    passed, failed = 0, list[str]()
    for file, chosen in TESTS[number]:
        some, broken = run_tests(folder, f"tests/{file}", "-m", "not gpu", *(["-k", chosen] if chosen else []))
        passed, failed = passed + some, failed + broken
    return Figure(f"{passed} of {passed + len(failed)} tests behind it pass", not failed and passed > 0, tuple(failed))


def properties(folder: Path) -> Figure:
    """Row 24: how many functions are hypothesis properties, and that they hold."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-m", "hypothesis and not gpu"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    names = {line.split("[")[0] for line in listed.stdout.splitlines() if "::" in line}
    passed, failed = run_tests(folder, "tests", "-m", "hypothesis and not gpu")
    return Figure(f"{len(names)} properties, {passed} cases hold", len(names) >= 25 and not failed, tuple(failed))


def agreement(folder: Path) -> Figure:
    """Row 20: the grader against labelled pairs, and from any number of workers."""
    sys.path.insert(0, str(ROOT / "tests" / "evaluation"))
    from labelled_pairs import DATA, labelled_pairs
    from test_grading import agreement as grade

    if not (DATA / "math").is_dir():
        raise NotHere(f"the MATH answers are not beside this checkout ({DATA / 'math'})")
    pairs = labelled_pairs(6_000, seed=2)
    verdicts, misses = grade(pairs, workers=4)
    same = all(grade(pairs[:600], workers)[0] == verdicts[:600] for workers in (1, 16))
    share = 1 - len(misses) / len(pairs)
    text = f"{share:.2%} of {len(pairs):,} pairs, {'the same' if same else 'OTHER'} verdicts from 1, 4, 16 workers"
    return Figure(text, share >= 0.995 and same, tuple(misses))


def hostile(folder: Path) -> Figure:
    """Row 19 with the tests' own list, more than 200 answers."""
    from deftune.selftest.answers import hostile_answers

    sys.path.insert(0, str(ROOT / "tests" / "evaluation"))
    from test_grading import hostile as more

    return hostile_answers(Size(True, folder), more(folder / "canary"))


OWN = {19: hostile, 20: agreement, 24: properties}


@pytest.mark.reliability
@pytest.mark.parametrize("row", [row for row in ROWS if row.number != 26], ids=lambda row: f"row_{row.number:02d}")
def test_row(row, tmp_path, request):
    begun = time.monotonic()
    figures: list[Figure] = []
    try:
        if row.number in OWN:
            figures.append(OWN[row.number](tmp_path))
        elif row.checks:
            figures.append(measure(row, full=True))
    except NotHere as reason:
        if row.number in GPU or row.number not in TESTS:
            pytest.skip(str(reason))
    if tests := behind(row.number, tmp_path):
        figures.append(tests)
    text, misses = "; ".join(f.text for f in figures), [miss for f in figures for miss in f.misses]
    holds = bool(figures) and all(f.holds for f in figures)
    print(f"row {row.number}: {text}", *misses, sep="\n  ")
    if file := request.config.getoption("--scoreboard"):
        details = {"misses": misses} if misses else {}
        command = f"pytest -m reliability -k row_{row.number:02d}"
        seconds = time.monotonic() - begun
        write_records(Path(file), [Record.of(row.number, "scoreboard", text, holds, seconds, command, details)])
    assert holds, "\n".join([text, *misses[:50]])
