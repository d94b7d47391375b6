"""Checks the partition specs that models and users annotate leaves with.

With tensor parallelism, the annotation of a weight divides one dim over a `model` axis, and ZeRO divides another dim
over the data axes. An annotation that names data axes chooses the latter dim.

Source: ZeRO section 1, which combines P_os+g with Megatron's tensor parallelism.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jax.sharding import AxisType, PartitionSpec

from zerojax.sharding.axes import Axes, axis_names
from zerojax.utils.typing import AnyMesh, Shape

Entries: TypeAlias = list[tuple[str, ...]]  # the axis names of each entry of a spec


def renamed(annotation: PartitionSpec, names: Mapping[str, str | None]) -> PartitionSpec:
    """An annotation of a model with its axes renamed, and without those that are renamed to None."""
    if not names:
        return annotation
    entries = [[names.get(name, name) for name in axis_names(entry)] for entry in annotation]
    return PartitionSpec(*(tuple(name for name in entry if name is not None) or None for entry in entries))


def check_axis_names(names: Mapping[str, str | None], annotations: Mapping[str, PartitionSpec], mesh: AnyMesh) -> None:
    """Raises ValueError if a name is in no annotation, or stands for an axis that the mesh does not have."""
    used = {name for spec in annotations.values() for entry in spec for name in axis_names(entry)}
    for name, axis in names.items():
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(
                f"axis_names: {name!r} stands for axis {axis!r}: no such axis\n"
                f"  got:      axes {dict(mesh.shape)}\n"
                f"  fix:      name an axis of the mesh, or None to ignore {name!r} in annotations"
            )
        if name not in used:
            raise ValueError(
                f"axis_names: no annotation of the model names {name!r}\n"
                f"  got:      annotations name {', '.join(map(repr, sorted(used))) or 'no axis'}\n"
                f"  fix:      map names of annotations to axes of the mesh: {{'fsdp': 'data', 'tp': None}}"
            )


def check_annotation(
    path: str, shape: Shape, annotation: PartitionSpec, stacked: bool, mesh: AnyMesh, axes: Axes
) -> tuple[PartitionSpec, int | None]:
    """Checks the annotation of a leaf, and splits it into the data axes and all other axes.

    Returns:
        (the annotation without data axes and without axes of size 1; the dim at which it names data axes, or None).
    """
    # Check the axes.
    text = f"shape {shape}, annotation {spec_text(annotation)}"
    entries: Entries = [axis_names(entry) for entry in annotation]
    if len(entries) > len(shape) or (stacked and any(entries) and len(entries) < len(shape)):
        raise ValueError(
            f"placement: the annotation of {path!r} has {len(entries)} entries for {len(shape)} dims\n"
            f"  got:      {text}\n"
            f"  fix:      give one entry for each dim{_LAYER_ENTRY if stacked else ''}"
        )
    _check_axes(path, entries, mesh, axes, text)

    # Take out the data axes, and check the sizes of the dims that the others divide.
    dim = _data_dim(path, entries, axes, text)
    if dim is not None:
        entries[dim] = ()
    for d, names in enumerate(entries):
        size = math.prod(mesh.shape[name] for name in names)
        counts_layers = stacked and d == 0 and bool(names)
        if counts_layers or shape[d] % size:
            why = "dim 0 counts layers" if counts_layers else f"{shape[d]} % {size} = {shape[d] % size}"
            raise ValueError(
                f"placement: cannot divide {path!r} over {'x'.join(names)} in dim {d}\n"
                f"  got:      {text}, axis size {size}; {why}\n"
                f"  fix:      use None at dim {d} of its annotation, or change the shape"
            )

    # Leave out axes of size 1.
    divided = [tuple(name for name in names if mesh.shape[name] > 1) for names in entries]
    while divided and not divided[-1]:
        divided.pop()
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in divided)), dim


_LAYER_ENTRY = (
    ", None for that of the layers: transform_metadata={nnx.PARTITION_NAME: None} in nnx.vmap and nnx.scan, "
    "metadata_params={nn.PARTITION_NAME: None} in nn.scan and nn.vmap"
)


def _check_axes(path: str, entries: Entries, mesh: AnyMesh, axes: Axes, text: str) -> None:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name, count in Counter(name for names in entries for name in names).items():
        if name in types and types[name] == AxisType.Auto and count == 1:
            continue
        what = "no such axis" if name not in types else "named twice" if count > 1 else f"of type {types[name]}"
        unknown = [n for n in dict.fromkeys(n for names in entries for n in names) if n not in types]
        fix = "name axes of the mesh, of type Auto (zerojax.make_mesh(model=...)), each once"
        if name not in types:
            fix = _unknown_axis_fix(unknown, axes)
        raise ValueError(
            f"placement: the annotation of {path!r} names axis {name!r}: {what}\n"
            f"  got:      {text}, axes {dict(mesh.shape)}\n"
            f"  fix:      {fix}"
        )


_USUAL_DATA_AXES = ("fsdp", "data", "dp", "batch")  # a guess: what models call the axis that splits the batch


def _unknown_axis_fix(names: Sequence[str], axes: Axes) -> str:
    """How to train a model whose annotations name axes that the mesh does not have."""
    data = [name for name in names if name in _USUAL_DATA_AXES]
    known = {name: repr(axes.of_rows.shard[0]) if name in data[:1] else "None" for name in names}
    mapping = ", ".join(f"{name!r}: {axis}" for name, axis in known.items())
    lines = [f"Zero(mesh, axis_names={{{mapping}}}) maps names to axes of the mesh, and None ignores them"]
    if data:
        lines.append(
            f"or make a mesh with axes {', '.join(map(repr, names))}, and Zero(mesh, shard_axes=({data[0]!r},))"
        )
    lines.append("or name axes of the mesh, of type Auto (zerojax.make_mesh(model=...))")
    lines.append("or, for logical names, set their rules when the state is created")
    return f"\n{' ' * 12}".join(lines)


def _data_dim(path: str, entries: Sequence[tuple[str, ...]], axes: Axes, text: str) -> int | None:
    """The dim at which an annotation names data axes, or None."""
    found = [d for d, names in enumerate(entries) if set(names) & set(axes.of_states)]
    if len(found) > 1 or any(not set(entries[d]) <= set(axes.of_states) for d in found):
        raise ValueError(
            f"placement: the annotation of {path!r} names data axes at several dims, or with other axes at one\n"
            f"  got:      {text}, data axes {axes.of_states}\n"
            f"  fix:      leave the data axes out: ZeRO chooses a dim for them"
        )
    return found[0] if found else None


def spec_text(spec: PartitionSpec) -> str:
    """A spec as text, such as "P('data', None)"."""
    return "P(" + ", ".join(map(repr, spec)) + ")"
