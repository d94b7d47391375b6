"""Ends the processes of a launcher that was killed.

    guard.py GRACE_S

Each line of the input lists the process groups that run now. When the input ends, because the launcher closed it or was
killed, those of the last line receive SIGTERM, and after GRACE_S seconds SIGKILL. A launcher that ends by itself writes
an empty line.

This is a program that the launcher starts by its path, without the rest of zerojax: it takes 10 ms and 8 MB. The kernel
can send a signal to a process whose parent ends (`prctl(PR_SET_PDEATHSIG)`), but not to the children of that process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

_CHECK_S = 0.05


def guard(lines: Iterable[str], grace_s: float) -> None:
    """Waits until the lines end; then ends the process groups of the last one."""
    groups: list[int] = []
    for line in lines:
        groups = [int(group) for group in line.split()]
    groups = _signalled(groups, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while groups and time.monotonic() < deadline:
        time.sleep(_CHECK_S)
        groups = _signalled(groups, 0)
    _signalled(groups, signal.SIGKILL)


def _signalled(groups: list[int], number: int) -> list[int]:
    """Sends a signal to process groups; 0 sends none. Returns the groups that exist."""
    found = []
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue
        found.append(group)
    return found


if __name__ == "__main__":
    guard(sys.stdin, float(sys.argv[1]))
