"""Generated and damaged inputs against what reads files that others made.

    python scripts/fuzz.py                                    # 10,000 inputs
    python scripts/fuzz.py --seed 3 --first 1234 --inputs 1   # input 1234 of seed 3 alone

An input is read, or refused by a ValueError. A crash is any other exception, more than 2 s, anything written outside of
the input's own folder, and anything read in the folder beside it. Each is told in a line, and the exit code is 1.
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerojax.checkpoints import manifest, store
from zerojax.exchange import headers, tensors

LIMIT_S = 2.0


class Target(NamedTuple):
    """Something that reads inputs.

    Attributes:
        make: makes an input of random numbers in an empty folder, and returns its path. Beside the folder is
            another, 'outside', with a file that can be read and is not to be.
        run: reads what is at the path.
    """

    make: Callable[[random.Random, Path], Path]
    run: Callable[[Path], None]


# What is done outside of a folder


class Outside(BaseException):
    """Something is read or written where it should not be. Not an Exception, so that nobody catches it by chance."""


class TooLong(BaseException):
    """The time is over."""


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of the interpreter that change a file -> which of their arguments are its paths.
CHANGES = {f"os.{name}": (0,) for name in ("remove", "mkdir", "rmdir", "truncate", "chmod", "chown", "utime")}
CHANGES |= {"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)}


class Guard:
    """Raises Outside for what is done outside of `folder`, while there is one."""

    folder: Path | None = None

    @contextlib.contextmanager
    def on(self, folder):
        self.folder = folder
        try:
            yield
        finally:
            self.folder = None

    def __call__(self, event, args):
        if self.folder is None:
            return
        if event == "open" and args[2] & WRITES and self.leads_out(args[0]):
            raise Outside(f"wrote outside: {args[0]!r}")
        if event == "open" and self.is_within(args[0], self.folder.parent) and self.leads_out(args[0]):
            raise Outside(f"read outside: {args[0]!r}")
        for path in (args[i] for i in CHANGES.get(event, ())):
            if self.leads_out(path):
                raise Outside(f"wrote outside: {event} of {path!r}")

    def leads_out(self, path):
        return not isinstance(path, int) and not self.is_within(path, self.folder)

    @staticmethod
    def is_within(path, folder):
        return not isinstance(path, int) and Path(os.path.realpath(os.fsdecode(path))).is_relative_to(folder)


@functools.cache
def guard():
    """The one of this process: a hook cannot be taken out again."""
    found = Guard()
    sys.addaudithook(found)
    return found


def too_long(signum, frame):
    raise TooLong(f"more than {LIMIT_S} s")


def attempt(target, rng):
    """'read', 'refused', or what went wrong."""
    with tempfile.TemporaryDirectory() as outer:
        outer = Path(os.path.realpath(outer))
        (outer / "input").mkdir()
        (outer / "outside").mkdir()
        (outer / "outside" / "valid.safetensors").write_bytes(tensor_bytes({"secret": np.zeros(2, np.int8)}))
        path = target.make(rng, outer / "input")
        before = around(outer)
        found = run(target, path, outer / "input")
        return found if around(outer) == before else f"wrote outside ({found})"


def around(outer):
    """What is beside the folder of the input, with contents: for what writes without the interpreter's knowing."""
    beside = (path for path in sorted(outer.rglob("*")) if not path.is_relative_to(outer / "input"))
    return {path: path.is_file() and path.read_bytes() for path in beside}


def run(target, path, folder):
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with guard().on(folder):
            target.run(path)
        return "read"
    except ValueError:
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# JSON


NUMBERS = [
    -1,
    0,
    1,
    2,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    10**4000,
    1.0,
    1e308,
    True,
    None,
]
TEXTS = [
    "",
    "a",
    "a0",
    "__metadata__",
    "dtype",
    "weight_map",
    "F4",
    "F64",
    "\0",
    "\n",
    "\ud800",
    "ü",
    "x" * 300,
    "../a",
]


