"""Dependencies: versions and licences of what `deftune[eval]` installs, known vulnerabilities, what an import needs.

    python benchmarks/audit.py --out benchmarks/results/reliability_audit.json

Vulnerabilities are looked up by pip-audit where it is installed and reaches its database; else the figure says so.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from deftune.selftest.records import Record, write_records


def requirements(package: str, extras: frozenset[str], seen: dict[str, str]) -> None:
    """Fill ``seen`` with what a package needs, and what that needs: name -> version."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return
    name = found.metadata["Name"].lower().replace("_", "-")
    if name in seen and not extras:
        return
    seen[name] = found.version
    for line in found.requires or []:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if extra and extra[1] not in extras:
            continue
        match = re.match(r"\s*([\w.-]+)(?:\[([\w,-]+)\])?", requirement)
        if match:
            requirements(match[1], frozenset((match[2] or "").split(",")) - {""}, seen)


def licence(package: str) -> str:
    about: Any = metadata.metadata(package)
    named: str = about.get("License-Expression") or ""
    if not named:
        classes = [c.rsplit("::", 1)[1].strip() for c in about.get_all("Classifier") or [] if c.startswith("License")]
        named = ", ".join(classes) or next(iter((about.get("License") or "").splitlines()), "")
    return (named or "not stated")[:60]


def imports_with_torch_only(packages: list[str]) -> bool:
    """Whether `import deftune` and its core work where every package but torch and torch's own is missing."""
    torchs: dict[str, str] = {}
    requirements("torch", frozenset(), torchs)
    missing = sorted(set(packages) - set(torchs))
    code = f"""
import importlib.metadata as metadata, sys
missing = {{n for n, owners in metadata.packages_distributions().items()
           if {{o.lower().replace("_", "-") for o in owners}} <= set({missing!r})}}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import deftune, torch
deftune.linear_loss(torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 2]), "deft")
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def help_without_torch() -> bool:
    code = "import sys\ntry:\n import deftune.cli as c; c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def vulnerabilities(packages: list[str]) -> str:
    """Known vulnerabilities of ``packages``; a package that pip-audit passes over is not counted as sound."""
    if shutil.which("pip-audit") is None:
        return "vulnerabilities not looked up: pip-audit is not installed"
    command = ["pip-audit", "--format", "json", "--path", sysconfig.get_path("purelib")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    try:
        found = [p for p in json.loads(done.stdout)["dependencies"] if p["name"] in packages]
    except (ValueError, KeyError):
        return "vulnerabilities not looked up: pip-audit did not reach its database"
    audited = [p for p in found if "skip_reason" not in p]
    if not audited:
        return f"vulnerabilities not looked up: pip-audit found none of the {len(packages)} packages in its database"
    hurt = [f"{p['name']} {p['version']}" for p in audited if p["vulns"]]
    return (
        f"{len(hurt)} of {len(audited)} audited packages have known vulnerabilities{': ' * bool(hurt)}{', '.join(hurt)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    begun = time.monotonic()
    seen: dict[str, str] = {}
    requirements("deftune", frozenset({"eval"}), seen)
    seen.pop("deftune", None)
    licences = {name: licence(name) for name in sorted(seen)}
    for name, version in sorted(seen.items()):
        print(f"{name:28}{version:14}{licences[name]}")
    alone, light, known = imports_with_torch_only(list(seen)), help_without_torch(), vulnerabilities(list(seen))
    copyleft = [n for n, text in licences.items() if re.search(r"\bA?GPL|GNU (Affero )?General Public", text)]
    figure = (
        f"{len(seen)} packages behind deftune[eval]; copyleft: {', '.join(copyleft) or 'none'}; `import deftune` and "
        f"its losses {'need torch only' if alone else 'FAIL with torch only'}; `--help` "
        f"{'without' if light else 'WITH'} torch; {known}"
    )
    print(figure)
    holds = alone and light and not copyleft
    if args.out:
        details = {name: f"{seen[name]}, {licences[name]}" for name in sorted(seen)}
        seconds = time.monotonic() - begun
        record = Record.of(None, "dependencies", figure, holds, seconds, "python benchmarks/audit.py", details)
        write_records(args.out, [record])
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
