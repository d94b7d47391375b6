"""Names in the source: one name for one thing, and no long lists of parameters."""

import ast
import collections

import pytest
from support.paths import REPO

PACKAGE = REPO / "zerojax"
PATHS = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
MOST_PARAMETERS = 8
OPTIONS = {"fit", "export", "Zero.__init__", "Checkpoints.__init__", "plan_command"}  # users see each option


def parse(path):
    return ast.parse(path.read_text())


def defined(tree):
    """The names that a module defines for others or as types: classes, constants and public functions."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not node.name.startswith("_")):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def functions(tree, inside=""):
    """(qualified name, number of parameters) of each function and method."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}{node.name}" if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""
        if isinstance(node, ast.FunctionDef):
            args = node.args
            named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            yield name, len([arg for arg in named if arg not in ("self", "cls")])
        yield from functions(node, f"{name}." if name else inside)


def test_no_name_is_defined_in_two_modules():
    modules = collections.defaultdict(list)
    for path in PATHS:
        for name in set(defined(parse(path))):
            modules[name].append(str(path.relative_to(PACKAGE)))
    assert modules
    assert {name: where for name, where in modules.items() if len(where) > 1 and name != "log"} == {}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_have_few_parameters(path):
    assert [(name, n) for name, n in functions(parse(path)) if n > MOST_PARAMETERS and name not in OPTIONS] == []
