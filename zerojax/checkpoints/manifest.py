"""What is written beside the arrays of a checkpoint: what they are, where they come from, and a digest of each.

It is read first. A state that does not fit is told from it, before any array is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from zerojax.checkpoints.contents import OPTIMIZER
from zerojax.versions import __version__

FORMAT = 1


class CheckpointCorrupted(RuntimeError):
    """What is on disk is not what was saved."""


class CheckpointMismatch(ValueError):
    """A checkpoint is sound, and not one of this state."""


class Leaf(NamedTuple):
    """An array as it was saved."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Of one step.

    Attributes:
        step: of the state.
        leaves: by path.
        mesh: sizes of the axes that it was saved on.
        stage: of the `Zero`.
        precision: names of its dtypes.
        versions: of packages.
        data: state of the data iterator, one for each process; None if there was none.
    """

    step: int
    leaves: Mapping[str, Leaf]
    mesh: Mapping[str, int]
    stage: int
    precision: Mapping[str, str]
    versions: Mapping[str, str]
    data: Sequence[Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(num_bytes(leaf) for leaf in self.leaves.values())


def num_bytes(leaf: Leaf) -> int:
    """Of an array as it was saved."""
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def to_json(manifest: Manifest) -> dict[str, Any]:
    """With the format's version, and a digest of the rest."""
    told = {"format": FORMAT} | dataclasses.asdict(manifest)
    told["leaves"] = {path: leaf._asdict() for path, leaf in manifest.leaves.items()}
    return signed(json.loads(json.dumps(told)))


def signed(told: dict[str, Any]) -> dict[str, Any]:
    """With a digest of all else."""
    return told | {"digest": _digest(told)}


def from_json(told: Any, where: str) -> Manifest:
    """A manifest that was read.

    Raises:
        CheckpointCorrupted: it is not what `to_json` returned.
        CheckpointMismatch: it is of a newer version.
    """
    if not isinstance(told, dict) or not isinstance(told.get("format"), int) or isinstance(told["format"], bool):
        raise CheckpointCorrupted(f"checkpoint: {where} has no manifest that can be read\n  {FALLBACK}")
    if told["format"] > FORMAT:
        saved = told.get("versions")
        version = saved.get("zerojax") if isinstance(saved, dict) else None
        raise CheckpointMismatch(
            f"checkpoint: {where} was saved by a newer zerojax\n"
            f"  got:      format {told['format']} of zerojax {version}\n"
            f"  want:     format {FORMAT} or older, of zerojax {__version__}\n"
            f"  fix:      pip install --upgrade zerojax"
        )
    rest = {name: value for name, value in told.items() if name != "digest"}
    if told.get("digest") != _digest(rest):
        raise CheckpointCorrupted(f"checkpoint: the manifest of {where} was changed after it was saved\n  {FALLBACK}")
    del rest["format"]
    try:
        return _parsed(rest)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointCorrupted(
            f"checkpoint: the manifest of {where} is none\n  got:      {error!r}\n  {FALLBACK}"
        ) from error


def _parsed(told: dict[str, Any]) -> Manifest:
    leaves = {path: _leaf(**leaf) for path, leaf in told.pop("leaves").items()}
    manifest = Manifest(leaves=leaves, **told)
    _expect(type(manifest.step) is int and type(manifest.stage) is int, "step and stage are numbers")
    _expect(_is_mapping(manifest.mesh, int) and _is_mapping(manifest.versions, str), "mesh and versions")
    _expect(_is_mapping(manifest.precision, str) and manifest.precision.keys() >= _DTYPES, "dtypes")
    _expect(manifest.data is None or (isinstance(manifest.data, list) and bool(manifest.data)), "data")
    return manifest


_DTYPES = {"param_dtype", "compute_dtype", "reduce_dtype"}


def _leaf(shape: Any, dtype: Any, digest: Any) -> Leaf:
    _expect(isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape), "a shape")
    _expect(isinstance(dtype, str) and isinstance(digest, str), "dtype and digest are text")
    jnp.dtype(dtype)
    return Leaf(tuple(shape), dtype, digest)


