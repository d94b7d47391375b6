"""Operations on rows: pieces of results from pieces of operands, where rows are whole and where they are divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.offload.split_update import Rows
from zerojax.program import jaxprs

SHAPE = 6, 4, 24
VALUES = jnp.sin(jnp.arange(6.0 * 4 * 24)).reshape(SHAPE)
blocks = lambda a, size: a.reshape(*a.shape[:-1], -1, size)
FUNCTIONS = {  # name: (function, whether a piece can have a half of each row)
    "blocks": (lambda a: jnp.max(jnp.abs(blocks(a, 6)), -1), True),
    "scaled blocks": (lambda a: (blocks(a, 6) / blocks(a, 6).sum(-1, keepdims=True)).reshape(a.shape), True),
    "positions": (lambda a: blocks(a, 6) + sum(lax.broadcasted_iota(a.dtype, (6, 4, 4, 6), d) for d in range(4)), True),
    "positions of elements": (lambda a: a + lax.broadcasted_iota(a.dtype, a.shape, 2), True),
    "three blocks": (lambda a: jnp.max(blocks(a, 8), -1), False),
    "one block": (lambda a: jnp.max(a[..., None, :], -1), False),
    "a sum of a row": (lambda a: a - a.sum(-1, keepdims=True), False),
    "a last block with zeros": (lambda a: blocks(jnp.pad(a, [(0, 0), (0, 0), (0, 6)]), 10)[..., :7], False),
}


def run(equations, rows, read, scope, piece, start):
    for equation in equations:
        operands = [scope[a] if jaxprs.is_var(a) else jnp.asarray(a.val, a.aval.dtype) for a in equation.invars]
        assert rows.compute(equation)
        scope[equation.outvars[0]] = rows.compute_piece(equation, operands, piece, start)
    return scope[read]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_piece_is_computed_from_pieces(name, parts):
    function, may_be_divided = FUNCTIONS[name]
    closed = jaxprs.inlined(jax.make_jaxpr(function)(VALUES))
    rows, want = Rows("w", SHAPE, parts), np.asarray(function(VALUES))
    if parts == 2 and not may_be_divided:
        assert not all(map(rows.compute, closed.jaxpr.eqns))
        return
    piece = 2, 4, SHAPE[-1] // parts
    for layer in (0, 4):
        for part in range(parts):
            cut = lambda a, part=part, layer=layer: np.split(a[layer : layer + 2], parts, 2)[part]
            start, scope = [layer, 0, part * piece[2]], {closed.jaxpr.invars[0]: cut(VALUES)}
            got = run(closed.jaxpr.eqns, rows, closed.jaxpr.outvars[0], scope, piece, start)
            np.testing.assert_allclose(got, cut(want), rtol=1e-6, atol=1e-6)
            assert got.shape == rows.part_of(want.shape, piece)


def test_what_couples_rows_is_not_computed_in_pieces():
    for function in [
        lambda a: a - a.sum(1, keepdims=True),
        lambda a: jnp.cumsum(a, -1),
        lambda a: a.reshape(4, 6, 24),
        lambda a: a.reshape(6, 8, 12),
        lambda a: a[1:],
        lambda a: a[::-1],
        lambda a: jnp.pad(a, [(1, 0), (0, 0), (0, 0)]),
        lambda a: a @ a.swapaxes(1, 2),
        lambda a: a + jnp.broadcast_to(a[:1], a.shape),
    ]:
        closed = jaxprs.inlined(jax.make_jaxpr(function)(VALUES))
        assert not all(map(Rows("w", SHAPE).compute, closed.jaxpr.eqns))
