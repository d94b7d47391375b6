"""Stochastic rounding: up or down at random, so that the expected result is the value itself.

An average that moves by less than half the distance to the next number would never move if it were rounded to nearest.
The random bits are a hash of the position of the element and of the number of the step. They do not depend on the mesh,
and can be computed for a piece of an array alone.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from zerojax.utils.typing import Array, Shape

_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio; multiples of it are far from each other
_LOW_HALF = 0xFFFF


def random_bits(shape: Shape, step: Array, salt: int) -> Array:
    """32 random bits for each element of an array.

    Args:
        shape: of the array.
        step: int32 scalar.
        salt: distinguishes arrays.

    Returns:
        A uint32 array.
    """
    positions = jnp.zeros(shape, jnp.uint32)
    for d in range(len(shape)):
        stride = math.prod(shape[d + 1 :])
        positions += lax.broadcasted_iota(jnp.uint32, shape, d) * jnp.uint32(stride % 2**32)
    seed = _avalanche(step.astype(jnp.uint32) * jnp.uint32(_GOLDEN) + jnp.uint32(salt))
    return _avalanche(_avalanche(positions + jnp.uint32(_GOLDEN)) ^ seed)


def _avalanche(bits: Array) -> Array:
    """Each bit of the result depends on each bit of the argument.

    Source: the finalizer of MurmurHash3, Appleby, 2011.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ (bits >> jnp.uint32(16))


def uniform(shape: Shape, step: Array, salt: int) -> Array:
    """Random fp32 numbers in [0, 1), from `random_bits`."""
    return (random_bits(shape, step, salt) >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)


def to_bfloat16(values: Array, step: Array, salt: int) -> Array:
    """Rounds fp32 values to one of the two nearest bf16 numbers. Numbers of bf16, infinities and NaNs stay."""
    bits = lax.bitcast_convert_type(values, jnp.uint32) + (
        random_bits(values.shape, step, salt) & jnp.uint32(_LOW_HALF)
    )
    rounded = lax.bitcast_convert_type(bits & jnp.uint32(~_LOW_HALF & 0xFFFFFFFF), jnp.float32)
    return jnp.where(jnp.isfinite(values), rounded, values).astype(jnp.bfloat16)
