"""Reads, writes and checks the headers of safetensors files, which describe the arrays in a file.

    8 bytes               header                                                                    data
    length of the header  {"name": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, ...}    arrays without gaps

A header comes from whoever made the file. Nothing in it is used before it is checked. A header that contradicts itself,
the format or the file raises ValueError.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zerojax.utils.typing import Shape

MAX_BYTES = 100_000_000  # of a header, the limit of the safetensors library; of other JSON too
MAX_DIMS = 64  # of a numpy array
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
METADATA = "__metadata__"  # the only key of a header that is not an array
FIX_FILE = "write or download the file again"


class StoredArray(NamedTuple):
    """The location of an array: it starts at byte `start` of a file."""

    path: Path
    start: int
    shape: Shape
    dtype: np.dtype


class Header(NamedTuple):
    """A header that was checked. The arrays are in the order of their data."""

    metadata: dict[str, str]
    arrays: dict[str, StoredArray]


def exchange_error(what: str, got: Any, fix: str) -> ValueError:
    """The error for invalid files, arrays or names: what is wrong, what was given, and how to fix it."""
    return ValueError(f"tensors: {what}\n  got:      {got}\n  fix:      {fix}")


def bounded_repr(value: Any) -> str:
    """Returns `repr(value)`, shortened to a bounded length however large or deep the value is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 120, 120
    return short.repr(value)[:200]


def is_text(value: Any) -> bool:
    """Whether the value is a string that can be encoded as UTF-8: JSON can also spell unpaired surrogates."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def array_bytes(shape: Any, dtype: np.dtype) -> int | None:
    """Returns the size of a full array, or None if a numpy array cannot have the shape."""
    if not isinstance(shape, Sequence) or len(shape) > MAX_DIMS:
        return None
    if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        return None
    if math.prod(n for n in shape if n) * dtype.itemsize >= 2**63:  # numpy's limit, for empty arrays too
        return None
    return math.prod(shape) * dtype.itemsize


def check_metadata(metadata: Any, where: str) -> None:
    """Raises ValueError unless the metadata is a mapping of strings to strings."""
    if not isinstance(metadata, Mapping) or not all(is_text(text) for item in metadata.items() for text in item):
        what = f"the metadata of {where} is not a mapping of strings to strings"
        raise exchange_error(what, bounded_repr(metadata), "use strings only")


def encode(arrays: Iterable[tuple[str, Sequence[int], np.dtype]], metadata: Mapping[str, str]) -> bytes:
    """Returns the header of arrays that are stored one after the other, preceded by its length.

    Args:
        arrays: (name, shape, dtype) of each array. They are not checked here.
        metadata: strings.

    Raises:
        ValueError: if the header is longer than 100 MB.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, shape, dtype in arrays:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data to start at a multiple of 8
    if len(text) > MAX_BYTES:
        got = f"{len(text)} bytes; the limit is {MAX_BYTES}"
        raise exchange_error("the header is too long", got, "use less metadata or a smaller max_file_bytes")
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        ValueError: if there is no such file, the header is longer than the file or than 100 MB, it is not a JSON object
            or has a duplicate key, metadata are not strings, a dtype is unknown, an array cannot have the given shape,
            or offsets do not fit the shape, overlap, or do not cover the data exactly.
    """
    if not os.path.isfile(path):
        fix = "pass a safetensors file, or a folder that contains some"
        raise exchange_error("there is no such file or folder", bounded_repr(str(path)), fix)
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if length > min(num_bytes, MAX_BYTES):
            got = f"a header of {length} bytes, {max(0, num_bytes)} bytes left in the file; the limit is {MAX_BYTES}"
            raise exchange_error(f"{path} is truncated or not a safetensors file", got, FIX_FILE)
        header = json_object(file.read(length), f"the header of {path}")
    metadata = header.pop(METADATA, {})
    check_metadata(metadata, str(path))
    return Header(metadata, _stored_arrays(path, header, 8 + length, num_bytes - length))


def _stored_arrays(path: Path, header: Mapping[str, Any], data_start: int, num_bytes: int) -> dict[str, StoredArray]:
    """The locations of the arrays, after checking that each starts at the end of the previous one.

    Args:
        path: of the file.
        header: without its metadata.
        data_start: the byte of the file at which the data start.
        num_bytes: the size of the data.
    """
    offsets = {name: _offsets(f"{path}: {bounded_repr(name)}", name, array) for name, array in header.items()}
    stored: dict[str, StoredArray] = {}
    last = 0
    for name, (start, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if start != last:
            what = f"{path}: {bounded_repr(name)} does not start at the end of the previous array"
            raise exchange_error(what, f"offset {start}, not {last}", FIX_FILE)
        shape, dtype = tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]]
        stored[name] = StoredArray(path, data_start + start, shape, dtype)
        last = end
    if last != num_bytes:
        got = f"{num_bytes} bytes of data; the arrays end at {last}"
        raise exchange_error(f"the size of {path} does not fit its arrays", got, FIX_FILE)
    return stored


def _offsets(where: str, name: str, array: Any) -> tuple[int, int]:
    """Returns (start, end) of an array in the data, after checking its description."""
    if not is_text(name):
        raise exchange_error(f"{where} is not a valid name", "an unpaired surrogate", FIX_FILE)
    if not isinstance(array, dict) or array.keys() != {"dtype", "shape", "data_offsets"}:
        fix = "each array needs dtype, shape and data_offsets"
        raise exchange_error(f"{where} is not the description of an array", bounded_repr(array), fix)
    tag, shape, offsets = array["dtype"], array["shape"], array["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        fix = f"use one of {', '.join(DTYPES)}"
        raise exchange_error(f"{where} has an unsupported dtype", bounded_repr(tag), fix)
    num_bytes = array_bytes(shape, DTYPES[tag]) if isinstance(shape, list) else None
    if num_bytes is None:
        raise exchange_error(f"{where} has an invalid shape", bounded_repr(shape), FIX_FILE)
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int] or min(offsets) < 0:
        raise exchange_error(f"{where} has invalid offsets", bounded_repr(offsets), FIX_FILE)
    if offsets[1] - offsets[0] != num_bytes:
        got = f"offsets {bounded_repr(offsets)}; shape {bounded_repr(shape)} of {tag} has {num_bytes} bytes"
        raise exchange_error(f"{where} has offsets that do not fit its shape", got, FIX_FILE)
    return offsets[0], offsets[1]


def json_file(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises ValueError if it is anything else, or longer than 100 MB."""
    if not os.path.isfile(path):
        raise exchange_error("there is no such file", bounded_repr(str(path)), "pass the path of a JSON file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise exchange_error(f"{path} is too long", f"more than {MAX_BYTES} bytes", "use a smaller file")
    return json_object(data, str(path))


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object without duplicate keys at any depth. Raises ValueError for anything else."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            key, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {bounded_repr(key)} occurs twice")
        return found

    try:
        found = json.loads(data.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
        raise exchange_error(f"{where} is not a JSON object", str(error)[:200], FIX_FILE) from None
    if not isinstance(found, dict):
        raise exchange_error(f"{where} is not a JSON object", bounded_repr(found), FIX_FILE)
    return found
