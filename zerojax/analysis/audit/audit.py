"""Audits a compiled step: runs the checks of its memory and of its communication against an expectation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from zerojax.analysis import hlo
from zerojax.analysis.audit.communication import SLACK, CommunicationChecks
from zerojax.analysis.audit.expectation import Expectation
from zerojax.analysis.audit.findings import Audit, AuditCheck, Outcome, Unreadable, Verdict, reader_errors, run_checks
from zerojax.analysis.audit.host_state import check_copies, check_host_memory, check_pieces
from zerojax.analysis.audit.offloaded_slices import check_offloaded_slices
from zerojax.analysis.hlo import Program
from zerojax.analysis.host_copies import copied_in_host
from zerojax.analysis.jaxpr_collectives import dtype_name
from zerojax.offload.host_pieces import PIECES_BYTES
from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import axis_names
from zerojax.step.described_hosts import TracedWithHostArguments
from zerojax.utils.text import abbreviate, bytes_text
from zerojax.utils.typing import Aval


def audit_step(step: Any, expectation: Expectation) -> Audit:
    """Compares what a step is expected to do with its compiled program. Nothing is run.

    Most is read from programs for GPUs. XLA for CPUs merges gathers, sends wider dtypes and runs one collective after
    the other, so for CPUs the communication is read from the traced step. If something cannot be read, the finding says
    why.

    Collectives of the model itself over the data axes count as those of the step. Collectives of at most 256 bytes are
    not counted.

    Args:
        step: `jax.jit(fn, ...).trace(state, ...)` of any function, which is compiled here, or a compiled function. Of
            the latter, the order of gathers is not read, and on CPU no communication is.
        expectation: the result of `step.expectation(state, batch)` for a zerojax step with the same loss. Its state is
            the first argument of `step`.

    Returns:
        An `Audit`: one finding for each expectation, and a table when printed.

    Raises:
        ValueError: if the first argument of `step` is another state.

    Cost: compiles a traced step, and reads the text of the program, in about 5% of the time of the compilation.
    """
    is_traced = isinstance(step, jax.stages.Traced | TracedWithHostArguments)
    jaxpr = step.jaxpr if is_traced else None
    compiled = step.lower().compile() if is_traced else step
    program, platform = _reader(compiled), expectation.config.mesh.devices.flat[0].platform
    memory = _MemoryChecks(compiled, program, expectation, platform)
    communication = CommunicationChecks(program, jaxpr, expectation, platform)
    return run_checks([*memory.checks(), *communication.checks()])


def _reader(compiled: Any) -> Callable[[], Program]:
    """Returns a function that parses the program, once. It raises `Unreadable` if the text cannot be parsed."""

    @functools.cache
    def program() -> Program:
        with reader_errors():
            return hlo.parse_program(compiled.as_text() or "")

    return program


def _bytes_per_device(avals: Iterable[Aval]) -> int:
    """The number of bytes of sharded avals on one device."""
    return sum(placement.shard_bytes(aval, aval.sharding) for aval in avals)


def _is_placed_like(got: Any, want: Aval) -> bool:
    """Whether a sharding is that of an aval, on the same devices or on other devices in a mesh of the same shape."""
    mesh = want.sharding.mesh
    if isinstance(got, NamedSharding) and dict(got.mesh.shape) == dict(mesh.shape):
        got = NamedSharding(mesh, got.spec, memory_kind=got.memory_kind)
    return got.is_equivalent_to(want.sharding, len(want.shape))


class _MemoryChecks:
    """Checks where the state is placed, that it is updated in place, and what is offloaded to host memory."""

    def __init__(self, compiled: Any, program: Callable[[], Program], expectation: Expectation, platform: str):
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

    def checks(self) -> list[AuditCheck]:
        """The checks that apply to this step."""
        state, axes = self.expectation.state.values(), self.expectation.config.axes
        names = [{name for entry in aval.sharding.spec for name in axis_names(entry)} for aval in state]
        sharded = sum(bool(set(axes.shard) & each) for each in names)
        size, offloaded = _bytes_per_device(state), self.expectation.offloaded_bytes
        in_host, is_gpu = _bytes_per_device(self._host_state().values()), self.platform == "gpu"
        return [
            AuditCheck(
                "sharded", f"{sharded} of {len(state)} leaves sharded over {'x'.join(axes.shard)}", self.sharded
            ),
            AuditCheck("aliased state", f"{bytes_text(size)} per device, updated in place", self.aliased_state),
            AuditCheck(
                "checkpoints",
                f"{bytes_text(offloaded)} of activations in host memory" if offloaded else None,
                self.checkpoints,
            ),
            AuditCheck(
                "offloaded slices",
                "each slice of a host buffer is copied from or to its index"
                if (offloaded or in_host) and is_gpu
                else None,
                self.offloaded_slices,
            ),
            AuditCheck(
                "host memory",
                f"{bytes_text(in_host)} of the state in host memory" if in_host else None,
                self.host_memory,
            ),
            AuditCheck(
                "pieces of the state",
                f"all of them, about {bytes_text(PIECES_BYTES)} at a time" if in_host and is_gpu else None,
                self.pieces_of_the_state,
            ),
            AuditCheck("host copies", "(no expectation)" if in_host and is_gpu else None, self.host_copies),
        ]

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
        missing = [path for k, path in enumerate(self.expectation.state) if k in numbered and k not in aliased]
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
        in_host = self.compiled.memory_analysis().host_temp_size_in_bytes
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
        memory = self.compiled.memory_analysis()
        if self.platform == "tpu":  # whose memory analysis is more than the compiler allocates
            with reader_errors():
                copies = copied_in_host(self.program())
        else:
            temporaries = self.expectation.offloaded_bytes + self.expectation.host_gradients_bytes
            copies = memory.host_temp_size_in_bytes - temporaries
        return check_host_memory(state_bytes, memory.host_argument_size_in_bytes, copies)

    def pieces_of_the_state(self) -> Outcome:
        """Whether all of the offloaded state is moved, piece by piece."""
        state = self._host_state()
        arrays = {path: (dtype_name(a.dtype), a.sharding.shard_shape(a.shape)) for path, a in state.items()}
        params = [shape for path, (_, shape) in arrays.items() if path.startswith("params/")]
        return check_pieces(self.program(), arrays.values(), _bytes_per_device(state.values()), params)

    def host_copies(self) -> Outcome:
        """How much is copied between device and host."""
        return check_copies(self.program())

    def offloaded_slices(self) -> Outcome:
        """Whether loops read and write slices of host buffers at their indices."""
        return check_offloaded_slices(self.program())
