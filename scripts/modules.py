"""The table of modules in docs/modules.md, generated from the first docstring line of every module.

    python scripts/modules.py            # prints the table
    python scripts/modules.py --write    # rewrites it in docs/modules.md

Modules and folders at the top level are in the order of `ORDER`; those that it does not list come last. Modules of a
folder are in the order of their imports.
"""

import argparse
import ast
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PAGE = ROOT / "zerojax", ROOT / "docs" / "modules.md"
HEADER = "| module | contents |\n|---|---|\n"
# The architecture, bottom up: each imports only what comes before it.
ORDER = (
    "versions", "typing", "sharding", "transform", "step", "losses", "analysis", "report", "audit", "processes",
    "checkpoints", "exchange", "train_step", "zero", "training", "plan", "doctor", "cli",
)  # fmt: skip


def modules() -> list[str]:
    """All modules below the package, such as 'sharding/axes', without `__init__`."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    return sorted(path.as_posix() for path in paths)


def top(module: str) -> str:
    """The folder of a module, or the module itself if it is in none."""
    return module.partition("/")[0]


def rank(module: str) -> int:
    """The position of a module's folder in the architecture."""
    return ORDER.index(top(module)) if top(module) in ORDER else len(ORDER)


def imports(module: str, known: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Modules and folders of zerojax that a module imports, each with whether that is at the top of the file."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    at_the_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "zerojax":
            below = "/".join(node.module.split(".")[1:])
            for name in node.names:
                found = f"{below}/{name.name}".lstrip("/")
                yield found if found in known or not below else below, id(node) in at_the_top
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("zerojax."):
                    yield "/".join(name.name.split(".")[1:]), id(node) in at_the_top


def in_order() -> list[str]:
    """All modules: folders in the order of the architecture, and in each folder those that are imported first."""
    known = modules()
    sorter = graphlib.TopologicalSorter(dict.fromkeys(known, ()))
    for module in known:
        wanted = {name for name, at_the_top in imports(module, known) if at_the_top}
        sorter.add(module, *(name for name in wanted if name in known and top(name) == top(module)))
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found += ready
        sorter.done(*ready)
    return sorted(found, key=lambda module: (rank(module), top(module)))


def summary(path: Path) -> str:
    """The first docstring line of a file."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].replace("|", "\\|")


def table() -> str:
    """The table, as Markdown. A folder is a row in bold, followed by its modules."""
    rows, folder = [], None
    for module in in_order():
        if "/" in module and top(module) != folder:
            folder = top(module)
            rows.append(f"| **`{folder}/`** | **{summary(PACKAGE / folder / '__init__.py')}** |")
        rows.append(f"| `{module}.py` | {summary(PACKAGE / f'{module}.py')} |")
    return HEADER + "\n".join(rows) + "\n"


def page() -> str:
    """docs/modules.md with the table of the present tree."""
    return PAGE.read_text().partition(HEADER)[0] + table()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite docs/modules.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
