"""A page that a message names can be opened: in a checkout by its path, elsewhere by its address."""

import ast
from pathlib import Path

import deftune
from deftune.artifacts.pages import CHECKOUT, page

SOURCES = Path(deftune.__file__).parent


def test_a_checkout_has_the_file_and_a_wheel_names_the_address(tmp_path):
    assert (CHECKOUT / page("docs/choosing.md")).is_file()
    assert page("docs/choosing.md", checkout=tmp_path).startswith("https://") and "/docs/choosing.md" in page(
        "docs/choosing.md", checkout=tmp_path
    )


def test_every_page_that_is_named_exists():
    calls = [
        node.args[0].value
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "page"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert calls and all((CHECKOUT / name).is_file() for name in calls)
