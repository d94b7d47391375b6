"""The directive `public-names`: the reference of public names, from their docstrings.

    ```{public-names} zerojax
    Zero TrainState
    ```

documents the names that it lists, in this order. Without a list it documents every public name of the module that no
page lists, so that a new name is in the reference without an edit. At the end, the build warns of public names of
zerojax and of its public modules that it does not document.
"""

import enum
import inspect
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from names import missing, remaining, resolve
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

_LOG = logging.getLogger(__name__)


def autodoc(name: str) -> list[str]:
    """The directive of autodoc for a name."""
    value = resolve(name)
    if not inspect.isclass(value):
        return [f".. autofunction:: {name}", ""]
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    values = ["   :undoc-members:"] if issubclass(value, enum.Enum) else []
    return [f".. {kind}:: {name}", "   :members:", *values, ""]


class PublicNames(SphinxDirective):
    """Documents names of a module, see the module's docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        names = " ".join(self.content).split() or remaining(Path(self.env.srcdir) / "api", module)
        self.env.note_reread()
        lines = [line for name in names for line in autodoc(f"{module}.{name}")]
        node = nodes.Element()
        self.state.nested_parse(StringList(["```{eval-rst}", *lines, "```"]), self.content_offset, node)
        return node.children


def check(app: Any, error: Exception | None) -> None:
    """Warns of public names that are not in the reference."""
    if error is None:
        for name in missing(Path(app.srcdir) / "api", app.env.get_domain("py").objects):
            _LOG.warning("%s is public and not in the reference: name it in a block public-names in docs/api/", name)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("public-names", PublicNames)
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
