"""`deftune doctor`: the installed packages, the machine, and whether attention and the fused loss work here."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from deftune.cli.output import say


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="check packages, GPU, disk, attention kernels and loss backends, and print what a run would use"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deftune._version import __version__
    from deftune.losses.triton_backend import interpreted
    from deftune.training.doctor import checkup

    say(f"deftune {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    found = checkup()
    show("packages", {name: version or "not installed" for name, version in found.packages.items()})
    if interpreted():
        say("  TRITON_INTERPRET=1: Triton kernels run in the interpreter, slowly")
    show("machine", found.machine)
    show("a run here", found.run)
    say("\nattention kernels of torch, a padded batch forward and backward against float64:")
    for one in found.attention:
        say(f"  {one.place:14} {one.name:9} {one.why:14} {one.verdict}")
    say("\nlinear_loss, backend='auto', forward and backward against float64:")
    for one in found.loss:
        say(f"  {one.place:14} {one.name:9} {one.why:60} {one.verdict}")
    well = "the losses work here; training is not installed" if "training" in found.run else "a run can start here"
    say("\n" + "\n".join([f"BROKEN: {line}" for line in found.broken] or [well]))
    return 1 if found.broken else 0


def show(title: str, facts: dict[str, str]) -> None:
    width = max(map(len, facts))
    say("\n".join([f"\n{title}:", *(f"  {name:{width}}  {text}" for name, text in facts.items())]))
