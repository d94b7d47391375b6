"""Links between dims: what an equation computes for a slice is the slice of what it computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.program import jaxprs, slices
from zerojax.program.sliced import SUM, Mixed, Sliced

KEY = jax.random.key(0)
normal = lambda *shape: jax.random.normal(jax.random.fold_in(KEY, sum(shape)), shape)
ints = lambda most, *shape: jax.random.randint(jax.random.fold_in(KEY, sum(shape)), shape, 0, most)

# Functions of one equation, with their arguments, and (number of links that are slices, that are sums).
EXAMPLES = {
    "add": (jnp.add, (normal(4, 6), normal(4, 6)), (2, 0)),
    "mul by a scalar": (lambda x: x * 2.0, (normal(4, 6),), (2, 0)),
    "a dim of one": (lambda x: lax.mul(x, lax.broadcast(jnp.float32(2), (4, 1))), (normal(4, 1),), (2, 0)),
    "select_n": (lambda p, x, y: lax.select_n(p, x, y), (normal(4, 6) > 0, normal(4, 6), normal(4, 6)), (2, 0)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (5, 4, 6), (1, 2)), (normal(4, 1),), (3, 0)),
    "iota": (lambda x: lax.broadcasted_iota(jnp.int32, (4, 6), 1) + x.astype(jnp.int32), (normal(4, 6),), (2, 0)),
    "reshape that splits": (lambda x: x.reshape(4, 2, 3, 5), (normal(4, 6, 5),), (3, 0)),
    "reshape that merges": (lambda x: x.reshape(4, 30), (normal(4, 6, 5),), (2, 0)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (normal(4, 6, 5),), (3, 0)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (normal(4, 1, 5),), (2, 0)),
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), (normal(4, 6, 5),), (2, 1)),
    "reduce_max": (lambda x: jnp.max(x, 1), (normal(4, 6, 5),), (2, 0)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), (normal(4, 6, 5),), (2, 0)),
    "cumsum": (lambda x: lax.cumsum(x, 1), (normal(4, 6, 5),), (2, 0)),
    "sort": (lambda x: lax.sort(x, dimension=1), (normal(4, 6, 5),), (2, 0)),
    "top_k": (lambda x: lax.top_k(x, 2), (normal(4, 6),), (1, 0)),
    "rev": (lambda x: lax.rev(x, (1,)), (normal(4, 6, 5),), (2, 0)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), (normal(4, 6, 5), normal(4, 3, 5)), (2, 0)),
    "split": (lambda x: lax.split(x, (2, 4), 1), (normal(4, 6, 5),), (2, 0)),
    "pad": (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, 2, 0), (0, 0, 1)]), (normal(4, 6, 5),), (1, 0)),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (4, 5, 5), (1, 1, 2)), (normal(4, 6, 5),), (1, 0)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 2, 0), (4, 3, 5)), (normal(4, 6, 5),), (2, 0)),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (0, 2, 0)), (normal(4, 6, 5), normal(4, 3, 5)), (2, 0),
    ),
    "dot_general": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))), (normal(4, 6, 5), normal(4, 5, 3)), (3, 1),
    ),
    "cholesky": (lambda x: lax.linalg.cholesky(x), (jnp.eye(3) + jnp.zeros((4, 2, 3, 3)),), (2, 0)),
    "rows of a table": (lambda t, i: t.at[i].get(mode="clip"), (normal(9, 5), ints(9, 4, 6)), (3, 0)),
    "one of each row": (
        lambda x, i: jnp.take_along_axis(x, i, -1, mode="clip"), (normal(4, 6, 5), ints(5, 4, 6, 2)), (3, 0),
    ),
    "added to one of each row": (
        lambda x, i: jax.grad(lambda x: jnp.take_along_axis(x, i, -1, mode="clip").sum())(x),
        (normal(4, 6, 5), ints(5, 4, 6, 1)), (2, 0),
    ),
    "added to rows": (lambda x, y: x.at[jnp.array([1, 3])].add(y), (normal(4, 6), normal(2, 6)), (1, 0)),
}  # fmt: skip


def equation_of(name):
    """(The equation of an example that comes last, and its operands)."""
    fn, args, _ = EXAMPLES[name]
    closed = jaxprs.inlined(jax.make_jaxpr(fn)(*args))
    scope = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True))
    *before, last = closed.jaxpr.eqns
    if name in ("iota", "cholesky"):
        k = [e.primitive.name for e in closed.jaxpr.eqns].index(name)
        before, last = closed.jaxpr.eqns[:k], closed.jaxpr.eqns[k]
    jaxprs.run_equations(before, scope)
    return last, [scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in last.invars]


def results_of(equation, operands):
    found = equation.primitive.bind(*operands, **equation.params)
    return list(found) if equation.primitive.multiple_results else [found]


def cut(a, dim, start, size):
    return a if dim is None else lax.slice_in_dim(a, start, start + size, axis=dim)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_result_for_a_slice_is_the_slice_of_the_result(name):
    equation, operands = equation_of(name)
    whole, found = results_of(equation, operands), slices.links(equation)
    assert (sum(not each.is_sum for each in found), sum(each.is_sum for each in found)) == EXAMPLES[name][2]
    for link in found:
        of = lambda arrays, dims: {a.shape[d] for a, d in zip(arrays, dims, strict=True) if d is not None}
        (size,) = {n // link.down for n in of(operands, link.ins)} | {n // link.up for n in of(whole, link.outs)}
        first = max(1, size // 3)
        sums = []
        for start, count in [(0, first), (first, size - first)] if size > 1 else [(0, 1)]:
            own = [cut(a, d, start * link.down, count * link.down) for a, d in zip(operands, link.ins, strict=True)]
            if link.is_sum:
                sums += results_of(equation, own)
                continue
            got = slices.apply(equation, link, own, count * link.up, start * link.up)
            for a, b, dim in zip(got, whole, link.outs, strict=True):
                np.testing.assert_allclose(a, cut(b, dim, start * link.up, count * link.up), rtol=1e-6)
        if link.is_sum:
            np.testing.assert_allclose(sum(sums), whole[0], rtol=1e-5, atol=1e-5)


def test_what_mixes_a_dim_has_no_link_along_it():
    conv = jax.make_jaxpr(lambda x, k: lax.conv(x, k, (1,), "SAME"))(normal(2, 3, 8), normal(4, 3, 3)).jaxpr.eqns[-1]
    loop = jax.make_jaxpr(lambda x: lax.scan(lambda c, a: (c + a, c), 0.0, x))(normal(8)).jaxpr.eqns[-1]
    bits = jax.make_jaxpr(lambda: jax.random.bits(KEY, (4, 6)))().jaxpr.eqns[-1]
    assert [slices.links(e) for e in (conv, loop, bits)] == [[], [], []]


# Functions along a dim

FUNCTIONS = {
    "softmax of rows": (lambda x, w: jax.nn.softmax(x @ w), [0, None], [0]),
    "sums over rows": (lambda x, w: (jnp.sum(x @ w, 0), x.T @ (x @ w), jnp.mean(x)), [0, None], [SUM, SUM, SUM]),
    "a linear function of a sum": (lambda x, w: -2 * (x.T @ x).T.astype(jnp.float32) @ w, [0, None], [SUM]),
    "what is the same for all rows": (lambda x, w: (x + 1, w * 2), [0, None], [0, None]),
    "a mask that is made": (
        lambda x, w: jnp.where(jnp.arange(12)[:, None] >= lax.broadcasted_iota(jnp.int32, (12, 5), 1), x, w[0]),
        [0, None], [0],
    ),
    "a table of positions": (lambda x, w: x + w[:1] * jnp.arange(12.0)[:, None], [0, None], [0]),
}  # fmt: skip


@pytest.mark.parametrize("tile", [3, 5, 12])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_computed_slice_by_slice(name, tile):
    fn, dims, places = FUNCTIONS[name]
    args = normal(12, 5), normal(5, 5)
    closed = jaxprs.inlined(jax.make_jaxpr(lambda *a: jax.tree.leaves(fn(*a)))(*args))
    along = Sliced(closed, dims, 12)
    assert along.places == places
    got = jax.jit(functools.partial(along.in_tiles, tile))(*args)
    for a, b in zip(got, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


MEETINGS = {
    "maximum": lambda x: jnp.max(x, 0),
    "running sum": lambda x: jnp.cumsum(x, 0),
    "shift": lambda x: x[1:] - x[:-1],
    "function of a sum": lambda x: jnp.exp(jnp.sum(x, 0)),
    "division by a sum": lambda x: x / jnp.sum(x),
    "attention": lambda x: x @ x.T @ x,
    "an array that a loop passes on": lambda x: (
        x + lax.fori_loop(0, 3, lambda _, c: (c[0] * 2, c[1] + 1), (x, jnp.arange(60.0).reshape(12, 5)))[1]
    ),
}


@pytest.mark.parametrize("fn", MEETINGS.values(), ids=MEETINGS)
def test_rows_that_meet_are_found(fn):
    closed = jaxprs.inlined(jax.make_jaxpr(fn)(normal(12, 5)))
    with pytest.raises(Mixed):
        Sliced(closed, [0], 12)


def test_sums_are_added_in_fp32():
    ones = jnp.ones((4096, 1), jnp.bfloat16)
    along = Sliced(jaxprs.inlined(jax.make_jaxpr(lambda x: x.T @ x)(ones)), [0], 4096)
    assert along.in_tiles(1, ones)[0] == 4096  # in bf16, 256 + 1 is 256
