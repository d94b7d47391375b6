"""The moments of an optimizer in 8 or 16 bits between updates."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.contrib.low_bit.codes import NON_NEGATIVE, SIGNED, Code, decode_blocks, encode_blocks
from zerojax.contrib.low_bit.rounding import to_bfloat16
from zerojax.utils.typing import Array, PyTree

_CODES = {"mu": SIGNED, "trace": SIGNED, "nu": NON_NEGATIVE}  # by the fields of Optax's states
_BLOCK = 256


class LowBitState(NamedTuple):
    """The state of `low_bit_moments`.

    Attributes:
        count: int32 scalar, the number of updates.
        inner: the state of the optimizer, in which moments are codes of 8 bits or bf16.
        scales: of the blocks, where there are codes; `optax.MaskedNode` elsewhere.
    """

    count: Array
    inner: PyTree
    scales: PyTree


def path_of_moment(path: Any) -> str:
    """The last part of the path of an array in an optimizer's state, from the name of a moment on; '' without one."""
    names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
    field = next((k for k, name in enumerate(names) if name in _CODES), len(names))
    return "/".join(names[field:])


def low_bit_moments(
    tx: optax.GradientTransformation, bits: int = 8, *, exempt: Sequence[str] = ("*embed*",), min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose moments are stored in 8 or 16 bits. It computes with them in fp32.

    Moments are the arrays `mu`, `nu` and `trace` of Optax's states, as of `optax.adamw`, `optax.lion` and
    `optax.sgd(momentum=0.9)`. Of 8 bits, 256 elements along the last dim share a scale, see `codes`. Of
    16 bits, they are bf16. Values are rounded stochastically, by a hash of the element's position and of the number of
    updates, so that they are the same on every mesh.

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
        raise ValueError(f"low_bit_moments: bits is {bits}\n  fix:      bits=8 or bits=16")
    inner = optax.with_extra_args_support(tx)

    def code_of(path: Any, leaf: Array) -> Code | None:
        """The code of an array of the state, or None if it stays as it is."""
        field, _, param = path_of_moment(path).partition("/")
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

    def decode(path: Any, leaf: Array, scale: Any) -> Array:
        code = code_of(path, leaf)
        if code is None:
            return leaf
        return decode_blocks(leaf, scale, code, _BLOCK) if bits == 8 else leaf.astype(jnp.float32)

    def init(params: PyTree) -> LowBitState:
        state = tx.init(params)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        if jax.tree.leaves(params) and not any(map(path_of_moment, paths)):
            raise ValueError(
                f"low_bit_moments: the optimizer has no moments\n"
                f"  got:      a state without {', '.join(_CODES)}\n"
                f"  fix:      optax.adamw, optax.lion or another one with such arrays"
            )
        return LowBitState(jnp.int32(0), *encode(state, jnp.int32(0)))

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LowBitState]:
        moments = jax.tree_util.tree_map_with_path(decode, state.inner, state.scales)
        updates, moments = inner.update(updates, moments, params, **extra)
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, LowBitState(count, *encode(moments, count))

    return optax.GradientTransformationExtraArgs(init, update)
