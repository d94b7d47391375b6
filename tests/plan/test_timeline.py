"""Predicted times equal those computed by hand from the text of a program and the rates of the cluster."""

import dataclasses

import pytest
from support.hlo_text import CARRY, DOT, GATHER, GROUPS, MIB, TWO_GATHERS, between_slices, loop, program
from support.paths import DATA

from zerojax.analysis import hlo, hlo_collectives, hlo_costs
from zerojax.analysis.audit import check_copies
from zerojax.analysis.hardware import BETWEEN_HOSTS, BETWEEN_SLICES, INSIDE_HOST, Chip, Cluster, Rate, torus_links
from zerojax.analysis.hlo_costs import COPIES, FROM_HOST, TO_HOST
from zerojax.plan.timeline import COMPUTE, MEMORY, STARTS, Span, predict

FLOPS, MEMORY_RATE, LINK = 2**30, 6 * MIB, MIB / 4
# A product of 1024 x 1024 matrices takes 2 s, an all-gather of one in bf16 between eight devices 7 s. The link to the
# host has half the rate, and the NIC half of that. There are no latencies.
CHIP = Chip(
    name="test",
    platform="cuda",
    device_kinds=("test",),
    memory_bytes=2**30,
    host_memory_bytes=2**30,
    flops=Rate(2 * FLOPS, 0.5),
    f32_share=0.5,
    memory_rate=Rate(MEMORY_RATE, 1),
    host_rate=Rate(LINK / 2, 1),
    duplex_share=1,
    link_rate=Rate(LINK, 1),
    network_rate=Rate(LINK / 4, 1),
    kernel_s=0,
    collective_s=0,
    hop_s=0,
    network_hop_s=0,
)
HOST = Cluster("one host", CHIP, 8, 8)
TWO_HOSTS = Cluster("two hosts", CHIP, 8, 4)


def slower(**constants):
    """One host whose chip has other constants."""
    return dataclasses.replace(HOST, chip=dataclasses.replace(CHIP, **constants))


def times(read):
    """Seconds on one host: (of the step, of the computing lane, of products, of the link)."""
    found = predict(read, HOST)
    assert found.waiting_s == pytest.approx(found.step_s - found.computing_s)
    return found.step_s, found.computing_s, found.products_s, found.busy_s.get(INSIDE_HOST, 0)


def test_an_all_gather_overlaps_with_a_product():
    time = lambda overlapped: times(program(GATHER.replace("OVERLAPPED", overlapped)))
    addition = 2 * 2 / 6  # reads and writes 2 MiB
    assert time("") == pytest.approx((7 + addition, addition, 0, 7))
    assert time(DOT) == pytest.approx((7 + addition, 2 + addition, 2, 7))


BODY = f"""
%full = bf16[1024,1024] bitcast(%w)
%shard = bf16[128,1024] slice(%full), slice={{[0:128], [0:1024]}}
%start = (bf16[128,1024], bf16[1024,1024]) all-gather-start(%shard), {GROUPS}, dimensions={{0}}
%overlapped = bf16[1024,1024] dot(%full, %full), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
%done = bf16[1024,1024] all-gather-done(%start)
%after = bf16[1024,1024] dot(%done, %done), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
ROOT %next = {CARRY} tuple(%i, %w)
"""


def test_an_all_gather_overlaps_with_a_product_in_a_loop():
    """Each iteration has an all-gather that overlaps with one product, and another product that waits for it."""
    slicing = 2 * 2 / 8 / 6
    for trips in (1, 2, 5):
        expected = (slicing + 7 + 2, slicing + 2 + 2, 2 + 2, 7)
        assert times(loop(BODY, trips)) == pytest.approx([trips * seconds for seconds in expected])


def test_a_real_backward_pass():
    """The flops are those counted by hand in test_hlo.py. The link sends 24 square bf16 matrices and small arrays."""
    read = hlo.parse_program((DATA / "backward_loop.txt").read_text())
    found, square = predict(read, slower(f32_share=1.0)), 4096 * 4096 * 2
    assert found.products_s == pytest.approx(3 * 70 * 2**36 / FLOPS) and found.products_s < found.computing_s
    assert found.busy_s[INSIDE_HOST] == pytest.approx(3 * 24 * square * 7 / 8 / LINK, rel=0.001)


