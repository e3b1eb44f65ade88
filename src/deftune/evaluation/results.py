"""The folder of an evaluation: settings, questions, answers and grades; one process writes it at a time.

`settings.json` says what was asked and, for each task, the hash of its questions; `questions.jsonl` has the hash of
each question. `samples.jsonl` has every answer, appended as it is made. `graded.jsonl` has the extraction and verdict
of each answer, `summary.json` the unrounded scores. A file that is read back is checked: damage is an error that names
the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from deftune._version import __version__
from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import Kind, locked
from deftune.evaluation.items import Item
from deftune.evaluation.suites import Task

Record = dict[str, Any]
Tasks = dict[str, tuple[Task, list[Item]]]
Key = tuple[str, str, float, int]  # (task, item, temperature, sample) of an answer

EVALUATION = Kind("evaluation", "settings.json", "--out")
AGAIN = "run the same `deftune eval run` again, it grades the recorded answers without asking for them"
NUMBER = (int, float)
SAMPLE = {"task": str, "id": str, "temperature": NUMBER, "sample": int, "text": str, "finish": str}
GRADED = {"task": str, "id": str, "temperature": NUMBER, "sample": int, "score": NUMBER}
SETTINGS = {"suite": str, "tasks": dict}
SAMPLED_SETTINGS = {"samples": int, "temperatures": [NUMBER]}
SAMPLED_SUMMARY = {
    "settings": {"suite": str},
    "rows": [{"task": str, "temperature": NUMBER, "items": int, "samples": int, "score": NUMBER,
              "interval": [NUMBER], "extracted": dict, "finished": dict, "note": str}],
    "missing": dict,
}  # fmt: skip
HELDOUT_SUMMARY = {
    "settings": {"suite": str, "data": str},
    "rows": [{"metric": str, "items": int, "tokens": int, "score": (*NUMBER, type(None))}],
    "ends": int,
    "facts": [str],
}


# --- the questions ----------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A finished evaluation: the folder of its result, and the content of `summary.json`.

    ``failed``: every answer is an error, or the errors of an earlier call could not be asked again.
    """

    folder: Path
    summary: dict[str, Any]
    failed: bool = False


def result_folder(out: str | Path | None, model: str, suite: str, *, among_others: bool = False) -> Path:
    """``out``, by default results/MODEL-SUITE; among other suites OUT/SUITE, by default results/MODEL/SUITE."""
    name = Path(model).name
    if among_others:
        return Path(out or Path("results") / name) / suite
    return Path(out or Path("results") / f"{name}-{suite}")


def question_hash(item: str, prompt: str, gold: str) -> str:
    """Of one question: its id, the text that the model is given, and the answer that it is graded by."""
    content = json.dumps([item, prompt, gold])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def questions_of(tasks: Tasks) -> dict[str, dict[str, str]]:
    """task -> item id -> the question's hash."""
    return {
        name: {item.id: question_hash(item.id, item.prompt, item.gold) for item in items}
        for name, (_, items) in tasks.items()
    }


def describe_data(tasks: Tasks) -> dict[str, Record]:
    """What `settings.json` has of each task's data: a hash over its questions in any order; where they came from.

    Only the hash is compared. ``source`` and ``bytes`` are there for whoever looks for the file again.
    """
    described: dict[str, Record] = {}
    for name, questions in questions_of(tasks).items():
        whole = hashlib.sha256("".join(sorted(questions.values())).encode()).hexdigest()[:16]
        described[name] = {"hash": whole, "items": len(questions), **_source(tasks[name][0])}
    return described


def _source(task: Task) -> Record:
    source = task.source
    if source.generator is not None:
        return {"source": f"generated:{source.generator}"}
    if source.path is None:
        return {"source": f"hub:{source.hub}"}
    return {"source": str(source.path), "bytes": source.path.stat().st_size}


