"""The tested versions of JAX and Flax, which are checked when zerojax is imported."""

from __future__ import annotations

import re
from importlib import metadata

__version__ = "0.1.0"

# package: (first tested version, first version that is newer than the tested ones)
TESTED = {"jax": ((0, 10, 2), (0, 13)), "flax": ((0, 12, 6), (0, 13))}


def parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check(installed: dict[str, str] | None = None) -> None:
    """Raises ImportError if a version is outside the tested range."""
    for package, (first, beyond) in TESTED.items():
        version = (installed or {}).get(package) or metadata.version(package)
        if not first <= parse(version) < beyond:
            low, high = (".".join(map(str, v)) for v in (first, beyond))
            raise ImportError(
                f"zerojax: {package} {version} is not supported\n"
                f"  tested:   {package} >= {low}, < {high}\n"
                f"  fix:      pip install '{package}>={low},<{high}'"
            )


check()
