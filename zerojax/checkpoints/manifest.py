"""Reads, writes and checks the manifest of a checkpoint: shape, dtype and digest of each array, and their origin.

The manifest is read first. A checkpoint that does not fit the state is refused before any array is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.checkpoints.contents import OPTIMIZER
from zerojax.sharding.precision import DTYPE_FIELDS
from zerojax.utils.files import open_regular
from zerojax.utils.text import SPACE, abbreviate, fold
from zerojax.utils.typing import Aval, Shape
from zerojax.utils.versions import __version__

FORMAT = 1
_MAX_DIMS = 64  # of a numpy array
MAX_MANIFEST_BYTES = 2**28  # of its JSON; an array takes 150, so only states of data iterators could be as large
FALLBACK_FIX = "fix:      resume(..., fallback=True) goes back to the newest intact step"


class CheckpointCorrupted(RuntimeError):
    """The data on disk differ from those that were saved."""


class CheckpointMismatch(ValueError):
    """A checkpoint is intact, but does not fit the state."""


class LeafRecord(NamedTuple):
    """A saved array.

    Attributes:
        shape: of the full array.
        dtype: its name.
        digest: 16 hexadecimal digits, see `digest.Digest`.
    """

    shape: Shape
    dtype: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Describes one saved step.

    Attributes:
        step: the step of the state.
        leaves: the saved arrays by path.
        mesh: sizes of the mesh axes of the run that saved the step.
        stage: the ZeRO stage of that run.
        precision: names of its `param_dtype`, `compute_dtype` and `reduce_dtype`.
        versions: of packages.
        data: the states of the data iterator, one per process; None if there was none.
        optimizer: its functions and their constants, see `optimizers.constants`; empty if they are not known.
    """

    step: int
    leaves: Mapping[str, LeafRecord]
    mesh: Mapping[str, int]
    stage: int
    precision: Mapping[str, str]
    versions: Mapping[str, str]
    data: Sequence[object] | None = None
    optimizer: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(num_bytes(leaf) for leaf in self.leaves.values())


def plain_text(text: str) -> str:
    """Returns a text from a file with everything escaped that does not print: control characters, also of a terminal.

    A plain text is returned as it is.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_json(file: Path) -> Any:
    """Reads a JSON file of bounded size.

    Raises:
        OSError, ValueError, RecursionError: if it cannot be read, is not JSON, or is larger than a manifest may be.
    """
    with open_regular(file) as opened:
        content = opened.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
    return json.loads(content)


def num_bytes(leaf: LeafRecord) -> int:
    """Returns the size of a saved array."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def to_json(manifest: Manifest) -> dict[str, object]:
    """Returns the manifest as JSON data, with the version of the format and a digest of the rest.

    Raises:
        ValueError: if it is larger than what `read_json` reads.
    """
    content = {"format": FORMAT} | dataclasses.asdict(manifest)
    content["leaves"] = {path: leaf._asdict() for path, leaf in manifest.leaves.items()}
    text = json.dumps(content)
    if len(text) > MAX_MANIFEST_BYTES - 2**10:  # less the digest
        raise ValueError(
            f"checkpoint: the manifest of step {manifest.step} is too large\n"
            f"  got:      {len(text)} bytes, {len(json.dumps(manifest.data))} of them states of data iterators\n"
            f"  want:     less than {MAX_MANIFEST_BYTES} bytes\n"
            f"  fix:      a data iterator with a smaller state, such as a position"
        )
    return with_digest(json.loads(text))


def with_digest(content: dict[str, object]) -> dict[str, object]:
    """Returns the content of a manifest with its digest added."""
    return content | {"digest": _digest(content)}


def from_json(content: object, where: str) -> Manifest:
    """Returns the manifest that `to_json` converted, after checking its digest and types.

    Args:
        content: JSON data as they were read.
        where: names the checkpoint in errors.

    Raises:
        CheckpointCorrupted: if the content is not a manifest, or was changed after it was saved.
        CheckpointMismatch: if a newer version of zerojax wrote it.
    """
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("format"), int)
        or isinstance(content["format"], bool)
    ):
        raise CheckpointCorrupted(f"checkpoint: {where} has no readable manifest\n  {FALLBACK_FIX}")
    if content["format"] > FORMAT:
        saved = content.get("versions")
        version = saved.get("zerojax") if isinstance(saved, dict) else None
        raise CheckpointMismatch(
            f"checkpoint: {where} was saved by a newer version of zerojax\n"
            f"  got:      format {content['format']} of zerojax {plain_text(str(version))}\n"
            f"  want:     format {FORMAT} or older, of zerojax {__version__}\n"
            f"  fix:      pip install --upgrade zerojax"
        )
    rest = {name: value for name, value in content.items() if name != "digest"}
    if content.get("digest") != _digest(rest):
        raise CheckpointCorrupted(
            f"checkpoint: the manifest of {where} was changed after it was saved\n  {FALLBACK_FIX}"
        )
    del rest["format"]
    try:
        return _parsed(rest)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointCorrupted(
            f"checkpoint: the manifest of {where} is invalid\n  got:      {error!r}\n  {FALLBACK_FIX}"
        ) from error


