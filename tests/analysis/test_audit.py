"""An audit reports every planted fault as the right finding, and nothing in a correct step."""

import dataclasses
import functools

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from support import by_hand, traffic

import zerojax
from zerojax import Remat, Verdict
from zerojax.analysis import expectation, hlo, jaxpr_counts
from zerojax.analysis.hlo_collectives import Collective
from zerojax.analysis.step import TrainStep
from zerojax.comm import collectives
from zerojax.comm.schedule import Schedule

N = 8


def broken(audit):
    return {finding.name for finding in audit.broken}


# Correct steps


def audited(stage, mesh=None, scan=False, precision="bf16", **options):
    zero = zerojax.Zero(zerojax.make_mesh(**(mesh or {})), stage, precision)
    config = gpt.Config(width=32, layers=6 if scan else 3, scan=scan, annotated="model" in (mesh or {}))
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    return zero.train_step(gpt.loss, **options).audit(state, gpt.batch_aval(config, 32))


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {"num_microbatches": 2}),
        (1, {"mesh": {"replica": 2}}),
        (2, {"num_microbatches": 2, "scan": True}),
        (2, {"num_microbatches": 2, "mesh": {"replica": 2}}),
        (3, {"precision": "fp32"}),  # there is no master copy
        (3, {"num_microbatches": 2, "scan": True, "remat": "full"}),
        (3, {"mesh": {"model": 2}, "precision": "bf16_reduce_fp32", "remat": Remat(offload_inputs=True)}),
        (3, {"prefetch": 0, "bucket_bytes": 4096}),
    ],
)
def test_nothing_is_broken_in_a_correct_step(stage, options):
    audit = audited(stage, **options)
    assert audit.ok and broken(audit) == set()
    verdicts = {finding.name: finding.verdict for finding in audit.findings}
    read = ["sharded", "aliased state", "wire bytes", "wire dtype", "reductions"]
    read += ["hoisted gathers", "prefetch order"] if stage == 3 else []
    read += ["between replicas"] if "replica" in options.get("mesh", {}) else []
    unread = ["exposed"] + (["gathered weights kept"] if stage == 3 else [])
    unread += ["checkpoints"] if isinstance(options.get("remat"), Remat) else []
    assert {name for name, verdict in verdicts.items() if verdict is Verdict.OK} == set(read)
    assert {name for name, verdict in verdicts.items() if verdict is Verdict.NOT_READ} == set(unread)


def test_the_expectation_is_the_formula():
    """With Psi counted from the leaves. A leaf counts once for each unit of the loss that uses it."""
    zero, state = by_hand.zero_and_state()
    psi = by_hand.LAYERS * 4 * by_hand.WIDTH**2
    most = zero.train_step(by_hand.loss, num_microbatches=4).expectation(state, by_hand.batch_aval()).most
    assert most == (2 * 2 * 4 * psi * 7 / 8, 2 * 4 * psi * 7 / 8, 0, 0)

    def over(layers):
        loss = lambda params, batch: by_hand.loss({"layers": layers(params["layers"])}, batch)
        return zero.train_step(loss).expectation(state, by_hand.batch_aval()).most.reduce_scattered

    assert over(lambda layers: {**layers, "again": layers["0"]}) == 2 * psi * 5 / 4 * 7 / 8
    assert over(lambda layers: {"0": layers["0"]}) == 2 * psi / 4 * 7 / 8


def test_collectives_of_scalars_and_over_other_axes_do_not_count():
    config = zerojax.Zero(zerojax.make_mesh(model=2)).config
    reduction = lambda size, *group: Collective("all-reduce", "f32", size, group, 1, False, False)
    over_model, over_data, over_both = reduction(4096, 0, 1), reduction(4096, 0, 2, 4, 6), reduction(4096, *range(8))
    found = [over_model, over_data, over_both, reduction(64, *range(8))]
    assert expectation.over_data_axes(found, config) == [over_data, over_both]


# Planted faults in steps written by hand


@functools.cache
def expected(k=1):
    zero, state = by_hand.zero_and_state()
    return zero.train_step(by_hand.loss, num_microbatches=k).expectation(state, by_hand.batch_aval())


def audit_by_hand(k=1, **faults):
    zero, state = by_hand.zero_and_state()
    return zerojax.audit_step(by_hand.step(zero, state, by_hand.batch_aval(), k=k, **faults), expected(k))


@pytest.mark.parametrize("k", [1, 2])
def test_nothing_is_broken_in_a_correct_step_by_hand(k):
    assert broken(audit_by_hand(k)) == set()


