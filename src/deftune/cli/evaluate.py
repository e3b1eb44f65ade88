"""`deftune eval`: score a model or a run on suites or on the tokens of a dataset; read and compare results."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deftune.cli.eval_engines import (
    ENDPOINT_ONLY,
    ENDPOINT_OPTIONS,
    ENGINE_OPTIONS,
    check_engine,
    engine_of,
    load,
    make_sampler,
)
from deftune.cli.output import notice, say
from deftune.cli.progress import Progress, progress
from deftune.cli.train import add_trust, need_training

VERBS = {
    "show": ("RESULT", "its table, and answers (--wrong: only those) or rows"),
    "compare": ("BASE RUN [RUN ...]", "results: what was gained and lost, paired, with p-values"),
    "list": ("[--data DIR]", "the suites, their tasks, and which of them have data"),
    "export-tasks": ("FOLDER --suite math ...", "write tasks for lm-evaluation-harness into a folder"),
}
# what each way of calling honours; anything else is refused, never ignored
_PROMPTED = {"suite", "task", "task_file", "data", "limit"}
OPTIONS = {
    "sampled": _PROMPTED | {"out", "samples", "temperature", "top_p", "seed", "max_new_tokens", "rule", "template",
                            "like", "batch_size", "workers", "engine", "engine_option", "endpoint", *ENDPOINT_ONLY,
                            "json", "trust_remote_code"},
    "heldout": {"suite", "data", "format", "split", "rows", "skip_bad_rows", "out", "template", "like", "batch_size",
                "json", "trust_remote_code"},
    "show": {"wrong", "rows", "task"},
    "compare": {"json"},
    "list": {"data"},
    "export-tasks": _PROMPTED,
}  # fmt: skip
SHOWN = ("prompt", "text", "answer", "how", "gold")  # of a graded answer, with `eval show`
COUNTS = ("samples", "limit", "rows", "batch_size", "workers", "max_new_tokens")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model or a run on benchmarks or held-out tokens; show and compare results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="deftune eval MODEL --suite math --data DIR            a model, a run or an endpoint's model\n"
        "deftune eval MODEL --suite math --suite medical ...   several suites, e.g. what a run forgot\n"
        "deftune eval MODEL --suite heldout --data FILE        token statistics of any dataset\n"
        + "\n".join(f"deftune eval {f'{verb} {takes}':40} {about}" for verb, (takes, about) in VERBS.items()),
    )
    parser.add_argument("what", nargs="+", metavar="MODEL | " + " | ".join(VERBS))
    what = parser.add_argument_group("what is asked")
    what.add_argument("--suite", action="append", default=[], help="math, medical, figfont or heldout; repeatable")
    what.add_argument("--task", action="append", default=[], help="a single task by name; repeatable")
    what.add_argument("--task-file", action="append", default=[], type=Path, help="a task of your own (YAML)")
    what.add_argument("--data", help="folder with the benchmarks' files (default: the hub); of heldout: the dataset")
    what.add_argument("--limit", type=int, help="a sample of the items: for a try")
    how = parser.add_argument_group("how it is answered")
    how.add_argument("--samples", type=int, help="answers per item where T > 0 (default: the suite's)")
    how.add_argument(
        "--temperature",
        action="append",
        type=float,
        default=[],
        help="repeat for a sweep; 0 is greedy (default: the suite's; single tasks 0)",
    )
    how.add_argument("--top-p", type=float, help="nucleus sampling (default: 1, all tokens)")
    how.add_argument("--seed", type=int, help="of the sampling (default: 0)")
    how.add_argument("--max-new-tokens", type=int, help="default: the task's")
    how.add_argument("--rule", choices=["strict", "lenient"], help="multiple-choice extraction (default: strict)")
    how.add_argument("--template", help="chatml, plain, or a .jinja file (default: the run's, or the tokenizer's)")
    how.add_argument("--like", type=Path, metavar="RUN", help="encode as this run does: for its base model")
    how.add_argument("--batch-size", type=int, help="default: 16, on a GPU 2048 or what fits; of heldout 8192 tokens")
    how.add_argument("--workers", type=int, help="grading processes (default: 2)")
    how.add_argument(
        "--engine",
        choices=["transformers", "vllm"],
        help="what makes the answers here: transformers (default), or vllm, which you install. "
        "Never chosen by what is installed: at T > 0 another engine draws other answers",
    )
    how.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"of vllm: {', '.join(ENGINE_OPTIONS)}; repeatable",
    )
    how.add_argument("--endpoint", help="an OpenAI-compatible server, http://localhost:8000/v1; MODEL is its name")
    add_trust(how)
    endpoint = parser.add_argument_group("--endpoint")
    endpoint.add_argument("--api-key-env", metavar="NAME", help="the environment variable that holds the API key")
    for name, about in {
        "timeout": "the most seconds that a request may take",
        "retries": "how often a request that failed is sent again",
        "concurrency": "requests at a time",
    }.items():
        default = ENDPOINT_OPTIONS[name][0]
        endpoint.add_argument(f"--{name}", type=type(default), metavar="N", help=f"{about} (default: {default:g})")
    endpoint.add_argument("--extra-body", metavar="JSON", help="""fields added to each request: '{"top_k": 20}'""")
    endpoint.add_argument(
        "--change-endpoint", action="store_true", help="go on with a result that was begun with another server"
    )
    heldout = parser.add_argument_group("heldout")
    heldout.add_argument("--format", help="the dataset's format (default: told by its first row)")
    heldout.add_argument("--split", help="of a folder, a hub dataset, or generated:NAME")
    heldout.add_argument("--rows", type=int, help="the first rows only; with show: how many (default: 20)")
    heldout.add_argument("--skip-bad-rows", action="store_true", help="write them to bad_rows.jsonl and go on")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, help="the result's folder (default: results/MODEL-SUITE)")
    output.add_argument("--wrong", action="store_true", help="with show: only what was graded wrong")
    output.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    verb, *rest = args.what
    if verb in VERBS:
        check_options(args, verb)
        least, most = {"show": (1, 1), "compare": (2, 99), "list": (0, 0), "export-tasks": (1, 1)}[verb]
        if not least <= len(rest) <= most:
            raise ValueError(
                f"eval {verb}: write it as `deftune eval {verb} {VERBS[verb][0]}`, got {len(rest)} folders"
            )
        handlers: dict[str, Callable[[argparse.Namespace, list[Path]], int]] = {
            "show": run_show, "compare": run_compare, "list": run_list, "export-tasks": run_export,
        }  # fmt: skip
        return handlers[verb](args, [Path(name) for name in rest])
    if rest:
        raise ValueError(f"eval: one model at a time, got {' '.join(args.what)}")
    heldout = "heldout" in args.suite
    if heldout and len(args.suite) > 1:
        raise ValueError("eval: --suite heldout goes by itself, its --data is a dataset; give --out the same folder")
    check_options(args, "heldout" if heldout else "sampled")
    check_engine(args)
    need_evaluation()
    return run_heldout(args, verb) if heldout else run_suites(args, verb)


def check_options(args: argparse.Namespace, way: str) -> None:
    """An option that this way of calling cannot honour is an error."""
    given = {name: value for name, value in vars(args).items() if value is not None and value is not False}
    for name, value in given.items():
        if name in COUNTS and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: at least 1, got {value}")
        if value == []:
            continue
        if name not in OPTIONS[way] | {"what", "run", "command", "line"}:
            what = {"sampled": "a suite of questions", "heldout": "--suite heldout"}.get(way, f"eval {way}")
            ways = sorted(way for way, names in OPTIONS.items() if name in names)
            use = ", ".join("questions" if way == "sampled" else way for way in ways)
            raise ValueError(f"--{name.replace('_', '-')}: means nothing to {what} (it is for {use}); leave it out")


def need_evaluation() -> None:
    from importlib.util import find_spec

    need_training()
    if missing := [name for name in ("math_verify", "rapidfuzz") if find_spec(name) is None]:
        raise ValueError(f'this command needs {", ".join(missing)}; pip install "deftune[eval]"')


def result_folder(args: argparse.Namespace, model: str, suite: str) -> Path:
    """results/MODEL-SUITE; of several suites a folder each, in one that `eval compare` takes whole."""
    if len(args.suite) > 1:
        return (args.out or Path("results") / Path(model).name) / suite
    return args.out or Path("results") / f"{Path(model).name}-{suite}"


def load_tasks(args: argparse.Namespace, suite: Any) -> Any:
    """(tasks with their items, tasks without data and why) of a suite and of what was named besides."""
    from deftune.evaluation.evaluate import load_items
    from deftune.evaluation.suites import task_named
    from deftune.evaluation.task_files import load_task_file

    if args.data and not Path(args.data).is_dir():
        raise ValueError(f"--data: {args.data}: no such folder")
    names = [(task_named(n), False) for n in (suite.tasks if suite else ())]
    names += [(task_named(n), True) for n in args.task] + [(load_task_file(path), True) for path in args.task_file]
    return load_items(names, Path(args.data) if args.data else None, args.limit)


def named_suites(args: argparse.Namespace, others: tuple[str, ...] = ()) -> list[Any]:
    """The suites that were named; [None] where single tasks were. ``others`` could have been named instead."""
    from deftune.evaluation.suites import suite_named

    if not (args.suite or args.task or args.task_file):
        raise ValueError("eval: name a --suite, a --task or a --task-file; `deftune eval list` has them")
    if len(set(args.suite)) < len(args.suite):
        raise ValueError(f"eval: a suite is named twice: {', '.join(args.suite)}")
    if len(args.suite) > 1 and (args.task or args.task_file):
        raise ValueError("eval: --task and --task-file go with one --suite at most; run them by themselves")
    return [suite_named(name, others) for name in args.suite] or [None]


def run_suites(args: argparse.Namespace, model: str) -> int:
    with progress() as working:
        summaries, code = evaluate_suites(args, model, working)
    if args.json:
        print(json.dumps(summaries if len(summaries) > 1 else next(iter(summaries.values())), indent=1))
    return code


def evaluate_suites(args: argparse.Namespace, model: str, working: Progress) -> tuple[dict[str, Any], int]:
    """(suite -> its summary, the exit code): 1 where the answers to a suite are all errors, or could not be retried."""
    working.show("reading the questions")
    from deftune.artifacts.encodings import prompt_options
    from deftune.cli.eval_tables import render_summary
    from deftune.evaluation.evaluate import Settings, answered
    from deftune.evaluation.results import Result

    encoding = {} if args.endpoint else prompt_options(eval_encoding(args, model))
    engine = engine_of(args)
    jobs: list[tuple[Any, Any, Any, Any, Any]] = []
    for suite in named_suites(args, ("heldout",)):
        tasks, missing = load_tasks(args, suite)
        settings = Settings(
            model=model, suite=suite.name if suite else "", tasks={n: t.version for n, (t, _) in tasks.items()},
            samples=args.samples or (suite.samples if suite else 1),
            temperatures=tuple(args.temperature) or (suite.temperature if suite else 0.0,),
            top_p=1.0 if args.top_p is None else args.top_p, seed=args.seed or 0, limit=args.limit,
            max_new_tokens=args.max_new_tokens, rule=args.rule or "strict", encoding=encoding,
            engine=engine,
        )  # fmt: skip
        result = Result(result_folder(args, model, suite.name if suite else "tasks"))
        result.check(settings, tasks, change_endpoint=args.change_endpoint)
        jobs.append((suite, tasks, missing, settings, result))
    check_effect(args, [(settings, tasks) for _, tasks, _, settings, _ in jobs])
    summaries: dict[str, Any] = {}
    code = 0
    with ExitStack() as stack:
        for _, tasks, _, settings, result in jobs:  # before a model is loaded: a folder may be locked or unwritable
            notes = stack.enter_context(result.writing(settings, tasks, change_endpoint=args.change_endpoint))
            for note in notes:
                working.say(note)
        left = not all(answered(result, settings, tasks) for _, tasks, _, settings, result in jobs)
        sampler = None
        if left:
            working.show(f"loading {model}")
            sampler = make_sampler(args, model, encoding, working.say_seldom)
        for suite, tasks, missing, settings, result in jobs:
            summary, failed = evaluate_suite(args, suite, tasks, missing, settings, result, sampler, working)
            code = max(code, int(failed))
            summaries[settings.suite] = summary
            if not args.json:
                shown = f"\n{result.folder}: deftune eval show {shlex.quote(str(result.folder))} --wrong"
                working.print(f"{render_summary(summary)}\n{shown}")
    return summaries, code


def evaluate_suite(
    args: argparse.Namespace, suite: Any, tasks: Any, missing: dict[str, str], settings: Any, result: Any, sampler: Any,
    working: Progress,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """(the summary, which is also written; whether it failed: no answer at all, or errors that could not be retried)"""
    from deftune.artifacts.files import write_atomic
    from deftune.evaluation.evaluate import answered, ask, describe_errors, grade, summarize
    from deftune.evaluation.generation import SamplerError

    for name, why in missing.items():
        working.say(f"left out: {name}: {why}")
    failed = False
    try:
        if sampler is not None:
            ask(result, settings, tasks, sampler, working.show, working.say)
    except SamplerError as error:
        if not answered(result, settings, tasks, with_errors=True):
            raise ValueError(f"{error}; the same command goes on from there") from error
        working.say(f"deftune: {error}; the other answers stay errors")
        failed = True
    working.show("grading the answers")
    graded = grade(result, settings, tasks, workers=args.workers or 2)
    summary = summarize(settings, suite, tasks, graded, missing)
    write_atomic(result.folder / "summary.json", json.dumps(summary, indent=1))
    if args.json:
        for row in summary["rows"]:
            if errors := describe_errors(row):
                working.say(f"{row['task']} T={row['temperature']:g}: {errors}")
    return summary, failed or all(row["errors"]["count"] == row["errors"]["of"] for row in summary["rows"])


def check_effect(args: argparse.Namespace, jobs: list[tuple[Any, Any]]) -> None:
    """An option that changes no answer or verdict of what is asked is an error."""
    if all(temperature == 0 for settings, _ in jobs for temperature in settings.temperatures):
        for name in ("samples", "top_p", "seed"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: greedy answers (T = 0) are the same whatever it is; leave it out, or "
                    f"give a --temperature above 0"
                )
    if args.rule and not any(task.kind == "choice" for _, tasks in jobs for task, _ in tasks.values()):
        raise ValueError("--rule: is for multiple choice, and none is asked; leave it out")


def eval_encoding(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The `Encoder`'s options: those of the run that is evaluated or that --like names, else the defaults."""
    from deftune.artifacts.encodings import encoding_of
    from deftune.artifacts.results import parse_result
    from deftune.artifacts.runs import Run

    own, like = parse_result(model)[0], None if args.like is None else Run(args.like)
    run = own or like
    if run is not None and args.template is not None:
        raise ValueError(f"--template: {run.folder} was trained with its own (data.template); leave it out")
    if own is not None and like is not None:
        raise ValueError(f"--like: {own.folder} is a run and is encoded as it was trained; leave it out")
    return encoding_of(like or model, template=args.template)


