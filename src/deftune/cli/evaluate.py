"""`deftune eval`: score a model or a run on a suite; read and compare results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deftune.cli.train import need_training


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model or a run on benchmarks; show and compare results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="deftune eval MODEL --suite math --data DIR    score a model, a run or an endpoint's model\n"
        "deftune eval show RESULT [--wrong]            read the answers\n"
        "deftune eval compare RESULT RESULT            paired by item, with p-values\n"
        "deftune eval list                             the suites and their tasks",
    )
    parser.add_argument("what", nargs="+", metavar="MODEL | show RESULT | compare A B | list")
    parser.add_argument("--suite", help="math, medical, figfont")
    parser.add_argument("--task", action="append", default=[], help="single tasks by name")
    parser.add_argument("--task-file", action="append", default=[], type=Path, help="a task of your own (YAML)")
    parser.add_argument("--data", type=Path, help="folder with the benchmarks' files (default: the hub)")
    parser.add_argument("--out", type=Path, help="the result's folder (default: results/MODEL-SUITE)")
    parser.add_argument("--samples", type=int, help="answers per item where T > 0 (default: the suite's)")
    parser.add_argument(
        "--temperature", action="append", type=float, default=[], help="repeat for a sweep; 0 is greedy"
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="a sample of the items: for a try")
    parser.add_argument("--max-new-tokens", type=int, help="default: the task's")
    parser.add_argument("--rule", choices=["strict", "lenient"], default="strict", help="multiple-choice extraction")
    parser.add_argument("--template", help="chatml, plain, or a .jinja file: the one of training")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2, help="grading processes")
    parser.add_argument(
        "--endpoint", help="an OpenAI-compatible server, e.g. http://localhost:8000/v1; MODEL is its name"
    )
    parser.add_argument("--wrong", action="store_true", help="with show: only what was graded wrong")
    parser.add_argument("--rows", type=int, default=20, help="with show: how many answers (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    verb, *rest = args.what
    arities = {"show": 1, "compare": 2, "list": 0}
    if verb in arities:
        if len(rest) != arities[verb]:
            raise ValueError(f"eval {verb}: takes {arities[verb]} results, got {len(rest)}")
        return {"show": run_show, "compare": run_compare, "list": run_list}[verb](args, [Path(r) for r in rest])
    if rest:
        raise ValueError(f"eval: one model at a time, got {' '.join(args.what)}")
    return run_model(args, verb)


def run_model(args: argparse.Namespace, model: str) -> int:
    need_training()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from deftune.evaluation.evaluate import Result, Settings, ask, grade, load_items, summarize, write_text
    from deftune.evaluation.suites import load_task_file, suite_named, task_named

    if not (args.suite or args.task or args.task_file):
        raise ValueError("eval: name a --suite, a --task or a --task-file; `deftune eval list` has them")
    suite = suite_named(args.suite) if args.suite else None
    if suite is not None and suite.name == "heldout":
        raise ValueError(
            "eval: token statistics of a dataset are what training with data.eval records; no suite to sample"
        )
    names = [(task_named(n), False) for n in (suite.tasks if suite else ())]
    names += [(task_named(n), True) for n in args.task] + [(load_task_file(path), True) for path in args.task_file]
    tasks, missing = load_items(names, args.data, args.limit)
    temperatures = tuple(args.temperature) or (suite.temperature if suite else 0.0,)
    settings = Settings(
        model=model, suite=args.suite or "", tasks={n: t.version for n, (t, _) in tasks.items()},
        samples=args.samples or (suite.samples if suite else 1), temperatures=temperatures, top_p=args.top_p,
        seed=args.seed, limit=args.limit, max_new_tokens=args.max_new_tokens, rule=args.rule, template=args.template,
    )  # fmt: skip
    result = Result(args.out or Path("results") / f"{Path(model).name}-{args.suite or 'tasks'}")
    result.open(settings)
    for name, why in missing.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        bars: dict[str, Any] = {}

        def show(label: str, done: int, total: int) -> None:
            bar = bars.setdefault(label, progress.add_task(label, total=total) if label not in bars else None)
            progress.update(bar, completed=done)

        ask(result, settings, tasks, make_sampler(args, model), show)
    graded = grade(result, settings, tasks, workers=args.workers)
    summary = summarize(settings, suite, tasks, graded, missing)
    write_text(result.folder / "summary.json", json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1) if args.json else render_summary(summary))
    if not args.json:
        print(f"\n{result.folder}: deftune eval show {result.folder} --wrong")
    return 0


def make_sampler(args: argparse.Namespace, model: str) -> Any:
    from deftune.evaluation.generation import EndpointSampler, TransformersSampler

    if args.endpoint:
        if args.template:
            raise ValueError("--template: an endpoint renders its own chat template; leave it out")
        return EndpointSampler(args.endpoint, model)
    import torch

    from deftune.training.results import load_result
    from deftune.training.train import quiet

    with quiet():
        loaded, tokenizer = load_result(model, lambda text: print(text, file=sys.stderr))
    if torch.cuda.is_available():
        loaded = loaded.to("cuda", torch.bfloat16)
    return TransformersSampler(loaded, tokenizer, template=args.template, batch_size=args.batch_size)


def render_summary(summary: dict[str, Any]) -> str:
    """The table; rounding happens here and nowhere else."""
    lines = [
        f"{'task':24}{'T':>5}{'items':>7}{'n':>4}{'score':>9}{'  95% interval':18}{'answered':>9}{'cut off':>9}  note"
    ]
    for row in summary["rows"]:
        answers = row["items"] * row["samples"]
        found = answers - row["extracted"].get("none", 0)
        low, high = row["interval"]
        extra = f"similarity {100 * row['similarity']:.2f}; " if "similarity" in row else ""
        late = row.get("verdicts", {})
        stopped = late.get("timeout", 0) + late.get("crash", 0)
        extra += f"{stopped} gradings stopped; " if stopped else ""
        interval = f"  [{100 * low:.2f}, {100 * high:.2f}]"
        lines.append(
            f"{row['task']:24}{row['temperature']:>5g}{row['items']:>7}{row['samples']:>4}{100 * row['score']:>9.2f}"
            f"{interval:18}{found / answers:>9.0%}{row['finished'].get('length', 0) / answers:>9.0%}  "
            f"{extra}{row['note']}"
        )
    for average in summary.get("averages", []):
        if "score" in average:
            lines.append(
                f"average at T={average['temperature']:g}, {average['covers']}: {100 * average['score']:.2f} "
                f"(standard error {100 * average['standard_error']:.2f})"
            )
    for task, best in summary.get("best_temperature", {}).items():
        score = best["score"]
        halves = " and ".join(f"T={half['temperature']:g}" for half in best["halves"])
        lines.append(f"{task} at its best temperature (chosen on the other half: {halves}): {100 * score['mean']:.2f}")
    return "\n".join(lines)


def run_show(args: argparse.Namespace, folders: list[Path]) -> int:
    from deftune.evaluation.evaluate import Result

    result = Result(folders[0])
    print(render_summary(result.summary()))
    records = [r for r in result.read_graded() if not args.wrong or r["score"] < 1]
    if args.task:
        records = [r for r in records if r["task"] in args.task]
    for r in records[: args.rows]:
        print(f"\n--- {r['id']} T={r['temperature']:g} sample {r['sample']}: score {r['score']:g}")
        print(
            f"question: {r['prompt']}\nanswer:   {r['text']}\n"
            f"taken:    {r['answer']!r} ({r['how']})\ngold:     {r['gold']}"
        )
    if len(records) > args.rows:
        print(f"\n{len(records) - args.rows} more; --rows N shows more")
    return 0


def run_compare(args: argparse.Namespace, folders: list[Path]) -> int:
    from deftune.evaluation.evaluate import Result, compare

    rows = compare(Result(folders[0]), Result(folders[1]))
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"a = {folders[0]}, b = {folders[1]}; paired by item, p by sign flips, Holm over the rows")
    print(f"{'task':24}{'T':>5}{'items':>7}{'a':>8}{'b':>8}{'a - b':>8}{'  95% interval':20}{'p':>9}{'p Holm':>9}")
    for r in rows:
        interval = f"  [{100 * r['interval'][0]:.2f}, {100 * r['interval'][1]:.2f}]"
        print(
            f"{r['task']:24}{r['temperature']:>5g}{r['items']:>7}{100 * r['a']:>8.2f}{100 * r['b']:>8.2f}"
            f"{100 * r['difference']:>8.2f}{interval:20}{r['p']:>9.3g}{r['p_holm']:>9.3g}"
        )
    return 0


def run_list(args: argparse.Namespace, folders: list[Path]) -> int:
    from deftune.evaluation.suites import SUITES, task_named

    for suite in SUITES.values():
        print(f"{suite.name}: {suite.about}")
        for name in suite.tasks:
            task = task_named(name)
            size = f"{task.size:,} in the paper" if task.size else ""
            print(f"  {name:24}{task.kind:9}{size:22}{task.about}")
    return 0
