"""The two ceilings of a device, measured: matrix products and memory."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

DEFAULT_PATH = Path("~/.cache/zerojax/calibration.json")
# (width of the square matrices, elements of the vector). An accelerator reaches its rates with large ones only.
_LARGE, _SMALL = (8192, 2**28), (512, 2**22)
# The clock of a GPU falls within a second or two of full load, so the first runs are not counted.
_WARM_S, _NUM_RUNS, _RUN_S = 2.0, 9, 0.2


def calibrate(path: str | Path = DEFAULT_PATH, *, warm_s: float = _WARM_S) -> dict[str, Any]:
    """Measures the default device and writes what `hardware.cluster(..., calibration=path)` reads.

    Products are of random bf16 matrices, because a GPU computes faster on constant ones. Both are medians of runs of
    many operations each, after a load that lasts until clocks have settled. Of simulated devices one is measured, which
    has the processor to itself.

    Args:
        path: the file; its folder is made.
        warm_s: seconds of load before the first run that counts.

    Returns:
        What is in the file: the device's kind, versions, the date; and a second `flops`, and `memory_rate`, the bytes
        read and written.
    """
    device = jax.devices()[0]
    width, elements = _SMALL if device.platform == "cpu" else _LARGE
    matrix = (
        jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) * width**-0.5
    )  # its powers stay as large
    vector = jnp.zeros(elements, jnp.float32)
    measured = {
        "device_kind": device.device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "date": datetime.date.today().isoformat(),
        "flops": 2 * width**3 / _seconds(lambda last, x: last @ x, matrix, warm_s),
        "memory_rate": 2 * vector.nbytes / _seconds(lambda last, _: last + 1, vector, warm_s),
    }
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=2) + "\n")
    return measured


def _seconds(operation: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, warm_s: float) -> float:
    """Of `operation(its last result, x)`, among as many after each other in a loop as take `_RUN_S`."""

    @jax.jit
    def repeat(x: jax.Array, count: int) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, last: operation(last, x).astype(x.dtype), x)

    def run(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(repeat(x, count))
        return time.perf_counter() - start

    run(1)  # compiles
    count = max(1, round(_RUN_S / (run(4) / 4)))
    for _ in range(round(warm_s / _RUN_S)):
        run(count)
    return statistics.median(run(count) for _ in range(_NUM_RUNS)) / count