def test_spans_have_the_times_of_their_operations():
    found = predict(program(GATHER.replace("OVERLAPPED", DOT)), HOST)
    assert found.spans == (
        Span(INSIDE_HOST, "all-gather", INSIDE_HOST, 0, 7),
        Span(COMPUTE, "dot", COMPUTE, 0, 2),
        Span(COMPUTE, "out", MEMORY, 7, pytest.approx(7 + 2 * 2 / 6)),
    )
    assert found.waiting_s == pytest.approx(5)
    assert found.bound_by == INSIDE_HOST


def test_a_link_serves_one_collective_at_a_time():
    read = program(TWO_GATHERS)
    assert [(span.start_s, span.end_s) for span in predict(read, HOST).spans] == [(0, 7), (7, 14), (7, 9)]


def test_the_devices_of_each_group():
    for groups, expected in [
        ("replica_groups={}", [(0, 1, 2, 3, 4, 5, 6, 7)]),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2), use_global_device_ids=true", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", [(0, 4, 1, 5), (2, 6, 3, 7)]),
    ]:
        read = program(
            f"%a = f32[8] parameter(0)\nROOT %sum = f32[8] all-reduce(%a), channel_id=1, {groups}, to_apply=%add"
        )
        assert hlo_collectives.groups(read.entry.root, 8) == expected


def test_groups_that_are_not_understood_are_rejected():
    for groups in ("mesh['a'=8] {'a':(1)2}", "mesh['a'=2,'b'=4], device_ids=(7,6) {'b'}"):
        read = program(f"%a = f32[8] parameter(0)\nROOT %s = f32[8] all-reduce(%a), replica_groups={groups}")
        with pytest.raises(ValueError, match="groups"):
            hlo_collectives.groups(read.entry.root, 8)


def test_links_that_a_gather_crosses():
    for groups, lane, seconds in [
        ("{{0,1,2,3},{4,5,6,7}}", INSIDE_HOST, 2 * 3 / 4 * 4),  # 2 MiB gathered over four devices, at 1/4 MiB/s
        ("{{0,1,2,3,4,5,6,7}}", BETWEEN_HOSTS, 2 * 7 / 8 * 4),  # the four NICs of a host are as fast as its links
        ("{{0,1,4,5},{2,3,6,7}}", BETWEEN_HOSTS, 2 * 3 / 4 * 8),  # two NICs
        ("{{0,4},{1,5},{2,6},{3,7}}", BETWEEN_HOSTS, 2 * 1 / 2 * 16),  # one NIC
        ("{{0,1},{2,3},{4,6},{5,7}}", INSIDE_HOST, 2 * 1 / 2 * 4),
    ]:
        size = groups[1 : groups.index("}")].count(",") + 1
        read = program(f"""
            %shard = bf16[{1024 // size},1024] parameter(0)
            ROOT %full = bf16[1024,1024] all-gather(%shard), replica_groups={groups}, dimensions={{0}}
        """)
        found = predict(read, TWO_HOSTS)
        assert found.busy_s == {lane: pytest.approx(seconds)}
        assert found.step_s == pytest.approx(seconds)


def test_a_permutation_is_as_slow_as_its_slowest_pair():
    text = "%a = f32[65536] parameter(0)\nROOT %b = f32[65536] collective-permute(%a), source_target_pairs=PAIRS"
    ring = "{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
    found = predict(program(text.replace("PAIRS", ring)), TWO_HOSTS)
    assert found.busy_s == {BETWEEN_HOSTS: pytest.approx(1 / 4 * 16)}
    found = predict(program(text.replace("PAIRS", "{{0,1},{4,5}}")), TWO_HOSTS)
    assert found.busy_s == {INSIDE_HOST: pytest.approx(1 / 4 * 4)}


