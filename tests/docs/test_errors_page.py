"""docs/errors.md: each text that it shows is what is raised, but for paths, and for numbers that versions change."""

import json
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
    train as train_a_while,
)

import zerojax
from zerojax import versions
from zerojax.checkpoints import store
from zerojax.checkpoints.manifest import with_digest
from zerojax.exchange.tensors import INDEX, Reader
from zerojax.plan import Settings, plan
from zerojax.processes import agree
from zerojax.report.out_of_memory import out_of_memory_error
from zerojax.step.settings import StepSettings

PAGE = (REPO / "docs" / "errors.md").read_text()
SHOWN = dict(re.findall(r"^### (.*?)\n.*?^```\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL))
RAISED = {}


def shows(title):
    """The decorated function raises, in a directory of its own, what is shown under that title."""
    return lambda function: RAISED.setdefault(title, function)


def resume(directory, create_model=create, tx=None, precision="bf16", **options):
    zero = setting(precision=precision)
    with zero.checkpoints(directory) as checkpoints:
        checkpoints.restore(zero.init(create_model, tx or adam()), 4, **options)


def four_steps(directory):
    train_a_while(setting(), directory, 4)
    return directory


@shows("A missing leaf and an unexpected leaf")
def _(tmp_path):
    resume(four_steps(tmp_path), renamed, optax.sgd(0.1), new_optimizer=True)


@shows("A different shape")
def _(tmp_path):
    train_a_while(setting(), tmp_path, 4, tx=optax.sgd(0.1))
    resume(tmp_path, lambda key: create(key, 2 * WIDTH), optax.sgd(0.1))


@shows("A different dtype")
def _(tmp_path):
    only_odd = lambda key: {"odd": create(key)["odd"]}
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(only_odd, optax.sgd(0.1)))
    narrow = zerojax.Precision(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    zero = setting(precision=narrow)
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(zero.init(only_odd, optax.sgd(0.1)), 0)


@shows("A different optimizer")
def _(tmp_path):
    resume(four_steps(tmp_path), tx=optax.sgd(0.1, momentum=0.9))


@shows("A checkpoint of a newer version")
def _(tmp_path):
    newer = lambda text: text.replace('"format": 1', '"format": 2').replace('"zerojax": "0.1.0"', '"zerojax": "9.0"')
    change_manifest(four_steps(tmp_path), newer)
    resume(tmp_path)


@shows("A damaged array")
def _(tmp_path):
    digest = store.read_manifest(four_steps(tmp_path), 4).leaves["params/odd"].digest
    change_manifest(tmp_path, lambda text: resigned(text.replace(digest, "0" * len(digest))))
    resume(tmp_path)


def resigned(text):
    told = json.loads(text)
    del told["digest"]
    return json.dumps(with_digest(told))


@shows("A damaged manifest")
def _(tmp_path):
    change_manifest(four_steps(tmp_path), lambda text: text[:-5])
    resume(tmp_path)


@shows("No intact step")
def _(tmp_path):
    for step in 2, 4:
        (four_steps(tmp_path) / f"step_{step}" / "commit_success.txt").unlink()
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(zero.init(create, adam()))


@shows("A state with a NaN or an infinity")
def _(tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(lambda key: jax.tree.map(lambda a: a * np.nan, create(key)), adam()))


@shows("A data iterator whose state is not JSON")
def _(tmp_path):
    zero = setting()
    with zero.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(zero.init(create, adam()), Iterator({"at": (1, 2)}))


def step(batch=None, create_model=create, **options):
    zero = zerojax.Zero(zerojax.make_mesh(), **options)
    state = zero.eval_init(create_model, optax.sgd(0.1))
    zero.train_step(loss).trace(state, batch)


@shows("An unknown stage")
def _(tmp_path):
    step(stage=4)


@shows("A missing mesh axis")
def _(tmp_path):
    step(shard_axes=("fsdp",))


@shows("A batch that cannot be divided")
def _(tmp_path):
    step({"x": np.ones((12, WIDTH), np.float32)})


@shows("A pattern that matches nothing")
def _(tmp_path):
    step(frozen=["layer/*"])


@shows("A dim that cannot be sharded")
def _(tmp_path):
    step(shard_dims={"odd": 0})


@shows("A model without parameters")
def _(tmp_path):
    step(create_model=dict)


@shows("A leaf that is not an array")
def _(tmp_path):
    step(create_model=lambda key: create(key) | {"activation": "relu"})


@shows("A configuration that is not JSON")
def _(tmp_path):
    agree({"layers": {1, 2}})


@shows("Out of device memory")
def _(tmp_path):
    """What JAX raises is planted."""
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 23.10GiB.\nand more")
    memory = plan("llama3-8b", "h100:8", Settings(stage=2, remat="none"), suggest=False).memory
    raise out_of_memory_error(setting(2).config, StepSettings(), memory, error)


@shows("An unsupported version")
def _(tmp_path):
    versions.check({"jax": "0.10.1"})


@shows("A file that is shorter than its header says")
def _(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**20, 2**20], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    Reader(tmp_path)


@shows("A header that is longer than its file")
def _(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    Reader(tmp_path)


@shows("An index that points outside its folder")
def _(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))
    Reader(tmp_path)


def masked(text):
    return re.sub(r"[\d.]+(?= [MG]iB)|(?<=column )\d+|(?<=char )\d+", "N", text)


@pytest.mark.parametrize("title", RAISED)
def test_an_error_is_as_shown(title, tmp_path):
    with pytest.raises(Exception) as told:
        RAISED[title](tmp_path)
    text = f"{type(told.value).__name__}: {told.value}".replace(str(tmp_path), "/runs/a")
    assert masked(SHOWN[title]) == masked(text)


def test_all_that_is_shown_is_raised_here():
    assert list(SHOWN) == list(RAISED)


def test_every_error_says_how_to_go_on():
    without = {title for title, text in SHOWN.items() if "fix:" not in text and "allows it" not in text}
    assert without == {"A different shape"}
