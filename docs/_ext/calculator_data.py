"""Writes the constants of zerojax that the calculator uses, so that the two cannot differ.

python docs/_ext/calculator_data.py    # prints them
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from zerojax.analysis.hardware import CHIPS, Chip, cluster
from zerojax.plan.job import PRESETS
from zerojax.plan.planner import MEMORY_SHARE
from zerojax.sharding.precision import Precision

FILE = "_static/calculator_data.js"
_PRECISIONS = ("bf16", "bf16_reduce_fp32", "fp16", "fp32")


def data() -> dict[str, Any]:
    """The chips that are GPUs, the precisions, and the presets that are dense language models."""
    return {
        "chips": {name: _rates(chip) for name, chip in CHIPS.items() if chip.platform == "cuda"},
        "precisions": {name: _widths(Precision.of(name)) for name in _PRECISIONS},
        "presets": {
            name: dataclasses.asdict(config)
            for name, config in PRESETS.items()
            if not config.experts and not config.patch
        },
        "memory_share": MEMORY_SHARE["cuda"],
    }


def _rates(chip: Chip) -> dict[str, float]:
    """The rates that large operations reach, per second."""
    return {
        "memory_bytes": chip.memory_bytes,
        "flops": chip.flops.effective,
        "f32_share": chip.f32_share,
        "link_rate": chip.link_rate.effective,
        "network_rate": chip.network_rate.effective,
        "devices_per_host": cluster(f"{chip.name}:64").devices_per_host,
    }


def _widths(precision: Precision) -> dict[str, int]:
    """Bytes of a parameter in each role; there is a master copy if parameters are computed in another dtype."""
    width = lambda dtype: jnp.dtype(dtype).itemsize
    has_master = precision.param_dtype != precision.compute_dtype
    return {
        "compute_bytes": width(precision.compute_dtype),
        "reduce_bytes": width(precision.reduce_dtype),
        "master_bytes": width(precision.param_dtype) if has_master else 0,
    }


def script() -> str:
    """The data as a script, because a page that is opened as a file cannot fetch JSON."""
    return f"globalThis.zerojaxData = {json.dumps(data(), indent=1)};\n"


def write(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / FILE).write_text(script())


def add_scripts(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if page == "calculator":
        for file in "calculator_data.js", "calculator.js", "calculator_page.js":
            app.add_js_file(file)


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", write)
    app.connect("html-page-context", add_scripts)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    print(json.dumps(data(), indent=1))
