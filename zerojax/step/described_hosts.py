"""Programs for described devices with arguments in host memory.

JAX knows no memories of described GPUs, and a sharding for them forgets the memory that it names. An array in host
memory would then be traced, compiled and counted as an array on the device. The functions of this module mark such
arrays in the avals that are traced and in the program that is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from zerojax.utils.typing import PyTree


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