def changed_questions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The ids that one side lacks, or whose prompt or gold differs."""
    return [item for item in dict.fromkeys([*before, *now]) if before.get(item) != now.get(item)]


# --- the folder -------------------------------------------------------------------------------------------------------


class Result:
    """A result's folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.samples = folder / "samples.jsonl"
        self.graded = folder / "graded.jsonl"
        self.questions = folder / "questions.jsonl"

    # before anything is asked

    def check(
        self, settings: Any, tasks: Tasks | None = None, *, change_endpoint: bool = False, weights: str | None = None
    ) -> list[str]:
        """Refuse a folder that holds another evaluation; nothing is written.

        Args:
            settings: of this call; they must match those of the folder.
            tasks: the questions of this call; they must be those that the folder's answers are of.
            change_endpoint: accept another server than before.
            weights: the `weights_digest` of the model; None if it is not known.

        Returns:
            Lines that the user should read.
        """
        if not self._has_answers():
            return []
        EVALUATION.is_begun(self.folder)
        before = self.settings()
        now = json.loads(json.dumps(dataclasses.asdict(settings)))
        recorded = before.pop("data", None) if "data" not in now else None  # `HeldoutSettings` has its own
        before.pop("deftune", None)
        known = before.pop("weights", None)
        if "fields" in now:
            before.setdefault("fields", {})  # older results name none
        if "engine" in now:
            # older results name none: an endpoint's has no encoding, and vLLM could not be asked for
            before.setdefault("engine", {"name": "transformers" if before.get("encoding") else "endpoint"})
            for content in (before, now):  # recorded, like deftune's own version; a newer version resumes the result
                content["engine"].pop("version", None)
            if "dtype" not in before["engine"]:  # deftune 0.2.0 does not record the dtype of transformers
                now["engine"].pop("dtype", None)
            self._check_url(before["engine"], now["engine"], change_endpoint)
        notes = self._graded_again(before["tasks"], now["tasks"], recorded, tasks)
        EVALUATION.refuse_changes(self.folder, before, now)
        if known is not None and weights is not None and known != weights:
            raise ValueError(
                f"{self.folder}: its answers are of other weights than {settings.model} has now; choose another folder "
                f"with --out, or remove this one"
            )
        return notes if tasks is None else notes + self._check_questions(recorded, tasks)

    def _graded_again(self, before: Record, now: Record, recorded: Any, tasks: Tasks | None) -> list[str]:
        """Accept another version of a task whose questions are the same: only the grades of the answers change."""
        if tasks is None or recorded is None or before.keys() != now.keys():
            return []
        described, notes = describe_data(tasks), list[str]()
        for name in now:
            same = recorded.get(name, {}).get("hash") == described[name]["hash"]
            if same and before[name] != now[name]:
                notes.append(f"{self.folder}: {name}: graded again by version {now[name]}, was {before[name]}")
                before[name] = now[name]
        return notes

    def _check_url(self, before: Record, now: Record, change_endpoint: bool) -> None:
        """Compare the servers' URLs, which older results lack, and remove them from both settings."""
        old, new = before.pop("url", None), now.pop("url", None)
        before.pop("earlier_urls", None)
        if old is not None and new is not None and old != new and not change_endpoint:
            raise ValueError(
                f"{self.folder}: was begun with the server {old}, not {new}; pass --change-endpoint to go on with the "
                f"new one, or choose another folder with --out"
            )

    def _check_questions(self, recorded: Any, tasks: Tasks) -> list[str]:
        now = questions_of(tasks)
        if recorded is not None:
            described = describe_data(tasks)
            differing = [name for name in now if recorded.get(name, {}).get("hash") != described[name]["hash"]]
            before = self._recorded_questions() if differing else {}
        elif self.graded.is_file():  # made before hashes were recorded; the grades have prompt and gold
            before = graded_questions(self.read_graded("prompt", "gold"))
            differing = [name for name in now if name in before and changed_questions(before[name], now[name])]
        else:
            return [f"{self.folder}: was begun without a record of its questions; they are taken to be these"]
        if not differing:
            return []
        name = differing[0]
        changed = changed_questions(before.get(name, {}), now[name])
        total = len(before.get(name, {}).keys() | now[name].keys())
        such = f", such as {changed[0]!r}" if changed else ""
        raise ValueError(
            f"{self.folder}: {len(changed) or 'some'} of {total} questions of {name} are not those that were answered "
            f"(prompt or gold differs{such}); pass the data that this result was made with, or choose another folder "
            f"with --out"
        )

    def _recorded_questions(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        if self.questions.is_file():
            shape = {"task": str, "id": str, "hash": str}
            for record in read_lines(self.questions, shape, "choose another folder with --out"):
                found.setdefault(record["task"], {})[record["id"]] = record["hash"]
        return found

    def _has_answers(self) -> bool:
        """Whether an earlier call wrote an answer."""
        return self.folder.exists() and any(not self._is_beginning(entry) for entry in self.folder.iterdir())

    def _is_beginning(self, entry: Path) -> bool:
        """Whether a file is one that a call writes before its first answer."""
        empty = entry in (self.samples, self.folder / "rows.jsonl") and entry.stat().st_size == 0
        return empty or entry.name in ("settings.json", self.questions.name, ".lock")

    def open(
        self, settings: Any, tasks: Tasks | None = None, *, change_endpoint: bool = False, weights: str | None = None
    ) -> list[str]:
        """Write the settings of a new folder, or continue one, after `check`, whose lines are returned."""
        notes = self.check(settings, tasks, change_endpoint=change_endpoint, weights=weights)
        self.folder.mkdir(parents=True, exist_ok=True)
        now: Record = {"deftune": __version__, **json.loads(json.dumps(dataclasses.asdict(settings)))}
        if tasks is not None:
            now["data"] = describe_data(tasks)
        recorded = self.settings() if self._has_answers() else None
        if recorded is None and weights is not None:  # of older results they are not known
            now["weights"] = weights
        if recorded is not None:  # it stays; what older versions did not record, and another server, is added
            engine: Record = now.get("engine", {})
            now |= {**recorded, "tasks": now["tasks"]}
            old: Record = recorded.get("engine", {})
            if "url" in engine and engine["url"] != old.get("url"):
                earlier = [*old.get("earlier_urls", []), *([old["url"]] if "url" in old else [])]
                now["engine"] = engine | ({"earlier_urls": earlier} if earlier else {})
        if now != recorded:
            if recorded is not None and recorded["tasks"] != now["tasks"]:  # the grades are those of another version
                self.graded.unlink(missing_ok=True)
            if tasks is not None:
                write_atomic(self.questions, _question_lines(tasks))
            write_atomic(self.folder / "settings.json", json.dumps(now, indent=1))
        return notes

    @contextlib.contextmanager
    def writing(
        self, settings: Any, tasks: Tasks | None = None, *, change_endpoint: bool = False, weights: str | None = None
    ) -> Generator[list[str]]:
        """`open` the folder and lock it until the end; a folder that got no answer is removed."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locked(self.folder, "writing this result"):
                try:
                    yield self.open(settings, tasks, change_endpoint=change_endpoint, weights=weights)
                finally:
                    if not self._has_answers():
                        for entry in self.folder.iterdir():
                            entry.unlink(missing_ok=True)  # the lock too, which no other process can hold
        finally:
            for path in missing:
                with contextlib.suppress(OSError):  # it holds something
                    path.rmdir()

    # what is there

    def settings(self) -> Record:
        path = self.folder / "settings.json"
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(
                f"{self.folder}: is no result (no settings.json); `deftune eval run MODEL` makes one"
            ) from error
        except (ValueError, RecursionError):
            content = None
        wrong = misfit(content, SETTINGS)
        if wrong is None and content["suite"] != "heldout":
            data = {name: {"hash": str, "items": int} for name in content["tasks"]}
            wrong = misfit(content, SAMPLED_SETTINGS | ({"data": data} if "data" in content else {}))
        if wrong is not None:
            raise ValueError(f"{path}: is damaged ({wrong}); evaluate again into another folder with --out")
        return content

    def read_samples(self) -> list[Record]:
        """Every answer so far, an error that was asked again too; a line cut off by a kill is left out."""
        if not self.samples.is_file():
            return []
        return read_lines(
            self.samples, SAMPLE, "delete that line and run the same command, its answer is asked for again", cut=True
        )

    def latest_samples(self) -> dict[Key, Record]:
        """The last record of each answer: a retry comes after the error that it replaces."""
        return {(r["task"], r["id"], r["temperature"], r["sample"]): r for r in self.read_samples()}

    def read_graded(self, *fields: str) -> list[Record]:
        """Every graded answer, with ``fields`` beside those of `GRADED`; an incomplete file is an error."""
        if not self.graded.is_file():
            raise ValueError(f"{self.folder}: is not graded yet; run the same `deftune eval run` again, it goes on")
        records = read_lines(self.graded, {**GRADED, **dict.fromkeys(fields, object)}, AGAIN)
        keys = {(r["task"], r["id"], r["temperature"], r["sample"]) for r in records}
        expected = self._num_answers()
        if len(keys) < len(records) or (expected is not None and len(records) != expected):
            wanted = f" of {expected}" if expected is not None else ""
            raise ValueError(f"{self.graded}: has {len(keys)}{wanted} answers; it was cut or changed; {AGAIN}")
        return records

    def _num_answers(self) -> int | None:
        """How many answers a complete result has; None where nothing says so."""
        settings = self.settings()
        if "data" in settings:
            each = sum(1 if temperature == 0 else settings["samples"] for temperature in settings["temperatures"])
            return each * sum(settings["data"][name]["items"] for name in settings["tasks"])
        if not (self.folder / "summary.json").is_file():
            return None
        return sum(row["items"] * row["samples"] for row in self.summary()["rows"])

    def summary(self) -> Record:
        path = self.folder / "summary.json"
        if not path.is_file():
            self.settings()  # or an error that says it is no result
            raise ValueError(f"{self.folder}: has no summary yet; run the same `deftune eval` again, it goes on")
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            content = None
        wrong = misfit(content, {"settings": {"suite": str}})
        if wrong is None:
            heldout = content["settings"]["suite"] == "heldout"
            wrong = misfit(content, HELDOUT_SUMMARY if heldout else SAMPLED_SUMMARY)
        if wrong is None and not (content["rows"] and all(row["items"] > 0 for row in content["rows"])):
            wrong = "no rows"
        if wrong is not None:
            raise ValueError(
                f"{path}: is damaged or of another version ({wrong}); run the same `deftune eval` again, it writes a "
                f"new one without asking for answers"
            )
        return content


def graded_questions(graded: Sequence[Record]) -> dict[str, dict[str, str]]:
    """task -> item id -> the question's hash, from grades; results that hold no prompt or gold have the same hash."""
    found: dict[str, dict[str, str]] = {}
    for r in graded:
        found.setdefault(r["task"], {})[r["id"]] = question_hash(r["id"], r.get("prompt", ""), r.get("gold", ""))
    return found


def _question_lines(tasks: Tasks) -> str:
    return "".join(
        json.dumps({"task": name, "id": item, "hash": code}) + "\n"
        for name, questions in questions_of(tasks).items()
        for item, code in questions.items()
    )


# --- reading what may be damaged --------------------------------------------------------------------------------------


def read_lines(path: Path, shape: Mapping[str, Any], remedy: str, *, cut: bool = False) -> list[Record]:
    """The records of a JSONL file; a line that is none is an error with its number. ``cut``: the last may lack its end.

    Without ``cut`` a last line that lacks its end is an error too.
    """
    *lines, last = path.read_bytes().split(b"\n")
    if last and not cut:
        raise ValueError(f"{path}:{len(lines) + 1}: the line is cut off; {remedy}")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if wrong := misfit(record, shape):
            raise ValueError(f"{path}:{number}: the line is damaged ({wrong}); {remedy}")
        records.append(record)
    return records


def misfit(value: Any, shape: Any, place: str = "") -> str | None:
    """Why a value does not have a shape; None where it does.

    A shape is a type, a tuple of types, ``[shape]`` for a list of any length, or ``{key: shape}`` for an object that
    has at least these keys. A number is finite, and true is no number.

    >>> misfit({"rows": [{"score": "0.5"}]}, {"rows": [{"score": float}]})
    'rows[0].score is a string'
    >>> misfit({"rows": [], "more": 1}, {"rows": [int]})
    """
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return f"{place} is {_kind(value)}" if place else f"it is {_kind(value)}"
        for key, inner in cast("Mapping[str, Any]", shape).items():
            if key not in value:
                return f"no {f'{place}.{key}'.lstrip('.')!r}"
            if wrong := misfit(value[key], inner, f"{place}.{key}".lstrip(".")):
                return wrong
        return None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place} is {_kind(value)}"
        [inner] = cast("list[Any]", shape)
        for index, entry in enumerate(cast("list[Any]", value)):
            if wrong := misfit(entry, inner, f"{place}[{index}]"):
                return wrong
        return None
    fits = isinstance(value, shape) and not (isinstance(value, bool) and shape is not object)
    if isinstance(value, float) and not math.isfinite(value) and shape is not object:
        return f"{place} is {value}"
    return None if fits else f"{place} is {_kind(value)}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return "not JSON or null" if value is None else names.get(type(value), type(value).__name__)


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a kill cut off, so that the next answer starts a new line."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
