"""What a step promised beside what its compiled program does, a line each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from zerojax.analysis import hlo
from zerojax.analysis.hlo import Program
from zerojax.audit.communication import SLACK, Wire
from zerojax.audit.expectation import Promise
from zerojax.audit.findings import Audit, Line, Result, Unread, Verdict, bytes_text, examine, listed, reading
from zerojax.sharding import placement
from zerojax.sharding.annotations import spec_text
from zerojax.sharding.axes import axis_names


def audit(step: Any, promise: Promise) -> Audit:
    """What a step promised beside what its compiled program does. Nothing is run.

    Programs for GPUs are read best. XLA for CPUs merges gathers, widens what it sends and runs one collective after the
    other: there what is sent is read from the traced step. What cannot be read is a line that says why.

    What is not told apart: collectives over data axes that the model itself makes count as those of the step, those of
    at most 256 bytes as none.

    Args:
        step: `jax.jit(fn, ...).trace(state, ...)` of any function, whoever wrote it; it is compiled here. Or a compiled
            one, of which the order of gathers is not read, and on CPU nothing of what is sent.
        promise: `step.promise(state, batch)` of a step of zerojax with the same loss. The state that it is about has to
            be the first argument.

    Raises:
        ValueError: the first argument is another state.

    Cost: to compile, if it is not; and to read the text, about a twentieth of the time that the compiler took.
    """
    jaxpr = step.jaxpr if isinstance(step, jax.stages.Traced) else None
    compiled = step.lower().compile() if isinstance(step, jax.stages.Traced) else step
    program, platform = _reader(compiled), promise.setup.mesh.devices.flat[0].platform
    held, wire = _Held(compiled, program, promise, platform), Wire(program, jaxpr, promise, platform)
    return examine([*held.lines(), *wire.lines()])


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


class _Held:
    """Where the state lives, whether it is updated in place, and what waits in host memory."""

    def __init__(self, compiled: Any, program: Callable[[], Program], promise: Promise, platform: str):
        self.compiled, self.program, self.promise, self.platform = compiled, program, promise, platform
        self._check_state()
        # None where the program does not read an argument, which then has no number among its parameters.
        self.shardings = jax.tree.structure(compiled.args_info).flatten_up_to(compiled.input_shardings)

    def _check_state(self) -> None:
        given = jax.tree.leaves(self.compiled.args_info)
        kind = lambda a: f"{a.dtype}[{','.join(map(str, a.shape))}]"
        for k, (path, want) in enumerate(self.promise.state.items()):
            got = kind(given[k]) if k < len(given) else "no more arguments"
            if got != kind(want):
                raise ValueError(
                    f"audit: the first argument of the step is not the state that the promise is about\n"
                    f"  got:      {got} for {path}, {kind(want)}\n"
                    f"  fix:      the promise of a step over the same state"
                )

    def lines(self) -> list[Line]:
        state, axes = self.promise.state.values(), self.promise.setup.axes
        names = [{name for entry in aval.sharding.spec for name in axis_names(entry)} for aval in state]
        divided = sum(bool(set(axes.shard) & each) for each in names)
        offloaded = self.promise.offloaded_bytes
        return [
            Line("sharded", f"{divided} of {len(state)} leaves over {'x'.join(axes.shard)}", self.sharded),
            Line("aliased state", f"{bytes_text(_held_bytes(state))} on a device, updated in place", self.aliased),
            Line(
                "checkpoints",
                f"{bytes_text(offloaded)} of activations in host memory" if offloaded else None,
                self.checkpoints,
            ),
        ]

    def sharded(self) -> Result:
        wrong, more = [], 0
        for (path, want), got in zip(self.promise.state.items(), self.shardings, strict=False):
            if got is None or _same(got, want):
                continue
            held, promised = placement.shard_bytes(want, got), placement.shard_bytes(want, want.sharding)
            spec = spec_text(got.spec) if isinstance(got, NamedSharding) else str(got)
            more += held - promised
            wrong.append(
                f"{path}: {spec}, {bytes_text(held)}, for {spec_text(want.sharding.spec)}, {bytes_text(promised)}"
            )
        if not wrong:
            return Result("the same", Verdict.OK)
        fix = "create the state with zero.init, or jax.device_put it to the shardings of zero.eval_init"
        return Result(listed(wrong), Verdict.BROKEN, {"leaves": len(wrong), "more_bytes": more}, fix)

    def aliased(self) -> Result:
        numbered = [k for k, sharding in enumerate(self.shardings) if sharding is not None]
        aliased = {numbered[number] for number in self.program().aliased}
        missing = [path for k, path in enumerate(self.promise.state) if k in numbered and k not in aliased]
        if not missing:
            return Result("the same", Verdict.OK)
        num_bytes = {path: _held_bytes([self.promise.state[path]]) for path in missing}
        missing.sort(key=lambda path: -num_bytes[path])
        more = sum(num_bytes.values())
        fix = "jax.jit(step, donate_argnums=0), and return each leaf with the dtype and sharding that it came with"
        found = f"{bytes_text(more)} are not: {listed(missing)}"
        return Result(found, Verdict.BROKEN, {"leaves": len(missing), "more_bytes": more}, fix)

    def checkpoints(self) -> Result:
        if self.platform == "cpu":
            raise Unread("simulated devices have no memory beside that of the host")
        promised, found = self.promise.offloaded_bytes, self.compiled.memory_analysis().host_temp_size_in_bytes
        numbers = {"promised_bytes": promised, "found_bytes": found}
        if found >= (1 - SLACK) * promised:
            return Result(f"{bytes_text(found)} there", Verdict.OK, numbers)
        fix = "another place for them (keep=): the compiler keeps them on the device, or computes them again"
        return Result(f"{bytes_text(found)} there", Verdict.BROKEN, numbers, fix)