PSI = by_hand.LAYERS * 4 * by_hand.WIDTH**2
SENT = 2 * PSI * (N - 1) / N  # bytes in bf16, gathered or reduce-scattered once


def test_weights_that_a_deny_list_keeps_are_found():
    """Three layers should be gathered again for the backward pass."""
    audit = audit_by_hand(policy=by_hand.DENY_LIST)
    assert broken(audit) == {"gathered weights kept"}
    numbers = audit["gathered weights kept"].numbers
    assert numbers["found_bytes"] == SENT and numbers["expected_bytes"] > 1.6 * SENT


def test_an_all_reduce_in_place_of_a_reduce_scatter_is_found():
    audit = audit_by_hand(gather=by_hand.gather_then_all_reduce)
    assert broken(audit) == {"wire bytes", "reductions"}
    assert audit["reductions"].numbers["extra_bytes"] == SENT
    assert "all-reduced" in audit["reductions"].found and "psum_scatter" in audit["reductions"].fix


def test_a_gather_in_fp32_is_found():
    audit = audit_by_hand(gather=by_hand.gather_in_fp32)
    assert broken(audit) == {"wire bytes", "wire dtype"}
    assert audit["wire dtype"].numbers["wide_bytes"] == 2 * 3 * SENT  # 4 bytes instead of 2, and the transpose too
    assert "all-gather in f32" in audit["wire dtype"].found


def test_a_state_that_is_not_donated_is_found():
    audit = audit_by_hand(donated=False)
    assert broken(audit) == {"aliased state"}
    size = 2 * PSI + 4 * PSI + 4 * PSI  # bf16 parameters, master and momentum
    assert audit["aliased state"].numbers["more_bytes"] == pytest.approx(size / N, abs=64)
    assert "layers/0/down" in audit["aliased state"].found


def test_a_gather_outside_the_loop_over_microbatches_is_found():
    """It also breaks the gathers of the backward pass, their order, and the reductions: full gradients are summed."""
    audit = audit_by_hand(2, hoisted=True)
    assert broken(audit) == {"hoisted gathers", "gathered weights kept", "prefetch order", "reductions"}
    assert audit["hoisted gathers"].numbers["outside_bytes"] == 2 * PSI


def test_gathers_that_wait_for_nothing_are_found():
    audit = audit_by_hand(ordered=False)
    assert broken(audit) == {"prefetch order"}
    assert audit["prefetch order"].numbers["free_units"] == 2 * by_hand.LAYERS


def test_gradients_that_are_not_summed_are_found():
    assert broken(audit_by_hand(reduces=False)) == {"reductions"}


def audit_stack(full_loss):
    """Audits a step by hand over a stack of eight layers, which `full_loss(shard, x)` gathers."""
    zero = zerojax.Zero(zerojax.make_mesh(), precision="bf16", stacked=["*"])
    state = zero.eval_init(lambda key: {"w": jax.random.normal(key, (8, 32, 32))}, optax.sgd(0.1))
    rows, spec = jax.ShapeDtypeStruct((32, 32), jnp.float32), P(None, "data")
    loss = lambda params, x: jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["w"])[0] ** 2)
    expected = zero.train_step(loss).expectation(state, rows)

    def step(state, x):
        local = jax.grad(full_loss)
        specs = {"mesh": zero.config.mesh, "in_specs": (spec, P("data")), "out_specs": spec}
        grad = jax.shard_map(local, **specs, check_vma=False)(state.params["w"], x)
        master = {"w": state.master["w"] - 0.1 * grad.astype(jnp.float32)}
        return dataclasses.replace(state, master=master, params={"w": master["w"].astype(jnp.bfloat16)})

    return zerojax.audit_step(jax.jit(step, donate_argnums=0).trace(state, rows), expected)


def layer(x, w):
    return x + jnp.tanh(x @ w.astype(x.dtype))


def test_a_stack_that_is_gathered_at_once_is_found():
    def full_loss(shard, x):
        full = jax.lax.all_gather(shard, "data", axis=1, tiled=True)
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, full)[0] ** 2)

    audit = audit_stack(full_loss)
    assert audit["hoisted gathers"].verdict is Verdict.BROKEN
    assert audit["hoisted gathers"].numbers["largest_bytes"] == 2 * 8 * 32 * 32


