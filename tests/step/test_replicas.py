"""Copies of the same values on several devices are compared, whatever the stage, the mesh and the dtype."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.small_run import batch, create, loss, setting, with_flipped_bit

import zerojax
from zerojax.checkpoints import replicas
from zerojax.checkpoints.digest import digests

# (stage, axes of the mesh, number of devices, the device whose memory is damaged, the devices that are named)
CASES = [
    (0, {}, 8, 3, [3]),
    (1, {}, 8, 7, [7]),
    (2, {"replica": 2}, 8, 0, [0]),
    (3, {"replica": 2}, 8, 3, [3, 7]),  # two copies of each shard
    (3, {"replica": 4}, 8, 5, [5]),
    (1, {}, 7, 6, [6]),
]


@pytest.mark.parametrize(("stage", "axes", "n", "damaged", "named"), CASES)
def test_a_copy_that_differs_is_named(stage, axes, n, damaged, named):
    zero = setting(stage, num_devices=n, **axes)
    state = zero.init(create, optax.adam(1e-3))
    replicas.verify_replicas(state, "")
    path = "layers/1/w"
    with pytest.raises(replicas.ReplicasDiffer) as raised:
        replicas.verify_replicas(with_flipped_bit(state, path, damaged), "do this")
    assert raised.value.code == replicas.DIFFER_EXIT_CODE
    devices = ", ".join(f"device {i} (process 0)" for i in named)
    assert f"got:      params/{path} on {devices}\n  fix:      do this" in str(raised.value)


def test_a_part_without_a_copy_has_no_outlier():
    state = setting(3).init(create, optax.adam(1e-3))
    replicas.verify_replicas(with_flipped_bit(state, "layers/1/w", 3), "")


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "float8_e4m3fn", "int32", "complex64"])
def test_copies_of_every_dtype_are_compared(dtype):
    """Each device computes its copy. Host arrays cannot be different copies."""
    mesh = zerojax.make_mesh()

    def copies():
        own = jnp.arange(24).reshape(4, 6) % 2 + (jax.lax.axis_index("data") == 5)
        return (own == 1 if dtype == "bool" else own).astype(dtype)

    spec = jax.sharding.PartitionSpec()
    array = jax.jit(jax.shard_map(copies, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
    assert [device.id for device in digests({"a": array})["a"].outliers] == [5]


def test_a_copy_that_differs_is_not_saved(tmp_path):
    zero = setting(1)
    state, step = zero.init(create, optax.adam(1e-3)), zero.train_step(loss)
    with zero.checkpoints(tmp_path / "run", every=1) as checkpoints:
        state, _ = checkpoints.resume(state)
        for i in range(2):
            state, _ = step(state, batch(i))
            checkpoints.update(state)
        state, _ = step(state, batch(2))
        text = "(?s)state of step 3, which is not saved.*compute_params/odd.*resume from step 2"
        with pytest.raises(replicas.ReplicasDiffer, match=text):
            checkpoints.update(with_flipped_bit(state, "odd", 2))
        assert checkpoints.steps() == [1, 2]
    differing = with_flipped_bit(zero.init(create, optax.adam(1e-3)), "odd", 2)
    with zero.checkpoints(tmp_path / "new") as checkpoints, pytest.raises(replicas.ReplicasDiffer, match="step 0"):
        checkpoints.resume(differing)


def test_replicas_are_compared_between_saves(tmp_path):
    """At stage 0, a flipped bit stays, and spreads on its device."""
    zero = setting(0, "fp32")
    state, step = zero.init(create, optax.adam(1e-3)), zero.train_step(loss)
    with zero.checkpoints(tmp_path, every=100, verify_replicas_every=2) as checkpoints:
        for i in range(2):
            state, _ = step(with_flipped_bit(state, "odd", 2) if i == 0 else state, batch(i))
            if i == 0:
                checkpoints.update(state)
        with pytest.raises(replicas.ReplicasDiffer, match="params/odd on device 2"):
            checkpoints.update(state)
    with pytest.raises(ValueError, match="verify_replicas_every is invalid"):
        zero.checkpoints(tmp_path, verify_replicas_every=0)
