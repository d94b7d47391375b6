"""Steps with parameters in host memory, compiled for GPUs and TPUs: what is where, what moves, and what grows."""

import itertools
import re
from importlib import metadata

import gpt
import jax.numpy as jnp
import optax
import pytest
from support import offloaded
from support.offloaded import PIECES_BYTES, SEQ

import zerojax
from zerojax import Verdict, targets
from zerojax.analysis import hlo
from zerojax.analysis.hardware import cluster
from zerojax.analysis.hlo_costs import FROM_HOST, TO_HOST, read_host_copies
from zerojax.comm.buckets import Pieces
from zerojax.offload import host_pieces
from zerojax.plan import timeline
from zerojax.sharding.tpu import stored_order
from zerojax.step.compiler_options import FIRST_CORRECT
from zerojax.utils import versions

pytestmark = pytest.mark.aot
WIDTH = 512


def compiled(target, layers, scan=True, num_microbatches=1):
    return offloaded.compiled(target, "params", layers, WIDTH, scan, num_microbatches)


def matrices(state, num_devices):
    """The number of parameters in matrices, for each device."""
    return sum(leaf.size for leaf in state.layout.leaves if len(leaf.shape) - leaf.stacked >= 2) / num_devices


@pytest.mark.parametrize(
    ("target", "scan", "k"), [("h100:1", True, 1), ("h100:1", False, 1), ("h100:8", True, 2), ("v5e:2x2", True, 1)]
)
def test_the_state_is_in_host_memory_and_its_gradients_go_there(target, scan, k):
    program, *_, state, audit = compiled(target, 6, scan, k)
    memory, num = program.memory_analysis(), matrices(state, len(targets.devices(target)))
    assert memory.host_argument_size_in_bytes == pytest.approx(14 * num, rel=2e-2)
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes
    assert memory.host_temp_size_in_bytes == pytest.approx((4 if k > 1 else 2) * num, rel=2e-2)
    assert memory.argument_size_in_bytes < 0.05 * 2 * num + 2**16  # vectors and the batch
    names = ["sharded", "aliased state", "host memory"]
    names += ["offloaded slices"] if target.startswith("h100") else []
    names += ["pieces of the state"] if target.startswith("h100") and scan else []
    assert {name: audit[name].verdict for name in names} == dict.fromkeys(names, Verdict.OK)
    if target.startswith("h100"):
        most = 2 if scan else 4  # small arrays have few pieces
        assert 0 < audit["pieces of the state"].numbers["at_a_time_bytes"] <= most * PIECES_BYTES
    if target.startswith("h100"):
        copied = audit["host copies"].numbers
        assert copied["alone_layers_bytes"] <= copied["layers_bytes"] < copied["bytes"]
    if len(targets.devices(target)) > 1:
        assert audit["wire bytes"].verdict is audit["reductions"].verdict is Verdict.OK


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tpus_store_arrays_in_the_order_with_fewer_tiles(dtype):
    device = targets.devices("v5e:2x2")[0]
    sizes = 8, 24, 64, 96, 100, 192, 300, 400, 515, 768
    shapes = [*itertools.product((5, 50257, *sizes), repeat=2), *itertools.product((5, 12, 48), sizes, sizes)]
    layout = lambda shape: str(device.client.get_default_layout(jnp.dtype(dtype), shape, device))
    stored = lambda shape: tuple(map(int, layout(shape)[1:].split(":")[0].split(",")))[::-1]
    assert {shape: stored(shape) for shape in shapes} == {shape: stored_order(shape) for shape in shapes}


@pytest.mark.parametrize(("offload", "k", "bytes_each"), [("optimizer", 1, 12), ("params", 2, 14)])
def test_a_table_of_few_columns_is_in_the_host_memory_of_tpus(offload, k, bytes_each):
    """One of 2048 x 96 on each chip, which is stored column by column, in the step and in its arguments.

    If the compiler chooses another order for the step, it cannot write the pieces of the table.
    """
    program, _, host_bytes, state, audit = offloaded.compiled("v5e:2x2", offload, 1, 384, True, k, 2048)
    num, sums = matrices(state, 4), {"optimizer": 0, "params": 4}[offload]
    assert program.memory_analysis().host_argument_size_in_bytes == pytest.approx(bytes_each * num, rel=1e-2)
    assert host_bytes == pytest.approx(sums * num, rel=1e-2) and audit["host memory"].verdict is Verdict.OK
    orders = re.findall(r"\w+\[2048,96\]\{([\d,]+):T[^}]*S\(5\)", program.as_text())
    assert set(orders) == {"0,1"}


@pytest.mark.parametrize(("offload", "k", "bytes_each"), [("optimizer", 1, 12), ("params", 2, 14)])
def test_a_table_without_whole_tiles_is_in_the_host_memory_of_tpus(offload, k, bytes_each):
    """515 = 5 * 103 tokens: their compiler writes no part of 5 or 103 rows. One of 515 x 60 comes as a whole."""
    program, *_, state, _ = offloaded.compiled("v5e:2x2", offload, 3, 240, num_microbatches=k, vocab=515)
    moved = program.memory_analysis().host_argument_size_in_bytes
    assert moved == pytest.approx(bytes_each * matrices(state, 4), rel=2e-1)  # with the ends of their tiles


def test_layers_that_share_tiles_cannot_be_in_the_host_memory_of_tpus():
    """8 layers of 100 rows: stored with the rows outermost, which is fewer tiles than 13 for each layer."""
    with pytest.raises(ValueError, match=r"TPUs do not read single layers .*\n.*\[8, 100, \d+\] on each device"):
        offloaded.compiled("v5e:2x2", "params", 8, 400)