def run_heldout(args: argparse.Namespace, model: str) -> int:
    from deftune.artifacts.files import write_atomic
    from deftune.cli.eval_tables import render_summary
    from deftune.data.encoding import Encoder, encode_rows
    from deftune.data.rows import BadRows
    from deftune.evaluation.heldout import HeldoutSettings, measure, read_data, summarize
    from deftune.evaluation.results import Result
    from deftune.training.train import quiet

    if not args.data:
        raise ValueError("--suite heldout: name the dataset with --data (a file, a folder, a hub id, generated:NAME)")
    settings = HeldoutSettings(
        model=model, data=args.data, format=args.format or "auto", split=args.split, rows=args.rows,
        encoding=eval_encoding(args, model),
    )  # fmt: skip
    bad = BadRows(skip=args.skip_bad_rows)
    with progress() as working:
        working.show("reading the rows")
        rows = read_data(settings, bad)
        result = Result(result_folder(args, model, "heldout"))
        with result.writing(settings):
            working.show(f"loading {model}")
            loaded, tokenizer = load(model, trust_remote_code=args.trust_remote_code)
            working.show("encoding the rows")
            with quiet():
                encoder = Encoder(tokenizer, **settings.encoding)
                encoded = encode_rows(rows, encoder, bad=bad)
            if bad.rows:
                bad.write(result.folder / "bad_rows.jsonl")
                working.say(f"{bad.summary()}; see {result.folder / 'bad_rows.jsonl'}")
            ends = frozenset(encoder.end_ids.values())
            records = measure(
                result, loaded, tokenizer, encoded, ends, batch_rows=args.batch_size,
                progress=lambda done, total: working.show("rows", done, total),
            )  # fmt: skip
            summary = summarize(settings, records, encoded.facts())
            write_atomic(result.folder / "summary.json", json.dumps(summary, indent=1))
    say(json.dumps(summary, indent=1) if args.json else render_summary(summary))
    if not args.json:
        say(f"\n{result.folder}: deftune eval show {result.folder}")
    return 0


