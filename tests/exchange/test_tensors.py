"""safetensors files: the safetensors library agrees, memory is bounded, writes are atomic, and files are checked."""

import json
import os
import subprocess
import tempfile
import time
import tracemalloc
import weakref
from pathlib import Path

import fuzz
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings, strategies as st

from zerojax.exchange import headers, names, tensors
from zerojax.exchange.tensors import Entry, Reader, layout, write

FEW, SOME = (settings(max_examples=n, deadline=None, derandomize=True) for n in (60, 300))


def filled(shape, dtype, seed=0):
    """An array of random bytes; of random bools for bool."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


ARRAYS = {
    "wte/embedding": filled((6, 4), np.float32),
    "half": filled((3, 5), ml_dtypes.bfloat16),
    "bytes": filled((7,), np.int8),
    "mask": filled((3, 3), np.bool_),
    "scalar": filled((), np.float32),
    "step": filled((), np.int64),
    "empty": filled((0, 4), np.float32),
    "all empty": filled((0,), np.int8),
    "many dims": filled((1, 2, 1, 3, 1, 2, 1, 1, 2), np.float16),
    "schön ✓ 🎈": filled((2,), np.uint16),
    "complex": filled((2, 2), np.complex64),
}


def entry(name, array, rows=2):
    """An entry with pieces of `rows` elements."""
    flat = array.reshape(-1)
    return Entry(name, array.shape, array.dtype, lambda: (flat[i : i + rows] for i in range(0, flat.size, rows)))


def entries(arrays):
    return [entry(name, array) for name, array in arrays.items()]


def assert_equal(got, want):
    """Bit for bit."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


def read_all(path, **options):
    reader = Reader(path, **options)
    for name in reader.names:
        array = reader.read(name)
        assert (array.shape, array.dtype) == (reader.shape(name), reader.dtype(name))
    return {name: reader.read(name) for name in reader.names}