def test_latencies_of_kernels_and_collectives():
    """An all-gather waits once around the ring, an all-reduce twice. There is a delay between two kernels."""
    waiting = slower(kernel_s=0.25, collective_s=1, hop_s=0.5)
    text = f"%w = f32[1024,1024] parameter(0)\nROOT %r = f32[1024,1024] all-reduce(%w), {GROUPS}, to_apply=%add"
    assert predict(program(text), waiting).step_s == pytest.approx(2 * (1 + 7 * 0.5) + 2 * 4 * 7 / 8 * 4)
    found = predict(program(GATHER.replace("OVERLAPPED", DOT)), waiting)
    assert found.busy_s[INSIDE_HOST] == pytest.approx(1 + 7 * 0.5 + 7)
    assert found.busy_s[STARTS] == 0.5
    assert found.step_s == pytest.approx(11.5 + 4 / 6 + 0.25)


@pytest.mark.parametrize("trips", [1, 2, 5])
def test_a_loop_and_one_of_its_iterations(trips):
    found, slicing = predict(loop(BODY, trips), HOST), 2 * 2 / 8 / 6
    assert found.step_s == pytest.approx(trips * (slicing + 7 + 2))
    assert found.busy_s[INSIDE_HOST] == pytest.approx(trips * 7)
    assert found.busy_s[COMPUTE] == pytest.approx(trips * 4)
    (iteration,) = found.loops
    assert (iteration.name, iteration.trips) == ("loop", trips)
    assert iteration.iteration_s == pytest.approx(slicing + 9)
    starts = {span.name: (span.lane, span.start_s) for span in iteration.spans}
    assert starts == {
        "shard": (COMPUTE, pytest.approx(0)),
        "all-gather": (INSIDE_HOST, pytest.approx(slicing)),
        "overlapped": (COMPUTE, pytest.approx(slicing)),
        "after": (COMPUTE, pytest.approx(slicing + 7)),
    }
    assert found.spans == (Span(COMPUTE, "loop", "", 0, found.step_s),)


def test_a_loop_that_never_runs_takes_no_time():
    found = predict(loop(BODY, "0"), HOST)
    assert (found.step_s, found.busy_s, found.loops) == (0, {}, ())


HOST_COPIES = """
%x = f32[65536] parameter(0)
%a = bf16[1024,1024] parameter(1)
%out = (f32[65536]{0:S(5)}, f32[65536], u32[]) copy-start(%x)
%kept = f32[65536]{0:S(5)} parameter(2)
%in = (f32[65536], f32[65536]{0:S(5)}, u32[]) copy-start(%kept)
OVERLAPPED
%gone = f32[65536]{0:S(5)} copy-done(%out)
%back = f32[65536] copy-done(%in)
ROOT %r = (f32[65536], f32[65536]{0:S(5)}) tuple(%back, %gone)
"""


def test_copies_to_and_from_the_host_overlap_with_each_other_and_with_computation():
    found = predict(program(HOST_COPIES.replace("OVERLAPPED", "")), HOST)
    assert found.busy_s == {TO_HOST: 2, FROM_HOST: 2}  # 1/4 MiB each at 1/8 MiB/s
    assert found.step_s == found.waiting_s == 2
    found = predict(program(HOST_COPIES.replace("OVERLAPPED", DOT)), HOST)
    assert found.step_s == 2
    assert found.waiting_s == 0
    # Half of the rate while the other direction is busy: of the second copy, for 2 s.
    found = predict(program(HOST_COPIES.replace("OVERLAPPED", "")), slower(duplex_share=0.5))
    assert found.busy_s == {TO_HOST: 2, FROM_HOST: 3} and found.step_s == 3


