"""How the outputs of a traced loss depend on the rows of a device: each kind, through the operations of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, nn

from zerojax.program.rows.sizes import sizes_of
from zerojax.program.rows.trace import flattened, trace_rows
from zerojax.program.rows.values import Kind, RowValue, row_factors

WIDTH = 16
each = optax.softmax_cross_entropy_with_integer_labels


def losses(w, x, y):
    return each(x @ w, y)


def masked(w, x, y):
    return losses(w, x, y) * (y > 0), y > 0


def random_mask(key, y):
    return jax.random.bernoulli(key, 0.5, y.shape)


def rematerialized(w, x):
    return jax.checkpoint(lambda x: jnp.mean(nn.gelu(x @ w)))(x)


def attention(w, x):
    heads = (x @ w).reshape(*x.shape[:2], 2, -1)
    return nn.dot_product_attention(heads, heads, heads)


def batch_norm(h):
    return (h - h.mean((0, 1))) * lax.rsqrt(h.var((0, 1)) + 1e-5)


def in_chunks(w, x, y):
    size = 2 if len(x) % 2 == 0 else 1
    chunks = x.reshape(-1, size, WIDTH), y.reshape(-1, size)
    return lax.scan(lambda total, chunk: (total + losses(w, *chunk).sum(), None), 0.0, chunks)[0]


def layers(w, x, fn):
    return lax.scan(lambda c, _: ((jnp.tanh(c[0] @ w), c[1] + fn(c[0])), None), (x, 0.0), None, length=3)[0]


def capacity(y):
    chosen = nn.one_hot(y.ravel(), 4)
    return jnp.cumsum(chosen, 0) * chosen < 3


def gradient_penalty(w, x):
    return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x) ** 2, (1, 2))


# Functions of (w, x, y, key) with rows in x [rows, 5, WIDTH] and y [rows, 5], by the kind of what they return.
CASES = {
    Kind.SAME: {
        "weights": lambda w, x, y, k: jnp.linalg.norm(w) + x.shape[1],
        "noise": lambda w, x, y, k: jax.random.normal(k),
    },
    Kind.MEAN: {
        "mean": lambda w, x, y, k: losses(w, x, y).mean(),
        "a penalty": lambda w, x, y, k: losses(w, x, y).mean() + jnp.sum(w**2),
        "accuracy": lambda w, x, y, k: jnp.mean(jnp.argmax(x @ w, -1) == y),
        "top 3": lambda w, x, y, k: jnp.mean(jnp.any(lax.top_k(x @ w, 3)[1] == y[..., None], -1)),
        "a sum over features": lambda w, x, y, k: jnp.sum(jnp.mean(x**2, axis=0)),
        "rows by index": lambda w, x, y, k: nn.log_softmax(x @ w)[jnp.arange(len(x))[:, None], jnp.arange(5), y].mean(),
        "tokens": lambda w, x, y, k: each(x.reshape(-1, WIDTH) @ w, y.reshape(-1)).mean(),
        "shifted": lambda w, x, y, k: each((x @ w)[:, :-1], y[:, 1:]).mean(),
        "a sum, divided": lambda w, x, y, k: losses(w, x, y).sum() * (1 / y.size),
        "two sums, divided": lambda w, x, y, k: (losses(w, x, y).sum(1) + x[:, 0, 0]).sum() / y.size,
        "covariance": lambda w, x, y, k: jnp.einsum("btf,btg->fg", x, x).sum() / y.size,
        "of vmap": lambda w, x, y, k: jax.vmap(lambda x, y: losses(w, x, y).mean())(x, y).mean(),
        "keys of rows": lambda w, x, y, k: jax.vmap(lambda k, x: jax.random.normal(k) * x[0, 0])(
            jax.random.split(k, len(x)), x
        ).mean(),
        "dropout": lambda w, x, y, k: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0).mean(),
        "noise levels": lambda w, x, y, k: (x + jax.random.uniform(k, (len(x),))[:, None, None]).mean(),
        "attention": lambda w, x, y, k: attention(w, x).mean(),
        "convolution": lambda w, x, y, k: lax.conv(x[:, None], jnp.ones((2, 1, 3, 3)), (1, 1), "SAME").mean(),
        "remat": lambda w, x, y, k: rematerialized(w, x),
        "layers": lambda w, x, y, k: layers(w, x, lambda h: jnp.mean(h**2))[1],
        "steps": lambda w, x, y, k: lax.scan(lambda h, a: (jnp.tanh(h + a @ w), h.mean()), x[:, 0], x.swapaxes(0, 1))[
            1
        ].mean(),
        "chunks": lambda w, x, y, k: in_chunks(w, x, y) / y.size,
        "map": lambda w, x, y, k: lax.map(lambda x: (x @ w).mean(), x).mean(),
        "while": lambda w, x, y, k: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))[
            1
        ].mean(),
        "cond": lambda w, x, y, k: lax.cond(w.sum() > 0, lambda: x.mean(), lambda: 0.0),
        "gradient": lambda w, x, y, k: jnp.mean(gradient_penalty(w, x)),
        "transposed": lambda w, x, y, k: x.swapaxes(0, 1).reshape(5, -1).sum(1).mean() / len(x),
        "padded": lambda w, x, y, k: jnp.pad(x, ((0, 0), (0, 3), (0, 0)), mode="edge").mean(),
        "ones": lambda w, x, y, k: jnp.average(losses(w, x, y), weights=jnp.ones(y.shape)),
        "where ones": lambda w, x, y, k: jnp.mean(losses(w, x, y), where=jnp.ones_like(y, bool)),
        "fractions": lambda w, x, y, k: jnp.sum(losses(w, x, y) * (np.ones(y.shape, np.float32) / y.size)),
        "codes": lambda w, x, y, k: w[jnp.argmin(jnp.sum((x[..., None, :] - w) ** 2, -1), -1)].mean(),
    },
    Kind.SUM: {
        "sum": lambda w, x, y, k: losses(w, x, y).sum(),
        "correct": lambda w, x, y, k: jnp.sum(jnp.argmax(x @ w, -1) == y),
        "of features": lambda w, x, y, k: jnp.sum(jnp.mean(x, axis=-1)),
        "segments": lambda w, x, y, k: jax.ops.segment_sum(x[:, :, 0].ravel(), y.ravel(), 7).sum(),
        "another number": lambda w, x, y, k: jnp.sum(y > 0) / 101,
        "chunks": lambda w, x, y, k: in_chunks(w, x, y),
        "layers": lambda w, x, y, k: layers(w, x, lambda h: jnp.sum(h[:, 0] > 0))[1],
        "product": lambda w, x, y, k: jnp.vdot(x, x),
        "a number of rows": lambda w, x, y, k: y.size - jnp.sum(y > 0),
        "of rows": lambda w, x, y, k: x.shape[0],
        "of rows, counted": lambda w, x, y, k: jnp.ones(y.shape).sum(),
        "a mean, multiplied": lambda w, x, y, k: losses(w, x, y).mean() * x.shape[0],
        "over a fixed number": lambda w, x, y, k: losses(w, x, y).sum() / 120,
        "times a fixed number": lambda w, x, y, k: 0.01 * x.sum(),
    },
    Kind.MAX: {
        "max": lambda w, x, y, k: jnp.maximum(x.max(), w.max()),
        "any": lambda w, x, y, k: jnp.any(x > 0),
        "chunks": lambda w, x, y, k: lax.scan(lambda c, x: (jnp.maximum(c, x.max()), None), -jnp.inf, x)[0],
        "minus a minimum": lambda w, x, y, k: -x.min(),
    },
    Kind.MIN: {"min": lambda w, x, y, k: jnp.abs(x).min(), "all": lambda w, x, y, k: jnp.all(x > 0)},
    Kind.DERIVED: {
        "root": lambda w, x, y, k: jnp.sqrt(jnp.mean(x**2)),
        "variance": lambda w, x, y, k: jnp.mean(x**2) - jnp.mean(x) ** 2,
        "masked": lambda w, x, y, k: jnp.sum(masked(w, x, y)[0]) / jnp.maximum(jnp.sum(y > 0), 1),
        "random mask": lambda w, x, y, k: (losses(w, x, y) * random_mask(k, y)).sum() / random_mask(k, y).sum(),
        "where": lambda w, x, y, k: jnp.mean(losses(w, x, y), where=y > 0),
        "weights": lambda w, x, y, k: jnp.average(losses(w, x, y), weights=y),
        "entropy": lambda w, x, y, k: jax.scipy.special.entr(nn.one_hot(y, 7).mean((0, 1))).sum(),
        "counts": lambda w, x, y, k: jnp.bincount(y.ravel(), length=7).max(),
        "balance": lambda w, x, y, k: jnp.vdot(nn.softmax(x @ w).mean((0, 1)), nn.one_hot(y, WIDTH).mean((0, 1))),
        "range": lambda w, x, y, k: x.max() - x.min(),
        "sums of squares": lambda w, x, y, k: (jnp.vdot(x, x) - x.sum() ** 2 / x.size) / x.size,
        "integers": lambda w, x, y, k: 100 * jnp.sum(y > 0) // y.size,
        "a standard error": lambda w, x, y, k: jnp.sqrt(jnp.mean(x**2) / x.size),
        "largest means": lambda w, x, y, k: lax.top_k(x.mean((0, 1)), 3)[0].sum(),
    },
    # These depend on which rows a device has. Of a mean of rows that met, the kind is MEAN, with a source.
    Kind.MIXED: {
        "std": lambda w, x, y, k: jnp.std(x @ w),
        "median": lambda w, x, y, k: jnp.median(x),
        "one row": lambda w, x, y, k: jnp.roll(x, 1, 0)[0].mean() + x[len(x) // 2 :].mean(),
        "batch norm": lambda w, x, y, k: jnp.mean(batch_norm(x @ w) ** 4),
        "capacity": lambda w, x, y, k: jnp.mean(capacity(y)),
        "of layers": lambda w, x, y, k: layers(w, x, lambda h: jnp.sum(jnp.mean(h, (0, 1)) ** 2))[1],
        "groups": lambda w, x, y, k: jnp.max(x.reshape(2, -1).sum(1)) if len(x) > 2 else jnp.std(x),
        "a number less one": lambda w, x, y, k: x.sum() / (x.shape[0] + 1),
        "first": lambda w, x, y, k: jnp.mean(x.sum((1, 2)) * np.arange(9, 109, dtype=np.float32)[: len(x)]),
        "logsumexp": lambda w, x, y, k: nn.logsumexp(x),
    },
}
PAIRS = {
    "pairs": lambda w, x, y, k: jnp.sum((x.mean(1) @ w) @ (x.mean(1) @ w).T),
    "contrastive": lambda w, x, y, k: each((x.mean(1) @ w) @ (x.mean(1) @ w).T, jnp.arange(len(x))).mean(),
}


def traced(fn, num_rows):
    """(the inputs' values, the jaxpr of a function of so many rows)."""
    shapes = (WIDTH, WIDTH), (num_rows, 5, WIDTH), (num_rows, 5)
    w, x, y = (jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.float32, jnp.float32, jnp.int32), strict=True))
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows = [RowValue(Kind.ROWS, dims=row_factors(a.shape, num_rows)) for a in (x, y)]
    inputs = [RowValue(on_params=True), *rows, RowValue(on_device=True)]
    return inputs, flattened(jax.make_jaxpr(fn)(w, x, y, key))


