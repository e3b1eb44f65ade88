"""Rows about files: damaged checkpoints, bad rows, chat templates, packs, random bytes for every parser."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.util
import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deftune.artifacts import checkpoints, folders
from deftune.artifacts.config import load_config
from deftune.data.encoding import Encoded, Encoder
from deftune.data.packing import Collator, pack
from deftune.data.rows import BadRows, Row
from deftune.data.sources import read_rows
from deftune.objectives import IGNORE_INDEX
from deftune.objectives import objective as parse_objective
from deftune.selftest import tiny
from deftune.selftest.check import Figure, NotHere, Size, counted, refusal
from deftune.selftest.runs import Bench


def command(*arguments: object) -> tuple[int, str]:
    """(exit code, everything printed) of `deftune ARGUMENTS`, in this process."""
    cli = importlib.import_module("deftune.cli")  # run as a user runs it; no import of a later room
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return code, output.getvalue()


# --- 17: damaged checkpoints ------------------------------------------------------------------------------------------


def damages(size: Size) -> Figure:
    """Row 17: bits flipped and files cut in a real checkpoint; the one before is taken, with a notice."""
    run = Bench(size.folder).train("run", {"train.max_steps": 2, "train.save_steps": 1, "train.keep": 9})
    root, draw = run / "checkpoints", random.Random(0)
    newest = root / "checkpoint-2"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size]
    misses: list[str] = []
    number = size(150, 1000)
    for place in range(number):
        path = draw.choice(files)
        content = path.read_bytes()
        if place % 3 == 2:
            path.write_bytes(content[: draw.randrange(len(content))])
        else:
            changed = bytearray(content)
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
        notices: list[str] = []
        found = checkpoints.latest(root, notices.append)
        if found != root / "checkpoint-1" or len(notices) != 1:
            misses.append(f"damage {place} of {path.name}")
        path.write_bytes(content)
    if checkpoints.latest(root, misses.append) != newest:
        misses.append("the mended checkpoint does not verify")
    return counted("damages detected, the checkpoint before taken with a notice", number, misses)


# --- 21: bad rows -----------------------------------------------------------------------------------------------------

GOOD = b'{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'
BAD_LINES = [
    b"{oops}", b"hello", b"{'messages': None}", b'{"a": 1,}', GOOD + b" " + GOOD, b'{"a": "\t"}', b'{"a": "\\x41"}',
    b"// no", b"\xef\xbb\xbf" + GOOD, b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1, "a": 2}', b'{"a": "\\ud83d"}', b'{"a": "\xed\xa0\x80"}',
    b'{"a": "caf\xe9"}', b'{"a": "\xc0\x80"}', b'{"a": "\\u0000"}', b"\0" * 100,
    b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", b"[" * 100_000 + b"]" * 100_000, b"[1, 2]", b'"text"', b"null", b"{}",
    b'{"messages": null}', b'{"messages": "hi"}', b'{"messages": []}', b'{"messages": ["hi"]}',
    b'{"messages": [{"role": "user", "content": "q"}]}',
    b'{"messages": [{"role": "human", "content": "q"}, {"role": "assistant", "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}',
    b'{"messages": [{"role": "user", "content": 4}, {"role": "assistant", "content": "a"}]}',
    GOOD[:40],
]  # fmt: skip
# rows that are valid JSON and no conversation that this template can train on
REFUSED_ROWS = [
    {"messages": [{"role": "assistant", "content": "first"}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a <|im_end|> b"}]},
]


def bad_rows(size: Size) -> Figure:
    """Row 21: every bad line is named by file, line and reason; --skip-bad-rows writes it out, the encoder's too."""
    misses: list[str] = []
    tried = 0
    for number, line in enumerate(BAD_LINES):
        for name, ending in (("a.jsonl", b"\n"), ("b.jsonl", b"\r\n"), ("c.jsonl.gz", b"\n")):
            path = size.folder / name
            content = ending.join([GOOD, line, GOOD, b""])
            path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
            tried += 1
            reason = refusal(lambda path=path: read_rows(path))
            if not reason.startswith(f"{path}:2: "):
                misses.append(f"line {number} of {name}: {reason or 'not refused'}")
            bad = BadRows(skip=True)
            if len(read_rows(path, bad=bad)) != 2 or [row.where for row in bad.rows] != [f"{path}:2"]:
                misses.append(f"line {number} of {name}: not skipped alone")
    bench = Bench(size.folder)
    rows = [json.loads(GOOD), *REFUSED_ROWS, json.loads(GOOD)] * 2
    data = size.folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{oops}\n")
    config = write_config(bench, {
        "data.train": [{"path": str(data)}], "data.skip_bad_rows": True, "train.max_steps": 1, "train.batch_size": 2,
        "train.micro_batch_size": 2,
    })  # fmt: skip
    preview = ("data", "preview", data, "--model", bench.model, "--skip-bad-rows")
    for arguments, out in ((preview, size.folder), (("train", config), bench.folder / "run")):
        tried += 1
        with contextlib.chdir(size.folder):
            code, text = command(*arguments)
        report = out / "bad_rows.jsonl"
        lines = report.read_text().splitlines() if report.is_file() else []
        if code or len(lines) != 5:
            misses.append(f"{arguments[0]}: exit code {code}, {len(lines)} of 5 rows written out; {text[-200:]}")
    return counted(f"files of {len(BAD_LINES)} kinds: file:line and reason, skipped rows written out", tried, misses)


