"""Checks the memory of a compiled step: where the state is, that it is updated in place, and what is offloaded.

A scan that offloads activations writes them into slices of a host buffer, and the scan of the backward pass reads these
in reverse. A compiler that walks the other way gives each layer the activations of another: bytes and memory are as
expected, and the gradients are wrong.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
from jax.sharding import NamedSharding
from jax.stages import Compiled

from zerojax.analysis import hlo_costs, host_slices
from zerojax.analysis.communication import SLACK
from zerojax.analysis.expectation import Expectation
from zerojax.analysis.findings import Checks, Outcome, Unreadable, Verdict
from zerojax.analysis.hlo import Buffer, Program
from zerojax.analysis.hlo_collectives import memory_stats
from zerojax.analysis.hlo_costs import copied_in_host
from zerojax.analysis.host_slices import HostSlice
from zerojax.analysis.jaxpr_counts import dtype_name
from zerojax.offload.host_pieces import PIECES_BYTES
from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import axis_names
from zerojax.step.compiler_options import ANNOTATOR, DISABLED_PASSES, FIRST_CORRECT
from zerojax.utils.text import abbreviate, bytes_text
from zerojax.utils.typing import Aval, Shape


def _bytes_per_device(avals: Iterable[Aval]) -> int:
    """The number of bytes of sharded avals on one device."""
    return sum(placement.shard_bytes(aval, aval.sharding) for aval in avals)


def _is_placed_like(got: jax.sharding.Sharding, want: Aval) -> bool:
    """Whether a sharding is that of an aval, on the same devices or on other devices in a mesh of the same shape."""
    mesh = want.sharding.mesh
    if isinstance(got, NamedSharding) and dict(got.mesh.shape) == dict(mesh.shape):
        got = NamedSharding(mesh, got.spec, memory_kind=got.memory_kind)
    return got.is_equivalent_to(want.sharding, len(want.shape))


class MemoryChecks:
    """Checks where the state is placed, that it is updated in place, and what is offloaded to host memory."""

    def __init__(self, compiled: Compiled, program: Callable[[], Program], expectation: Expectation, platform: str):
        self.compiled, self.program, self.expectation, self.platform = compiled, program, expectation, platform
        self._check_state()
        # None for an argument that the program does not read; such arguments are not numbered among its parameters.
        self.shardings = jax.tree.structure(compiled.args_info).flatten_up_to(compiled.input_shardings)

    def _check_state(self) -> None:
        """Raises ValueError if the first argument of the step does not have the shapes and dtypes of the state."""
        given = jax.tree.leaves(self.compiled.args_info)
        kind = lambda a: f"{a.dtype}[{','.join(map(str, a.shape))}]"
        for k, (path, want) in enumerate(self.expectation.state.items()):
            got = kind(given[k]) if k < len(given) else "no more arguments"
            if got != kind(want):
                raise ValueError(
                    f"audit: the first argument of the step is not the state of the expectation\n"
                    f"  got:      {got} for {path}, expected {kind(want)}\n"
                    f"  fix:      pass the expectation of a step with the same state"
                )

    def checks(self) -> Checks:
        """The checks that apply to this step."""
        state, axes = self.expectation.state.values(), self.expectation.config.axes
        names = [{name for entry in aval.sharding.spec for name in axis_names(entry)} for aval in state]
        sharded = sum(bool(set(axes.shard) & each) for each in names)
        size, offloaded = _bytes_per_device(state), self.expectation.offloaded_bytes
        in_host, is_gpu = _bytes_per_device(self._host_state().values()), self.platform == "gpu"
        checks: Checks = {
            "sharded": (f"{sharded} of {len(state)} leaves sharded over {'x'.join(axes.shard)}", self.sharded),
            "aliased state": (f"{bytes_text(size)} per device, updated in place", self.aliased_state),
        }
        if offloaded:
            checks["checkpoints"] = f"{bytes_text(offloaded)} of activations in host memory", self.checkpoints
        if (offloaded or in_host) and is_gpu:
            slices = lambda: check_offloaded_slices(self.program())
            checks["offloaded slices"] = "each slice of a host buffer is copied from or to its index", slices
        if in_host:
            checks["host memory"] = f"{bytes_text(in_host)} of the state in host memory", self.host_memory
        if in_host and is_gpu:
            pieces = f"all of them, about {bytes_text(PIECES_BYTES)} at a time"
            checks["pieces of the state"] = pieces, self.pieces_of_the_state
            checks["host copies"] = "(no expectation)", lambda: check_copies(self.program())
        return checks

    def sharded(self) -> Outcome:
        """Whether every leaf of the state has the sharding of its stage."""
        wrong, more = [], 0
        for (path, want), got in zip(self.expectation.state.items(), self.shardings, strict=False):
            if got is None or _is_placed_like(got, want):
                continue
            found, expected = placement.shard_bytes(want, got), placement.shard_bytes(want, want.sharding)
            spec = spec_text(got.spec) if isinstance(got, NamedSharding) else str(got)
            more += found - expected
            instead_of = f"{spec_text(want.sharding.spec)}, {bytes_text(expected)}"
            wrong.append(f"{path}: {spec}, {bytes_text(found)} instead of {instead_of}")
        if not wrong:
            return Outcome("as expected", Verdict.OK)
        fix = "create the state with zero.init, or jax.device_put it to the shardings of zero.eval_init"
        return Outcome(abbreviate(wrong), Verdict.BROKEN, {"leaves": len(wrong), "more_bytes": more}, fix)

    def aliased_state(self) -> Outcome:
        """Whether the program writes every leaf of the new state over that of the old one."""
        numbered = [k for k, sharding in enumerate(self.shardings) if sharding is not None]
        aliased = {numbered[number] for number in self.program().aliased}
        missing = [p for k, p in enumerate(self.expectation.state) if k in numbered and k not in aliased]
        config = self.expectation.config
        if config.disk is not None and config.gathers_updates:  # after the program, from the shards that it returns
            missing = [path for path in missing if not path.startswith("params/")]
        if not missing:
            return Outcome("as expected", Verdict.OK)
        num_bytes = {path: _bytes_per_device([self.expectation.state[path]]) for path in missing}
        missing.sort(key=lambda path: -num_bytes[path])
        more = sum(num_bytes.values())
        fix = "use jax.jit(step, donate_argnums=0), and return each leaf with the dtype and sharding of the argument"
        found = f"{bytes_text(more)} not updated in place: {abbreviate(missing)}"
        return Outcome(found, Verdict.BROKEN, {"leaves": len(missing), "more_bytes": more}, fix)

    def checkpoints(self) -> Outcome:
        """Whether the offloaded activations are in host memory."""
        if self.platform == "cpu":
            raise Unreadable("simulated devices have no memory other than host memory")
        in_host = memory_stats(self.compiled).host_temp_size_in_bytes
        expected, found = self.expectation.offloaded_bytes, in_host - self.expectation.host_gradients_bytes
        numbers = {"expected_bytes": expected, "found_bytes": found}
        if found >= (1 - SLACK) * expected:
            return Outcome(f"{bytes_text(found)} in host memory", Verdict.OK, numbers)
        if self.expectation.host_gradients_bytes and in_host >= (1 - SLACK) * expected:
            raise Unreadable("gradients may take the place of activations in host memory")
        fix = "change remat=: the compiler keeps these activations on the device, or recomputes them"
        return Outcome(f"{bytes_text(found)} in host memory", Verdict.BROKEN, numbers, fix)

    def _host_state(self) -> dict[str, Aval]:
        """The leaves of the state that are in host memory."""
        return {path: aval for path, aval in self.expectation.state.items() if path in self.expectation.in_host}

    def host_memory(self) -> Outcome:
        """Whether the offloaded state is in host memory, without copies."""
        if self.platform == "cpu":
            raise Unreadable("simulated devices have no memory other than host memory")
        state_bytes = _bytes_per_device(self._host_state().values())
        memory = memory_stats(self.compiled)
        if self.platform == "tpu":  # whose memory analysis is more than the compiler allocates
            copies, what = copied_in_host(self.program()), "copies"
        else:
            temporaries = self.expectation.offloaded_bytes + self.expectation.host_gradients_bytes
            copies, what = memory.host_temp_size_in_bytes - temporaries, "unexpected temporaries"
        return check_host_memory(state_bytes, memory.host_argument_size_in_bytes, copies, what)

    def pieces_of_the_state(self) -> Outcome:
        """Whether all of the offloaded state is moved, piece by piece."""
        state = self._host_state()
        arrays = {path: (dtype_name(a.dtype), a.sharding.shard_shape(a.shape)) for path, a in state.items()}
        params = [shape for path, (_, shape) in arrays.items() if path.startswith("params/")]
        return check_pieces(self.program(), arrays.values(), _bytes_per_device(state.values()), params)


def check_host_memory(state_bytes: int, found: int, copies: int, what: str = "copies") -> Outcome:
    """Whether the state is in host memory, and no copy of it or of its gradients.

    The program has `found` bytes of arguments there, and makes `copies`, or has as many bytes of temporaries.
    """
    numbers = {"expected_bytes": state_bytes, "found_bytes": found, "copied_bytes": max(0, copies)}
    if found < (1 - SLACK) * state_bytes:
        fix = "create the state with zero.init, and jit a step of your own with in_shardings and out_shardings of it"
        return Outcome(f"{bytes_text(found)} in host memory", Verdict.BROKEN, numbers, fix)
    if copies > SLACK * state_bytes:
        fix = (
            "use jax.jit(step, donate_argnums=0): the compiler copies arrays that it may not update in place; "
            "it may also hold the gradients of one layer once more"
        )
        return Outcome(f"{what} of {bytes_text(copies)} in host memory", Verdict.BROKEN, numbers, fix)
    return Outcome(f"{bytes_text(found)} in host memory, and no copies", Verdict.OK, numbers)


def check_pieces(
    program: Program, arrays: Iterable[tuple[str, Shape]], state_bytes: int, params: Iterable[Shape] = ()
) -> Outcome:
    """Whether the pieces that are written to arrays in host memory make up the whole of each, and how large they are.

    Args:
        program: compiled for GPUs.
        arrays: dtypes, as in programs, and shapes of the arrays of the state in host memory, on one device.
        state_bytes: of all of them.
        params: the shapes of those that are parameters. Layers of them, and of sums of their gradients, come in the
            forward and the backward pass too.
    """
    wanted, streamed = set(arrays), set(params)
    pieces = [each for each in host_slices.host_slices(program) if (each.buffer.dtype, each.buffer.dims) in wanted]
    for each in pieces:
        if each.indexed is None:
            raise Unreadable(f"the index of {each.name} cannot be evaluated: {each.unread}")
    written = [each for each in pieces if each.writes]
    # Which pieces are written, and how many bytes are moved at a time.
    visits = collections.defaultdict[tuple[Buffer, int], collections.Counter[int]](collections.Counter)
    for each in written:  # gradients of the first and the last layer are written outside of the loop over the others
        visits[each.buffer, each.slice_bytes].update(each.indexed or ())
    missed = [each for each in written if not _covers(each, visits[each.buffer, each.slice_bytes])]
    at_a_time = collections.Counter[int]()  # by the number of runs: loops of the same length are one loop
    for each in pieces:
        if not each.writes and (each.buffer.dims not in streamed or _walks(each)):
            at_a_time[len(each.indexed or ())] += each.slice_bytes
    largest = max(at_a_time.values(), default=0)
    # Compare.
    numbers = {"pieces": len(pieces), "at_a_time_bytes": largest, "missed": len(missed)}
    if not pieces and state_bytes > 2 * PIECES_BYTES:
        fix = "jit the step of zero.train_step: a step of your own has to move the state piece by piece"
        return Outcome("no pieces: the state comes to the device as a whole", Verdict.BROKEN, numbers, fix)
    if missed:
        count = lambda each: each.buffer.num_bytes // each.slice_bytes
        writes = lambda each: f"{each.name} writes {len(set(each.indexed or ()))} pieces of {count(each)}"
        texts = [f"{writes(each)} of {_array_text(each.buffer)}" for each in missed]
        fix = "report it with the program: compiled.as_text() of step.lower(state, batch).compile()"
        return Outcome(abbreviate(texts), Verdict.BROKEN, numbers, fix)
    text = f"all pieces come and go; {bytes_text(largest)} at a time"
    if largest > 2 * PIECES_BYTES:
        fix = "dims with more divisors, from which smaller pieces can be cut"
        return Outcome(text, Verdict.KNOWN, numbers, fix)
    return Outcome(text, Verdict.OK, numbers)


def check_copies(program: Program) -> Outcome:
    """How much is copied between device and host in a step, and how much of it while nothing is computed.

    On GPUs, kernels are named: they copy in place of the computation.
    """
    copies = hlo_costs.read_host_copies(program)
    size = lambda chosen: sum(each.num_bytes for each in chosen)
    in_layers = [each for each in copies if each.in_layers]
    total, alone = size(copies), size(each for each in copies if each.alone)
    of_layers, alone_of_layers = size(in_layers), size(each for each in in_layers if each.alone)
    by_kernels = size(each for each in copies if each.by_kernel)
    numbers = {"bytes": total, "alone_bytes": alone, "layers_bytes": of_layers, "alone_layers_bytes": alone_of_layers}
    numbers["kernels_bytes"] = by_kernels
    text = f"{bytes_text(total)}, of them {bytes_text(alone)} ({alone / max(total, 1):.0%}) while nothing is computed"
    if in_layers:
        text += f"; in loops over layers {bytes_text(alone_of_layers)} ({alone_of_layers / of_layers:.0%})"
    if by_kernels:
        text += f"; {bytes_text(by_kernels)} ({by_kernels / total:.0%}) by kernels, not by copy engines"
    return Outcome(text, Verdict.INFO, numbers)


def _walks(each: HostSlice) -> bool:
    """Whether the runs of a slice visit all pieces of its buffer but one, which may come before the loop."""
    count = each.buffer.num_bytes // each.slice_bytes
    return count > 2 and len(set(each.indexed or ())) >= count - 1


def _covers(each: HostSlice, visits: Mapping[int, int]) -> bool:
    """Whether slices like this one visit every piece of their buffers, and all pieces equally often."""
    pieces = range(0, each.buffer.num_bytes, each.slice_bytes)
    return set(visits) == set(pieces) and len(set(visits.values())) == 1


def _array_text(buffer: Buffer) -> str:
    return f"{buffer.dtype}[{','.join(map(str, buffer.dims))}]"


_FIX = (
    f"pip install 'jax>={'.'.join(map(str, FIRST_CORRECT))}', or "
    f"jax.jit(compiler_options={{'{DISABLED_PASSES}': '{ANNOTATOR}'}})"
)


def check_offloaded_slices(program: Program) -> Outcome:
    """Compares the offsets that the compiler has annotated slices of host buffers with to those of their indices.

    Slices without annotations are copied by their indices.
    """
    found = host_slices.host_slices(program)
    annotated = [each for each in found if each.annotated is not None]
    wrong = [each for each in annotated if each.indexed is not None and each.indexed != each.annotated]
    numbers = {"slices": len(found), "annotated": len(annotated), "wrong": len(wrong)}
    if wrong:
        return Outcome(abbreviate([_difference(each) for each in wrong]), Verdict.BROKEN, numbers, _FIX)
    for each in annotated:
        if each.indexed is None:
            raise Unreadable(f"the index of {each.name} cannot be compared with its annotation: {each.unread}")
    text = f"{len(found)} slices; {len(annotated)} of them by annotated offsets, which are those of their indices"
    return Outcome(text, Verdict.OK, numbers)


def _difference(each: HostSlice) -> str:
    action = "writes" if each.writes else "reads"
    found, expected = (_walk(offsets, each.slice_bytes) for offsets in (each.annotated or (), each.indexed or ()))
    return f"{each.name} {action} {_array_text(each.buffer)} {found}, and its index {expected}"


def _walk(offsets: Sequence[int], slice_bytes: int) -> str:
    """Describes a sequence of offsets: where it starts and in which steps it continues.

    In a loop over microbatches, the sequence repeats itself. It is described once.
    """
    unit, size = ("slice", slice_bytes) if not any(each % slice_bytes for each in offsets) else ("byte", 1)
    places = [each // size for each in offsets]
    repeats = lambda n: len(places) % n == 0 and places[:n] * (len(places) // n) == places
    places = places[: next(n for n in range(1, len(places) + 1) if repeats(n))]
    steps = {later - earlier for earlier, later in itertools.pairwise(places)}
    if len(steps) > 1:
        return f"is at {unit}s {', '.join(map(str, places[:6]))}{', ...' if len(places) > 6 else ''}"
    return f"starts at {unit} {places[0]}" + "".join(f" with step {step:+d}" for step in steps)
