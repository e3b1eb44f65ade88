"""Draw the rooms of deftune and their imports, and count their lines.

    python benchmarks/architecture.py
    python benchmarks/architecture.py --since v0.1.0    # also print the lines by room at that commit

The script parses the imports of every module below src/deftune. It writes docs/images/rooms.svg, prints a table of
lines by room, and updates docs/architecture.md: the table between the `<!-- rooms -->` marks, and the counts between
the `<!-- walk -->` marks. A walk's counts are those of the modules that its text names, before and after its
`<!-- beside -->` mark.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "deftune"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"

# room -> (column, level, what the room holds); rooms are listed bottom to top, an import leads to a lower level
ROOMS = {
    "objectives": (1, 0, "statistics, objectives, specs"),
    "losses": (0, 1, "token_loss, linear_loss, backends"),
    "artifacts": (2, 1, "files, runs, configs, models"),
    "data": (2, 2, "rows, formats, masks, packing"),
    "tokens": (1, 3, "model + rows: token statistics"),
    "training": (0, 4, "DeftSFTTrainer, deftune train"),
    "evaluation": (2, 4, "tasks, samplers, grading"),
    "inspection": (2, 5, "inspector, token figures"),
    "comparison": (0, 6, "grid, summary, report"),
    "paper": (0, 7, "theory, recipes, claims"),
    "adapters": (2, 7, "other training stacks"),
    "selftest": (1, 5, "what must hold, measured"),
    "cli": (1, 8, "parsing and printing"),
}
WIDTH, HEIGHT, COLUMN, LEVEL, MARGIN = 230, 56, 270, 92, 20


def imported_rooms(path: Path) -> Iterator[str]:
    """The rooms that the import statements of a module name, lazy imports and imports for types included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "deftune":
            names = [f"deftune.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            package, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if package == "deftune" and room in ROOMS:
                yield room


def read_rooms() -> tuple[dict[str, int], dict[str, int], dict[str, set[str]]]:
    """(modules, lines, imports) of each room."""
    modules, lines = dict.fromkeys(ROOMS, 0), dict.fromkeys(ROOMS, 0)
    imports: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        if path.parent == PACKAGE:
            continue
        if room not in ROOMS:
            raise SystemExit(f"{path}: room {room!r} has no place in the picture; add it to ROOMS")
        modules[room] += path.name != "__init__.py"
        lines[room] += len(path.read_text(encoding="utf-8").splitlines())
        imports[room] |= set(imported_rooms(path)) - {room}
    return modules, lines, imports


def direct(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that no longer path implies: with a -> b -> c, the arrow a -> c is left out."""

    def reached(start: set[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(start)
        while waiting:
            room = waiting.pop()
            if room not in found:
                found.add(room)
                waiting.extend(imports[room])
        return found

    return [(a, b) for a in ROOMS for b in sorted(imports[a]) if b not in reached(imports[a] - {b})]


def corner(room: str) -> tuple[int, int]:
    """The upper left corner of a room's box."""
    column, level, _ = ROOMS[room]
    top = max(level for _, level, _ in ROOMS.values())
    return MARGIN + column * COLUMN, MARGIN + (top - level) * LEVEL


def render_svg(lines: dict[str, int], arrows: list[tuple[str, str]]) -> str:
    """The picture: a box for each room, bottom to top, and an arrow for each direct import."""
    columns = 1 + max(column for column, _, _ in ROOMS.values())
    levels = 1 + max(level for _, level, _ in ROOMS.values())
    width = 2 * MARGIN + (columns - 1) * COLUMN + WIDTH
    height = 2 * MARGIN + (levels - 1) * LEVEL + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>The packages of deftune, bottom to top; an arrow leads from a package to one that it imports</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5f6b7a"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for room, other in arrows:
        (left, top), (below_left, below_top) = corner(room), corner(other)
        shift = 0 if left == below_left else (60 if below_left > left else -60)
        parts.append(
            f'<line x1="{left + WIDTH // 2 + shift}" y1="{top + HEIGHT}" x2="{below_left + WIDTH // 2 - shift}" '
            f'y2="{below_top - 2}" stroke="#5f6b7a" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    for room, (_, _, holds) in ROOMS.items():
        left, top = corner(room)
        core = room in ("objectives", "losses")
        parts.append(
            f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
            f'fill="{"#d9ead3" if core else "#eef2f7"}" stroke="#33415c"/>'
            f'<text x="{left + 12}" y="{top + 23}" font-size="16" font-weight="bold" fill="#1b2433">{room}</text>'
            f'<text x="{left + WIDTH - 12}" y="{top + 23}" font-size="13" text-anchor="end" fill="#33415c">'
            f"{lines[room]:,} lines</text>"
            f'<text x="{left + 12}" y="{top + 43}" font-size="12.5" fill="#33415c">{escape(holds)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def render_table(modules: dict[str, int], lines: dict[str, int], imports: dict[str, set[str]]) -> str:
    """The rooms, top to bottom, as a Markdown table."""
    rows = ["| package | modules | lines | imports |", "|---|---:|---:|---|"]
    for room in reversed(ROOMS):
        names = ", ".join(other for other in reversed(ROOMS) if other in imports[room]) or "-"
        rows.append(f"| `{room}` | {modules[room]} | {lines[room]:,} | {names} |")
    rows.append(f"| all | {sum(modules.values())} | {sum(lines.values()):,} | |")
    return "\n".join(rows)


def count_walks(page: str) -> str:
    """The page with the modules and lines of each walk; a walk is the text from its mark to the next heading."""

    def modules_in(text: str) -> set[str]:
        found = set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", text))
        missing = sorted(name for name in found if not (PACKAGE / name).is_file())
        if missing:
            raise SystemExit(f"{PAGE}: the walk names modules that do not exist: {', '.join(missing)}")
        return found

    def counted(found: re.Match[str]) -> str:
        path, _, beside = page[found.end() :].partition("\n## ")[0].partition("<!-- beside -->")
        walked = modules_in(path)
        lines = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in walked)
        others = len(modules_in(beside) - walked)
        return f"{found[1]}{len(walked)} modules, {lines:,} lines; {others} modules beside the path{found[2]}"

    return re.sub(r"(<!-- walk \w+ -->)[^<]*(<!-- /walk -->)", counted, page)


def lines_at(revision: str) -> Counter[str]:
    """Lines by room at a commit; folders that are no room now are left as they were called."""
    command = ["git", "grep", "-c", "", revision, "--", "src/deftune/*.py"]
    counts: Counter[str] = Counter()
    for line in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        path, _, number = line.partition("src/deftune/")[2].rpartition(":")
        if "/" in path:
            counts[path.partition("/")[0]] += int(number)
    return counts


def print_change(revision: str, lines: dict[str, int]) -> None:
    """Print a Markdown table of the lines by room at a commit and now."""
    before = lines_at(revision)
    print(f"\n| package | lines at {revision} | now |\n|---|---:|---:|")
    for room in [*reversed(ROOMS), *sorted(before.keys() - ROOMS.keys())]:
        print(f"| `{room}` | {before[room]:,} | {lines.get(room, 0):,} |")
    print(f"| all | {before.total():,} | {sum(lines.values()):,} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the packages and count their lines.")
    parser.add_argument("--since", metavar="REV", help="also print the lines by package at this commit")
    since = parser.parse_args().since
    modules, lines, imports = read_rooms()
    upwards = [(a, b) for a in ROOMS for b in imports[a] if list(ROOMS).index(b) > list(ROOMS).index(a)]
    if upwards:
        raise SystemExit(f"imports that lead upwards: {upwards}")
    PICTURE.write_text(render_svg(lines, direct(imports)), encoding="utf-8")
    table = render_table(modules, lines, imports)
    page = PAGE.read_text(encoding="utf-8")
    marks = re.compile(r"(<!-- rooms -->\n).*?(\n<!-- /rooms -->)", re.DOTALL)
    if not marks.search(page):
        raise SystemExit(f"{PAGE}: has no <!-- rooms --> marks around the table")
    page = marks.sub(lambda found: found[1] + table + found[2], page)
    PAGE.write_text(count_walks(page), encoding="utf-8")
    print(table)
    if since:
        print_change(since, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
