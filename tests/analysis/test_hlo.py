"""Programs are read as a person reads their text: collectives, overlap, moves, flops and memory traffic.

The texts are written by hand, except for `support/data/backward_loop.txt`: the loop of the backward pass of a scanned
GPT (four layers of width 4096 with 32 heads, two rows of 2048 tokens, bf16, stage 3, remat='full') compiled by jax
0.10.2 for eight H100s, without metadata.
"""

import jax
import jax.numpy as jnp
import pytest
from support.hlo_text import CARRY, DOT, EIGHT, GATHER, GROUPS, MIB, TWO_GATHERS, between_slices, loop, program
from support.paths import DATA

from zerojax.analysis import hlo, hlo_collectives, hlo_costs


@pytest.mark.parametrize(
    ("overlapped", "exposed"),
    [("", True), ("%more = bf16[1024,1024]{1,0} add(%a, %a)", True), (DOT, False)],
    ids=["nothing", "an addition", "a product"],
)
def test_an_all_gather_is_exposed_unless_it_overlaps_with_a_matrix_product(overlapped, exposed):
    (gather,) = hlo_collectives.compiled_collectives(program(GATHER.replace("OVERLAPPED", overlapped)))
    assert gather == hlo_collectives.Collective("all-gather", "bf16", 2 * MIB, EIGHT, 1, False, exposed)
    assert gather.sent_bytes == 2 * MIB * 7 / 8


def test_a_product_after_the_end_does_not_overlap():
    (gather,) = hlo_collectives.compiled_collectives(
        program(GATHER.replace("OVERLAPPED", "").replace("ROOT", f"{DOT}\nROOT"))
    )
    assert gather.exposed


