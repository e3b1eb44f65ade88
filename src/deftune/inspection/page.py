"""An inspection as one HTML page that needs nothing else: no server, no network, no other file.

All that comes from the data is inside one block of base64 (gzip of a JSON head and typed arrays), and the page shows it
as text nodes only. A Content-Security-Policy allows the page's own script and style by their hashes and nothing more:
no request can leave it, and no script in a dataset could run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from deftune.artifacts.files import write_atomic
from deftune.artifacts.names import is_local, shown_model, shown_path
from deftune.inspection.inspect import ROW_SCORES, Inspection, flags, reason, summary
from deftune.inspection.style import look_of
from deftune.tokens.conflict import CONFIDENT

SCRIPTS = ("data.js", "list.js", "reader.js", "app.js")
KEPT_BITS = 12  # of a float32's 23 bits of fraction: 1 part in 8192, more than the page prints, and half the size
LOG_BITS = 16  # of a logarithm, whose exponential is printed
ORANGE, GREEN, BLUE, PURPLE, GREY = "#d55e00", "#009e73", "#0072b2", "#aa4499", "#7f7f7f"


def write_page(inspection: Inspection, path: str | Path) -> Path:
    """Write the inspection as one HTML file at ``path``; the file appears complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render_page(inspection))
    return path


