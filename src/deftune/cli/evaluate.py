"""`deftune eval`: evaluate a model on questions or on held-out tokens, show results, and compare them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.cli.options import Renamed, add_row_options, add_trust, flag, need, parse_fields
from deftune.cli.output import notice, say
from deftune.cli.progress import progress

SHOWN = ("prompt", "text", "answer", "how", "gold")  # of a graded answer, by `eval show`


def add_to(commands: Any) -> None:
    parser = commands.add_parser("eval", help="evaluate a model on benchmarks or held-out tokens; compare results")
    verbs = parser.add_subparsers(metavar="ACTION", required=True)

    run = verbs.add_parser("run", help="ask a model the questions of suites and tasks, and grade the answers")
    run.add_argument(
        "model", metavar="MODEL", help="a model, a run, RUN:STEP, or with --endpoint the model's name there"
    )
    add_questions(run)
    how = run.add_argument_group("sampling and grading")
    how.add_argument("--samples", type=int, metavar="N", help="answers per item where T > 0 (default: the suite's)")
    add_list(
        how, "--temperature", "temperatures", "T", "0 is greedy (default: the suite's, or 0 for single tasks)", float
    )
    how.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling (default: 1, all tokens)")
    how.add_argument("--seed", type=int, help="seed of the sampling (default: 0)")
    how.add_argument("--max-new-tokens", type=int, metavar="N", help="token limit of an answer (default: the task's)")
    how.add_argument(
        "--rule",
        choices=["strict", "lenient"],
        help="how the letter of a multiple-choice answer is found (default: strict)",
    )
    how.add_argument("--workers", type=int, metavar="N", default=2, help="grading processes (default: 2)")
    add_model(run)
    engine = run.add_argument_group(
        "engine", "Which engine generates the answers; at T > 0 engines sample different answers."
    )
    engine.add_argument(
        "--engine", choices=["transformers", "vllm"], help="default: transformers; vllm must be installed"
    )
    engine.add_argument("--endpoint", dest="url", metavar="URL", help="an OpenAI-compatible server: http://host:8000")
    engine.add_argument("--batch-size", type=int, metavar="N", help="transformers: default 16, on a GPU up to 2048")
    engine.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="vllm: default bfloat16 on a GPU, else float32"
    )
    engine.add_argument("--max-model-len", type=int, metavar="N", help="vllm: tokens of prompt and answer together")
    engine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="vllm: a share above 0, at most 1"
    )
    engine.add_argument("--tensor-parallel-size", type=int, metavar="N", help="vllm: number of GPUs")
    engine.add_argument("--api-key-env", metavar="NAME", help="endpoint: the environment variable with the API key")
    engine.add_argument("--timeout", type=float, metavar="N", help="endpoint: seconds of a request (default: 600)")
    engine.add_argument("--retries", type=int, metavar="N", help="endpoint: retries of a failed request (default: 4)")
    engine.add_argument("--concurrency", type=int, metavar="N", help="endpoint: requests at a time (default: 8)")
    engine.add_argument("--extra-body", metavar="JSON", help="""endpoint: more fields of a request: '{"top_k": 20}'""")
    engine.add_argument(
        "--change-endpoint", action="store_true", help="endpoint: resume a result of another server with this one"
    )
    add_output(run, "results/MODEL-SUITE, results/MODEL-tasks without a suite")
    run.set_defaults(run=run_questions)

    heldout = verbs.add_parser("heldout", help="measure a model on the supervised tokens of any dataset")
    heldout.add_argument("model", metavar="MODEL", help="a model, a run, or RUN:STEP")
    heldout.add_argument("--data", required=True, help="a file, a folder, a hub id, or generated:NAME")
    add_row_options(heldout)
    heldout.add_argument(
        "--batch-size", type=int, metavar="N", help="most rows of a batch (default: batches of 8192 tokens)"
    )
    add_model(heldout)
    add_output(heldout, "results/MODEL-heldout")
    heldout.set_defaults(run=run_heldout)

    show = verbs.add_parser("show", help="the table of a result, and its answers or rows")
    show.add_argument("result", type=Path, metavar="RESULT", help="the folder of a result")
    show.add_argument("--wrong", action="store_true", help="only answers that were graded wrong")
    add_list(show, "--task", "tasks", "TASK", "only answers of this task")
    show.add_argument("--show", type=int, metavar="N", default=20, help="how many answers or rows (default: 20)")
    show.add_argument("--rows", action=Renamed, now="--show")
    show.set_defaults(run=run_show)

    compare = verbs.add_parser(
        "compare", help="gains and losses of results against a base, paired by item, with p-values"
    )
    compare.add_argument("base", type=Path, metavar="BASE", help="a result, or a folder with one result per suite")
    compare.add_argument("others", type=Path, nargs="+", metavar="RUN", help="results of other models")
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(run=run_compare)

    listing = verbs.add_parser("list", help="the suites, their tasks, and which tasks have data")
    listing.add_argument("--data", help="folder with the benchmarks' files (default: the hub)")
    listing.set_defaults(run=run_list)

    export = verbs.add_parser("export-tasks", help="write tasks for lm-evaluation-harness")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    add_questions(export)
    export.set_defaults(run=run_export)


def add_questions(parser: Any) -> None:
    group = parser.add_argument_group("questions")
    add_list(group, "--suite", "suites", "SUITE", "math, medical or figfont")
    add_list(group, "--task", "tasks", "TASK", "a task by name")
    add_list(group, "--task-file", "task_files", "FILE", "a task of your own (YAML)", Path)
    group.add_argument("--data", help="folder with the benchmarks' files (default: the hub)")
    group.add_argument("--limit", type=int, metavar="N", help="ask a sample of N items of each task")


def add_list(parser: Any, flag: str, name: str, metavar: str, about: str, kind: Any = str) -> None:
    """A flag that may be repeated, and gives the list ``name``."""
    parser.add_argument(
        flag, dest=name, action="append", default=[], type=kind, metavar=metavar, help=f"{about}; repeatable"
    )


def add_model(parser: Any) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--template", help="chatml, plain, or a .jinja file (default: the run's, or the tokenizer's)")
    group.add_argument(
        "--like", type=Path, metavar="RUN", help="encode prompts as this run does, to evaluate its base model"
    )
    add_trust(group)


def add_output(parser: Any, default: str) -> None:
    parser.add_argument("--out", type=Path, help=f"the result's folder (default: {default})")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def make_engine(args: argparse.Namespace) -> Any:
    """The engine that the flags describe; a flag of another engine is an error."""
    from deftune.evaluation.engines import Endpoint, Transformers, Vllm

    if args.url is not None and args.engine is not None:
        raise ValueError("--engine: an endpoint generates the answers itself; leave it out")
    flags = {Transformers: "--engine transformers", Vllm: "--engine vllm", Endpoint: "--endpoint URL"}
    chosen = Endpoint if args.url is not None else Vllm if args.engine == "vllm" else Transformers
    given: dict[str, Any] = {}
    for engine, needed in flags.items():
        for field in dataclasses.fields(engine):
            if (value := getattr(args, field.name)) is None:
                continue
            if engine is not chosen:
                raise ValueError(f"{flag(field.name)}: is for {needed}; leave it out")
            given[field.name] = value
    if "extra_body" in given:
        given["extra_body"] = parse_extra_body(given["extra_body"])
    return chosen(**given)


def parse_extra_body(text: str) -> dict[str, Any]:
    """A JSON object.

    >>> parse_extra_body('{"top_k": 20}')
    {'top_k': 20}
    """
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"""--extra-body: write a JSON object, such as '{{"top_k": 20}}'; got {text[:60]!r}""")
    return fields  # pyright: ignore[reportUnknownVariableType]


def run_questions(args: argparse.Namespace) -> int:
    need("eval")
    with progress() as working:
        working.show("loading the libraries")
        from deftune.cli.eval_tables import render_summary
        from deftune.evaluation.evaluate import describe_errors, evaluate

        def finished(outcome: Any) -> None:
            if not args.json:
                shown = f"{outcome.folder}: deftune eval show {shlex.quote(str(outcome.folder))} --wrong"
                working.print(f"{render_summary(outcome.summary)}\n\n{shown}")
                return
            for row in outcome.summary["rows"]:
                if errors := describe_errors(row):
                    working.say(f"{row['task']} T={row['temperature']:g}: {errors}")

        outcomes = evaluate(
            args.model, suites=args.suites, tasks=args.tasks, task_files=args.task_files, data=args.data,
            limit=args.limit, engine=make_engine(args), samples=args.samples, temperatures=args.temperatures,
            top_p=args.top_p, seed=args.seed, max_new_tokens=args.max_new_tokens, rule=args.rule,
            template=args.template, like=args.like, trust_remote_code=args.trust_remote_code,
            change_endpoint=args.change_endpoint, workers=args.workers, out=args.out, display=working,
            finished=finished,
        )  # fmt: skip
    if args.json:
        summaries = {name: outcome.summary for name, outcome in outcomes.items()}
        print(json.dumps(summaries if len(summaries) > 1 else next(iter(summaries.values())), indent=1))
    return int(any(outcome.failed for outcome in outcomes.values()))


def run_heldout(args: argparse.Namespace) -> int:
    need()
    with progress() as working:
        working.show("loading the libraries")
        from deftune.cli.eval_tables import render_heldout
        from deftune.evaluation.heldout import evaluate_heldout

        outcome = evaluate_heldout(
            args.model, args.data, format=args.format or "auto", fields=parse_fields(args.fields), split=args.split,
            rows=args.rows, skip_bad_rows=args.skip_bad_rows, template=args.template, like=args.like,
            batch_size=args.batch_size, trust_remote_code=args.trust_remote_code, out=args.out, display=working,
        )  # fmt: skip
    if args.json:
        say(json.dumps(outcome.summary, indent=1))
    else:
        shown = f"{outcome.folder}: deftune eval show {shlex.quote(str(outcome.folder))}"
        say(f"{render_heldout(outcome.summary)}\n\n{shown}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    need()
    from deftune.cli.eval_tables import render_answer, render_rows, render_summary
    from deftune.evaluation.heldout import read_rows
    from deftune.evaluation.results import Result

    check_counts(show=args.show)
    result = Result(args.result)
    summary = result.summary()
    if summary["settings"]["suite"] == "heldout":
        if args.wrong or args.tasks:
            raise ValueError(f"--wrong, --task: {args.result} holds token statistics and no answers; leave them out")
        say(f"{render_summary(summary)}\n\n{render_rows(read_rows(result), args.show)}")
        return 0
    known = dict.fromkeys(row["task"] for row in summary["rows"])
    if unknown := [name for name in args.tasks if name not in known]:
        raise ValueError(f"--task: {args.result} has no task {unknown[0]!r}; it has {', '.join(known)}")
    answers = [
        record
        for record in result.read_graded(*SHOWN)
        if (not args.wrong or record["score"] < 1) and record["task"] in (args.tasks or known)
    ]
    say("\n\n".join([render_summary(summary), *map(render_answer, answers[: args.show])]))
    if len(answers) > args.show:
        say(f"\n{len(answers) - args.show} more; --show N shows more")
    return 0


def run_compare(args: argparse.Namespace) -> int:
    need()
    from deftune.cli.eval_tables import render_comparison
    from deftune.evaluation.comparison import compare_folders

    found = compare_folders(args.base, args.others)
    say(json.dumps(found, indent=1) if args.json else render_comparison(found))
    return 0


def run_list(args: argparse.Namespace) -> int:
    need()
    from deftune.cli.eval_tables import render_tasks
    from deftune.evaluation.items import locate_tasks

    say(render_tasks(locate_tasks(args.data), args.data))
    return 0


def run_export(args: argparse.Namespace) -> int:
    need("eval")
    from deftune.evaluation.harness import PREFIX, export_tasks
    from deftune.evaluation.questions import load_questions

    found = load_questions(args.suites, args.tasks, args.task_files, data=args.data, limit=args.limit)
    for questions in found:
        for name, why in questions.missing.items():
            notice(f"left out: {name}: {why}")
    suites = [questions.suite for questions in found if questions.suite]
    tasks = {name: task for questions in found for name, task in questions.tasks.items()}
    names = export_tasks(args.folder, tasks, suites)
    print("\n".join(names))
    grouped = {PREFIX + name for suite in suites for name in suite.averaged}  # run by the name of the suite's group
    wanted = ",".join(name for name in names if name not in grouped)
    print(
        "\nlm_eval --model hf --model_args pretrained=RUN/model --apply_chat_template "
        f"--include_path {shlex.quote(str(args.folder))} --tasks {wanted}",
        file=sys.stderr,
    )
    return 0
