"""Writes and reads files of named arrays in the safetensors format, piece by piece.

`write` takes arrays as iterators of their pieces, and writes files with the names that Hugging Face uses:
`model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with an index. `Reader` reads slices of arrays. The
host memory that a model needs is that of the largest piece that is written, or of the largest slice that is read.

`safetensors.safe_open` is not used for reading: it does not support float8 with numpy, accepts two arrays of one name
(the last one wins), and maps files into memory, so that all data read count as memory of the process until the file is
closed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from zerojax.exchange import headers
from zerojax.exchange.headers import FIX_FILE, Header, StoredArray, bounded_repr, exchange_error
from zerojax.utils.typing import Shape

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 2**30  # of the arrays in one file; a common choice
_MODEL_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))  # the names that `write` uses


class Entry(NamedTuple):
    """An array to write.

    Attributes:
        name: unique among the arrays.
        shape, dtype: of the full array.
        pieces: returns an iterator of the consecutive parts of the flattened array in C order. Each part can have any
            shape, and has this dtype. The function is called once, and each part is released before the next.
    """

    name: str
    shape: Shape
    dtype: Any
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


# Writing


def write(
    folder: str | Path,
    arrays: Iterable[Entry],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Writes arrays into a folder: either all files or none.

    The files are written and synced in a hidden folder inside `folder`, and renamed when all are complete, the index
    last. If the process is killed, the hidden folder remains. At any moment the folder contains the old model or the
    new one, with one exception: if the new files have the names of the old ones, a crash between the renames leaves the
    folder without an index. Two writers must not use a folder at the same time.

    Args:
        folder: created if it does not exist. Other files in it stay.
        arrays: distributed over files in this order; see `layout`.
        max_file_bytes: the largest size of the arrays in one file. A larger array gets its own file.
        metadata: strings for the header of each file. Some readers require {"format": "pt"}.
        overwrite: whether a model that is already in the folder is replaced.

    Returns:
        The files. If there are several, the index is the last.

    Raises:
        ValueError: if the folder already contains a model, a name occurs twice or is reserved, the format does not
            support a dtype or a shape, or pieces do not add up to the shape or have another dtype.

    Cost: holds one piece of one array, and the headers.
    """
    files = layout(tuple(arrays), max_file_bytes)
    metadata = dict(metadata or {})
    headers.check_metadata(metadata, "the model")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _model_files(folder, overwrite)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
        for name, entries in files.items():
            _write_file(Path(unfinished, name), entries, metadata)
        if len(files) > 1:
            _write_index(Path(unfinished, INDEX), files)
        return _commit(Path(unfinished), folder, [*files, *([INDEX] if len(files) > 1 else [])], overwrite)


