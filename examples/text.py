"""Text that every Python has: the source of its standard library, as bytes."""

from __future__ import annotations

import pathlib
import sysconfig

import numpy as np


def load() -> np.ndarray:
    """All top-level modules of the standard library, one after the other, as uint8."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def batch(text: np.ndarray, rows: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """Random excerpts: bytes x and the bytes y that follow each of them, int32 of shape (rows, length)."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length, rows)
    tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}
