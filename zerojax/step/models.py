"""Adapters for models: Flax NNX modules, Linen variables and plain trees, as parameters, model state and a loss.

Models need no changes. The adapters use what Flax provides: `nnx.split` and `nnx.merge`, the collections of a Linen
module, and the sharding metadata of both.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx
from flax.linen import spmd
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jax.sharding import PartitionSpec

from zerojax.program.rows.parts import RowParts
from zerojax.program.rows.values import Kind
from zerojax.sharding.placement import FromModel, check_leaves, path_text
from zerojax.sharding.units import no_match_text
from zerojax.step.batch import unwrapped
from zerojax.utils.typing import Array, ArrayLike, PRNGKey, PyTree

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

    def plus(self, other: Sums, maximum: Callable[[Any, Any], Any] = jnp.maximum) -> Sums:
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

    def means(self) -> tuple[Any, dict[str, Any]]:
        """(The loss, the metrics): sums divided by their weights, or as they are if all of these are 0. The sums may be
        arrays of NumPy."""
        where = jnp.where if isinstance(self.loss.sum, jax.Array) else np.where
        mean = lambda pair: pair.sum / where(pair.weight > 0, pair.weight, 1)
        found = {"loss": mean(self.loss), **{name: mean(pair) for name, pair in self.metrics.items()}}
        if self.cut is not None:
            sums, largest = iter(self.parts), iter(self.largest)
            parts = [
                next(largest) if kind is Kind.MAX else -next(largest) if kind is Kind.MIN else mean(next(sums))
                for kind in self.cut.kinds
            ]
            found |= {name: jnp.asarray(a, jnp.float32) for name, a in self.cut.finish(parts).items()}
        return found.pop("loss"), dict(sorted(found.items()))


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
        over_rows = lambda mean: Weighted(mean * (num_rows or 1), jnp.float32(num_rows or 1))
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


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Converts between the loss function's first argument and (parameters, model state).

    Attributes:
        merge: `merge(params, model_state)` returns the loss function's first argument.
        state_after: `state_after(merged, aux, model_state)` returns (the new model state, the metrics) after the loss
            has run. `aux` is the dict that the loss returned, `model_state` the state before it.
    """

    merge: Callable[[PyTree, PyTree], Any]
    state_after: Callable[[Any, dict[str, Any], PyTree], tuple[PyTree, dict[str, Any]]]


def _nnx_model(module: nnx.Module) -> tuple[Model, PyTree, PyTree, PyTree, list[Any]]:
    graph, params, model_state = nnx.split(module, nnx.Param, ...)
    tree, created = jax.tree.structure(params), jax.tree.structure(model_state)
    state_paths = set(map(path_text, _paths(model_state)))
    differing = lambda other: ", ".join(sorted(state_paths ^ set(map(path_text, _paths(other))))[:5])
    pure = nnx.to_pure_dict(params)
    if jax.tree.structure(jax.tree.leaves(pure)).num_leaves != tree.num_leaves:
        raise ValueError("init: an nnx.Param is not an array\n  fix:      store exactly one array in each nnx.Param")

    def merge(params: PyTree, model_state: PyTree) -> nnx.Module:
        if jax.tree.structure(model_state) != created:
            raise ValueError(
                f"state: its model_state has other variables than the module\n"
                f"  got:      {differing(model_state)}\n"
                f"  fix:      keep the tree of state.model_state; copy.deepcopy(state) copies a whole state; of an\n"
                f"            nnx.State alone, it makes a tree without variables: use jax.tree.map(jnp.copy, ...)"
            )
        return nnx.merge(graph, jax.tree.unflatten(tree, jax.tree.leaves(params)), model_state, copy=True)

    def state_after(merged: nnx.Module, aux: dict[str, Any], before: PyTree) -> tuple[PyTree, dict[str, Any]]:
        nnx.pop(merged, nnx.Intermediate)
        after = nnx.split(merged, nnx.Param, ...)[2]
        if jax.tree.structure(after) != created:
            raise ValueError(
                "loss: adds or removes variables of the module\n"
                f"  got:      {differing(after)}\n"
                "  fix:      create all variables when the module is created"
            )
        return after, aux

    specs = nnx.to_pure_dict(nnx.get_partition_spec(params))
    variables = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return Model(merge, state_after), pure, model_state, specs, variables