def _parsed(content: dict[str, Any]) -> Manifest:
    leaves = {path: _leaf_record(**leaf) for path, leaf in content.pop("leaves").items()}
    manifest = Manifest(leaves=leaves, **content)
    _require(type(manifest.step) is int and type(manifest.stage) is int, "step and stage must be integers")
    _require(_is_mapping(manifest.mesh, int), "mesh must map axis names to sizes")
    _require(_is_mapping(manifest.versions, str), "versions must map packages to versions")
    _require(_is_mapping(manifest.optimizer, str), "optimizer must map constants to texts")
    _require(
        _is_mapping(manifest.precision, str) and manifest.precision.keys() >= {*DTYPE_FIELDS}, "precision lacks a dtype"
    )
    _require(
        manifest.data is None or (isinstance(manifest.data, list) and bool(manifest.data)),
        "data must be a list of iterator states",
    )
    return manifest


def _leaf_record(shape: Any, dtype: Any, digest: Any) -> LeafRecord:
    _require(
        isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape),
        "a shape must be a list of sizes",
    )
    _require(isinstance(dtype, str) and isinstance(digest, str), "dtype and digest must be strings")
    _require(jnp.dtype(dtype).name == dtype, "a dtype must be a name")
    _require(len(shape) <= _MAX_DIMS, f"an array has more than {_MAX_DIMS} dims")
    size = math.prod(n for n in shape if n) * jnp.dtype(dtype).itemsize
    _require(size < 2**63, f"an array of shape {shape} has {size} bytes")
    return LeafRecord(tuple(shape), dtype, digest)