def raw(path, header, data=b"", length=None):
    """Writes a file with an arbitrary header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def described(dtype="U8", shape=(2,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def message(call, *args, **kwargs):
    """The text of the error, after checking that it has its three lines and a bounded length."""
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    text = str(error.value)
    lines = text.split("\n")
    assert len(lines) == 3 and lines[0].startswith("tensors: "), text
    assert lines[1].startswith("  got:      ") and lines[2].startswith("  fix:      "), text
    assert len(text) < 1000
    return text


def snapshot(folder):
    """All files below a folder, with contents and times."""
    paths = sorted(folder.rglob("*"))
    return {path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths}


# The format


def test_the_library_reads_our_files(tmp_path):
    (path,) = write(tmp_path, entries(ARRAYS), metadata={"format": "pt"})
    assert path == tmp_path / "model.safetensors"
    got = safetensors.numpy.load_file(path)
    assert got.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert_equal(got[name], array)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_files_of_the_library_are_read(tmp_path):
    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "pt"})
    for read in (read_all(path), read_all(tmp_path)):
        assert read.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert_equal(read[name], array)
    assert Reader(path).metadata == {"format": "pt"}


@pytest.mark.parametrize("tag", headers.DTYPES)
def test_every_dtype_is_read_back_bit_for_bit(tmp_path, tag):
    """Including float8, which the library does not support with numpy; it agrees on the header."""
    array = filled((5, 3), headers.DTYPES[tag])
    (path,) = write(tmp_path, [entry("a", array)])
    assert_equal(Reader(path).read("a"), array)
    with safetensors.safe_open(path, "np") as file:
        assert file.get_slice("a").get_dtype() == tag and file.get_slice("a").get_shape() == [5, 3]


def test_every_array_starts_at_a_multiple_of_its_element_size(tmp_path):
    (path,) = write(tmp_path, entries(ARRAYS))
    for stored in headers.read_header(path).arrays.values():
        assert stored.start % stored.dtype.itemsize == 0


def test_pieces_may_have_any_shape_and_strides(tmp_path):
    array = np.arange(48, dtype=np.float32).reshape(4, 12)
    pieces = [
        array[0],
        array[1].reshape(3, 4),
        array[2:3, :6],
        np.asfortranarray(array[2, 6:].reshape(2, 3)),
        array[3:],
    ]
    write(tmp_path, [Entry("a", (4, 12), "float32", lambda: iter([*pieces, array[:0]]))])
    assert_equal(Reader(tmp_path).read("a"), array)


def test_a_model_without_arrays(tmp_path):
    write(tmp_path, [])
    assert Reader(tmp_path).names == () and safetensors.numpy.load_file(tmp_path / "model.safetensors") == {}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")
KINDS = st.sampled_from([d for d in headers.DTYPES.values() if "float8" not in d.name])
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@FEW
@given(st.dictionaries(NAMES, st.tuples(SHAPES, KINDS), max_size=6), st.integers(1, 200), st.integers(1, 7))
def test_any_arrays_are_read_back(described, max_file_bytes, rows):
    arrays = {name: filled(*kind) for name, kind in described.items()}
    with tempfile.TemporaryDirectory() as folder:
        files = write(folder, [entry(*item, rows) for item in arrays.items()], max_file_bytes=max_file_bytes)
        theirs = {}
        for file in files[:1] if len(files) == 1 else files[:-1]:
            theirs |= safetensors.numpy.load_file(file)
        ours = read_all(folder)
        assert ours.keys() == theirs.keys() == arrays.keys()
        for name, array in arrays.items():
            assert_equal(ours[name], array)
            assert_equal(theirs[name], array)


# Several files


def test_arrays_are_distributed_over_several_files(tmp_path):
    arrays = {f"layers.{i}": filled((4, 4), np.float32, i) for i in range(5)}  # 64 bytes each
    arrays["large"] = filled((100,), np.float32)
    files = write(tmp_path, entries(arrays), max_file_bytes=130, metadata={"format": "pt"})
    assert [path.name for path in files] == [
        "model-00001-of-00004.safetensors",  # 64 + 64
        "model-00002-of-00004.safetensors",
        "model-00003-of-00004.safetensors",  # 64
        "model-00004-of-00004.safetensors",  # larger than max_file_bytes
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 5 * 64 + 400}
    assert index["weight_map"]["layers.0"] == files[0].name and index["weight_map"]["large"] == files[3].name
    for name, array in arrays.items():
        assert_equal(safetensors.numpy.load_file(tmp_path / index["weight_map"][name])[name], array)
        assert_equal(Reader(tmp_path).read(name), array)
    assert Reader(tmp_path).names == tuple(arrays) and Reader(tmp_path).metadata == {"format": "pt"}


def test_a_file_is_filled_to_the_last_byte(tmp_path):
    arrays = {str(i): filled((16,), np.float32) for i in range(4)}
    assert [len(part) for part in layout(entries(arrays), 128).values()] == [2, 2]
    assert [len(part) for part in layout(entries(arrays), 256).values()] == [4]


def test_pieces_are_read_in_the_order_of_the_layout(tmp_path):
    order = []

    def recorded(name, array):
        def pieces():
            order.append(name)
            yield array

        return Entry(name, array.shape, array.dtype, pieces)

    arrays = [recorded(name, array) for name, array in ARRAYS.items()]
    write(tmp_path, arrays, max_file_bytes=80)
    assert order == [entry.name for part in layout(arrays, 80).values() for entry in part]
    assert sorted(order) == sorted(ARRAYS) and order != list(ARRAYS)


def test_metadata_of_several_files_is_what_they_have_in_common(tmp_path):
    raw(tmp_path / "1.safetensors", {"__metadata__": {"format": "pt", "part": "1"}, "a": described()}, b"12")
    raw(tmp_path / "2.safetensors", {"__metadata__": {"format": "pt", "part": "2"}, "b": described()}, b"34")
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Reader(tmp_path).metadata == {"format": "pt"}


# Memory


def test_writing_holds_one_piece(tmp_path):
    """The peak for 64 MiB in pieces of 1 MiB is less than two pieces."""
    made = []

    def pieces():
        for i in range(64):
            assert not any(piece() is not None for piece in made)  # all earlier pieces are freed
            piece = np.full(2**18, i, np.float32)
            made.append(weakref.ref(piece))
            yield piece
            del piece

    tracemalloc.start()
    try:
        write(tmp_path, [Entry("a", (64, 2**18), np.float32, pieces)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(made) == 64 and 2**20 <= peak < 2 * 2**20
    assert_equal(Reader(tmp_path).read("a", (slice(63, 64),)), np.full((1, 2**18), 63, np.float32))


@pytest.mark.parametrize("index", [(slice(3, 4),), (slice(None), slice(0, 2**10))])
def test_reading_holds_the_slice(tmp_path, index):
    array = np.arange(64 * 2**16, dtype=np.float32).reshape(64, 2**16)  # 16 MiB, slices of 256 KiB
    write(tmp_path, [Entry("a", array.shape, array.dtype, lambda: iter([array]))])
    reader = Reader(tmp_path)
    tracemalloc.start()
    try:
        got = reader.read("a", index)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_equal(got, array[index])
    assert got.nbytes == 2**18 and peak < 2 * 2**18


def test_only_the_bytes_of_the_slice_are_read():
    runs = lambda index: list(tensors._runs((4, 6, 5), 2, tensors._bounds("a", (4, 6, 5), index)))
    assert runs(()) == [(0, 240)]
    assert runs(slice(1, 3)) == [(60, 120)]
    assert runs((slice(1, 2), slice(2, 4))) == [(80, 20)]
    assert runs((slice(None), slice(2, 4))) == [(20 + 60 * i, 20) for i in range(4)]
    assert runs((slice(3, 4), slice(0, 2), slice(4, 5))) == [(188, 2), (198, 2)]


# Slices


@st.composite
def sliced(draw):
    shape = draw(SHAPES)
    bound = st.none() | st.integers(-6, 6)
    index = [slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1]))) for _ in shape]
    return shape, tuple(index[: draw(st.integers(0, len(shape)))])


@FEW
@given(sliced(), st.sampled_from([np.bool_, np.int8, ml_dtypes.bfloat16, np.float64]))
def test_slices_equal_those_of_numpy(case, dtype):
    shape, index = case
    array = filled(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, [entry("before", filled((3,), np.int8)), entry("a", array), entry("b", array)])
        assert_equal(Reader(folder).read("a", index), array[index])
        assert_equal(Reader(folder).read("b", index), array[index])


def test_an_index_can_be_a_slice_without_a_tuple(tmp_path):
    write(tmp_path, entries(ARRAYS))
    assert_equal(Reader(tmp_path).read("wte/embedding", slice(-2, None)), ARRAYS["wte/embedding"][-2:])


@pytest.mark.parametrize("index", [0, (slice(None), 1), slice(0, 4, 2), slice(None, None, -1), (slice(1),) * 3, ...])
def test_an_index_other_than_slices_is_refused(tmp_path, index):
    write(tmp_path, entries(ARRAYS))
    text = message(Reader(tmp_path).read, "half", index)
    assert "invalid slice of 'half'" in text and "of shape (3, 5)" in text and "steps of 1" in text


def test_an_unknown_name_is_refused(tmp_path):
    write(tmp_path, entries(ARRAYS))
    for ask in (Reader(tmp_path).shape, Reader(tmp_path).dtype, Reader(tmp_path).read):
        text = message(ask, "haf")
        assert "no such array" in text and "got:      'haf'" in text and "'half'" in text


def test_a_read_array_is_writable(tmp_path):
    write(tmp_path, entries(ARRAYS))
    reader = Reader(tmp_path)
    reader.read("half")[:] = 0
    assert_equal(reader.read("half"), ARRAYS["half"])


# All or nothing


@pytest.mark.parametrize("max_file_bytes", [10**6, 64])
def test_an_exception_in_pieces_leaves_nothing(tmp_path, max_file_bytes):
    def pieces():
        yield np.zeros(2, np.float32)
        assert list(tmp_path.iterdir()), "the incomplete files are missing"
        raise KeyboardInterrupt

    arrays = [*entries(ARRAYS), Entry("a", (4,), np.float32, pieces)]
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, arrays, max_file_bytes=max_file_bytes)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_keeps_the_old_model(tmp_path):
    write(tmp_path, entries(ARRAYS))
    before = snapshot(tmp_path)
    message(write, tmp_path, [Entry("a", (4,), np.float32, lambda: iter([]))], overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_rename_that_fails_leaves_nothing(tmp_path, monkeypatch, last):
    """With two files and an index."""
    renamed, replace = [], os.replace

    def fails(source, target):
        renamed.append(target.name)
        if len(renamed) == last:
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, [entry(name, filled((16,), np.float32)) for name in "ab"], max_file_bytes=64)
    assert list(tmp_path.iterdir()) == []
    assert renamed == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", tensors.INDEX][:last]


def test_files_are_renamed_after_all_are_synced(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("sync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(paths[1].name), replace(*paths)))
    write(tmp_path, [entry(name, filled((16,), np.float32)) for name in "ab"], max_file_bytes=64)
    data = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert done == ["sync"] * 3 + data + ["sync", tensors.INDEX, "sync"]


@pytest.mark.parametrize("max_file_bytes", [10**6, 64])
def test_an_existing_model_is_not_overwritten(tmp_path, max_file_bytes):
    write(tmp_path, entries(ARRAYS), max_file_bytes=max_file_bytes)
    before = snapshot(tmp_path)
    text = message(write, tmp_path, [entry("a", filled((2,), np.int8))])
    assert f"{tmp_path} already contains a model" in text and "overwrite=True" in text
    assert snapshot(tmp_path) == before


def test_a_model_that_appears_during_the_write_is_not_overwritten(tmp_path):
    def pieces():
        (tmp_path / "model.safetensors").write_bytes(b"theirs")
        yield np.zeros(4, np.int8)

    assert "already contains a model" in message(write, tmp_path, [Entry("a", (4,), np.int8, pieces)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"theirs"


@pytest.mark.parametrize("old", [10**6, 64, 128])
@pytest.mark.parametrize("new", [10**6, 64, 128])
def test_overwriting_leaves_the_new_model_and_other_files(tmp_path, old, new):
    (tmp_path / "config.json").write_text("{}")
    arrays = {str(i): filled((16,), np.float32, i) for i in range(4)}
    write(tmp_path, [entry(name, array[::-1]) for name, array in arrays.items()], max_file_bytes=old)
    files = write(tmp_path, entries(arrays), max_file_bytes=new, overwrite=True)
    assert set(tmp_path.iterdir()) == {*files, tmp_path / "config.json"}
    for name, array in arrays.items():
        assert_equal(Reader(tmp_path).read(name), array)


@pytest.mark.parametrize(("old", "new"), [(10**6, 10**6), (10**6, 64), (64, 10**6), (64, 128), (128, 64), (64, 64)])
def test_a_reader_always_sees_the_old_model_or_the_new_one(tmp_path, monkeypatch, old, new):
    """Or none, if the new files have the names of the old ones; never a mixture."""
    olds = {str(i): filled((16,), np.float32, i) for i in range(4)}
    news = {str(i): filled((16,), np.float32, i + 4) for i in range(4)}
    write(tmp_path, entries(olds), max_file_bytes=old)
    seen = []

    def observed(change):
        def changed(*args, **kwargs):
            change(*args, **kwargs)
            if not args[0].name.startswith(".unfinished"):
                seen.append(which())

        return changed

    def which():
        try:
            got = read_all(tmp_path)
        except ValueError as error:
            assert "neither an index nor" in str(error)
            return "none"
        equal = [all(got[k].tobytes() == arrays[k].tobytes() for k in arrays) for arrays in (olds, news)]
        return ["old", "new"][equal.index(True)]

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", observed(os.replace))
        patch.setattr(Path, "unlink", observed(Path.unlink))
        write(tmp_path, entries(news), max_file_bytes=new, overwrite=True)
    order = ["old", "none", "new"] if old == new == 64 else ["old", "new"]
    assert seen and seen[-1] == "new" and seen == sorted(seen, key=order.index)


# Invalid arrays


def test_a_duplicate_name_is_refused(tmp_path):
    text = message(write, tmp_path, [*entries(ARRAYS), *entries(ARRAYS)])
    assert "two arrays have the same name" in text and "'wte/embedding'" in text


@pytest.mark.parametrize("name", ["__metadata__", "half \ud800", 3, None])
def test_an_invalid_name_is_refused(tmp_path, name):
    text = message(write, tmp_path, [Entry(name, (1,), np.int8, lambda: iter([]))])
    assert "the name of an array is invalid" in text and repr(name) in text and "'__metadata__'" in text


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.int4, ml_dtypes.float4_e2m1fn, "O", ">f4", "U3", "nonsense", np.complex128]
)
def test_an_unsupported_dtype_is_refused(tmp_path, dtype):
    text = message(write, tmp_path, [Entry("a", (1,), dtype, lambda: iter([]))])
    assert "the format does not support the dtype of 'a'" in text and "bfloat16" in text


@pytest.mark.parametrize("shape", [(-1,), (1.0,), (2**62, 2), (2**62, 2**62, 0), (1,) * 65, (True,), 3, "ab"])
def test_an_invalid_shape_is_refused(tmp_path, shape):
    text = message(write, tmp_path, [Entry("a", shape, np.float32, lambda: iter([]))])
    assert "the shape of 'a' is invalid" in text and "2**63 bytes" in text


@pytest.mark.parametrize(("count", "word", "num_bytes"), [(0, "smaller", 0), (2, "smaller", 16), (4, "larger", 32)])
def test_pieces_of_another_size_are_refused(tmp_path, count, word, num_bytes):
    pieces = lambda: (np.zeros(2, np.float32) for _ in range(count))
    text = message(write, tmp_path, [Entry("a", (3, 2), np.float32, pieces)])
    assert f"the pieces of 'a' are {word} than its shape" in text
    assert f"{num_bytes} bytes; shape (3, 2) of float32 has 24" in text


def test_excess_pieces_are_refused_early(tmp_path):
    read = []
    pieces = lambda: (read.append(i) or np.zeros(2, np.float32) for i in range(100))
    message(write, tmp_path, [Entry("a", (3, 2), np.float32, pieces)])
    assert len(read) == 4


def test_a_piece_of_another_dtype_is_refused(tmp_path):
    text = message(write, tmp_path, [Entry("a", (2,), ml_dtypes.bfloat16, lambda: iter([np.zeros(2, np.float16)]))])
    assert "a piece of 'a' has the wrong dtype" in text and "float16, not bfloat16" in text


@pytest.mark.parametrize("metadata", [{"step": 3}, {3: "step"}, {"a": {"b": "c"}}, {"a": "\udc00"}])
def test_metadata_other_than_strings_are_refused(tmp_path, metadata):
    assert "the metadata of the model" in message(write, tmp_path, entries(ARRAYS), metadata=metadata)


@pytest.mark.parametrize("max_file_bytes", [0, -1])
def test_max_file_bytes_must_be_positive(tmp_path, max_file_bytes):
    text = message(write, tmp_path, entries(ARRAYS), max_file_bytes=max_file_bytes)
    assert "max_file_bytes is not positive" in text


def test_a_header_that_is_too_long_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(headers, "MAX_BYTES", 1000)
    assert "the header is too long" in message(write, tmp_path, entries(ARRAYS), metadata={"notes": "x" * 1000})
    assert list(tmp_path.iterdir()) == []


# Invalid files

HEADERS = {  # name: (header, data, a part of the error)
    "no JSON": (b'{"a": ', b"", "Expecting value"),
    "no object": (b"[1, 2]", b"", "is not a JSON object"),
    "no UTF-8": (b'{"\xff": 1}', b"", "codec can't decode"),
    "nesting": (b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", b"", "recursion depth"),
    "nested objects": (b'{"a":' * 10**5 + b"1" + b"}" * 10**5, b"", "recursion depth"),
    "a huge integer": (b'{"a": {"shape": [' + b"9" * 5000 + b"]}}", b"", "integer string conversion"),
    "a duplicate key": (b'{"a": 1, "b": 2, "a": 1}', b"", "the key 'a' occurs twice"),
    "a nested duplicate key": (b'{"a": {"dtype": "U8", "dtype": "U8"}}', b"", "the key 'dtype' occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "not a mapping of strings"),
    "null metadata": ({"__metadata__": None}, b"", "not a mapping of strings"),
    "nested metadata": ({"__metadata__": {"a": {"b": "c"}}}, b"", "not a mapping of strings"),
    "unpaired surrogate": ({"\ud800": described()}, b"12", "is not a valid name"),
    "a null array": ({"a": None}, b"", "is not the description of an array"),
    "a list as array": ({"a": [1, 2]}, b"", "is not the description of an array"),
    "a missing field": ({"a": {"dtype": "U8", "shape": [2]}}, b"12", "is not the description of an array"),
    "an extra field": ({"a": described() | {"scale": 2}}, b"12", "is not the description of an array"),
    "an unknown dtype": ({"a": described("F7")}, b"12", "an unsupported dtype\n  got:      'F7'"),
    "half bytes": ({"a": described("F4", (4,))}, b"12", "an unsupported dtype"),
    "a dtype that is a list": ({"a": described(["U8"])}, b"12", "an unsupported dtype"),
    "a shape that is text": ({"a": described() | {"shape": "2"}}, b"12", "has an invalid shape"),
    "a shape of floats": ({"a": described(shape=[2.0])}, b"12", "has an invalid shape"),
    "a shape of bools": ({"a": described(shape=[True, 2])}, b"12", "has an invalid shape"),
    "a negative shape": ({"a": described(shape=[-1, -2])}, b"12", "has an invalid shape"),
    "too many dims": ({"a": described(shape=[1] * 64 + [2])}, b"12", "has an invalid shape"),
    "too large a shape": ({"a": described(shape=[2**32, 2**32])}, b"12", "has an invalid shape"),
    "too large but empty": ({"a": described(shape=[2**62, 2, 0], offsets=[0, 0])}, b"", "has an invalid shape"),
    "too many digits": ({"a": described(shape=[10**4000])}, b"12", "has an invalid shape"),
    "one offset": ({"a": described(offsets=[2])}, b"12", "has invalid offsets"),
    "offsets of floats": ({"a": described(offsets=[0, 2.0])}, b"12", "has invalid offsets"),
    "offsets of bools": ({"a": described(offsets=[False, 2])}, b"12", "has invalid offsets"),
    "negative offsets": ({"a": described(offsets=[-2, 0])}, b"12", "has invalid offsets"),
    "reversed offsets": ({"a": described(offsets=[2, 0])}, b"12", "do not fit its shape"),
    "another size": ({"a": described(offsets=[0, 3])}, b"123", "do not fit its shape"),
    "out of range": ({"a": described(offsets=[2**62, 2**62 + 2])}, b"12", "does not start at the end"),
    "cut off": ({"a": described()}, b"1", "does not fit its arrays"),
    "bytes left over": ({"a": described()}, b"123", "does not fit its arrays"),
    "bytes without arrays": ({}, b"1", "does not fit its arrays"),
    "a gap": ({"a": described(), "b": described(offsets=[3, 5])}, b"12345", "does not start at the end"),
    "a gap at the start": ({"a": described(offsets=[1, 3])}, b"123", "does not start at the end"),
    "an overlap": ({"a": described(), "b": described(offsets=[1, 3])}, b"123", "does not start at the end"),
    "the same bytes": ({"a": described(), "b": described()}, b"12", "does not start at the end"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_refused(tmp_path, name):
    header, data, expected = HEADERS[name]
    assert expected in message(Reader, raw(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize("length", [3, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    path = raw(tmp_path / "a.safetensors", b"{}", length=length)
    assert f"a header of {length} bytes, 2 bytes left in the file" in message(Reader, path)


@pytest.mark.parametrize("data", [b"", b"\2\0\0", b"\0" * 8])
def test_a_file_that_is_too_short_is_refused(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    message(Reader, tmp_path / "a.safetensors")


def test_a_header_above_the_limit_is_not_read(tmp_path):
    """In a sparse file of 200 MB."""
    path = raw(tmp_path / "a.safetensors", b"{}", length=100_000_001)
    os.truncate(path, 200_000_000)
    tracemalloc.start()
    try:
        assert "the limit is 100000000" in message(Reader, path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_duplicate_among_many_keys_is_refused_quickly(tmp_path):
    keys = ",".join(f'"{i}":1' for i in range(10**5))
    path = raw(tmp_path / "a.safetensors", f'{{{keys},"99999":1}}'.encode())
    assert "the key '99999' occurs twice" in message(Reader, path)


def test_bools_other_than_0_and_1_are_refused(tmp_path):
    path = raw(tmp_path / "a.safetensors", {"a": described("BOOL")}, b"\1\2")
    assert "'a' contains bools that are neither 0 nor 1\n  got:      2" in message(Reader(path).read, "a")
    assert_equal(Reader(path).read("a", slice(0, 1)), np.array([True]))


def test_a_file_that_is_truncated_after_opening_is_refused(tmp_path):
    (path,) = write(tmp_path, [entry("a", filled((1000,), np.float32))])
    reader = Reader(path)
    os.truncate(path, path.stat().st_size - 10)
    assert "has been truncated since it was opened\n  got:      3990 of 4000 bytes of 'a'" in message(reader.read, "a")


def test_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path / "none", "", "x" * 5000, "a\0b"):
        assert "no such file or folder" in message(Reader, path)
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would block
    assert "no such file or folder" in message(Reader, tmp_path / "pipe.safetensors")


def test_an_ambiguous_folder_is_refused(tmp_path):
    assert "neither an index nor a single safetensors file" in message(Reader, tmp_path)
    for name in ("a", "b"):
        raw(tmp_path / f"{name}.safetensors", {name: described()}, b"12")
    assert "['a.safetensors', 'b.safetensors']" in message(Reader, tmp_path)
    raw(tmp_path / "model.safetensors", {"model": described()}, b"12")
    assert Reader(tmp_path).names == ("model",)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert "contains several indexes" in message(Reader, tmp_path)


@pytest.fixture
def model_folder(tmp_path):
    """A folder with a file and links; other files are next to the folder, and must not be read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "model2").mkdir()
    for path in (folder / "in.safetensors", tmp_path / "out.safetensors", tmp_path / "model2" / "out.safetensors"):
        raw(path, {"a": described()}, b"12")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (folder / "inner.safetensors").symlink_to("in.safetensors")
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "here").symlink_to(".")
    (folder / "up").symlink_to("..")
    return folder


