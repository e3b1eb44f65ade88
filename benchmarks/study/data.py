"""Make the folder `data` that the study's configs name, from the public files; the same files give the same bytes.

    python benchmarks/study/data.py SOURCES data

SOURCES holds gsm8k/{train,test}, math/train, math_eval/math500, medquad/train, pubmedqa/{train_dev,test},
medical_eval/{medmcqa_validation,medqa_usmle_4opt_test} and instruct/{alpaca_gpt4_en_1k,code_alpaca_2k,new_codealpaca,
gpteacher_roleplay}, all as .jsonl.gz (upstream: openai/grade-school-math, hendrycks/math, abachaa/MedQuAD,
pubmedqa/pubmedqa, Teddy-XiongGZ/MIRAGE, LLaMA-Factory's and codealpaca's demonstration data).

Files that are only copied keep their names. Three are divided, so that no row is both trained on and asked:
- MedMCQA: 1,600 questions with an explanation are trained on, the other questions are asked; a question that occurs
  twice is on one side.
- MedQuAD: 200 rows are held out, and rows with more than 2,000 characters of answer are left out (they would be cut,
  and a cut row has no end token).
- instructions: 200 rows are held out, and rows with more than 1,500 characters likewise left out.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

Row = dict[str, Any]
COPIED = {
    "gsm8k/train": "gsm8k/train", "gsm8k/test": "gsm8k/test", "math/train": "math/train",
    "math_eval/math500": "math500", "pubmedqa/train_dev": "pubmedqa/train_dev", "pubmedqa/test": "pubmedqa/test",
    "medical_eval/medqa_usmle_4opt_test": "medqa_usmle_4opt_test",
}  # fmt: skip
INSTRUCTIONS = ("alpaca_gpt4_en_1k", "code_alpaca_2k", "new_codealpaca", "gpteacher_roleplay")
EXPLANATIONS, HELD_OUT = 1600, 200
MOST_MEDQUAD, MOST_INSTRUCTION = 2000, 1500  # characters


def read(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def divide(rows: list[Row], key: Callable[[Row], str], number: int) -> tuple[list[Row], list[Row]]:
    """``number`` rows, shuffled, and the rows whose key none of them has."""
    order = list(rows)
    Random(0).shuffle(order)
    first = order[:number]
    keys = {" ".join(key(row).lower().split()) for row in first}
    return first, [row for row in order if " ".join(key(row).lower().split()) not in keys]


def make(sources: Path, out: Path) -> None:
    """Write every file of the study below ``out``."""
    for name, new in COPIED.items():
        path = out / f"{new}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources / f"{name}.jsonl.gz", path)

    questions = read(sources / "medical_eval/medmcqa_validation.jsonl.gz")
    explained = [row for row in questions if (row["exp"] or "").strip()]
    trained, _ = divide(explained, lambda row: row["question"], EXPLANATIONS)
    known = {" ".join(row["question"].lower().split()) for row in trained}
    write(out / "medmcqa/explanations.jsonl.gz", trained)
    asked = [row for row in questions if " ".join(row["question"].lower().split()) not in known]
    write(out / "medmcqa_validation.jsonl.gz", asked)

    medquad = [row for row in read(sources / "medquad/train.jsonl.gz") if len(row["answer"]) <= MOST_MEDQUAD]
    held_out, rest = divide(medquad, lambda row: row["question"], HELD_OUT)
    write(out / "medquad/heldout.jsonl.gz", held_out)
    write(out / "medquad/train.jsonl.gz", rest)

    instructions = [
        {key: row[key] for key in ("instruction", "input", "output")}
        for name in INSTRUCTIONS for row in read(sources / f"instruct/{name}.jsonl.gz")
        if row["output"].strip() and len("".join(row[key] for key in ("instruction", "input", "output")))
        <= MOST_INSTRUCTION
    ]  # fmt: skip
    held_out, rest = divide(instructions, lambda row: f"{row['instruction']} {row['input']}", HELD_OUT)
    write(out / "instruct/heldout.jsonl.gz", held_out)
    write(out / "instruct/train.jsonl.gz", rest)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    sources, out = map(Path, sys.argv[1:])
    try:
        make(sources, out)
    except FileNotFoundError as error:
        print(f"{error.filename}: no such file; SOURCES must hold it", file=sys.stderr)
        return 2
    for path in sorted(out.rglob("*.jsonl.gz")):
        text = gzip.decompress(path.read_bytes())
        print(f"{hashlib.sha256(text).hexdigest()[:16]}  {len(text.splitlines()):>6,} rows  {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
