"""Measures the rates of matrix products and of memory on a device of this machine."""

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
# (width of the square matrices, elements of the vector). An accelerator reaches its rates only with large ones.
_ACCELERATOR_SIZES, _CPU_SIZES = (8192, 2**28), (512, 2**22)
# The clock of a GPU drops within a second or two of full load, so the first runs do not count.
_WARM_S, _NUM_RUNS, _RUN_S = 2.0, 9, 0.2


def calibrate(path: str | Path = DEFAULT_PATH, *, warm_s: float = _WARM_S) -> dict[str, Any]:
    """Measures the default device, and writes the file that `hardware.cluster(..., calibration=path)` reads.

    The products are of random bf16 matrices, since a GPU multiplies constant ones faster. Each rate is the median of
    several runs of many operations, after a load that lasts until the clocks have settled. Of several simulated
    devices, only one is measured, which has the processor to itself.

    Args:
        path: the file. Missing folders are created.
        warm_s: seconds of load before the first run that counts.

    Returns:
        The content of the file: the kind of the device, versions, the date, `flops` per second, and `memory_rate`, the
        bytes read and written per second.
    """
    device = jax.devices()[0]
    width, elements = _CPU_SIZES if device.platform == "cpu" else _ACCELERATOR_SIZES
    # The scale keeps the powers of the matrix bounded.
    matrix = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) * width**-0.5
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
    """Returns the seconds of `operation(previous_result, x)`, run in a loop of about `_RUN_S` seconds."""

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
