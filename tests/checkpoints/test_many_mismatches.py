"""Errors about many leaves: one line that counts them and names a few."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import zerojax
from zerojax.checkpoints.manifest import Allowed, LeafRecord, Manifest, paths_to_read
from zerojax.exchange.parameters import load

NUM_LAYERS = 32
PATHS = [f"params/layers/{k}/{name}" for k in range(NUM_LAYERS) for name in ("w", "b")]


def error(leaves, avals):
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), "float32")
    saved = Manifest(4, leaves, {"data": 8}, 3, dtypes, {"zerojax": "0.1.0"}, None)
    with pytest.raises(ValueError) as raised:
        paths_to_read(saved, avals, Allowed(), "/runs/a/step_4")
    return str(raised.value).split("\n")


def test_equal_dtype_mismatches_are_one_line():
    leaves = {path: LeafRecord((4,), "float32", "0" * 16) for path in [*PATHS, "params/head"]}
    avals = {path: jax.ShapeDtypeStruct((4,), jnp.bfloat16) for path in leaves}
    assert error(leaves, avals) == [
        "checkpoint: /runs/a/step_4 does not fit the state",
        "  dtype:    65 leaves: float32 was saved, the state has bfloat16 (cast=True allows it): "
        "params/layers/*/w × 32, params/layers/*/b × 32, params/head",
    ]


def test_other_differences_have_lines_of_their_own():
    """Up to three equal ones have a line each, which names the leaf."""
    leaves = {path: LeafRecord((4,), "float32", "0" * 16) for path in PATHS}
    avals = {path: jax.ShapeDtypeStruct((8,) if path.endswith("0/w") else (4,), jnp.float32) for path in PATHS[:-6]}
    lines = error(leaves, avals)
    extra = "6 leaves: the state has no such leaves (extra= allows them, by globs)"
    names = "params/layers/*/w × 3, params/layers/*/b × 3"
    first = "params/layers/29/w: the state has no such leaf, the nearest is params/layers/9/w"
    assert lines[1].startswith(f"  extra:    {extra}: {names}; the first, {first}")
    shapes = [f"  shape:    params/layers/{k}/w: (4,) was saved, the state has (8,)" for k in (0, 10, 20)]
    assert lines[2:-1] == shapes and lines[-1].startswith("  fix:      build the model with the shapes that were saved")


def test_lines_beyond_forty_are_counted():
    leaves = {f"params/{k}": LeafRecord((k,), "float32", "0" * 16) for k in range(1, 46)}
    lines = error(leaves, {path: jax.ShapeDtypeStruct((99,), jnp.float32) for path in leaves})
    assert len(lines) == 43 and lines[-2] == "  ... and 5 more"


def test_a_list_of_names_ends_with_the_number_of_the_rest():
    leaves = {f"params/{name}": LeafRecord((4,), "float32", "0" * 16) for name in "abcdefgh"}
    line = error(leaves, {path: jax.ShapeDtypeStruct((4,), jnp.bfloat16) for path in leaves})[1]
    assert line.startswith("  dtype:    8 leaves: ") and line.endswith("params/c, params/d, and 4 more")


def test_files_with_another_dtype(tmp_path):
    names = [f"layers.{k}.w" for k in range(NUM_LAYERS)]
    arrays = {name: np.zeros((8, 8), np.float16) for name in names}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "flax"})
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state = zero.init(lambda: {"layers": [{"w": jnp.ones((8, 8))} for _ in range(NUM_LAYERS)]}, optax.sgd(0.1))
    with pytest.raises(ValueError) as raised:
        load(state, tmp_path, layout="flax")
    text = "32 leaves: the file is float16, the state has float32 (cast=True allows it): params/layers/*/w × 32"
    assert str(raised.value).split("\n")[1:] == [f"  dtype:    {text}"]


def test_a_state_of_another_dtype():
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    create = lambda: {"layers": [{"w": jnp.ones((8, 8))} for _ in range(NUM_LAYERS)], "head": jnp.ones((8, 8))}
    state = zero.eval_init(create, optax.sgd(0.1, momentum=0.9))
    aval = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding)
    wrong = dataclasses.replace(state, opt_state=jax.tree.map(aval, state.opt_state))
    with pytest.raises(ValueError) as raised:
        zero.train_step(lambda params, x: jnp.mean(x @ params["head"])).trace(wrong, np.ones((8, 8), np.float32))
    text = str(raised.value)
    assert "  got:      0/trace/head: ((8, 8), dtype(bfloat16))\n" in text
    assert "  more:     32 other leaves: 0/trace/layers/*/w × 32\n" in text and len(text.split("\n")) == 5


def test_ten_thousand_leaves_with_other_names_are_told_in_seconds():
    """The nearest name is looked up for those that are shown."""
    leaves = {f"params/model/layers/{k}/kernel": LeafRecord((4,), "float32", "0" * 16) for k in range(10_000)}
    avals = {f"params/layers/{k}/w": jax.ShapeDtypeStruct((4,), jnp.float32) for k in range(10_000)}
    start = time.process_time()
    lines = error(leaves, avals)
    assert len(lines) == 3 and "10,000 leaves" in lines[1] and "the nearest is" in lines[1]
    assert time.process_time() - start < 60  # a comparison of each with each takes an hour
