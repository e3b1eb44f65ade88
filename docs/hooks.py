"""mkdocs hooks: links from a page to files outside docs/, and the links of the Markdown files in the root folder.

A page links to a file of the repository by its relative path, which works in a checkout and on the code host. On the
site these links lead to the code host. A link to a file that does not exist is a warning, an error with --strict.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
log = logging.getLogger("mkdocs.hooks")


def on_pre_build(config: Any) -> None:
    """Check the links of README.md and the other Markdown files in the root folder."""
    for page in sorted(ROOT.glob("*.md")):
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            if not (ROOT / link[1]).exists():
                log.warning(f"{page.name}: links to {link[1]}, which does not exist")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files outside docs/ into links to the code host; changelog.md shows CHANGELOG.md."""
    if page.file.src_uri == "changelog.md":
        return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def absolute(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_relative_to(docs) or not target.is_relative_to(ROOT):
            return link[0]
        if not target.exists():
            log.warning(f"{page.file.src_uri}: links to {link[1]}, which does not exist")
        kind = "tree" if target.is_dir() else "blob"
        return f"{config['repo_url']}/{kind}/main/{target.relative_to(ROOT).as_posix()}{link[2] or ''}"

    # the code host wants \\| for a bar in a table's code, the site's Markdown wants it plain
    markdown = re.sub(r"`[^`\n]*\\\|[^`\n]*`", lambda code: code[0].replace("\\|", "|"), markdown)
    return LINK.sub(absolute, markdown)