# --- 22: chat templates -----------------------------------------------------------------------------------------------

QUESTIONS = ("What is the capital of France?", "And of Norway?")
ANSWERS = ("The capital is Paris.", "Oslo.")
MARKERS = (
    "<s> </s> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> "
    "<start_of_turn> <end_of_turn> <|turn> <turn|> <|user|> <|assistant|> <|system|> <|observation|> <|end|> <|start|> "
    "<|channel|> <|message|> <|return|> <|call|> <|eot|> <|endoftext|> [gMASK] <sop> <|START_OF_TURN_TOKEN|> "
    "<|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <end_of_utterance>"
).split()


def templates(size: Size) -> Figure:
    """Row 22: the installed TRL's templates: exactly the answers are supervised, with their end, or an error."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        raise NotHere("needs trl, for its collection of chat templates")
    paths = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    right, refused, misses = 0, 0, list[str]()
    for path in paths:
        if path.stem.endswith("_training"):  # has {% generation %}
            continue
        tokenizer: Any = tiny.make_tokenizer([*QUESTIONS, *ANSWERS])
        tokenizer.add_special_tokens({"additional_special_tokens": MARKERS, "eos_token": "</s>", "bos_token": "<s>"})
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        for blocks in (False, True):  # some templates take content as a list of blocks only
            try:
                verdict = supervised_rightly(tokenizer, blocks)
            except ValueError:
                verdict = None
            if verdict is not None:
                break
        if verdict is None:
            refused += 1
        elif verdict == "":
            right += 1
        else:
            misses.append(f"{path.stem}: {verdict}")
    total = right + refused + len(misses)
    text = f"{total} templates: {right} masks right with their end supervised, {refused} refused, {len(misses)} wrong"
    return Figure(text, not misses and right >= 12, tuple(misses))


def supervised_rightly(tokenizer: Any, blocks: bool) -> str:
    """'' or what is wrong with the mask of two turns."""
    texts = [text for pair in zip(QUESTIONS, ANSWERS) for text in pair]
    contents: list[Any] = [[{"type": "text", "text": text}] if blocks else text for text in texts]
    messages = tuple({"role": role, "content": c} for role, c in zip(("user", "assistant") * 2, contents))
    encoder = Encoder(tokenizer, max_length=4096)
    example = encoder.encode(Row(messages, None, "row", "rows"))
    kept = [label for label in example.labels if label != IGNORE_INDEX]
    text = tokenizer.decode(kept)
    if any(question in text for question in QUESTIONS) or not all(answer in text for answer in ANSWERS):
        return f"supervises {text!r}"
    return "" if kept[-1] in encoder.end_ids.values() else "its last supervised token ends no turn"


# --- 23: packing ------------------------------------------------------------------------------------------------------


def packs(size: Size) -> Figure:
    """Row 23: (context, target) pairs of packed and of single rows are the same; answers cut off are named."""
    draw, number = random.Random(0), size(1000, 10_000)
    misses: list[str] = []
    for case in range(number):
        rows: list[Encoded] = []
        for place in range(draw.randint(1, 12)):
            ids = [draw.randrange(9) for _ in range(draw.randint(1, 32))]
            labels = [token if draw.random() < 0.5 else IGNORE_INDEX for token in ids]
            rows.append(Encoded(ids, labels, f"a:{place}", "a"))
        packed = pack(rows, draw.randint(32, 96))
        batch = Collator(99, padding_free=draw.random() < 0.5)(packed)
        found: Counter[Any] = Counter()
        for ids, labels, positions in zip(*(batch[key].tolist() for key in ("input_ids", "labels", "position_ids"))):
            for i, target in enumerate(labels[1:]):
                if target != IGNORE_INDEX:
                    found[tuple(ids[i - positions[i] : i + 1]), target] += 1
        wanted = Counter(
            (tuple(row.input_ids[:i]), label)
            for row in rows
            for i, label in enumerate(row.labels)
            if i and label != IGNORE_INDEX
        )
        if found != wanted:
            misses.append(f"case {case}")
    bench = Bench(size.folder)
    code, text = command("train", write_config(bench, {"data.max_length": 24, "data.packing": True}), "--dry-run")
    named = code == 0 and "no answer left" in text and "chat.jsonl:" in text
    if not named:
        misses.append(f"answers cut off are not named: {text[-300:]}")
    figure = counted("random packs keep every target and its context", number, misses)
    return Figure(figure.text + ("; answers cut off are named" if named else ""), figure.holds, figure.misses)


def write_config(bench: Bench, changes: dict[str, Any]) -> Path:
    path = bench.folder / "config.yaml"
    path.write_text(json.dumps(tiny.run_content(bench.folder / "run", bench.model, bench.data, changes)))
    return path


# --- 25: random input for the parsers ---------------------------------------------------------------------------------


def fuzz(size: Size) -> Figure:
    """Row 25: damaged and random input of the five parsers; nothing but a ValueError may come out."""
    draw, number = random.Random(0), size(300, 20_000)
    misses: list[str] = []
    for name, (seeds, parse) in parsers(size.folder).items():
        for case in range(number):
            content = damaged(draw.choice(seeds), draw)
            try:
                parse(content)
            except (ValueError, OSError):
                pass
            except Exception as error:
                misses.append(f"{name}, case {case}: {type(error).__name__}: {content[:60]!r}")
    return counted("inputs parsed or refused (rows, configs, specs, answers, manifests)", 5 * number, misses)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut, doubled or put in."""
    found = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(found) + 1)
        how = draw.randrange(5)
        if how == 0 and place < len(found):
            found[place] = draw.randrange(256)
        elif how == 1:
            del found[place : place + draw.randint(1, 20)]
        elif how == 2:
            found[place:place] = found[place : place + draw.randint(1, 40)]
        elif how == 3:
            found[place:place] = draw.choice(
                [b"\x00", b"[" * 50, b"{", b"}", b"(", b"|", b"\\boxed{", b"1e999", b"\xff"]
            )
        else:
            found = bytearray(draw.randbytes(draw.randint(0, 60)))
    return bytes(found)


