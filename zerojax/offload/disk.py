"""Arrays of a training state in a file on a local disk, cut into the pieces in which a step updates them.

The pieces of a parameter's arrays that are updated together are one record, which is read and written at once:

    file      piece 0 of 'embed' | piece 1 of 'embed' | piece 0 of 'layers/0/up' | ...
    record    master copy | first moment | second moment, each for every shard of this process

Every process has a file of its own. It has no name, so it ends with the process, and nothing can be resumed from it:
checkpoints are copies of it, and what is restored is written to a new file.

Source: ZeRO-Infinity, 5.2.2 and 6.3, arXiv 2104.07857.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from zerojax.comm.buckets import Pieces
from zerojax.utils.text import bytes_text, error_text
from zerojax.utils.typing import Array, Aval, DTypeLike, Shape

ALIGNMENT = 4096  # of what is read and written past the page cache: a multiple of the sectors of disks
Buffer = np.ndarray  # bytes, aligned


class Member(NamedTuple):
    """An array of which each record of a parameter has a piece."""

    aval: Aval  # of the whole array, with its sharding
    pieces: Pieces  # of a shard


class DiskFile:
    """A file without a name, for the arrays of one state.

    Args:
        directory: on a local disk. Created if it does not exist.
        parameters: the arrays that belong to each parameter, by their positions in a state.

    Attributes:
        version: number of updates so far. An array of an earlier version is gone.
        is_torn: whether an update was cut off, so that the file is a mixture of two versions.

    Raises:
        OSError: if the disk has not enough room, all of which is allocated here.

    Cost: writes and reads do not fill the page cache, where the file system can do without it.
    """

    def __init__(self, directory: Path, parameters: Mapping[int, Mapping[int, Member]]):
        # Divide the file into records.
        self.parameters = parameters
        self.version, self.is_torn = 0, False
        self._places: dict[int, list[int]] = {}  # position -> the place of each shard in a record
        self._starts: dict[int, int] = {}  # parameter -> the place of its first record in the file
        self.record_bytes: dict[int, int] = {}
        self.num_bytes = 0
        for k, members in parameters.items():
            size = 0
            for p, member in members.items():
                step, count = _piece_bytes(member), len(shards_of(member.aval.sharding, member.aval.shape))
                self._places[p] = [size + n * step for n in range(count)]
                size += count * step
            self.record_bytes[k], self._starts[k] = size, self.num_bytes
            self.num_bytes += size * self.count(k)
        # Create it.
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(1, self.num_bytes))
        except OSError as error:
            self._file.close()
            text = f"{bytes_text(self.num_bytes)} for this process, and {os.strerror(error.errno or 0)}"
            fix = "another directory, more devices, or low_bit_moments(tx)"
            what = f"offload: the optimizer's state does not fit in {directory}"
            raise OSError(error_text(what, text, fix)) from error
        try:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except (OSError, AttributeError):  # a file system in memory, or another system than Linux
            pass

    @property
    def descriptor(self) -> int:
        """The descriptor of the file, which is open as long as there is an array in it."""
        return self._file.fileno()

    def count(self, k: int) -> int:
        """The number of records of a parameter."""
        return next(iter(self.parameters[k].values())).pieces.count

    def read(self, k: int, c: int, buffer: Buffer) -> None:
        """Reads record `c` of parameter `k` into the first bytes of a buffer."""
        self._move(os.preadv, buffer[: self.record_bytes[k]], self._start(k, c))

    def write(self, k: int, c: int, buffer: Buffer) -> None:
        """Writes record `c` of parameter `k` from the first bytes of a buffer."""
        self._move(os.pwritev, buffer[: self.record_bytes[k]], self._start(k, c))

    def _start(self, k: int, c: int) -> int:
        return self._starts[k] + c * self.record_bytes[k]

    def _move(self, call: Callable[[int, list[memoryview], int], int], buffer: Buffer, start: int) -> None:
        done = 0
        while done < len(buffer):
            moved = call(self.descriptor, [buffer[done:].data], start + done)
            if not moved:
                raise OSError(f"offload: the file of the optimizer's state ends at byte {start + done:,}")
            done += moved

    def views(self, k: int, buffer: Buffer) -> dict[int, list[np.ndarray]]:
        """The pieces of a record in a buffer, by position: one for each shard of this process."""
        return {
            p: [_piece(buffer[start:], member) for start in self._places[p]] for p, member in self.parameters[k].items()
        }

    def store(self, k: int, p: int, array: Array) -> None:
        """Writes an array of parameter `k`. Holds its shards in host memory, and a piece of one."""
        member = self.parameters[k][p]
        buffer = aligned(_piece_bytes(member))
        for start, shard in zip(self._places[p], local_shards(array), strict=True):
            for c in range(self.count(k)):
                _piece(buffer, member)[...] = shard[place(member.pieces, c)]
                self._move(os.pwritev, buffer, self._start(k, c) + start)

    def load(self, k: int, p: int) -> Array:
        """Reads an array of parameter `k` into host memory: that of its sharding."""
        member = self.parameters[k][p]
        buffer, shards = aligned(_piece_bytes(member)), []
        for start in self._places[p]:
            shards.append(np.empty(member.pieces.shape, member.aval.dtype))
            for c in range(self.count(k)):
                self._move(os.preadv, buffer, self._start(k, c) + start)
                shards[-1][place(member.pieces, c)] = _piece(buffer, member)
        sharding, shape = member.aval.sharding, tuple(member.aval.shape)
        parts = [jax.device_put(shards[n], _on(sharding, device)) for device, n in shard_numbers(member.aval)]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)


class DiskArray:
    """An array of a training state that is on a local disk. It has the attributes of a `jax.Array` that describe it.

    Its sharding is in host memory, which is where `load` puts it.

    Attributes:
        stand_in: the empty array on the devices that a compiled step gets in its place.
    """

    def __init__(self, file: DiskFile, parameter: int, position: int, stand_in: Array):
        self._file, self.parameter, self.position, self._version = file, parameter, position, file.version
        self.stand_in = stand_in
        aval = file.parameters[parameter][position].aval
        self.shape: Shape = tuple(aval.shape)
        self.dtype: DTypeLike = aval.dtype
        self.sharding: NamedSharding = aval.sharding
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * aval.dtype.itemsize

    def __repr__(self) -> str:
        return f"DiskArray({jnp.dtype(self.dtype).name}{list(self.shape)})"

    @property
    def file(self) -> DiskFile:
        """The file that it is in.

        Raises:
            ValueError: if the array was updated since, or an update of it was cut off.
        """
        if self._file.is_torn:
            what = "state: an update of the optimizer's state on the disk was cut off, so it is a mixture of two steps"
            raise ValueError(error_text(what, "an exception during a step", "resume from a checkpoint"))
        if self.is_deleted():
            what = "state: it was donated to a step, which updated it in place"
            raise ValueError(error_text(what, f"{self} of an earlier step", "continue with the state that it returned"))
        return self._file

    @property
    def file_to_fill(self) -> DiskFile:
        """The file that it is in, whatever is in it."""
        return self._file

    def is_deleted(self) -> bool:
        """Whether a step has updated the array since, or it was deleted."""
        return self._version != self._file.version

    def delete(self) -> None:
        """Marks the array as deleted. Its place in the file is free for another one."""
        self._version = -1

    def after_update(self, stand_in: Array) -> DiskArray:
        """The array as it is now in its file."""
        return DiskArray(self._file, self.parameter, self.position, stand_in)

    def load(self) -> Array:
        """Reads it into host memory."""
        return self.file.load(self.parameter, self.position)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.load(), dtype)

    def __deepcopy__(self, memo: object) -> DiskArray:
        what = "state: what is on a disk cannot be copied"
        raise ValueError(error_text(what, repr(self), "save a checkpoint, and restore it into another state"))


def _piece_bytes(member: Member) -> int:
    """The bytes that a piece of an array takes in the file."""
    return -(-math.prod(member.pieces.piece) * member.aval.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _piece(buffer: Buffer, member: Member) -> np.ndarray:
    """The piece of an array at the start of a buffer."""
    shape, dtype = member.pieces.piece, member.aval.dtype
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def aligned(num_bytes: int) -> Buffer:
    """A buffer whose address is a multiple of `ALIGNMENT`."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def place(pieces: Pieces, c: int) -> tuple[slice, ...]:
    """Where piece `c` of an array is."""
    starts = [int(i) * n for i, n in zip(np.unravel_index(c, pieces.grid), pieces.piece, strict=True)]
    return tuple(slice(start, start + n) for start, n in zip(starts, pieces.piece, strict=True))