def write_index(folder, weight_map):
    (folder / tensors.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("name", ["in.safetensors", "inner.safetensors"])
def test_an_index_can_name_files_of_its_folder(model_folder, name):
    assert_equal(Reader(write_index(model_folder, {"a": name})).read("a"), np.frombuffer(b"12", np.uint8))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../out.safetensors",
        "../model2/out.safetensors",
        "up/out.safetensors",
        "here/in.safetensors",
        "./in.safetensors",
        "..\\out.safetensors",
        "C:\\out.safetensors",
        "in.safetensors\0",
        "..",
        ".",
        "",
    ],
)
def test_an_index_that_names_files_outside_its_folder_is_refused(model_folder, name):
    for follow_links in (False, True):
        text = message(Reader, write_index(model_folder, {"a": name}), follow_links=follow_links)
        assert f"the index names a file outside {model_folder}" in text and repr(name) in text


def test_links_out_of_the_folder_are_refused_unless_allowed(model_folder):
    text = message(Reader, write_index(model_folder, {"a": "link.safetensors"}))
    assert "a link leads out of" in text and "'link.safetensors'" in text and "follow_links=True" in text
    assert Reader(model_folder, follow_links=True).names == ("a",)
    (model_folder / tensors.INDEX).unlink()
    (model_folder / "model.safetensors").symlink_to(model_folder.parent / "out.safetensors")
    assert "a link leads out of" in message(Reader, model_folder)
    assert Reader(model_folder, follow_links=True).names == ("a",)
    assert Reader(model_folder / "model.safetensors").names == ("a",)  # the user named this file
    (model_folder.parent / "index").write_text(json.dumps({"weight_map": {"a": "in.safetensors"}}))
    (model_folder / tensors.INDEX).symlink_to(model_folder.parent / "index")
    assert "a link leads out of" in message(Reader, model_folder)


