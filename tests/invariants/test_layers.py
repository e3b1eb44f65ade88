"""The house has one direction: a room imports from itself and from the rooms before it."""

import ast
import sys
from pathlib import Path

import deftune

ROOMS = ["objectives", "losses", "artifacts", "data", "tokens", "training", "evaluation", "inspection", "comparison",
         "paper", "adapters", "selftest", "cli"]  # fmt: skip
ON_TOP = {"paper", "adapters", "selftest", "cli"}  # nothing imports these but `cli`, and `selftest` nothing of them
CORE = ROOMS[:2]
HOME = Path(deftune.__file__).parent
MODULES = sorted(path for path in HOME.rglob("*.py") if path.relative_to(HOME).name != "_version.py")


def imports(path: Path):
    """(absolute module name, whether it is imported at the module's top level) of every import statement."""
    tree = ast.parse(path.read_text())
    lazy = {inner for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for inner in ast.walk(f) if inner is not f}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node not in lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            names = [node.module] if node.module != "deftune" else [f"deftune.{alias.name}" for alias in node.names]
            yield from ((name, node not in lazy) for name in names)


def inside():
    """(path, room, imported module, eager) over the rooms; the front door may open any of them."""
    for path in MODULES:
        parts = path.relative_to(HOME).parts
        if len(parts) > 1:
            yield from ((path, parts[0], module, eager) for module, eager in imports(path))
        else:
            assert parts[0] in ("__init__.py", "__main__.py"), f"{parts[0]} stands in no room"


def test_rooms_are_known_and_imports_never_look_back():
    seen = set()
    for path, room, module, _ in inside():
        assert room in ROOMS, f"{path}: unknown room {room}"
        if module.split(".")[0] == "deftune" and module != "deftune._version":
            other = module.split(".")[1]
            seen.add((room, other))
            assert other in ROOMS and ROOMS.index(other) <= ROOMS.index(room), f"{path} imports {module}"
            assert other not in ON_TOP or room in (other, "cli"), f"{path} imports {module}"
    assert ("losses", "objectives") in seen  # the walk does find imports


def test_the_core_needs_torch_only():
    for path, room, module, eager in inside():
        if room in CORE:
            package = module.split(".")[0]
            lazy_triton = package == "triton" and (not eager or path.name.startswith("triton_"))
            assert package in {"torch", "deftune", *sys.stdlib_module_names} or lazy_triton, f"{path} imports {module}"