Part: TypeAlias = tuple[tuple[int | None, int | None], ...]  # the start and stop of a part of an array in each dim


def shards_of(sharding: Sharding, shape: Shape) -> list[Part]:
    """The different parts of an array that the devices of this process have."""
    return list(dict.fromkeys(_placed(sharding, shape).values()))


def local_shards(array: Array) -> list[np.ndarray]:
    """The values of those parts, in host memory."""
    found = {_part(shard.index): shard.data for shard in reversed(array.addressable_shards)}
    return [np.asarray(found[part]) for part in shards_of(array.sharding, array.shape)]


def shard_numbers(aval: Aval) -> list[tuple[Any, int]]:
    """(device, the number of the part that it has) for each device of this process."""
    number = {part: n for n, part in enumerate(shards_of(aval.sharding, aval.shape))}
    return [(device, number[part]) for device, part in _placed(aval.sharding, aval.shape).items()]


def _placed(sharding: Sharding, shape: Shape) -> dict[Any, Part]:
    indices = sharding.addressable_devices_indices_map(tuple(shape))
    return {device: _part(index or ()) for device, index in indices.items()}


def _part(index: Iterable[slice]) -> Part:
    return tuple((each.start, each.stop) for each in index)


def _on(sharding: NamedSharding, device: Any) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