@pytest.mark.parametrize("name", ["none.safetensors", "loop.safetensors", "up", "x" * 5000])
def test_an_index_that_names_a_missing_file_is_refused(model_folder, name):
    message(Reader, write_index(model_folder, {"a": name}))


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, {"a": 1}, {"a": None}, {"a": ["in.safetensors"]}, {"a": "\ud800"}]
)
def test_an_index_without_a_weight_map_is_refused(model_folder, weight_map):
    assert "has no valid weight_map" in message(Reader, write_index(model_folder, weight_map))


@pytest.mark.parametrize("weight_map", [{"b": "in.safetensors"}, {"a": "in.safetensors", "b": "in.safetensors"}])
def test_an_index_that_lists_other_arrays_is_refused(model_folder, weight_map):
    text = message(Reader, write_index(model_folder, weight_map))
    assert "in.safetensors differ in their arrays" in text and "'b'" in text


def test_an_index_that_lists_fewer_arrays_is_refused(model_folder):
    raw(model_folder / "two.safetensors", {"b": described(), "c": described(offsets=[2, 4])}, b"1234")
    assert "in only one of them: ['c']" in message(Reader, write_index(model_folder, {"b": "two.safetensors"}))
    raw(model_folder / "one.safetensors", {"b": described()}, b"12")  # 'b' is in both
    assert "in only one of them: ['b']" in message(
        Reader, write_index(model_folder, {"c": "two.safetensors", "b": "one.safetensors"})
    )


