"""The user's loss function: its call, its outputs in one form, and its errors with the line and what helps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from zerojax.program.rows.parts import RowParts
from zerojax.program.rows.values import Kind
from zerojax.sharding.precision import Precision
from zerojax.step.batch import unwrapped
from zerojax.step.models import Model
from zerojax.utils.typing import Array, ArrayLike, PRNGKey, PyTree
from zerojax.utils.warn import line_of

LossFn: TypeAlias = Callable[..., Any]  # of the user: (model, batch) or (model, batch, key)
RESERVED = frozenset({"loss", "grad_norm", "param_norm", "skipped", "learning_rate", "loss_scale"})


class Weighted(NamedTuple):
    """A sum and its weight, for a loss or metric whose global mean is not the mean of the means of the shards.

    The reported value is (sum of sums) / (sum of weights), over all shards and microbatches. The weight is treated as a
    constant: no gradient flows through it. A metric whose weights are all 0 is reported as the sum of its sums.

    Attributes:
        sum: floating scalar.
        weight: scalar of at least 0.
    """

    sum: Array
    weight: ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """The outputs of a loss, to be added up over shards, microbatches and batches.

    Attributes:
        loss, metrics: sums and weights.
        parts: those of the parts of metrics that are computed from sums and means over rows.
        largest: the parts that are maxima, and minima times -1, of which the largest counts.
        cut: what is computed from the parts.
    """

    loss: Weighted
    metrics: dict[str, Weighted]
    parts: list[Weighted] = dataclasses.field(default_factory=list)
    largest: list[Array] = dataclasses.field(default_factory=list)
    cut: RowParts | None = dataclasses.field(default=None, metadata={"static": True})

    def plus(self, other: Sums, maximum: Callable[..., Array] = jnp.maximum) -> Sums:
        total = jax.tree.map(lambda a, b: a + b, *(dataclasses.replace(each, largest=[]) for each in (self, other)))
        return dataclasses.replace(total, largest=list(map(maximum, self.largest, other.largest)))

    def where(self, flag: Array) -> Sums:
        """The outputs, or those of no rows. Not a product: what the loss makes of other rows may be a NaN."""
        kept = jax.tree.map(lambda a: jnp.where(flag, a, 0), dataclasses.replace(self, largest=[]))
        return dataclasses.replace(kept, largest=[jnp.where(flag, a, -jnp.inf) for a in self.largest])

    def start(self) -> Sums:
        """The outputs of no rows, of these shapes."""
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), dataclasses.replace(self, largest=[]))
        return dataclasses.replace(zeros, largest=[jnp.full(a.shape, -jnp.inf, a.dtype) for a in self.largest])

    def means(self) -> tuple[Array, dict[str, Array]]:
        """(The loss, the metrics): sums divided by their weights, or as they are if all of these are 0. The sums may be
        arrays of NumPy."""
        where = jnp.where if isinstance(self.loss.sum, jax.Array) else np.where

        def mean(pair: PyTree) -> Array:  # a `Weighted`
            return pair.sum / where(pair.weight > 0, pair.weight, 1)

        loss, metrics = mean(self.loss), {name: mean(pair) for name, pair in self.metrics.items()}
        if self.cut is not None:
            sums, largest = iter(self.parts), iter(self.largest)
            parts = [
                next(largest) if kind is Kind.MAX else -next(largest) if kind is Kind.MIN else mean(next(sums))
                for kind in self.cut.kinds
            ]
            metrics |= {name: jnp.asarray(a, jnp.float32) for name, a in self.cut.finish(parts).items()}
        return metrics.pop("loss", loss), dict(sorted(metrics.items()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """The outputs of a loss function, normalized.

    Attributes:
        loss: the loss; its weight is 1 if the function returned a plain scalar.
        metrics: the metrics by name, likewise.
        model_state: the model state after the loss.
        parts: of the metrics in `cut`, which are not in `metrics`.
        is_weighted: whether the function returned a `Weighted` loss.
        plain: the names of the metrics that it returned as plain scalars.
        cut: what is computed from the parts.
        reduced_state: the leaves of the model state, by position, that are those of all devices already.
    """

    loss: Weighted
    metrics: dict[str, Weighted]
    model_state: PyTree
    parts: list[Array] = dataclasses.field(default_factory=list, kw_only=True)
    is_weighted: bool = dataclasses.field(metadata={"static": True})
    plain: frozenset[str] = dataclasses.field(metadata={"static": True})
    cut: RowParts | None = dataclasses.field(default=None, metadata={"static": True})
    reduced_state: frozenset[int] = dataclasses.field(default=frozenset(), metadata={"static": True})

    def sums(self, num_rows: int | None = None) -> Sums:
        """The outputs in fp32. With `num_rows`, what was returned as a plain scalar is the mean over so many rows."""
        loss, metrics, parts = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float32), (self.loss, self.metrics, self.parts)
        )

        def over_rows(mean: Array) -> Weighted:
            return Weighted(mean * (num_rows or 1), jnp.float32(num_rows or 1))

        if num_rows:
            metrics = {name: over_rows(each.sum) if name in self.plain else each for name, each in metrics.items()}
            loss = loss if self.is_weighted else over_rows(loss.sum)
        pairs = list(zip(self.cut.kinds if self.cut else (), parts, strict=True))
        sums = [
            Weighted(a, jnp.float32(0)) if kind is Kind.SUM else over_rows(a)
            for kind, a in pairs
            if kind not in (Kind.MAX, Kind.MIN)
        ]
        largest = [-a if kind is Kind.MIN else a for kind, a in pairs if kind in (Kind.MAX, Kind.MIN)]
        return Sums(loss, metrics, sums, largest, self.cut)


def call_loss(
    loss_fn: LossFn, model: Model, params: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey
) -> Output:
    """Runs a user's `loss_fn(model, batch)` or `loss_fn(model, batch, key)`, and checks and normalizes its outputs."""
    # Call.
    merged, batch = model.merge(params, model_state), unwrapped(batch)
    takes_key = _takes_key(loss_fn)
    try:
        result = loss_fn(merged, batch, key) if takes_key else loss_fn(merged, batch)
    except Exception as error:
        if takes_key:
            error.add_note("The loss has three arguments: the model, the batch, and a key of jax.random for this step.")
        raise

    # Normalize the loss.
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, Weighted):
        if len(result) != 2:
            raise ValueError(f"loss: returns {len(result)} values\n  fix:      return loss, or (loss, dict of metrics)")
        loss, aux = result
    if not isinstance(aux, Mapping):
        got = f"{aux.dtype}{list(aux.shape)}" if isinstance(aux, jax.Array) else type(aux).__name__
        raise ValueError(
            f"loss: the second output is not a dict\n"
            f"  got:      {got}\n"
            f"  fix:      return (loss, dict of scalar metrics)"
        )
    total = _as_weighted("the loss", loss)
    dtype = jnp.result_type(total.sum)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"loss: dtype {dtype} cannot be differentiated\n  fix:      return a floating dtype")

    # Separate the metrics from the model state.
    after, metrics = model.state_after(merged, dict(aux), model_state)
    if taken := sorted(metrics.keys() & RESERVED):
        raise ValueError(
            f"loss: a metric has the name of one of the step's own\n"
            f"  got:      {', '.join(map(repr, taken))}\n"
            f"  fix:      use another name; a step reports {', '.join(sorted(RESERVED))} itself"
        )
    plain = frozenset(name for name, value in metrics.items() if not isinstance(value, Weighted))
    metrics = {name: _as_weighted(f"metric {name!r}", value) for name, value in metrics.items()}
    return Output(total, metrics, jax.tree.map(jnp.asarray, after), isinstance(loss, Weighted), plain)


