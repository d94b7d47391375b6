"""Training runs: a complete training loop, and the directory that describes a run."""

from zerojax.training.evaluate import evaluate
from zerojax.training.loop import fit

__all__ = ["evaluate", "fit"]
