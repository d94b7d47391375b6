"""Checkpoints of strangers: whatever is in their files, memory is bounded, and names are shown as plain text."""

import json
import os
import struct
import subprocess
import sys

import click
import jax
import numpy as np
import pytest
import tensorstore
from click.testing import CliRunner
from support.paths import REPO

from zerojax.checkpoints import CheckpointCorrupted, manifest, pieces, store
from zerojax.checkpoints.digest import HostDigest
from zerojax.checkpoints.manifest import LeafRecord, Manifest, plain_text
from zerojax.cli import main
from zerojax.cli.common import without_traceback
from zerojax.exchange import parameters

STEP = 3
GOOD = np.arange(12, dtype=np.float32).reshape(3, 4)
LIMIT_BYTES = 3 * 2**28  # for a process that only imports what it reads with, and reads small arrays
HOSTILE = "\x1b[2J[bold red]x[/]\u202e\r"
SHOWN = r"\x1b[2J[bold red]x[/]\u202e\r"


def digest_text(array):
    digest = HostDigest()
    digest.add(array)
    return digest.text


def record(array):
    return LeafRecord(array.shape, array.dtype.name, digest_text(array))


def describe(leaves, **changes):
    dtypes = {"param_dtype": "float32", "compute_dtype": "bfloat16", "reduce_dtype": "float32"}
    fields = {"mesh": {"data": 8}, "stage": 3, "precision": dtypes, "versions": {"jax": "1"}, **changes}
    return Manifest(step=STEP, leaves=leaves, **fields)


def write_manifest(directory, content):
    """Writes a step with a manifest and an empty folder for arrays."""
    folder = store.folder(directory, STEP)
    (folder / "manifest").mkdir(parents=True, exist_ok=True)
    (folder / "arrays").mkdir(exist_ok=True)
    (folder / "commit_success.txt").touch()
    (folder / "manifest" / "metadata").write_text(json.dumps(content))


def open_files(directory, **config):
    """The key-value store that contains the arrays of the step."""
    base = store.arrays_folder(directory, STEP).as_uri() + "/"
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()


def write_array(files, path, shape, chunk, chunks):
    """Writes an array of floats with the given encoded chunks, by name."""
    described = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunk,
        "dtype": "<f4",
        "compressor": {"id": "zstd", "level": 1},
        "fill_value": None,
        "filters": None,
        "order": "C",
    }
    files.write(f"{path}/.zarray", json.dumps(described).encode()).result()
    for name, content in chunks.items():
        files.write(f"{path}/{name}", content).result()


