"""Compares what a step is expected to do with its compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from zerojax.analysis import hlo
from zerojax.analysis.hlo import Program
from zerojax.audit.communication import SLACK, CommunicationChecks
from zerojax.audit.expectation import Expectation
from zerojax.audit.findings import Audit, Line, Outcome, Unread, Verdict, bytes_text, examine, listed, reading
from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import axis_names


def audit_step(step: Any, expectation: Expectation) -> Audit:
    """Compares what a step is expected to do with its compiled program. Nothing is run.

    Programs for GPUs are read best. XLA for CPUs merges gathers, widens what it sends and runs one collective after the
    other: there what is sent is read from the traced step. What cannot be read is a line that says why.

    What is not told apart: collectives over data axes that the model itself makes count as those of the step, those of
    at most 256 bytes as none.

    Args:
        step: `jax.jit(fn, ...).trace(state, ...)` of any function, whoever wrote it; it is compiled here. Or a compiled
            one, of which the order of gathers is not read, and on CPU nothing of what is sent.
        expectation: `step.expectation(state, batch)` of a step of zerojax with the same loss. Its state has to be the
            first argument of `step`.

    Raises:
        ValueError: the first argument is another state.

    Cost: to compile, if it is not; and to read the text, about a twentieth of the time that the compiler took.
    """
    jaxpr = step.jaxpr if isinstance(step, jax.stages.Traced) else None
    compiled = step.lower().compile() if isinstance(step, jax.stages.Traced) else step
    program, platform = _reader(compiled), expectation.config.mesh.devices.flat[0].platform
    memory = _MemoryChecks(compiled, program, expectation, platform)
    communication = CommunicationChecks(program, jaxpr, expectation, platform)
    return examine([*memory.lines(), *communication.lines()])


def _reader(compiled: Any) -> Callable[[], Program]:
    """Reads the text of a program, once. Where it refuses what it does not know, the lines that need it are unread."""

    @functools.cache
    def program() -> Program:
        with reading():
            return hlo.read(compiled.as_text() or "")

    return program


def _held_bytes(avals: Iterable[Any]) -> int:
    return sum(placement.shard_bytes(aval, aval.sharding) for aval in avals)


def _same(got: Any, want: Any) -> bool:
    """Whether an array is placed as promised: on these devices, or on others of an equal mesh (described ones)."""
    mesh = want.sharding.mesh
    if isinstance(got, NamedSharding) and dict(got.mesh.shape) == dict(mesh.shape):
        got = NamedSharding(mesh, got.spec, memory_kind=got.memory_kind)
    return got.is_equivalent_to(want.sharding, len(want.shape))


class _MemoryChecks:
    """Where the state lives, whether it is updated in place, and what waits in host memory."""

    def __init__(self, compiled: Any, program: Callable[[], Program], expectation: Expectation, platform: str):
        self.compiled, self.program, self.expectation, self.platform = compiled, program, expectation, platform
        self._check_state()
        # None where the program does not read an argument, which then has no number among its parameters.
        self.shardings = jax.tree.structure(compiled.args_info).flatten_up_to(compiled.input_shardings)

    def _check_state(self) -> None:
        given = jax.tree.leaves(self.compiled.args_info)
        kind = lambda a: f"{a.dtype}[{','.join(map(str, a.shape))}]"
        for k, (path, want) in enumerate(self.expectation.state.items()):
            got = kind(given[k]) if k < len(given) else "no more arguments"
            if got != kind(want):
                raise ValueError(
                    f"audit: the first argument of the step is not the state that the promise is about\n"
                    f"  got:      {got} for {path}, {kind(want)}\n"
                    f"  fix:      the promise of a step over the same state"
                )

    def lines(self) -> list[Line]:
        state, axes = self.expectation.state.values(), self.expectation.config.axes
        names = [{name for entry in aval.sharding.spec for name in axis_names(entry)} for aval in state]
        divided = sum(bool(set(axes.shard) & each) for each in names)
        offloaded = self.expectation.offloaded_bytes
        return [
            Line("sharded", f"{divided} of {len(state)} leaves over {'x'.join(axes.shard)}", self.sharded),
            Line("aliased state", f"{bytes_text(_held_bytes(state))} on a device, updated in place", self.aliased),
            Line(
                "checkpoints",
                f"{bytes_text(offloaded)} of activations in host memory" if offloaded else None,
                self.checkpoints,
            ),
        ]

    def sharded(self) -> Outcome:
        wrong, more = [], 0
        for (path, want), got in zip(self.expectation.state.items(), self.shardings, strict=False):
            if got is None or _same(got, want):
                continue
            held, promised = placement.shard_bytes(want, got), placement.shard_bytes(want, want.sharding)
            spec = spec_text(got.spec) if isinstance(got, NamedSharding) else str(got)
            more += held - promised
            wrong.append(
                f"{path}: {spec}, {bytes_text(held)}, for {spec_text(want.sharding.spec)}, {bytes_text(promised)}"
            )
        if not wrong:
            return Outcome("the same", Verdict.OK)
        fix = "create the state with zero.init, or jax.device_put it to the shardings of zero.eval_init"
        return Outcome(listed(wrong), Verdict.BROKEN, {"leaves": len(wrong), "more_bytes": more}, fix)

    def aliased(self) -> Outcome:
        numbered = [k for k, sharding in enumerate(self.shardings) if sharding is not None]
        aliased = {numbered[number] for number in self.program().aliased}
        missing = [path for k, path in enumerate(self.expectation.state) if k in numbered and k not in aliased]
        if not missing:
            return Outcome("the same", Verdict.OK)
        num_bytes = {path: _held_bytes([self.expectation.state[path]]) for path in missing}
        missing.sort(key=lambda path: -num_bytes[path])
        more = sum(num_bytes.values())
        fix = "jax.jit(step, donate_argnums=0), and return each leaf with the dtype and sharding that it came with"
        found = f"{bytes_text(more)} are not: {listed(missing)}"
        return Outcome(found, Verdict.BROKEN, {"leaves": len(missing), "more_bytes": more}, fix)

    def checkpoints(self) -> Outcome:
        if self.platform == "cpu":
            raise Unread("simulated devices have no memory beside that of the host")
        promised, found = self.expectation.offloaded_bytes, self.compiled.memory_analysis().host_temp_size_in_bytes
        numbers = {"expected_bytes": promised, "found_bytes": found}
        if found >= (1 - SLACK) * promised:
            return Outcome(f"{bytes_text(found)} there", Verdict.OK, numbers)
        fix = "another place for them (remat=): the compiler keeps them on the device, or computes them again"
        return Outcome(f"{bytes_text(found)} there", Verdict.BROKEN, numbers, fix)
