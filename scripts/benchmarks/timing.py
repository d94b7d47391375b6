"""Helpers of the benchmarks that time steps: the order of runs, paired ratios and package versions."""

import statistics
from importlib import metadata


def rotated(names, by):
    """The names, rotated to the left by `by` places."""
    by %= len(names)
    return names[by:] + names[:by]


def ratio(ours, theirs):
    """Median of paired ratios, or None if nothing was run."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if ours else None


def versions():
    from zerojax.utils.versions import __version__

    return {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")} | {"zerojax": __version__}
