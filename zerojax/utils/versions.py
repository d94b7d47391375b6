"""The tested versions of JAX and Flax, which are checked when zerojax is imported."""

from __future__ import annotations

import re
from importlib import metadata, util

__version__ = "0.1.0"

# package: (first tested version, first version that is newer than the tested ones)
TESTED = {"jax": ((0, 10, 2), (0, 13)), "flax": ((0, 12, 6), (0, 13))}
# The compilers of `zerojax plan --compile` by platform: the name, and the packages of which one has it.
_COMPILERS = {"cuda": ("GPU", ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")), "tpu": ("TPU", ("libtpu",))}


def parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check(installed: dict[str, str] | None = None) -> None:
    """Raises ImportError if a version is outside the tested range."""
    for package, (first, beyond) in TESTED.items():
        version = (installed or {}).get(package) or metadata.version(package)
        if not first <= parse(version) < beyond:
            low, high = (".".join(map(str, v)) for v in (first, beyond))
            tested, fix = f"{package} >= {low}, < {high}", f"pip install '{package}>={low},<{high}'"
            raise ImportError(f"zerojax: {package} {version} is not supported\n  tested:   {tested}\n  fix:      {fix}")


def missing_compiler(platform: str) -> str | None:
    """Says which compiler, for 'cuda', 'tpu' or 'cpu', is not installed, and how to install it; None if it is."""
    name, packages = _COMPILERS.get(platform, ("CPU", ("jax",)))
    if any(map(_is_installed, packages)):
        return None
    return f"no {name} compiler is installed (pip install 'zerojax[plan-{name.lower()}]')"


def _is_installed(package: str) -> bool:
    try:
        return util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


check()
