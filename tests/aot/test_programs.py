"""Steps compiled for eight H100s, without a GPU: bytes sent, aliasing and peak memory. For TPUs, where one collective
may be many instructions, only memory and aliasing are checked."""

import functools
import json
import math
import os
import subprocess
import sys
import textwrap

import gpt
import jax
import jax.numpy as jnp
import models
import optax
import plain
import pytest
from jax.sharding import PartitionSpec as P
from support import traffic
from support.paths import BENCHMARKS, importing

import zerojax
from zerojax import Remat, targets
from zerojax.analysis import hlo, hlo_costs
from zerojax.analysis.hlo import has_product
from zerojax.analysis.hlo_collectives import (
    compiled_collectives,
    in_flight_bytes,
    peak_bytes,
)
from zerojax.analysis.hlo_costs import dot_flops
from zerojax.comm import collectives as communication
from zerojax.sharding.axes import Dims

pytestmark = pytest.mark.aot
N = 8


@functools.cache
def compiled(
    stage,
    k=1,
    scan=False,
    width=512,
    layers=4,
    seq=64,
    rows=1,
    target="h100:8",
    remat="none",
    vocab=512,
    chunk_size=None,
    model=None,
    prefetch=1,
):
    config = gpt.Config(
        width=width,
        layers=layers,
        heads=8,
        vocab=vocab,
        seq=seq,
        scan=scan,
        dtype=jnp.bfloat16,
        annotated=bool(model),
    )
    loss = gpt.loss if chunk_size is None else gpt.chunked_loss(chunk_size)
    mesh = zerojax.make_mesh(devices=targets.devices(target), model=model)
    zero = zerojax.Zero(mesh, stage=stage, precision="bf16")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    step = zero.train_step(loss, num_microbatches=k, remat=remat, prefetch=prefetch)
    lowered = step.trace(state, gpt.batch_aval(config, rows * k * zero.config.axes.num_devices)).lower(
        lowering_platforms=(targets.platform(target),)
    )
    return state, lowered.compile()


@pytest.mark.parametrize(("stage", "k"), [(0, 1), (1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)])
def test_bytes_on_the_wire_are_the_formula(stage, k):
    state, program = compiled(stage, k)
    leaves = state.layout.leaves
    psi = sum(leaf.size for leaf in leaves)
    once = sum(leaf.size for leaf in leaves if traffic.is_gathered_once(leaf))
    volume = {0: 2 * psi, 1: 2 * psi, 2: (1 + k) * psi, 3: k * (3 * psi - once)}[stage] * (N - 1) / N
    found = compiled_collectives(hlo.parse_program(program.as_text()))
    assert sum(c.sent_bytes for c in found if c.dtype == "bf16") == pytest.approx(2 * volume, rel=0.01)
    assert all(c.full_bytes <= 32 for c in found if c.dtype != "bf16")
    if stage > 0:
        assert all(c.full_bytes <= 32 for c in found if c.kind == "all-reduce")


def test_scanned_layers_are_gathered_and_scattered_in_their_loops():
    """Nothing is hoisted out of the loops. They run two layers per iteration, without the first and the last ones."""
    layers = 12
    trips = (layers - 2) // 2
    state, program = compiled(3, scan=True, layers=layers)
    found = compiled_collectives(hlo.parse_program(program.as_text()))
    leaves = state.layout.leaves
    volume = sum((2 if traffic.is_gathered_once(leaf) else 3) * leaf.size for leaf in leaves)
    assert sum(c.sent_bytes for c in found if c.dtype == "bf16") == pytest.approx(2 * volume * (N - 1) / N, rel=0.01)
    looped = [c for c in found if c.looped]
    assert all(c.trips >= trips - 1 for c in looped)  # the compiler may peel one off
    assert {c.kind for c in looped} == {"all-gather", "reduce-scatter"}
    block = sum(leaf.size for leaf in leaves if leaf.path.startswith("blocks")) / layers
    assert all(c.full_bytes <= 2 * 2 * block for c in looped)  # it may combine the two layers' small ones