@pytest.mark.parametrize(("layers", "lines"), [(1, set()), (2, {"prefetch order"})])
def test_layers_of_one_iteration_that_are_gathered_at_once_are_found(layers, lines):
    """A window of one layer is allowed in a loop, in addition to the layer that an iteration starts with."""

    @jax.checkpoint
    def some(x, shards):
        full = [by_hand.gather(shard) for shard in shards]
        return functools.reduce(layer, full, x), None

    full_loss = lambda shard, x: jnp.mean(jax.lax.scan(some, x, shard.reshape(-1, layers, *shard.shape[1:]))[0] ** 2)
    audit = audit_stack(full_loss)
    assert broken(audit) == lines
    assert audit["prefetch order"].numbers["free_units"] == layers


# Planted faults in steps of zerojax


@pytest.mark.parametrize("k", [1, 2])
def test_a_prefetch_without_order_is_found(monkeypatch, k):
    zero, state = by_hand.zero_and_state()
    monkeypatch.setattr(Schedule, "before_gather", lambda self, prefetch=0: [])
    audit = zero.train_step(by_hand.loss, num_microbatches=k).audit(state, by_hand.batch_aval())
    assert broken(audit) == {"prefetch order"}
    assert audit["prefetch order"].numbers["free_units"] > by_hand.LAYERS


def test_a_gradient_that_is_all_reduced_is_found(monkeypatch):
    def reduce_scatter(grads, dims, axes, options, waits=(), rows=False):
        reduced = collectives.all_reduce(grads, axes.shard, axes, options, dims, waits)
        parts = [by_hand.own_part(total, dim.shard) for total, dim in zip(reduced.leaves, dims, strict=True)]
        return reduced._replace(leaves=parts)

    monkeypatch.setattr(collectives, "reduce_scatter", reduce_scatter)
    zero, state = by_hand.zero_and_state()
    audit = zero.train_step(by_hand.loss).audit(state, by_hand.batch_aval())
    assert broken(audit) == {"reductions", "wire bytes"}


def test_an_unknown_name_in_remat_is_an_error():
    zero, state = by_hand.zero_and_state()
    step = zero.train_step(by_hand.loss, remat=Remat(offload=("none",)))
    with pytest.raises(ValueError, match=r"no value in the units of '.*' is named 'none'"):
        step.audit(state, by_hand.batch_aval())


def with_a_replicated_leaf(zero, state):
    replicated = jax.device_put(state.master["layers"]["1"]["up"], NamedSharding(zero.config.mesh, P()))
    layers = {**state.master["layers"], "1": {**state.master["layers"]["1"], "up": replicated}}
    return dataclasses.replace(state, master={"layers": layers})


def arrays():
    zero = zerojax.Zero(zerojax.make_mesh(), precision="bf16")
    x = np.random.default_rng(0).standard_normal((2, by_hand.ROWS, by_hand.WIDTH), np.float32)
    return zero, zero.init(by_hand.create, optax.sgd(0.1, momentum=0.9)), {"x": x[0], "y": x[1]}


def test_a_replicated_leaf_is_an_error_before_the_step_runs():
    zero, state, batch = arrays()
    step, wrong = zero.train_step(by_hand.loss, audit="error"), with_a_replicated_leaf(zero, state)
    with pytest.raises(ValueError) as error:
        step(wrong, batch)
    text = str(error.value)
    assert "breaks 2 of 9 expectations\nsharded\n  expected: 24 of 27 leaves sharded over data\n" in text
    assert "  got:      master/layers/1/up: P(), 8 KiB instead of P('data'), 1 KiB\n" in text
    assert "  fix:      create the state with zero.init" in text
    assert "aliased state\n" in text  # the step returns the leaf with the expected sharding
    assert not any(a.is_deleted() for a in jax.tree.leaves(wrong))
    step(state, batch)  # a correct state


def test_a_replicated_leaf_is_a_warning_and_the_step_runs():
    zero, state, batch = arrays()
    step = zero.train_step(by_hand.loss, audit="warn")
    with pytest.warns(UserWarning, match="master/layers/1/up"):
        after, _ = step(with_a_replicated_leaf(zero, state), batch)
    assert after.master["layers"]["1"]["up"].sharding.spec == P("data")


def test_without_an_audit_nothing_is_reported():
    zero, state, batch = arrays()
    zero.train_step(by_hand.loss)(with_a_replicated_leaf(zero, state), batch)
    with pytest.raises(ValueError, match="audit: unknown setting True\n  fix:      one of off, warn, error"):
        zero.train_step(by_hand.loss, audit=True)


