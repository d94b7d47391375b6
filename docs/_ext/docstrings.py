"""Turns the docstrings of zerojax, in which text may follow `Cost:` on the same line, into sections that napoleon reads."""

import re
from typing import Any

_SECTION = re.compile(r"^(Cost|Source|Returns|Raises): +(\S.*)$")


def split_sections(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Moves text that follows the name of a section to a line of its own: napoleon looks for the name alone.

    The lines of a section's text that are indented already stay where they are.
    """
    split = []
    for line in lines:
        match = _SECTION.match(line)
        split += [f"{match[1]}:", f"    {match[2]}"] if match else [line]
    lines[:] = split


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of named tuples: the section `Attributes` of their class describes them."""
    return True if re.match(r"Alias for field number \d+$", getattr(obj, "__doc__", None) or "") else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", split_sections, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip_fields)
    return {"parallel_read_safe": True}