WIDTH, VOCAB_OF_LARGE = 4096, 512
INPUT_OF_LARGE = 2 * 2048 * WIDTH * 2  # bytes of a layer's input on a device
OFFLOAD = Remat(offload_inputs=True)
FULL_REMAT = Remat()


def compiled_large(target, remat, prefetch=1):
    """Scanned layers of a realistic size: 4096 wide, 4096 tokens on a device."""
    shapes = {"width": WIDTH, "vocab": VOCAB_OF_LARGE, "layers": 8, "seq": 2048, "rows": 2}
    return compiled(3, scan=True, target=target, remat=remat, prefetch=prefetch, **shapes)[1]


@functools.cache
def large_layers(target, remat=FULL_REMAT):
    return hlo.parse_program(compiled_large(target, remat).as_text())


@pytest.mark.parametrize(
    ("target", "remat"),
    [
        ("h100:8", FULL_REMAT),
        ("h100:64", FULL_REMAT),
        ("h100:24", FULL_REMAT),
        ("h100:8", Remat.of("dots")),
        ("h100:8", OFFLOAD),
    ],
    ids=["one_host", "eight_hosts", "padded", "dots_kept", "offloaded"],
)
def test_collectives_in_loops_are_overlapped_and_not_copied(target, remat):
    """An activation from host memory is copied once, into the carry of the next iteration.

    If the results of products are kept, little is recomputed: one leaf of two layers is reduced beside softmax alone.
    """
    program = large_layers(target, remat)
    looped = [c for c in compiled_collectives(program) if c.looped]
    sent = sum(c.sent_bytes for c in looped)
    assert sent > 0.5 * sum(c.sent_bytes for c in compiled_collectives(program))
    one_leaf = 2 * 4 * WIDTH * WIDTH if remat == Remat.of("dots") else 0
    assert sum(c.full_bytes for c in looped if c.exposed) <= one_leaf
    copies = [move for move in hlo_costs.moves(program, 2 * WIDTH * WIDTH // N, in_loops=True) if move.op == "copy"]
    assert [copy.buffer.dims for copy in copies] == [(2, 2048, WIDTH)] * remat.offload_inputs


@pytest.mark.parametrize("prefetch", [0, 1])
def test_host_memory_has_the_inputs_of_all_layers(prefetch):
    memory = compiled_large("h100:8", OFFLOAD, prefetch).memory_analysis()
    assert memory.host_temp_size_in_bytes == 8 * INPUT_OF_LARGE


def test_offloading_saves_as_much_device_memory_as_it_takes_host_memory():
    """Except for the input of the layer that computes. Without prefetch, since with it the two programs differ in how
    many weights are gathered at the moment of peak memory, depending on when the scheduler starts an all-gather."""
    full, offload = (compiled_large("h100:8", remat, 0).memory_analysis() for remat in (FULL_REMAT, OFFLOAD))
    saved = full.temp_size_in_bytes - offload.temp_size_in_bytes
    assert saved >= 0.95 * (offload.host_temp_size_in_bytes - INPUT_OF_LARGE)


def test_the_first_product_does_not_wait_for_its_whole_unit():
    """Exposed are only the embedding, and the weight of the first layer's first product with a few more."""
    found = [c.full_bytes for c in compiled_collectives(large_layers("h100:8")) if c.kind == "all-gather" and c.exposed]
    embedding, layer = 2 * VOCAB_OF_LARGE * WIDTH, 2 * 12 * WIDTH * WIDTH
    assert sum(found) <= embedding + layer / 2


def test_a_gathered_table_is_dropped_after_the_lookup():
    """The compiler does not repeat the lookup in the backward pass, which would need the table until then."""
    steps = large_layers("h100:8").entry.instructions
    (table,) = [i for i in steps if i.op == "all-gather-done" and i.buffers[0].dims == (VOCAB_OF_LARGE, WIDTH)]
    last_read = max(k for k, i in enumerate(steps) if table in i.operands)
    assert last_read < min(k for k, i in enumerate(steps) if i.op == "while")


@pytest.mark.parametrize(("stage", "target"), [(1, "h100:8"), (2, "h100:8"), (3, "h100:8"), (3, "v5e:2x4")])
def test_state_is_updated_in_place(stage, target):
    state, program = compiled(stage, target=target)
    memory = program.memory_analysis()
    psi = sum(leaf.size for leaf in state.layout.leaves)
    state_bytes = 12 * psi / N + (2 * psi / N if stage == 3 else 2 * psi)
    assert memory.argument_size_in_bytes == pytest.approx(state_bytes, rel=0.01)
    assert memory.alias_size_in_bytes >= 0.999 * state_bytes


SMALLEST = 2 * 512 * 512 // N  # bytes of a shard of the smallest matrix in bf16


def accumulating(stage, scan):
    """Four microbatches. With these sizes no activation and no gradient of a layer is as large as an array of state."""
    return compiled(stage, 4, scan, layers=10, seq=80, vocab=768) if scan else compiled(stage, 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unrolled_steps_do_not_copy_state(stage):
    """Transpositions are not checked here, since an activation is as large as the smallest shard."""
    program = hlo.parse_program(accumulating(stage, scan=False)[1].as_text())
    assert not [move for move in hlo_costs.moves(program, SMALLEST // 2) if move.op == "copy"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scanned_steps_do_not_copy_state(stage):
    """Parameters, master, moments and the sum of gradients are neither copied nor transposed, in loops or outside.

    There is one exception: at stages 1 and 2 the stack of a weight is gathered with the devices as the first dim, and
    transposed once into the parameter.
    """
    state, program = accumulating(stage, scan=True)
    leaves, size = state.layout.leaves, lambda a: math.prod(a.sharding.shard_shape(a.shape))
    held = [("bf16", size(a)) for a in jax.tree.leaves(state.params)]
    held += [("f32", size(a)) for a in jax.tree.leaves((state.master, state.opt_state))]  # like the sum at stages 2, 3
    held += [("f32", leaf.size) for leaf in leaves if stage == 1]
    copied = [
        (move.op, move.buffer.dtype, math.prod(move.buffer.dims), move.trips)
        for move in hlo_costs.moves(hlo.parse_program(program.as_text()), SMALLEST)
        if move.op in ("copy", "transpose") and (move.buffer.dtype, math.prod(move.buffer.dims)) in held
    ]
    stacks = [leaf.size for leaf in leaves if leaf.dim == 1 and leaf.size > 512 * 512]
    assert sorted(copied) == sorted(("transpose", "bf16", elements, 1) for elements in stacks if stage < 3)


def test_accumulation_holds_the_sum_of_gradients_once():
    """In addition to the memory of one microbatch, and to the gradient of a unit that is added to the sum. At stage 2
    also to all full gradients, since the compiler combines reduce-scatters of up to 30 MB, which are all of them."""
    for stage in (1, 2, 3):
        temporaries = {k: compiled(stage, k)[1].memory_analysis().temp_size_in_bytes for k in (1, 4)}
        leaves = compiled(stage, 4)[0].layout.leaves
        psi = sum(leaf.size for leaf in leaves)
        unit = sum(leaf.size for leaf in leaves if leaf.path.startswith("blocks")) / 4
        sum_of_gradients, added = (4 * size if stage == 1 else 4 * size / N for size in (psi, unit))
        joined = 2 * psi if stage == 2 else 0
        assert temporaries[4] <= temporaries[1] + joined + sum_of_gradients + added
        assert added < sum_of_gradients / 3  # the bound would catch a second sum


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_temporaries_are_packed_without_gaps(stage, scan):
    """The peak is at most 5% more than the compiler's largest sum of live buffers."""
    memory = accumulating(stage, scan)[1].memory_analysis()
    alive = memory.peak_memory_in_bytes
    assert alive <= memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert peak_bytes(memory) <= 1.05 * alive


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_peak_holds_two_gathered_units(scan):
    """With few tokens the activations are small compared with gathered weights, if these were saved."""
    few, many = (8, 16) if scan else (4, 12)  # a stack of four layers has no loop
    temporaries = {}
    for layers in (few, many):
        state, program = compiled(3, scan=scan, width=1024, layers=layers)
        temporaries[layers] = program.memory_analysis().temp_size_in_bytes
    blocks = [leaf for leaf in state.layout.leaves if leaf.path.startswith("blocks")]
    unit = 2 * sum(leaf.size for leaf in blocks) / many  # bytes of one gathered block in bf16
    gradient_shard = unit / N
    activations = 64 * 1024 * 2 * 48  # tokens x width x bytes x values saved by a block: 36 and fp32 statistics
    slope = (temporaries[many] - temporaries[few]) / (many - few)
    assert slope <= gradient_shard + activations
    gathered, full_gradients = 2 * unit, 2 * unit
    embedding_and_head = 4 * 2 * 512 * 1024
    bound = gathered + full_gradients + embedding_and_head + many * (gradient_shard + activations)
    assert temporaries[many] <= bound
    assert bound < many * unit  # the bound would catch a program that saves every gathered unit


@pytest.mark.parametrize(
    ("move", "dim"),
    [("all_gather", 1), ("all_gather", 2), ("reduce_scatter", 1), ("reduce_scatter", 2), ("all_reduce", None)],
)
def test_moving_a_stack_takes_a_bucket_of_memory(move, dim):
    """For any number of layers. If a stack is moved as a whole, shards are transposed in buffers that grow with it."""
    bucket, mesh = 2**25, zerojax.make_mesh(devices=targets.devices("h100:8"))
    sharded, whole = P(*[None] * (dim or 0), "data"), P()
    before, after = {"all_gather": (sharded, whole), "reduce_scatter": (whole, sharded)}.get(move, (whole, whole))

    def program(layers, bucket_bytes):
        axes, options = zerojax.Zero(mesh).config.axes, communication.CollectiveOptions(bucket_bytes)
        place = jax.sharding.NamedSharding(mesh, before)
        leaves = [jax.ShapeDtypeStruct((layers, 1024, width), "bfloat16", sharding=place) for width in (3072, 4096)]
        where = axes.shard if move == "all_reduce" else [Dims(dim)] * 2
        form = {} if move == "all_reduce" else {"rows": True}  # as at the end of a step
        fn = lambda leaves: getattr(communication, move)(leaves, where, axes, options, **form).leaves
        manual = jax.shard_map(fn, mesh=mesh, in_specs=([before] * 2,), out_specs=[after] * 2, check_vma=False)
        return jax.jit(manual, donate_argnums=0).lower(leaves).compile()

    for layers in (8, 16):
        bucketed = program(layers, bucket)
        assert max(c.full_bytes for c in compiled_collectives(hlo.parse_program(bucketed.as_text()))) <= bucket
        assert in_flight_bytes(hlo.parse_program(bucketed.as_text())) <= bucket
        assert bucketed.memory_analysis().temp_size_in_bytes <= 1.2 * bucket  # and the transposition of a piece
    if move != "all_reduce":  # which is done in place
        assert program(16, math.inf).memory_analysis().temp_size_in_bytes > 3 * bucket


CHECKPOINT = 512 * 1024 * 2  # tokens x width x bytes of a layer's input


def slopes(remat, few=16, many=32, **shapes):
    """Bytes of one more layer: (on the device, in host memory). With fewer than 16 scanned layers the moment of peak
    memory is a different one."""
    shapes = {"scan": True, "width": 1024, "seq": 512, **shapes}
    programs = [compiled(3, layers=n, remat=remat, **shapes) for n in (few, many)]
    memory = [program.memory_analysis() for _, program in programs]
    per_layer = lambda kind: (getattr(memory[1], kind) - getattr(memory[0], kind)) / (many - few)
    return per_layer("temp_size_in_bytes"), per_layer("host_temp_size_in_bytes")


def test_a_layer_that_saves_nothing_takes_its_input_and_its_gradient():
    leaves = compiled(3, scan=True, width=1024, seq=512, layers=16, remat=Remat())[0].layout.leaves
    gradient_shard = 2 * sum(leaf.size for leaf in leaves if leaf.path.startswith("blocks")) / 16 / N
    on_device, on_host = slopes(Remat())
    assert on_host == 0 and on_device <= 1.05 * (CHECKPOINT + gradient_shard)
    assert slopes("none")[0] > 10 * CHECKPOINT


def test_an_unrolled_layer_that_saves_nothing_takes_no_more():
    """The compiler does not replace the recomputation by the values of the forward pass."""
    leaves = compiled(3, width=1024, seq=512, layers=4, remat=Remat())[0].layout.leaves
    gradient_shard = 2 * sum(leaf.size for leaf in leaves if leaf.path.startswith("blocks")) / 4 / N
    assert slopes(Remat(), 4, 8, scan=False)[0] <= 1.05 * (CHECKPOINT + gradient_shard)


def test_offloaded_inputs_are_in_host_memory():
    """All of them, and the live buffers on the device shrink by as much. Gaps between buffers, below 5% of the peak, do
    not count, since they are as large as some layers' inputs. One input more or less may be in transit."""
    few, many = 16, 32
    offload, full = (
        [compiled(3, layers=n, remat=remat, scan=True, width=1024, seq=512)[1].memory_analysis() for n in (few, many)]
        for remat in (OFFLOAD, Remat())
    )
    alive = lambda memory: memory[1].peak_memory_in_bytes - memory[0].peak_memory_in_bytes
    assert offload[1].host_temp_size_in_bytes - offload[0].host_temp_size_in_bytes == (many - few) * CHECKPOINT
    assert alive(full) - alive(offload) >= (many - few - 1) * CHECKPOINT


def test_offloaded_inputs_of_unrolled_layers_leave_the_device_at_once():
    """Each is copied before the unit after the next starts. A layer takes no more device memory than its gradient."""
    few, many = 8, 12  # with four layers the moment of peak memory is a different one
    device, host = slopes(OFFLOAD, few, many, scan=False, rows=4)
    leaves = compiled(3, width=1024, seq=512, rows=4, layers=few, remat=OFFLOAD)[0].layout.leaves
    gradient_shard = 2 * sum(leaf.size for leaf in leaves if leaf.path.startswith("blocks")) / few / N
    assert host == 4 * CHECKPOINT and device <= gradient_shard


def test_partitioned_inputs_take_a_slice_on_each_device():
    """Half of a checkpoint with two devices along the model axis. If offloaded, that half is in host memory only.

    The moments of peak memory of 8 and 16 layers may differ by one slice: an eighth of one for each layer.
    """
    of = lambda **remat: slopes(Remat(**remat), 8, 16, rows=4, model=2)
    (whole, _), (sliced, none) = of(), of(partition_inputs=True)
    assert none == 0 and whole - sliced >= 7 / 8 * (4 * CHECKPOINT / 2)
    less, host = of(partition_inputs=True, offload_inputs=True)
    assert host == 4 * CHECKPOINT / 2 and whole - less >= 7 / 8 * 4 * CHECKPOINT


def test_slices_of_unrolled_layers_are_in_host_memory():
    """The event of a slice, which orders later layers after its copy, is an element of it on each device."""
    remat = Remat(partition_inputs=True, offload_inputs=True)
    program = compiled(3, scan=False, width=1024, seq=512, layers=4, rows=4, model=2, remat=remat)[1]
    assert program.memory_analysis().host_temp_size_in_bytes == 4 * 4 * CHECKPOINT / 2


@pytest.mark.parametrize(
    ("prefetch", "options"),
    [(0, []), (1, []), (1, ["--unrolled"]), (0, ["--remat", "offload"]), (1, ["--remat", "offload"])],
    ids=["depth_0", "depth_1", "unrolled", "offloaded_depth_0", "offloaded_depth_1"],
)
def test_the_peak_is_within_the_sum_of_its_terms(prefetch, options):
    """State, gradients, checkpoints, gathered units, the gradient in flight, the activations of a unit, and 5%. Without
    prefetch the peak is no larger than that of plain JAX."""
    shapes = {"layers": 12, "width": 1024, "heads": 8, "seq": 512, "vocab": 8192, "prefetch": prefetch, "link": 50}
    given = [word for name, value in shapes.items() for word in (f"--{name}", str(value))]
    compared = ["--forms", "ours"] if prefetch else ["--forms", "ours", "plain"]
    command = [sys.executable, BENCHMARKS / "schedule.py", "--json", *compared, *given, *options]
    forms = json.loads(subprocess.run(command, env=importing(BENCHMARKS), check=True, stdout=subprocess.PIPE).stdout)[
        "forms"
    ]
    ours = forms["ours"]
    assert ours["peak_bytes"] <= ours["bound_bytes"]
    assert prefetch or ours["peak_bytes"] <= forms["plain"]["peak_bytes"]
    assert ours["host_temporaries_bytes"] == ("offload" in options) * 12 * 2 * CHECKPOINT


def bytes_per_token(chunk_size, vocab, stage=3, remat="none", few=8, many=32, seq=64):
    """Temporary bytes of one more token on a device, in a model that is small except for its vocabulary."""
    programs = [
        compiled(stage, width=128, layers=1, seq=seq, rows=rows, remat=remat, vocab=vocab, chunk_size=chunk_size)[1]
        for rows in (few, many)
    ]
    few_bytes, many_bytes = (program.memory_analysis().temp_size_in_bytes for program in programs)
    return (many_bytes - few_bytes) / ((many - few) * seq)


VOCAB, CHUNK = 2**16, 128  # the smaller batch has four chunks; with one chunk there is no sum of the head's gradient
LOGITS = 2 * VOCAB  # bytes of a token's logits in bf16


def test_without_chunks_all_logits_and_their_gradient_are_in_memory():
    assert bytes_per_token(None, VOCAB) >= 2 * LOGITS


@pytest.mark.parametrize(("stage", "remat"), [(3, "none"), (3, "full"), (0, "none")])
def test_with_chunks_a_token_takes_its_activations_and_no_logits(stage, remat):
    assert bytes_per_token(CHUNK, VOCAB, stage, remat) <= LOGITS / 5


# A mesh with a model axis: data 4 x model 2

ACTIVATION = 64 * 512 * 2  # tokens x width x bytes
EVENTS = 32  # bytes of scalar events that may be reduced together with an activation


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(("stage", "k"), [(0, 1), (1, 1), (2, 4), (3, 1), (3, 4)])
def test_a_device_communicates_its_part_of_a_leaf(stage, k, scan):
    """Weights are not sent over the model axis. Over the data axis, each device sends its part along the model axis."""
    state, program = compiled(stage, k, scan, model=2)
    found = compiled_collectives(hlo.parse_program(program.as_text()))
    data, model = ([c for c in found if c.group_size == size and c.dtype == "bf16"] for size in (4, 2))
    leaves = state.layout.leaves
    held = lambda leaf: leaf.size // (2 if leaf.model_spec else 1)
    whole = sum(held(leaf) for leaf in leaves if leaf.dim is None)  # biases over the model axis: all-reduced
    psi = sum(map(held, leaves)) - whole
    once = sum(held(leaf) for leaf in leaves if traffic.is_gathered_once(leaf)) - whole
    volume = {0: 2 * psi, 1: 2 * psi, 2: (1 + k) * psi, 3: k * (3 * psi - once)}[stage]
    volume += 2 * whole * (k if stage >= 2 else 1)
    (table,) = [held(leaf) for leaf in leaves if leaf.path.startswith("embed")]
    rows = ACTIVATION // 2  # elements that are looked up: their gradients at stage 2, and they themselves at stage 3
    volume += {2: k, 3: 2 * k}.get(stage, 0) * (rows - table)
    assert sum(c.sent_bytes for c in data) == pytest.approx(2 * volume * 3 / 4, rel=0.01)
    assert {c.kind for c in model} == {"all-reduce"}
    assert ACTIVATION <= max(c.full_bytes for c in model) <= ACTIVATION + EVENTS


def test_a_block_reduces_activations_four_times_over_the_model_axis():
    """Megatron's g after attention and after the MLP, and f before each, in a forward and a backward pass."""
    found = {n: compiled_collectives(hlo.parse_program(compiled(3, layers=n, model=2)[1].as_text())) for n in (4, 6)}
    large = lambda c: c.group_size == 2 and ACTIVATION <= c.full_bytes <= ACTIVATION + EVENTS
    count = lambda n: sum(c.trips for c in found[n] if large(c))
    assert (count(6) - count(4)) / 2 == 4


@pytest.mark.parametrize("stage", [1, 3])
def test_state_on_a_mesh_with_a_model_axis_is_updated_in_place(stage):
    state, program = compiled(stage, scan=True, model=2)
    memory = program.memory_analysis()
    held = sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves((state.params, state.master, state.opt_state))
    )
    assert memory.argument_size_in_bytes == pytest.approx(held, rel=0.001)
    assert memory.alias_size_in_bytes >= 0.999 * held


def test_two_processes_describe_tpus_at_once():
    """By default libtpu allows only one process, for programs that run on the chips of a host."""
    targets.devices("v5e:2x4")
    environ = {name: value for name, value in os.environ.items() if name != "ALLOW_MULTIPLE_LIBTPU_LOAD"}
    code = "from zerojax import targets; print(len(targets.devices('v5e:2x4')))"
    ended = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True)
    assert ended.stdout.strip() == "8", ended.stderr[-3000:]


def test_kernels_are_assembled():
    """With the compiler's own settings. The other tests share kernels, and `scripts/test` gives them no ptxas."""
    code = """
        import gpt, optax, zerojax
        from zerojax import targets

        config = gpt.Config(width=64, layers=2, heads=4, vocab=64, seq=16)
        zero = zerojax.Zero(zerojax.make_mesh(devices=targets.devices("h100:8")), stage=3)
        state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
        step = zero.train_step(gpt.loss).trace(state, gpt.batch_aval(config, 8))
        program = step.lower(lowering_platforms=("cuda",)).compile()
        print(program.runtime_executable().serialize().count(b"\\x7fELF"))
    """
    environ = {name: value for name, value in importing(BENCHMARKS).items() if name not in ("CUDA_ROOT", "XLA_FLAGS")}
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0 and int(ended.stdout) > 1, ended.stderr[-3000:]


def test_on_one_gpu_the_program_is_that_of_plain_jax():
    """At stage 3, with the norms that a step reports: the products are the same, and so is the memory."""
    config = gpt.Config(width=512, layers=4, heads=8, vocab=512, seq=128, dtype=jnp.bfloat16)
    devices, tx = targets.devices("h100:1"), optax.adamw(1e-3)
    model = models.RealModel("gpt", gpt.create(config), gpt.loss, lambda rows, _: gpt.batch_aval(config, rows))
    batch = model.batch_aval(16)
    zero = zerojax.Zero(zerojax.make_mesh(devices=devices), 3, "bf16")
    ours = zero.train_step(model.loss).trace(zero.eval_init(model.create, tx), batch)
    init, step, rows = plain.unedited(model, tx, devices)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), batch)
    programs = [
        traced.lower(lowering_platforms=("cuda",)).compile()
        for traced in (ours, step.trace(jax.eval_shape(init), batch))
    ]
    texts = [hlo.parse_program(program.as_text()) for program in programs]
    assert not compiled_collectives(texts[0])
    flops, plain_flops = (sum(dot_flops(i) for i in text.entry.instructions if has_product(i)) for text in texts)
    assert flops == plain_flops > 0
    peaks = [peak_bytes(program.memory_analysis()) for program in programs]
    assert peaks[0] <= 1.01 * peaks[1]
