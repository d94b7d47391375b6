"""Copies between device and host in programs: their bytes, and what is computed beside them."""

import pytest
from support.hlo_text import MIB, loop, program

from zerojax.analysis.hlo_costs import FROM_HOST, TO_HOST, HostCopy, copied_in_host, read_host_copies

COMPUTATIONS = """
%adding (...) -> ... {
  %x = f32[262144] parameter(0)
  ROOT %sum = f32[262144] add(%x, %x)
}

%counting (...) -> ... {
  %n = s32[] parameter(0)
  ROOT %sum = s32[] add(%n, %n)
}
"""
COPIES = """
%x = f32[262144] parameter(0)
%kept = f32[262144]{0:S(5)} parameter(1)
%n = s32[] parameter(2)
%a = bf16[1024,1024] parameter(3)
%out = (f32[262144]{0:S(5)}, f32[262144], u32[]) copy-start(%x)
%in = (f32[262144], f32[262144]{0:S(5)}, u32[]) copy-start(%kept)
BESIDE
%back = f32[262144] copy-done(%in)
%gone = f32[262144]{0:S(5)} copy-done(%out)
ROOT %r = (f32[262144], f32[262144]{0:S(5)}) tuple(%back, %gone)
"""


@pytest.mark.parametrize(
    ("beside", "alone"),
    [
        ("", True),
        ("%y = s32[] fusion(%n), kind=kLoop, calls=%counting", True),
        ("%y = f32[262144] fusion(%x), kind=kLoop, calls=%adding", False),
        ("%y = bf16[1024,1024] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}", False),
    ],
    ids=["nothing", "index", "update", "product"],
)
def test_a_copy_is_alone_without_a_product_or_a_kernel_as_large_as_itself(beside, alone):
    found = read_host_copies(program(COPIES.replace("BESIDE", beside), COMPUTATIONS))
    assert found == [HostCopy("out", TO_HOST, MIB, alone, False), HostCopy("in", FROM_HOST, MIB, alone, False)]
    on_device = COPIES.replace("BESIDE", beside).replace(":S(5)", "")
    assert read_host_copies(program(on_device, COMPUTATIONS)) == []


HOST, BY_HOST = "(f32[262144]{0:S(5)})", 'custom_call_target="HostExecute", called_computations={%counting}'


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("%y = f32[262144]{0:S(5)} copy(%kept)", MIB),
        ("%y = (f32[262144]{0:S(5)}, f32[262144]{0:S(5)}, u32[]) copy-start(%kept)", MIB),
        (f"%y = ({HOST}, {HOST}, u32[]) custom-call-start(%kept), {BY_HOST}", MIB),
        ("%y = f32[262144] copy(%x)", 0),
    ],
    ids=["copy", "asynchronous", "by the host", "on the device"],
)
def test_copies_within_host_memory_are_counted(line, num_bytes):
    """Those between host and device, which are in the same program, are not."""
    assert copied_in_host(program(COPIES.replace("BESIDE", line), COMPUTATIONS)) == num_bytes


@pytest.mark.parametrize("product", [True, False])
def test_copies_of_a_loop_count_for_every_iteration(product):
    dot = "%y = f32[1024,1024] dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}" if product else ""
    body = f"""
        %next = s32[] add(%i, %i)
        %out = (f32[1024,1024]{{1,0:S(5)}}, f32[1024,1024], u32[]) copy-start(%w)
        %gone = f32[1024,1024]{{1,0:S(5)}} copy-done(%out)
        {dot}
        ROOT %after = (s32[], f32[1024,1024]) tuple(%next, %w)
    """
    assert read_host_copies(loop(body, 7)) == [HostCopy("out", TO_HOST, 7 * 4 * MIB, True, product)]
    with pytest.raises(ValueError, match="trip count"):
        read_host_copies(loop(body, 0))
