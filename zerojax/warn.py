"""Warnings that name the user's line, however deep in a trace they are raised."""

from __future__ import annotations

import sys
import warnings

_FRAMES_OF = ("zerojax", "jax", "flax", "optax", "contextlib", "functools")


def warn(text: str) -> None:
    """Warns at the innermost line that belongs to none of the packages that a step consists of."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _FRAMES_OF:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
