"""Reads the collectives between TPU slices in a compiled program, where they are transfers over the hosts.

The program is that of the chips of one slice. A chip sends its operand to its host, the hosts run the collective over
the network, and the chip receives the result:

    %send = send(%operand, %token), _xla_host_transfer_rendezvous="psum.1_0",
              _xla_megascale_transfer_type="ALL_REDUCE", _xla_megascale_target="{1,2}x{0:3}"
    %recv = recv(%token), _xla_host_transfer_rendezvous="psum.1_0", ..
    %done = recv-done(%recv)

The target names slices, counted from 1, and chips of a slice: here chip k of slice 1 and chip k of slice 2 are a group,
for k from 0 to 3. Other groups are lists of devices: `{{100002,200002},..}` is chip 2 of slices 1 and 2.
"""

from __future__ import annotations

import dataclasses
import re

from zerojax.analysis.hlo import Block, Instruction, attribute, unsupported

_OPS = frozenset(["send", "recv", "send-done", "recv-done"])
_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
_SLICE = 100_000  # a device is _SLICE times its slice, counted from 1, plus its number in the slice


def is_transfer(i: Instruction) -> bool:
    """Whether an instruction is a part of a collective between slices."""
    return i.op in _OPS and 'handler_name="xla_megascale_runtime"' in i.attributes


def is_between_slices(collective: Instruction) -> bool:
    """Whether a collective is one of `as_collective`."""
    return "_xla_megascale_target=" in collective.attributes


def as_collective(send: Instruction) -> Instruction:
    """The collective that starts with a transfer to the host, with the operand of that transfer."""
    kind = attribute(r'_xla_megascale_transfer_type="(\w+)"', send)
    if kind not in _KINDS:
        raise unsupported(send, f"cannot read a transfer between slices of type {kind}")
    return dataclasses.replace(send, op=_KINDS[kind], operands=send.operands[:1])


def done_index(block: Block, start: int) -> int:
    """The index of the instruction that waits for the result of the collective that starts at index `start`."""
    rendezvous = lambda i: attribute(r'_xla_host_transfer_rendezvous="([^"]*)"', i)
    name = rendezvous(block.instructions[start])
    for k in range(start + 1, len(block.instructions)):
        i = block.instructions[k]
        if i.op == "recv-done" and is_transfer(i.operands[0]) and rendezvous(i.operands[0]) == name:
            return k
    raise unsupported(block.instructions[start], "a transfer between slices has no end in the same computation")


def slice_groups(collective: Instruction, num_devices: int) -> list[tuple[int, ...]]:
    """The devices of each group, or the pairs of a permutation, as in `hlo_collectives.groups`.

    Args:
        collective: of `as_collective`.
        num_devices: the number of devices of a slice. Device k of slice s, counted from 0, has the index
            s * num_devices + k.

    Raises:
        ValueError: if a group has several devices of a slice, but not all: their order is not in the text.
    """
    target = attribute(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\})', collective)
    compact = re.fullmatch(r'"\{([\d,]+)\}x\{(\d+):(\d+)\}"', target)
    if compact:
        slices, first, last = [int(n) for n in compact[1].split(",")], int(compact[2]), int(compact[3])
        return [tuple((s - 1) * num_devices + k for s in slices) for k in range(first, last + 1)]
    listed = [[int(n) for n in re.findall(r"\d+", group)] for group in re.findall(r"\{([\d,>-]+)\}", target)]
    if not listed:
        raise unsupported(collective, "cannot read the target of a transfer between slices")
    return [_group(collective, devices, num_devices) for devices in listed]


def _group(collective: Instruction, devices: list[int], num_devices: int) -> tuple[int, ...]:
    of_slice: dict[int, list[int]] = {}
    for device in devices:
        of_slice.setdefault(device // _SLICE - 1, []).append(device % _SLICE)
    counts = {len(chips) for chips in of_slice.values()}
    if counts == {num_devices}:
        return tuple(s * num_devices + k for s in of_slice for k in range(num_devices))
    if counts == {1}:
        return tuple(s * num_devices + chip for s, (chip,) in of_slice.items())
    raise unsupported(collective, "a group has several devices of a slice, but not all")
