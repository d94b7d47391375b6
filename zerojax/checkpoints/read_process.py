"""The process that reads saved arrays for `pieces.LimitedReader`, with limited memory; run as a script.

Arrays may come from a stranger. An index, a chunk or a compressed stream can state sizes of any kind, and libraries
allocate some of them before they check. Here, an allocation beyond the limit ends this process, and no other.

    stdin    a line of JSON for each read: {"spec": .., "shape": .., "dtype": .., "index": [[0, 4], 2], "max_bytes": ..}
    stdout   a line of JSON for each read: {"num_bytes": 32} and then the bytes, or {"error": "why it failed"}

It imports nothing of zerojax, so that it starts in a third of a second.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from typing import Any

MAX_ERROR = 300  # characters


def serve(memory_limit_bytes: int) -> None:
    """Reads what stdin asks for, until it ends."""
    for kind, limit in ((resource.RLIMIT_AS, memory_limit_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    opened: tuple[Any, Any] = (None, None)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            if opened[0] != request["spec"]:
                opened = (None, None)
                opened = (request["spec"], _open(request))
            data = _read(opened[1], request["index"], request["max_bytes"])
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            _answer({"error": message[:MAX_ERROR]})
        else:
            _answer({"num_bytes": len(data)})
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            del data  # before the next piece is read


def _open(request: Any) -> Any:
    """Opens an array. Raises ValueError if it is not the one that is wanted, or if chunks are missing."""
    import tensorstore  # here, so that its memory is limited too

    # Each thread has a stack, and each read that is in progress a chunk.
    context = tensorstore.Context({"data_copy_concurrency": {"limit": 4}, "file_io_concurrency": {"limit": 8}})
    array: Any = tensorstore.open(request["spec"], open=True, read=True, context=context).result()
    found, wanted = (tuple(array.shape), array.dtype.name), (tuple(request["shape"]), request["dtype"])
    if found != wanted:
        on_disk, saved = (f"shape {shape} and dtype {dtype}" for shape, dtype in (found, wanted))
        raise ValueError(f"{on_disk} on disk, {saved} in the manifest")
    chunk = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    needed = math.prod(-(-n // m) for n, m in zip(array.shape, chunk, strict=True))
    there = len(array.kvstore.list().result()) - 1  # the other file describes the array
    if there < needed:
        raise ValueError(f"{wanted[1]} of shape {wanted[0]} needs {needed} chunks of shape {chunk}; there are {there}")
    return array


def _read(array: Any, index: Any, max_bytes: int) -> Any:
    """The bytes of a part of an array, in C order."""
    import numpy as np

    box = [tuple(each) if isinstance(each, list) else (each, each + 1) for each in index]
    box += [(0, n) for n in array.shape[len(box) :]]
    out = np.empty([stop - start for start, stop in box], array.dtype.numpy_dtype)
    _read_into(out, array, box, max_bytes)
    return out.reshape(-1).view(np.uint8).data


def _read_into(out: Any, array: Any, box: list[tuple[int, int]], max_bytes: int) -> None:
    """Reads a part of an array, and at most `max_bytes` of chunks at a time, or one chunk.

    tensorstore may read all chunks of a part before it decodes the first. A row of a matrix can lie in all of them.
    """
    chunk = array.chunk_layout.read_chunk.shape or ()
    numbers = [-(-stop // m) - start // m for (start, stop), m in zip(box, chunk, strict=True)]
    dim = max(range(len(box)), key=numbers.__getitem__, default=0)
    num_bytes = math.prod(numbers) * math.prod(chunk) * out.dtype.itemsize
    if num_bytes <= max_bytes or numbers[dim] == 1:
        out[...] = array[tuple(slice(*each) for each in box)].read().result()
        return
    (start, stop), m = box[dim], chunk[dim]
    middle = (start // m + numbers[dim] // 2) * m
    for first, last in ((start, middle), (middle, stop)):
        inside = (*[slice(None)] * dim, slice(first - start, last - start))
        _read_into(out[inside], array, [*box[:dim], (first, last), *box[dim + 1 :]], max_bytes)


def _answer(content: object) -> None:
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
