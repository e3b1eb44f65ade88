"""What a release contains: the built wheel, its description, and one version everywhere."""

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

import deftune
from deftune.artifacts.config import Data, Model, Train

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    for module in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module, reason=f'{module} builds the wheel: pip install -e ".[test]"')
    folder = tmp_path_factory.mktemp("wheel")
    build = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.strip())


def test_wheel_holds_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "deftune").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {"deftune/py.typed", "deftune/paper/printed.json", "deftune/inspection/assets/page.html"} < files
    packed = {name for name in wheel.namelist() if not name.startswith(f"deftune-{deftune.__version__}.dist-info/")}
    assert packed == files


def test_description_links_to_the_code_host(wheel):
    """PyPI shows README.md, and has none of the files that README.md links to."""
    metadata = message_from_bytes(wheel.read(f"deftune-{deftune.__version__}.dist-info/METADATA"))
    description = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)\s]+)", description)
    assert links and all(link.startswith("https://") for link in links)
    assert "https://raw.githubusercontent.com/deftune/deftune/main/docs/images/inspect.png" in links
    assert "https://github.com/deftune/deftune/blob/main/CHANGELOG.md" in links


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.search(r"^## \[(\d[^]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert released is not None
    assert citation["version"] == deftune.__version__ == released[1]
    assert str(citation["date-released"]) == released[2]


def test_dockerfile_installs_as_the_start_page_says():
    """CI does not build the images: the instructions are read."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in lines} == {"FROM", "ARG", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    python = re.fullmatch(r"python:(\d+\.\d+)-slim", next(rest for word, rest in lines if word == "FROM"))
    assert python is not None and f"Python :: {python[1]}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    installs = " ".join(rest for word, rest in lines if word == "RUN").replace(" --no-cache-dir", "")
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    install = 'pip install -c constraints.txt -e ".[eval]"'
    assert install in installs and install in page
    variables = dict(pair.split("=", 1) for word, rest in lines if word == "ENV" for pair in rest.split())
    assert variables["HOME"] == "/tmp", "`docker run --user` has no home of its own, and matplotlib and Triton want one"
    for command in re.findall(r"docker build .*?(?=\s*#|\s*$)", text, re.M):
        assert " ".join(command.split()) in (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")


def test_keys_of_the_page_for_users_of_other_stacks_exist():
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    sections = {name: set(type_.model_fields) for name, type_ in (("data", Data), ("model", Model), ("train", Train))}
    named = re.findall(r"`(data|model|train)\.(\w+)", page)
    assert len(named) > 40
    assert not [f"{section}.{key}" for section, key in named if key not in sections[section]]
