"""Headers: what a safetensors file says of its arrays, and whether that can be true.

    8 bytes          header                                                                    data
    header's length  {"name": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, ...}    arrays without gaps

A header comes from whoever made the file. Nothing in it is believed before it is checked, and what contradicts itself,
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

MAX_BYTES = 100_000_000  # of a header, as in the format's own library; of other JSON too
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
METADATA = "__metadata__"  # the one key of a header that is no array
AGAIN = "write the file again, or fetch it again"


class Stored(NamedTuple):
    """Where an array is: from byte `start` of a file on."""

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Header(NamedTuple):
    """The arrays are in the order of their bytes."""

    metadata: dict[str, str]
    arrays: dict[str, Stored]


def refuse(what: str, got: Any, fix: str) -> ValueError:
    """The error that says what is wrong, and what to do."""
    return ValueError(f"tensors: {what}\n  got:      {got}\n  fix:      {fix}")


def shown(value: Any) -> str:
    """As `repr`, of bounded length however large or deep the value is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 120, 120
    return short.repr(value)[:200]


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can hold. Halves of surrogate pairs, which JSON can spell, it cannot."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def array_bytes(shape: Any, dtype: np.dtype) -> int | None:
    """Of an array in full; None if no numpy array can have the shape."""
    if not isinstance(shape, Sequence) or len(shape) > MAX_DIMS:
        return None
    if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        return None
    if math.prod(n for n in shape if n) * dtype.itemsize >= 2**63:  # numpy's limit, for empty arrays too
        return None
    return math.prod(shape) * dtype.itemsize


def check_metadata(metadata: Any, where: str) -> None:
    """Raises ValueError for what is no mapping of strings."""
    if not isinstance(metadata, Mapping) or not all(is_text(text) for item in metadata.items() for text in item):
        raise refuse(f"the metadata of {where} is no mapping of strings to strings", shown(metadata), "strings only")


def encode(arrays: Iterable[tuple[str, Sequence[int], np.dtype]], metadata: Mapping[str, str]) -> bytes:
    """The header of arrays that lie one after the other, and its length before it.

    Args:
        arrays: (name, shape, dtype) of each, checked before.
        metadata: strings.

    Raises:
        ValueError: a header of more than 100 MB.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, shape, dtype in arrays:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8, as readers want it
    if len(text) > MAX_BYTES:
        got = f"{len(text)} bytes, at most {MAX_BYTES} are read"
        raise refuse("a header is too long", got, "less metadata, or a smaller max_file_bytes")
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> Header:
    """The header of a file.

    Raises:
        ValueError: no such file; a length beyond the file or beyond 100 MB; no JSON object, or one with a key twice;
            metadata other than strings; an unknown dtype; a shape that no array can have; offsets that do not fit the
            shape, overlap, leave gaps or leave bytes over.
    """
    if not os.path.isfile(path):
        raise refuse("no such file or folder", shown(str(path)), "a safetensors file, or a folder with some")
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if length > min(num_bytes, MAX_BYTES):
            got = f"a header of {length} bytes, {max(0, num_bytes)} follow, at most {MAX_BYTES} are read"
            raise refuse(f"{path} is no safetensors file, or is cut off", got, AGAIN)
        header = json_object(file.read(length), f"the header of {path}")
    metadata = header.pop(METADATA, {})
    check_metadata(metadata, str(path))
    return Header(metadata, _placed(path, header, 8 + length, num_bytes - length))


def _placed(path: Path, header: Mapping[str, Any], data: int, num_bytes: int) -> dict[str, Stored]:
    """The arrays, of which each begins where the one before it ends. `data` is where their bytes begin."""
    offsets = {name: _offsets(f"{path}: {shown(name)}", name, array) for name, array in header.items()}
    placed: dict[str, Stored] = {}
    last = 0
    for name, (start, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if start != last:
            what = f"{path}: {shown(name)} does not begin where the array before it ends"
            raise refuse(what, f"{start}, not {last}", AGAIN)
        placed[name] = Stored(path, data + start, tuple(header[name]["shape"]), DTYPES[header[name]["dtype"]])
        last = end
    if last != num_bytes:
        raise refuse(f"{path} is not as long as its arrays", f"{num_bytes} bytes, arrays end at {last}", AGAIN)
    return placed


def _offsets(where: str, name: str, array: Any) -> tuple[int, int]:
    """(start, end) of an array in the data, once all that is said of it is checked."""
    if not is_text(name):
        raise refuse(f"{where} is no name", "half of a surrogate pair", AGAIN)
    if not isinstance(array, dict) or array.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse(f"{where} is not described as an array", shown(array), "dtype, shape and data_offsets")
    tag, shape, offsets = array["dtype"], array["shape"], array["data_offsets"]
    if not isinstance(tag, str) or tag not in DTYPES:
        raise refuse(f"{where} has a dtype that is not read", shown(tag), f"one of {', '.join(DTYPES)}")
    num_bytes = array_bytes(shape, DTYPES[tag]) if isinstance(shape, list) else None
    if num_bytes is None:
        raise refuse(f"{where} has a shape that no array can have", shown(shape), AGAIN)
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int] or min(offsets) < 0:
        raise refuse(f"{where} has no two offsets", shown(offsets), AGAIN)
    if offsets[1] - offsets[0] != num_bytes:
        got = f"offsets {shown(offsets)}, shape {shown(shape)} of {tag} has {num_bytes} bytes"
        raise refuse(f"{where} has offsets that do not fit its shape", got, AGAIN)
    return offsets[0], offsets[1]


def json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError for what is none, and beyond 100 MB."""
    if not os.path.isfile(path):
        raise refuse("no such file", shown(str(path)), "the path of a JSON file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise refuse(f"{path} is too long", f"more than {MAX_BYTES} bytes", "a file with less in it")
    return json_object(data, str(path))


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object of which no key occurs twice, at any depth. Raises ValueError for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            key, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {shown(key)} occurs twice")
        return found

    try:
        found = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # also of integers with too many digits
        raise refuse(f"{where} is no JSON object", str(error)[:200], AGAIN) from None
    if not isinstance(found, dict):
        raise refuse(f"{where} is no JSON object", shown(found), AGAIN)
    return found
