"""Imports between the rooms of the package point one way, also those inside of functions."""

import ast
import graphlib

from support.paths import REPO

PACKAGE = REPO / "zerojax"
CORE = ("utils", "sharding", "comm", "program", "step")
AROUND = ("processes", "contrib", "offload", "analysis", "checkpoints", "zero", "exchange", "training", "plan", "cli")
ORDER = (*CORE, *AROUND)  # each room imports only rooms before it


def edges():
    """Module -> the modules of zerojax that it imports, as paths without their suffix; `__init__` is a folder."""
    paths = {path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")}
    known = {(path.parent if path.name == "__init__" else path).as_posix(): path for path in paths}
    graph = {}
    for module, path in known.items():
        found = set()
        tree = ast.parse((PACKAGE / path).with_suffix(".py").read_text())
        types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        not_run = {id(node) for block in types for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) in not_run:
                continue
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "zerojax":
                below = "/".join(node.module.split(".")[1:]) or "."
                names = {name.name: f"{below}/{name.name}".removeprefix("./") for name in node.names}
                found |= {full if full in known else below for full in names.values()}
            elif isinstance(node, ast.Import):
                names = [name.name.split(".")[1:] for name in node.names if name.name.startswith("zerojax.")]
                found |= {"/".join(parts) for parts in names}
        graph[module] = found & set(known)
    return graph


def room(module):
    return module.partition("/")[0]


def test_imports_between_rooms_point_one_way():
    rank = {name: number for number, name in enumerate(ORDER)}
    graph = {module: below for module, below in edges().items() if module != "."}  # `import zerojax` has all names
    assert {room(module) for module in graph} <= set(rank), "add the room to ORDER"
    up = [
        f"{module} imports {below}"
        for module, imported in graph.items()
        for below in imported
        if below != "." and rank[room(below)] > rank[room(module)]
    ]
    assert sorted(up) == []


def test_no_modules_import_each_other():
    graph = {module: below - {"."} for module, below in edges().items() if module != "."}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that shows the cycle