def run_show(args: argparse.Namespace, folders: list[Path]) -> int:
    from deftune.artifacts.terminal import printable
    from deftune.cli.eval_tables import render_summary
    from deftune.evaluation.heldout import read_rows
    from deftune.evaluation.results import Result

    result = Result(folders[0])
    summary = result.summary()
    number = 20 if args.rows is None else args.rows
    if summary["settings"]["suite"] == "heldout":
        if args.wrong or args.task:
            raise ValueError(f"--wrong, --task: {folders[0]} holds token statistics and no answers; leave them out")
        say(render_summary(summary))
        rows = sorted(read_rows(result), key=lambda r: -r["nll"] / r["tokens"])
        print(f"\nthe {min(number, len(rows))} rows with the highest NLL")
        print(f"{'nll':>8}{'p':>8}{'sum P^2':>8}{'tokens':>8}  row")
        for r in rows[:number]:
            means = "".join(f"{r[name] / r['tokens']:>8.3f}" for name in ("nll", "p", "concentration"))
            print(f"{means}{r['tokens']:>8}  {printable(r['where'])}")
        return 0
    print(render_summary(summary))
    records = [r for r in result.read_graded(*SHOWN) if not args.wrong or r["score"] < 1]
    if args.task:
        known = dict.fromkeys(row["task"] for row in summary["rows"])
        if unknown := [name for name in args.task if name not in known]:
            raise ValueError(f"--task: {folders[0]} has no task {unknown[0]!r}; it has {', '.join(known)}")
        records = [r for r in records if r["task"] in args.task]
    for r in records[:number]:
        print(f"\n--- {printable(r['id'])} T={r['temperature']:g} sample {r['sample']}: score {r['score']:g}")
        print(
            f"question: {printable(r['prompt'])}\nanswer:   {printable(r['text'])}\n"
            f"taken:    {r['answer']!r} ({printable(str(r['how']))})\ngold:     {printable(str(r['gold']))}"
        )
    if len(records) > number:
        print(f"\n{len(records) - number} more; --rows N shows more")
    return 0


