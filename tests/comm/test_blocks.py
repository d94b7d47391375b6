"""The blocks of 8 bits in which leaves are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.comm import blocks
from zerojax.sharding.wire import BLOCK, block_dim

# The distance to the nearest code, relative to the largest value of a block (int8) or to the value itself (fp8).
STEPS = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4}


def sent_and_received(rows, dtype, dim):
    sent = blocks.encode(rows, dtype, dim)
    return sent, blocks.decode(sent, dtype, dim, rows[0], rows.dtype)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize(("shape", "dim"), [((3, 300), 1), ((300, 3), 0), ((2, 20, 5), 1), ((4, 256), 1)])
@pytest.mark.parametrize("of", [jnp.float32, jnp.bfloat16])
def test_values_are_those_of_the_nearest_codes(dtype, shape, dim, of):
    rows = jax.random.normal(jax.random.key(0), (4, *shape)).astype(of)
    sent, received = sent_and_received(rows, dtype, dim)
    assert sent.dtype == np.uint8 and sent.shape == (4, blocks.sent_bytes(shape, of, dtype, dim))
    assert received.dtype == of
    before, after = (np.moveaxis(np.asarray(a, np.float32), dim + 1, -1) for a in (rows, received))
    rounding = 2**-8 if of == jnp.bfloat16 else 2**-22
    for start in range(0, shape[dim], BLOCK):
        block, got = before[..., start : start + BLOCK], after[..., start : start + BLOCK]
        largest = np.abs(block).max(-1, keepdims=True)
        scale = largest if dtype == "int8" else np.maximum(np.abs(block), largest * 2**-5)
        assert np.all(np.abs(got - block) <= STEPS[dtype] * scale * 1.001 + rounding * np.abs(block))
        np.testing.assert_allclose(np.abs(got).max(-1, keepdims=True), largest, rtol=rounding)  # is a code


def test_zeros_stay_and_what_is_not_finite_becomes_nan():
    row = jnp.zeros((2, 3 * BLOCK)).at[0, 1].set(jnp.nan).at[1, BLOCK].set(-jnp.inf).at[1, 2 * BLOCK].set(1)
    for dtype in STEPS:
        _, (received,) = sent_and_received(row[None], dtype, 1)
        is_nan = np.isnan(np.asarray(received)).reshape(2, 3, BLOCK)
        np.testing.assert_array_equal(is_nan.all(-1), [[True, False, False], [False, True, False]])
        np.testing.assert_array_equal(is_nan.any(-1), is_nan.all(-1))
        assert np.nansum(received) == 1


def test_blocks_of_a_shard_are_those_of_the_whole():
    whole = jax.random.normal(jax.random.key(1), (8, 4 * BLOCK))
    for dim, shards in (0, whole.reshape(4, 2, -1)), (1, jnp.stack(jnp.split(whole, 4, axis=1))):
        _, received = sent_and_received(shards, "int8", 1)
        joined = received.reshape(8, -1) if dim == 0 else jnp.concatenate(list(received), axis=1)
        np.testing.assert_array_equal(joined, sent_and_received(whole[None], "int8", 1)[1][0])


def test_the_dim_of_blocks():
    """The last dim whose blocks do not cross shards; none of small leaves."""
    assert block_dim((256, 512), (8, 1)) == 1
    assert block_dim((256, 512), (1, 4)) == 1
    assert block_dim((256, 512), (1, 8)) == 0  # a shard has half a block
    assert block_dim((4096, 8), (1, 1)) == 0
    assert block_dim((64, 32), (1, 1)) is block_dim((4096,), (1,)) is None
