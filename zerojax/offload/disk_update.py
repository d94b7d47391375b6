"""The update of a state whose optimizer is on a local disk: what the program of a step has left is done from Python.

The program computes the gradients, and what the update computes once, such as the factor that clips them. Then the
pieces of each parameter come and go, while threads read those that follow and write those before:

    read      1 2 3 4
    compute       1 2 3 4
    write           1 2 3 4

Each piece is updated by a small program, the same for all parameters that are alike.

Source: ZeRO-Infinity, 5.2.2 and 6.2, arXiv 2104.07857.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.comm.buckets import Pieces
from zerojax.offload import host_pieces
from zerojax.offload.disk import Buffer, DiskFile, Member, aligned, local_shards, shard_numbers, shards_of
from zerojax.offload.streamed_update import Arrays, Fixed, StreamedUpdate
from zerojax.step.gradient import DeviceGradient
from zerojax.step.over_data import shard_map_over_data
from zerojax.step.state import TrainState, shardings
from zerojax.step.update import StepGrads, Updated, gather_params
from zerojax.utils.typing import Array

RECORD_BYTES = 2**25  # about those of a record, for all arrays of a parameter and all devices of a process
BUFFERS = 8  # records in host memory at a time
_AHEAD = 3  # records that are read, or will be, before they are needed
_THREADS = 4
Results: TypeAlias = tuple[Arrays, Array, Arrays, Array, list[Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """What the program of a step leaves for the update of what is on the disk."""

    grads: Arrays  # by parameter
    sliced: list[Array]  # values of `SplitUpdate.sliced`, stored like their parameters
    scalars: list[Array]  # values of `SplitUpdate.scalars`
    squared_norm: Array  # of the parameters that have been updated already
    update: DiskUpdate = dataclasses.field(metadata={"static": True})


class DiskUpdate(StreamedUpdate):
    """The update of a state whose optimizer is on a local disk. Its arguments are those of `StreamedUpdate`."""

    two_passes = False

    def __call__(self, state: TrainState, step: StepGrads) -> Updated:
        """In the program of a step: updates what is computed once, and leaves the rest for `finish`."""
        whole = self._compute_whole(state, step)
        stored = {p: whole.arrays[p] for p in self._in_place}
        updated = self._updated(state, whole, stored, whole.computed, jnp.float32(0))
        first = self._num_results
        grads = {p - first: a for p, a in self._cut_grads(whole.arrays).items()}
        sliced = [self._zeros[k].pad(whole.once[v]) for v, k in self.split.sliced]
        scalars = [whole.once[v] for v in self.split.scalars]
        assert updated.squared_norm is not None
        pending = Pending(grads, sliced, scalars, updated.squared_norm, self)
        return updated._replace(pending=pending)

    # The arrays on the disk

    @functools.cached_property
    def on_disk(self) -> dict[int, list[int]]:
        """The positions of the arrays on the disk, by the parameter that they belong to."""
        found: dict[int, list[int]] = {k: [] for k in self.split.leaves}
        for p in sorted(self._in_place):
            operand = self.split.arguments[p]
            if operand.in_host and operand.leaf is not None:
                found[operand.leaf].append(p)
        return found

    def _arrays(self, state: TrainState) -> list[Any]:
        """The arrays of a state by position: trained parameters or their master copy, and the optimizer's state."""
        params = state.layout.trained(state.params) if state.master is None else state.master
        return [*jax.tree.leaves(params), *jax.tree.leaves(state.opt_state)]

    def places(self, state: TrainState) -> dict[Any, tuple[int, int]]:
        """(parameter, position) of each leaf of a state that is on the disk."""
        arrays = self._arrays(state)
        return {arrays[p]: (k, p) for k, positions in self.on_disk.items() for p in positions}

    def with_arrays(self, state: TrainState, changed: Mapping[int, Any]) -> TrainState:
        """A state with other arrays at some positions, of its optimizer and its master copy."""
        arrays = [changed.get(p, a) for p, a in enumerate(self._arrays(state))]
        opt_state = self._state_tree.unflatten(arrays[self._num_params :])
        state = dataclasses.replace(state, opt_state=opt_state)
        if state.master is None:
            return state
        return dataclasses.replace(state, master=self._params_tree.unflatten(arrays[: self._num_params]))

    def create_file(self, directory: Path, state: TrainState) -> DiskFile:
        """A file for the arrays of a state on the disk, of which these are avals."""
        avals = self._arrays(state)
        parameters: dict[int, dict[int, Member]] = {}
        for k, positions in self.on_disk.items():
            rows = lambda a, cut=self._cuts[k]: cut.of_rows(a.sharding.shard_shape(tuple(a.shape)))
            if positions:
                parameters[k] = {p: Member(avals[p], rows(avals[p])) for p in positions}
        return DiskFile(directory, parameters)

    # The update

    def finish(
        self, gradient: DeviceGradient, before: TrainState, after: TrainState, pending: Pending
    ) -> tuple[TrainState, Array]:
        """Updates the pieces of all parameters.

        Args:
            gradient: of the step.
            before: the state before the step, of which the arrays on the disk are read.
            after: the state as the program of the step returned it.
            pending: what the program left.

        Returns:
            (the state after the step, the norm of its trained parameters).
        """
        # Find the arrays.
        arrays = self._arrays(before)
        on_disk = {p: arrays[p] for positions in self.on_disk.values() for p in positions}
        files = {id(a.file): a.file for a in on_disk.values()}
        assert len(files) <= 1 and self.config.disk is not None
        file = next(iter(files.values()), None) or DiskFile(self.config.disk, {})  # the optimizer may have no arrays

        # Update them.
        computed = dict(enumerate(jax.tree.leaves(after.layout.trained(after.params))))
        kept = {p: a for p, a in enumerate(self._arrays(after)) if p in self._in_place and p not in on_disk}
        file.is_torn = True
        computed, kept, norm = self._update_pieces(file, pending, computed, kept)
        file.is_torn, file.version = False, file.version + 1

        # Put the state together.
        stand_ins = self._arrays(after)
        changed = {p: a.after_update(stand_ins[p]) for p, a in on_disk.items()} | kept
        after = self.with_arrays(after, changed)
        trained = self._params_tree.unflatten([computed[k] for k in range(self._num_params)])
        if self.config.gathers_updates:
            trained = self._gather(gradient, after)(trained)
        return dataclasses.replace(after, params=after.layout.with_frozen(trained, after.params)), norm

    def _gather(self, gradient: DeviceGradient, state: TrainState) -> Any:
        if "gather" not in self._programs:
            placed = state.layout.trained(shardings(self.config, state).params)
            gather = functools.partial(gather_params, gradient)
            self._programs["gather"] = jax.jit(gather, out_shardings=placed)
        return self._programs["gather"]

    def _update_pieces(
        self, file: DiskFile, pending: Pending, computed: Arrays, kept: Arrays
    ) -> tuple[Arrays, Arrays, Array]:
        """Updates all parameters piece by piece: (parameters, other arrays on the devices, the parameters' norm)."""
        operands, mesh = self.split.arguments, self.config.mesh
        computed, kept, grads = dict(computed), dict(kept), dict(pending.grads)
        per_device = NamedSharding(mesh, PartitionSpec(self.config.axes.data))
        scalars = pending.scalars
        total = jax.device_put(np.zeros(self.config.axes.num_devices, np.float32), per_device)
        with Records(file, [(k, c) for k in file.parameters for c in range(file.count(k))]) as records:
            for k in [*file.parameters, *(k for k in self.split.leaves if k not in file.parameters)]:
                own = {p: a for p, a in kept.items() if operands[p].leaf == k}
                sliced = [
                    a if leaf == k else None for a, (_, leaf) in zip(pending.sliced, self.split.sliced, strict=True)
                ]
                for c in range(file.count(k) if k in file.parameters else 1):
                    fetched = records.fetch(k, c) if k in file.parameters else {}
                    args = np.int32(c), fetched, grads[k], computed[k], own, sliced, scalars, total
                    results, computed[k], own, total, scalars = self._program(k, args)(*args)
                    if k in file.parameters:
                        records.send(k, c, results)
                kept |= own
                del grads[k]
        return computed, kept, _norm(total, pending.squared_norm)

    def _program(self, k: int, args: tuple[Any, ...]) -> Any:
        """The compiled program that updates a piece of parameter `k`. Those whose text is the same are one."""
        if k not in self._programs:
            own, replicated = (NamedSharding(self.config.mesh, spec) for spec in (self._specs[k], PartitionSpec()))
            placed = (own, own, own, args[-1].sharding, replicated)
            jitted = jax.jit(functools.partial(self._piece, k), out_shardings=placed, donate_argnums=(3, 4, 6, 7))
            lowered = jitted.lower(*args)
            text = lowered.as_text()
            if text not in self._programs:
                self._programs[text] = lowered.compile()
            self._programs[k] = self._programs[text]
        return self._programs[k]

    def _piece(
        self,
        k: int,
        c: Array,
        fetched: Arrays,
        grads: Array,
        computed: Array,
        kept: Arrays,
        sliced: Sequence[Array | None],
        scalars: list[Array],
        total: Array,
    ) -> Results:
        """Updates piece `c` of parameter `k` on all devices.

        Returns:
            (arrays for the disk, the parameter, `kept`, the squared norm of each device's part so far, the scalars).
            XLA would multiply with the reciprocal of a scalar that nothing else reads, and so round differently from
            the program that updates all parameters.
        """
        positions, cut = self.on_disk[k], self._cuts[k]

        def on_device(
            c: Array,
            fetched: Arrays,
            grads: Array,
            computed: Array,
            kept: Arrays,
            sliced: list[Array],
            scalars: list[Array],
            total: Array,
        ) -> Results:
            fixed = Fixed({self._num_results + k: grads}, sliced, scalars, None)
            results, _ = self._update_piece(k, cut, c, fetched, kept, computed, fixed, ())
            kept = {p: cut.of_rows(a.shape).write(a, results[p], c) for p, a in kept.items()}
            new = cut.write(computed, results[k].astype(computed.dtype), c)
            total += self._squared_norm(k, results[k])
            return {p: results[p] for p in positions}, new, kept, total, scalars

        own, replicated, per_device = self._specs[k], PartitionSpec(), PartitionSpec(self.config.axes.data)
        update = shard_map_over_data(
            self.config,
            on_device,
            (replicated, own, own, own, own, own, replicated, per_device),
            (own, own, own, per_device, replicated),
        )
        return update(c, fetched, grads, computed, kept, sliced, scalars, total)

    @functools.cached_property
    def _programs(self) -> dict[object, Any]:
        return {}

    @functools.cached_property
    def _cuts(self) -> dict[int, Pieces]:
        """The pieces of a shard of each parameter, for records of about `RECORD_BYTES`."""
        avals = [*jax.tree.leaves(self.layout.trained_avals()), *self._created]
        cuts = {}
        for k, positions in self.on_disk.items():
            sharding = NamedSharding(self.config.mesh, self._specs[k])
            stored = self._zeros[k].stored_shape(self.leaves[k].shape)
            shard, count = sharding.shard_shape(stored), len(shards_of(sharding, stored))
            num_bytes = count * math.prod(shard) * sum(avals[p].dtype.itemsize for p in positions)
            is_row = len(shard) == 1 and k in self.split.whole_rows
            wanted = 1 if is_row else max(1, -(-num_bytes // RECORD_BYTES))
            cuts[k] = host_pieces.cut(shard, wanted, self.config.mesh)
        return cuts


@jax.jit
def _norm(squared: Array, others: Array) -> Array:
    return jnp.sqrt(jnp.sum(squared) + others)


class Records:
    """Reads records in a given order ahead of their use, and writes them back. At most `BUFFERS` are in host memory."""

    def __init__(self, file: DiskFile, order: Sequence[tuple[int, int]]):
        self._file, self._to_read = file, iter(order)
        size = max(file.record_bytes.values(), default=0)
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(min(BUFFERS, len(order))):
            self._free.put(aligned(size))
        self._pool = ThreadPoolExecutor(_THREADS, "zerojax-disk")
        self._reads: collections.deque[Future[Buffer]] = collections.deque()
        self._writes: collections.deque[Future[None]] = collections.deque()
        self._buffer: Buffer | None = None

    def __enter__(self) -> Records:
        self._read_ahead()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for write in self._writes:
                write.result()

    def fetch(self, k: int, c: int) -> Arrays:
        """The arrays of the next record, on the devices."""
        self._buffer = self._reads.popleft().result()
        self._read_ahead()
        arrays = {}
        views = self._file.views(k, self._buffer)
        for p, member in self._file.parameters[k].items():
            sharding = NamedSharding(member.aval.sharding.mesh, member.aval.sharding.spec)
            placed = shard_numbers(member.aval)
            parts = jax.device_put([views[p][n] for _, n in placed], [device for device, _ in placed])
            whole = sharding.shard_shape(tuple(member.aval.shape))
            grid = [full // part for full, part in zip(member.aval.shape, whole, strict=True)]
            shape = tuple(n * size for n, size in zip(grid, member.pieces.piece, strict=True))
            arrays[p] = jax.make_array_from_single_device_arrays(shape, sharding, parts)
        return arrays

    def send(self, k: int, c: int, results: Arrays) -> None:
        """Writes the record that was fetched last, when these arrays have been computed."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        self._writes.append(self._pool.submit(self._write, k, c, buffer, results))
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def rewrite(self, k: int, c: int) -> None:
        """Writes the next record as it is."""
        buffer = self._reads.popleft().result()
        self._read_ahead()
        self._writes.append(self._pool.submit(self._write_back, k, c, buffer))

    def _write_back(self, k: int, c: int, buffer: Buffer) -> None:
        self._file.write(k, c, buffer)
        self._free.put(buffer)

    def _read_ahead(self) -> None:
        while len(self._reads) < _AHEAD and (record := next(self._to_read, None)) is not None:
            while True:
                try:
                    buffer = self._free.get(timeout=1)
                    break
                except queue.Empty:  # a write may have failed, and so have freed none
                    for write in self._writes:
                        if write.done():
                            write.result()
            self._reads.append(self._pool.submit(self._read, *record, buffer))

    def _read(self, k: int, c: int, buffer: Buffer) -> Buffer:
        self._file.read(k, c, buffer)
        return buffer

    def _write(self, k: int, c: int, buffer: Buffer, results: Arrays) -> None:
        jax.block_until_ready(results)  # of all devices: on CPU devices, those that are read share the buffer's memory
        for p, views in self._file.views(k, buffer).items():
            for view, shard in zip(views, local_shards(results[p]), strict=True):
                view[...] = shard
        self._write_back(k, c, buffer)
