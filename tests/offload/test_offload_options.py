"""Steps that offload activations on GPUs turn off a pass of the compiler, with those versions that misread them."""

from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax import Remat
from zerojax.step import compiler_options, steps

WIDTH, LAYERS = 16, 4
POLICIES = jax.checkpoint_policies
TO_HOST = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["up"], offload_src="device", offload_dst="pinned_host"
)


@pytest.fixture
def jaxlib(monkeypatch):
    """Pretends that the step is for GPUs, and that a version of jaxlib is installed."""

    def install(version):
        monkeypatch.setattr(metadata, "version", lambda package: {"jaxlib": version}[package])
        return compiler_options.offload_options(SimpleNamespace(mesh=FakeMesh()))

    class FakeMesh:
        devices = np.array([SimpleNamespace(platform="gpu")])

    monkeypatch.setattr(compiler_options, "Mesh", FakeMesh)
    return install


def test_the_versions_that_misread_host_slices(jaxlib):
    for version, turns_off in [
        ("0.10.2", True),
        ("0.11.0", True),
        ("0.11.1", False),
        ("0.11.2", False),
        ("0.12.0.1", False),
    ]:
        wanted = {"xla_disable_hlo_passes": "dynamic-slice-annotator"} if turns_off else {}
        assert jaxlib(version) == wanted


def test_nothing_is_turned_off_on_cpus_nor_without_devices(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda package: "0.10.2")
    for mesh in zerojax.make_mesh(), zerojax.make_mesh(devices=8):
        assert not compiler_options.offload_options(SimpleNamespace(mesh=mesh))


@pytest.mark.parametrize("in_file", [False, True], ids=["flags", "file"])
def test_passes_that_the_user_turned_off_stay_turned_off(jaxlib, monkeypatch, tmp_path, in_file):
    """An option of one compilation replaces the flag."""
    flags = "--xla_gpu_enable_latency_hiding_scheduler=true --xla_disable_hlo_passes=algsimp,cse --xla_dump_to=x"
    (tmp_path / "flags").write_text(flags)
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if in_file else flags)
    assert jaxlib("0.10.2") == {"xla_disable_hlo_passes": "algsimp,cse,dynamic-slice-annotator"}


def create(key):
    return {"layers": {"up": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 4}}


def loss(params, x, policy=None):
    layer = lambda x, up: x + jnp.sin(checkpoint_name(jnp.tanh(x @ up), "up"))
    if policy:
        layer = jax.checkpoint(layer, policy=policy)
    x, _ = jax.lax.scan(lambda x, up: (layer(x, up), None), x, params["layers"]["up"])
    return jnp.mean(x**2)


def offloads_by_itself(params, x):
    return loss(params, x, TO_HOST)


@pytest.mark.parametrize(
    ("loss", "remat", "offloads"),
    [
        (loss, Remat(offload_inputs=True), True),
        (loss, Remat(offload=("up",)), True),
        (loss, {"*": TO_HOST}, True),
        (offloads_by_itself, "none", True),
        (loss, "full", False),
        (loss, POLICIES.dots_saveable, False),
    ],
    ids=["inputs", "names", "policy", "model", "full", "other policy"],
)
def test_only_steps_that_offload_get_the_option(monkeypatch, loss, remat, offloads):
    """Seen by an option that the compiler does not know."""
    monkeypatch.setattr(steps, "offload_options", lambda config: {"xla_no_such_option": "1"})
    zero = zerojax.Zero(zerojax.make_mesh(), stacked=("layers/*",))
    state = zero.eval_init(create, optax.sgd(0.1))
    lowered = zero.train_step(loss, remat=remat).lower(state, np.ones((8, WIDTH), np.float32))
    if offloads:
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            lowered.compile()
    else:
        lowered.compile()
