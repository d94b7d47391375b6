"""What scripts/wheel checks of a wheel. Without third-party packages: it runs in the environment that is checked.

    python check_wheel.py files WHEEL WHEEL_FROM_SDIST CHECKOUT LIST    compares the files
    python check_wheel.py bytes WHEEL WHEEL SDIST SDIST                 compares two builds of the same files
    python check_wheel.py use                                           imports, runs and trains with the installed one

All print a line for each check that holds, and end with exit code 1 and the names of all that do not.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

PACKAGE = "zerojax"
SHOWN = 12  # names of files or modules in one message

IMPORT_ALL = """
import importlib, json, pkgutil, zerojax
missing = {}
for found in pkgutil.walk_packages(zerojax.__path__, "zerojax.", onerror=lambda name: None):
    try:
        importlib.import_module(found.name)
        missing[found.name] = None
    except ModuleNotFoundError as error:
        missing[found.name] = error.name
print(json.dumps(missing))
"""

TRAIN = """
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zerojax

zerojax.simulate_devices(8)


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return x


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


zero = zerojax.Zero(zerojax.make_mesh(), stage=3)
step = zero.train_step(loss_fn)
x = np.random.default_rng(0).standard_normal((32, 16), np.float32)
first = zero.init(Model, optax.adamw(1e-2))
weights = jax.tree.leaves(jax.device_get(first.params))
state, metrics = step(first, x)
later = jax.tree.leaves(jax.device_get(state.params))
assert len(weights) == len(later) == 4 and all((a != b).any() for a, b in zip(weights, later))
assert all(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(state.params))
with zero.checkpoints("run", every=1) as checkpoints:
    checkpoints.save(state)
with zero.checkpoints("run", every=1) as checkpoints:
    restored, start = checkpoints.resume(zero.init(Model, optax.adamw(1e-2)))
assert start == 1
saved, read = (jax.tree.leaves(jax.device_get((s.params, s.opt_state))) for s in (state, restored))
assert len(saved) == len(read) > 8 and all(np.array_equal(a, b) for a, b in zip(saved, read))
_, after = step(restored, x)
assert float(after["loss"]) < float(metrics["loss"])
print(f"loss {metrics['loss']:.4f}, after one step {after['loss']:.4f}, on {len(jax.devices())} devices")
"""


class Checks:
    """Runs checks one after the other, and remembers those that passed and those that failed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def __call__(self, name: str, check: Callable[[], str | None]) -> None:
        """A check returns what it found, for the line, or raises AssertionError."""
        try:
            found = check()
        except AssertionError as error:
            self.failed.append(name)
            print(f"FAILED  {name}\n        " + "\n        ".join(str(error).splitlines()), flush=True)
        else:
            self.passed.append(name)
            print(f"ok      {name}" + (f": {found}" if found else ""), flush=True)

    def end(self, expected: int) -> None:
        """Exits; a check that was not run counts as one that failed."""
        if self.failed or len(self.passed) != expected:
            print(f"{len(self.passed)} of {expected} checks passed; failed: {', '.join(self.failed) or 'none'}")
            raise SystemExit(1)
        print(f"{expected} of {expected} checks passed")


def require(holds: object, message: str) -> None:
    """As `assert`, which -O would drop."""
    if not holds:
        raise AssertionError(message)


def listing(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:SHOWN]) + (f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def same(one: set[str], name_of_one: str, other: set[str], name_of_other: str) -> str:
    """That two sets of files, neither of them empty, are the same."""
    require(one and other, f"{name_of_one}: {len(one)} files; {name_of_other}: {len(other)} files")
    lines = [
        f"in {here}, not in {there}: {listing(extra)}"
        for here, there, extra in (
            (name_of_one, name_of_other, one - other),
            (name_of_other, name_of_one, other - one),
        )
        if extra
    ]
    require(not lines, "\n".join(lines))
    return f"{len(one)} files"


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel. RECORD repeats the others' digests in no particular order."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if not name.endswith((".dist-info/RECORD", "/"))
        }


