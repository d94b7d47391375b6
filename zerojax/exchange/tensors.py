"""Writes and reads the arrays of a model in safetensors files: one file, or several with an index.

The safetensors library writes files, and checks the headers of those that are read. Arrays are read through a map of
the file that lives no longer than one slice is copied, because the library (0.7 and 0.8, with numpy)

- does not read float8;
- keeps all that was read resident until the file is closed: 514 MiB, for 512 MiB read row by row, where a map for each
  row keeps 2 MiB. With its other backend, `pread`, each row reads the whole array;
- slices arrays only in the shape in which they are stored, while ours may split or transpose its dims.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zerojax.utils.files import sync, sync_tree, unfinished
from zerojax.utils.text import error_text
from zerojax.utils.typing import Shape

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 2 * 2**30  # of the arrays in one file, which is held in memory while it is written
MAX_JSON_BYTES = 100_000_000  # the limit of the library for headers
_MODEL_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))  # the names that `write` uses
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    **{f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "ui" for size in (1, 2, 4, 8)},
}


def exchange_error(what: str, got: object, fix: str) -> ValueError:
    """The error for invalid files, arrays or names: what is wrong, what was given, and how to fix it."""
    return ValueError(error_text(f"tensors: {what}", got, fix))


def bounded_repr(value: object) -> str:
    """Returns `repr(value)`, shortened to a bounded length however large or deep the value is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 120, 120
    return short.repr(value)[:200]


# Writing