def _as_weighted(name: str, value: Any) -> Weighted:
    pair = value if isinstance(value, Weighted) else Weighted(value, 1.0)
    for part in pair:
        if isinstance(part, str | bytes | Mapping | Sequence) or part is None:
            raise ValueError(
                f"loss: {name} is not a number\n"
                f"  got:      {(part if isinstance(part, str | bytes) else type(part).__name__)!r}\n"
                f"  fix:      return scalars; name those of a nested dict by paths, as in {{'accuracy/top1': ...}}"
            )
        shape, dtype = jnp.shape(part), jnp.result_type(part)
        if shape != () or not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            raise ValueError(
                f"loss: {name} is not a scalar\n"
                f"  got:      shape {shape}, dtype {dtype}\n"
                f"  fix:      reduce it, for example with jnp.mean, or return zerojax.Weighted(sum, weight)"
            )
    return pair


def in_evaluation_mode(loss_fn: LossFn) -> LossFn:
    """A loss function that puts an nnx.Module into evaluation mode first: no dropout, running averages in BatchNorm."""

    @functools.wraps(loss_fn)
    def evaluated(model: Any, *args: Any) -> Any:
        if isinstance(model, nnx.Module):
            model.eval()
        return loss_fn(model, *args)

    return evaluated


def _takes_key(loss_fn: LossFn) -> bool:
    """Whether a loss function has a third parameter that has no default, or is named `key` or `rng`."""
    parameters = inspect.signature(loss_fn).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name in ("key", "rng") for p in positional[2:3])


