"""An audit finds slices of host buffers that a compiled program copies from other places than their indices say.

The programs in `support/data/` are described in `analysis/test_hlo_slices.py`.
"""

import re

import pytest
from support.paths import DATA

from zerojax.analysis import hlo
from zerojax.analysis.audit import check_offloaded_slices
from zerojax.analysis.findings import Unreadable, Verdict

OLD, NEW = "0.10.2", "0.12.0.1"


def text(version, prefetch=0):
    return (DATA / f"host_slices_{version}_prefetch_{prefetch}.txt").read_text()


def outcome(text):
    return check_offloaded_slices(hlo.parse_program(text))


@pytest.mark.parametrize(
    ("prefetch", "found"),
    [
        (0, "reads bf16[9,512,256] starts at slice 1 with step +1, and its index starts at slice 7 with step -1"),
        (1, "reads bf16[3,512,256] starts at slice 0 with step +1, and its index starts at slice 2 with step -1"),
    ],
)
def test_the_planted_walk_of_a_backward_loop_is_found(prefetch, found):
    broken = outcome(text(OLD, prefetch))
    assert broken.verdict is Verdict.BROKEN and found in broken.found
    assert broken.numbers["wrong"] == 1
    assert "jax>=0.11.1" in broken.fix and "'xla_disable_hlo_passes': 'dynamic-slice-annotator'" in broken.fix


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_corrected_program_passes(prefetch):
    passed = outcome(text(NEW, prefetch))
    assert passed.verdict is Verdict.OK and passed.numbers["annotated"] == 2 + prefetch and not passed.numbers["wrong"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_program_without_the_pass_passes(prefetch):
    passed = outcome(re.sub(r', backend_config=\{"dynamic_slice_config.*', "", text(OLD, prefetch)))
    assert passed.verdict is Verdict.OK and not passed.numbers["annotated"]


def test_a_walk_that_is_planted_in_the_newest_program_is_found():
    """Also where values are written."""
    forwards = '"linear":{"byte_offset":"262144","byte_stride":"262144"}'
    planted = text(NEW).replace('"linear":{"byte_offset":"1835008","byte_stride":"-262144"}', forwards)
    assert "reads bf16[9,512,256] starts at slice 1 with step +1" in outcome(planted).found
    planted = text(NEW).replace('"linear":{"byte_offset":"0","byte_stride":"262144"}', forwards)
    broken = outcome(planted)
    assert (
        broken.verdict is Verdict.BROKEN and "writes bf16[9,512,256] is at slices 1, 2, 3, 4, 5, 6, ..." in broken.found
    )


def test_an_annotation_that_cannot_be_compared_is_not_passed_over():
    """The index of the read has become a value that only the run knows."""
    hidden = text(NEW).replace(
        "%loop_subtract_fusion = s32[] fusion(%get-tuple-element.239), kind=kLoop, calls=%fused_subtract",
        "%loop_subtract_fusion = s32[] replica-id()",
    )
    assert hidden != text(NEW)
    with pytest.raises(Unreadable, match=r"dynamic_slice\.46\.1 cannot be compared .*\n?.*replica-id"):
        outcome(hidden)
