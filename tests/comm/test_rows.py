"""Rows of all devices, gathered and summed over the dims of a torus, whatever tiles they fill."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.comm.rows import gather_rows, sum_rows
from zerojax.sharding.axes import Axes

N = 8
# small; whole tiles; few and wide rows; zeros at the end, of one row and of some; more than two dims
SHAPES = [(3, 5), (16, 128), (2, 1024), (2100,), (3, 700), (2, 8, 144)]


def on_devices(fn, value, torus):
    """`fn` of each device's part of dim 0, concatenated. `torus` has the lengths of rings, or is 'SparseCores'."""
    sparse_cores = torus == "SparseCores"
    axes = Axes(("data",), (), N, 1, () if sparse_cores else torus, sparse_cores)
    mapped = jax.shard_map(
        lambda part: fn(part[0], axes)[None], mesh=zerojax.make_mesh(), in_specs=P("data"), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    return np.asarray(jax.jit(mapped)(value))


@pytest.mark.parametrize(
    ("shape", "torus"),
    [*((shape, (2, 2, 2)) for shape in SHAPES), *(((3, 700), torus) for torus in ((), "SparseCores", (8,), (2, 4)))],
    ids=str,
)
def test_rows_are_summed_and_gathered(shape, torus):
    rows = np.random.default_rng(0).integers(-9, 9, (N, N, *shape)).astype(np.float32)  # sums are exact
    np.testing.assert_array_equal(on_devices(sum_rows, rows, torus), rows.sum(0))
    gathered = on_devices(gather_rows, rows[:, 0], torus)
    np.testing.assert_array_equal(gathered, np.broadcast_to(rows[:, 0], (N, N, *shape)))