def _is_mapping(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(type(item) is kind for item in value.values())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Allowed(NamedTuple):
    """The differences that are allowed between a checkpoint and a state.

    Attributes:
        missing: globs of leaves that the checkpoint may lack. The state keeps its own.
        extra: globs of leaves that the state may lack. They are not read.
        cast: whether dtypes may differ. Arrays are cast after they are read.
        optimizer: 'same'; 'changed': leaves of the optimizer may be missing and extra, and what both have is restored,
            such as moments, while counts that the checkpoint lacks continue at the number of updates so far; or 'new':
            the optimizer state is not restored.
    """

    missing: Sequence[str] = ()
    extra: Sequence[str] = ()
    cast: bool = False
    optimizer: str = "same"


def paths_to_read(saved: Manifest, avals: Mapping[str, Aval], allowed: Allowed, where: str) -> list[str]:
    """Returns the paths of the leaves to read into a state, after checking that they fit.

    Args:
        saved: the manifest of the checkpoint.
        avals: the avals of the state by path.
        allowed: the differences that are allowed.
        where: names the checkpoint in errors.

    Raises:
        CheckpointMismatch: if leaves differ, with a line for each, which names the option that allows the difference.
    """
    if allowed.optimizer not in (choices := ("same", "changed", "new")):
        raise ValueError(f"checkpoint: optimizer={allowed.optimizer!r}\n  fix:      one of {', '.join(choices)}")
    if allowed.optimizer == "new":
        avals = {path: a for path, a in avals.items() if not path.startswith(OPTIMIZER)}
        allowed = allowed._replace(extra=(*allowed.extra, f"{OPTIMIZER}*"))
    if allowed.optimizer == "changed":
        both = (*allowed.missing, f"{OPTIMIZER}*"), (*allowed.extra, f"{OPTIMIZER}*")
        allowed = allowed._replace(missing=both[0], extra=both[1])
    missing = [p for p in avals if p not in saved.leaves and not matches(p, allowed.missing)]
    extra = [p for p in saved.leaves if p not in avals and not matches(p, allowed.extra)]
    common = [path for path in avals if path in saved.leaves]
    found = _optimizer_lines(missing, extra) or [
        *_absent_from("checkpoint", missing, saved.leaves),
        *_absent_from("state", extra, avals),
    ]
    for path in common:
        leaf, a = saved.leaves[path], avals[path]
        if leaf.shape != tuple(a.shape):
            text = f"{leaf.shape} was saved, the state has {tuple(a.shape)}"
            found.append(Mismatch("shape", path, text, text))
        elif str(jax.dtypes.canonicalize_dtype(leaf.dtype)) != leaf.dtype:
            text = f"{leaf.dtype} was saved, which JAX reads with JAX_ENABLE_X64=1 only"
            found.append(Mismatch("dtype", path, text, text))
        elif leaf.dtype != str(a.dtype) and not allowed.cast:
            text = f"{leaf.dtype} was saved, the state has {a.dtype} (cast=True allows it)"
            found.append(Mismatch("dtype", path, text, text))
    if found:
        has_shape = any(isinstance(each, Mismatch) and each.kind == "shape" for each in found)
        raise mismatch_error(where, found, _FIX_OF_SHAPES if has_shape else "")
    return common


_FIX_OF_SHAPES = "fix:      build the model with the shapes that were saved; a new model needs a new directory"
_MAX_LINES = 40
_MAX_EQUAL, _MAX_NAMES = 3, 4


class Mismatch(NamedTuple):
    """One leaf that does not fit.

    Attributes:
        kind: 'missing', 'extra', 'shape' or 'dtype'.
        path: of the leaf.
        text: what differs.
        common: the same without what is said of this leaf alone. More than three leaves for which it is equal have one
            line, which counts them.
    """

    kind: str
    path: str
    text: str
    common: str


def mismatch_error(where: str, found: Sequence[Mismatch | str], fix: str = "") -> CheckpointMismatch:
    """The error with a line for each leaf or group of leaves that differ: the first 40, and the number of the rest.

    Args:
        where: names the checkpoint or the files.
        found: the leaves that differ, and lines that are shown first.
        fix: the last line, if it is not empty.
    """
    groups: dict[tuple[str, str], list[Mismatch]] = {}
    for each in found:
        if isinstance(each, Mismatch):
            groups.setdefault((each.kind, each.common), []).append(each)
    lines = [each for each in found if isinstance(each, str)]
    for (kind, common), group in groups.items():
        if len(group) <= _MAX_EQUAL:
            lines += [f"{kind + ':':9s} {each.path}: {each.text}" for each in group]
        else:
            paths = sorted((each.path for each in group), key=lambda path: not path.startswith("params/"))
            names = [each.text.replace(SPACE, " ") for each in fold(paths, [0] * len(paths))]
            line = f"{kind + ':':9s} {len(group):,} leaves: {common}: {abbreviate(names, _MAX_NAMES, ', ')}"
            has_more = kind in ("missing", "extra")  # the nearest name, or that in the files
            lines.append(line + (f"; the first, {group[0].path}: {group[0].text}" if has_more else ""))
    rest = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    shown = [f"checkpoint: {where} does not fit the state", *lines[:_MAX_LINES], *rest, *([fix] if fix else [])]
    return CheckpointMismatch("\n  ".join(map(plain_text, shown)))


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether the path matches at least one of the globs."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def _absent_from(owner: str, paths: Sequence[str], leaves: Mapping[str, object]) -> list[Mismatch]:
    """The leaves that the checkpoint or the state lacks, with the option that allows it.

    The nearest name is looked up for those that an error shows, since it takes a comparison with every leaf.
    """
    kind = "missing" if owner == "checkpoint" else "extra"
    found = []
    for k, path in enumerate(paths):
        nearest = difflib.get_close_matches(path, leaves, n=1, cutoff=0.5) if k < _MAX_EQUAL else []
        text = f"the {owner} has no such leaf{f', the nearest is {nearest[0]}' if nearest else ''}"
        text += f" ({kind}={(path,)!r} allows it)"
        found.append(Mismatch(kind, path, text, f"the {owner} has no such leaves ({kind}= allows them, by globs)"))
    return found


def _optimizer_lines(missing: list[str], extra: list[str]) -> list[Mismatch | str]:
    """The lines of an error in which only leaves of the optimizer differ: a summary of its two states."""
    if not (missing or extra) or not all(path.startswith(OPTIMIZER) for path in (*missing, *extra)):
        return []
    summary = lambda paths: ", ".join(dict.fromkeys(_optimizer_part(path) for path in paths)) or "no arrays of its own"
    return [
        f"saved:    an optimizer state with {summary(extra)}",
        f"state:    an optimizer state with {summary(missing)}",
        "fix:      optimizer='changed' restores what both have, such as moments; optimizer='new' starts with a new one",
    ]


def _optimizer_part(path: str) -> str:
    """The part of an optimizer state that a leaf belongs to: its path without that of the parameter."""
    names = path.removeprefix(OPTIMIZER).split("/")
    return "/".join(names[:2])