def test_fusions_that_slice_or_update_host_memory_copy_only_the_slice():
    computations = """
%updating (...) -> ... {
  %stack = f32[8,65536]{1,0:S(5)} parameter(0)
  %row = f32[1,65536] parameter(1)
  %i = s32[] parameter(2)
  %copied = f32[1,65536] copy(%row)
  ROOT %updated = f32[8,65536]{1,0:S(5)} dynamic-update-slice(%stack, %copied, %i, %i)
}

%slicing (...) -> ... {
  %stack = f32[8,65536]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,65536] dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,65536}
  ROOT %copied = f32[1,65536] copy(%row)
}

%computing (...) -> ... {
  %row = f32[1,65536] parameter(0)
  ROOT %negated = f32[1,65536] negate(%row)
}
"""
    text = """
        %stack = f32[8,65536]{1,0:S(5)} parameter(0)
        %row = f32[1,65536] parameter(1)
        %i = s32[] parameter(2)
        %new = f32[8,65536]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
        %one = ((f32[8,65536]{1,0:S(5)}, f32[1,65536], s32[]), f32[8,65536]{1,0:S(5)}, u32[]) \
fusion-start(%stack, %row, %i), kind=kCustom, calls=%updating
        %two = ((f32[8,65536]{1,0:S(5)}, s32[]), f32[1,65536], u32[]) fusion-start(%new, %i), kind=kLoop, calls=%slicing
        %after = f32[8,65536]{1,0:S(5)} fusion-done(%one)
        ROOT %sliced = f32[1,65536] fusion-done(%two)
    """
    found = predict(program(text, computations), HOST)
    assert found.busy_s == {TO_HOST: 2, FROM_HOST: 2} and found.step_s == 4  # kernels, one after the other
    copies = hlo_costs.read_host_copies(program(text, computations))
    assert [copy.by_kernel for copy in copies] == [True, True] and all(copy.alone for copy in copies)
    assert "512 KiB (100%) by kernels" in check_copies(program(text, computations)).found
    # Of slices whose places are known, copy engines take both at once.
    place = ', backend_config={"dynamic_slice_config":{"byte_offset":"0","byte_stride":"0"}}'
    annotated = computations.replace("%i, %i)\n", f"%i, %i){place}\n").replace("={1,65536}", "={1,65536}" + place)
    by_engines = program(text, annotated)
    assert predict(by_engines, HOST).step_s == 2 and "kernels" not in check_copies(by_engines).found
    on_device = predict(program(text.replace("S(5)", "S(0)"), computations), HOST)  # as jax 0.12 writes them
    assert set(on_device.busy_s) == {COPIES} and on_device.step_s < found.step_s
    other = """
        %row = f32[1,65536] parameter(0)
        %start = ((f32[1,65536]), f32[1,65536], u32[]) fusion-start(%row), kind=kLoop, calls=%computing
        ROOT %done = f32[1,65536] fusion-done(%start)
    """
    with pytest.raises(ValueError, match="asynchronous fusion"):
        predict(program(other, computations), HOST)


def test_an_asynchronous_copy_on_the_device_overlaps_with_computation():
    text = f"""
        %x = f32[1048576] parameter(0)
        %a = bf16[1024,1024] parameter(1)
        %start = (f32[1048576]{{0:S(1)}}, f32[1048576], u32[]) copy-start(%x)
        {DOT}
        ROOT %done = f32[1048576]{{0:S(1)}} copy-done(%start)
    """
    assert predict(program(text), HOST).busy_s == {COPIES: pytest.approx(4 / 6), COMPUTE: 2, STARTS: 0}


def test_products_of_f32_have_their_own_rate():
    text = "%a = T[1024,1024] parameter(0)\nROOT %c = T[1024,1024] dot(%a, %a), lhs_contracting_dims={1}"
    assert predict(program(text.replace("T[", "bf16[")), HOST).busy_s[COMPUTE] == 2
    assert predict(program(text.replace("T[", "f32[")), HOST).busy_s[COMPUTE] == 4
    with pytest.raises(ValueError, match="the rate of products of f64 is unknown"):
        predict(program(text.replace("T[", "f64[")), HOST)


