"""8-bit codes of fp32 arrays: each block of the last dim has a scale, and codes are closer together near zero.

With the scale s of a block, which is its largest absolute value, a code k stands for

    s (k / 127)**2 sign(k)    for values of either sign, -127 <= k <= 127
    s (k / 255)**4            for values that are not negative, 0 <= k <= 255

The smallest numbers other than zero are 6.2e-5 s and 2.4e-10 s. Values are rounded stochastically, except that a
positive value does not become zero: it may be a divisor.

Source: that blocks of states with a nonlinear 8-bit code train as well as fp32 is from Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861, 2022. Its code is a table; powers need none.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from zerojax.contrib.low_bit.rounding import uniform
from zerojax.utils.typing import Array


class Code(NamedTuple):
    """A code of 8 bits.

    Attributes:
        dtype: of the codes.
        largest: the largest code.
        power: of the ratio between a code and the largest one, which is the value that it stands for; even.
    """

    dtype: type
    largest: int
    power: int

    def decode(self, codes: Array) -> Array:
        """The values of codes, without scales."""
        ratios = codes.astype(jnp.float32) / self.largest
        return jnp.sign(ratios) * jnp.abs(ratios) ** self.power

    def encode(self, values: Array, random: Array) -> Array:
        """Codes of values in [-1, 1].

        Args:
            values: fp32.
            random: numbers in [0, 1) that decide between the code below and the code above.
        """
        sizes, roots = jnp.abs(values), jnp.abs(values)
        for _ in range(self.power.bit_length() - 1):
            roots = jnp.sqrt(roots)
        below = jnp.clip(jnp.floor(roots * self.largest), 0, self.largest - 1)
        low, high = (self.decode(code) for code in (below, below + 1))
        chosen = below + (random * (high - low) < sizes - low)
        if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
            return jnp.where(values > 0, jnp.maximum(chosen, 1), 0).astype(self.dtype)
        return (jnp.sign(values) * chosen).astype(self.dtype)


SIGNED, NON_NEGATIVE = Code(jnp.int8, 127, 2), Code(jnp.uint8, 255, 4)


def encode_blocks(values: Array, code: Code, block: int, step: Array, salt: int) -> tuple[Array, Array]:
    """Encodes an array.

    Args:
        values: fp32, of at least one dim.
        code: `SIGNED`, or `NON_NEGATIVE` for values of which none is negative.
        block: the number of elements of the last dim that share a scale; the last block may have fewer.
        step, salt: as in `rounding.random_bits`.

    Returns:
        (codes of the shape of `values`, a scale for each block).
    """
    blocks = _blocks(values, block)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    relative = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    codes = code.encode(relative, uniform(blocks.shape, step, salt))
    return codes.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]], scales


def decode_blocks(codes: Array, scales: Array, code: Code, block: int) -> Array:
    """The fp32 values of codes with their scales."""
    values = code.decode(_blocks(codes, block)) * scales[..., None]
    return values.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]]


def _blocks(a: Array, block: int) -> Array:
    """Divides the last dim into blocks, with zeros at the end of the last one."""
    length = a.shape[-1]
    count = -(-length // block)
    if count == 1:
        return a[..., None, :]
    padded = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count * block - length)]) if length % block else a
    return padded.reshape(*a.shape[:-1], count, block)
