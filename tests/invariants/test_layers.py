"""The house has one direction: a room imports from itself and from the rooms before it."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import deftune

ROOMS = ["objectives", "losses", "artifacts", "data", "tokens", "training", "evaluation", "inspection", "comparison",
         "paper", "adapters", "selftest", "cli"]  # fmt: skip
# a room on top is imported by none but these
ON_TOP = {"paper": {"cli"}, "adapters": {"cli"}, "selftest": {"cli"}, "cli": set[str]()}
CORE = ROOMS[:2]
HOME = Path(deftune.__file__).parent
LEAVES = ("_version", "_suggest")  # modules beside the rooms, which import none of them
MODULES = sorted(path for path in HOME.rglob("*.py") if path.stem not in LEAVES)


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
        if module.split(".")[0] == "deftune" and module.split(".")[1] not in LEAVES:
            other = module.split(".")[1]
            seen.add((room, other))
            assert other in ROOMS and ROOMS.index(other) <= ROOMS.index(room), f"{path} imports {module}"
            assert room == other or room in ON_TOP.get(other, ROOMS), f"{path} imports {module}"
    assert ("losses", "objectives") in seen  # the walk does find imports


def test_leaves_import_nothing_of_deftune():
    for name in LEAVES:
        assert not [module for module, _ in imports(HOME / f"{name}.py") if module.split(".")[0] == "deftune"]


def test_no_two_modules_import_each_other():
    """Over any number of steps, whether at the top, inside a function, or for types alone."""
    names = {module_name(path): path for path in MODULES}
    graph = {
        name: {target for module in imported_modules(path) if (target := nearest(module, names)) and target != name}
        for name, path in names.items()
        if name != "deftune"  # the front door opens every room
    }
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) > 100 and sum(map(len, graph.values())) > 300  # the walk does find imports


def module_name(path: Path) -> str:
    return ".".join(["deftune", *path.relative_to(HOME).with_suffix("").parts]).removesuffix(".__init__")


def imported_modules(path: Path):
    """Every module that an import statement may load: `from deftune.data import rows` names deftune.data.rows."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def nearest(module: str, names: dict[str, Path]) -> str | None:
    """The module itself, or the one that holds the imported name; None for other packages and the front door."""
    found = module if module in names else module.rpartition(".")[0]
    return found if found in names and found != "deftune" else None


def test_the_core_needs_torch_only():
    for path, room, module, eager in inside():
        if room in CORE:
            package = module.split(".")[0]
            lazy_triton = package == "triton" and (not eager or path.name.startswith("triton_"))
            assert package in {"torch", "deftune", *sys.stdlib_module_names} or lazy_triton, f"{path} imports {module}"