def test_flops_of_the_convolutions_that_are_products_on_tpus():
    for lhs, rhs, result, window, labels, flops in [
        ("64,32", "32,16", "64,16", "", "bf_io->bf", 2 * 64 * 32 * 16),
        ("2,64,32", "32,16,1", "2,64,16", "window={size=1}, ", "0bf_io0->0bf", 2 * 2 * 64 * 32 * 16),
        ("2,64,32", "2,64,16", "32,16", "window={size=2}, ", "0fb_0io->bf0", 2 * 2 * 64 * 32 * 16),
        # Heads as a window with stride 7 over an input with 7 holes between elements: each result reads one element.
        ("8,4,32", "8,16,32", "8,4,16", "window={size=8 stride=7 lhs_dilate=8}, ", "0bf_0oi->0bf", 2 * 8 * 4 * 32 * 16),
        # At either end only two of the three elements of the window are inside: 3 x 10 - 2 pairs.
        ("1,10,4", "3,4,5", "1,10,5", "window={size=3 pad=1_1}, ", "b0f_0io->b0f", 2 * 5 * 4 * 28),
        # With stride 2, the last of the five windows has one element behind the end.
        ("1,10,4", "3,4,5", "1,5,5", "window={size=3 stride=2 pad=0_1}, ", "b0f_0io->b0f", 2 * 5 * 4 * 14),
    ]:
        result = ",".join(result.split(",") + ["1"] * (labels.endswith("bf0")))
        text = f"""
            %a = bf16[{lhs}] parameter(0)
            %b = bf16[{rhs}] parameter(1)
            ROOT %c = bf16[{result}] convolution(%a, %b), {window}dim_labels={labels}
        """
        assert hlo_costs.dot_flops(program(text).entry.root) == flops


IMAGE, FILTER, RESULT = "2,8,8,GROUPED", "6,3,3,4", "2,8,4,6"


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("name", "first", "second", "result"),
    [
        ("convForward", IMAGE, FILTER, RESULT),
        ("convBiasActivationForward", IMAGE, FILTER, RESULT),
        ("convForwardGraph", IMAGE, FILTER, RESULT),
        ("convBackwardInput", RESULT, FILTER, IMAGE),
        ("convBackwardFilter", IMAGE, RESULT, FILTER),
    ],
)
def test_flops_of_convolutions_by_cudnn(name, first, second, result, groups):
    """In rows, 3 x 8 - 2 pairs of result and image; in columns, with stride 2 and one pad, 3 x 4 - 1."""
    text = f"""
        %a = bf16[{first}] parameter(0)
        %b = bf16[{second}] parameter(1)
        ROOT %c = (bf16[{result}], u8[0]) custom-call(%a, %b), \
window={{size=3x3 stride=1x2 pad=1_1x1_0}}, dim_labels=b01f_o01i->b01f, feature_group_count={groups}, \
custom_call_target="__cudnn${name}"
    """.replace("GROUPED", str(4 * groups))
    root = program(text).entry.root
    assert hlo_costs.dot_flops(root) == 2 * 2 * 6 * 4 * 22 * 11
    sizes = {IMAGE: 2 * 8 * 8 * 4 * groups, FILTER: 6 * 3 * 3 * 4, RESULT: 2 * 8 * 4 * 6}
    assert hlo_costs.memory_bytes(root) == 2 * sum(sizes.values())


def test_causal_attention_counts_half():
    text = """
        %q = bf16[2,128,4,64] parameter(0)
        ROOT %o = (bf16[2,128,4,64], u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"cudnn_fmha_backend_config":{"mask_type": "MASK", "intermediate_tensor_shape":{"dimensions":\
["2","4","128","128"]}}}
    """
    full, causal = (hlo_costs.dot_flops(program(text.replace("MASK", m)).entry.root) for m in ("NO_MASK", "CAUSAL"))
    assert full == 2 * causal == 2 * 2 * 2 * 4 * 128 * 128 * 64