def test_groups_of_a_synchronous_all_reduce():
    for groups, members in [
        ("{}", EIGHT),
        ("{{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['replica'=2,'data'=4] {'data'}", (0, 1, 2, 3)),
        ("mesh['replica'=2,'data'=4] {'replica'}", (0, 4)),
        ("mesh['a'=2,'b'=4,'c'=1], device_ids=([4,2]T(1,0)) {'b'}", (0, 2, 4, 6)),
        ("mesh['a'=2,'b'=4,'c'=1], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
    ]:
        text = f"""
            %a = f32[1000] parameter(0)
            ROOT %sum = f32[1000] all-reduce(%a), replica_groups={groups}, to_apply=%add
        """
        (found,) = hlo_collectives.compiled_collectives(program(text))
        assert found == hlo_collectives.Collective("all-reduce", "f32", 4000, members, 1, False, True)
        assert found.sent_bytes == 2 * 4000 * (len(members) - 1) / len(members)


def test_the_group_of_a_permutation_is_the_devices_that_exchange_data():
    text = """
        %a = f32[1000] parameter(0)
        ROOT %moved = f32[1000] collective-permute(%a), source_target_pairs={{0,2},{2,4},{4,0},{1,3},{3,5},{5,1}}
    """
    (found,) = hlo_collectives.compiled_collectives(program(text))
    assert (found.group, found.sent_bytes) == ((0, 2, 4), 4000)


def test_aliased_parameters_are_read_from_the_header():
    aliases = "input_output_alias={ {0}: (1, {}, may-alias), {1}: (3, {}, must-alias) }"
    header = f"HloModule step, is_scheduled=true, {aliases}"
    assert hlo.parse_program(
        f"{header}\nENTRY %main (...) -> ... {{\n  ROOT %a = f32[2] parameter(0)\n}}\n"
    ).aliased == {1, 3}


def test_a_combined_collective_is_counted_by_dtype():
    text = f"""
        %a = bf16[16,8] parameter(0)
        %b = f32[10] parameter(1)
        %start = ((bf16[16,8], f32[10]), (bf16[128,8], f32[80])) all-gather-start(%a, %b), {GROUPS}, dimensions={{0}}
        ROOT %done = (bf16[128,8], f32[80]) all-gather-done(%start)
    """
    found = hlo_collectives.compiled_collectives(program(text))
    assert [(c.dtype, c.full_bytes) for c in found] == [("bf16", 2048), ("f32", 320)]
    assert hlo_collectives.in_flight_bytes(program(text)) == 2368


SCATTER_IN_LOOP = f"""
%scatter = f32[128,1024] reduce-scatter(%w), {GROUPS}, dimensions={{0}}, to_apply=%add
ROOT %next = {CARRY} tuple(%i, %w)
"""


def test_a_collective_in_a_loop_counts_once_per_iteration():
    (found,) = hlo_collectives.compiled_collectives(loop(SCATTER_IN_LOOP, 12))
    assert found == hlo_collectives.Collective("reduce-scatter", "f32", 4 * MIB, EIGHT, 12, True, True)
    assert found.sent_bytes == 12 * 4 * MIB * 7 / 8


def test_an_asynchronous_computation_that_wraps_a_collective():
    wrapped = f"""
%wrapped (...) -> ... {{
  %p = f32[1024] parameter(0)
  ROOT %scatter = f32[128] reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add
}}
"""
    text = f"""
        %p = f32[1024] parameter(0)
        %a = bf16[1024,1024] parameter(1)
        %start = ((f32[1024]), f32[128]) async-start(%p), calls=%wrapped
        {DOT}
        ROOT %done = f32[128] async-done(%start), calls=%wrapped
    """
    (found,) = hlo_collectives.compiled_collectives(program(text, wrapped))
    assert found == hlo_collectives.Collective("reduce-scatter", "f32", 4096, EIGHT, 1, False, False)


def test_a_fusion_of_an_all_reduce_and_a_slice_of_it_is_a_reduce_scatter():
    """The synchronous form of TPU programs. A device sends 7/8 of 4 KiB, not twice that."""
    computations = """
%scatter (...) -> ... {
  %p = f32[1024] parameter(0)
  %sum = f32[1024] all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %i = s32[] constant(0)
  ROOT %r = f32[128] dynamic-slice(%sum, %i), dynamic_slice_sizes={128}
}
"""
    text = """
        %p = f32[1024] parameter(0)
        ROOT %a = f32[128] fusion(%p), kind=kCustom, calls=%scatter
    """
    (found,) = hlo_collectives.compiled_collectives(program(text, computations))
    assert found == hlo_collectives.Collective("reduce-scatter", "f32", 4096, EIGHT, 1, False, True)
    assert found.sent_bytes == 4096 * 7 / 8
    several = computations.replace("f32[1024] all-reduce(%p)", "(f32[1024], f32[1024]) all-reduce(%p, %p)").replace(
        "ROOT %r = f32[128] dynamic-slice(%sum, %i), dynamic_slice_sizes={128}",
        """%one = f32[1024] get-tuple-element(%sum), index=0
  %two = f32[1024] get-tuple-element(%sum), index=1
  %r = f32[128] dynamic-slice(%one, %i), dynamic_slice_sizes={128}
  %s = f32[128] dynamic-slice(%two, %i), dynamic_slice_sizes={128}
  ROOT %t = (f32[128], f32[128]) tuple(%r, %s)""",
    )
    (both,) = hlo_collectives.compiled_collectives(program(text, several))
    assert both == found._replace(full_bytes=8192)
    with pytest.raises(ValueError, match="chain_id"):  # if all of it is returned, it is not a reduce-scatter
        returns_all = computations.replace("dynamic-slice(%sum, %i)", "dynamic-slice(%p, %i)")
        hlo_collectives.compiled_collectives(program(text, returns_all))


def test_clones_in_a_chain_of_fusions_are_one_collective():
    """As in programs for TPUs. The second fusion of the chain multiplies."""
    clone = """
%NAME (...) -> ... {
  %p = bf16[128,1024]{1,0:T(8,128)S(1)} parameter(0)
  %q = bf16[1024,1024] parameter(1)
  %g = bf16[1024,1024] all-gather(%p), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, CHAIN
  ROOT %r = bf16[1024,1024] OP
}
"""
    product = "convolution(%q, %q), dim_labels=bf_io->bf"
    computations = "".join(
        clone.replace("NAME", name).replace("OP", op).replace("CHAIN", 'frontend_attributes={chain_id="0"}')
        for name, op in (("first", "copy(%q)"), ("second", product), ("third", "copy(%q)"))
    )
    text = """
        %p = bf16[128,1024] parameter(0)
        %q = bf16[1024,1024] parameter(1)
        %a = bf16[1024,1024] fusion(%p, %q), kind=kCustom, calls=%first
        %b = bf16[1024,1024] fusion(%p, %a), kind=kCustom, calls=%second
        ROOT %c = bf16[1024,1024] fusion(%p, %b), kind=kCustom, calls=%third
    """
    (found,) = hlo_collectives.compiled_collectives(program(text, computations))
    assert found == hlo_collectives.Collective("all-gather", "bf16", 2 * MIB, EIGHT, 1, False, False)
    with pytest.raises(ValueError, match="chain_id"):
        hlo_collectives.compiled_collectives(program(text, computations.replace("chain_id", "other")))


SPARSE_CORE = """
%on_sparse_core (...) -> bf16[1024,1024] {
  %part = bf16[128,1024] parameter(0)
  ROOT %g = bf16[1024,1024] all-gather(%part), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}, execution_thread="sparsecore"
"""
ON_SPARSE_CORE = """
    %p = bf16[128,1024] parameter(0)
    %q = bf16[1024,1024] parameter(1)
    %start = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%on_sparse_core
    BEFORE
    %update = ((bf16[128,1024]), bf16[1024,1024]) call-update(%start, %p)
    AFTER
    ROOT %done = bf16[1024,1024] call-done(%update)
"""


@pytest.mark.parametrize(("place", "exposed"), [("BEFORE", True), ("AFTER", False)])
def test_a_collective_of_a_sparse_core_runs_from_the_update_that_gives_it_its_operands(place, exposed):
    """The call starts without operands, long before they exist. A product between the two hides nothing."""
    product = "%r = bf16[1024,1024] dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = ON_SPARSE_CORE.replace(place, product).replace("BEFORE", "").replace("AFTER", "")
    (found,) = hlo_collectives.compiled_collectives(program(text, SPARSE_CORE))
    assert found == hlo_collectives.Collective("all-gather", "bf16", 2 * MIB, EIGHT, 1, False, exposed)
    with pytest.raises(ValueError, match="gets none in the same computation"):
        hlo_collectives.compiled_collectives(program(text.replace("call-update(%start, %p)", "copy(%p)"), SPARSE_CORE))


@pytest.mark.parametrize("place", ["BEFORE", "AFTER"])
def test_a_collective_between_slices_runs_from_its_send_to_the_end_of_its_recv(place):
    product = "%m = bf16[1024,1024] dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = between_slices("ALL_REDUCE", '"{1,2}x{0:3}"', **{place: product})
    (found,) = hlo_collectives.compiled_collectives(text)
    assert found == hlo_collectives.Collective("all-reduce", "bf16", MIB // 4, (0, 4), 1, False, False)
    assert found.sent_bytes == MIB // 4


def test_groups_of_collectives_between_slices():
    for kind, target, group, full_bytes in [
        ("ALL_REDUCE", '"{1,3}x{0:3}"', (0, 8), MIB // 4),
        ("ALL_GATHER", '"{1,2,3,4}x{0:3}"', (0, 4, 8, 12), MIB),
        ("REDUCE_SCATTER", "{{200002,300002},{200001,300001}}", (6, 10), MIB // 4),
        ("ALL_TO_ALL", "{{100000,100002,100001,100003,200000,200002,200001,200003}}", tuple(range(8)), MIB // 4),
        ("ONE_TO_ONE", "{{100003->200000},{200003->100000}}", (3, 4), MIB // 4),
    ]:
        (found,) = hlo_collectives.compiled_collectives(between_slices(kind, target))
        kinds = {"ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute"}
        assert (found.kind, found.group) == (kinds.get(kind, kind.lower().replace("_", "-")), group)
        assert found.full_bytes == full_bytes and found.exposed


def test_transfers_between_slices_that_are_not_understood_are_rejected():
    for kind, target, message in [
        ("ALL_REDUCE", "{{100000,100001,200000,200001}}", "several devices of a slice, but not all"),
        ("ALL_REDUCE", '"everywhere"', "cannot read the target"),
        ("BROADCAST", '"{1,2}x{0:3}"', "of type BROADCAST"),
    ]:
        with pytest.raises(ValueError, match=message):
            hlo_collectives.compiled_collectives(between_slices(kind, target))


def test_the_trip_count_is_read_from_the_counter_of_a_loop():
    """The TPU compiler does not note it."""
    computations = """
%condition (...) -> pred[] {
  %carry = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %limit = s32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (...) -> ... {
  %carry = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[64] get-tuple-element(%carry), index=1
  %sum = f32[64] all-reduce(%x), replica_groups={}, to_apply=%add
  %two = s32[] constant(2)
  %copied = s32[] copy(%i)
  %next = s32[] add(%copied, %two)
  ROOT %out = (s32[], f32[64]) tuple(%next, %sum)
}
"""
    text = """
        %x = f32[64] parameter(0)
        %zero = s32[] constant(0)
        %init = (s32[], f32[64]) tuple(%zero, %x)
        ROOT %loop = (s32[], f32[64]) while(%init), condition=%condition, body=%body
    """
    (found,) = hlo_collectives.compiled_collectives(program(text, computations))
    assert found.trips == 4  # 0, 2, 4, 6
    with pytest.raises(ValueError, match="not in the text"):
        hlo_collectives.compiled_collectives(program(text, computations.replace("direction=LT", "direction=NE")))


def test_programs_that_are_not_understood_are_rejected():
    for broken, message in [
        (
            lambda: hlo_collectives.compiled_collectives(loop(SCATTER_IN_LOOP, None)),
            "a loop whose trip count is not in the text",
        ),
        (
            lambda: hlo_collectives.compiled_collectives(
                program(GATHER.replace("OVERLAPPED", "").replace("all-gather-done", "negate"))
            ),
            "has no end",
        ),
        (lambda: program("ROOT %a = q32 parameter(0)"), "without a type"),
        (lambda: program("ROOT %a = what[2] parameter(0)"), r"unknown type what\[2\]"),
        (lambda: program("ROOT %a = f32[2] negate(%b)"), "before it is defined"),
        (lambda: program("a line"), "not an instruction"),
        (lambda: hlo.parse_program("HloModule step, num_partitions=8\n"), "scheduled"),
        (lambda: hlo.parse_program("HloModule step, is_scheduled=true\n"), "ENTRY"),
        (
            lambda: hlo_collectives.compiled_collectives(
                program("%t = token[] parameter(0)\nROOT %r = f32[] send(%t)")
            ),
            "not supported",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            broken()


def test_copies_in_a_loop():
    """Results of fusions and asynchronous copies count; copies to the host, of computed values, or outside do not."""
    computations = """
%transposing (...) -> ... {
  %p = f32[1024,1024] parameter(0)
  ROOT %t = f32[1024,1024] transpose(%p), dimensions={1,0}
}

%copying (...) -> ... {
  %p = f32[1024,1024] parameter(0)
  %flat = f32[1048576] bitcast(%p)
  %c = f32[1024,1024] copy(%flat)
  %n = f32[1024,1024] negate(%p)
  ROOT %two = (f32[1024,1024], f32[1024,1024]) tuple(%c, %n)
}

%computing (...) -> ... {
  %p = f32[1024,1024] parameter(0)
  %n = f32[1024,1024] add(%p, %p)
  ROOT %c = f32[1024,1024] copy(%n)
}
"""
    body = f"""
        %counter = s32[] copy(%i)
        %kept = f32[1024,1024] copy(%w)
        %turned = f32[1024,1024] fusion(%w), kind=kLoop, calls=%transposing
        %both = (f32[1024,1024], f32[1024,1024]) fusion(%w), kind=kLoop, calls=%copying
        %computed = f32[1024,1024] fusion(%w), kind=kLoop, calls=%computing
        %start = (f32[1024,1024], f32[1024,1024], u32[]) copy-start(%w)
        %done = f32[1024,1024] copy-done(%start)
        %offload = (f32[1024,1024]{{1,0:S(5)}}, f32[1024,1024], u32[]) copy-start(%w)
        %offloaded = f32[1024,1024]{{1,0:S(5)}} copy-done(%offload)
        ROOT %next = {CARRY} tuple(%counter, %kept)
    """
    read = loop(body, 3, computations)
    moves = hlo_costs.moves(read, min_bytes=MIB, in_loops=True)
    expected = [("kept", "copy"), ("turned", "transpose"), ("both", "copy"), ("start", "copy")]
    assert [(m.name, m.op) for m in moves] == expected
    assert all(m.num_bytes == 3 * 4 * MIB for m in moves)
    assert hlo_costs.moves(read, in_loops=True)[0].name == "counter"
    outside = program("%a = f32[4] parameter(0)\nROOT %c = f32[4] copy(%a)")
    assert hlo_costs.moves(outside, in_loops=True) == []
    assert [(m.name, m.op, m.trips) for m in hlo_costs.moves(outside)] == [("c", "copy", 1)]


CUBLAS = """
%a = bf16[8,64,32] parameter(0)
%b = bf16[8,16,32] parameter(1)
ROOT %c = (bf16[8,64,16], s8[4194304]) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]}}}
"""
ATTENTION = """
%q = bf16[2,128,4,64] parameter(0)
ROOT %o = (bf16[2,128,4,64], u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxNAME", \
backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","4","128","256"]}}}
"""


def test_flops_of_products():
    flops = lambda text, computations="": hlo_costs.dot_flops(program(text, computations).entry.root)
    assert flops(f"%a = bf16[1024,1024] parameter(0)\nROOT {DOT}") == 2 * 1024**3
    fused = """
%fused (...) -> ... {
  %x = bf16[4,32,8] parameter(0)
  %y = bf16[4,8,16] parameter(1)
  %z = f32[4,32,16] dot(%x, %y), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, \
rhs_contracting_dims={1}
  ROOT %n = f32[4,32,16] negate(%z)
}
"""
    text = """
        %x = bf16[4,32,8] parameter(0)
        %y = bf16[4,8,16] parameter(1)
        ROOT %f = f32[4,32,16] fusion(%x, %y), kind=kCustom, calls=%fused
    """
    assert flops(text, fused) == 2 * 4 * 32 * 16 * 8
    assert flops(CUBLAS) == 2 * 8 * 64 * 16 * 32
    scores = 2 * 4 * 128 * 256
    assert flops(ATTENTION.replace("NAME", "")) == 2 * 2 * scores * 64
    assert flops(ATTENTION.replace("NAME", "Backward")) == 5 * 2 * scores * 64
    assert flops("%a = f32[2] parameter(0)\nROOT %b = f32[2] negate(%a)") == 0
    with pytest.raises(ValueError, match="cannot count the flops"):
        flops(CUBLAS.replace("gemm_backend_config", "other"))


def test_bytes_of_memory():
    moved = lambda text, computations="": hlo_costs.memory_bytes(program(text, computations).entry.root)
    assert moved("%a = f32[6] parameter(0)\nROOT %b = f32[6] negate(%a)") == 24 + 24
    assert moved("%a = f32[6] parameter(0)\nROOT %b = f32[2,3] bitcast(%a)") == 0
    assert moved(CUBLAS) == 2 * (8 * 64 * 32 + 8 * 16 * 32 + 8 * 64 * 16)  # without the workspace


def test_bytes_of_a_slice_and_of_an_update_in_place():
    moved = lambda text, computations: hlo_costs.memory_bytes(program(text, computations).entry.root)
    index, row = 4, 8 * 4
    slicing = """
%fused (...) -> ... {
  %stack = f32[100,8] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %minus = f32[100,8] negate(%stack)
  %row = f32[1,8] dynamic-slice(%minus, %i, %z), dynamic_slice_sizes={1,8}
  ROOT %out = f32[8] bitcast(%row)
}
"""
    text = """
        %stack = f32[100,8] parameter(0)
        %i = s32[] parameter(1)
        ROOT %f = f32[8] fusion(%stack, %i), kind=kLoop, calls=%fused
    """
    assert moved(text, slicing) == row + index + row
    updating = """
%fused (...) -> ... {
  %stack = f32[100,8] parameter(0)
  %flat = f32[800] bitcast(%stack)
  %rows = f32[16] parameter(1)
  %row = f32[8] slice(%rows), slice={[8:16]}
  %i = s32[] parameter(2)
  %updated = f32[800] dynamic-update-slice(%flat, %row, %i)
  ROOT %out = f32[100,8] bitcast(%updated)
}
"""
    text = """
        %stack = f32[100,8] parameter(0)
        %rows = f32[16] parameter(1)
        %i = s32[] parameter(2)
        ROOT %f = f32[100,8] fusion(%stack, %rows, %i), kind=kLoop, calls=%fused
    """
    assert moved(text, updating) == row + index + row
    computed = updating.replace("bitcast(%stack)", "negate(%stack)")  # not in place: everything is read and written
    assert moved(text, computed) == 3200 + row + index + 3200


def test_the_second_of_two_all_gathers_overlaps_with_a_product():
    read = program(TWO_GATHERS)
    assert [c.exposed for c in hlo_collectives.compiled_collectives(read)] == [True, False]
    assert hlo_collectives.in_flight_bytes(read) == 4 * MIB


def test_the_loop_of_a_real_backward_pass():
    """The expected values were read by hand in the body of the loop. It runs three times: one of four is peeled off."""
    read = hlo.parse_program((DATA / "backward_loop.txt").read_text())
    layer = 4096 * 4096 * 2  # bytes of a square matrix of weights
    found = hlo_collectives.compiled_collectives(read)
    # In the order of the starts: kind, full bytes, exposed. The comments name the instructions in between.
    assert [(c.kind, c.full_bytes, c.exposed) for c in found] == [
        ("all-gather", 8 * 4608 * 2, True),  # biases and norms: loop_dynamic_slice_fusion.5
        ("all-gather", 3 * layer, True),  # qkv: the norm, in three fusions, and loop_dynamic_slice_fusion.7
        ("all-gather", layer, False),  # out: gemm_fusion_dot.82 (scores)
        ("all-gather", 4 * layer, False),  # up: gemm_fusion_dot.83 (mixing), gemm_fusion_dot.66 (out)
        ("all-gather", 4 * layer, False),  # down: gemm_fusion_dot.67 (up)
        ("reduce-scatter", 8 * 5120 * 2, False),  # biases and norms: gemm_fusion_dot.71 (gradient of up)
        ("reduce-scatter", 5 * layer, False),  # down and out of the layer above: gemm_fusion_dot.69 (gradient of down)
        ("reduce-scatter", 7 * layer, False),  # qkv and up of the layer above: gemm_fusion_dot.70 and .79
    ]
    assert {(c.dtype, c.group_size, c.trips, c.looped) for c in found} == {("bf16", 8, 3, True)}
    exposed = sum(c.sent_bytes for c in found if c.exposed)
    assert exposed == 3 * (8 * 4608 * 2 + 3 * layer) * 7 / 8 == 264_434_688
    assert hlo_collectives.in_flight_bytes(read) == 7 * layer  # they do not overlap with each other

    moves = hlo_costs.moves(read, min_bytes=4 * layer // 16, in_loops=True)
    moved = lambda op: [(m.name, m.buffer.num_bytes) for m in moves if m.op == op]
    assert moved("copy") == [  # the gradient of the layer's output; two gradients of weights that the loop carries
        ("copy.148", layer),
        ("copy.163", 3 * layer),
        ("copy.164", 4 * layer),
    ]
    assert moved("transpose") == [  # the two other gradients that the loop carries; heads and positions swapped
        ("wrapped_transpose.2", 4 * layer),
        ("wrapped_transpose.3", layer),
        ("input_transpose_fusion.3", layer),
        ("input_transpose_fusion.4", layer),
    ]
    assert {m.trips for m in moves} == {3}

    # In units of 2^36 flops, half of a product of 4096 tokens with a square matrix. Recomputed: qkv, out, up, and two
    # products of attention with 1 each. Backward: twice qkv, out, up and down, and four products of attention.
    (body,) = read.entry.root.called["body"]
    assert sum(map(hlo_costs.dot_flops, body.instructions)) == (6 + 2 + 8 + 2 + 2 * (6 + 2 + 8 + 8) + 4) * 2**36
    by_name = {i.name: i for i in body.instructions}
    index = 4
    assert hlo_costs.memory_bytes(by_name["copy.163"]) == 2 * 3 * layer
    assert (
        hlo_costs.memory_bytes(by_name["loop_dynamic_slice_fusion.5"]) == 2 * 3 * layer // 8 + index
    )  # shards of a layer
    assert hlo_costs.memory_bytes(by_name["loop_dynamic_update_slice_fusion.4"]) == 2 * 4 * layer // 8 + index


def test_an_aliased_result_counts_once():
    x = jnp.ones((256, 256))
    compiled = lambda **options: jax.jit(jnp.sin, **options).lower(x).compile()
    peak = lambda **options: hlo_collectives.peak_bytes(compiled(**options).memory_analysis())
    assert peak() - peak(donate_argnums=0) == x.nbytes <= peak(donate_argnums=0)
