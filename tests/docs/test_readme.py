"""The README: its code runs, and its tree of the source names every module. Every public name has a docstring."""

import inspect
import re

import pytest
from support.paths import REPO

import zerojax

README = (REPO / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def heading_above(block):
    return re.findall(r"^#+ (.*)$", README[: README.index(block)], re.MULTILINE)[-1]


def test_there_is_code_for_each_way_in():
    names = ["A Flax NNX model", "A Flax Linen model", "The low level", "A large vocabulary", "Checkpoints",
             "Training runs", "Tensor parallelism"]  # fmt: skip
    assert [heading_above(block) for block in BLOCKS] == names


@pytest.mark.parametrize("block", BLOCKS, ids=heading_above)
def test_code_runs_on_its_own(block, capsys):
    before = README[: README.index(block)].count("\n")
    exec(compile("\n" * before + block, REPO / "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


TREE = re.findall(r"^  ([\w/]+)\.py ", README, re.MULTILINE)


def test_the_source_tree_names_every_module():
    paths = [path.relative_to(REPO / "zerojax") for path in (REPO / "zerojax").rglob("*.py")]
    assert sorted(TREE) == sorted(str(path.with_suffix("")) for path in paths if path.name != "__init__.py")


def imported(source):
    """The modules that a module imports, as the tree names them."""
    for package, names in re.findall(r"^from zerojax([\w.]*) import (.*)", source, re.MULTILINE):
        path = package.lstrip(".").replace(".", "/")
        modules = [f"{path}/{name.split(' as ')[0].strip()}".lstrip("/") for name in names.split(",")]
        yield from [path] if path in TREE else modules


def test_the_source_tree_is_in_the_order_of_imports():
    for i, name in enumerate(TREE):
        modules = set(imported((REPO / "zerojax" / f"{name}.py").read_text()))
        assert modules <= set(TREE[:i]), f"{name} imports {modules - set(TREE[:i])}, which the README lists later"


@pytest.mark.parametrize("name", zerojax.__all__)
def test_every_public_name_has_a_docstring(name):
    value = getattr(zerojax, name)
    if isinstance(value, str):
        assert name == "__version__"
        return
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        methods = {key: member for key, member in vars(value).items() if inspect.isfunction(member)}
        assert [key for key, method in methods.items() if not key.startswith("_") and not method.__doc__] == []
