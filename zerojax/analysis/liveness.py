"""Estimates the peak memory of a traced program, without a compiler, from the lifetimes of its values.

A trace lists every intermediate value, and a compiled program stores only few of them. This module assumes:

    stored      results of matrix products, collectives, reductions, loops, scatters and fused attention; other values
                that a product, a collective or a loop reads; and values that are read in several places and are smaller
                than the stored values they are computed from
    recomputed  elementwise results, broadcasts, conversions and slices, from stored values wherever they are read;
                constants too
    in place    updates of a buffer that is not read afterwards; values carried from one iteration to the next
    scratch     what the gradient of a max-pooling needs while it is computed

Operations run in the order of the trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from zerojax.analysis.jaxpr_counts import COLLECTIVES, FlatJaxpr, Operation, Space, Value, flattened
from zerojax.offload import host_arrays
from zerojax.program import jaxprs
from zerojax.program.jaxprs import Jaxpr

ACTIVATIONS, CHECKPOINTS, GATHERED, GRADIENTS = "activations", "checkpoints", "gathered", "gradients"

_SHARE_MEMORY = frozenset(
    ["copy", "copy_p", "expand_dims", "name", "optimization_barrier", "reshape", "sharding_constraint", "squeeze"]
) | {"stop_gradient"}
_UPDATE_IN_PLACE = frozenset(["dynamic_update_slice", "scatter", "scatter-add"])
_LOOPS = frozenset(["cond", "scan", "while"])
_READS_STORED = jaxprs.PRODUCTS | COLLECTIVES.keys() | _LOOPS | {"device_put", "sort", "top_k"}
_SMALL = 64  # a result that is this many times smaller than its sources is stored
_KERNELS = ("dot_product_attention", "pure_callback")  # prefixes of names; these kernels read and write buffers
_STORES = (
    _READS_STORED
    | _UPDATE_IN_PLACE
    | {"argmax", "argmin", "cumsum", "gather", host_arrays.ROOM, "select_and_scatter_add"}
)


def peak(jaxpr: Jaxpr, gradients: Iterable[int] = (), space: Space = Space.Device) -> Counter[str]:
    """The bytes in a memory space at the peak of a traced function, by kind, without its inputs.

    Args:
        jaxpr: the jaxpr of the function.
        gradients: the positions of the outputs that are gradients.
        space: the memory space that is counted.
    """
    flat = flattened(jaxpr, space)
    return Lifetimes(flat, space, [], gradient_kinds(flat, gradients)).peak()


def gradient_kinds(flat: FlatJaxpr, gradients: Iterable[int]) -> dict[Value, str]:
    """The kinds of the outputs that are gradients."""
    return {flat.outputs[i]: GRADIENTS for i in gradients}


def _stores(operation: Operation) -> bool:
    name = operation.name
    return name in _STORES or name.startswith(("reduce_", *_KERNELS))


class Lifetimes:
    """A function or a body of a loop: the values that it stores, and their lifetimes.

    Args:
        owned: inputs whose memory can be reused after they are last read; all others belong to the caller.
        kinds: the kinds of some inputs and outputs.
    """

    def __init__(self, flat: FlatJaxpr, space: Space, owned: Iterable[Value], kinds: dict[Value, str]):
        self.flat, self.space, self.kinds = flat, space, kinds
        self.bases = defaultdict[Value, frozenset[Value]](frozenset, {v: frozenset([v]) for v in flat.inputs})
        self.born: dict[Value, int] = dict.fromkeys(owned, -1)
        self.last: dict[Value, int] = dict(self.born)
        self.needed, self.places = self._readers()
        for k, operation in enumerate(flat.operations):
            self._store(k, operation)
        self._read(flat.outputs, len(flat.operations))
        self._spread_kinds()

    def _readers(self) -> tuple[set[Value], dict[Value, set[int]]]:
        """(values that must be stored for their readers, the operations that store what each value becomes)."""
        end = len(self.flat.operations)
        needed = set(self.flat.outputs)
        places: dict[Value, set[int]] = {v: {end} for v in needed}
        for k in range(end - 1, -1, -1):
            name, _, reads, results = operation = self.flat.operations[k]
            if name in _SHARE_MEMORY:
                for source, result in zip(reads, results, strict=True):
                    needed |= {source} if result in needed else set()
                    places.setdefault(source, set()).update(places.get(result, ()))
                continue
            stored = _stores(operation) or any(result in needed for result in results)
            ends = {k} if stored else set().union(*(places.get(result, set()) for result in results))
            for source in reads:
                places.setdefault(source, set()).update(ends)
                if name in _READS_STORED or name.startswith(_KERNELS):
                    needed.add(source)
        return needed, places

    def _store(self, k: int, operation: Operation) -> None:
        if operation.name in _SHARE_MEMORY:
            for source, result in zip(operation.reads, operation.results, strict=True):
                self.bases[result] = self.bases[source]
            return
        sources = frozenset[Value]().union(*(self.bases[v] for v in operation.reads))
        held = sum(v.num_bytes for v in sources)
        any_stored = False
        for result in operation.results:
            several = len(self.places.get(result, ())) > 1 and result.num_bytes < held
            several |= _SMALL * result.num_bytes < held
            constant = not sources and not _stores(operation)  # recomputed in each iteration of a loop
            if (_stores(operation) or result in self.needed or several) and not constant:
                self.bases[result] = frozenset([result])
                self.born[result] = self.last[result] = k
                any_stored = True
            else:
                self.bases[result] = sources
        if any_stored:
            self._read(sources, k)

    def _read(self, values: Iterable[Value], k: int) -> None:
        for base in frozenset[Value]().union(*(self.bases[v] for v in values)):
            if base in self.last:
                self.last[base] = max(self.last[base], k)

    def _spread_kinds(self) -> None:
        """Marks results of all_gathers as gathered, and values that become gradients or are reduced as gradients."""
        for operation in self.flat.operations:
            if operation.name == "all_gather":
                self._mark(GATHERED, operation.results)
            elif operation.name == "scan":
                for start, result in zip(operation.reads[_carry(operation)], operation.results, strict=False):
                    if kind := self._kind_of(start):
                        self._mark(kind, [result])
        for operation in reversed(self.flat.operations):
            name, _, reads, results = operation
            if name in ("reduce_scatter", "psum", "ppermute"):
                self._mark(GRADIENTS, [*reads, *results])
            elif name == "scan":
                self._mark_sources(results, reads[_carry(operation)])
            elif name not in _STORES or name in _UPDATE_IN_PLACE:
                for result in results:
                    same = lambda v, result=result: v.num_bytes == result.num_bytes
                    alike = [v for v in reads if name == "convert_element_type" or same(v)]
                    self._mark_sources([result] * len(alike), alike)

    def _mark_sources(self, results: Sequence[Value], sources: Sequence[Value]) -> None:
        """Marks the sources of gradients, from which they are computed element by element, as gradients."""
        for result, source in zip(results, sources, strict=False):
            if self._kind_of(result) == GRADIENTS:
                self._mark(GRADIENTS, [source])

    def _mark(self, kind: str, values: Iterable[Value]) -> None:
        for base in (base for v in values for base in self.bases[v]):
            self.kinds.setdefault(base, kind)

    def _kind_of(self, value: Value) -> str | None:
        """The kind of the stored values behind a value, or None if they have several kinds."""
        kinds = {self.kinds.get(base) for base in self.bases[value]}
        return kinds.pop() if len(kinds) == 1 else None

    def _kind(self, value: Value) -> str:
        return self.kinds.get(value, ACTIVATIONS)

    def peak(self) -> Counter[str]:
        return +max((during for _, during in self.moments()), key=Counter.total)

    def moments(self) -> Iterator[tuple[int, Counter[str]]]:
        """(the position of an operation, the bytes by kind that are alive while it runs). The first is -1."""
        births: dict[int, list[Value]] = {}
        deaths: dict[int, list[Value]] = {}
        for value, k in self.born.items():
            births.setdefault(k, []).append(value)
            deaths.setdefault(self.last[value], []).append(value)
        alive = Counter[str]()
        for value in births.get(-1, ()):
            alive[self._kind(value)] += value.num_bytes
        yield -1, Counter(alive)
        for k, operation in enumerate(self.flat.operations):
            born, dying = births.get(k, []), [v for v in deaths.get(k, []) if self.born[v] < k]
            for value in born:
                alive[self._kind(value)] += value.num_bytes
            during = Counter(alive)
            for value in [*_reused_memory(operation, born, dying), *self._carried(operation, dying)]:
                during[self._kind(value)] -= value.num_bytes
            during[ACTIVATIONS] += _scratch_bytes(operation)
            if operation.name in _LOOPS:  # all activations outside of the loop wait for it
                during[CHECKPOINTS] += during.pop(ACTIVATIONS, 0)
                during.update(self._inside(operation))
            yield k, during
            for value in deaths.get(k, []):
                alive[self._kind(value)] -= value.num_bytes

    def _carried(self, operation: Operation, dying: list[Value]) -> list[Value]:
        """The initial values of the carry of a loop that are not read later, and its final values: they count in its
        body.
        """
        if operation.name != "scan":
            return []
        num_carry = jaxprs.scan_params(operation.equation).num_carry
        starts = {b for v in operation.reads[_carry(operation)] for b in self.bases[v]}
        return [*(v for v in dying if v in starts), *operation.results[:num_carry]]

    def _inside(self, loop: Operation) -> Counter[str]:
        """The peak of the body of a loop or a branch, by kind."""
        bodies = [flattened(inner, self.space) for inner in jaxprs.sub_jaxprs(loop.equation)]
        if loop.name != "scan":
            return max((Lifetimes(flat, self.space, [], {}).peak() for flat in bodies), key=Counter.total)
        (flat,) = bodies
        return self._body(loop, flat).peak()

    def _body(self, loop: Operation, flat: FlatJaxpr) -> Lifetimes:
        """The lifetimes in the body of a scan, with the kinds that its operands and results have outside."""
        kinds = {i: self._kind_of(o) for i, o in zip(flat.inputs, loop.reads, strict=True)}
        kinds |= {i: self._kind_of(o) for i, o in zip(flat.outputs, loop.results, strict=True)}
        known = {value: kind for value, kind in kinds.items() if kind}
        return Lifetimes(flat, self.space, flat.inputs[_carry(loop)], known)


def _carry(operation: Operation) -> slice:
    num_consts, num_carry, *_ = jaxprs.scan_params(operation.equation)
    return slice(num_consts, num_consts + num_carry)


def _scratch_bytes(operation: Operation) -> int:
    """The bytes that an operation needs in addition to its operands and results.

    XLA for GPUs computes the gradient of a max-pooling in two steps: for each window, the largest element in fp32 and
    its three indices in int32, and then a scatter into a copy of an array of zeros.
    """
    if operation.name != "select_and_scatter_add":
        return 0
    windows, result = operation.equation.invars[0].aval, operation.results[0]
    return 4 * 4 * windows.size + result.num_bytes


def _reused_memory(operation: Operation, born: list[Value], dying: list[Value]) -> list[Value]:
    """The results that overwrite an operand of the same size that is not read again."""
    if operation.name in (jaxprs.PRODUCTS | _LOOPS | {"all_gather", "ppermute", "reduce_scatter"}):
        return []
    free = Counter(v.num_bytes for v in dying)
    taken = []
    for value in born:
        if free[value.num_bytes]:
            free[value.num_bytes] -= 1
            taken.append(value)
    return taken
