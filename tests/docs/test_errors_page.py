"""Checks that docs/errors.md shows each error as it is raised, except for paths and numbers that vary by version."""

import json
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file
from support.paths import REPO
from support.small_run import (
    WIDTH,
    Iterator,
    adam,
    change_manifest,
    create,
    loss,
    renamed,
    setting,
    train as train_until,
)

import zerojax
from zerojax.analysis.step import out_of_memory_error
from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import with_digest
from zerojax.exchange import adapters, parameters, quantized
from zerojax.exchange.tensors import INDEX, Reader
from zerojax.plan import Settings, from_hugging_face, plan
from zerojax.processes import agree
from zerojax.step.config import StepSettings
from zerojax.utils import versions

PAGE = (REPO / "docs" / "errors.md").read_text()
SHOWN = dict(re.findall(r"^### (.*?)\n.*?^```\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL))
RAISED = {}


def raises(title):
    """Decorator: the function takes an empty directory and raises the error that the page shows under this title."""
    return lambda function: RAISED.setdefault(title, function)


def resume(directory, create_model=create, tx=None, precision="bf16", **options):
    zero = setting(precision=precision)
    with zero.checkpoints(directory) as checkpoints:
        checkpoints.restore(zero.init(create_model, tx or adam()), 4, **options)


def four_steps(directory):
    train_until(setting(), directory, 4)
    return directory


@raises("A missing leaf and an unexpected leaf")
def _(tmp_path):
    resume(four_steps(tmp_path), renamed, optax.sgd(0.1), optimizer="new")


@raises("A different shape")
def _(tmp_path):
    train_until(setting(), tmp_path, 4, tx=optax.sgd(0.1))
    resume(tmp_path, lambda key: create(key, 2 * WIDTH), optax.sgd(0.1))


@raises("A different dtype")
def _(tmp_path):
    only_odd = lambda key: {"odd": create(key)["odd"]}
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(only_odd, optax.sgd(0.1)))
    narrow = zerojax.Precision(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    zero = setting(precision=narrow)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(zero.init(only_odd, optax.sgd(0.1)), 0)


@raises("Many leaves with a different dtype")
def _(tmp_path):
    four_steps(tmp_path)
    narrow = zerojax.Precision(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    resume(tmp_path, precision=narrow)


@raises("A different optimizer")
def _(tmp_path):
    resume(four_steps(tmp_path), tx=optax.sgd(0.1, momentum=0.9))


@raises("A checkpoint of a newer version")
def _(tmp_path):
    newer = lambda text: text.replace('"format": 1', '"format": 2').replace('"zerojax": "0.1.0"', '"zerojax": "9.0"')
    change_manifest(four_steps(tmp_path), newer)
    resume(tmp_path)


@raises("A damaged array")
def _(tmp_path):
    digest = store.read_manifest(four_steps(tmp_path), 4).leaves["params/odd"].digest
    change_manifest(tmp_path, lambda text: with_new_digest(text.replace(digest, "0" * len(digest))))
    resume(tmp_path)


def with_new_digest(text):
    info = json.loads(text)
    del info["digest"]
    return json.dumps(with_digest(info))


@raises("A damaged manifest")
def _(tmp_path):
    change_manifest(four_steps(tmp_path), lambda text: text[:-5])
    resume(tmp_path)


@raises("No intact step")
def _(tmp_path):
    for step in 2, 4:
        (four_steps(tmp_path) / f"step_{step}" / "commit_success.txt").unlink()
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(zero.init(create, adam()))


@raises("A state with a NaN or an infinity")
def _(tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(lambda key: jax.tree.map(lambda a: a * np.nan, create(key)), adam()))


@raises("A data iterator whose state is not JSON")
def _(tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(create, adam()), Iterator({"at": (1, 2)}))


def step(batch=None, create_model=create, **options):
    zero = zerojax.Zero(zerojax.make_mesh(), **options)
    state = zero.eval_init(create_model, optax.sgd(0.1))
    zero.train_step(loss).trace(state, batch)


@raises("An unknown stage")
def _(tmp_path):
    step(stage=4)


@raises("A missing mesh axis")
def _(tmp_path):
    step(shard_axes=("fsdp",))


@raises("A batch that cannot be divided")
def _(tmp_path):
    step({"x": np.ones((12, WIDTH), np.float32)})


@raises("Devices that do not divide the batch")
def _(tmp_path):
    setting(num_devices=7).num_microbatches(120, 15)


@raises("A pattern that matches nothing")
def _(tmp_path):
    step(frozen=["layer/*"])


@raises("A dim that cannot be sharded")
def _(tmp_path):
    step(shard_dims={"odd": 1})


@raises("Nothing left to train")
def _(tmp_path):
    step(trainable=["odd"], frozen=["odd"])


@raises("A state that was donated")
def _(tmp_path):
    zero = setting()
    state, x = zero.init(create, adam()), np.ones((8, WIDTH), np.float32)
    batch = {"x": x, "y": x}
    zero.train_step(loss)(state, batch)
    zero.train_step(loss)(state, batch)


@raises("A model without parameters")
def _(tmp_path):
    step(create_model=dict)


@raises("A leaf that is not an array")
def _(tmp_path):
    step(create_model=lambda key: create(key) | {"activation": "relu"})


@raises("A configuration that is not JSON")
def _(tmp_path):
    agree({"layers": {1, 2}})


@raises("A directory with a glob character")
def _(tmp_path):
    setting().checkpoints(tmp_path / "lr[0.1]")


@raises("A URL as a directory")
def _(tmp_path):
    setting().checkpoints("s3://bucket/run")


@raises("A directory that another run uses")
def _(tmp_path):
    with setting().checkpoints(tmp_path):
        (tmp_path / ".lock").write_text("process 4711 on node0")
        setting().checkpoints(tmp_path)


@raises("Out of device memory")
def _(tmp_path):
    """JAX's error is planted."""
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 23.10GiB.\nand more")
    memory = plan("llama3-8b", "h100:8", Settings(stage=2, remat="none"), suggest=False).memory
    raise out_of_memory_error(setting(2).config, StepSettings(), memory, error)


@raises("An unsupported version")
def _(tmp_path):
    versions.check({"jax": "0.10.1"})


@raises("A config of an unknown model type")
def _(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    from_hugging_face(tmp_path)


@raises("A config with a missing value")
def _(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    from_hugging_face(tmp_path)


@raises("A file that is shorter than its header says")
def _(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    Reader(tmp_path)


@raises("An index that points outside its folder")
def _(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
    Reader(tmp_path)


def load_matrix(directory, arrays, shape=(32, 32), file_format="pt", **options):
    """Loads arrays, given by their shapes, into a state with one matrix."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in arrays.items()}
    save_file(arrays, directory / "model.safetensors", {"format": file_format})
    parameters.load(setting().init(lambda: {"w": jnp.ones(shape)}, optax.sgd(0.1)), directory, **options)


@raises("A file that does not state its layout")
def _(tmp_path):
    load_matrix(tmp_path, {"w": (32, 32)})


@raises("A file in another layout")
def _(tmp_path):
    load_matrix(tmp_path, {"w": (64, 32), "mask": (2,)}, (32, 64))


@raises("A file with other names")
def _(tmp_path):
    load_matrix(tmp_path, {"fc.weight": (32, 32)})


@raises("A Flax file read as a PyTorch file")
def _(tmp_path):
    load_matrix(tmp_path, {"w": (32, 32)}, file_format="flax", family="llama")


@raises("A quantized weight that does not fit the state")
def _(tmp_path):
    matrix = jnp.zeros((32, 32))
    params = {"w": {"array": {"qvalue": matrix.astype(jnp.int8), "scale": matrix[:1]}}, "b": matrix}
    parameters.export_params({"w": matrix}, tmp_path)
    state = setting().init(lambda: params, adam())
    quantized.load_quantized(state, tmp_path, {"w": matrix}, lambda tree: tree, missing=["params/b"])


@raises("An adapter that does not fit its weight")
def _(tmp_path):
    params = {"w": jnp.zeros((32, 32)), "w_lora_a": jnp.zeros((64, 4)), "w_lora_b": jnp.zeros((4, 32))}
    adapters.merged(setting().init(lambda: params, adam()), 1.0)


def mask_numbers(text):
    """The text without sizes and positions."""
    return re.sub(r"[\d.]+(?= [MG]iB)|(?<=column )\d+|(?<=char )\d+", "N", text)


def test_each_error_is_shown_as_it_is_raised(tmp_path):
    assert list(SHOWN) == list(RAISED)
    for number, (title, function) in enumerate(RAISED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(Exception) as error:
            function(folder)
        text = f"{type(error.value).__name__}: {error.value}".replace(str(folder), "/runs/a")
        assert mask_numbers(SHOWN[title]) == mask_numbers(text), title


def test_every_error_says_how_to_fix_it():
    without = {title for title, text in SHOWN.items() if "fix:" not in text and "allows it" not in text}
    assert not without