def _tree_model(tree: PyTree) -> tuple[Model, PyTree, PyTree, PyTree]:
    if isinstance(tree, Mapping) and "params" in tree:
        model_state = {name: value for name, value in tree.items() if name != "params"}
        merge = lambda params, model_state: {"params": params, **model_state}
        params = tree["params"]
    else:
        model_state, merge, params = {}, lambda params, model_state: params, tree

    def state_after(merged: PyTree, aux: dict[str, Any], before: PyTree) -> tuple[PyTree, dict[str, Any]]:
        return {name: aux.get(name, before[name]) for name in before}, {k: v for k, v in aux.items() if k not in before}

    has_metadata = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    specs = jax.tree.map(_metadata_spec, params, is_leaf=has_metadata)
    return Model(merge, state_after), nn.meta.unbox(params), model_state, specs


def _metadata_spec(leaf: Any) -> PartitionSpec:
    """The spec in the metadata of a Linen parameter. As in Flax, logical names without a rule stand for None."""
    if isinstance(leaf, nn.LogicallyPartitioned):
        return spmd.logical_to_mesh_axes(leaf.names, leaf.rules) or PartitionSpec()
    return leaf.get_partition_spec() if isinstance(leaf, nn.Partitioned) else PartitionSpec()


def _paths(tree: PyTree) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_not_overwritten(tree: PyTree) -> None:
    """Checks that no variable is one that a step has to overwrite with its gradient, as those of Flax's fp8 layers.

    The gradient of such a variable is its new value, a largest value over rows. It is no term of a sum over devices.

    Raises:
        ValueError: if there are such variables, with their paths.
    """
    is_variable = lambda node: isinstance(node, nnx.Variable)
    names = {
        path_text(path): [type(node).__name__, *path_text(path).split("/")]
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
    }
    if found := [path for path, parts in names.items() if OVERWRITE_WITH_GRADIENT in parts]:
        raise ValueError(
            f"init: the collection {OVERWRITE_WITH_GRADIENT!r}, which Flax's fp8 layers have, is not supported\n"
            f"  got:      {', '.join(found[:2])}{', ...' if len(found) > 2 else ''}, whose gradients are new values\n"
            f"  fix:      leave out the dot_general_cls of these layers, or train in fp8 with qwix.quantize_model"
        )


def split(created: Any, trainable: Any = None) -> tuple[Model, PyTree, PyTree, FromModel]:
    """Splits a model into (model, parameters, model state, what it says about its parameters).

    Raises:
        ValueError: if it is a Linen module, a parameter is not an array, a variable is to be overwritten with its
            gradient, or `trainable` matches no parameter.
    """
    if isinstance(created, nn.Module):
        raise ValueError(
            f"init: the function returns a Linen module, which has no parameters\n"
            f"  got:      {type(created).__name__}\n"
            f"  fix:      zero.init(module, tx, inputs=(x,)), or return module.init(key, x)"
        )
    if isinstance(created, nnx.Module):
        model, params, model_state, specs, variables = _nnx_model(created)
    else:
        (model, params, model_state, specs), variables = _tree_model(created), None
    model_state = jax.tree.map(lambda a: jnp.asarray(a) if isinstance(a, int | float | complex) else a, model_state)
    check_leaves(params)
    check_leaves(model_state)
    check_not_overwritten(params)
    check_not_overwritten(model_state)
    annotations = {path_text(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}
    trained = trained_paths(trainable, params, variables)
    return model, params, model_state, FromModel(annotations=annotations, trained=trained)


def trained_paths(trainable: Any, params: PyTree, variables: list[Any] | None = None) -> frozenset[str] | None:
    """The paths of the parameters that the option `trainable` of `Zero` selects; None if it is None.

    Args:
        trainable: globs on paths, a predicate of (path, array), or an nnx filter.
        params: the tree of parameters.
        variables: the variables of an nnx.Module, in the order of the leaves of `params`.

    Raises:
        ValueError: if it matches no parameter, or is a filter and there are no variables.
    """
    if trainable is None:
        return None
    with_paths = [(path, path_text(path), a) for path, a in jax.tree_util.tree_leaves_with_path(params)]
    texts = [text for _, text, _ in with_paths]
    globs = [trainable] if isinstance(trainable, str) else trainable
    if isinstance(globs, list | tuple) and all(isinstance(glob, str) for glob in globs):
        for glob in globs:
            if not any(fnmatchcase(text, glob) for text in texts):
                raise ValueError(no_match_text("trainable", glob, texts))
        found = [text for text in texts if any(fnmatchcase(text, glob) for glob in globs)]
    elif inspect.isfunction(trainable) or inspect.ismethod(trainable):
        found = [text for _, text, a in with_paths if trainable(text, a)]
    elif variables is None:
        raise ValueError(
            f"trainable: an nnx filter selects variables of an nnx.Module, and the model is a tree of arrays\n"
            f"  got:      {trainable!r}\n"
            f"  fix:      pass globs, or a function of (path, array)"
        )
    else:
        matches = nnx.filterlib.to_predicate(trainable)
        keys = [tuple(getattr(key, "key", key) for key in path) for path, _, _ in with_paths]
        found = [text for path, text, variable in zip(keys, texts, variables, strict=True) if matches(path, variable)]
    if not found:
        raise ValueError(
            f"trainable: selects no parameter\n"
            f"  got:      {trainable!r}, paths {', '.join(texts[:5])}\n"
            f"  fix:      select at least one, or leave it out to train all"
        )
    return frozenset(found)


def without_variables(params: PyTree) -> PyTree:
    """A tree of parameters with arrays in place of nnx variables, as in `nnx.pure`."""
    array = lambda node: jax.tree.leaves(node)[0] if isinstance(node, nnx.Variable) else node
    has_one = lambda node: isinstance(node, nnx.Variable) and len(jax.tree.leaves(node)) == 1
    return jax.tree.map(array, params, is_leaf=has_one)


def normalize(result: Any) -> tuple[Weighted, dict[str, Any], bool]:
    """Returns (loss, aux, whether the loss is weighted) from the outputs of a loss function.

    Raises:
        ValueError: if the loss is not a scalar of a floating dtype, or aux is not a dict.
    """
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, Weighted):
        if len(result) != 2:
            raise ValueError(f"loss: returns {len(result)} values\n  fix:      return loss, or (loss, dict of metrics)")
        loss, aux = result
    if not isinstance(aux, Mapping):
        raise ValueError(
            f"loss: the second output is not a dict\n"
            f"  got:      {_described(aux)}\n"
            f"  fix:      return (loss, dict of scalar metrics)"
        )
    weighted = isinstance(loss, Weighted)
    return _as_weighted("the loss", loss), dict(aux), weighted


