"""safetensors files: the library agrees, slices alone are read, and invalid files, folders and names are refused."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fuzz
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings, strategies as st

from zerojax.exchange import names, tensors
from zerojax.exchange.tensors import DTYPES, Entry, Reader, write
from zerojax.utils.files import unfinished

MANY = settings(max_examples=150, deadline=None, derandomize=True)


def filled(shape, dtype, seed=0):
    """An array of random bytes; of random bools for bool."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


ARRAYS = {tag: filled((5, 3), dtype) for tag, dtype in DTYPES.items() if not tag.endswith("FNUZ")} | {
    "scalar": filled((), np.float32),
    "empty": filled((0, 4), np.float32),
    "many/dims": filled((1, 2, 1, 3, 1, 2, 1, 1, 2), np.float16),
    "schön ✓ 🎈": filled((2,), np.uint16),
    "transposed": filled((5, 3), np.float32).T,
}


def entry(name, array):
    return Entry(name, array.shape, array.dtype, lambda: array)


def entries(arrays):
    return [entry(name, array) for name, array in arrays.items()]


def assert_equal(got, want):
    """Bit for bit."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


def read_all(path, **options):
    reader = Reader(path, **options)
    arrays = {name: np.array(reader.read(name)) for name in reader.names}
    assert all((a.shape, a.dtype) == (reader.shape(name), reader.dtype(name)) for name, a in arrays.items())
    return arrays


def raw(path, header, data=b""):
    """Writes a file with an arbitrary header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
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


# Writing and reading


def test_the_library_reads_our_files_and_every_dtype_is_read_back(tmp_path):
    """Bit for bit; float8 too, which the library does not read with numpy, and arrays that are not contiguous."""
    (path,) = write(tmp_path, entries(ARRAYS), metadata={"format": "pt"})
    assert path == tmp_path / "model.safetensors"
    for got in (read_all(path), read_all(tmp_path)):
        assert got.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert_equal(got[name], array)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == ARRAYS.keys()
        for name in ARRAYS.keys() - {"F8_E4M3", "F8_E5M2", "F8_E8M0"}:
            assert_equal(file.get_tensor(name), ARRAYS[name])


def test_arrays_are_distributed_over_several_files(tmp_path):
    arrays = {f"layers.{i}": filled((4, 4), np.float32, i) for i in range(5)}  # 64 bytes each
    arrays["large"] = filled((100,), np.float32)
    files = write(tmp_path, entries(arrays), max_file_bytes=128, metadata={"format": "pt"})
    assert [path.name for path in files] == [
        "model-00001-of-00004.safetensors",  # 64 + 64
        "model-00002-of-00004.safetensors",
        "model-00003-of-00004.safetensors",  # 64
        "model-00004-of-00004.safetensors",  # larger than max_file_bytes
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 5 * 64 + 400}
    reader = Reader(tmp_path)
    for name, array in arrays.items():
        assert_equal(safetensors.numpy.load_file(tmp_path / index["weight_map"][name])[name], array)
        assert_equal(reader.read(name), array)
    assert set(reader.names) == arrays.keys() and reader.metadata == {"format": "pt"}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the kernel does not count resident pages")
def test_what_was_read_does_not_stay_in_memory(tmp_path):
    """Of a file of 64 MiB, row by row."""
    path = raw(tmp_path / "a.safetensors", {"a": described("F32", (64, 2**18), (0, 2**26))})
    os.truncate(path, path.stat().st_size + 2**26)
    resident_bytes = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    reader, before = Reader(path), resident_bytes()
    for i in range(64):
        assert not reader.read("a")[i].copy().any()
    assert resident_bytes() - before < 2**24


def test_a_file_that_is_truncated_after_opening_is_refused(tmp_path):
    (path,) = write(tmp_path, [entry("a", filled((1000,), np.float32))])
    reader = Reader(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(ValueError, match="file size"):
        reader.read("a")


# All or nothing


def test_an_exception_keeps_the_old_model(tmp_path):
    def fails():
        raise KeyboardInterrupt

    arrays = [*entries(ARRAYS), Entry("a", (4,), np.dtype(np.float32), fails)]
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, arrays, max_file_bytes=64)
    assert list(tmp_path.iterdir()) == []
    files = write(tmp_path, entries(ARRAYS))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, arrays, max_file_bytes=64, overwrite=True)
    assert tuple(tmp_path.iterdir()) == files
    assert "already contains a model" in message(write, tmp_path, entries(ARRAYS))
    assert read_all(tmp_path).keys() == ARRAYS.keys()