class Entry(NamedTuple):
    """An array to write."""

    name: str  # unique among the arrays
    shape: Shape
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # returns the array; called once, in the order of the entries

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    folder: str | Path,
    entries: Iterable[Entry],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Writes arrays into a folder, and moves the files to their names when all are complete, the index last.

    The arrays fill one file after the other; one that is larger than a file may be gets its own. The metadata are in
    the header of each file. Returns the files; if there are several, the index is the last. See `parameters.export`.
    """
    # Check that nothing is replaced.
    files = _files(tuple(entries), max_file_bytes)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted((name for name in os.listdir(folder) if _MODEL_FILE.fullmatch(name)), key=lambda name: name != INDEX)
    if old and not overwrite:
        fix = "use another folder, or overwrite=True"
        raise exchange_error(f"{folder} already contains a model", bounded_repr(old), fix)
    with unfinished(folder) as written:
        # Write the files and the index.
        for name, in_file in files.items():
            _save(written / name, in_file, dict(metadata or {}))
        names = list(files)
        if len(files) > 1:
            total = sum(entry.num_bytes for in_file in files.values() for entry in in_file)
            weight_map = {entry.name: name for name, in_file in files.items() for entry in in_file}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (written / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")
            names.append(INDEX)
        sync_tree(written)
        # Move them to their names.
        for name in old:  # the index first, which would assign the arrays of the old model to new files
            (folder / name).unlink()
        for name in names:
            (written / name).replace(folder / name)
    sync(folder)
    return tuple(folder / name for name in names)


def _files(entries: tuple[Entry, ...], max_file_bytes: int) -> dict[str, list[Entry]]:
    """Returns file name -> its arrays, after checking that their names differ."""
    if repeated := _repeated(entry.name for entry in entries):
        raise exchange_error("two arrays have the same name", bounded_repr(repeated[0]), "use unique names")
    parts: list[list[Entry]] = [[]]
    part_bytes = 0
    for entry in entries:
        if parts[-1] and part_bytes + entry.num_bytes > max_file_bytes:
            parts.append([])
            part_bytes = 0
        parts[-1].append(entry)
        part_bytes += entry.num_bytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in collections.Counter(names).items() if count > 1]


def _save(path: Path, entries: list[Entry], metadata: dict[str, str]) -> None:
    """Writes one file."""
    # Version 0.8 of the library writes the elements of an array that is not contiguous in another order, in silence.
    arrays = {entry.name: np.require(entry.read(), entry.dtype, "C") for entry in entries}
    assert all(arrays[entry.name].shape == entry.shape for entry in entries)
    try:
        if "__metadata__" in arrays:
            raise ValueError("'__metadata__' is the key of the metadata")
        save_file(arrays, path, metadata)
    except (SafetensorError, ValueError) as error:
        fix = f"use other names, and one of the dtypes {', '.join(map(str, DTYPES.values()))}"
        raise exchange_error("the format does not support an array", str(error)[:200], fix) from None


# Reading


class StoredArray(NamedTuple):
    """The location of an array: it starts at byte `start` of a file."""

    path: Path
    start: int
    shape: Shape
    dtype: np.dtype


class Reader:
    """Reads the arrays of a safetensors file, or of a folder with an index or one file.

    In a folder without an index, `model.safetensors` is read, or else the only safetensors file. Nothing is written.

    Args:
        path: the file or the folder.
        follow_links: whether files may be links that lead out of the folder, as in the cache of Hugging Face.

    Attributes:
        path: the file or the folder.
        names: of the arrays, in the order of the files.
        metadata: the strings in the header; with several files, those that all headers have in common.

    Raises:
        ValueError: if there is no such file, it is damaged, an array has a dtype that numpy does not have, or the index
            names a file outside the folder or does not list exactly the arrays of the files.

    Cost: holds the location of each array. Headers and the index are parsed one at a time, each at most 100 MB.
    """

    def __init__(self, path: str | Path, *, follow_links: bool = False):
        self.path = Path(path)
        headers = _read_folder(self.path, follow_links) if os.path.isdir(path) else [_read_header(self.path)]
        self._arrays = {name: stored for _, arrays in headers for name, stored in arrays.items()}
        self.names = tuple(self._arrays)
        self.metadata = dict(functools.reduce(operator.and_, (metadata.items() for metadata, _ in headers)))

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def shape(self, name: str) -> Shape:
        """The shape of an array.

        Args:
            name: one of `names`.
        """
        return self._arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        """The dtype of an array. bfloat16 and float8 are those of `ml_dtypes`.

        Args:
            name: one of `names`.
        """
        return self._arrays[name].dtype

    def read(self, name: str) -> np.ndarray:
        """Maps an array of the file into memory: a slice is read when it is copied, and nothing else is.

        Args:
            name: one of `names`.
        """
        stored = self._arrays[name]
        if 0 in stored.shape:  # there is nothing to map
            return np.empty(stored.shape, stored.dtype)
        return np.memmap(stored.path, stored.dtype, "r", stored.start, stored.shape)


Header: TypeAlias = tuple[dict[str, str], dict[str, StoredArray]]  # the metadata and the arrays of a file


def _read_header(path: Path) -> Header:
    """Reads the header of a file. The library checks that the arrays fill the file, without gaps and overlaps."""
    if not os.path.isfile(path):
        fix = "pass a safetensors file, or a folder that contains some"
        raise exchange_error("there is no such file or folder", bounded_repr(str(path)), fix)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")  # of the data, after the header and its length
    arrays: dict[str, StoredArray] = {}
    try:
        with safe_open(path, "numpy") as file:
            for name in file.offset_keys():
                described = file.get_slice(name)
                shape, tag = tuple(described.get_shape()), described.get_dtype()
                if tag not in DTYPES:
                    what = f"{path}: {bounded_repr(name)} has an unsupported dtype"
                    raise exchange_error(what, bounded_repr(tag), f"use one of {', '.join(DTYPES)}")
                arrays[name] = StoredArray(path, start, shape, DTYPES[tag])
                start += math.prod(shape) * DTYPES[tag].itemsize
            return file.metadata() or {}, arrays
    except (SafetensorError, OSError) as error:
        what = f"{path} is damaged or not a safetensors file"
        raise exchange_error(what, str(error)[:200], "write or download the file again") from None


def _read_folder(folder: Path, follow_links: bool) -> list[Header]:
    """Reads the headers of the files of a model in a folder."""
    # Find the index, or the only file.
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    found = indexes or (["model.safetensors"] if "model.safetensors" in files else files)
    if len(found) != 1:
        what = f"{folder} contains neither one index nor a single safetensors file"
        raise exchange_error(what, bounded_repr(found), "pass the path of one file, or the folder of one model")
    path = _inside(folder, found[0], follow_links)
    if not indexes:
        return [_read_header(path)]
    # Read the files of the index, which has to list each of their arrays once.
    listed = json_file(path).get("weight_map")
    weight_map = listed if isinstance(listed, dict) else {}
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        fix = "weight_map has to map names of arrays to names of files"
        raise exchange_error(f"{path} has no valid weight_map", bounded_repr(listed), fix)
    headers = [_read_header(_inside(folder, name, follow_links)) for name in dict.fromkeys(weight_map.values())]
    there = {(name, stored.path.name) for _, arrays in headers for name, stored in arrays.items()}
    if differ := there ^ weight_map.items():
        fix = "list every array of every file in the index"
        got = f"in only one of them: {bounded_repr(sorted(differ))}"
        raise exchange_error(f"{path} and its files differ in their arrays", got, fix)
    return headers


def _inside(folder: Path, name: str, follow_links: bool) -> Path:
    """The path of a file in the folder, after checking that it does not lead out of the folder."""
    if os.path.basename(name) != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        fix = "use the bare names of files in the folder of the index"
        raise exchange_error(f"the index names a file outside {folder}", bounded_repr(name), fix)
    path = folder / name
    if not follow_links and os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        fix = "copy the file, or pass Reader(folder, follow_links=True) if you trust the link"
        raise exchange_error(f"a link leads out of {folder}", bounded_repr(name), fix)
    return path


# JSON, of indexes and of mappings of names


def json_file(path: Path) -> dict[str, object]:
    """Reads the JSON object in a file. Raises ValueError if it is anything else, or longer than 100 MB."""
    if not path.is_file():
        raise exchange_error("there is no such file", bounded_repr(str(path)), "pass the path of a JSON file")
    if (num_bytes := path.stat().st_size) > MAX_JSON_BYTES:
        raise exchange_error(f"{path} is too long", f"{num_bytes} bytes", f"use at most {MAX_JSON_BYTES} bytes")
    return json_object(path.read_bytes(), str(path))


def json_object(data: bytes, where: str) -> dict[str, object]:
    """Parses a JSON object without duplicate keys at any depth. Raises ValueError for anything else."""

    def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if repeated := _repeated(key for key, _ in pairs):
            raise ValueError(f"the key {bounded_repr(repeated[0])} occurs twice")
        return dict(pairs)

    try:
        found = json.loads(data.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:  # ValueError also for integers with too many digits
        raise exchange_error(f"{where} is not a JSON object", str(error)[:200], "use JSON") from None
    if not isinstance(found, dict):
        raise exchange_error(f"{where} is not a JSON object", bounded_repr(found), "use {...}")
    return found