def test_a_program_is_audited_once_and_is_the_one_that_runs(monkeypatch):
    """Once for each shape. The program that is compiled for the audit is not compiled again."""
    zero, state, batch = arrays()
    step = zero.train_step(by_hand.loss, audit="error")
    audits, compiled = [], []
    audit, wanted = TrainStep.audit, "/jax/core/compile/backend_compile_duration"
    monkeypatch.setattr(TrainStep, "audit", lambda self, *args: audits.append(args) or audit(self, *args))
    listener = lambda event, *_, fun_name="", **__: event == wanted and compiled.append(fun_name)
    jax.monitoring.register_event_duration_secs_listener(listener)
    for rows in (batch, batch, jax.tree.map(lambda a: np.concatenate([a, a]), batch)):
        state, _ = step(state, rows)
    assert len(audits) == 2
    assert len([name for name in compiled if "step" in name]) == 2, compiled


# Programs that cannot be read


def test_a_program_that_cannot_be_parsed_is_not_reported_as_ok(monkeypatch):
    def refuse(text):
        raise ValueError("hlo: a line that is no instruction")

    monkeypatch.setattr(hlo, "parse_program", refuse)
    finding = audit_by_hand()["aliased state"]
    assert (finding.verdict, finding.found) == (Verdict.NOT_READ, "hlo: a line that is no instruction")


def test_a_compiled_program_for_cpus_shows_memory_but_not_communication():
    zero, state = by_hand.zero_and_state()
    audit = zerojax.audit_step(by_hand.step(zero, state, by_hand.batch_aval()).lower().compile(), expected())
    assert {f.name for f in audit.findings if f.verdict is Verdict.OK} == {"sharded", "aliased state"}
    assert "audit the traced step" in audit["wire bytes"].found


def test_collectives_of_the_compiler_are_not_read_on_cpu():
    """In a plain JAX step with shardings and no explicit collectives."""
    zero, state = by_hand.zero_and_state()

    def step(state, batch):
        grads = jax.grad(by_hand.loss)(state.params, batch)
        master = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), state.master, grads)
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), master)
        return dataclasses.replace(state, params=params, master=master)

    place = NamedSharding(zero.config.mesh, P("data"))
    batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for name, a in by_hand.batch_aval().items()}
    out = jax.tree.map(lambda a: a.sharding, state)
    audit = zerojax.audit_step(jax.jit(step, donate_argnums=0, out_shardings=out).trace(state, batch), expected())
    assert audit["sharded"].verdict is Verdict.OK
    assert audit["reductions"].verdict is Verdict.NOT_READ and "the compiler inserts" in audit["reductions"].found


def test_a_collective_in_a_branch_is_not_read():
    zero, state = by_hand.zero_and_state()
    gather = lambda shard: jax.lax.cond(shard[0, 0] > 0, by_hand.gather, lambda s: by_hand.gather(-s), shard)
    audit = zerojax.audit_step(by_hand.step(zero, state, by_hand.batch_aval(), gather=gather), expected())
    assert audit["wire bytes"].verdict is Verdict.NOT_READ and "all-gather in a cond" in audit["wire bytes"].found


def test_the_state_of_an_expectation_is_the_first_argument():
    zero, _ = by_hand.zero_and_state()
    other = zero.eval_init(functools.partial(by_hand.create, width=64), optax.sgd(0.1, momentum=0.9))
    step = zero.train_step(by_hand.loss).trace(other, by_hand.batch_aval(64))
    with pytest.raises(ValueError) as error:
        zerojax.audit_step(step, expected())
    assert "not the state of the expectation\n  got:      bfloat16[128,64] for params/layers/0/down" in str(error.value)


def test_the_table_has_a_row_for_each_finding():
    audit = audit_by_hand(donated=False)
    text = str(audit)
    assert all(finding.name in text for finding in audit.findings)
    assert "BROKEN" in text and "not read" in text


@pytest.mark.parametrize("mesh", [{"replica": 2}, {"model": 2}])
def test_traced_collectives_are_those_that_the_tests_count(mesh):
    """Compares two independent implementations."""
    config = gpt.Config(width=32, layers=6, scan=True, annotated="model" in mesh)
    zero = zerojax.Zero(zerojax.make_mesh(**mesh), 3, "bf16")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    step, batch = zero.train_step(gpt.loss, num_microbatches=2), gpt.batch_aval(config, 32)
    counted = traffic.collectives_of_step(step, state, batch)
    found = jaxpr_counts.traced_collectives(step.trace(state, batch).jaxpr, zero.config.mesh)
    elements = lambda dtype, bits: sum(8 * c.sent_bytes / bits for c in found if c.dtype == dtype)
    sent = traffic.sent(counted)
    assert elements("bf16", 16) == pytest.approx(sent["bfloat16"]) and elements("f32", 32) == sent["float32"]
    assert {c.group_size for c in found} == {c.num_devices for c in counted}