def parsers(folder: Path) -> dict[str, tuple[list[bytes], Callable[[bytes], object]]]:
    """The five parsers, each with inputs to damage."""
    from deftune.data.files import parse_line
    from deftune.evaluation.answers import normalize_answer
    from deftune.evaluation.choices import extract_choice
    from deftune.evaluation.extraction import extract_final

    path = folder / "fuzzed"

    def read_config(content: bytes) -> object:
        path.write_bytes(content)
        return load_config(path)

    def read_answer(content: bytes) -> object:
        text = content.decode("utf-8", "surrogateescape")
        return (
            extract_final(text),
            extract_choice(text, "ABCD", ["one", "two", "three", "four"]),
            normalize_answer(text),
        )

    def read_manifest(content: bytes) -> object:
        path.write_bytes(content)
        return folders.read_manifest(path)

    def read_spec(content: bytes) -> object:
        return parse_objective(content.decode("utf-8", "replace"))

    sealed = folder / "sealed"
    sealed.mkdir()
    (sealed / "file").write_bytes(b"x")
    folders.seal(sealed, step=3)
    manifest = (sealed / folders.MANIFEST).read_bytes()
    shutil.rmtree(sealed)
    config = json.dumps(tiny.run_content(folder / "run", folder, folder / "chat.jsonl")).encode()
    specs = [b"deft", b"eaft(k=3, power=2, norm=3)", b"deft | floor(0.2) | blend(nll, 0.25) | mean_one"]
    answers = [b"So the answer is \\boxed{\\frac{1}{2}}.", b"#### 1,234", b"The answer is (B).", b"x = 3 \\text{ cm}"]
    return {
        "rows": ([GOOD, *BAD_LINES[:20]], parse_line),
        "configs": ([config, b"run: a\nobjective: deft\ndata: {train: [{path: a}]}\n"], read_config),
        "specs": (specs, read_spec),
        "answers": (answers, read_answer),
        "manifests": ([manifest], read_manifest),
    }