def zstd(data=b"", num_zeros=0):
    """A zstd frame of data and of zeros, which take four bytes for each 128 KiB."""
    blocks = [(0, len(data), data), *[(1, 2**17, b"\0")] * (num_zeros // 2**17)]
    header = lambda kind, size, is_last: struct.pack("<I", is_last | kind << 1 | size << 3)[:3]
    encoded = [header(kind, size, i == len(blocks) - 1) + content for i, (kind, size, content) in enumerate(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x38" + b"".join(encoded)


def problems(directory):
    found = store.read_manifest(directory, STEP)
    return dict(pieces.verify_arrays(directory, STEP, found))


MEASURE = """
import resource, sys
from pathlib import Path
from zerojax.checkpoints import pieces, store
pieces.MEMORY_LIMIT_BYTES = int(sys.argv[2])
found = store.read_manifest(Path(sys.argv[1]), 3)
for path, problem in pieces.verify_arrays(Path(sys.argv[1]), 3, found):
    print(path, problem, sep=": ")
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def measured(directory):
    """Verifies in a fresh process. Returns what is wrong with each array, and the memory of the process that reads."""
    command = [sys.executable, "-P", "-c", MEASURE, str(directory), str(LIMIT_BYTES)]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    *lines, own, of_reader = ended.stdout.splitlines()
    assert int(own) < 2**30
    return dict(line.split(": ", 1) for line in lines), int(of_reader)


def test_chunks_that_decompress_to_gigabytes(tmp_path):
    """Next to them, an intact array is read: each of the others costs a new process."""
    leaves = {path: LeafRecord((1024,), "float32", "0" * 16) for path in ("longer", "huge")}
    write_manifest(tmp_path, manifest.to_json(describe(leaves | {"params/good": record(GOOD)})))
    files = open_files(tmp_path)
    write_array(files, "longer", [1024], [1024], {"0": zstd(num_zeros=2**32)})
    write_array(files, "huge", [1024], [2**29], {"0": zstd(num_zeros=2**31)})
    write_array(files, "params/good", [3, 4], [3, 4], {"0.0": zstd(GOOD.tobytes())})
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2**18
    found, num_bytes = measured(tmp_path)
    assert found["params/good"] == "None"
    assert "End of data expected" in found["longer"] or "ended with code -" in found["longer"]
    assert "ended with code -6; it may use 768 MiB of memory" in found["huge"]
    assert num_bytes < LIMIT_BYTES


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_index_of_gigabytes(tmp_path, is_sparse):
    """Compressed, or a file of a terabyte without content. After three attempts, no other array is read."""
    write_manifest(tmp_path, manifest.to_json(describe({name: record(GOOD) for name in "abcdefghij"})))
    files = open_files(tmp_path, max_inline_value_bytes=2**20, max_decoded_node_bytes=2**31 - 1)
    with tensorstore.Transaction() as transaction:
        for i in range(1000):
            files.with_transaction(transaction).write(f"a/{i:04}", bytes(2**20)).result()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2**18
    if is_sparse:
        os.truncate(store.arrays_folder(tmp_path, STEP) / "manifest.ocdbt", 2**40)
    found, num_bytes = measured(tmp_path)
    assert num_bytes < LIMIT_BYTES and all(found.values())
    assert ["ended with code -6" in problem for problem in found.values()] == [True] * 3 + [False] * 7


def test_a_shape_that_no_array_has(tmp_path):
    for shape in [[2**62], [2**40, 2**40], [0, 2**62, 4], [1] * 65]:
        leaf = {"shape": shape, "dtype": "float32", "digest": "0" * 16}
        content = manifest.to_json(describe({"a": record(GOOD)})) | {"leaves": {"a": leaf}}
        write_manifest(tmp_path, manifest.with_digest({k: v for k, v in content.items() if k != "digest"}))
        with pytest.raises(
            CheckpointCorrupted, match=r"is invalid\n  got:      .*an array (has more than 64 dims|of shape)"
        ):
            store.read_manifest(tmp_path, STEP)


def test_a_shape_that_is_larger_than_what_was_written(tmp_path):
    """Before memory is allocated for it, also by an export that has to transpose the whole array."""
    shape = (2**20, 2**20)
    write_manifest(tmp_path, manifest.to_json(describe({"params/w": LeafRecord(shape, "float32", "0" * 16)})))
    write_array(open_files(tmp_path), "params/w", shape, [3, 4], {"0.0": zstd(GOOD.tobytes())})
    expected = "float32 of shape (1048576, 1048576) needs 91626143744 chunks of shape (3, 4); there are 1"
    assert problems(tmp_path) == {"params/w": expected}
    turned = {"w": {"name": "w", "dims": "out in -> in out"}}
    with pytest.raises(CheckpointCorrupted, match="needs 91626143744 chunks"):
        parameters.export(tmp_path, STEP, tmp_path / "model", mapping=turned)
    assert not (tmp_path / "model").exists()


def test_a_chunk_that_is_missing_is_not_read_as_zeros(tmp_path):
    zeros = np.zeros((6, 4), np.float32)
    write_manifest(tmp_path, manifest.to_json(describe({"a": record(zeros), "b": record(zeros)})))
    chunk, files = zstd(bytes(48)), open_files(tmp_path)
    write_array(files, "a", [6, 4], [3, 4], {"0.0": chunk, "1.0": chunk})
    write_array(files, "b", [6, 4], [3, 4], {"0.0": chunk, "7.7": chunk})
    found = problems(tmp_path)
    assert found["a"] is None and "missing" in found["b"]


@pytest.mark.parametrize("max_bytes", [4, 40, 100, 10**4])
def test_pieces_are_those_of_the_array(tmp_path, max_bytes):
    """In C order, of any size, over chunks of another shape, and of one element of a stack."""
    array = np.arange(4 * 5 * 7, dtype=np.float32).reshape(4, 5, 7)
    padded = np.pad(array, [(0, 0), (0, 1), (0, 2)])
    chunks = {
        f"{i}.{j}.{k}": zstd(padded[2 * i :, 3 * j :, 3 * k :][:2, :3, :3].tobytes())
        for i in range(2)
        for j in range(2)
        for k in range(3)
    }
    write_manifest(tmp_path, manifest.to_json(describe({})))
    write_array(open_files(tmp_path), "a", array.shape, [2, 3, 3], chunks)
    with pieces.LimitedReader(tmp_path, STEP) as reader:
        for element, wanted in [(None, array), (2, array[2])]:
            found = list(reader.pieces("a", record(array), max_bytes, element=element))
            assert np.array_equal(np.concatenate([piece.reshape(-1) for piece in found]), wanted.reshape(-1))
            assert max(piece.nbytes for piece in found) <= max_bytes


def test_another_shape_or_dtype_on_disk(tmp_path):
    leaf = LeafRecord((3, 2), "bfloat16", "0" * 16)
    write_manifest(tmp_path, manifest.to_json(describe({"a": leaf})))
    write_array(open_files(tmp_path), "a", [3, 4], [3, 4], {"0.0": zstd(GOOD.tobytes())})
    found = "shape (3, 4) and dtype float32 on disk, shape (3, 2) and dtype bfloat16 in the manifest"
    assert problems(tmp_path) == {"a": found}


def test_a_reader_that_does_not_start_is_an_error_of_the_array(tmp_path, monkeypatch):
    """Even if the error has no text, as that of Python when it is out of memory."""
    write_manifest(tmp_path, manifest.to_json(describe({"a": record(GOOD)})))
    write_array(open_files(tmp_path), "a", [3, 4], [3, 4], {"0.0": zstd(GOOD.tobytes())})
    monkeypatch.setattr(pieces, "MEMORY_LIMIT_BYTES", 2**20)
    problem = problems(tmp_path)["a"]
    assert problem and "digest" not in problem
    monkeypatch.setattr(pieces, "_SCRIPT", tmp_path / "nothing.py")
    assert "ended with code 2; it may use 1 MiB of memory. " in problems(tmp_path)["a"]


def test_names_are_shown_as_plain_text(tmp_path, monkeypatch):
    """In tables and in errors: neither escape sequences nor markup."""
    monkeypatch.setenv("COLUMNS", "400")
    leaf = record(GOOD)
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), HOSTILE)
    changes = {"mesh": {HOSTILE: 8}, "versions": {HOSTILE: HOSTILE}, "precision": dtypes, "data": [HOSTILE]}
    hostile = describe({HOSTILE: leaf._replace(digest=HOSTILE), f"model_state/{HOSTILE}": leaf}, **changes)
    write_manifest(tmp_path / "a", manifest.to_json(hostile))
    write_manifest(tmp_path / "b", manifest.to_json(describe({})))
    write_array(open_files(tmp_path / "a"), HOSTILE, [3, 4], [3, 4], {"0.0": zstd(GOOD.tobytes())})
    a, b, step = str(tmp_path / "a"), str(tmp_path / "b"), str(STEP)
    runs = {}
    for command in (
        ["ls", a],
        ["ls", a, "--verify"],
        ["inspect", a],
        ["verify", a],
        ["diff", a, step, step, "--other", b],
        ["export", a, str(tmp_path / "model")],
    ):
        runs[command[0]] = text = CliRunner().invoke(main, ["checkpoint", *command]).output
        assert SHOWN in text, command
        assert [c for c in text if not c.isprintable() and c != "\n"] == [], command
    assert runs["inspect"].count(SHOWN) == 8  # the mesh, two dtypes, a package and its version, two paths, a digest


def test_errors_show_names_as_plain_text(tmp_path):
    avals = {"a": jax.ShapeDtypeStruct((3, 4), np.float32)}
    saved = describe({HOSTILE: record(GOOD)})
    with pytest.raises(ValueError) as error:
        manifest.paths_to_read(saved, avals, manifest.Allowed(), "here")
    assert f"extra:    {SHOWN}: " in str(error.value)
    newer = manifest.to_json(saved) | {"format": 2, "versions": {"zerojax": HOSTILE}}
    with pytest.raises(ValueError) as error:
        manifest.from_json(newer, "here")
    assert f"format 2 of zerojax {SHOWN}\n" in str(error.value)
    with pytest.raises(click.ClickException) as shown, without_traceback():
        raise ValueError(f"any error\n  got:      {HOSTILE}")
    assert shown.value.message == f"any error\n  got:      {SHOWN}"


def test_plain_text():
    assert plain_text("params/Ä/0.w [1] \\n") == "params/Ä/0.w [1] \\n"
    assert plain_text("\ud800\x00\x9b31m") == r"\ud800\x00\x9b31m"


@pytest.mark.parametrize("name", ["", "/", "..", "../../../secret", "/etc/passwd", "a\0b", "a|b:c"])
def test_names_do_not_lead_out_of_the_step(tmp_path, name):
    """They are keys in the files of the step, and names in the header of an exported file."""
    directory, path = tmp_path / "run", f"params/{name}"
    write_manifest(directory, manifest.to_json(describe({path: record(GOOD)})))
    write_array(open_files(directory), path, [3, 4], [3, 4], {"0.0": zstd(GOOD.tobytes())})
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "0.0").write_text("secret")
    assert problems(directory) == {path: None}
    before = set(tmp_path.rglob("*"))
    (file,) = parameters.export(directory, STEP, tmp_path / "model")
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "model", tmp_path / "model" / "model.safetensors"}
    assert file.read_bytes().endswith(GOOD.tobytes())


def test_a_manifest_that_is_too_large(tmp_path, monkeypatch):
    """It is refused by its size; and none is written that would not be read."""
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 4096)
    small = manifest.to_json(describe({"a": record(GOOD)}))
    write_manifest(tmp_path, small)
    assert store.read_manifest(tmp_path, STEP).leaves["a"].shape == (3, 4)
    write_manifest(tmp_path, small | {"padding": " " * 4096})
    with pytest.raises(CheckpointCorrupted, match=r"cannot be read\n  got:      it has more than 4096 bytes"):
        store.read_manifest(tmp_path, STEP)
    with pytest.raises(ValueError, match=r"is too large\n  got:      .* bytes, 4004 of them states of data iterators"):
        manifest.to_json(describe({}, data=["x" * 4000]))


@pytest.mark.parametrize("kind", ["pipe", "link", "pipe for the manifest"])
def test_links_and_pipes_are_refused(tmp_path, kind):
    """At once: opening a pipe waits for somebody who writes to it, and a link may lead anywhere."""
    write_manifest(tmp_path, manifest.to_json(describe({"a": record(GOOD)})))
    write_array(open_files(tmp_path), "a", [3, 4], [3, 4], {"0.0": zstd(GOOD.tobytes())})
    assert not any(problem for _, problem in pieces.verify_arrays(tmp_path, STEP, store.read_manifest(tmp_path, STEP)))
    folder = store.folder(tmp_path, STEP)
    strange = folder / ("manifest/metadata" if kind == "pipe for the manifest" else "arrays/strange")
    strange.unlink(missing_ok=True)
    if kind == "link":
        strange.symlink_to("/etc/passwd")
    else:
        os.mkfifo(strange)
    result = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path)])
    assert result.exit_code == 1
    assert (
        "it is no regular file" in result.output if "manifest" in kind else "contains a link, a pipe" in result.output
    )
