"""What benchmarks that time steps share: the order of runs, ratios of pairs, versions."""

import statistics
from importlib import metadata


def rotated(names, by):
    by %= len(names)
    return names[by:] + names[:by]


def ratio(ours, theirs):
    """Median of paired ratios; None where nothing was run."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if ours else None


def versions():
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "zerojax")}