def anything(rng, depth=3):
    """A JSON value."""
    kind = rng.randrange(5 if depth else 3)
    if kind == 4:
        return {rng.choice(TEXTS): anything(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 3:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    return rng.choice([TEXTS, NUMBERS, range(9)][kind])


def hard_json(rng):
    """JSON, or nearly so, that is hard on a parser."""
    n = rng.choice([10, 1000, 100_000])
    forms = [
        lambda: json.dumps(anything(rng)).encode(),
        lambda: b'{"a":' + b"[" * n + b"]" * n + b"}",
        lambda: b'{"a":' * n + b"1" + b"}" * n,
        lambda: b'{"a":' + b"9" * n + b"}",
        lambda: b"{" + b",".join(b'"%d":{}' % (i % (n - 1)) for i in range(n)) + b"}",  # one key twice
        lambda: b'{"a":NaN,"b":-Infinity,"c":1e999999}',
        lambda: b"\xef\xbb\xbf{}",
        lambda: b'{"\xff":1}',
    ]
    return rng.choice(forms)()


def damaged(rng, data):
    """With some bytes changed, left out, doubled or cut off."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        end = at + rng.choice([1, 1, 8, 50])
        if rng.random() < 0.1:
            end = len(data)
        piece = bytes(data[at:end])
        tokens = [*b'09-[]{}",:.eE', *b"nul"]
        data[at:end] = rng.choice([b"", piece * 2, piece[::-1], rng.randbytes(len(piece)), bytes([rng.choice(tokens)])])
    return bytes(data)


# Inputs for zerojax.exchange.tensors


def sized(text, length=None):
    """A header with its length before it."""
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def tensor_bytes(arrays):
    """A valid file."""
    described = [(name, array.shape, array.dtype) for name, array in arrays.items()]
    return headers.encode(described, {"format": "pt"}) + b"".join(array.tobytes() for array in arrays.values())


def random_arrays(rng):
    """A few small ones of any dtype."""
    shape = lambda: [rng.randrange(4) for _ in range(rng.randrange(4))]
    return {f"a{i}": np.ones(shape(), rng.choice(list(headers.DTYPES.values()))) for i in range(rng.randrange(1, 5))}


def odd_header(rng):
    """A valid file, of which a few values in the header are others."""
    data = tensor_bytes(random_arrays(rng))
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for _ in range(rng.choice([0, 1, 1, 2])):
        array = header[rng.choice(list(header))]
        key = rng.choice([*array, rng.choice(TEXTS)])
        value = array.get(key)
        if isinstance(value, list) and value and rng.random() < 0.7:
            value[rng.randrange(len(value))] = rng.choice(NUMBERS)
        else:
            array[key] = anything(rng)
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = text.replace(b'"a1"', b'"a0"')  # one key twice
    length = rng.randrange(2**64) >> rng.randrange(64) if rng.random() < 0.1 else None
    left_over = b"\0" if rng.random() < 0.1 else b""
    return sized(text, length) + data[end:] + left_over


def odd_index(rng, folder):
    """A folder with two files and an index that names others too; and with links."""
    weight_map = {}
    for i in range(2):
        weight_map[f"a{i}"] = f"model-0000{i + 1}-of-00002.safetensors"
        (folder / weight_map[f"a{i}"]).write_bytes(tensor_bytes({f"a{i}": np.ones(2, np.int8)}))
    outside = "outside/valid.safetensors"
    for link, target in (("link.safetensors", f"../{outside}"), ("loop", "loop"), ("up", "..")):
        (folder / link).symlink_to(target)
    elsewhere = [str(folder.parent / outside), f"../{outside}", f"up/{outside}", "link.safetensors", "loop", "up"]
    elsewhere += ["C:\\x", f"..\\{outside}", "/dev/zero", ".", "..", *TEXTS]
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice(["a0", "a1", "secret", *TEXTS])
        weight_map[name] = rng.choice(elsewhere) if rng.random() < 0.8 else anything(rng)
    text = json.dumps({"metadata": anything(rng), "weight_map": weight_map}).encode()
    forms = [text, text, text, damaged(rng, text), hard_json(rng)]
    (folder / tensors.INDEX).write_bytes(rng.choice(forms))
    return folder


def tensor_input(rng, folder):
    if rng.random() < 0.2:
        return odd_index(rng, folder)
    forms = {
        "bytes": lambda: rng.randbytes(rng.randrange(200)),
        "bytes as header": lambda: sized(rng.randbytes(rng.randrange(99))),
        "JSON": lambda: sized(hard_json(rng)),
        "odd header": lambda: odd_header(rng),
        "damaged": lambda: damaged(rng, tensor_bytes(random_arrays(rng))),
    }
    form = rng.choices(list(forms), weights=[1, 1, 2, 8, 8])[0]
    path = folder / "model.safetensors"
    path.write_bytes(forms[form]())
    return rng.choice([path, folder])


def read_tensors(path):
    reader = tensors.Reader(path)
    for name in reader.names:
        array = reader.read(name)
        assert (array.shape, array.dtype) == (reader.shape(name), reader.dtype(name))
        reader.read(name, tuple(slice(n // 3, n // 2) for n in array.shape))


# Inputs for zerojax.checkpoints.manifest


def sound_manifest(rng):
    leaf = lambda: manifest.LeafRecord(tuple(rng.randrange(9) for _ in range(rng.randrange(3))), "float32", "0" * 16)
    leaves = {f"params/{i}": leaf() for i in range(rng.randrange(1, 4))}
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), "float32")
    return manifest.to_json(manifest.Manifest(4, leaves, {"data": 8}, 3, dtypes, {"zerojax": "0.1.0"}))


def odd_manifest(rng):
    """One whose digest is right, and of which a value is not what it should be."""
    told = sound_manifest(rng)
    del told["digest"]
    told[rng.choice(list(told))] = anything(rng)
    return json.dumps(manifest.with_digest(told)).encode()


def manifest_input(rng, folder):
    text = json.dumps(sound_manifest(rng)).encode()
    form = rng.choices(["sound", "odd", "damaged", "hard", "bytes"], weights=[1, 6, 6, 2, 1])[0]
    data = {
        "sound": lambda: text,
        "odd": lambda: odd_manifest(rng),
        "damaged": lambda: damaged(rng, text),
        "hard": lambda: hard_json(rng),
        "bytes": lambda: rng.randbytes(rng.randrange(200)),
    }[form]()
    path = folder / "step_4" / "manifest" / "metadata"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return folder


def read_manifest(folder):
    try:
        found = store.read_manifest(folder, 4)
    except manifest.CheckpointCorrupted as error:
        raise ValueError(str(error)) from error
    assert found.step == 4 and found.num_bytes >= 0


# Everything that reads what others made: a further reader is a further line.
TARGETS = {
    "tensors": Target(tensor_input, read_tensors),
    "manifest": Target(manifest_input, read_manifest),
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="for each target (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first input")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args(argv)
    signal.signal(signal.SIGALRM, too_long)
    counts = collections.Counter()
    for name in args.targets:
        for number in range(args.first, args.first + args.inputs):
            found = attempt(TARGETS[name], random.Random(f"{name} {args.seed} {number}"))
            counts[found if found in ("read", "refused") else "crashes"] += 1
            if found not in ("read", "refused"):
                print(f"{name}, seed {args.seed}, input {number}: {found}", file=sys.stderr)
    total = counts.total()
    print(f"{total} inputs, {counts['refused']} refused, {counts['read']} read, {counts['crashes']} crashes")
    return 1 if counts["crashes"] else 0


if __name__ == "__main__":
    sys.exit(main())