# Errors ---------------------------------------------------------------------------------------------------------------

# What JAX says of a constraint that names a manual axis of shard_map: by a NamedSharding, when the step is lowered; and
# by a PartitionSpec, when the loss is traced.
_CONSTRAINS_DATA_AXES = ("contains a manual axes", "can only refer to Auto axes of the mesh")


class LossError(ValueError):
    """An error of JAX that has been explained."""


@contextlib.contextmanager
def explaining_errors(precision: Precision) -> Iterator[None]:
    """Explains errors about constraints on data axes, about placement and about dtypes. Others stay as they are."""
    try:
        yield
    except LossError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        if (text := _explanation(error, jnp.dtype(precision.compute_dtype).name)) is None:
            raise
        raise LossError(text) from error


def constraint_text(got: str, line: str | None) -> str:
    """The text of an error about a constraint that names data axes."""
    return (
        f"loss: a with_sharding_constraint names axes that split the batch. The loss runs on the rows of one "
        f"device, where there is nothing to divide over them\n"
        f"  got:      {got}, at {line or 'an unknown line'}\n"
        f"  fix:      name other axes only: P(None, 'model') instead of P('data', 'model'); map the logical name\n"
        f"            of the batch to None; if the model constrains only within `with mesh:`, call the step outside"
    )


def kernel_text(got: str, line: str | None, axes: Sequence[str]) -> str:
    """The text of an error about a kernel that JAX cannot divide over mesh axes."""
    names = ", ".join(map(repr, axes))
    return (
        f"loss: JAX cannot divide this kernel over the axes {names} inside of a step\n"
        f"  got:      {got}, at {line or 'an unknown line'}\n"
        f"  fix:      zerojax.attention in place of jax.nn.dot_product_attention, also with implementation=kernel; or\n"
        f"            implementation='xla'; or call it on the heads of one device, inside jax.shard_map(fn,\n"
        f"            in_specs=heads, out_specs=heads, axis_names={{{names}}}) with heads = P(None, None, {axes[0]!r})"
    )


def _explanation(error: Exception, compute_dtype: str) -> str | None:
    text = str(error).strip()
    seen, line = text.splitlines()[0] if text else type(error).__name__, line_of(error)
    got = f"  got:      {seen}, at {line or 'an unknown line'}\n"
    if any(said in text for said in _CONSTRAINS_DATA_AXES):
        return constraint_text(seen, line)
    if compute_dtype != "float32" and compute_dtype in text and "float32" in text:
        return (
            f"precision: the model mixes float32 and {compute_dtype} where all must have one dtype\n"
            f"{got}"
            f"  fix:      create the array there in the dtype of its input (x.dtype); or compute the weights "
            f"before it in fp32, Zero(..., dtypes={{glob: 'float32'}})"
        )
    if isinstance(error, NotImplementedError) and "Manual" in text:
        return (
            f"sharding: the model places an array over axes of the mesh itself\n"
            f"{got}"
            f"  fix:      leave out_sharding= out: a step runs on the rows of one device"
        )
    return None