def _described(value: Any) -> str:
    """An array by its dtype and shape, anything else by its type."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else type(value).__name__


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
    if name == "the loss" and not jnp.issubdtype(jnp.result_type(pair.sum), jnp.floating):
        raise ValueError(
            f"loss: dtype {jnp.result_type(pair.sum)} cannot be differentiated\n  fix:      return a floating dtype"
        )
    return pair


def call_loss(
    loss_fn: Callable[..., Any], model: Model, params: PyTree, model_state: PyTree, batch: PyTree, key: PRNGKey
) -> Output:
    """Runs a user's `loss_fn(model, batch)` or `loss_fn(model, batch, key)`, and normalizes its outputs."""
    merged = model.merge(params, model_state)
    batch = unwrapped(batch)
    args = (merged, batch, key) if takes_key(loss_fn) else (merged, batch)
    try:
        result = loss_fn(*args)
    except Exception as error:
        if len(args) > 2:
            error.add_note("The loss has three arguments: the model, the batch, and a key of jax.random for this step.")
        raise
    loss, aux, weighted = normalize(result)
    after, metrics = model.state_after(merged, aux, model_state)
    after = jax.tree.map(jnp.asarray, after)
    if taken := sorted(metrics.keys() & RESERVED):
        raise ValueError(
            f"loss: a metric has the name of one of the step's own\n"
            f"  got:      {', '.join(map(repr, taken))}\n"
            f"  fix:      use another name; a step reports {', '.join(sorted(RESERVED))} itself"
        )
    plain = frozenset(name for name, value in metrics.items() if not isinstance(value, Weighted))
    metrics = {name: _as_weighted(f"metric {name!r}", v) for name, v in metrics.items()}
    return Output(loss, metrics, after, weighted, plain)


def in_evaluation_mode(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function that puts an nnx.Module into evaluation mode first: no dropout, running averages in BatchNorm."""

    @functools.wraps(loss_fn)
    def evaluated(model: Any, *args: Any) -> Any:
        if isinstance(model, nnx.Module):
            model.eval()
        return loss_fn(model, *args)

    return evaluated


def takes_key(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function has a third parameter that has no default, or is named `key` or `rng`."""
    parameters = [
        p
        for p in inspect.signature(loss_fn).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(parameters) > 2 and (
        parameters[2].default is inspect.Parameter.empty or parameters[2].name in ("key", "rng")
    )


def is_key(leaf: Any) -> bool:
    """Whether an array is a typed PRNG key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def strongly_typed(leaf: ArrayLike) -> Array:
    """An array whose dtype is no longer that of a Python number, which a step would change: it would compile twice."""
    a = jnp.asarray(leaf)
    return a if is_key(a) else lax.convert_element_type(a, a.dtype)
