"""The notebooks run from the first cell to the last, in a folder of their own; their files are small enough to read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_comparison

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
MODEL = 'MODEL = "smollm2"'


def sources(notebook: Path, kind: str) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    return tiny_comparison.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tiny_model: Path, tmp_path: Path):
    """As a script, on a tiny model in place of SmolLM2, which CI does not download."""
    code = "\n".join(sources(notebook, "code"))
    assert notebook.stem == "objectives" or code.count(MODEL) == 1
    script = tmp_path / "notebook.py"
    script.write_text(code.replace(MODEL, f"MODEL = {str(tiny_model)!r}"), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_notebooks_are_small():
    assert [path.stem for path in NOTEBOOKS] == ["inspect_your_data", "objectives", "train_and_compare"]
    for notebook in NOTEBOOKS:
        assert notebook.stat().st_size < 100_000, f"{notebook.name}: strip the outputs, or draw less"
        assert len(sources(notebook, "code")) <= 8
