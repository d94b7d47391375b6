"""Reads and verifies saved arrays on the host in pieces of bounded size, without devices and with bounded memory."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoints import store
from zerojax.checkpoints.digest import HostDigest
from zerojax.checkpoints.manifest import CheckpointCorrupted, LeafRecord, Manifest, plain_text
from zerojax.utils.files import irregular
from zerojax.utils.text import bytes_text
from zerojax.utils.typing import Shape

PIECE_BYTES = 2**26
# Of the process that reads. A save writes chunks of 16 MiB, and an index of 100 MB holds a million of them, so this
# leaves room for checkpoints of other programs with chunks of up to a GiB.
MEMORY_LIMIT_BYTES = 2**32
_MAX_ENDED = 3
_SCRIPT = Path(__file__).with_name("read_process.py")


class LimitedReader:
    """Reads the arrays of a step, whoever wrote them, in a process of its own that has at most 4 GiB of memory.

    The size of an array in the manifest, the chunks that it is divided into, and what they decompress to may
    contradict each other, or the files. Where they do, or where reading takes more memory than that, there is an
    error, and the next array is read by a new process, three times at most.

    Args:
        directory, step: the checkpoint.

    Raises:
        CheckpointCorrupted: if its folder contains a link, a pipe or a device.

    Cost: the process starts with the first read, in a third of a second, and passes arrays on through a pipe. There is
    no limit on time: it is that of reading as many bytes as the manifest states.
    """

    def __init__(self, directory: Path, step: int):
        self._folder, self._step_folder = store.arrays_folder(directory, step), store.folder(directory, step)
        if strange := irregular(self._step_folder):
            raise CheckpointCorrupted(
                f"checkpoint: {self._step_folder} contains a link, a pipe or a device\n"
                f"  got:      {plain_text(str(strange[0]))}\n  fix:      copy the step with `cp -rL`, if you trust it"
            )
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: Any = None
        self._num_ended = 0  # processes

    def __enter__(self) -> LimitedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def pieces(
        self, path: str, leaf: LeafRecord, max_bytes: int = PIECE_BYTES, *, element: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yields the consecutive parts of an array, or of one element along its dim 0, in C order.

        Args:
            path, leaf: the array, as recorded in the manifest.
            max_bytes: the largest size of a piece, and of the chunks that are read at a time, unless one is larger.
            element: the index in dim 0 of what is read; by default, everything.

        Raises:
            CheckpointCorrupted: if the array cannot be read within the limit on memory, has another shape or dtype on
                disk, or a part of it is missing.
        """
        dtype = np.dtype(jnp.dtype(leaf.dtype))
        shape, first = (leaf.shape, ()) if element is None else (leaf.shape[1:], (element,))
        if 0 in shape:
            return  # nothing was written
        for index in _blocks(shape, max(1, max_bytes // dtype.itemsize)):
            # Orbax stores chunks of zeros too: one that is missing was lost.
            spec = store.array_spec(self._folder, path) | {"fill_missing_data_reads": False}
            request = {"spec": spec, "shape": leaf.shape, "dtype": leaf.dtype, "max_bytes": max_bytes}
            request["index"] = [[n.start, n.stop] if isinstance(n, slice) else n for n in (*first, *index)]
            yield self._read(path, request, np.empty(_block_shape(shape, index), dtype))

    def _read(self, path: str, request: Mapping[str, object], out: np.ndarray) -> np.ndarray:
        """Reads a part of an array into `out`, and returns it."""
        problem = self._problem(request, out)
        if problem is not None:
            raise CheckpointCorrupted(
                f"checkpoint: {plain_text(path)} of {self._step_folder} cannot be read\n"
                f"  got:      {plain_text(problem)}"
            )
        return out

    def _problem(self, request: Mapping[str, object], out: np.ndarray) -> str | None:
        """Reads a part of an array into `out`. Returns why it failed, or None."""
        if self._num_ended == _MAX_ENDED:
            return f"not read, since reading others ended {_MAX_ENDED} times"
        process = self._start()
        stdin, stdout = cast(BinaryIO, process.stdin), cast(io.BufferedReader, process.stdout)
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
            if "error" in answer:
                return answer["error"]
            data = out.reshape(-1).view(np.uint8).data
            if answer["num_bytes"] == len(data) == stdout.readinto(data):
                return None
        except (OSError, ValueError):  # it has ended, and closed its pipes
            pass
        return self._how_it_ended()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(MEMORY_LIMIT_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                # malloc reserves 64 MiB of addresses for each arena, and has up to eight arenas for each core.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "4"},
            )
        return self._process

    def _how_it_ended(self) -> str:
        """Describes how the process ended that should have answered."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        self._stderr.seek(0)
        *_, last = ["", *self._stderr.read().decode(errors="replace").split("\n")[-2:-1]]
        self._close()
        self._num_ended += 1
        return (
            f"reading it ended with code {code}; it may use {bytes_text(MEMORY_LIMIT_BYTES)} of memory. {last.strip()}"
        )

    def _close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError), self._process:
                self._process.kill()
            self._process = None
            self._stderr.close()


def _blocks(shape: Shape, max_elements: int) -> Iterator[tuple[slice | int, ...]]:
    """Yields the indices of consecutive blocks of at most `max_elements` elements."""
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    if inner <= max_elements:
        rows = max_elements // inner
        yield from ((slice(i, min(i + rows, shape[0])),) for i in range(0, shape[0], rows))
        return
    for i in range(shape[0]):
        yield from ((i, *block) for block in _blocks(shape[1:], max_elements))


def _block_shape(shape: Shape, index: tuple[slice | int, ...]) -> Shape:
    sizes = tuple(each.stop - each.start for each in index if isinstance(each, slice))
    return (*sizes, *shape[len(index) :])


def verify_arrays(
    directory: Path, step: int, manifest: Manifest, paths: Iterable[str] | None = None
) -> Iterator[tuple[str, str | None]]:
    """Reads arrays of a step, and compares their digests with the manifest.

    Args:
        directory, step, manifest: the checkpoint.
        paths: of the arrays; by default all of them.

    Yields:
        (path, what is wrong with the array, or None if it is intact).

    Cost: reads the arrays once, and holds one piece in host memory; see `LimitedReader`.
    """
    with LimitedReader(directory, step) as reader:
        for path in manifest.leaves if paths is None else paths:
            leaf, digest = manifest.leaves[path], HostDigest()
            try:
                for piece in reader.pieces(path, leaf):
                    digest.add(piece)
            except CheckpointCorrupted as error:
                yield path, str(error).splitlines()[-1].removeprefix("  got:").strip()
            else:
                intact = digest.text == leaf.digest
                yield path, None if intact else f"digest {digest.text} on disk, {leaf.digest} was saved"


def check_intact(directory: Path, step: int, manifest: Manifest, paths: Iterable[str] | None = None) -> None:
    """Raises CheckpointCorrupted if an array differs from what was saved; as `verify_arrays`."""
    damaged = [(path, problem) for path, problem in verify_arrays(directory, step, manifest, paths) if problem]
    if damaged:
        path, problem = damaged[0]
        raise CheckpointCorrupted(
            f"checkpoint: {len(damaged)} of the {len(manifest.leaves)} arrays of step {step} are damaged\n"
            f"  got:      {plain_text(path)}: {plain_text(problem or '')}\n  fix:      use another step"
        )
