"""The public names: each is there, is documented, and loads nothing before it is used."""

import inspect
import subprocess
import sys

import pytest

import deftune

FUNCTIONS = [name for name in deftune.__all__ if inspect.isroutine(getattr(deftune, name))]


def test_all_names_are_there_and_sorted_into_tiers():
    assert set(deftune.__all__) == {*deftune._HOMES, "__version__"}
    assert all(hasattr(deftune, name) for name in deftune.__all__)
    assert {"Modifier", "compare", "from_columns", "inspect_rows", "register", "score_rows"} <= set(deftune.__all__)
    with pytest.raises(AttributeError, match="no attribute 'linear_los'"):
        deftune.linear_los  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes(name):
    """Every argument is named in the docstring, and an example stands there."""
    function = getattr(deftune, name)
    text = inspect.getdoc(function) or ""
    missing = [
        argument for argument in inspect.signature(function).parameters if argument.removeprefix("_") not in text
    ]
    assert not missing, f"{name}: the docstring does not name {missing}"
    assert ">>>" in text or "deftune." in text, f"{name}: no example"


def test_importing_loads_no_torch():
    code = "import sys, deftune; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
