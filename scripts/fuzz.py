"""Fuzzes the readers of files from other programs with generated and damaged inputs.

    python scripts/fuzz.py                                    # 10,000 inputs for each target
    python scripts/fuzz.py --seed 3 --first 1234 --inputs 1   # only input 1234 of seed 3

An input has to be read, or refused with a ValueError. Anything else is a crash: another exception, more than 2 s,
writing outside the folder of the input, or reading in the folder next to it. Each crash is printed on a line, and the
exit code is then 1.
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
from safetensors.numpy import save

from zerojax.checkpoints import manifest, store
from zerojax.exchange import tensors

LIMIT_S = 2.0


class Target(NamedTuple):
    """A reader to fuzz.

    Attributes:
        make: creates an input from random numbers in an empty folder, and returns its path. Next to this folder there
            is a folder 'outside', with a file that could be read and must not be.
        run: reads the input at the path.
    """

    make: Callable[[random.Random, Path], Path]
    run: Callable[[Path], None]


# Access outside the folder of an input


class OutsideAccess(BaseException):
    """Something was read or written outside the folder. Not an Exception, so that readers do not catch it."""


class TooSlow(BaseException):
    """An input took longer than LIMIT_S."""


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events of the interpreter that change a file -> the positions of the paths in their arguments.
CHANGES = {f"os.{name}": (0,) for name in ("remove", "mkdir", "rmdir", "truncate", "chmod", "chown", "utime")}
CHANGES |= {"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)}


class Guard:
    """Audit hook that raises OutsideAccess for access outside `folder`, as long as it is set."""

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
            raise OutsideAccess(f"wrote outside: {args[0]!r}")
        if event == "open" and self.is_within(args[0], self.folder.parent) and self.leads_out(args[0]):
            raise OutsideAccess(f"read outside: {args[0]!r}")
        for path in (args[i] for i in CHANGES.get(event, ())):
            if self.leads_out(path):
                raise OutsideAccess(f"wrote outside: {event} of {path!r}")

    def leads_out(self, path):
        return not isinstance(path, int) and not self.is_within(path, self.folder)

    @staticmethod
    def is_within(path, folder):
        return not isinstance(path, int) and Path(os.path.realpath(os.fsdecode(path))).is_relative_to(folder)


@functools.cache
def guard():
    """The guard of this process. There is only one, because an audit hook cannot be removed."""
    hook = Guard()
    sys.addaudithook(hook)
    return hook


def raise_too_slow(signum, frame):
    raise TooSlow(f"more than {LIMIT_S} s")


def attempt(target, rng):
    """Runs a target on a new input. Returns 'read', 'refused', or a description of the crash."""
    with tempfile.TemporaryDirectory() as outer:
        outer = Path(os.path.realpath(outer))
        (outer / "input").mkdir()
        (outer / "outside").mkdir()
        (outer / "outside" / "valid.safetensors").write_bytes(tensor_bytes({"secret": np.zeros(2, np.int8)}))
        path = target.make(rng, outer / "input")
        before = outside_contents(outer)
        outcome = run(target, path, outer / "input")
        return outcome if outside_contents(outer) == before else f"wrote outside ({outcome})"


def outside_contents(outer):
    """The files outside the folder of the input. Finds writes by native code, which raise no audit event."""
    paths = (path for path in sorted(outer.rglob("*")) if not path.is_relative_to(outer / "input"))
    return {path: path.is_file() and path.read_bytes() for path in paths}


def run(target, path, folder):
    """Reads the input. Returns 'read', 'refused', or the error."""
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


def random_json(rng, depth=3):
    """A random JSON value."""
    kind = rng.randrange(5 if depth else 3)
    if kind == 4:
        return {rng.choice(TEXTS): random_json(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 3:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return rng.choice([TEXTS, NUMBERS, range(9)][kind])


def hard_json(rng):
    """JSON, or almost JSON, that is difficult for a parser."""
    n = rng.choice([10, 1000, 100_000])
    forms = [
        lambda: json.dumps(random_json(rng)).encode(),
        lambda: b'{"a":' + b"[" * n + b"]" * n + b"}",
        lambda: b'{"a":' * n + b"1" + b"}" * n,
        lambda: b'{"a":' + b"9" * n + b"}",
        lambda: b"{" + b",".join(b'"%d":{}' % (i % (n - 1)) for i in range(n)) + b"}",  # a duplicate key
        lambda: b'{"a":NaN,"b":-Infinity,"c":1e999999}',
        lambda: b"\xef\xbb\xbf{}",
        lambda: b'{"\xff":1}',
    ]
    return rng.choice(forms)()


def damaged(rng, data):
    """The data with some bytes changed, removed, duplicated or cut off."""
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


def with_length(text, length=None):
    """A header, preceded by its length or by a given one."""
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def tensor_bytes(arrays):
    """A valid safetensors file."""
    return save(arrays, {"format": "pt"})


DTYPES = [dtype for tag, dtype in tensors.DTYPES.items() if not tag.endswith("FNUZ")]  # all that the library writes


def random_arrays(rng):
    """A few small arrays of any dtypes."""
    shape = lambda: [rng.randrange(4) for _ in range(rng.randrange(4))]
    return {f"a{i}": np.ones(shape(), rng.choice(DTYPES)) for i in range(rng.randrange(1, 5))}


def odd_header(rng):
    """A valid file in which a few values of the header have been replaced."""
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
            array[key] = random_json(rng)
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = text.replace(b'"a1"', b'"a0"')  # a duplicate key
    length = rng.randrange(2**64) >> rng.randrange(64) if rng.random() < 0.1 else None
    left_over = b"\0" if rng.random() < 0.1 else b""
    return with_length(text, length) + data[end:] + left_over


def odd_index(rng, folder):
    """A folder with two files, some links, and an index that also names other files."""
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
        weight_map[name] = rng.choice(elsewhere) if rng.random() < 0.8 else random_json(rng)
    text = json.dumps({"metadata": random_json(rng), "weight_map": weight_map}).encode()
    forms = [text, text, text, damaged(rng, text), hard_json(rng)]
    (folder / tensors.INDEX).write_bytes(rng.choice(forms))
    return folder


def tensor_input(rng, folder):
    if rng.random() < 0.2:
        return odd_index(rng, folder)
    forms = {
        "bytes": lambda: rng.randbytes(rng.randrange(200)),
        "bytes as header": lambda: with_length(rng.randbytes(rng.randrange(99))),
        "JSON": lambda: with_length(hard_json(rng)),
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
        array[tuple(slice(n // 3, n // 2) for n in array.shape)].copy()


# Inputs for zerojax.checkpoints.manifest


def valid_manifest(rng):
    leaf = lambda: manifest.LeafRecord(tuple(rng.randrange(9) for _ in range(rng.randrange(3))), "float32", "0" * 16)
    leaves = {f"params/{i}": leaf() for i in range(rng.randrange(1, 4))}
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), "float32")
    return manifest.to_json(manifest.Manifest(4, leaves, {"data": 8}, 3, dtypes, {"zerojax": "0.1.0"}))


def odd_manifest(rng):
    """A manifest with one invalid value and a correct digest."""
    info = valid_manifest(rng)
    del info["digest"]
    info[rng.choice(list(info))] = random_json(rng)
    return json.dumps(manifest.with_digest(info)).encode()


def manifest_input(rng, folder):
    text = json.dumps(valid_manifest(rng)).encode()
    form = rng.choices(["valid", "odd", "damaged", "hard", "bytes"], weights=[1, 6, 6, 2, 1])[0]
    data = {
        "valid": lambda: text,
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


# All readers of files from other programs.
TARGETS = {
    "tensors": Target(tensor_input, read_tensors),
    "manifest": Target(manifest_input, read_manifest),
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--inputs", type=int, default=10_000, help="number of inputs for each target (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first input")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args(argv)
    signal.signal(signal.SIGALRM, raise_too_slow)
    counts = collections.Counter()
    for name in args.targets:
        for number in range(args.first, args.first + args.inputs):
            outcome = attempt(TARGETS[name], random.Random(f"{name} {args.seed} {number}"))
            counts[outcome if outcome in ("read", "refused") else "crashes"] += 1
            if outcome not in ("read", "refused"):
                print(f"{name}, seed {args.seed}, input {number}: {outcome}", file=sys.stderr)
    total = counts.total()
    print(f"{total} inputs, {counts['refused']} refused, {counts['read']} read, {counts['crashes']} crashes")
    return 1 if counts["crashes"] else 0


if __name__ == "__main__":
    sys.exit(main())
