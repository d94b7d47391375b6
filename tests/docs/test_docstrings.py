"""The docstrings of public names, which make up the reference: each has one, and `Args` are those of its signature."""

import enum
import inspect
import re
import typing

import names
from support.paths import REPO

API = REPO / "docs" / "api"


def documented():
    """The public names that can be called: those of zerojax and its public modules, and those that pages list."""
    found = {f"{module.__name__}.{name}" for module in names.public_modules() for name in names.public(module)}
    found |= {f"{module}.{name}" for module, listed in names.listed(API) for name in listed}
    return sorted(name for name in found if callable(names.resolve(name)))


def callables(name):
    """Yields (name, function or class) of a public name and of its public methods."""
    value = names.resolve(name)
    yield name, value
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(member, "__func__", member)  # of a class method
        if not key.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{key}", function


def parameters(function):
    if typing.is_typeddict(function):
        return list(function.__annotations__)
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def described(doc):
    """The names in the section `Args` of a docstring, or in `Attributes` of a class."""
    found = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    lines = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", found[1], re.MULTILINE) if found else []
    return [name.lstrip("*") for line in lines for name in line.split(", ")]


def test_arguments_in_docstrings_are_those_of_signatures():
    differ = []
    for full_name, function in (pair for name in documented() for pair in callables(name)):
        doc = inspect.getdoc(function) or ""
        has_args = not inspect.isclass(function) or not issubclass(function, (BaseException, enum.Enum))
        if not doc or (has_args and described(doc) != parameters(function)):
            differ.append(full_name)
    assert not differ, "no docstring, or its Args are not those of the signature"


def test_every_public_name_is_in_the_reference():
    """The build of the site compares them with the names that it has documented; this needs no build."""
    blocks = [(module, name) for module, listed in names.listed(API) for name in listed or names.remaining(API, module)]
    data = re.findall(r"py:data:: ([\w.]+)", "".join(page.read_text() for page in API.glob("*.md")))
    found = [f"{module}.{name}" for module, name in blocks]
    missing = list(names.missing(API, [*found, *data]))
    assert not missing, f"not in the reference, name them in a block public-names in docs/api/: {missing}"
    assert len(set(found)) == len(found), "a name is listed twice"
