"""Does a ranking find wrong labels? A share of a real dataset's answers is made wrong, and every ranking is scored.

    python benchmarks/noise.py smollm2 --gsm8k train.jsonl.gz --medmcqa medmcqa_validation.jsonl.gz --rows 300
    python benchmarks/noise.py MODEL --gsm8k train.jsonl.gz --rows 3000 --seeds 10      # on a GPU

A row's score depends on the row alone, so the clean rows are read once, and for every seed the chosen share of them
once more with a wrong answer in it. Scores are the mean over seeds; intervals are 95% percentile bootstrap over rows,
the same rows for every ranking, so that differences are paired. --first leaves out the rows that a definition was
chosen on. Needs deftune[train].
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from corruptions import CORRUPTIONS, Corruption, ranking_quality, resamples

from deftune.artifacts.display import quiet
from deftune.artifacts.results import load_result
from deftune.data.encoding import Encoder
from deftune.data.sources import read_fields, read_rows
from deftune.inspection.inspect import Inspection, inspect_table
from deftune.tokens.conflict import CONFIDENT
from deftune.tokens.table import write_token_table

BASELINES = ("mean NLL", "max NLL")
SHARES = (0.05, 0.1, 0.2)


def at_answers(column: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Callable[[Inspection], np.ndarray]:
    """The largest value on the tokens that state a row's answer; NaN where it states none."""

    def score(inspection: Inspection) -> np.ndarray:
        values = np.where(inspection.answers, column(inspection.tokens), -np.inf)
        largest = np.maximum.reduceat(values, inspection.start[:-1])
        return np.where(np.isinf(largest), np.nan, largest)

    return score


