"""Counts the collectives of a traced program, weighted by the trip counts of its loops."""

import collections
import math
from typing import NamedTuple

from support import walk
from zerojax.program.jaxprs import sub_jaxprs

COLLECTIVES = frozenset(
    [
        "all_gather",
        "all_gather_reduced",
        "reduce_scatter",
        "psum",
        "psum_invariant",
        "all_to_all",
        "ppermute",
        "pmax",
        "pmin",
    ]
)


class Collective(NamedTuple):
    kind: str
    shape: tuple[int, ...]  # of the operand or the result, whichever is larger; one Collective per operand
    dtype: str
    num_devices: int
    count: int

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def sent_elements(self):
        """Elements that a device sends in a ring, in which an all_reduce is a reduce_scatter and an all_gather."""
        factor = 2 if self.kind.startswith("psum") else 1
        return factor * self.size * (self.num_devices - 1) / self.num_devices * self.count


def collectives_of(jaxpr, axis_sizes, times=1):
    """Every collective of a jaxpr. Fails if a loop with an unknown trip count communicates."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = axes if isinstance(axes, tuple | list | frozenset | set) else (axes,)
            n = math.prod(axis_sizes[a] for a in axes)
            for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
                larger = max((operand.aval, result.aval), key=lambda a: math.prod(a.shape))
                found.append(Collective(name, tuple(larger.shape), str(larger.dtype), n, times))
        inner_times = times * eqn.params["length"] if name == "scan" else times
        for sub in sub_jaxprs(eqn):
            inner = collectives_of(sub, axis_sizes, inner_times)
            assert not (inner and name == "while"), "a while loop that communicates"
            found += inner
    return found


def buffer_bytes(equation):
    """The bytes of a collective in full form, over all of its operands."""
    size = lambda values: sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in values)
    return max(size(equation.invars), size(equation.outvars))


def buffers(jaxpr):
    """The bytes of every collective of a jaxpr."""
    return [buffer_bytes(equation) for equation in walk.equations(jaxpr) if equation.primitive.name in COLLECTIVES]


def collectives_of_step(step, state, batch):
    """Every collective of a zerojax step."""
    mesh = state.step.sharding.mesh
    return collectives_of(step.trace(state, batch).jaxpr.jaxpr, dict(mesh.shape))


def sent(found, kinds=None):
    """The elements that a device sends, by dtype."""
    total = collections.Counter()
    for c in found:
        if kinds is None or c.kind in kinds:
            total[c.dtype] += c.sent_elements
    return total


def is_gathered_once(leaf):
    """Whether stage 3 gathers this leaf of a GPT only once.

    The backward pass does not read the values of biases and embedding tables, and that of the head follows while the
    head is still gathered.
    """
    return leaf.path.endswith(("bias", "embedding")) or leaf.unit == "head"