def run_compare(args: argparse.Namespace, folders: list[Path]) -> int:
    from deftune.cli.eval_tables import render_comparison
    from deftune.evaluation.comparison import compare_folders

    found = compare_folders(folders[0], folders[1:])
    say(json.dumps(found, indent=1) if args.json else render_comparison(found))
    return 0


def run_list(args: argparse.Namespace, folders: list[Path]) -> int:
    from deftune.evaluation.items import available, find_data
    from deftune.evaluation.suites import SUITES, TASKS, coverage

    if args.data and not Path(args.data).is_dir():
        raise ValueError(f"--data: {args.data}: no such folder")
    listed = {name for suite in SUITES.values() for name in suite.tasks}
    others = tuple(name for name in TASKS if name not in listed)
    missing = available(TASKS, args.data)
    present = [name for name, why in missing.items() if not why]
    for title, names, have in [
        *((f"{suite.name}: {suite.about}", suite.tasks, coverage(suite, present)) for suite in SUITES.values()),
        ("single tasks, in no suite (--task)", others, f"{len(set(present) & set(others))} of {len(others)}"),
    ]:
        print(f"{title}\n  data {'below ' + args.data if args.data else 'on the hub'}: {have}")
        for name in names:
            task = TASKS[name]
            path = None if missing[name] else find_data(task, args.data)
            where = "generated" if task.source.generator else f"hub: {task.source.hub}" if path is None else str(path)
            size = f"{task.size:,} in the paper" if task.size else ""
            print(
                f"  {name:24}v{task.version:4}{task.kind:9}{size:20}{'no data' if missing[name] else where}\n"
                f"  {'':24}{task.about}{f' ({task.note})' if task.note else ''}"
            )
    print("heldout: token statistics of any dataset that training reads: --suite heldout --data FILE")
    return 0


def run_export(args: argparse.Namespace, folders: list[Path]) -> int:
    need_evaluation()
    from deftune.evaluation.harness import PREFIX, export_tasks

    if "heldout" in args.suite:
        raise ValueError("eval export-tasks: heldout asks no questions; the harness has nothing to run")
    tasks: dict[str, Any] = {}
    suites = named_suites(args)
    for suite in suites:
        found, missing = load_tasks(args, suite)
        tasks |= found
        for name, why in missing.items():
            notice(f"left out: {name}: {why}")
    chosen = [suite for suite in suites if suite]
    names = export_tasks(folders[0], tasks, chosen)
    print("\n".join(names))
    grouped = {PREFIX + name for suite in chosen for name in suite.averaged}  # run by the suite's own name
    wanted = ",".join(name for name in names if name not in grouped)
    print(
        "\nlm_eval --model hf --model_args pretrained=RUN/model --apply_chat_template "
        f"--include_path {shlex.quote(str(folders[0]))} --tasks {wanted}",
        file=sys.stderr,
    )
    return 0
