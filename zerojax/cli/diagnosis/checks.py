"""The result of one check of a machine, with its fix."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Status(enum.Enum):
    """The status of a check.

    OK is a success, and INFO neither a success nor a failure. With WARNING, a run starts, but is slower, larger or
    noisier than it has to be. With ERROR, it fails.
    """

    OK = "ok"
    INFO = "info"
    WARNING = "warn"
    ERROR = "error"


class Check(NamedTuple):
    """A check of this machine.

    Attributes:
        name: what was checked.
        status: whether it succeeded.
        details: what was found.
        fix: how to fix a failure; empty if there is none.
    """

    name: str
    status: Status
    details: str
    fix: str = ""


def failed(name: str, error: ValueError) -> Check:
    """The check that an error of three lines reports: what is wrong, what was found, and the fix."""
    what, got, fix, *_ = [*str(error).split("\n"), "", ""]
    text = f"{what.partition(': ')[2]} ({got.removeprefix('  got:').strip()})"
    return Check(name, Status.ERROR, text, fix.removeprefix("  fix:").strip())