def check_files(wheel: Path, from_sdist: Path, checkout: Path, listed: Path) -> None:
    built, rebuilt = contents(wheel), contents(from_sdist)
    tracked = set(listed.read_text().splitlines())
    of_package = {name for name in built if name.startswith(f"{PACKAGE}/")}
    about = {name.split("/", 1)[1] for name in built if ".dist-info/" in name}

    def bytes_of_the_checkout() -> str:
        changed = {name for name in of_package if (checkout / name).read_bytes() != built[name]}
        require(of_package and not changed, f"other contents than in the checkout: {listing(changed)}")
        return f"{sum(map(len, built.values())) / 1024:.0f} KiB"

    def bytes_of_the_sdist() -> None:
        changed = {name for name in built.keys() & rebuilt.keys() if built[name] != rebuilt[name]}
        require(not changed, f"other contents than in the wheel from the checkout: {listing(changed)}")

    def nothing_else() -> None:
        other = {name for name in built if name not in of_package and ".dist-info/" not in name}
        require(not other, f"installed beside {PACKAGE}/: {listing(other)}")
        wanted = {"METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
        require(wanted <= about, f"not in the wheel: {listing(wanted - about)}")

    checks = Checks()
    checks("the wheel has the files that git has", lambda: same(of_package, "the wheel", tracked, "git"))
    checks("their contents are those of the checkout", bytes_of_the_checkout)
    checks("the wheel has a command and the licence, and nothing else", nothing_else)
    checks("the sdist installs the same files", lambda: same(set(rebuilt), "the sdist", set(built), "the wheel"))
    checks("with the same contents", bytes_of_the_sdist)
    checks.end(5)


def archived(path: Path) -> dict[str, str]:
    """What an archive says about each of its files: time, permissions, owner, size and contents."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            mode = lambda each: f"{each.external_attr >> 16:o}"
            return {
                each.filename: f"time {each.date_time}, mode {mode(each)}, {zlib.crc32(archive.read(each))}"
                for each in archive.infolist()
            }
    with tarfile.open(path) as archive:
        found = {}
        for each in archive.getmembers():
            data = archive.extractfile(each)
            crc = zlib.crc32(data.read()) if data else 0
            found[each.name] = f"time {each.mtime}, mode {each.mode:o}, owner {each.uname}:{each.gname}, {crc}"
        return found


def same_bytes(one: Path, other: Path) -> str:
    """That two archives are equal, or else what the first file in which they differ has."""
    require(one.name == other.name, f"{one.name} and {other.name}")
    if one.read_bytes() != other.read_bytes():
        first, second = archived(one), archived(other)
        names = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
        shown = [f"{name}: {first.get(name)} | {second.get(name)}" for name in sorted(names)[:SHOWN]]
        raise AssertionError("\n".join(shown) or "the same files, in another order or compressed in another way")
    return hashlib.sha256(one.read_bytes()).hexdigest()[:16]


def check_bytes(wheel: Path, wheel_again: Path, sdist: Path, sdist_again: Path) -> None:
    checks = Checks()
    checks("a second build makes the same wheel", lambda: same_bytes(wheel, wheel_again))
    checks("a second build makes the same sdist", lambda: same_bytes(sdist, sdist_again))
    checks.end(2)


def run(*command: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS", "NPROC")}
    environ |= {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    ended = subprocess.run([str(word) for word in command], env=environ, capture_output=True, text=True)
    shown = " ".join(str(word) if "\n" not in str(word) else "..." for word in command)
    end = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
    require(ended.returncode == code, f"{shown}: exit code {ended.returncode}, not {code}\n{end}")
    return ended


def python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-P", *options, "-c", code)


def command(*arguments: str) -> str:
    return run(Path(sysconfig.get_path("scripts")) / "zerojax", *arguments).stdout


def declared_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}


def where_it_is_installed() -> str:
    expected = Path(sysconfig.get_path("purelib")) / PACKAGE / "__init__.py"
    found = Path(python("import zerojax; print(zerojax.__file__)").stdout.strip())
    require(found == expected, f"imported from {found}, not from {expected}")
    require("dir_info" not in (metadata.distribution(PACKAGE).read_text("direct_url.json") or ""), "not from a wheel")
    require((expected.parent / "py.typed").is_file(), "py.typed is missing, so type checkers ignore the annotations")
    return str(found.parent.relative_to(sys.prefix))


def dependencies_are_complete() -> str:
    run(sys.executable, "-m", "pip", "check")
    there = {each.metadata["Name"].lower() for each in metadata.distributions()}
    require("pytest" not in there, "the environment is not empty: pytest is installed")
    return f"{len(there)} distributions"


def import_is_silent() -> None:
    ended = python("import zerojax", "-W", "error")
    require(not ended.stdout and not ended.stderr, f"it printed\n{ended.stdout}{ended.stderr}")


def every_module_is_imported() -> str:
    """Only packages of an extra may be missing."""
    import json

    missing = json.loads(python(IMPORT_ALL).stdout.splitlines()[-1])
    installed = {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in metadata.files(PACKAGE) or []
        if file.suffix == ".py" and file.parts[0] == PACKAGE
    } - {PACKAGE}
    require(installed == set(missing), f"not found by the walk: {listing(installed ^ set(missing))}")
    of_extras = declared_names([line for line in metadata.requires(PACKAGE) or [] if "extra ==" in line])
    lines = [
        f"{module} imports {name}, which is missing"
        for module, name in missing.items()
        if name and name.partition(".")[0].lower() not in of_extras
    ]
    require(not lines, "\n".join(lines))
    optional = [module for module, name in missing.items() if name]
    return f"{len(missing)} modules" + (f" ({listing(optional)} needs an extra)" if optional else "")


def the_version_is_that_of_the_metadata() -> str:
    version = metadata.version(PACKAGE)
    require(version in command("--version"), "zerojax --version does not print the version")
    require(
        python("import zerojax; print(zerojax.__version__)").stdout.strip() == version, "zerojax.__version__ differs"
    )
    return version


def the_doctor_finds_nothing_wrong() -> None:
    text = command("doctor", "--checkpoints", "run")
    words = ("versions", "devices", "checkpoints", "is installed", "zerojax[plan-gpu]")
    absent = [word for word in words if word not in text]
    require(not absent, f"not in its output: {absent}\n{text}")


def a_plan_is_made_without_compilers() -> str:
    import json

    arguments = ("plan", "--preset", "gpt2-124m", "--target", "h100:8")
    require("fits" in command(*arguments), "it does not say that gpt2-124m fits on eight H100s")
    data = json.loads(command(*arguments, "--json"))
    require(data["fits"] is True and data["peak_bytes"] > 2**30, f"not a plan: {sorted(data)}")
    return f"{data['peak_bytes'] / 2**30:.2f} GiB on a device"


def a_step_is_trained_saved_and_restored() -> str:
    return python(TRAIN).stdout.splitlines()[-1]


def the_checkpoint_is_verified() -> None:
    shown = command("checkpoint", "verify", "run")
    require("arrays are intact" in shown, f"it does not say that arrays are intact:\n{shown}")
    require("1" in command("checkpoint", "ls", "run", "--verify"), "no step is listed")


def a_damaged_checkpoint_is_not() -> None:
    """So that the check above is known to be able to fail."""
    files = list(Path("run/step_1/arrays/d").iterdir())
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    largest.write_bytes(data)
    script = Path(sysconfig.get_path("scripts")) / "zerojax"
    run(script, "checkpoint", "verify", "run", code=1)


def check_use() -> None:
    require(not (Path.cwd() / PACKAGE).exists(), "run this outside the checkout")
    checks = Checks()
    checks("imported from site-packages", where_it_is_installed)
    checks("dependencies are complete, and no others are there", dependencies_are_complete)
    checks("python -W error -c 'import zerojax' prints nothing", import_is_silent)
    checks("every module is imported", every_module_is_imported)
    checks("zerojax --version", the_version_is_that_of_the_metadata)
    checks("zerojax doctor", the_doctor_finds_nothing_wrong)
    checks("zerojax plan --preset gpt2-124m --target h100:8", a_plan_is_made_without_compilers)
    checks("a step is trained on simulated devices, saved and restored", a_step_is_trained_saved_and_restored)
    checks("zerojax checkpoint verify", the_checkpoint_is_verified)
    checks("zerojax checkpoint verify finds a damaged file", a_damaged_checkpoint_is_not)
    checks.end(10)


if __name__ == "__main__":
    if sys.argv[1:2] == ["files"] and len(sys.argv) == 6:
        check_files(*map(Path, sys.argv[2:]))
    elif sys.argv[1:2] == ["bytes"] and len(sys.argv) == 6:
        check_bytes(*map(Path, sys.argv[2:]))
    elif sys.argv[1:] == ["use"]:
        check_use()
    else:
        sys.exit(__doc__)
