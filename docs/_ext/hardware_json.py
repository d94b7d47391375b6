"""Writes the constants of zerojax that the calculator uses into the site, so that the two cannot differ."""

from typing import Any


def setup(app: Any) -> dict[str, bool]:
    return {"parallel_read_safe": True}
