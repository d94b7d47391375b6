"""Optimizer states and parameters in 8 and 16 bits, as Optax transformations that need nothing else of zerojax."""

from zerojax.contrib.low_bit.moments import low_bit_moments
from zerojax.contrib.low_bit.parameters import stochastic_rounding

__all__ = ["low_bit_moments", "stochastic_rounding"]
