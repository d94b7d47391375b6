"""Loads weights into a state that holds them quantized: each is read in shards, quantized, and released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath

from zerojax.checkpoints import contents
from zerojax.checkpoints.contents import PARAMS
from zerojax.checkpoints.manifest import matches
from zerojax.exchange.names import NameMapping, known_source, weight_sources
from zerojax.exchange.parameters import check_fit, check_layout, opened, read_sharded
from zerojax.exchange.tensors import Reader, bounded_repr, exchange_error
from zerojax.sharding.padding import between
from zerojax.sharding.placement import path_text
from zerojax.step.state import TrainState
from zerojax.utils.typing import Array, Aval, PyTree, Shape

Outputs: TypeAlias = Mapping[str, Array | Aval]  # the path of a leaf of the state -> what is computed for it


def load_quantized(
    state: TrainState,
    path: str | Path | Reader,
    like: PyTree,
    quantize: Callable[[PyTree], PyTree],
    *,
    mapping: NameMapping | None = None,
    family: str | None = None,
    missing: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> TrainState:
    """Returns the state with its parameters computed from those of safetensors files, one after the other.

    For a model that qwix has quantized, pass its function `quantize_params` with that model, which may be abstract, as
    `abstract_quantized_params`.

    Args:
        state, path: as in `parameters.load`.
        like: the parameters that the files hold, as nested dicts of arrays or avals: those of the model before it was
            quantized. They are read in these dtypes, whatever those of the files are.
        quantize: maps a tree with one of them to the tree of what the state has in its place: an array and its scale,
            or the array itself. It may be traced, and runs operation by operation on sharded arrays.
        mapping, family: as in `parameters.load`.
        missing: globs of leaves ('params/*_lora_a') that are not computed from the files. The state keeps its own.
        extra: as in `parameters.load`.

    Raises:
        ValueError: if `quantize` returns something that the state does not have in this shape, or a parameter of the
            state is neither computed nor matches `missing`. Errors of `parameters.load` are raised as well.

    Cost: in addition to the state, a device holds its shard of one array in the dtype of `like`, and what `quantize`
        computes from it; a process holds one shard in host memory. An array is read in full by each device if
        `quantize` changes its shape.
    """
    # Check that the files fit.
    reader, extra = opened(path, family, extra)
    trees = {PARAMS + path_text(keys): (keys, a) for keys, a in jax.tree_util.tree_leaves_with_path(like)}
    avals = {p: jax.ShapeDtypeStruct(a.shape, a.dtype) for p, (_, a) in trees.items()}
    found = weight_sources(avals, mapping, family, reader.names)
    wanted = {p: known_source(found, p) for p in avals}
    check_fit(reader, avals, wanted, missing=(), extra=extra, cast=True)
    check_layout(reader, avals, wanted, None, family)
    # Check that the state has what is computed from them.
    stored, shapes = contents.arrays(contents.avals(state)), contents.logical_shapes(state)
    outputs = {p: _by_path(jax.eval_shape(quantize, _nested(keys, avals[p]))) for p, (keys, _) in trees.items()}
    _check_outputs(outputs, stored, shapes, missing)
    contents.free(state, [q for of_array in outputs.values() for q in of_array])
    # Read and quantize, one array after the other.
    computed: dict[str, Array] = {}
    for p, (keys, _) in trees.items():
        whole = read_sharded(reader, wanted[p], avals[p].shape, _as_read(avals[p], outputs[p], stored))
        logical = between(avals[p].shape, whole.shape).crop(whole)
        for q, a in _by_path(quantize(_nested(keys, logical))).items():
            zeros = between(shapes[q], stored[q].shape)
            computed[q] = jax.device_put(zeros.pad(a.astype(stored[q].dtype)), stored[q].sharding)
    return contents.with_arrays(state, computed)


def _nested(keys: KeyPath, array: Array | Aval) -> PyTree:
    """A tree of dicts with one array."""
    return traverse_util.unflatten_dict({tuple(key.key for key in keys if isinstance(key, DictKey)): array})


def _by_path(tree: PyTree) -> dict[str, Array]:
    return {PARAMS + path_text(path): a for path, a in jax.tree_util.tree_leaves_with_path(tree)}


def _as_read(aval: Aval, outputs: Outputs, stored: Mapping[str, Aval]) -> Aval:
    """How an array is placed when it is read: like the one of its shape that it becomes, or in full."""
    same = [q for q, a in outputs.items() if a.shape == aval.shape]
    if same:
        return jax.ShapeDtypeStruct(stored[same[0]].shape, aval.dtype, sharding=stored[same[0]].sharding)
    mesh = next(iter(stored.values())).sharding.mesh
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _check_outputs(
    outputs: Mapping[str, Outputs], stored: Mapping[str, Aval], shapes: Mapping[str, Shape], missing: Sequence[str]
) -> None:
    """Raises ValueError unless the arrays of the files become leaves of the state, and all that have to."""
    for p, of_array in outputs.items():
        for q, a in of_array.items():
            if q not in stored or tuple(a.shape) != tuple(shapes[q]):
                has = f"the state has {tuple(shapes[q])}" if q in stored else "the state has no such leaf"
                what = f"quantize: {bounded_repr(p)} becomes what the state does not have"
                fix = "quantize as the model of the state was quantized, with like= as it was before"
                raise exchange_error(what, f"{q} of shape {tuple(a.shape)}; {has}", fix)
    computed = {q for of_array in outputs.values() for q in of_array}
    rest = [q for q in stored if q.startswith(PARAMS) and q not in computed and not matches(q, missing)]
    if rest:
        got = f"{contents.shortened(rest)}: {len(rest)} leaves"
        fix = f"missing=({rest[0]!r},) keeps its value, such as that of an adapter; or add it to like="
        raise exchange_error("no array of the files becomes some parameters of the state", got, fix)