def test_an_index_above_the_limit_is_not_read(model_folder, monkeypatch):
    monkeypatch.setattr(headers, "MAX_BYTES", 1000)
    text = message(Reader, write_index(model_folder, {"a" * 1000: "in.safetensors"}))
    assert "is too long\n  got:      more than 1000 bytes" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
NUMBERS = st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**63, 2**64, 10**30, 1.0, True, None])
DESCRIBED = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BOOL", "BF16", "F32", "F4", "u8", "", None, 3]),
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
    }
)
BYTES = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3)


def consecutive(sizes):
    """A valid header."""
    ends = np.cumsum([0, *sizes.values()]).tolist()
    return {
        name: described(shape=[n], offsets=[end, end + n])
        for (name, n), end in zip(sizes.items(), ends[:-1], strict=True)
    }


ARBITRARY = (
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), DESCRIBED | JSON, max_size=3)
    | JSON
    | BYTES.map(consecutive)
)


@SOME
@given(ARBITRARY.map(lambda header: json.dumps(header).encode()) | st.binary(max_size=40), st.binary(max_size=9))
def test_any_header_is_refused_or_read_as_the_library_reads_it(header, data):
    with tempfile.TemporaryDirectory() as folder:
        path = raw(Path(folder, "a.safetensors"), header, data)
        before = snapshot(Path(folder))
        try:
            ours = read_all(path)
        except ValueError as error:
            assert str(error).startswith("tensors: ") and len(str(error)) < 1000
        else:
            theirs = safetensors.numpy.load_file(path)
            assert ours.keys() == theirs.keys()
            for name, array in ours.items():
                assert_equal(array, theirs[name])
        assert snapshot(Path(folder)) == before


