"""The three batch sizes of DeepSpeed, of which two determine the third."""

from __future__ import annotations

from typing import NamedTuple

from zerojax.deepspeed.reading import Given

_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class BatchSizes(NamedTuple):
    """The rows of a batch over all devices, and the number of microbatches in which each device processes its own."""

    num_rows: int
    num_microbatches: int


def batch_sizes(given: Given, num_devices: int) -> BatchSizes:
    """The batch sizes by DeepSpeed's rule: the rows are those of a microbatch x accumulation steps x devices.

    Args:
        given: the configuration.
        num_devices: number of devices that the batch is divided over.

    Raises:
        ValueError: if the three do not agree, or neither the rows of the batch nor of a microbatch are given.
    """
    rows, micro, steps = (_count(given, name) for name in _NAMES)
    if rows is None and micro is None:
        raise ValueError(
            f"from_deepspeed: the batch size is missing\n"
            f"  got:      {_shown(given, num_devices)}\n"
            f'  fix:      give {_NAMES[0]} or {_NAMES[1]}; with "auto", in the argument `auto`'
        )
    if rows is None:
        assert micro is not None
        steps = 1 if steps is None else steps
        rows = micro * steps * num_devices
    elif steps is None:
        steps = 1 if micro is None else rows // micro // num_devices
    micro = rows // num_devices // max(steps, 1) if micro is None else micro
    if min(rows, micro, steps) < 1 or micro * steps * num_devices != rows:
        raise ValueError(
            f"from_deepspeed: the batch sizes do not agree\n"
            f"  got:      {_shown(given, num_devices)}; {micro} x {steps} x {num_devices} are not {rows}\n"
            f"  fix:      {_NAMES[0]} = {_NAMES[1]} x {_NAMES[2]} x devices; leave one of the three out"
        )
    return BatchSizes(rows, steps)


def _count(given: Given, name: str) -> int | None:
    """A number of rows or steps, or None. JSON may have it as 64.0, as in 6.4e1."""
    value = given.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)):
        return None if value is None else int(value)
    raise ValueError(f"from_deepspeed: {name} is {value!r}\n  fix:      a whole number")


def _shown(given: Given, num_devices: int) -> str:
    sizes = [f"{name} {given.get(name)}" for name in _NAMES if given.get(name) is not None]
    return ", ".join([*sizes, f"{num_devices} devices that divide the batch"])