def test_a_tpu_sums_gradients_of_any_number_of_microbatches_in_host_memory():
    """Its compiler aborts if a loop carries them, and at this width chose layouts of tables that it cannot slice."""
    program, _, host_bytes, state, _ = offloaded.compiled("v5e:2x2", "params", 3, 1024, num_microbatches=3)
    memory, num = program.memory_analysis(), matrices(state, 4)
    assert memory.host_argument_size_in_bytes == pytest.approx(14 * num, rel=2e-2)
    assert host_bytes == pytest.approx(4 * num, rel=2e-2)
    assert 1.5 < memory.host_temp_size_in_bytes / host_bytes < 1.7  # with three layers, see the how-to


@pytest.mark.parametrize("k", [1, 2])
def test_the_host_of_a_tpu_copies_no_gradients(k):
    """As it would if the gradients of all layers came to the device at once, which small models have room for."""
    program, _, host_bytes, state, audit = offloaded.compiled(
        "v5e:2x2", "params", 3, num_microbatches=k, pieces_bytes=host_pieces.PIECES_BYTES
    )
    assert host_bytes == pytest.approx((4 if k > 1 else 2) * matrices(state, 4), rel=2e-2)
    assert "HostExecute" not in program.as_text() and audit["host memory"].verdict is Verdict.OK


def test_copies_within_the_host_memory_of_a_tpu_are_found(monkeypatch):
    """Those of the gradients of stacked layers, if they come to the device at once."""
    monkeypatch.setattr(host_pieces, "cut", lambda shape, wanted, mesh: Pieces(shape, (1,) * len(shape)))
    *_, state, audit = offloaded.compiled.__wrapped__("v5e:2x2", "params", 3)
    finding, num = audit["host memory"], matrices(state, 4)
    assert finding.verdict is Verdict.BROKEN and finding.numbers["copied_bytes"] >= num  # all but the tables, in bf16


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_temporaries_grow_by_what_is_saved_of_a_layer(scan):
    (_, few, *_), (_, many, *_) = (compiled("h100:1", layers, scan) for layers in ((6, 10) if scan else (6, 8)))
    more = 4 if scan else 2
    saved = more * SEQ * WIDTH * 2  # a row of inputs of each layer
    vectors = more * 2 * 2 * 10 * WIDTH  # with their gradients
    weights = more * 12 * WIDTH**2 * 2
    slack = 2**16 if scan else 0.2 * weights  # one layer is another part of the program
    assert many - few <= saved + vectors + slack < 0.25 * weights


def test_layers_come_once_for_each_pass_and_gradients_go_once():
    program, *_, state, _ = compiled("h100:1", 6)
    copies, num = read_host_copies(hlo.parse_program(program.as_text())), matrices(state, 1)
    moved = lambda lane: sum(copy.num_bytes for copy in copies if copy.lane == lane)
    moments_and_master, weights, gradients = 12 * num, 2 * num, 2 * num
    assert moved(TO_HOST) == pytest.approx(moments_and_master + weights + gradients, rel=2e-2)
    assert moved(FROM_HOST) == pytest.approx(moments_and_master + 2 * weights + gradients, rel=3e-2)  # and events


def test_copies_overlap_with_products_and_with_each_other():
    """With products that take longer than the copies, a loop over layers takes no longer than its products.

    In an update, both directions of the link are busy most of the time. Before jaxlib 0.11.1, all copies of slices are
    kernels, which overlap with nothing; from then on, those of the first and the last piece or layer are.
    """
    config = gpt.Config(width=1024, layers=8, heads=8, vocab=512, seq=2048, scan=True, dtype=jnp.bfloat16)
    found, copies, busy = {}, {}, {}
    for offload in "params", "optimizer":
        zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:1")), 3, "bf16", offload=offload)
        state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
        traced = zero.train_step(gpt.loss, remat="full").trace(state, gpt.batch_aval(config, 8))
        program = traced.lower(lowering_platforms=("cuda",)).compile()
        parsed = hlo.parse_program(program.as_text())
        predicted = timeline.predict(parsed, cluster("h100:1"))
        slices = [copy for copy in read_host_copies(parsed) if copy.name.startswith("dynamic-")]
        by_kernels = sum(copy.num_bytes for copy in slices if copy.by_kernel)
        if versions.parse(metadata.version("jaxlib")) < FIRST_CORRECT:
            assert by_kernels == sum(copy.num_bytes for copy in slices)
            continue
        assert by_kernels < 0.3 * sum(copy.num_bytes for copy in slices)  # of 8 layers in 16 pieces
        copies[offload] = [copy for copy in read_host_copies(parsed) if copy.in_layers]
        layers = [loop.iteration_s for loop in predicted.loops if loop.trips in (6, 8) and loop.iteration_s > 1e-3]
        found[offload] = sorted(layers)
        (update,) = [loop for loop in predicted.loops if loop.trips == 15]
        for lane in FROM_HOST, TO_HOST:
            copying_s = sum(span.end_s - span.start_s for span in update.spans if span.lane == lane)
            busy[offload, lane] = copying_s / update.iteration_s
    if not found:
        return
    assert len(found["params"]) == len(found["optimizer"]) == 2  # forward and backward
    for ours, plain in zip(found["params"], found["optimizer"], strict=True):
        assert ours < 1.15 * plain
    assert min(busy.values()) > 0.68 and busy["optimizer", FROM_HOST] > 0.8
    assert not copies["optimizer"]
    size = lambda chosen: sum(copy.num_bytes for copy in chosen)
    assert size(copies["params"]) > 0
    assert size(copy for copy in copies["params"] if copy.alone) <= 0.25 * size(copies["params"])