def layout(entries: Sequence[Entry], max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, tuple[Entry, ...]]:
    """Returns file name -> its arrays, in the order in which `write` iterates over their pieces.

    A process that helps to compute pieces but does not write files has to follow the same order. Within a file, arrays
    with larger elements come first, so that each array starts at a multiple of its element size, as readers expect.

    Raises:
        ValueError: if an array cannot be written (see `write`), or `max_file_bytes` is not positive.
    """
    if max_file_bytes <= 0:
        fix = "use a number larger than the bytes of most arrays"
        raise exchange_error("max_file_bytes is not positive", max_file_bytes, fix)
    _check(entries)
    parts: list[list[Entry]] = [[]]
    part_bytes = 0
    for entry in entries:
        if parts[-1] and part_bytes + entry.num_bytes > max_file_bytes:
            parts.append([])
            part_bytes = 0
        parts[-1].append(entry)
        part_bytes += entry.num_bytes
    aligned = [tuple(sorted(part, key=lambda entry: -np.dtype(entry.dtype).itemsize)) for part in parts]
    if len(parts) == 1:
        return {"model.safetensors": aligned[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(aligned, 1)}


def _check(entries: Sequence[Entry]) -> None:
    """Raises ValueError if the names, dtypes or shapes of the arrays are invalid."""
    seen: set[str] = set()
    for name, shape, dtype, _ in entries:
        if not headers.is_text(name) or name == headers.METADATA:
            fix = f"use a string other than {headers.METADATA!r}"
            raise exchange_error("the name of an array is invalid", bounded_repr(name), fix)
        if name in seen:
            raise exchange_error("two arrays have the same name", bounded_repr(name), "use unique names")
        if not _is_supported(dtype):
            fix = f"cast it to one of {', '.join(map(str, headers.TAGS))}"
            what = f"the format does not support the dtype of {bounded_repr(name)}"
            raise exchange_error(what, bounded_repr(dtype), fix)
        if headers.array_bytes(shape, np.dtype(dtype)) is None:
            fix = f"use at most {headers.MAX_DIMS} integers, for less than 2**63 bytes"
            raise exchange_error(f"the shape of {bounded_repr(name)} is invalid", bounded_repr(shape), fix)
        seen.add(name)


def _is_supported(dtype: Any) -> bool:
    try:
        return np.dtype(dtype) in headers.TAGS
    except TypeError:
        return False


def _model_files(folder: Path, overwrite: bool) -> set[str]:
    """The names of the files of a model in the folder. Raises ValueError if there are any, unless `overwrite`."""
    found = {name for name in os.listdir(folder) if _MODEL_FILE.fullmatch(name)}
    if found and not overwrite:
        fix = "use another folder, or overwrite=True"
        raise exchange_error(f"{folder} already contains a model", bounded_repr(sorted(found)), fix)
    return found


def _write_file(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    with path.open("xb") as file:
        file.write(headers.encode(((e.name, e.shape, np.dtype(e.dtype)) for e in entries), metadata))
        for entry in entries:
            _write_array(file, entry)
        _sync(file)


def _write_array(file: BinaryIO, entry: Entry) -> None:
    dtype, done = np.dtype(entry.dtype), 0
    for piece in entry.pieces():
        piece = np.asarray(piece)
        if piece.dtype != dtype:
            fix = "cast the piece, or change the dtype of the entry"
            what = f"a piece of {bounded_repr(entry.name)} has the wrong dtype"
            raise exchange_error(what, f"{piece.dtype}, not {dtype}", fix)
        done += piece.nbytes
        if done > entry.num_bytes:
            break
        file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        del piece  # releases it before the next one is computed
    if done != entry.num_bytes:
        size = "smaller" if done < entry.num_bytes else "larger"
        got = f"{done} bytes; shape {entry.shape} of {dtype} has {entry.num_bytes}"
        fix = "yield every element of the array exactly once"
        raise exchange_error(f"the pieces of {bounded_repr(entry.name)} are {size} than its shape", got, fix)


def _write_index(path: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with path.open("xb") as file:
        file.write((json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _commit(unfinished: Path, folder: Path, names: Sequence[str], overwrite: bool) -> tuple[Path, ...]:
    """Renames the finished files into the folder.

    Readers follow the index if there is one, so the moment at which the index changes decides which model they see.
    """
    before = _model_files(folder, overwrite)
    if INDEX in names and not before.isdisjoint(names[:-1]):
        (folder / INDEX).unlink(missing_ok=True)  # it would assign the arrays of the old model to new files
    renamed: list[Path] = []
    try:
        for name in names:
            if name == INDEX:
                _sync_folder(folder)
            os.replace(unfinished / name, folder / name)
            renamed.append(folder / name)
    except BaseException:
        for path in renamed:
            path.unlink(missing_ok=True)
        raise
    for name in sorted(before.difference(names), key=lambda name: name != INDEX):
        (folder / name).unlink(missing_ok=True)
    _sync_folder(folder)
    return tuple(renamed)


# Reading


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
        ValueError: if there is no such file, `headers.read` refuses a header, or the index names a file outside the
            folder or does not list exactly the arrays of the files.

    Cost: holds the location of each array. Headers and the index are parsed one at a time, each at most 100 MB.
    """

    def __init__(self, path: str | Path, *, follow_links: bool = False):
        self.path = Path(path)
        found = _read_folder(Path(path), follow_links) if os.path.isdir(path) else [headers.read_header(Path(path))]
        self._arrays = {name: stored for header in found for name, stored in header.arrays.items()}
        self.names = tuple(self._arrays)
        items = [header.metadata.items() for header in found]
        self.metadata = {key: value for key, value in items[0] if all((key, value) in other for other in items)}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def shape(self, name: str) -> Shape:
        """Returns the shape of an array.

        Args:
            name: one of `names`.
        """
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of an array. bfloat16 and float8 are those of `ml_dtypes`.

        Args:
            name: one of `names`.
        """
        return self._stored(name).dtype

    def read(self, name: str, index: slice | tuple[slice, ...] = (), *, view: Shape | None = None) -> np.ndarray:
        """Reads an array or a slice of it into a new array.

        Args:
            name: one of `names`.
            index: slices of the leading dims with steps of 1. Other dims are read in full.
            view: a shape with as many elements, in which the array is sliced and returned. By default, its own.

        Raises:
            ValueError: if the name is unknown, the index does not consist of slices, the view has another number of
                elements, the file has been truncated, or a bool is neither 0 nor 1.

        Cost: holds the slice. Reads its bytes and no others, each run of consecutive bytes with one call. A slice of
            the first dim only is a single run.
        """
        stored = self._stored(name)
        if view is not None:
            if math.prod(view) != math.prod(stored.shape):
                got = f"{tuple(view)}; {bounded_repr(name)} has shape {stored.shape}"
                raise exchange_error("a view has another number of elements", got, "use the factors of the shape")
            stored = stored._replace(shape=tuple(view))
        bounds = _bounds(name, stored.shape, index)
        out = np.empty([end - start for start, end in bounds], stored.dtype)
        data = out.reshape(-1).view(np.uint8)
        done = _read_runs(stored, bounds, data) if out.size else 0
        if done < out.nbytes:
            got = f"{done} of {out.nbytes} bytes of {bounded_repr(name)}"
            raise exchange_error(f"{stored.path} has been truncated since it was opened", got, FIX_FILE)
        if out.dtype == np.bool_ and data.max(initial=0) > 1:
            what = f"{stored.path}: {bounded_repr(name)} contains bools that are neither 0 nor 1"
            raise exchange_error(what, data.max(), FIX_FILE)
        return out

    def _stored(self, name: str) -> StoredArray:
        if name not in self._arrays:
            raise exchange_error("there is no such array", bounded_repr(name), f"use one of {bounded_repr(self.names)}")
        return self._arrays[name]


def _bounds(name: str, shape: Shape, index: slice | tuple[slice, ...]) -> list[tuple[int, int]]:
    """Returns (start, end) of the slice in each dim."""
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > len(shape) or not all(isinstance(s, slice) and s.step in (None, 1) for s in slices):
        fix = "use at most one slice per dim, with steps of 1"
        raise exchange_error(f"invalid slice of {bounded_repr(name)}", f"{bounded_repr(index)} of shape {shape}", fix)
    slices += (slice(None),) * (len(shape) - len(slices))
    ranges = [range(n)[s] for s, n in zip(slices, shape, strict=True)]
    return [(r.start, max(r.start, r.stop)) for r in ranges]


def _read_runs(stored: StoredArray, bounds: list[tuple[int, int]], out: np.ndarray) -> int:
    """Reads the bytes of a slice into `out`. Returns the number of bytes read."""
    done = 0
    with stored.path.open("rb", buffering=0) as file:  # a buffer would be filled anew for each run
        for start, num_bytes in _runs(stored.shape, stored.dtype.itemsize, bounds):
            file.seek(stored.start + start)
            end = done + num_bytes
            while done < end and (num_read := file.readinto(out[done:end].data)):
                done += num_read
            if done < end:
                break
    return done


def _runs(shape: Shape, itemsize: int, bounds: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields (first byte, number of bytes) for each run of consecutive bytes in a slice that is not empty."""
    shape, bounds = (1, *shape), [(0, 1), *bounds]  # so that a scalar needs no special case
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = max((dim for dim, (start, end) in enumerate(bounds) if end - start < shape[dim]), default=0)
    start, end = bounds[cut]
    for outer in itertools.product(*(range(*each) for each in bounds[:cut])):
        first = sum(i * stride for i, stride in zip((*outer, start), strides[: cut + 1], strict=True))
        yield first, (end - start) * strides[cut]


def _read_folder(folder: Path, follow_links: bool) -> list[Header]:
    """Reads the headers of the files of a model in a folder."""
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) > 1:
        fix = "use one folder per model"
        raise exchange_error(f"{folder} contains several indexes", bounded_repr(indexes), fix)
    if indexes:
        return _read_indexed(folder, indexes[0], follow_links)
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if len(files) != 1:
        what = f"{folder} contains neither an index nor a single safetensors file"
        raise exchange_error(what, bounded_repr(files), "pass the path of one file, or the folder of a model")
    return [headers.read_header(_inside(folder, files[0], follow_links))]


def _read_indexed(folder: Path, index: str, follow_links: bool) -> list[Header]:
    """Reads the headers of the files that an index names."""
    path = _inside(folder, index, follow_links)
    weight_map = headers.json_file(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(map(headers.is_text, weight_map.values())):
        fix = "weight_map has to map names of arrays to names of files"
        raise exchange_error(f"{path} has no valid weight_map", bounded_repr(weight_map), fix)
    listed: dict[str, set[str]] = {}
    for array, name in weight_map.items():
        listed.setdefault(name, set()).add(array)
    return [_read_listed(path, _inside(folder, name, follow_links), arrays) for name, arrays in listed.items()]


def _read_listed(index: Path, path: Path, arrays: set[str]) -> Header:
    """Reads the header of a file, and checks that it has exactly the arrays that the index lists."""
    header = headers.read_header(path)
    differ = header.arrays.keys() ^ arrays
    if differ:
        fix = "list every array of every file in the index"
        got = f"in only one of them: {bounded_repr(sorted(differ))}"
        raise exchange_error(f"{index} and {path.name} differ in their arrays", got, fix)
    return header


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
