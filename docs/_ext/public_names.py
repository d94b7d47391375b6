"""The directive `public-names`: the reference of the public names of a module that no other place of the reference has.

    ```{public-names} zerojax
    Zero TrainState
    ```

documents the names that it lists, in this order. Without a list it documents every name of `__all__` that the pages
do not list, so that a new name is in the reference without an edit. At the end, the build warns of public names that it
does not document.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
    others = {where for where, _ in documented(folder)}  # modules that have blocks of their own
    found = importlib.import_module(module)
    return [n for n in public(found) if n not in listed and not _is_own_page(getattr(found, n), others)]


def _is_own_page(value: Any, modules: set[str]) -> bool:
    return inspect.ismodule(value) and value.__name__ in modules


def lines(module: str, name: str) -> list[str]:
    """The directive of autodoc for a name."""
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value):
        raise ValueError(f"public-names: {module}.{name} is a module: give it a page of the reference in docs/api/")
    if not inspect.isclass(value):
        return [f".. {'autofunction' if inspect.isroutine(value) else 'autodata'}:: {module}.{name}", ""]
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    return [f".. {kind}:: {module}.{name}", "   :members:", *_inherited(value), ""]


def _inherited(value: type) -> list[str]:
    """Methods of zerojax's own base classes belong to the reference of a class, those of tuples and errors do not."""
    foreign = {base.__name__ for base in value.__mro__ if not base.__module__.startswith("zerojax")}
    return [f"   :inherited-members: {', '.join(sorted(foreign))}"]


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
    found = app.env.get_domain("py").objects
    for module in dict(documented(Path(app.srcdir) / "api")):
        for name in public(importlib.import_module(module)):
            if f"{module}.{name}" not in found:
                _LOG.warning("%s.%s is public and not in the reference, docs/api/", module, name)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