def value_of(fn, num_rows):
    (inputs, closed), (_, doubled) = traced(fn, num_rows), traced(fn, 2 * num_rows)
    trace = trace_rows(closed, inputs, num_rows, ("data",), sizes_of(closed, doubled, num_rows))
    return trace.of(trace.closed.jaxpr.outvars[0])


def test_each_output_is_of_its_kind():
    for kind in CASES:
        for num_rows in [1, 4, 6]:
            found = {name: value_of(fn, num_rows) for name, fn in CASES[kind].items()}
            if kind is Kind.MIXED:
                wrong = {name: value for name, value in found.items() if not value.sources}
                wrong.pop("one row" if num_rows == 1 else "", None)  # the only one
            else:
                wrong = {name: value for name, value in found.items() if value.kind is not kind or value.sources}
            assert not wrong


def test_without_a_second_trace_means_are_means():
    """Such as that of a loss for one number of rows: constants by which scalars are divided may count them."""
    cases = {"mean": Kind.MEAN, "accuracy": Kind.MEAN, "dropout": Kind.MEAN, "attention": Kind.MEAN}
    for num_rows in [1, 4]:
        for name, kind in cases.items():
            inputs, closed = traced(CASES[Kind.MEAN][name], num_rows)
            trace = trace_rows(closed, inputs, num_rows, ("data",), sizes_of(closed, None, num_rows))
            found = trace.of(trace.closed.jaxpr.outvars[0])
            assert found.kind is kind and not found.sources, name


