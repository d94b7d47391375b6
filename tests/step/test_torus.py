"""Parity with one device where collectives run over one dim of a torus after the other."""

import math

import jax
import numpy as np
import optax
import pytest
from support import plain, zoo
from support.parity import TOLERANCES, assert_close, batches, optimizer, train, with_constant_init

import zerojax
from zerojax import Zero
from zerojax.analysis.jaxpr_counts import traced_collectives
from zerojax.sharding import tpu

FEW = 4  # steps


def lay_out(monkeypatch, *sizes, sparse_cores=False):
    """Lays the simulated devices out as slices, each a torus of these sizes, in the order of their numbers."""
    chips = math.prod(sizes)
    place = lambda device: (device.id // chips, *map(int, np.unravel_index(device.id % chips, sizes)), 0)
    monkeypatch.setattr(tpu, "coordinates", place)
    if sparse_cores:
        monkeypatch.setattr(tpu, "SPARSE_CORES", {jax.devices()[0].device_kind})


# (model, sizes of the torus of a slice, mesh, stage, precision, microbatches, options of the step); a single size is
# that of a torus whose SparseCores run over all dims at once
CASES = [
    ("gpt_nnx_scan", (2, 4), {}, 3, "fp32", 1, {"bucket_bytes": 2**10}),
    ("gpt_linen_scan", (4, 2), {}, 2, "fp32", 2, {}),
    ("tied", (2, 2, 2), {}, 1, "fp32", 1, {"bucket_bytes": 2**10}),
    ("moe", (2, 2, 2), {"replica": 2}, 3, "fp32", 1, {}),
    ("gpt_nnx_scan", (8,), {}, 3, "bf16", 1, {"remat": "full"}),
    ("tied", (2, 2), {"replica": 2}, 3, "bf16", 1, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[0], *case[1], *case[3:6]))))
def test_training_follows_the_plain_step(case, monkeypatch):
    name, sizes, axes, stage, precision, k, options = case
    lay_out(monkeypatch, *sizes, sparse_cores=len(sizes) == 1)
    zero = Zero(zerojax.make_mesh(devices=jax.devices(), **axes), stage, precision)
    assert zero.config.axes.sparse_cores == (len(sizes) == 1)
    assert math.prod(zero.config.axes.torus) == (1 if len(sizes) == 1 else 8 // axes.get("replica", 1))
    model, data = zoo.ZOO[name], batches(zoo.ZOO[name], FEW)
    zero_model = model if precision == "fp32" and k == 1 else with_constant_init(model)
    got, _ = train(zero, zero_model, data, num_microbatches=k, **options)
    want = plain.run(model, optimizer(), data, precision=precision, num_microbatches=k)
    assert_close(got, want, **TOLERANCES[precision])


def sent(num_microbatches=1):
    """(the sizes of the groups, bytes that a device sends) of each kind of collective of a traced step."""
    model = zoo.ZOO["gpt_nnx_scan"]
    zero = Zero(zerojax.make_mesh(devices=jax.devices()), 3)
    state = zero.eval_init(model.create, optax.sgd(0.1))
    jaxpr = zero.train_step(model.loss, num_microbatches=num_microbatches).trace(state, model.batch(0)).jaxpr
    found = [c for c in traced_collectives(jaxpr, zero.config.mesh) if c.kind not in ("all-reduce", "all-to-all")]
    kinds = {c.kind for c in found}
    groups = {kind: {c.group_size for c in found if c.kind == kind} for kind in kinds}
    return groups, {kind: sum(c.sent_bytes for c in found if c.kind == kind) for kind in kinds}


def test_the_bytes_are_those_of_one_ring(monkeypatch):
    """(a-1)/a of the rows, and (b-1)/b of what is left; gathers run over several dims if there are three."""
    _, want = sent()
    assert want.keys() == {"all-gather", "reduce-scatter"}
    for sizes, gathers in ((4, 2), {8}), ((2, 2, 2), {2}):
        lay_out(monkeypatch, *sizes)
        groups, got = sent()
        assert groups["all-gather"] == gathers and got.keys() == {"all-gather", "collective-permute"}
        assert got["all-gather"] == pytest.approx(want["all-gather"])
        assert got["collective-permute"] == pytest.approx(want["reduce-scatter"])
