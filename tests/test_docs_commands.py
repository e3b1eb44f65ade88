"""Every `deftune` command in README.md and docs/ has arguments that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest

from deftune.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> list[list[str]]:
    """The arguments of each `deftune` command in the shell blocks of a page.

    >>> commands("```bash\\ndeftune init run.yaml && torchrun -m deftune train run.yaml  # go\\n```")
    [['init', 'run.yaml'], ['train', 'run.yaml']]
    """
    found: list[list[str]] = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = next((i for i, word in enumerate(words) if word in ("&&", "|", ";", "<", ">")), len(words))
                part, words = words[:end], words[end + 1 :]
                if part[:1] == ["deftune"]:
                    found.append(part[1:])
                elif "-m" in part and part[part.index("-m") + 1] == "deftune":
                    found.append(part[part.index("-m") + 2 :])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_page_are_understood(page, capsys):
    for words in commands(page.read_text(encoding="utf-8")):
        try:
            build_parser().parse_args(words)
        except SystemExit as stopped:
            assert stopped.code == 0, f"deftune {shlex.join(words)}: {capsys.readouterr().err}"


def test_the_pages_have_commands():
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 100