def test_fusions_on_tpus_compute_while_the_collective_that_they_contain_runs():
    """Four clones of an all-gather of 2 MiB, which takes 7 s along a line of eight; one multiplies, two add."""
    clone = """
%NAME (...) -> ... {
  %p = bf16[128,1024]{1,0} parameter(0)
  %q = bf16[1024,1024]{1,0:S(1)} parameter(1)
  %g = bf16[1024,1024] all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="0"}
  %r = bf16[1024,1024] OP
  ROOT %both = (bf16[1024,1024], bf16[1024,1024], bf16[128,1024]) tuple(%r, %g, %p)
}
"""
    product = "convolution(%q, %q), dim_labels=bf_io->bf"
    computations = "".join(
        clone.replace("NAME", name).replace("OP", op)
        for name, op in (
            ("first", "bitcast(%g)"),
            ("second", product),
            ("third", "add(%q, %q)"),
            ("last", "add(%q, %q)"),
        )
    )
    text = """
        %p = bf16[128,1024] parameter(0)
        %q = bf16[1024,1024] parameter(1)
        %a = (bf16[1024,1024], bf16[1024,1024], bf16[128,1024]) fusion(%p, %q), kind=kCustom, calls=%first
        %b = (bf16[1024,1024], bf16[1024,1024], bf16[128,1024]) fusion(%p, %q), kind=kCustom, calls=%second
        %c = (bf16[1024,1024], bf16[1024,1024], bf16[128,1024]) fusion(%p, %q), kind=kCustom, calls=%third
        ROOT %d = (bf16[1024,1024], bf16[1024,1024], bf16[128,1024]) fusion(%p, %q), kind=kCustom, calls=%last
    """
    slice_of_tpus = Cluster("a line", CHIP, 8, 4, torus=(8, 1))
    found = predict(program(text, computations), slice_of_tpus)
    vectors = pytest.approx(2 * 2 / 6)  # reading vector memory takes no time
    assert found.busy_s == {torus_links(0): 7, COMPUTE: 2, MEMORY: vectors, STARTS: 0}
    assert found.step_s == 7
    assert [span.name for span in found.spans] == ["all-gather", "b", "c", "d"]


def test_all_gathers_along_two_dims_of_a_torus_do_not_wait_for_each_other():
    """The indices along the first dim of a slice of 4 x 2 are 0, 2, 4, 6."""
    square = Cluster("4 x 2", CHIP, 8, 4, torus=(4, 2))
    gather = """
        %s.NAME = bf16[SIZE,1024] parameter(NUMBER)
        %start.NAME = (bf16[SIZE,1024], BIG) all-gather-start(%s.NAME), replica_groups=GROUPS, dimensions={0}
    """.replace("BIG", "bf16[1024,1024]")
    done = "%done.NAME = bf16[1024,1024] all-gather-done(%start.NAME)"
    write = lambda text, name, number, size, groups: (
        text.replace("NAME", name).replace("NUMBER", number).replace("SIZE", size).replace("GROUPS", groups)
    )
    rows = ("rows", "0", "256", "{{0,2,4,6},{1,3,5,7}}")
    columns = ("columns", "1", "512", "{{0,1},{2,3},{4,5},{6,7}}")
    for second, at_once in ((columns, True), (("more", *rows[1:]), False)):
        text = "\n".join(write(part, *which) for part in (gather, done) for which in (rows, second))
        text = text.replace("parameter(0)", "parameter(1)", 1).replace("%done." + second[0], "ROOT %done." + second[0])
        found = predict(program(text), square)
        each = {"rows": 2 * 3 / 4 * 4, "columns": 2 * 1 / 2 * 4, "more": 2 * 3 / 4 * 4}
        seconds = each["rows"], each[second[0]]
        assert found.step_s == pytest.approx(max(seconds) if at_once else sum(seconds))


@pytest.mark.parametrize(
    ("work", "lane", "seconds"),
    [
        (
            "all-gather(%part), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
            INSIDE_HOST,
            2 / 1 * 7 / 8 * 4,
        ),
        (
            "concatenate(%part, %part, %part, %part, %part, %part, %part, %part), dimensions={0}",
            COPIES,
            (2 + 1 / 4) / 6,
        ),
    ],
    ids=["collective", "other"],
)
def test_what_a_sparse_core_does_runs_beside_the_computation(work, lane, seconds):
    computations = f"""
%on_sparse_core (...) -> bf16[1024,1024] {{
  %part = bf16[128,1024] parameter(0)
  ROOT %w = bf16[1024,1024] {work}
}}, execution_thread="sparsecore"
"""
    text = f"""
        %p = bf16[128,1024] parameter(0)
        %a = bf16[1024,1024] parameter(1)
        %ready = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"
        %start = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%on_sparse_core
        %update = ((bf16[128,1024]), bf16[1024,1024]) call-update(%start, %p)
        {DOT}
        ROOT %done = bf16[1024,1024] call-done(%update)
    """
    found = predict(program(text, computations), HOST)
    assert found.busy_s[lane] == pytest.approx(seconds)
    assert found.step_s == pytest.approx(max(seconds, found.computing_s))