KILLED = """
import os, signal, sys
from pathlib import Path
from zerojax.utils.files import unfinished
with unfinished(Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_text("a part of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_export_left_is_deleted_by_the_next(tmp_path):
    """But not what a living process is writing there."""
    ended = subprocess.run([sys.executable, "-P", "-c", KILLED, tmp_path], timeout=60)
    assert ended.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    with unfinished(tmp_path) as folder:
        (file,) = write(tmp_path, entries({"a": np.ones(3)}))
        assert set(tmp_path.iterdir()) == {file, folder}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("old", "new"), [(10**6, 64), (64, 10**6), (64, 128), (64, 64)])
def test_overwriting_leaves_the_new_model_and_other_files(tmp_path, old, new):
    (tmp_path / "config.json").write_text("{}")
    arrays = {str(i): filled((16,), np.float32, i) for i in range(4)}
    write(tmp_path, entries({name: a[::-1] for name, a in arrays.items()}), max_file_bytes=old)
    files = write(tmp_path, entries(arrays), max_file_bytes=new, overwrite=True)
    assert set(tmp_path.iterdir()) == {*files, tmp_path / "config.json"}
    for name, array in read_all(tmp_path).items():
        assert_equal(array, arrays[name])


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([("a", np.float32), ("b", np.float32), ("a", np.int8)], "two arrays have the same name\n  got:      'a'"),
        ([("a", ml_dtypes.int4)], "the format does not support an array"),
        ([("a", "U3")], "the format does not support an array"),
        ([("__metadata__", np.int8)], "the format does not support an array\n  got:      '__metadata__'"),
        ([("half \ud800", np.int8)], "the format does not support an array"),
    ],
)
def test_arrays_that_cannot_be_written_are_refused(tmp_path, arrays, expected):
    assert expected in message(write, tmp_path, [entry(name, np.zeros(1, dtype)) for name, dtype in arrays])
    assert list(tmp_path.iterdir()) == []


# Invalid files


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (b'{"a": ', b"", "is damaged or not a safetensors file"),
        ({"a": described()}, b"1", "is damaged or not a safetensors file"),
        ({"a": described(), "b": described(offsets=[1, 3])}, b"123", "is damaged or not a safetensors file"),
        ({"a": described(shape=[2**32, 2**32])}, b"12", "is damaged or not a safetensors file"),
        ({"a": described("F4", (4,))}, b"12", "has an unsupported dtype\n  got:      'F4'"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, header, data, expected):
    assert expected in message(Reader, raw(tmp_path / "a.safetensors", header, data))


def test_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path / "none", "", "x" * 5000, "a\0b"):
        assert "no such file or folder" in message(Reader, path)
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would block
    assert "no such file or folder" in message(Reader, tmp_path / "pipe.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"\2\0")
    assert "is damaged" in message(Reader, tmp_path / "short.safetensors")


def test_an_ambiguous_folder_is_refused(tmp_path):
    assert "neither one index nor a single safetensors file" in message(Reader, tmp_path)
    for name in ("a", "b"):
        raw(tmp_path / f"{name}.safetensors", {name: described()}, b"12")
    assert "['a.safetensors', 'b.safetensors']" in message(Reader, tmp_path)
    raw(tmp_path / "model.safetensors", {"model": described()}, b"12")
    assert Reader(tmp_path).names == ("model",)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    assert "['a.safetensors.index.json', 'b.safetensors.index.json']" in message(Reader, tmp_path)


@pytest.fixture
def model_folder(tmp_path):
    """A folder with a file and links; another file is next to the folder, and must not be read."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (folder / "in.safetensors", tmp_path / "out.safetensors"):
        raw(path, {"a": described()}, b"12")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (folder / "inner.safetensors").symlink_to("in.safetensors")
    (folder / "here").symlink_to(".")
    (folder / "up").symlink_to("..")
    return folder


