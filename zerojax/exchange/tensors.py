"""Tensors: files of named arrays in the safetensors format, written and read part by part.

`write` takes arrays as iterators of their parts and makes the files that Hugging Face has: `model.safetensors`, or
`model-00001-of-0000N.safetensors` and so on with an index. `Reader` reads slices of arrays. A model of any size needs
as much host memory as the largest part that is written or slice that is read.

Files are read here and not by `safetensors.safe_open`, because that one has no float8 for numpy, takes the last of two
arrays of one name, and maps files into memory, where all that was read counts as the process's own until it is closed.
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
from zerojax.exchange.headers import AGAIN, Header, Stored, refuse, shown

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 2**30  # of arrays in one file; a usual size
_WRITTEN = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))  # the names that `write` gives


class Entry(NamedTuple):
    """An array that is to be written.

    Attributes:
        name: unique among the arrays.
        shape, dtype: in full.
        pieces: returns an iterator of the parts of the flattened array, in C order, of any shape, with this dtype.
            It is called once, and each part is let go before the next is asked for.
    """

    name: str
    shape: tuple[int, ...]
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
    """Writes arrays into a folder: all of the files, or none.

    The files are written and synced in a hidden folder inside, and renamed when all are complete, the index last. If a
    process is killed, the hidden folder stays. Where files are replaced by as many of the same names, a crash between
    the renames leaves the folder without an index; otherwise it has the old model or the new one at any moment. Two
    writers at once are not kept apart.

    Args:
        folder: where to; it is made if it is not there, and its other files stay.
        arrays: filled into files in this order; see `layout`.
        max_file_bytes: of arrays in one file; a larger array has a file of its own.
        metadata: strings for the header of each file. Some readers ask for {"format": "pt"}.
        overwrite: whether to replace the model that is in the folder, if there is one.

    Returns:
        The files; of several, the index is the last.

    Raises:
        ValueError: a model that is there already; a name that occurs twice or is reserved; a dtype or a shape that the
            format does not have; pieces that do not add up to the shape or have another dtype.

    Cost:
        Holds one piece of one array, and the headers.
    """
    files = layout(tuple(arrays), max_file_bytes)
    metadata = dict(metadata or {})
    headers.check_metadata(metadata, "the model")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _model_in(folder, overwrite)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
        for name, entries in files.items():
            _write_file(Path(unfinished, name), entries, metadata)
        if len(files) > 1:
            _write_index(Path(unfinished, INDEX), files)
        return _commit(Path(unfinished), folder, [*files, *([INDEX] if len(files) > 1 else [])], overwrite)


def layout(entries: Sequence[Entry], max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, tuple[Entry, ...]]:
    """File name -> its arrays, in the order in which `write` asks for their pieces.

    A process that takes part in making pieces, and writes none, goes through them in the same order. Within a file,
    arrays of larger elements come first: then each begins at a multiple of its element's size, as readers want it.

    Raises:
        ValueError: what cannot be written (see `write`), or a `max_file_bytes` that is not positive.
    """
    if max_file_bytes <= 0:
        raise refuse("max_file_bytes is not positive", max_file_bytes, "more than the bytes of most arrays")
    _check(entries)
    parts: list[list[Entry]] = [[]]
    held = 0
    for entry in entries:
        if parts[-1] and held + entry.num_bytes > max_file_bytes:
            parts.append([])
            held = 0
        parts[-1].append(entry)
        held += entry.num_bytes
    aligned = [tuple(sorted(part, key=lambda entry: -np.dtype(entry.dtype).itemsize)) for part in parts]
    if len(parts) == 1:
        return {"model.safetensors": aligned[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(aligned, 1)}


def _check(entries: Sequence[Entry]) -> None:
    seen: set[str] = set()
    for name, shape, dtype, _ in entries:
        if not headers.is_text(name) or name == headers.METADATA:
            raise refuse("a name that no array can have", shown(name), f"a string other than {headers.METADATA!r}")
        if name in seen:
            raise refuse("two arrays have one name", shown(name), "a name of its own for each")
        if not _is_supported(dtype):
            fix = f"cast it to one of {', '.join(map(str, headers.TAGS))}"
            raise refuse(f"{shown(name)} has a dtype that the format does not have", shown(dtype), fix)
        if headers.array_bytes(shape, np.dtype(dtype)) is None:
            fix = f"at most {headers.MAX_DIMS} integers, together less than 2**63 bytes"
            raise refuse(f"{shown(name)} has a shape that no array can have", shown(shape), fix)
        seen.add(name)


def _is_supported(dtype: Any) -> bool:
    try:
        return np.dtype(dtype) in headers.TAGS
    except TypeError:
        return False


def _model_in(folder: Path, overwrite: bool) -> set[str]:
    """The names of the model's files that are there. Raises ValueError if there are any that are not to be replaced."""
    found = {name for name in os.listdir(folder) if _WRITTEN.fullmatch(name)}
    if found and not overwrite:
        raise refuse(f"there is a model in {folder} already", shown(sorted(found)), "another folder, or overwrite=True")
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
            fix = "cast the piece, or say its dtype in the entry"
            raise refuse(f"a piece of {shown(entry.name)} has another dtype", f"{piece.dtype}, not {dtype}", fix)
        done += piece.nbytes
        if done > entry.num_bytes:
            break
        file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        del piece  # it would be held while the next one is made
    if done != entry.num_bytes:
        than = "less" if done < entry.num_bytes else "more"
        got = f"{done} bytes; shape {entry.shape} of {dtype} has {entry.num_bytes}"
        fix = "pieces that together are the array, each element once"
        raise refuse(f"the pieces of {shown(entry.name)} are {than} than its shape", got, fix)


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
    """Renames the finished files. Readers follow an index wherever there is one, so all turns on when it changes."""
    before = _model_in(folder, overwrite)
    if INDEX in names and not before.isdisjoint(names[:-1]):
        (folder / INDEX).unlink(missing_ok=True)  # it would name new files as old ones
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
    """The arrays of a file, or of a folder with an index or with one file. Nothing is written.

    Of a folder without an index `model.safetensors` is read, or the only safetensors file.

    Args:
        path: the file, or the folder.
        follow_links: whether files of the folder may be links to outside of it, as those in Hugging Face's cache are.

    Attributes:
        names: of the arrays, in the order of the files.
        metadata: strings that the header has beside the arrays; of several headers, what all of them say.

    Raises:
        ValueError: no such file; a header that `headers.read` refuses; an index that names files outside of the folder
            or other arrays than the files have.

    Cost:
        Holds where each array is. Headers and index are parsed one at a time, none larger than 100 MB.
    """

    def __init__(self, path: str | Path, *, follow_links: bool = False):
        found = _read_folder(Path(path), follow_links) if os.path.isdir(path) else [headers.read(Path(path))]
        self._arrays = {name: stored for header in found for name, stored in header.arrays.items()}
        self.names = tuple(self._arrays)
        said = [header.metadata.items() for header in found]
        self.metadata = {key: value for key, value in said[0] if all((key, value) in other for other in said)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        """bfloat16 and float8 are dtypes of `ml_dtypes`."""
        return self._stored(name).dtype

    def read(self, name: str, index: slice | tuple[slice, ...] = ()) -> np.ndarray:
        """An array, or a slice of it, as a new array.

        Args:
            name: one of `names`.
            index: slices of the leading dims, with steps of 1. Dims that it does not have are read in full.

        Raises:
            ValueError: an unknown name; an index of something else than slices; a file that has become shorter; bools
                that are neither 0 nor 1.

        Cost:
            Holds the slice. Reads each run of consecutive bytes of it, which is one if only the first dim is cut, and
            beside each at most what Python buffers of a file.
        """
        stored = self._stored(name)
        bounds = _bounds(name, stored.shape, index)
        out = np.empty([end - start for start, end in bounds], stored.dtype)
        data = out.reshape(-1).view(np.uint8)
        done = _read_runs(stored, bounds, data) if out.size else 0
        if done < out.nbytes:
            raise refuse(f"{stored.path} has become shorter", f"{done} bytes of {out.nbytes} of {shown(name)}", AGAIN)
        if out.dtype == np.bool_ and data.max(initial=0) > 1:
            raise refuse(f"{stored.path}: {shown(name)} has bools that are neither 0 nor 1", data.max(), AGAIN)
        return out

    def _stored(self, name: str) -> Stored:
        if name not in self._arrays:
            raise refuse("there is no such array", shown(name), f"one of {shown(self.names)}")
        return self._arrays[name]


def _bounds(name: str, shape: tuple[int, ...], index: slice | tuple[slice, ...]) -> list[tuple[int, int]]:
    """(start, end) in each dim."""
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > len(shape) or not all(isinstance(s, slice) and s.step in (None, 1) for s in slices):
        fix = "at most one slice for each dim, with steps of 1"
        raise refuse(f"not a slice of {shown(name)}", f"{shown(index)} of shape {shape}", fix)
    slices += (slice(None),) * (len(shape) - len(slices))
    ranges = [range(n)[s] for s, n in zip(slices, shape, strict=True)]
    return [(r.start, max(r.start, r.stop)) for r in ranges]


def _read_runs(stored: Stored, bounds: list[tuple[int, int]], out: np.ndarray) -> int:
    """Fills `out` with the bytes of a slice. Returns how many there were."""
    done = 0
    with stored.path.open("rb") as file:
        for start, num_bytes in _runs(stored.shape, stored.dtype.itemsize, bounds):
            file.seek(stored.start + start)
            done += file.readinto(out[done : done + num_bytes].data)
    return done


def _runs(shape: tuple[int, ...], itemsize: int, bounds: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first byte, number) of each run of consecutive bytes in a slice that is not empty."""
    shape, bounds = (1, *shape), [(0, 1), *bounds]  # so that a scalar is no case of its own
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = max((dim for dim, (start, end) in enumerate(bounds) if end - start < shape[dim]), default=0)
    start, end = bounds[cut]
    for outer in itertools.product(*(range(*each) for each in bounds[:cut])):
        first = sum(i * stride for i, stride in zip((*outer, start), strides[: cut + 1], strict=True))
        yield first, (end - start) * strides[cut]


def _read_folder(folder: Path, follow_links: bool) -> list[Header]:
    names = sorted(os.listdir(folder))
    files = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) > 1:
        raise refuse(f"there are several indexes in {folder}", shown(indexes), "a folder for each model")
    if indexes:
        return _read_indexed(folder, indexes[0], follow_links)
    if "model.safetensors" in files:
        files = ["model.safetensors"]
    if len(files) != 1:
        what = f"there is neither an index nor a single safetensors file in {folder}"
        raise refuse(what, shown(files), "the path of one file, or the folder of a model")
    return [headers.read(_inside(folder, files[0], follow_links))]


def _read_indexed(folder: Path, index: str, follow_links: bool) -> list[Header]:
    path = _inside(folder, index, follow_links)
    weight_map = headers.json_file(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(map(headers.is_text, weight_map.values())):
        raise refuse(f"{path} has no weight_map", shown(weight_map), "names of files for names of arrays")
    listed: dict[str, set[str]] = {}
    for array, name in weight_map.items():
        listed.setdefault(name, set()).add(array)
    return [_read_listed(path, _inside(folder, name, follow_links), arrays) for name, arrays in listed.items()]


def _read_listed(index: Path, path: Path, arrays: set[str]) -> Header:
    """The header of a file that has the arrays that the index says, and no other."""
    header = headers.read(path)
    differ = header.arrays.keys() ^ arrays
    if differ:
        fix = "an index that lists each array of each file"
        raise refuse(f"{index} and {path.name} differ in their arrays", f"in one only: {shown(sorted(differ))}", fix)
    return header


def _inside(folder: Path, name: str, follow_links: bool) -> Path:
    """A file of the folder, by its bare name and not through a link to elsewhere."""
    if os.path.basename(name) != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise refuse(f"the index names a file outside of {folder}", shown(name), "bare names of files beside the index")
    path = folder / name
    if not follow_links and os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise refuse(f"a link to outside of {folder}", shown(name), "a copy, or follow_links=True if you trust it")
    return path
