"""The public names of zerojax, and those that the pages of the reference list. Needs no Sphinx, so tests import it too.

Pages list names in blocks of the directive `public-names`. A block without names stands for all that no block lists.
"""

import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_BLOCK = re.compile(r"^```\{public-names\} ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def resolve(name: str) -> Any:
    """The object that a dotted name stands for. Raises ImportError or AttributeError if there is none."""
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for part in rest:
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(f"{getattr(found, '__name__', found)}.{part}")
    return found


def public(module: ModuleType) -> list[str]:
    """The public names of a module: `__all__`, or the functions and classes that it defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", sorted(name for name in defined if not name.startswith("_"))))


def public_modules() -> list[ModuleType]:
    """zerojax, and the modules among its public names."""
    zerojax = importlib.import_module("zerojax")
    return [zerojax, *filter(inspect.ismodule, (getattr(zerojax, name) for name in public(zerojax)))]


def listed(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields (module, names) for each block of the pages of a folder."""
    for page in sorted(folder.glob("*.md")):
        yield from ((module, names.split()) for module, names in _BLOCK.findall(page.read_text()))


def remaining(folder: Path, module: str) -> list[str]:
    """The public names of a module that no block lists."""
    elsewhere = {name for where, names in listed(folder) if where == module for name in names}
    found = importlib.import_module(module)
    return [name for name in public(found) if name not in elsewhere and callable(getattr(found, name))]


def missing(folder: Path, documented: Collection[str]) -> Iterator[str]:
    """Yields each public name that is not among the documented ones, and each public module without a block."""
    pages = {module for module, _ in listed(folder)}
    values = {id(resolve(name)) for name in documented}  # a name may be documented under another
    for module in public_modules():
        if not any(page.startswith(module.__name__) for page in pages):
            yield f"the module {module.__name__}"
        for name in public(module):
            known = f"{module.__name__}.{name}" in documented or id(getattr(module, name)) in values
            if not known and name != "__version__" and not inspect.ismodule(getattr(module, name)):
                yield f"{module.__name__}.{name}"