def render_page(inspection: Inspection) -> str:
    """The page's HTML."""
    assets = files("deftune.inspection") / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    style = asset("page.css")
    script = "\n".join(asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    page = asset("page.html")
    for name, value in {"policy": policy, "style": style, "script": script, "data": pack(inspection)}.items():
        page = page.replace("{{" + name + "}}", value, 1)
    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- data -------------------------------------------------------------------------------------------------------------


def pack(inspection: Inspection) -> str:
    """Base64 of gzip of: the head's length (uint32), the head (JSON, padded to four bytes), the arrays it names."""
    arrays = page_arrays(inspection)
    layout = [[name, array.dtype.str[1:], len(array)] for name, array in arrays.items()]
    head = json.dumps(
        {**page_head(inspection), "layout": layout}, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    ).encode("utf-8", "replace")
    head += b" " * (-len(head) % 4)
    blob = b"".join([np.uint32(len(head)).tobytes(), head, *(array.tobytes() for array in arrays.values())])
    if len(blob) >= 10**9:
        raise ValueError(
            f"page: {len(blob) / 2**30:.1f} GiB of data is more than a browser opens; inspect fewer rows (--rows)"
        )
    return base64.b64encode(gzip.compress(blob, 3, mtime=0)).decode()


def page_arrays(inspection: Inspection) -> dict[str, np.ndarray]:
    """What the page shows, one value per token or row."""
    tokens = inspection.tokens
    arrays: dict[str, np.ndarray] = {
        "start": inspection.start.astype(np.uint32),
        "row": np.array([line["row"] for line in inspection.rows], dtype=np.uint32),
        "text": inspection.text.astype(np.uint32),
        "other": inspection.other.astype(np.uint32),
        "position": tokens["position"].astype(np.uint32),
        "rank": tokens["rank"].astype(np.uint32),
        "format": tokens["is_format"].astype(np.uint32),
    }
    for name in ("log_p", "other_log_p"):
        arrays[name] = rounded(tokens[name], LOG_BITS)
    numbers = ["entropy", "concentration", "conflict", "margin"]
    for name in [*numbers, *(f"gate:{name}" for name in inspection.objectives)]:
        arrays[name] = rounded(tokens[name])
    # rounding must not move a token across the threshold, which the page compares in float64
    above, below = (np.nextafter(np.float32(CONFIDENT), np.float32(side)) for side in (1, 0))
    sides = np.maximum(arrays["conflict"], above), np.minimum(arrays["conflict"], below)
    arrays["conflict"] = np.where(inspection.confident, *sides)
    for score in ROW_SCORES:
        cause = inspection.causes[score.name]
        arrays[f"score:{score.name}"] = inspection.scores[score.name].astype(np.float32)
        arrays[f"cause:{score.name}"] = cause.astype(np.uint32)
        for name in ("log_p", "other_log_p", "margin"):  # a score's own token is not rounded: both are printed
            arrays[name][cause] = tokens[name][cause]
    return arrays


def rounded(values: np.ndarray, bits: int = KEPT_BITS) -> np.ndarray:
    """Float32 rounded to so many bits of fraction: the zeros that follow compress away.

    >>> rounded(np.array([0.1, 1.0]), 4).tolist()
    [0.1015625, 1.0]
    """
    drop = 23 - bits
    whole = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    kept = (whole + (1 << (drop - 1))) >> drop << drop
    return kept.astype(np.uint32).view(np.float32)


def page_head(inspection: Inspection) -> dict[str, Any]:
    """What is not numbers: texts, labels, colours, and the summary."""
    facts, found = inspection.facts, summary(inspection)
    # black, which is NLL's elsewhere, would not show on a dark page
    palette = {name: look_of(name).colour if name != "nll" else GREY for name in inspection.objectives}
    orders = {score.name: score for score in ROW_SCORES}
    first = inspection.default_ranking
    answer = ["answer"] if any(inspection.stated) else []  # its reason is the row's text, which the page cannot make
    scores = [orders.pop(first), *orders.values()]
    return {
        "about": {"model": shown_model(str(facts.get("model", ""))), "data": shown_path(str(facts.get("data", "")))},
        "threshold": CONFIDENT,
        "summary": {key: value for key, value in found.items() if key not in ("share", "gate")},
        "objectives": [
            {"name": name, "rgb": rgb(palette[name]), "share": found["share"][name]} for name in inspection.objectives
        ],
        "columns": page_columns(inspection.objectives, palette),
        "scores": [
            {**score._asdict(), "top": highest(inspection.scores[score.name]), "ascending": score.name == "mean_p"}
            for score in scores
        ],
        "strings": inspection.texts,
        "rows": [
            {
                "where": public_where(line["where"], str(facts.get("data", ""))),
                "prompt": line["prompt"],
                "between": list(zip(_breaks(inspection, row), line["between"])),
                "truncated": line["truncated"],
                "flags": flags(inspection, row),
                "reasons": {name: reason(inspection, row, name) for name in (first, *answer, *flags(inspection, row))},
            }
            for row, line in enumerate(inspection.rows)
        ],
    }


def public_where(where: str, data: str) -> str:
    """A row's place without the folders of this machine: a page is made to be shown to others.

    >>> public_where("/home/me/data/train.jsonl:7", "/home/me/data"), public_where("rows.jsonl:7", "rows.jsonl")
    ('data/train.jsonl:7', 'rows.jsonl:7')
    """
    return where.removeprefix(f"{Path(data).parent}/") if is_local(data) else where


def page_columns(objectives: list[str], palette: dict[str, str]) -> list[dict[str, Any]]:
    """What tokens are coloured and ranked by; ``unit`` scales from 0 to 1, others to their 99th percentile."""
    columns: list[dict[str, Any]] = [
        {"label": "conflict", "array": "conflict", "unit": True, "colour": ORANGE,
         "about": "1 - p^(sum P²): how surely the model expects another token; how much of NLL's gradient DEFT drops"},
        {"label": "margin", "array": "margin", "colour": ORANGE,
         "about": "log q - log p: nats by which the model prefers another token"},
        {"label": "NLL", "array": "log_p", "derive": "negative", "colour": PURPLE, "about": "-log p: the token's loss"},
        {"label": "p", "array": "log_p", "derive": "exp", "unit": True, "colour": GREEN,
         "about": "The probability the model gives the token"},
        {"label": "other token's p", "array": "other_log_p", "derive": "exp", "unit": True, "colour": ORANGE,
         "about": "The probability of the likeliest token that is not the target"},
        {"label": "rank", "array": "rank", "log": True, "colour": PURPLE,
         "about": "How many tokens the model finds likelier"},
        {"label": "entropy", "array": "entropy", "colour": BLUE, "about": "Of the model's distribution, in nats"},
        {"label": "concentration", "array": "concentration", "unit": True, "colour": BLUE,
         "about": "sum P²: 1 where the model is sure, 1/n where it wavers between n; DEFT's focus"},
    ]  # fmt: skip
    for name in objectives:
        columns.append({"label": f"gate of {name}", "array": f"gate:{name}", "unit": True, "colour": palette[name],
                        "about": "Multiplies the token's error: 1 is NLL's gradient, 0 is none"})  # fmt: skip
    for name in objectives:
        columns.append({"label": f"signal of {name}", "array": f"gate:{name}", "derive": "signal", "unit": True,
                        "colour": palette[name], "about": "gate (1 - p): the gradient on its own logit"})  # fmt: skip
    return [{**column, "rgb": rgb(column.pop("colour"))} for column in columns]


def rgb(colour: str) -> list[int]:
    """
    >>> rgb("#d55e00")
    [213, 94, 0]
    """
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def highest(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) and known.max() > 0 else 1.0


def _breaks(inspection: Inspection, row: int) -> list[int]:
    """Where in a row's tokens a later answer of the conversation begins."""
    first, last = inspection.start[row], inspection.start[row + 1]
    return (np.flatnonzero(np.diff(inspection.tokens["position"][first:last]) > 1) + 1).tolist()
