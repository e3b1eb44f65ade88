"""The command line, as a user runs it: in a process of its own where start-up is what is tested."""

import csv
import os
import subprocess
import sys

import pytest

from deftune.cli import main
from deftune.objectives.catalogue import ABOUT, MODIFIERS, OBJECTIVES


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "deftune", *args], capture_output=True, text=True)


def test_help_imports_nothing_but_the_standard_library():
    """Which is what makes it answer in 0.1 s; benchmarks/latency.py measures that."""
    probe = (
        "import sys; before = set(sys.modules); from deftune.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(loaded - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "objectives" in done.stdout
    assert done.stdout.splitlines()[-1] == "['deftune']"


def test_import_deftune_loads_neither_triton_nor_transformers():
    probe = (
        "import sys, deftune; deftune.token_loss; print({'triton', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_objective_of_a_users_file(tmp_path, capsys):
    """--import runs the file, and the processes that the command starts run it too."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import dataclasses, deftune\n"
        "@deftune.register('half-deft')\n@dataclasses.dataclass(frozen=True)\n"
        "class Half(deftune.Focus):\n    def focus(self, stats, context=None): return stats.concentration / 2\n"
    )
    assert main(["objectives", "show", "half-deft"]) == 2
    done = run("--import", str(path), "objectives", "show", "half-deft | floor(0.1)")
    assert done.returncode == 0 and done.stdout.startswith("spec         half-deft | floor(0.1)\n")
    inherited = subprocess.run(
        [sys.executable, "-m", "deftune", "objectives", "show", "half-deft"], capture_output=True,
        env={**os.environ, "DEFTUNE_IMPORT": str(path)},
    )  # fmt: skip
    assert inherited.returncode == 0
    assert main(["--import", "no.py", "objectives"]) == 2
    assert capsys.readouterr().err.endswith("no.py: no such file\n")


def test_table_names_every_objective_and_modifier(capsys: pytest.CaptureFixture[str]):
    assert main(["objectives"]) == 0
    printed = capsys.readouterr().out
    assert ABOUT.keys() == OBJECTIVES.keys() | MODIFIERS.keys()
    for name in ABOUT:
        assert name in printed


def test_a_narrow_terminal_gets_a_table_that_fits(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["objectives"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "deftune objectives show" in printed
    assert all(name in printed for name in ABOUT)


def test_show_prints_the_closed_form(capsys: pytest.CaptureFixture[str]):
    assert main(["objectives", "show", "linear"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert rows, "no row of numbers"
    for p, _, gate, signal, value in ([float(cell) for cell in row] for row in rows):
        assert gate == pytest.approx(p, abs=1e-4)
        assert signal == pytest.approx(p * (1 - p), abs=1e-4)
        assert value == pytest.approx(1 - p, abs=1e-4)


@pytest.mark.parametrize("spec", [*OBJECTIVES, *MODIFIERS, "deft | eos(nll) | mean_one", "deft | warmup(0.1)"])
def test_show_knows_every_name(spec: str, capsys: pytest.CaptureFixture[str]):
    spec = {"alpha": "alpha(0.3)", "top": "top(0.1)", "bottom": "bottom(0.1)"}.get(spec, spec)
    assert main(["objectives", "show", spec]) == 0
    assert "gate" in capsys.readouterr().out


def test_a_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert main(["objectives", "show", "defft"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("deftune: unknown objective 'defft'. Did you mean 'deft'?")
    assert err.count("\n") == 1


def test_plot_writes_pictures_and_their_tables(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert main(["objectives", "plot", "nll", "deft", "--out", str(tmp_path / "new")]) == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {f"{stem}.{kind}" for stem in ("gates", "signal_maps") for kind in ("png", "svg", "pdf", "csv")}
    assert (tmp_path / "new/gates.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = list(csv.DictReader((tmp_path / "new/gates.csv").open()))
    for row in rows:
        p, focus, gate = float(row["p"]), float(row["focus"]), float(row["gate"])
        assert gate == pytest.approx(p**focus, rel=1e-12)
        assert float(row["signal"]) == pytest.approx(gate * (1 - p), rel=1e-9)


def test_plot_refuses_what_a_curve_cannot_show(capsys: pytest.CaptureFixture[str]):
    assert main(["objectives", "plot", "deft | warmup(0.1)"]) == 2
    assert "progress" in capsys.readouterr().err
