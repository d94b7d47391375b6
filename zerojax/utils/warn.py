"""Warnings and errors that name the user's line, however deep in a trace they are raised."""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from types import FrameType, TracebackType

_FRAMES_OF = ("zerojax", "jax", "flax", "optax", "contextlib", "functools")


def _is_of_user(frame: FrameType) -> bool:
    if name := frame.f_globals.get("__name__"):
        return name.partition(".")[0] not in _FRAMES_OF
    return not frame.f_code.co_filename.startswith(_files())  # JAX keeps the files of a trace, without their modules


@functools.cache
def _files() -> tuple[str, ...]:
    """The folder of each package and the file of each module in `_FRAMES_OF`."""
    files = [sys.modules[name].__file__ or "" for name in _FRAMES_OF if name in sys.modules]
    return tuple(file.removesuffix("__init__.py") if file.endswith(f"{os.sep}__init__.py") else file for file in files)


def line_of(raised: BaseException | TracebackType | None) -> str | None:
    """The file and line at which the user's code, or a model, called what raised an error; None if it is not known."""
    trace = raised.__traceback__ if isinstance(raised, BaseException) else raised
    found = [f"{f.f_code.co_filename}:{line}" for f, line in traceback.walk_tb(trace) if _is_of_user(f)]
    if not found and isinstance(raised, BaseException) and raised.__cause__:  # JAX raised it after the trace
        return line_of(raised.__cause__)
    return found[-1] if found else None


def is_called_by_user() -> bool:
    """Whether the caller of this function is called by the user's code itself, and not by JAX, which traces it."""
    return _is_of_user(sys._getframe(2))


def warn(text: str) -> None:
    """Warns at the innermost line that belongs to none of the packages that a step consists of."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and not _is_of_user(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