def test_pairs_of_rows_meet_and_a_single_row_does_not():
    for fn in PAIRS.values():
        assert value_of(fn, 4).sources and not value_of(fn, 1).sources


def test_what_all_devices_see_is_the_same():
    """A collective over all axes that split the batch; the index of a device, and one over some of them, are not."""

    def fn(w, x, y, key):
        mean = lax.pmean(x.mean(), "data")
        rows = lax.all_gather(x, "data", tiled=True)
        return mean, jnp.mean((x - mean) ** 2), rows.sum(), lax.axis_index("data") + 1

    mesh = jax.make_mesh((1,), ("data",))
    found = []

    def on_device(x):
        inputs = [RowValue(), RowValue(Kind.ROWS, dims=row_factors(x.shape, 4)), RowValue(), RowValue()]
        closed = flattened(jax.make_jaxpr(fn)(x, x, x, x))
        for axes in [("data",), ("replica", "data")]:
            trace = trace_rows(closed, inputs, 4, axes, sizes_of(closed, None, 4))
            found.append([trace.of(atom) for atom in trace.closed.jaxpr.outvars])
        return x

    spec = jax.sharding.PartitionSpec()
    jax.eval_shape(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec), np.ones((4, 3), np.float32))
    (mean, centered, total, index), (part, *_) = found
    assert not mean.is_local and not total.is_local and index.is_local
    assert centered.kind is Kind.MEAN and not centered.sources
    assert part.kind is Kind.MIXED
