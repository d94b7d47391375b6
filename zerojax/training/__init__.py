"""Training runs: a loop that is made of the public pieces, and the directory that tells about a run."""

from zerojax.training.loop import fit

__all__ = ["fit"]
