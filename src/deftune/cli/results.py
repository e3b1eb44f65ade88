"""`deftune quickstart`, `chat`, `merge`, `verify`: the first five minutes, and what to do with a result."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.cli.options import add_trust, need
from deftune.cli.output import notice, say


def add_to(commands: Any) -> None:
    quick = commands.add_parser(
        "quickstart", help="tune SmolLM2 with NLL and with DEFT on this machine, in a few minutes"
    )
    quick.add_argument("--out", type=Path, default=Path("quickstart"), help="folder (default: quickstart/)")
    quick.add_argument("--clean", action="store_true", help="only remove what an earlier call wrote there")
    quick.set_defaults(run=run_quickstart)

    chat = commands.add_parser("chat", help="talk to a run, or to a model")
    chat.add_argument("model", metavar="MODEL", help="a run's folder, RUN:STEP, or any model that `train` takes")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--template", help="chatml, plain, or a .jinja file (default: the tokenizer's)")
    chat.add_argument(
        "--temperature", type=float, metavar="T", default=0.0, help="sampling temperature; 0 is greedy (default)"
    )
    chat.add_argument(
        "--max-new-tokens", type=int, metavar="N", default=512, help="most tokens of an answer (default: 512)"
    )
    add_trust(chat)
    chat.set_defaults(run=run_chat)

    merge = commands.add_parser("merge", help="write the model of a LoRA run as a plain model folder")
    merge.add_argument("folder", type=Path, metavar="RUN", help="the folder of a LoRA run")
    merge.add_argument("--out", type=Path, help="the new folder (default: RUN/merged)")
    add_trust(merge)
    merge.set_defaults(run=run_merge)

    verify = commands.add_parser(
        "verify", help="compare weights and checkpoints with the checksums written beside them"
    )
    verify.add_argument("folder", type=Path, help="a run, a checkpoint, or a model folder that a run or `merge` wrote")
    verify.set_defaults(run=run_verify)


def run_quickstart(args: argparse.Namespace) -> int:
    need()
    from rich.console import Console

    from deftune.comparison.quickstart import clean, gigabytes, quickstart

    if args.clean:
        print(f"{args.out}: {gigabytes(clean(args.out))} removed")
        return 0
    quickstart(args.out, Console())
    return 0


def run_chat(args: argparse.Namespace) -> int:
    need()
    check_counts(max_new_tokens=args.max_new_tokens)
    if not args.temperature >= 0:  # nor NaN
        raise ValueError(f"--temperature: at least 0, got {args.temperature:g}")
    from deftune.artifacts.display import quiet
    from deftune.artifacts.results import encoding_of, load_result
    from deftune.artifacts.terminal import printable
    from deftune.data.encoding import Encoder, EncodingError
    from deftune.training.results import reply

    with quiet():
        model, tokenizer = load_result(args.model, notice, trust_remote_code=args.trust_remote_code)
    # the template of a run is saved with its tokenizer
    encoder = Encoder(tokenizer, **{**encoding_of(args.model), "template": args.template})
    start: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        print("/reset forgets the conversation, /quit or Ctrl-D ends it")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text in ("/quit", "/exit"):
            return 0
        if text == "/reset":
            messages = list(start)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
        try:
            for piece in reply(model, tokenizer, encoder, messages, **options):
                answer += piece
                print(printable(piece), end="", flush=True)
        except EncodingError as error:
            hint = "leave out --system, or pass --template" if args.system else "pass another --template"
            raise ValueError(f"the chat template refuses the conversation ({error.__cause__}); {hint}") from error
        print()
        messages.append({"role": "assistant", "content": answer})


def run_merge(args: argparse.Namespace) -> int:
    need()
    from deftune.artifacts.display import quiet
    from deftune.artifacts.runs import Run
    from deftune.training.results import merge

    with quiet():
        out = args.out or args.folder / "merged"
        say(str(merge(Run(args.folder), out, notice, trust_remote_code=args.trust_remote_code)))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Exit code 1 where a file is damaged."""
    need()
    from deftune.artifacts.folders import FolderError
    from deftune.artifacts.results import verify_folder

    try:
        verify_folder(args.folder, say)
    except FolderError as error:
        notice(f"deftune: {error}")
        return 1
    return 0
