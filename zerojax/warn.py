"""Warnings and errors that name the user's line, however deep in a trace they are raised."""

from __future__ import annotations

import sys
import traceback
import warnings
from types import FrameType

_FRAMES_OF = ("zerojax", "jax", "flax", "optax", "contextlib", "functools")


def _is_of_user(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _FRAMES_OF


def line_of(error: BaseException) -> str:
    """The file and line at which the user's code, or that of a model, called what raised an error."""
    found = [f"{f.f_code.co_filename}:{line}" for f, line in traceback.walk_tb(error.__traceback__) if _is_of_user(f)]
    return found[-1] if found else "an unknown line"


def warn(text: str) -> None:
    """Warns at the innermost line that belongs to none of the packages that a step consists of."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and not _is_of_user(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