@pytest.mark.parametrize("place", ["AFTER", "BEFORE"])
def test_a_sum_over_slices_runs_beside_a_product(place):
    """It begins with the transfer to the host, long before its `recv`, and the text is that of one of two slices."""
    two_slices = Cluster("two slices", CHIP, 8, 4, (2, 2))
    text = between_slices("ALL_REDUCE", '"{1,2}x{0:3}"', **{place: DOT.replace("%a", "%q")})
    found = predict(text, two_slices)
    assert (found.step_s, found.products_s) == pytest.approx((4, 2))  # 1/4 MiB at 1/16 MiB/s
    assert dict(found.busy_s)[BETWEEN_SLICES] == pytest.approx(4)
    with pytest.raises(ValueError, match="4 devices, not 8"):
        predict(text, HOST)


def test_of_branches_the_longest_counts():
    """Each device runs its own, and a gather meanwhile."""
    of = lambda count: "\n".join(f"  {DOT.replace('%dot', f'%dot.{k}')}" for k in range(count))
    branches = "".join(
        f"""
%branch.{count} (...) -> bf16[1024,1024] {{
  %a = bf16[1024,1024] parameter(0)
{of(count)}
  ROOT %result = bf16[1024,1024] bitcast(%dot.{count - 1})
}}
"""
        for count in (1, 4)
    )
    conditional = "%c = bf16[1024,1024] conditional(%i, %a, %a), branch_computations={%branch.1, %branch.4}"
    found = predict(program(f"%i = s32[] parameter(2)\n{GATHER.replace('OVERLAPPED', conditional)}", branches), HOST)
    assert (found.step_s, found.products_s) == pytest.approx((8 + 2 * 2 / 6, 8))


def test_a_step_is_bound_by_its_busiest_lane():
    heavy = "\n".join(f"{DOT.replace('%dot', f'%dot.{k}')}" for k in range(5))
    assert predict(program(GATHER.replace("OVERLAPPED", heavy)), HOST).bound_by == COMPUTE
    wide = "\n".join(f"%add.{k} = bf16[1024,1024] add(%a, %a)" for k in range(15))
    assert predict(program(GATHER.replace("OVERLAPPED", wide)), HOST).bound_by == MEMORY
    assert predict(program(GATHER.replace("OVERLAPPED", "")), slower(kernel_s=9)).bound_by == STARTS
    assert predict(program(HOST_COPIES.replace("OVERLAPPED", "")), HOST).bound_by == TO_HOST


def test_programs_that_are_not_understood_are_rejected():
    for read, message in [
        (lambda: loop(BODY, None), "trip count"),
        (lambda: program("%p = f32[2] parameter(0)\nROOT %a = f32[2] negate(%p)", num_devices=4), "4 devices, not 8"),
        (lambda: program('ROOT %c = f32[2] custom-call(), custom_call_target="x"'), "the time of this custom call"),
        (lambda: program("%p = f32[2] parameter(0)\nROOT %s = ((f32[2]), f32[2]) async-start(%p)"), "the time of"),
        (lambda: program("%p = f32[2] parameter(0)\nROOT %c = f32[2]{0:S(5)} copy(%p)"), "not a copy"),
        (lambda: program("%p = f32[2] parameter(0)\nROOT %d = f32[2] copy-done(%p)"), "an end has no start"),
    ]:
        with pytest.raises(ValueError, match=message):
            predict(read(), HOST)