def largest(column: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Callable[[Inspection], np.ndarray]:
    """The largest value on any token that is no end or format token."""

    def score(inspection: Inspection) -> np.ndarray:
        values = np.where(inspection.tokens["is_format"], 0.0, column(inspection.tokens))
        return np.maximum.reduceat(values, inspection.start[:-1])

    return score


def mean(column: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Callable[[Inspection], np.ndarray]:
    def score(inspection: Inspection) -> np.ndarray:
        return np.add.reduceat(column(inspection.tokens), inspection.start[:-1]) / np.diff(inspection.start)

    return score


def other_p(tokens: dict[str, np.ndarray]) -> np.ndarray:
    return np.exp(tokens["other_log_p"])


# Every definition that was tried and is worth showing. The first three know where the answer is; the others do not.
RANKINGS: dict[str, Callable[[Inspection], np.ndarray]] = {
    "answer: margin (`answer`)": lambda i: i.scores["answer"],
    "answer: NLL": at_answers(lambda t: -t["log_p"]),
    "answer: conflict": at_answers(lambda t: t["conflict"]),
    "mean of q margin (`conflict`)": lambda i: i.scores["conflict"],
    "mean conflict": mean(lambda t: t["conflict"]),
    "max conflict": largest(lambda t: t["conflict"]),
    "max q - p": largest(lambda t: other_p(t) - np.exp(t["log_p"])),
    f"NLL on conflict >= {CONFIDENT:g} (`noise`)": lambda i: i.scores["noise"],
    "mean NLL": lambda i: i.scores["mean_nll"],
    "max NLL": lambda i: i.scores["max_nll"],
}


class Scorer:
    """A model that gives rows, as their files have them, a score by every ranking."""

    def __init__(self, name: str, args: argparse.Namespace):
        with quiet():
            self.model, self.tokenizer = load_result(name)
        if torch.cuda.is_available():
            self.model = self.model.to("cuda")
        self.encoder = Encoder(self.tokenizer, template=args.template, max_length=args.max_length, overlong="drop")
        self.batch_tokens = args.batch_tokens

    def __call__(self, records: list[dict[str, Any]], format: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(places of the rows that fit, scores by ranking)."""
        with tempfile.TemporaryDirectory() as folder, quiet():
            data, table = Path(folder) / "rows.jsonl", Path(folder) / "tokens.parquet"
            data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
            write_token_table(
                table, self.model, self.tokenizer, read_rows(data, format=format), encoder=self.encoder,
                objectives=["nll"], batch_tokens=self.batch_tokens,
            )  # fmt: skip
            inspection = inspect_table(table)
        places = np.array([line["row"] for line in inspection.rows])
        return places, {name: ranking(inspection) for name, ranking in RANKINGS.items()}


def suitable(path: Path, corruptions: list[Corruption], first: int, number: int) -> list[dict[str, Any]]:
    """Rows that every corruption fits, from row ``first`` on."""
    records = (fields for _, fields in islice(read_fields(path), first, None))
    fit = (r for r in records if all(c.corrupt(r, Random(0)) is not None for c in corruptions))
    return list(islice(fit, number))


def measure(name: str, scorer: Scorer, records: list[dict[str, Any]], clean: Any, args: argparse.Namespace) -> Any:
    """Every ranking's quality on one corruption: mean over seeds, interval, difference from the better plain loss."""
    corruption = CORRUPTIONS[name]
    kept, clean_scores = clean
    weights = resamples(len(kept), args.resamples)
    found: dict[str, list[Any]] = {ranking: [] for ranking in RANKINGS}
    for seed in range(args.seeds):
        draw = Random(f"{seed}/{name}")
        chosen = sorted(draw.sample(range(len(kept)), round(args.share * len(kept))))
        wrong = [corruption.corrupt(records[kept[place]], draw) for place in chosen]
        fitted, wrong_scores = scorer([record for record in wrong if record is not None], corruption.format)
        places = np.array(chosen)[fitted]
        truth = np.zeros(len(kept), dtype=bool)
        truth[places] = True
        for ranking in RANKINGS:
            scores = clean_scores[ranking].astype(np.float64).copy()
            scores[places] = wrong_scores[ranking]
            found[ranking].append(ranking_quality(scores, truth, weights, shares=SHARES))
        print(f"{name}: seed {seed}, {len(places)} of {len(kept)} rows made wrong", file=sys.stderr, flush=True)
    quality = {ranking: metrics(parts) for ranking, parts in found.items()}
    plain = max(BASELINES, key=lambda ranking: quality[ranking]["average precision"][0])
    results = {
        ranking: {
            **{metric: interval(values) for metric, values in metrics_.items()},
            "average precision over plain": interval(
                metrics_["average precision"] - quality[plain]["average precision"]
            ),
        }
        for ranking, metrics_ in quality.items()
    }
    return {
        "corruption": name, "about": corruption.about, "rows": len(kept), "share": args.share, "seeds": args.seeds,
        "plain": plain, "rankings": results,
    }  # fmt: skip


def metrics(parts: list[Any]) -> dict[str, np.ndarray]:
    """The mean over seeds, of the rows (first) and of each resample."""
    named = [
        {
            "average precision": part.average_precision,
            "AUROC": part.auroc,
            **{f"precision at {share:.0%}": part.precision[share] for share in SHARES},
            **{f"recall at {share:.0%}": part.recall[share] for share in SHARES},
        }
        for part in parts
    ]
    with warnings.catch_warnings():  # a resample without any wrong row is NaN in all seeds, and stays so
        warnings.simplefilter("ignore", RuntimeWarning)
        return {key: np.nanmean([one[key] for one in named], axis=0) for key in named[0]}


def interval(values: np.ndarray) -> list[float]:
    """The value, and the ends of its 95% interval."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return [float(values[0]), float(low), float(high)]


def render(results: list[dict[str, Any]], head: str) -> str:
    lines = [head]
    for result in results:
        columns = ["average precision", "AUROC", "precision at 5%", "precision at 10%", "recall at 20%"]
        lines += [
            f"\n## {result['corruption']}\n",
            f"{result['about']}. {result['rows']} rows, {result['share']:.0%} of them made wrong, {result['seeds']} "
            f"seeds; a random order has average precision about {result['share']:.2f}.\n",
            f"| ranking | {' | '.join(columns)} | average precision over {result['plain']} |",
            f"|---|{'---|' * (len(columns) + 1)}",
        ]
        for ranking, found in result["rankings"].items():
            cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*found[column]) for column in columns]
            over = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*found["average precision over plain"])
            lines.append(f"| {ranking} | {' | '.join(cells)} | {over if ranking != result['plain'] else '-'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's train.jsonl (.gz)")
    parser.add_argument("--medmcqa", type=Path, help="MedMCQA as its authors released it, JSONL (.gz)")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="rows of each file to leave out")
    parser.add_argument("--share", type=float, default=0.1, help="of the rows, made wrong (default: 0.1)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--template")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    args = parser.parse_args()
    if not 0 < args.share < 1 or args.rows * args.share < 1:
        parser.error(f"--share {args.share:g} of {args.rows} rows leaves none to make wrong")
    scorer = Scorer(args.model, args)
    results: list[dict[str, Any]] = []
    for path, names in ((args.gsm8k, ["gsm8k-final", "gsm8k-result"]), (args.medmcqa, ["medmcqa-key"])):
        if path is None:
            continue
        corruptions = [CORRUPTIONS[name] for name in names]
        records = suitable(path, corruptions, args.first, args.rows)
        clean = scorer(records, corruptions[0].format)
        results += [measure(name, scorer, records, clean, args) for name in names]
    if not results:
        parser.error("no data: pass --gsm8k or --medmcqa")
    command = shlex.join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    text = render(results, f"`{command}`\n\n{args.model}, {device}, torch {torch.__version__}")
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text + "\n")
        args.out.with_suffix(".json").write_text(json.dumps({"command": command, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