def _is_mapping(told: Any, kind: type) -> bool:
    return isinstance(told, dict) and all(type(value) is kind for value in told.values())


def _expect(true: bool, what: str) -> None:
    if not true:
        raise ValueError(what)


FALLBACK = "fix:      resume(..., fallback=True) goes back to the newest step that is whole"


def _digest(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class Allowed(NamedTuple):
    """What may differ between a checkpoint and a state.

    Attributes:
        missing: globs of leaves that the checkpoint may lack; the state keeps its own.
        extra: globs of leaves that the state may lack; they are not read.
        cast: dtypes may differ: what is read is cast.
        new_optimizer: the optimizer's state stays that of the state.
    """

    missing: Sequence[str] = ()
    extra: Sequence[str] = ()
    cast: bool = False
    new_optimizer: bool = False


def wanted(saved: Manifest, avals: Mapping[str, Any], allowed: Allowed, where: str) -> list[str]:
    """Paths of the leaves to read into a state.

    Args:
        saved: manifest of the checkpoint.
        avals: of the leaves of the state by path.
        allowed: what may differ.
        where: what the checkpoint is called in an error.

    Raises:
        CheckpointMismatch: with a line for each leaf that differs, and the option that allows it.
    """
    if allowed.new_optimizer:
        avals = {path: a for path, a in avals.items() if not path.startswith(OPTIMIZER)}
        allowed = allowed._replace(extra=(*allowed.extra, f"{OPTIMIZER}*"))
    missing = [p for p in avals if p not in saved.leaves and not matches(p, allowed.missing)]
    extra = [p for p in saved.leaves if p not in avals and not matches(p, allowed.extra)]
    both = [path for path in avals if path in saved.leaves]
    lines = _optimizer_lines(missing, extra) or [
        *(_line("missing", path, _nearest(path, saved.leaves), f"missing={(path,)!r}") for path in missing),
        *(_line("extra", path, _nearest(path, avals), f"extra={(path,)!r}") for path in extra),
    ]
    for path in both:
        leaf, a = saved.leaves[path], avals[path]
        if leaf.shape != tuple(a.shape):
            lines.append(f"shape:    {path}: {leaf.shape} was saved, the state has {tuple(a.shape)}")
        elif leaf.dtype != str(a.dtype) and not allowed.cast:
            lines.append(f"dtype:    {path}: {leaf.dtype} was saved, the state has {a.dtype} (cast=True allows it)")
    if lines:
        raise misfit(where, lines)
    return both


_MOST_LINES = 40


def misfit(where: str, lines: Sequence[str]) -> CheckpointMismatch:
    """The error with a line for each leaf that differs; of many the first, and how many more."""
    rest = [f"... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    told = [f"checkpoint: {where} does not fit the state", *lines[:_MOST_LINES], *rest]
    return CheckpointMismatch("\n  ".join(told))


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs does."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def _nearest(path: str, among: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(path, among, n=1, cutoff=0.5)
    return f", the nearest is {near[0]}" if near else ""


def _line(kind: str, path: str, nearest: str, option: str) -> str:
    of = "the checkpoint has no such leaf" if kind == "missing" else "the state has no such leaf"
    return f"{kind + ':':9s} {path}: {of}{nearest} ({option} allows it)"


def _optimizer_lines(missing: list[str], extra: list[str]) -> list[str]:
    """Where all that differs is the optimizer's: its two states."""
    if not (missing or extra) or not all(path.startswith(OPTIMIZER) for path in (*missing, *extra)):
        return []
    told = lambda paths: ", ".join(dict.fromkeys(_part(path) for path in paths)) or "nothing more"
    return [
        f"saved:    the optimizer's {told(extra)}",
        f"state:    the optimizer's {told(missing)}",
        "fix:      the same optimizer, or new_optimizer=True to begin with a new state of this one",
    ]


def _part(path: str) -> str:
    """The part of an optimizer's state: what is left of a path without the parameter."""
    names = path.removeprefix(OPTIMIZER).split("/")
    return "/".join(names[:2])
