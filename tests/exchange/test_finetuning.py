"""What fine-tuning needs of files: quantized weights, merged adapters, and the export of a state."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from support.copied import record_copies
from support.finetuned import WEIGHTS, merge_and_export, quantize, quantized_state
from support.paths import SUPPORT
from support.small_run import adam, create, setting

import zerojax
from zerojax import Zero
from zerojax.checkpoints import contents
from zerojax.exchange import adapters, parameters, quantized
from zerojax.exchange.tensors import Reader
from zerojax.processes.launch import launch

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def state_of(params, precision="fp32", stage=3, trainable=("*_lora_*",)):
    """A state of existing parameters; all but adapters are frozen."""
    zero = Zero(zerojax.make_mesh(), stage, precision, trainable=list(trainable) or None)
    return zero.init(jax.tree.map(jnp.asarray, params), optax.sgd(0.1))


# Quantized weights


def written(folder, params=None, **options):
    parameters.export_params(params or WEIGHTS, folder, **options)
    return folder


@pytest.mark.parametrize("stage", [0, 3])
def test_quantized_weights_are_computed_from_files_one_at_a_time(tmp_path, stage, monkeypatch):
    """Also those that are stored with zeros at their ends. Nothing is read that a device does not hold."""
    state, sizes = quantized_state(stage), record_copies(monkeypatch)

    def watched(tree):
        (a,) = jax.tree.leaves(tree)
        if not isinstance(a, jax.core.Tracer) and a.shape == (16, 24):
            assert a.dtype == jnp.float32 and a.is_fully_replicated == (stage == 0)
        return quantize(tree)

    got = quantized.load_quantized(state, written(tmp_path), WEIGHTS, watched, missing=["params/*_lora_?"])
    params = contents.saved_params(got)
    want = jax.jit(quantize)(WEIGHTS)
    for name in ("up", "odd"):
        of_layer = params["layers"]["0"][name]["array"], want["layers"]["0"][name]["array"]
        np.testing.assert_array_equal(of_layer[0]["qvalue"], of_layer[1]["qvalue"])
        np.testing.assert_allclose(of_layer[0]["scale"], of_layer[1]["scale"], rtol=1e-6)
    np.testing.assert_array_equal(params["norm"], WEIGHTS["norm"])
    np.testing.assert_array_equal(params["layers"]["0"]["up_lora_a"], np.full((16, 2), 3))
    assert max(sizes) == (16 * 24 if stage == 0 else 16 * 24 // 8)


def test_what_quantize_returns_has_to_be_in_the_state(tmp_path):
    folder = written(tmp_path)
    load = lambda fn, missing: quantized.load_quantized(quantized_state(), folder, WEIGHTS, fn, missing=missing)
    with pytest.raises(ValueError, match="'params/layers/0/odd' becomes what the state does not have") as raised:
        load(lambda tree: tree, ["params/*_lora_?"])
    assert "params/layers/0/odd of shape (5, 7); the state has no such leaf" in str(raised.value)
    with pytest.raises(ValueError, match="no array of the files becomes some parameters") as raised:
        load(quantize, [])
    assert "params/layers/0/up_lora_a, params/layers/0/up_lora_b: 2 leaves" in str(raised.value)


# Adapters


def einsum_case(equation, lhs, weight, a, b):
    """A weight of an einsum and its adapters, with what the einsum with adapters returns."""
    x, w, a, b = normal(*lhs), normal(*weight), normal(*a), normal(*b)
    inputs, outputs = equation.split("->")
    left, right = inputs.split(",")
    inner = [d for d in right if d in left]
    rest = [d for d in right if d not in left]
    low = np.einsum(f"{left},{''.join(inner)}r,r{''.join(rest)}->{outputs}", x, a, b)
    return {"w": w, "w_lora_a": a, "w_lora_b": b}, lambda w: np.einsum(equation, x, w), low


EINSUMS = [  # those of Tunix, with the adapters of qwix
    ("BTD,DNH->BTNH", (2, 3, 16), (16, 4, 8), (16, 2), (2, 4, 8)),
    ("BTNH,NHD->BTD", (2, 3, 4, 8), (4, 8, 16), (4, 8, 2), (2, 16)),
    ("BTD,SNDH->SBTNH", (2, 3, 16), (3, 4, 16, 8), (16, 2), (2, 3, 4, 8)),
    ("BD,DF->BF", (2, 16), (16, 16), (16, 2), (2, 16)),
]


@pytest.mark.parametrize("case", EINSUMS, ids=lambda case: case[0])
def test_a_merged_weight_computes_what_the_adapters_do(case):
    params, product, low = einsum_case(*case)
    got = adapters.merged(state_of({"layer": params}), 0.5)
    assert set(got["layer"]) == {"w"} and not got["layer"]["w"].is_fully_replicated
    np.testing.assert_allclose(product(np.asarray(got["layer"]["w"])), product(params["w"]) + 0.5 * low, atol=1e-4)


@pytest.mark.parametrize("tile", [16, 4])
def test_a_quantized_weight_is_dequantized_and_merged_in_fp32(tile):
    """With a scale for each tile of a column. A dtype is that of what is merged or dequantized, and of nothing else."""
    values = RNG.integers(-127, 128, (16, 24)).astype(np.int8)
    scale, norm = normal(16 // tile, 24).astype(jnp.bfloat16), normal(8)
    a, b = normal(16, 2), normal(2, 24)
    weight = {"array": {"qvalue": values, "scale": scale}}
    state = state_of({"up": weight, "up_lora_a": a, "up_lora_b": b, "down": weight, "norm": norm}, "bf16")
    base = values * np.repeat(scale.astype(np.float32), tile, axis=0)
    got = adapters.merged(state, 2.0, "float32")
    np.testing.assert_allclose(got["up"], base + 2 * a @ b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got["down"], base)
    assert got["norm"].dtype == jnp.float32 and adapters.merged(state, 2.0)["up"].dtype == jnp.bfloat16


def test_adapters_that_do_not_fit_are_refused():
    a, b = normal(16, 2), normal(2, 24)
    with pytest.raises(ValueError, match="there is no adapter"):
        adapters.merged(state_of({"w": normal(8, 8)}, trainable=()), 1.0)
    with pytest.raises(ValueError, match="an adapter has no weight"):
        adapters.merged(state_of({"v": normal(16, 24), "w_lora_a": a, "w_lora_b": b}), 1.0)
    with pytest.raises(ValueError, match="an adapter does not fit its weight") as raised:
        adapters.merged(state_of({"w": normal(16, 8), "w_lora_a": a, "w_lora_b": b}), 1.0)
    assert "w of shape (16, 8), adapters of shapes (16, 2) and (2, 24)" in str(raised.value)
    array = {"qvalue": np.ones((16, 24), np.int8), "scale": normal(1, 24), "zero_point": normal(1, 24)}
    with pytest.raises(ValueError, match="a quantized weight has a zero point"):
        adapters.merged(state_of({"w": {"array": array}, "w_lora_a": a, "w_lora_b": b}), 1.0)


# Export of a state


@pytest.mark.parametrize("stage", [1, 3])
def test_the_files_of_a_state_are_those_of_its_checkpoint(tmp_path, stage):
    """With the trained parameters in param_dtype, and without the zeros that pad shards."""
    zero = setting(stage)
    state = zero.init(create, adam())
    with zero.checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    parameters.export(tmp_path / "run", 0, tmp_path / "a")
    (file,) = parameters.export_params(state, tmp_path / "b")
    want, got = load_file(tmp_path / "a" / "model.safetensors"), load_file(file)
    assert got.keys() == want.keys() and all(a.dtype == np.float32 for a in got.values())
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_a_load_of_frozen_weights_copies_none_of_them(tmp_path):
    """The base comes from files, in its dtype, and the adapters that they lack stay."""
    base, narrow = normal(16, 24), jnp.bfloat16
    params = {"w": base.astype(narrow), "w_lora_a": normal(16, 2), "w_lora_b": normal(2, 24)}
    state = state_of(params, "bf16")
    save_file({"w": 2 * base}, tmp_path / "model.safetensors", {"format": "flax"})
    loaded = parameters.load(state, tmp_path, missing=["params/*_lora_?"], cast=True)
    np.testing.assert_array_equal(np.asarray(loaded.params["w"]), (2 * base).astype(narrow))
    np.testing.assert_array_equal(np.asarray(loaded.master["w_lora_a"]), params["w_lora_a"])
    assert loaded.params["w_lora_a"].dtype == narrow
    again = contents.with_arrays(loaded, {"params/w": loaded.params["w"]})
    assert again.params["w"] is loaded.params["w"]


@pytest.mark.once
def test_two_processes_write_the_files_of_one(tmp_path):
    """Each reads the shards of its own devices; process 0 alone writes."""
    written(tmp_path / "base")
    merge_and_export(tmp_path / "base", tmp_path / "one")
    command = [sys.executable, str(SUPPORT / "finetuned.py"), str(tmp_path / "base"), str(tmp_path / "two")]
    assert launch(command, 2, devices=4, timeout_s=120) == 0
    want, got = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert got.keys() == want.keys() == {"layers.0.up", "layers.0.odd", "norm"}
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


def test_links_out_of_a_folder_are_followed_by_a_reader_that_is_told_to(tmp_path):
    """As in the cache of Hugging Face."""
    (file,) = parameters.export_params({"w": np.eye(8, dtype=np.float32)}, tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / file.name).symlink_to(file)
    state = state_of({"w": np.zeros((8, 8), np.float32)}, trainable=())
    with pytest.raises(ValueError, match=r"a link leads out of .*(?s:.*)pass Reader\(folder, follow_links=True\)"):
        parameters.load(state, tmp_path / "snapshot")
    loaded = parameters.load(state, Reader(tmp_path / "snapshot", follow_links=True))
    np.testing.assert_array_equal(loaded.params["w"], np.eye(8))
