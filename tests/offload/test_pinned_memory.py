"""The limit of pinned host memory: how it is read, and the error before a state that is larger would be created."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.offload import host_memory
from zerojax.offload.host_memory import PINNED_LIMIT, check_pinned, pinned_limit_gib, sufficient_limit_gib

GIB = 2**30


def test_the_limit_is_that_of_the_environment():
    assert pinned_limit_gib({}) == 64 and pinned_limit_gib({PINNED_LIMIT: "200"}) == 200
    for value in ("", "0", "all", "1.5"):
        with pytest.raises(ValueError, match="is not a number of GiB"):
            pinned_limit_gib({PINNED_LIMIT: value})


def test_all_gpus_of_a_process_share_the_limit():
    check_pinned(64 * GIB, 1, {})
    check_pinned(8 * GIB, 8, {})
    with pytest.raises(ValueError, match="offload") as error:
        check_pinned(8 * GIB + 1, 8, {})
    assert "64.0 GiB for 8 GPUs, and a limit of 64 GiB" in str(error.value)
    fix = sufficient_limit_gib(8 * (8 * GIB + 1))
    assert f"{PINNED_LIMIT}={fix} in the environment" in str(error.value)
    check_pinned(8 * GIB + 1, 8, {PINNED_LIMIT: str(fix)})


def test_a_state_is_checked_before_it_is_created(monkeypatch):
    """For GPUs, whose place simulated devices take: their platform is planted."""
    zero = zerojax.Zero(zerojax.make_mesh(), 3, "fp32", offload="optimizer")
    create = lambda key: {"w": jnp.zeros((64, 64))}
    state = zero.eval_init(create, optax.adam(1e-3))
    gpus = [types.SimpleNamespace(platform="gpu", process_index=0) for _ in jax.devices()]
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=gpus))
    of_device = 2 * 4 * 64 * 64 // 8
    seen = []
    monkeypatch.setattr(host_memory, "check_pinned", lambda *args: seen.append(args[:2]))
    host_memory.check_may_pin(zero.config._replace(mesh=mesh), state)
    assert seen == [(of_device, 8)]
    both = zerojax.Zero(zerojax.make_mesh(), 3, "fp32", offload="params")
    host_memory.check_may_pin(both.config._replace(mesh=mesh), both.eval_init(create, optax.adam(1e-3)))
    assert seen.pop() == (2 * of_device, 8)  # the parameters, and gradients that go there
    zero.init(create, optax.adam(1e-3))
    assert len(seen) == 1  # simulated devices have no limit
    monkeypatch.setattr(host_memory, "check_may_pin", lambda config, state: seen.append(state))
    zero.init(create, optax.adam(1e-3))
    zero.with_optimizer(zero.init(create, optax.adam(1e-3)), optax.adamw(1e-3))
    assert len(seen) == 4
