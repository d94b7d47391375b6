"""Changes of a step's settings that save memory, or that use free memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from zerojax.plan.job import Settings

REMATS = ("none", "dots", "full", "offload")  # from the most memory to the least

Change = tuple[str, Settings, int]


def memory_reductions(settings: Settings, num_devices: int) -> Iterator[Change]:
    """Yields what may save memory: (its text, the settings, the number of devices)."""
    change = functools.partial(dataclasses.replace, settings)
    if settings.stage < 3 and num_devices > 1:
        yield "stage 3", change(stage=3), num_devices
    for remat in REMATS[REMATS.index(settings.remat) + 1 :] if settings.remat in REMATS else ():
        yield f"remat={remat!r}", change(remat=remat), num_devices
    if settings.offload == "none":
        offloaded = change(offload="optimizer")
        yield "offload='optimizer' (its state in host memory)", offloaded, num_devices
    if settings.offload != "params" and settings.replica == 1 and (settings.stage == 3 or num_devices == 1):
        yield "offload='params' (all of the state in host memory)", change(offload="params"), num_devices
    bits = settings.moment_bits or 8
    if settings.moment_bits is None:
        yield "zerojax.low_bit_moments(tx) (rounded to 8 bits)", change(moment_bits=bits), num_devices
    if settings.precision == "bf16":
        both = change(moment_bits=bits, precision="bf16_params")
        yield f"precision='bf16_params' and {bits}-bit moments (no master copy)", both, num_devices
    if settings.rows and settings.rows % 2 == 0:
        twice = 2 * settings.num_microbatches
        halved = change(rows=settings.rows // 2, num_microbatches=twice)
        yield f"{twice} microbatches of {settings.rows // 2} rows", halved, num_devices
    if settings.stage in (1, 2) and settings.bucket_bytes is None:
        yield "bucket_bytes=2**28 (moves stacks in pieces)", change(bucket_bytes=2**28), num_devices
    if settings.prefetch:
        yield "prefetch=0 (each unit waits for its weights)", change(prefetch=0), num_devices
    if settings.stage:
        yield f"{4 * num_devices} devices", settings, 4 * num_devices


def uses_of_free_memory(settings: Settings, num_devices: int) -> Iterator[Change]:
    """Yields what may make a step faster that has free memory; see `memory_reductions`."""
    change = functools.partial(dataclasses.replace, settings)
    if settings.offload == "params":
        yield "offload='optimizer' (no copies of weights)", change(offload="optimizer"), num_devices
    if settings.offload != "none":
        yield "offload='none' (no copies of the optimizer's state)", change(offload="none"), num_devices
    for remat in REMATS[: REMATS.index(settings.remat)] if settings.remat in REMATS else ():
        yield f"remat={remat!r} (less recomputation)", change(remat=remat), num_devices
    if settings.rows:
        yield (
            f"{2 * settings.rows} rows (twice the work for the same communication)",
            change(rows=2 * settings.rows),
            num_devices,
        )
    if settings.stage and num_devices > 1:  # one device has all and sends nothing, at every stage
        lower = settings.stage - 1
        yield f"stage {lower}{' (less communication)' * (settings.stage == 3)}", change(stage=lower), num_devices
