"""The directive `public-names`: the reference of public names, from their docstrings.

    ```{public-names} zerojax
    Zero TrainState
    ```

documents the names that it lists, in this order. Without a list it documents every public name of the module that no
page lists, so that a new name is in the reference without an edit. At the end, the build warns of public names of
zerojax and of its public modules that it does not document.
"""

import enum
import importlib
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docstrings import resolve
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

_BLOCK = re.compile(r"^```\{public-names\} ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LOG = logging.getLogger(__name__)


def public(module: ModuleType) -> list[str]:
    """The public names of a module: `__all__`, or the functions and classes that it defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", sorted(name for name in defined if not name.startswith("_"))))


def documented(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields (module, names) for each block of the pages of the reference."""
    for page in sorted(folder.glob("*.md")):
        yield from ((module, names.split()) for module, names in _BLOCK.findall(page.read_text()))


def remaining(folder: Path, module: str) -> list[str]:
    """The public names of a module that no block lists."""
    listed = {name for where, names in documented(folder) if where == module for name in names}
    found = importlib.import_module(module)
    return [name for name in public(found) if name not in listed and callable(getattr(found, name))]


def missing(folder: Path, found: Collection[str]) -> Iterator[str]:
    """Yields each public name of zerojax and of its public modules that is not among the documented names."""
    zerojax = importlib.import_module("zerojax")
    pages = {module for module, _ in documented(folder)}
    values = {id(resolve(name)) for name in found}  # a name may be documented under another
    for module in (zerojax, *filter(inspect.ismodule, (getattr(zerojax, name) for name in public(zerojax)))):
        if not any(page.startswith(module.__name__) for page in pages):
            yield f"the module {module.__name__}"
        for name in public(module):
            known = f"{module.__name__}.{name}" in found or id(getattr(module, name)) in values
            if not known and name != "__version__" and not inspect.ismodule(getattr(module, name)):
                yield f"{module.__name__}.{name}"


def lines(module: str, name: str) -> list[str]:
    """The directive of autodoc for a name."""
    value = getattr(importlib.import_module(module), name)
    if not inspect.isclass(value):
        return [f".. autofunction:: {module}.{name}", ""]
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    values = ["   :undoc-members:"] if issubclass(value, enum.Enum) else []
    return [f".. {kind}:: {module}.{name}", "   :members:", *values, ""]


class PublicNames(SphinxDirective):
    """Documents names of a module, see the module's docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        names = " ".join(self.content).split() or remaining(Path(self.env.srcdir) / "api", module)
        self.env.note_reread()
        text = ["```{eval-rst}", *(line for name in names for line in lines(module, name)), "```"]
        node = nodes.Element()
        self.state.nested_parse(StringList(text, self.env.docname), self.content_offset, node)
        return node.children


def check(app: Any, error: Exception | None) -> None:
    """Warns of public names that are not in the reference."""
    if error is not None:
        return
    for name in missing(Path(app.srcdir) / "api", app.env.get_domain("py").objects):
        _LOG.warning("%s is public and not in the reference: name it in a block public-names in docs/api/", name)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
