"""Training text for the examples: the source of Python's standard library, as bytes."""

from __future__ import annotations

import pathlib
import sysconfig

import numpy as np


def load() -> np.ndarray:
    """The concatenated top-level modules of the standard library, as uint8."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def batch(text: np.ndarray, rows: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Random excerpts: bytes `x` and the byte that follows each of them `y`, both int32 of shape (rows, length)."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, rows)
    tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}
