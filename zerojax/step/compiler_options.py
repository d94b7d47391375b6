"""What a step needs from XLA and JAX around its program.

Options of the compiler let collectives overlap with computation, and read offloaded activations right. For described
devices, JAX knows no memories, and a sharding forgets the memory that it names: an array in host memory would be
traced, compiled and counted as an array on the device. Such arrays are marked in the avals that are traced and in the
program that is compiled.
"""

from __future__ import annotations

import collections
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.program.run import SMALL_UNIT
from zerojax.sharding.placement import Leaf
from zerojax.sharding.tpu import SPARSE_CORES
from zerojax.step.config import ZeroConfig
from zerojax.utils import versions
from zerojax.utils.typing import PyTree

# The kinds of collectives that SparseCores run, if they can: over one, two or three, or any number of dims of a torus.
_OFFLOADED = "all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter", "nd_reduce_scatter", "all_reduce"
# The first jaxlib whose compiler for GPUs finds the right slices of host buffers in a loop that counts up and visits
# them in reverse. jaxlib 0.10.2 and 0.11.0 do not. https://github.com/openxla/xla/pull/46231 describes the fault, and
# https://github.com/openxla/xla/pull/46308 corrects it.
FIRST_CORRECT = (0, 11, 1)
DISABLED_PASSES, ANNOTATOR = "xla_disable_hlo_passes", "dynamic-slice-annotator"


def compiler_options(config: ZeroConfig, leaves: Iterable[Leaf]) -> dict[str, int | bool] | None:
    """The XLA options of a step on several GPUs or TPUs, and on described GPUs; None in all other cases.

    On TPUs, gathers stay gathers: by default, small ones over many chips are all-reduces. SparseCores, where there are
    any, run the collectives beside the computation and over all dims of the torus at once. By default the chip waits
    for each, and a reduce-scatter over several dims is an all-reduce.

    On GPUs, the latency-hiding scheduler overlaps collectives with computation. It is off by default before Hopper.

    At stage 3, two thresholds replace the default of 30 MiB up to which the compiler combines collectives:

    - All gathers of a unit are combined. The compiler starts each gather after the end of the one before. On a slow
      link the computation would wait for each of them, and on a fast link some would overlap with no matrix product.
      Gathers of different units wait for each other, and are never combined.
    - The gradients of a unit are reduced in about two parts. In one part, all of them would wait for the last. The
      threshold counts the bytes of shards: on many devices, 30 MiB would hold the gradients of several units, and
      their common reduction would overlap with nothing.
    """
    mesh = config.mesh
    if not isinstance(mesh, Mesh):
        return None
    device, options = mesh.devices.flat[0], dict[str, int | bool]()
    if device.platform == "gpu" and forgets_memories(NamedSharding(mesh, PartitionSpec())):
        options["xla_gpu_experimental_enable_fusion_autotuner"] = False  # compiles kernels twice, but cannot time them
    if mesh.size == 1:
        return options or None
    if device.platform == "tpu":
        names = [f"xla_tpu_enable_sparse_core_collective_offload_{kind}" for kind in _OFFLOADED]
        offload = names if device.device_kind in SPARSE_CORES else []
        return dict.fromkeys(["xla_tpu_prefer_async_allgather_to_allreduce", *offload], True)
    if device.platform != "gpu":
        return None
    options["xla_gpu_enable_latency_hiding_scheduler"] = True
    if not config.stage.shards_params or config.axes.num_shards == 1:
        return options
    num_elements = _typical_unit(leaves)
    num_bytes = lambda dtype: num_elements * jnp.dtype(dtype).itemsize
    shard_bytes = num_bytes(config.precision.reduce_dtype) // config.axes.num_shards
    gathered = 2 * num_bytes(config.precision.compute_dtype)
    if config.axes.num_context > 1:
        # XLA runs one collective at a time, and the gather of a whole layer fits into no gap between the exchanges of
        # its attention. Parts do: 2% of a step of Llama 3 8B with 32,768 tokens over eight H100s.
        gathered = 3 * gathered // 10
    return options | {
        "xla_gpu_all_gather_combine_threshold_bytes": gathered,
        "xla_gpu_enable_reduce_scatter_combine_by_dim": True,  # see Schedule.group
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 3 * shard_bytes // 4,  # leaves rarely sum to exact halves
    }


def _typical_unit(leaves: Iterable[Leaf]) -> int:
    """The elements of the median unit, of one layer if it is stacked. Units that are small next to the largest do not
    count, and each layer of a stack does."""
    elements: collections.Counter[str] = collections.Counter()
    layers: dict[str, int] = {}
    for leaf in leaves:
        elements[leaf.unit] += leaf.size_at_once
        layers[leaf.unit] = leaf.shape[0] if leaf.stacked else 1
    least = SMALL_UNIT * max(elements.values())
    return statistics.median_low(n for unit, n in elements.items() if n >= least for _ in range(layers[unit]))


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


def forgets_memories(sharding: jax.sharding.Sharding) -> bool:
    """Whether a sharding for these devices forgets the memory that it names."""
    return sharding.with_memory_kind("pinned_host").memory_kind is None


def in_host_memory(tree: PyTree, in_host: PyTree) -> PyTree:
    """Avals of arguments, of which those that are flagged are in host memory; the others stay as they are."""
    flags = jax.tree.leaves(in_host)
    leaves, structure = jax.tree.flatten(tree)
    avals = iter(jax.make_jaxpr(lambda *leaves: leaves)(*leaves).in_avals)
    to_host = lambda aval: aval.update(memory_space=jax.memory.Space.Host)
    return structure.unflatten(
        [to_host(aval) if flag else leaf for leaf, aval, flag in zip(leaves, avals, flags, strict=True)]
    )


class TracedWithHostArguments:
    """A `jax.stages.Traced` whose arguments are in host memory, where flagged, in the lowered program too.

    Args:
        traced: of a function that is jitted with `keep_unused=True`.
        in_host: flags of the first arguments, in flattening order.
    """

    def __init__(self, traced: jax.stages.Traced, in_host: Sequence[bool]):
        self._traced, self._in_host = traced, in_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced, name)

    def lower(self, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.stages.Traced.lower`."""
        lowered = self._traced.lower(**kwargs)
        module: Any = lowered.compiler_ir("stablehlo")
        with module.context:
            (main,) = (op for op in module.body.operations if str(getattr(op, "sym_name", "")) == '"main"')
            attributes = list(main.arg_attrs)
            for k, flag in enumerate(self._in_host):
                text = str(attributes[k])
                if flag and "mhlo.memory_kind" not in text:  # JAX keeps the module for the next call
                    in_host = '{mhlo.memory_kind = "pinned_host", ' + text.removeprefix("{")
                    attributes[k] = type(attributes[k]).parse(in_host)
            main.arg_attrs = type(main.arg_attrs).get(attributes)
        return lowered
