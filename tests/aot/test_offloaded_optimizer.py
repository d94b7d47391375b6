"""Steps with an offloaded optimizer, compiled for GPUs and TPUs: what is in host memory, and what is on the device."""

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from support.offloaded import PIECES_BYTES, compiled

import zerojax
from zerojax import Verdict, targets
from zerojax.analysis import hlo
from zerojax.analysis.audit import check_host_memory, check_pieces
from zerojax.analysis.hlo import has_product
from zerojax.analysis.hlo_costs import FROM_HOST, TO_HOST, read_host_copies
from zerojax.comm.buckets import Pieces
from zerojax.step import creation

pytestmark = pytest.mark.aot
TARGETS = ["h100:1", "h100:8", "v5e:2x2"]


def test_the_audit_reads_where_the_state_is_and_that_all_of_it_moves(monkeypatch):
    for target in TARGETS:
        *_, state, audit = compiled(target, "optimizer", 8)
        in_host = local_bytes(state, len(targets.devices(target)), 12)
        assert audit["host memory"].verdict is Verdict.OK
        assert audit["host memory"].numbers["found_bytes"] == pytest.approx(in_host, rel=1e-2)
    names = ["offloaded slices", "pieces of the state"]
    for target in TARGETS[:2]:
        *_, audit = compiled(target, "optimizer", 8)
        assert all(audit[name].verdict is Verdict.OK for name in names)
        assert 0 < audit["pieces of the state"].numbers["at_a_time_bytes"] < 2 * PIECES_BYTES
    first = lambda self, array, piece, index: lax.dynamic_update_slice(array, piece, self.start(0 * index))
    monkeypatch.setattr(Pieces, "write", first)
    *_, audit = compiled.__wrapped__("h100:1", "optimizer", 8)
    pieces = audit["pieces of the state"]
    assert pieces.verdict is Verdict.BROKEN and "writes 1 pieces of 128 of f32[8,1024,256]" in pieces.found


def test_a_state_that_moves_as_a_whole_is_found():
    """A program without slices, and other sizes in host memory."""
    entry = "ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"
    program = hlo.parse_program(f"HloModule m, is_scheduled=true\n\n{entry}")
    outcome = check_pieces(program, [("f32", (8, 256, 1024))], 2**30)
    assert outcome.verdict is Verdict.BROKEN and "as a whole" in outcome.found
    assert check_host_memory(2**20, 2**20, 0).verdict is Verdict.OK
    assert check_host_memory(2**20, 2**10, 0).verdict is Verdict.BROKEN
    assert check_host_memory(2**20, 2**20, 2**20).verdict is Verdict.BROKEN


def local_bytes(state, num_devices, bytes_per_parameter):
    return bytes_per_parameter * sum(leaf.size for leaf in state.layout.leaves) / num_devices


@pytest.mark.parametrize("target", TARGETS)
def test_moments_and_master_are_in_host_memory_and_updated_in_place(target):
    program, *_, state, audit = compiled(target, "optimizer", 8)
    memory, num_devices = program.memory_analysis(), len(targets.devices(target))
    in_host = local_bytes(state, num_devices, 12)
    assert memory.host_argument_size_in_bytes == pytest.approx(in_host, rel=1e-2)
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes
    assert memory.host_temp_size_in_bytes == 0
    assert memory.argument_size_in_bytes < 1.1 * local_bytes(state, num_devices, 2) + 2**16
    assert audit["sharded"].verdict is audit["aliased state"].verdict is Verdict.OK


@pytest.mark.parametrize(("target", "scan"), [("h100:1", True), ("h100:8", False), ("v5e:2x2", True)])
def test_temporaries_grow_with_depth_as_without_offloading(target, scan):
    grows, depths = {}, (8, 16) if scan else (4, 8)
    for offload in "optimizer", "none":
        (_, few, _, small, _), (_, many, _, large, _) = (compiled(target, offload, n, scan=scan) for n in depths)
        grows[offload] = many - few
    num_devices = len(targets.devices(target))
    state_of_layers = local_bytes(large, num_devices, 12) - local_bytes(small, num_devices, 12)
    assert grows["optimizer"] < grows["none"] + 0.2 * state_of_layers  # small arrays have few pieces


@pytest.mark.parametrize("offload", ["optimizer", "none"])
def test_the_gradient_of_the_head_is_computed_before_those_of_the_layers(offload):
    """After them, the gradient of the logits would be in memory until then."""
    program, *_ = compiled("h100:1", offload, 8)
    order = hlo.parse_program(program.as_text()).entry.instructions
    forward, backward = [k for k, i in enumerate(order) if i.op == "while"][:2]
    (head,) = [k for k, i in enumerate(order) if has_product(i) and sorted(i.buffers[0].dims) == [256, 512]]
    assert forward < head < backward


@pytest.mark.parametrize("target", ["h100:1", "v5e:2x2"])
def test_the_state_is_copied_once_in_each_direction(target):
    program, *_, state, _ = compiled(target, "optimizer", 8)
    copies = read_host_copies(hlo.parse_program(program.as_text()))
    state_bytes = local_bytes(state, len(targets.devices(target)), 12)
    for lane in FROM_HOST, TO_HOST:
        assert sum(copy.num_bytes for copy in copies if copy.lane == lane) == pytest.approx(state_bytes, rel=1e-2)


def test_the_order_of_gathers_is_read_from_a_trace_with_arguments_in_host_memory():
    config = gpt.Config(width=128, layers=8, scan=True, dtype=jnp.bfloat16)
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:8")), 3, "bf16", offload="optimizer")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    audit = zero.train_step(gpt.loss, remat="full").audit(state, gpt.batch_aval(config, 8))
    assert audit["prefetch order"].verdict is Verdict.OK


def test_creation_holds_one_part_of_the_state_at_a_time(monkeypatch):
    """Each part is a program, whose temporaries are not much larger than the part."""
    given = []
    monkeypatch.setattr(creation, "create_in_parts", lambda *args: given.append(args))
    monkeypatch.setattr(creation, "PART_BYTES", 2**23)
    config = gpt.Config(width=256, layers=8, heads=4, vocab=512, seq=128, scan=True, dtype=jnp.bfloat16)
    zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:1")), 3, "bf16", offload="optimizer")
    zero.init(gpt.create(config), optax.adamw(1e-3))
    ((create, (key,), abstract),) = given
    whole = jax.sharding.NamedSharding(zero.config.mesh, jax.sharding.PartitionSpec())
    divided = creation.parts(abstract)
    assert len(divided) > 8
    for part in divided:
        some = jax.jit(lambda key, part=part: [jax.tree.leaves(create(key))[k] for k in part], out_shardings=whole)
        traced = some.trace(jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole))
        memory = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2 * creation.PART_BYTES