@SOME
@given(st.binary(min_size=1, max_size=6), st.data())
def test_a_damaged_file_is_refused_or_read(damage, data):
    """A valid file in which some bytes were changed."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = write(folder, [entry(name, ARRAYS[name]) for name in ("half", "mask")], metadata={"a": "b"})
        text = path.read_bytes()
        at = data.draw(st.integers(0, len(text) - len(damage)))
        path.write_bytes(text[:at] + damage + text[at + len(damage) :])
        try:
            ours = read_all(path)
        except ValueError as error:
            assert str(error).startswith("tensors: ") and len(str(error)) < 1000
        else:
            assert safetensors.numpy.load_file(path).keys() == ours.keys()


FILES = st.sampled_from(["in.safetensors", "../out.safetensors", "link.safetensors", "none", "..", "", "a/b", "\0"])


@SOME
@given(
    st.dictionaries(st.sampled_from("ab"), FILES | st.text(max_size=5) | JSON, max_size=2).map(
        lambda weight_map: json.dumps({"weight_map": weight_map})
    )
    | JSON.map(json.dumps)
    | st.text(max_size=20)
)
def test_any_index_is_refused_or_names_files_in_its_folder(index):
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer, "model")
        folder.mkdir()
        raw(folder / "in.safetensors", {"a": described()}, b"in")
        raw(Path(outer, "out.safetensors"), {"a": described()}, b"ou")
        (folder / "link.safetensors").symlink_to("../out.safetensors")
        (folder / tensors.INDEX).write_bytes(index.encode(errors="replace"))
        before = snapshot(Path(outer))
        try:
            assert read_all(folder)["a"].tobytes() == b"in"
        except ValueError as error:
            assert str(error).startswith("tensors: ") and len(str(error)) < 1000
        assert snapshot(Path(outer)) == before


# The fuzzer


def test_the_fuzzer_finds_nothing(capsys):
    assert fuzz.main(["--inputs", "250", "--seed", "1"]) == 0
    inputs, refused, read, crashes = (int(part.split()[0]) for part in capsys.readouterr().out.split(", "))
    assert inputs == 500 == refused + read and crashes == 0 and refused > 100 and read > 50


OUTSIDE = "../outside/valid.safetensors"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda folder: {}["key"], "KeyError: 'key'"),
        (lambda folder: time.sleep(9), "TooSlow: more than 0.2 s"),
        (lambda folder: (folder / "../made").write_text(""), "wrote outside"),
        (lambda folder: (folder / OUTSIDE).unlink(), "wrote outside: os.remove"),
        (lambda folder: os.rename(folder / OUTSIDE, folder / "moved"), "wrote outside: os.rename"),
        (lambda folder: (folder / "../made").mkdir(), "wrote outside: os.mkdir"),
        (lambda folder: (folder / "../made").symlink_to("x"), "wrote outside: os.symlink"),
        (lambda folder: subprocess.run(["touch", folder / "../made"], check=True), "wrote outside (read)"),
        (lambda folder: (folder / OUTSIDE).read_bytes(), "read outside"),
    ],
)
def test_the_fuzzer_detects_faults(monkeypatch, capsys, fault, expected):
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.2 if "TooSlow" in expected else 9)
    monkeypatch.setitem(fuzz.TARGETS, "tensors", fuzz.Target(lambda rng, folder: folder, fault))
    assert fuzz.main(["--inputs", "1", "--targets", "tensors"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "1 inputs, 0 refused, 0 read, 1 crashes\n"
    assert "tensors, seed 0, input 0: " in captured.err and expected in captured.err


def test_writing_inside_the_folder_is_not_a_fault(monkeypatch, capsys):
    target = fuzz.Target(lambda rng, folder: folder, lambda folder: (folder / "made").write_text(""))
    monkeypatch.setitem(fuzz.TARGETS, "tensors", target)
    assert fuzz.main(["--inputs", "1", "--targets", "tensors"]) == 0 and "1 read" in capsys.readouterr().out


# Names

NAMED = {
    "embed/kernel": "model.embed_tokens.weight",
    "layers/*/kernel": "model.layers.*.weight",
    "layers/*/experts/*/up": "model.layers.*.mlp.experts.*.up_proj",
    "layers/7/kernel": "odd",
    "block_*/bias": "h.*.b",
}


def their_name(mapping, name):
    """The only name in the source that a mapping gives one of our names; None if it gives none."""
    source = names.map_name(names.sources(names.mapping(mapping)), name)
    return source and source.names[0]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("embed/kernel", "model.embed_tokens.weight"),
        ("layers/0/kernel", "model.layers.0.weight"),
        ("layers/12/kernel", "model.layers.12.weight"),
        ("layers/3/experts/5/up", "model.layers.3.mlp.experts.5.up_proj"),
        ("layers/7/kernel", "odd"),  # an exact name takes precedence
        ("block_3/bias", "h.3.b"),
        ("block_/bias", None),  # at least one character
        ("layers/0/1/kernel", None),  # a * does not cross a separator
        ("layers/0.1/kernel", None),
        ("layers/0/kernel2", None),
        ("xlayers/0/kernel", None),
        ("layers/0/kernel\n", None),
        ("embed.kernel", None),
        ("", None),
    ],
)
def test_names_are_mapped(name, want, tmp_path):
    text = json.dumps(NAMED)
    (tmp_path / "names.json").write_text(text)
    assert their_name(text, name) == want
    assert their_name(tmp_path / "names.json", name) == want
    assert their_name(str(tmp_path / "names.json"), name) == want


def test_characters_of_regular_expressions_are_literal():
    text = '{"a.b(*)+": "\\\\1[*]"}'
    assert their_name(text, "a.b(3)+") == "\\1[3]" and their_name(text, "aXb(3)+") is None


def test_patterns_that_give_different_names_map_to_nothing():
    text = '{"*/kernel": "a.*", "head/*": "b.*", "x/*": "x.*", "*/y": "*.y"}'
    assert their_name(text, "head/kernel") is None
    assert their_name(text, "head/bias") == "b.bias"
    assert their_name(text, "x/y") == "x.y"  # both give the same name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": ', "the mapping is not a JSON object"),
        ('{"a": "b", "a": "c"}', "the key 'a' occurs twice"),
        ('{"a": 1}', "an entry that is not a pair of names"),
        ('{"a": "\\ud800"}', "an entry that is not a pair of names"),
        ('{"a/*": "b"}', "differ in *\n  got:      'a/*': 'b'\n  fix:      use the same number of *"),
        ('{"a/*/*": "b.*"}', "differ in *"),
        ('{"a/*x*": "b.*.*"}', "two * in one part of a name"),
        ("names.json", "no such file"),
        ("[]", "no such file"),
        ('{"a": {"name": "b"}}', "does not consist of name and dims"),
        ('{"a": {"name": "b", "dims": "i o -> o i", "reshape": [2]}}', "does not consist of name and dims"),
        ('{"a": {"name": [], "dims": "i o -> o i"}}', "does not consist of name and dims"),
        ('{"a": {"name": ["b", 1], "dims": "i o -> o i"}}', "not a pair of names"),
        ('{"a/*": {"name": ["b.*", "c"], "dims": "i o -> o i"}}', "differ in *"),
        ('{"a": {"name": "b", "dims": [1, 0]}}', "not of the form 'theirs -> ours'"),
        ('{"a": {"name": "b", "dims": "i o"}}', "not of the form 'theirs -> ours'"),
        ('{"a": {"name": "b", "dims": "i o -> o"}}', "two sides of the dims of a mapping do not match"),
        ('{"a": {"name": "b", "dims": "i i -> i i"}}', "two sides of the dims of a mapping do not match"),
        ('{"a": {"name": "b", "dims": "(i o -> o i"}}', "something else than names"),
        ('{"a": {"name": "b", "dims": "i 2 -> 2 i"}}', "something else than names"),
    ],
)
def test_an_invalid_mapping_is_refused(text, expected):
    assert expected in message(names.mapping, text)
