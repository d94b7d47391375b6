"""Slices of host buffers start where the loops of the program say, and where the compiler has annotated them.

`support/data/host_slices_VERSION_prefetch_N.txt` are programs for eight H100s, compiled by jax 0.10.2 and 0.12.0.1:
nine scanned layers of width 256, 512 rows, bf16, stage 3, offloaded inputs, with the pass that annotates slices. They
are cut down to the slices of host buffers and the counters that these depend on; other values have become
`AllocateBuffer`.
"""

import re

import numpy as np
import pytest
from support.hlo_text import loop, program
from support.paths import DATA

from zerojax.analysis import hlo, host_slices

OLD, NEW = "0.10.2", "0.12.0.1"


def text(version, prefetch):
    return (DATA / f"host_slices_{version}_prefetch_{prefetch}.txt").read_text()


def walks(text):
    """(whether it writes, the slices by the index, the slices by the annotation) of each host slice of stacks."""
    found = host_slices.host_slices(hlo.parse_program(text))
    slices = lambda each, offsets: offsets and [offset // each.slice_bytes for offset in offsets]
    stacks = [each for each in found if len(each.buffer.dims) == 3]
    return [(each.writes, slices(each, each.indexed), slices(each, each.annotated)) for each in stacks]


UP, DOWN = [*range(9)], [*range(7, -1, -1)]


@pytest.mark.parametrize(
    ("version", "read"), [(OLD, [1, 2, 3, 4, 5, 6, 7, 8]), (NEW, DOWN)], ids=["planted", "corrected"]
)
def test_a_backward_loop_reads_from_the_last_layer_to_the_first(version, read):
    """The first iteration is peeled off, and reads slice 8 at a constant index."""
    assert walks(text(version, 0)) == [(True, UP, UP), (False, [8], None), (False, DOWN, read)]


@pytest.mark.parametrize(("version", "read"), [(OLD, [0, 1, 2]), (NEW, [2, 1, 0])], ids=["planted", "corrected"])
def test_an_index_may_come_from_an_array_and_be_limited(version, read):
    """With `prefetch=1` the loop has two layers an iteration. The next layer's values are fetched at max(1 - i, 0)."""
    stored = (True, [0, 1, 2], [0, 1, 2])
    last = (False, [2], None)
    assert walks(text(version, 1)) == [stored, stored, last, (False, [2, 1, 0], read), (False, [1, 0, 0], None)]


def test_without_annotations_the_indices_are_read():
    plain = re.sub(r', backend_config=\{"dynamic_slice_config.*', "", text(OLD, 0))
    assert walks(plain) == [(True, UP, None), (False, [8], None), (False, DOWN, None)]


def annotated(config, index="%i", layout="1,0"):
    """A program with a loop of four iterations that reads row `index` of `bf16[4,8]` in host memory."""
    body = f"""
        %zero = s32[] constant(0)
        %one = s32[] constant(1)
        %next = s32[] add(%i, %one)
        %last = s32[] constant(3)
        %beyond = s32[] add(%next, %i)
        %down = s32[] subtract(%last, %i)
        %unknown = s32[] custom-call(), custom_call_target="Random"
        %host = bf16[4,8]{{{layout}:S(5)}} custom-call(), custom_call_target="AllocateBuffer"
        %read = bf16[1,8]{{1,0}} dynamic-slice(%host, {index}, %zero), dynamic_slice_sizes={{1,8}}{config}
        ROOT %result = (s32[], f32[1024,1024]) tuple(%next, %w)
    """
    return loop(body, trips=4, init="%start = s32[] constant(0)")


def config(text):
    return f', backend_config={{"other":"0","dynamic_slice_config":{{{text}}}}}'


def test_all_forms_of_an_annotation_are_read():
    for text, offsets in [
        ('"loop_index":"0","byte_offset":"48","byte_stride":"-16"', (48, 32, 16, 0)),
        (
            '"loop_index":"0","byte_offset":"0","byte_stride":"0","linear":{"byte_offset":"48","byte_stride":"-16"}',
            (48, 32, 16, 0),
        ),
        ('"loop_index":"0","table":{"offsets":["16","0","0","48"]}', (16, 0, 0, 48)),
        ('"byte_offset":"32","byte_stride":"0"', (32, 32, 32, 32)),
        ('"loop_index":"0","byte_offset":"16","byte_stride":"32"', (16, 48, 48, 48)),  # no slice reaches beyond the end
    ]:
        (found,) = host_slices.host_slices(annotated(config(text), "%down"))
        assert (found.indexed, found.annotated) == ((48, 32, 16, 0), offsets)


def test_an_index_beyond_the_end_reads_the_last_slice():
    (found,) = host_slices.host_slices(annotated("", "%beyond"))  # 1, 3, 5, 7
    assert (found.indexed, found.annotated) == ((16, 48, 48, 48), None)


def test_offsets_depend_on_the_layout():
    """Rows of a buffer whose columns are contiguous start one element apart."""
    (found,) = host_slices.host_slices(annotated("", "%down", layout="0,1"))
    assert found.indexed == (6, 4, 2, 0)


def test_an_index_that_is_not_made_of_counters_has_a_reason():
    (found,) = host_slices.host_slices(annotated(config('"byte_offset":"0","byte_stride":"0"'), "%unknown"))
    assert found.indexed is None and "custom-call %unknown" in found.unread


def test_what_is_not_understood_is_refused():
    for made, message in [
        (lambda: annotated(config('"loop_index":"1","byte_offset":"0","byte_stride":"0"')), "cannot read the annot"),
        (lambda: annotated(config('"loop_index":"0","quadratic":{}')), "cannot read the annotation"),
        (lambda: program(BRANCH, READS), "in a branch"),
        (lambda: program(CALL), "may read or write a part"),
        (lambda: program(COPY), "annotation of something else"),
    ]:
        with pytest.raises(ValueError, match=message):
            host_slices.host_slices(made())


READS = """
%reads (...) -> ... {
  %host = bf16[4,8]{1,0:S(5)} parameter(0)
  %zero = s32[] constant(0)
  ROOT %read = bf16[1,8]{1,0} dynamic-slice(%host, %zero, %zero), dynamic_slice_sizes={1,8}
}
"""
HOST = '%host = bf16[4,8]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"'
BRANCH = f"""
    {HOST}
    %which = s32[] constant(0)
    ROOT %out = bf16[1,8] conditional(%which, %host), branch_computations={{%reads}}
"""
CALL = f"""
    {HOST}
    ROOT %out = bf16[1,8] custom-call(%host), custom_call_target="ReadsASlice"
"""
COPY = f"""
    {HOST}
    ROOT %out = bf16[4,8] copy(%host), backend_config={{"dynamic_slice_config":{{"byte_offset":"0"}}}}
"""


SIGN = """
    %%x = f32[] parameter(0)
    %%s = f32[] sign(%%x)
    %%n = f32[] constant(%s)
    ROOT %%c = pred[] compare(%%s, %%n), direction=%s
"""
SIGN_IN_BF16 = """
    %x = f32[1] parameter(0)
    %s = f32[1] sign(%x)
    %b = bf16[1] convert(%s)
    %n = bf16[1] constant({1})
    ROOT %c = pred[1] compare(%b, %n), direction=GT
"""


def test_integers_are_evaluated_as_the_program_would():
    for lines, value in [
        ("ROOT %a = s32[4]{0} constant({3, -1, 4, 1})", [3, -1, 4, 1]),
        ("ROOT %a = s32[2,3]{1,0} iota(), iota_dimension=1", [[0, 1, 2], [0, 1, 2]]),
        ("%a = u32[] constant(3)\n%b = u32[] constant(5)\nROOT %c = u32[] subtract(%a, %b)", 2**32 - 2),
        ("%a = s32[] constant(-3)\nROOT %b = u8[] convert(%a)", 253),
        ("%a = s32[] constant(7)\n%b = s32[] constant(5)\nROOT %c = pred[] compare(%a, %b), direction=GE", True),
        ("%a = s32[3]{0} iota(), iota_dimension=0\nROOT %b = s32[3]{0} reverse(%a), dimensions={0}", [2, 1, 0]),
        ("%a = s32[5]{0} iota(), iota_dimension=0\nROOT %b = s32[2]{0} slice(%a), slice={[1:5:2]}", [1, 3]),
        ("%a = s32[2]{0} constant({1, 2})\nROOT %b = s32[2,2]{1,0} broadcast(%a), dimensions={0}", [[1, 1], [2, 2]]),
        ("%a = s32[1]{0} constant({6})\nROOT %b = s32[] bitcast(%a)", 6),
        ("%a = s32[] constant(-7)\n%b = s32[] constant(2)\nROOT %c = s32[] divide(%a, %b)", -3),
        ("%a = s32[] constant(-7)\n%b = s32[] constant(2)\nROOT %c = s32[] remainder(%a, %b)", -1),
        ("%a = s32[] constant(-7)\nROOT %b = s32[] sign(%a)", -1),
        ("%a = s32[] constant(-1)\n%b = s32[] constant(28)\nROOT %c = s32[] shift-right-logical(%a, %b)", 15),
        ("%a = s32[] constant(3)\n%b = s32[] constant(4)\nROOT %c = s32[] shift-left(%a, %b)", 48),
        (SIGN % ("1", "GT"), False),
        (SIGN_IN_BF16, False),
    ]:
        read = program(lines)
        found = host_slices.array(host_slices.run(read)[0])
        assert found.shape == read.entry.root.buffers[0].dims
        np.testing.assert_array_equal(found, value)


def test_a_value_that_the_text_does_not_have_is_refused():
    for lines, message in [
        ("ROOT %a = s32[] parameter(2)", "value of argument 2 of the program is not in the text"),
        ("ROOT %a = f32[] constant(1.5)", "not an integer, but f32"),
        ("ROOT %a = s32[] partition-id()", "cannot evaluate"),
        (SIGN % ("0", "GT"), "not an integer, but f32"),
        (SIGN % ("1", "GE"), "not an integer, but f32"),
        ("%a = s32[2,2]{1,0} constant({ {1, 2}, {3, 4} })\nROOT %b = s32[2,2]{0,1} bitcast(%a)", "depends on layouts"),
    ]:
        with pytest.raises(ValueError, match=message):
            host_slices.array(host_slices.run(program(lines))[0])
