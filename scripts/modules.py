"""Reads the graph of imports: the rooms of the package in their order, their imports and their cycles.

    python scripts/modules.py               # prints the size of the graph
    python scripts/modules.py --root DIR    # of another checkout

Tests check the order of the rooms, `ORDER`, and that there are no cycles.
"""

import argparse
import ast
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zerojax"
# The architecture, bottom up: each entry imports only entries before it.
ORDER = (
    "utils", "sharding", "comm", "program", "contrib", "processes", "step", "offload", "analysis", "checkpoints",
    "zero", "exchange", "deepspeed", "training", "run_report", "plan", "cli",
)  # fmt: skip


def modules(package: Path = PACKAGE) -> list[str]:
    """All modules of the package except `__init__`, as paths such as 'sharding/axes'."""
    paths = (path.relative_to(package).with_suffix("") for path in package.rglob("*.py") if path.stem != "__init__")
    return sorted(path.as_posix() for path in paths)


def top(module: str) -> str:
    """The folder of a module, or the module itself if it is at the top level."""
    return module.partition("/")[0]


def rank(module: str) -> int:
    """The position of a module's folder in the architecture."""
    return ORDER.index(top(module)) if top(module) in ORDER else len(ORDER)


def imports(module: str, known: Iterable[str], package: Path = PACKAGE) -> Iterator[tuple[str, bool]]:
    """Yields (module or folder of zerojax, whether the import is at the top level) for each import of a module."""
    tree = ast.parse((package / f"{module}.py").read_text())
    at_top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zerojax":
            below = "/".join(node.module.split(".")[1:])
            for name in node.names:
                found = f"{below}/{name.name}".lstrip("/")
                yield found if found in known or not below else below, id(node) in at_top_level
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("zerojax."):
                    yield "/".join(name.name.split(".")[1:]), id(node) in at_top_level


def import_graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each module -> the modules that it imports, also those that it imports inside of functions."""
    known = modules(package)
    return {module: {name for name, _ in imports(module, known, package) if name in known} for module in known}


def by_folder(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph of folders and top-level modules, from the graph of modules."""
    graph: dict[str, set[str]] = {}
    for module, below in edges.items():
        graph.setdefault(top(module), set()).update(top(name) for name in below if top(name) != top(module))
    return graph


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """A cycle of a graph, or [] if it has none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def describe_graph(package: Path = PACKAGE) -> str:
    """The size and the cycles of the graph of imports."""
    edges = import_graph(package)
    folders = by_folder(edges)

    def depth(name: str) -> int:
        return 1 + max(map(depth, folders[name]), default=0)

    rows = {
        "folders and top-level modules": len(folders),
        "imports between them": sum(map(len, folders.values())),
        "longest chain of imports": "endless" if cycle(folders) else max(map(depth, folders)),
        "cycle of folders": " -> ".join(cycle(folders)) or "none",
        "cycle of modules": " -> ".join(cycle(edges)) or "none",
    }
    return "\n".join(f"{name:29s} {value}" for name, value in rows.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose graph is printed")
    print(describe_graph(parser.parse_args().root / "zerojax"))


if __name__ == "__main__":
    main()
