"""Agreement of the grader with math-verify's own published (gold, answer, label) pairs.

    python benchmarks/published_pairs.py              # downloads the installed version's sdist with pip
    python benchmarks/published_pairs.py FILE.tar.gz  # or reads one

A pair is graded as `deftune eval` grades an answer: one item with the gold, one text, `score_answers`. A text that is
nothing but a formula is put into a box first, as the prompt asks for.

The pairs stand in the tests of the sdist. They are read as text (`ast.literal_eval` of the parametrisations): nothing
of it is run, and nothing is kept. Only pairs that the package's tests parametrise by gold, pred and a label are taken;
two of its options are not ours and such pairs are left out: strict=False, and relations taken as sets.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from deftune.evaluation.extraction import extract_boxed
from deftune.evaluation.grading import Grader
from deftune.evaluation.items import Item
from deftune.evaluation.kinds import score_answers

NAMES = {("gold", "pred", "expected"), ("gold", "pred", "result")}


@dataclass(frozen=True)
class Pair:
    """``where`` is the file and line of the sdist that it stands in."""

    where: str
    gold: str
    text: str  # what a model would have written
    label: bool
    prose: bool  # the answer has to be found in a text of words


def download(folder: Path) -> Path:
    """The sdist of the installed math-verify."""
    name = f"math-verify=={metadata.version('math-verify')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "math-verify",
               "--dest", str(folder), name]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob("*.tar.gz"))
    if done.returncode or not found:
        raise ValueError(f"pip could not download the sdist of {name}: {done.stderr.strip().splitlines()[-1:]}")
    return found[0]


def read_pairs(sdist: Path) -> list[Pair]:
    """Every labelled pair of the sdist's tests."""
    pairs: list[Pair] = []
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if re.search(r"/tests/test_\w+\.py$", member.name) and (file := archive.extractfile(member)):
                pairs += list(_pairs_of(Path(member.name).name, file.read().decode("utf-8")))
    return pairs


def _pairs_of(name: str, source: str) -> Iterator[Pair]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        body = ast.unparse(node)
        if "allow_set_relation_comp=True" in body or "strict=False" in body:
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and len(call.args) == 2 and isinstance(call.args[1], ast.List):
                arguments = tuple(part.strip() for part in str(ast.literal_eval(call.args[0])).split(","))
                for row in call.args[1].elts if arguments in NAMES else ():
                    try:
                        gold, text, label = cast("tuple[Any, ...]", ast.literal_eval(row))
                    except ValueError:  # not literals
                        continue
                    if isinstance(gold, str) and isinstance(text, str):
                        yield make_pair(f"{name}:{row.lineno}", gold, text, bool(label))


def make_pair(where: str, gold: str, text: str, label: bool) -> Pair:
    """A pair whose gold is taken out of its box or dollars; a text that is all formula stands in a box."""
    formula = _formula(text)
    boxed = extract_boxed(text) is not None
    written = text if boxed or formula is None else rf"\boxed{{{formula}}}"
    return Pair(where, extract_boxed(gold, several=True) or _formula(gold) or gold, written, label,
                not boxed and formula is None)  # fmt: skip


def _formula(text: str) -> str | None:
    """What a text states without words around it; None where words stand there, outside of commands."""
    inner = text.strip().removesuffix(".")
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\[", r"\]"), (r"\(", r"\)")):
        if inner.startswith(opening) and inner.endswith(closing) and inner.count("$") <= 2 * len(opening):
            return inner[len(opening) : -len(closing)]
    words = re.sub(r"\\[A-Za-z]+(?:\{[A-Za-z ,]+\})?", " ", text)
    return None if re.search(r"[A-Za-z]{3}", words) else text


def agreement(pairs: list[Pair], workers: int = 2) -> tuple[int, list[tuple[Pair, dict[str, Any]]]]:
    """(how many scores agree with the labels, those that do not, each with its record)."""
    items = [Item(pair.where, "", pair.gold) for pair in pairs]
    with Grader(workers=workers) as grader:
        records = score_answers([("math", item, pair.text) for item, pair in zip(items, pairs)], grader=grader)
    misses = [(pair, record) for pair, record in zip(pairs, records) if bool(record["score"]) != pair.label]
    return len(pairs) - len(misses), misses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sdist", type=Path, nargs="?")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sdist = args.sdist or download(Path(temporary))
        pairs = read_pairs(sdist)
        agreed, misses = agreement(pairs)
    for pair, record in misses:
        print(f"{pair.where}: label {int(pair.label)}, found by {record['how']}, decided by {record['verdict']}")
        print(f"  gold {pair.gold[-200:]!r}, taken {(record['answer'] or '')[-100:]!r} of {pair.text[-200:]!r}")
    for title, prose in (("the answer in a box, or all of the text", False), ("the answer somewhere in prose", True)):
        mine = [pair for pair in pairs if pair.prose == prose]
        wrong = [pair for pair, _ in misses if pair.prose == prose]
        credited = sum(not pair.label for pair in wrong)
        print(f"{title}: {len(mine) - len(wrong)} of {len(mine)} agree;", end=" ")
        print(f"{len(wrong) - credited} equal pairs not credited, {credited} different pairs credited")
    print(f"{sdist.name}: {agreed} of {len(pairs)} agree")


if __name__ == "__main__":
    main()
