"""Lets Sphinx read the docstrings of zerojax, which are written to be read in the source."""

import re
from typing import Any

from docutils import nodes
from names import resolve
from sphinx.util.nodes import make_refnode

_CODE_OR_STAR = re.compile(r"`[^`]*`|\*")
_SECTION = re.compile(r"^(Cost|Source|Returns|Raises): +(\S.*)$")


def prepare(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Moves the text after `Cost:` to a line of its own, as napoleon expects it, and marks code that is indented.

    A star outside of backticks is that of a glob, and does not begin emphasis.
    """
    prepared: list[str] = []
    for number, line in enumerate(lines):
        match = _SECTION.match(line)
        if line.startswith("    ") and number >= 2 and not lines[number - 1] and lines[number - 2][:1].strip():
            prepared += ["::", ""]
        prepared += [f"{match[1]}:", f"    {match[2]}"] if match else [line]
    lines[:] = [_CODE_OR_STAR.sub(lambda found: r"\*" if found[0] == "*" else found[0], line) for line in prepared]


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples: the section `Attributes` of their class describes them."""
    return True if re.match(r"Alias for field number \d+$", getattr(obj, "__doc__", None) or "") else None


def missing_reference(app: Any, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Resolves a name of zerojax that is documented under another, and accepts one that exists but is not public.

    A name that does not exist stays unresolved, which is a warning.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("zerojax."):
        return None
    try:
        found = resolve(target)
    except (ImportError, AttributeError):
        return None
    canonical = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', None)}"
    entry = env.get_domain("py").objects.get(canonical)
    if entry is None:
        return content
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, canonical)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", prepare, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", missing_reference)
    return {"parallel_read_safe": True}
