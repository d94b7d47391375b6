"""The compiler options of a step that offloads activations: without them, some XLA versions for GPUs misread these."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from jax.sharding import Mesh

from zerojax.step.config import ZeroConfig
from zerojax.utils import versions

# The first jaxlib whose compiler for GPUs finds the right slices of host buffers in a loop that counts up and visits
# them in reverse. jaxlib 0.10.2 and 0.11.0 do not. https://github.com/openxla/xla/pull/46231 describes the fault, and
# https://github.com/openxla/xla/pull/46308 corrects it.
FIRST_CORRECT = (0, 11, 1)
DISABLED_PASSES, ANNOTATOR = "xla_disable_hlo_passes", "dynamic-slice-annotator"


def offload_options(config: ZeroConfig) -> dict[str, str]:
    """The XLA options of a step that offloads activations, in addition to `compiler_options`: {} if it needs none.

    Before `FIRST_CORRECT`, the compiler for GPUs takes the counter of a loop for the index of a slice that is in host
    memory. A backward pass counts up while it reads from the last layer to the first, and would get the activations of
    other layers. Without the pass that annotates slices with places derived from the counter, their indices are used.

    The option replaces the one in XLA_FLAGS. Passes that are turned off there stay turned off.
    """
    for_gpus = isinstance(config.mesh, Mesh) and config.mesh.devices.flat[0].platform == "gpu"
    if not for_gpus or versions.parse(metadata.version("jaxlib")) >= FIRST_CORRECT:
        return {}
    return {DISABLED_PASSES: ",".join([*_disabled_by_flags(), ANNOTATOR])}


def _disabled_by_flags() -> list[str]:
    """The passes that XLA_FLAGS turns off. The variable has flags, or the name of a file with flags."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        flags = Path(flags).read_text()
    return re.findall(rf"--{DISABLED_PASSES}=['\"]?([\w,-]+)", flags)