def write_index(folder, weight_map):
    (folder / tensors.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../out.safetensors", "up/out.safetensors", "here/in.safetensors", "..\\out.safetensors", "..", ""],
)
def test_an_index_that_names_files_outside_its_folder_is_refused(model_folder, name):
    for follow_links in (False, True):
        text = message(Reader, write_index(model_folder, {"a": name}), follow_links=follow_links)
        assert f"the index names a file outside {model_folder}" in text and repr(name) in text


def test_links_out_of_the_folder_are_refused_unless_allowed(model_folder):
    assert Reader(write_index(model_folder, {"a": "inner.safetensors"})).names == ("a",)
    text = message(Reader, write_index(model_folder, {"a": "link.safetensors"}))
    assert "a link leads out of" in text and "'link.safetensors'" in text and "follow_links=True" in text
    assert Reader(model_folder, follow_links=True).names == ("a",)
    (model_folder / tensors.INDEX).unlink()
    (model_folder / "model.safetensors").symlink_to(model_folder.parent / "out.safetensors")
    assert "a link leads out of" in message(Reader, model_folder)
    assert Reader(model_folder / "model.safetensors").names == ("a",)  # the user named this file


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({}, "has no valid weight_map"),
        ({"a": 1}, "has no valid weight_map"),
        ({"a": "none.safetensors"}, "no such file or folder"),
        ({"b": "in.safetensors"}, "in only one of them: [('a', 'in.safetensors'), ('b', 'in.safetensors')]"),
        ({"a": "in.safetensors", "b": "in.safetensors"}, "in only one of them: [('b', 'in.safetensors')]"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(model_folder, weight_map, expected):
    assert expected in message(Reader, write_index(model_folder, weight_map))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FILES = st.sampled_from(["in.safetensors", "../out.safetensors", "link.safetensors", "none", "..", "", "a/b", "\0"])


@MANY
@given(st.binary(min_size=1, max_size=6), st.data())
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(damage, data):
    """A valid file in which some bytes were changed."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = write(folder, [entry(name, ARRAYS[name]) for name in ("BF16", "U8")], metadata={"a": "b"})
        text = path.read_bytes()
        at = data.draw(st.integers(0, len(text) - len(damage)))
        path.write_bytes(text[:at] + damage + text[at + len(damage) :])
        try:
            ours = read_all(path)
        except ValueError as error:
            assert str(error).startswith("tensors: ") and len(str(error)) < 1000
        else:
            theirs = safetensors.numpy.load_file(path)
            assert ours.keys() == theirs.keys()
            for name, array in ours.items():
                assert_equal(array, theirs[name])


@MANY
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
        try:
            assert read_all(folder)["a"].tobytes() == b"in"
        except ValueError as error:
            assert len(str(error)) < 1000


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
        (lambda folder: os.rename(folder / OUTSIDE, folder / "moved"), "wrote outside: os.rename"),
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
        ("layers/3/experts/5/up", "model.layers.3.mlp.experts.5.up_proj"),
        ("layers/7/kernel", "odd"),  # an exact name takes precedence
        ("block_3/bias", "h.3.b"),
        ("block_/bias", None),  # at least one character
        ("layers/0/1/kernel", None),  # a * does not cross a separator
        ("layers/0/kernel\n", None),
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
        ('{"a/*": "b"}', "differ in *\n  got:      'a/*': 'b'\n  fix:      use the same number of *"),
        ('{"a/*x*": "b.*.*"}', "two * in one part of a name"),
        ("names.json", "no such file"),
        ('{"a": {"name": "b"}}', "does not consist of name and dims"),
        ('{"a": {"name": [], "dims": "i o -> o i"}}', "does not consist of name and dims"),
        ('{"a": {"name": ["b", 1], "dims": "i o -> o i"}}', "not a pair of names"),
        ('{"a/*": {"name": ["b.*", "c"], "dims": "i o -> o i"}}', "differ in *"),
        ('{"a": {"name": "b", "dims": [1, 0]}}', "not of the form 'theirs -> ours'"),
        ('{"a": {"name": "b", "dims": "i o -> o"}}', "not of the form 'theirs -> ours'"),
        ('{"a": {"name": "b", "dims": "i 2 -> 2 i"}}', "not of the form 'theirs -> ours'"),
    ],
)
def test_an_invalid_mapping_is_refused(text, expected):
    assert expected in message(names.mapping, text)
