"""Fused attention by cuDNN in programs for H100s: the kernels run inside units, and run again only where asked."""

import re

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import Remat, targets

pytestmark = pytest.mark.aot

IN_TEXT = 4  # layers of a list; or of scanned ones, the first, the last, and the two that an iteration of a loop runs


def kernels(scan, remat, model=None):
    """(forward kernels, backward kernels, heads in each) in the text of a step for eight H100s."""
    shapes = {"width": 512, "layers": 6 if scan else IN_TEXT, "heads": 8, "vocab": 512, "seq": 128}
    config = gpt.Config(**shapes, scan=scan, dtype=jnp.bfloat16, annotated=bool(model), attention="cudnn")
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:8"), model=model), 3, "bf16")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    step = zero.train_step(gpt.loss, remat=remat)
    traced = step.trace(state, gpt.batch_aval(config, zero.config.axes.num_devices))
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    count = lambda name: len(re.findall(rf'custom_call_target="__cudnn\${name}"', text))
    (heads,) = set(re.findall(r'intermediate_tensor_shape": ?{[^}]*"dimensions": ?\["1", ?"(\d+)"', text))
    return count("fmhaSoftmax"), count("fmhaSoftmaxBackward"), int(heads)


@pytest.mark.parametrize("scan", [False, True], ids=["list", "scanned"])
@pytest.mark.parametrize(
    ("remat", "forward"),
    [("none", 1), ("dots", 1), ("full", 2), (Remat(offload_inputs=True), 2)],
    ids=["none", "dots", "full", "offload"],
)
def test_kernels_run_once_unless_they_are_recomputed(scan, remat, forward):
    assert kernels(scan, remat) == (forward * IN_TEXT, IN_TEXT, 8)


def test_each_device_has_its_own_heads():
    assert kernels(True, "dots", model=2) == (IN_TEXT, IN_TEXT, 4)
