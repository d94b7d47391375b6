"""Stochastic rounding and 8-bit codes: right on average, and exact where a number can be represented."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.contrib.low_bit import (
    NON_NEGATIVE,
    SIGNED,
    decode_blocks,
    encode_blocks,
    random_bits,
    to_bfloat16,
    uniform,
)

REPEATS = 500


def values(shape=(4, 300), octaves=6):
    """Of both signs, over several orders of magnitude."""
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], shape) * 2.0 ** jax.random.uniform(keys[1], shape, minval=-octaves, maxval=0)


def mean_over_steps(fn):
    return jax.lax.map(lambda step: fn(step).astype(jnp.float32), jnp.arange(REPEATS)).mean(0)


def test_random_bits_are_uniform_and_differ_between_steps_and_arrays():
    drawn = np.stack([np.asarray(uniform((1000,), jnp.int32(step), salt)) for step in range(20) for salt in range(5)])
    assert drawn.min() >= 0 and drawn.max() < 1
    counts, _ = np.histogram(drawn, 20, (0, 1))
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert np.abs(np.corrcoef(drawn[:20]) - np.eye(20)).max() < 5 / np.sqrt(1000)
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 5 / np.sqrt(drawn.size)  # neighbors
    flat, square = (random_bits(shape, jnp.int32(3), 1) for shape in ((600,), (20, 30)))
    np.testing.assert_array_equal(square.ravel(), flat)


def test_bf16_is_right_on_average_and_next_to_the_value():
    x = values()
    rounded = to_bfloat16(x, jnp.int32(0), 0).astype(jnp.float32)
    gap = np.abs(x) * 2.0**-7
    assert np.all(np.abs(rounded - x) <= gap)
    error = np.abs(mean_over_steps(lambda step: to_bfloat16(x, step, 0)) - x)
    assert np.all(error < 5 * gap / np.sqrt(4 * REPEATS))
    assert np.abs(x.astype(jnp.bfloat16).astype(jnp.float32) - x).max() > 5 * error.max()  # to nearest


def test_numbers_of_bf16_stay():
    exact = jnp.asarray([0.0, -0.0, 1.0, -2.5, 3.0e38, 1e-40, jnp.inf, -jnp.inf, jnp.nan])
    exact = exact.astype(jnp.bfloat16).astype(jnp.float32)
    for step in range(20):
        np.testing.assert_array_equal(to_bfloat16(exact, jnp.int32(step), 0).astype(jnp.float32), exact)


@pytest.mark.parametrize("code", [SIGNED, NON_NEGATIVE], ids=["signed", "not negative"])
def test_every_code_stands_for_a_value_that_is_encoded_as_it(code):
    codes = np.arange(-127 if code is SIGNED else 0, code.largest + 1)
    decoded = code.decode(jnp.asarray(codes))
    assert np.all(np.diff(decoded) > 0) and decoded[-1] == 1
    for random in (0.01, 0.5, 0.99):
        np.testing.assert_array_equal(code.encode(decoded, random), codes)


@pytest.mark.parametrize(
    ("code", "block"), [(SIGNED, 64), (SIGNED, 300), (NON_NEGATIVE, 100), (NON_NEGATIVE, 512)], ids=str
)
def test_blocks_are_right_on_average_and_next_to_the_value(code, block):
    x = values() if code is SIGNED else values() ** 2

    def roundtrip(step):
        return decode_blocks(*encode_blocks(x, code, block, step, 1), code, block)

    codes, scales = encode_blocks(x, code, block, jnp.int32(0), 1)
    assert codes.shape == x.shape and codes.dtype == code.dtype and scales.shape == (*x.shape[:-1], -(-300 // block))
    scale = np.repeat(np.asarray(scales), block, -1)[:, :300]
    root = (np.abs(x) / scale) ** (1 / code.power) * code.largest
    gap = scale * (((np.floor(root) + 1) / code.largest) ** code.power - (np.floor(root) / code.largest) ** code.power)
    assert np.all(np.abs(roundtrip(jnp.int32(0)) - x) <= 1.01 * gap)
    error = np.abs(mean_over_steps(roundtrip) - x)
    is_above = np.asarray(root) > 1  # below the first code, values that are not negative are rounded up
    assert np.all(error[is_above] < 6 * gap[is_above] / np.sqrt(4 * REPEATS) + 1e-6 * scale[is_above])


def test_a_positive_value_does_not_become_zero():
    x = jnp.asarray([[1.0, 1e-12, 1e-30, 0.0]])
    codes, scales = encode_blocks(x, NON_NEGATIVE, 4, jnp.int32(0), 0)
    assert codes.tolist() == [[255, 1, 1, 0]] and float(scales[0, 0]) == 1
    assert not jnp.any(encode_blocks(jnp.zeros((2, 8)), SIGNED, 4, jnp.int32(0), 0)[1])
