"""Optimizer states and parameters in 8 and 16 bits, as Optax transformations that need nothing else of zerojax.

What is stored in few bits is rounded stochastically: up or down at random, so that the expected result is the value
itself. An average that moves by less than half the distance to the next number would never move if it were rounded to
nearest. The random bits are a hash of the position of the element and of the number of the step. They do not depend on
the mesh, and can be computed for a piece of an array alone.

Codes of 8 bits are closer together near zero. With the scale s of a block of the last dim, which is its largest
absolute value, a code k stands for

    s (k / 127)**2 sign(k)    for values of either sign, -127 <= k <= 127
    s (k / 255)**4            for values that are not negative, 0 <= k <= 255

The smallest numbers other than zero are 6.2e-5 s and 2.4e-10 s. A positive value does not become zero: it may be a
divisor.

Source: that blocks of states with a nonlinear 8-bit code train as well as fp32 is from Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", arXiv 2110.02861, 2022. Its code is a table; powers need none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import KeyPath

from zerojax.utils.text import error_text
from zerojax.utils.typing import Array, ArrayLike, PyTree, Shape

__all__ = ["low_bit_moments", "stochastic_rounding"]

_BLOCK = 256
_FIRST_SALT = 2**16  # of parameters, whose random bits are others than those of moments
_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio; multiples of it are far from each other
_LOW_HALF = 0xFFFF

# Moments


class LowBitState(NamedTuple):
    """The state of `low_bit_moments`."""

    count: Array  # int32 scalar, the number of updates
    inner: PyTree  # the state of the optimizer, in which moments are codes of 8 bits or bf16
    scales: PyTree  # of the blocks, where there are codes; `optax.MaskedNode` elsewhere


def low_bit_moments(
    tx: optax.GradientTransformation, bits: int = 8, *, exempt: Sequence[str] = ("*embed*",), min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose moments are stored in 8 or 16 bits. It computes with them in fp32.

    Moments are the arrays `mu`, `nu` and `trace` of Optax's states, as of `optax.adamw`, `optax.lion` and
    `optax.sgd(momentum=0.9)`. Of 8 bits, 256 elements along the last dim share a scale. Of 16 bits, they are bf16.
    Values are rounded stochastically, by a hash of the element's position and of the number of updates, so that they
    are the same on every mesh.

    Args:
        tx: the optimizer.
        bits: 8 or 16. A moment of AdamW then takes 1.016 or 2 bytes for each parameter, instead of 4.
        exempt: globs of the paths of parameters whose moments stay as they are. Gradients of embeddings are sparse, and
            the scales of their blocks change much.
        min_size: smaller arrays stay as they are.

    Returns:
        An Optax transformation, with a `LowBitState`.

    Raises:
        ValueError: if `bits` is neither, or, when it is initialized, if the optimizer has no such moments.

    Cost: some 30 operations per element, which are fused with the update.

    Source: 8 bits: Dettmers et al., arXiv 2110.02861.
    """
    if bits not in (8, 16):
        raise ValueError(error_text(f"low_bit_moments: bits is {bits}", None, "bits=8 or bits=16"))
    inner = optax.with_extra_args_support(tx)

    # The form in which a state is stored.
    def code_of(path: KeyPath, leaf: Array) -> Code | None:
        """The code of an array of the state, or None if it stays as it is."""
        field, _, param = _path_of_moment(path).partition("/")
        if not field or not leaf.ndim or leaf.size < max(1, min_size):
            return None
        return None if any(fnmatchcase(param, glob) for glob in exempt) else _CODES[field]

    def encode(state: PyTree, count: Array) -> tuple[PyTree, PyTree]:
        with_paths, tree = jax.tree_util.tree_flatten_with_path(state)
        stored, scales = [], []
        for salt, (path, leaf) in enumerate(with_paths):
            code, scale = code_of(path, leaf), optax.MaskedNode()
            if code is not None and bits == 8:
                leaf, scale = encode_blocks(leaf.astype(jnp.float32), code, _BLOCK, count, salt)
            elif code is not None:
                leaf = to_bfloat16(leaf.astype(jnp.float32), count, salt)
            stored.append(leaf)
            scales.append(scale)
        return tree.unflatten(stored), tree.unflatten(scales)

    def decode(path: KeyPath, leaf: Array, scale: Array) -> Array:
        code = code_of(path, leaf)
        if code is None:
            return leaf
        return decode_blocks(leaf, scale, code, _BLOCK) if bits == 8 else leaf.astype(jnp.float32)

    # The transformation.
    def init(params: PyTree) -> LowBitState:
        state = tx.init(params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        if jax.tree.leaves(params) and not any(map(_path_of_moment, paths)):
            got, fix = f"a state without {', '.join(_CODES)}", "optax.adamw, optax.lion or another one with such arrays"
            raise ValueError(error_text("low_bit_moments: the optimizer has no moments", got, fix))
        return LowBitState(jnp.int32(0), *encode(state, jnp.int32(0)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, LowBitState]:
        moments = jax.tree_util.tree_map_with_path(decode, state.inner, state.scales)
        updates, moments = inner.update(updates, moments, params, **extra)
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, LowBitState(count, *encode(moments, count))

    return optax.GradientTransformationExtraArgs(init, update)


def _path_of_moment(path: KeyPath) -> str:
    """The last part of the path of an array in an optimizer's state, from the name of a moment on; '' without one."""
    names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
    field = next((k for k, name in enumerate(names) if name in _CODES), len(names))
    return "/".join(names[field:])


# Parameters


class RoundingState(NamedTuple):
    """The state of `stochastic_rounding`."""

    count: Array  # int32 scalar, the number of updates
    inner: PyTree  # the state of the optimizer


def stochastic_rounding(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimizer for parameters in bf16. It computes in fp32, and rounds the new parameters stochastically.

    The numbers of bf16 are 0.4 to 0.8% apart: rounded to nearest, smaller updates would be lost, and AdamW's are mostly
    smaller. Rounded stochastically, parameters move as much as they should on average. They need no copy in fp32.

    In zerojax, `Zero(precision='bf16_params')` has such parameters. Put everything into `tx`: a transformation after
    this one would change updates that are rounded already.

    Args:
        tx: the optimizer, of all parameters. Its state is created for parameters in fp32.

    Returns:
        An Optax transformation, with a `RoundingState`. Parameters of other dtypes than bf16 are updated as by `tx`.

    Raises:
        ValueError: in an update, if there are no parameters.

    Cost: some 15 operations per element, which are fused with the update.

    Source: Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192, 2020.
    """
    inner = optax.with_extra_args_support(tx)
    widened = lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a

    def init(params: PyTree) -> RoundingState:
        return RoundingState(jnp.int32(0), tx.init(jax.tree.map(widened, params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, RoundingState]:
        if params is None:
            what = "stochastic_rounding: the update has no parameters"
            raise ValueError(error_text(what, None, "tx.update(g, state, params)"))
        count = jnp.asarray(optax.safe_increment(state.count))
        wide = jax.tree.map(widened, params)
        updates, inner_state = inner.update(jax.tree.map(widened, updates), state.inner, wide, **extra)
        leaves, tree = jax.tree.flatten(params)
        each = zip(leaves, jax.tree.leaves(wide), jax.tree.leaves(updates), strict=True)
        changes = [
            to_bfloat16(w + u, count, salt).astype(jnp.float32) - w if p.dtype == jnp.bfloat16 else u
            for salt, (p, w, u) in enumerate(each, _FIRST_SALT)
        ]
        return tree.unflatten(changes), RoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# Codes of 8 bits


class Code(NamedTuple):
    """A code of 8 bits."""

    dtype: type
    largest: int
    power: int  # of the ratio between a code and the largest one, which is the value that it stands for; even

    def decode(self, codes: Array) -> Array:
        """The values of codes, without scales."""
        ratios = codes.astype(jnp.float32) / self.largest
        return jnp.sign(ratios) * jnp.abs(ratios) ** self.power

    def encode(self, values: Array, random: ArrayLike) -> Array:
        """Codes of fp32 values in [-1, 1]. Numbers in [0, 1) decide between the code below and the one above."""
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
_CODES = {"mu": SIGNED, "trace": SIGNED, "nu": NON_NEGATIVE}  # by the fields of Optax's states


def encode_blocks(values: Array, code: Code, block: int, step: Array, salt: int) -> tuple[Array, Array]:
    """(codes of the shape of `values`, a scale for each block of the last dim, whose last one may be shorter)."""
    blocks = _blocks(values, block)
    scales = jnp.max(jnp.abs(blocks), axis=-1)
    relative = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    codes = code.encode(relative, uniform(blocks.shape, step, salt))
    return codes.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]], scales


def decode_blocks(codes: Array, scales: Array, code: Code, block: int) -> Array:
    values = code.decode(_blocks(codes, block)) * scales[..., None]
    return values.reshape(*codes.shape[:-1], -1)[..., : codes.shape[-1]]


def _blocks(a: Array, block: int) -> Array:
    """[..., length] -> [..., blocks, block], with zeros at the end of the last block. A short array is one block."""
    length = a.shape[-1]
    count = -(-length // block)
    if count == 1:
        return a[..., None, :]
    padded = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, count * block - length)]) if length % block else a
    return padded.reshape(*a.shape[:-1], count, block)


# Stochastic rounding


def random_bits(shape: Shape, step: Array, salt: int) -> Array:
    """32 random bits (uint32) for each element of an array in a step. The salt distinguishes arrays."""
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
