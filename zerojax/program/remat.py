"""Rematerialization settings: which activations of a unit are saved, where, and which are recomputed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.program import jaxprs
from zerojax.utils.typing import PyTree


class Place(enum.Enum):
    """The memory in which a value is saved for the backward pass."""

    DEVICE = "device"
    HOST = "host"


@dataclasses.dataclass(frozen=True)
class Remat:
    """Which activations of a unit are saved between its forward and its backward pass.

    The inputs of the unit are always saved. Activations that are not saved are recomputed. One unit is an exception:
    the unit whose backward pass follows directly on its forward pass (in a transformer, the head with the loss) saves
    everything if its settings save only the inputs. Recomputing would need the same memory a little later.

    Attributes:
        save: names (`jax.ad_checkpoint.checkpoint_name`) of values that are saved on the device.
        offload: names of values that are saved in pinned host memory.
        offload_inputs: saves the floating inputs of the unit (in a transformer, the residual stream) in pinned host
            memory, except the batch, which stays on the device anyway. While they are copied back, the inputs of up to
            three units are on the device.
        partition_inputs: saves a 1/M slice of the floating inputs of the unit on each of the M devices along the other
            mesh axes, such as 'model'. The inputs are the same on these devices. The first dim that M divides is
            sliced, and the slices are gathered once before the unit is recomputed. Scalars and the batch, which stays
            on the device anyway, stay whole.
        policy: a policy of `jax.checkpoint_policies` for values without one of the names. It decides about the
            equations of the unit, but not about those inside its loops.

    Raises:
        ValueError: a name is in both `save` and `offload`, or a string is given instead of a tuple of names.

    Source: ZeRO section 6.1: P_a is `partition_inputs`, P_a+cpu also sets `offload_inputs`.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    offload_inputs: bool = False
    partition_inputs: bool = False
    policy: Callable[..., Any] | None = None

    def __post_init__(self):
        for field in "save", "offload":
            if isinstance(getattr(self, field), str):
                raise ValueError(f"remat: `{field}` is {getattr(self, field)!r}\n  fix:      a tuple of names")
        if both := sorted(set(self.save) & set(self.offload)):
            raise ValueError(f"remat: {both[0]!r} is both in `save` and in `offload`\n  fix:      name it in one")

    @classmethod
    def of(cls, setting: Setting) -> Remat:
        """The `Remat` of a preset's name, or of a policy of `jax.checkpoint_policies`.

        Args:
            setting: 'none', 'dots', 'dots_with_no_batch_dims', 'full', a policy or a `Remat`.
        """
        if isinstance(setting, Remat):
            return setting
        if callable(setting):
            return cls(policy=setting)
        if not isinstance(setting, str) or setting not in _REMATS:
            raise ValueError(
                f"remat: unknown setting {setting!r}\n"
                f"  fix:      one of {', '.join([AUTO, *_REMATS])}, a zerojax.Remat, or a policy of "
                "jax.checkpoint_policies"
            )
        return _REMATS[setting]

    @property
    def title(self) -> str:
        """The setting as it is written in a call: a preset's name, or the fields that are not the default."""
        if self in _REMATS.values():
            return repr(next(name for name, remat in _REMATS.items() if remat == self))
        given = {field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name))}
        name_of = lambda value: getattr(value, "__name__", repr(value))
        return f"Remat({', '.join(f'{name}={name_of(value)}' for name, value in given.items())})"

    @property
    def saves_inputs_only(self) -> bool:
        return self.policy is None and not self.names

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.save) | frozenset(self.offload)

    def place(self, equation: jaxprs.Equation) -> Place | None:
        """The memory in which the results of an equation are saved; None if they are recomputed.

        Args:
            equation: an equation of the unit's jaxpr.
        """
        name = jaxprs.given_name(equation)
        if name in self.save:
            return Place.DEVICE
        if name in self.offload:
            return Place.HOST
        if self.policy is None:
            return None
        decision = self.policy(equation.primitive, *(atom.aval for atom in equation.invars), **equation.params)
        if isinstance(decision, bool):
            return Place.DEVICE if decision else None
        kind = type(decision).__name__  # JAX does not export these types
        if kind not in _DECISIONS:
            raise ValueError(
                f"remat: the policy returns {decision!r} for {equation.primitive.name!r}\n"
                f"  got:      a {kind}\n"
                f"  fix:      return a bool, or a decision of the policies of jax.checkpoint_policies"
            )
        return _DECISIONS[kind]


# What takes about as long to compute again as to read and write: a kernel does it beside what reads the result. Random
# bits are drawn again, because they take four bytes where what is made of them takes one or two.
_CHEAP = jaxprs.BY_ELEMENT | jaxprs.RANDOM | frozenset([
    "argmax", "argmin", "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "expand_dims",
    "iota", "name", "optimization_barrier", "pad", "random_fold_in", "random_split", "random_unwrap", "random_wrap",
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reshape", "rev",
    "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose",
])  # fmt: skip


def _is_costly(primitive: Any, *avals: PyTree, **params: PyTree) -> bool:
    """The policy 'dots': matrix products, and all else that takes long, such as loops, kernels, sorts and gathers."""
    return primitive.name not in _CHEAP


_DECISIONS = {"SaveableType": Place.DEVICE, "Offloadable": Place.HOST, "RecomputeType": None}
NO_REMAT = Remat(policy=jax.checkpoint_policies.everything_saveable)
_REMATS = {
    "none": NO_REMAT,
    "full": Remat(),
    "dots": Remat(policy=_is_costly),
    "dots_with_no_batch_dims": Remat(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}

Setting = str | Remat | Callable[..., Any]
AUTO = "auto"


def auto_setting(mesh: Mesh | AbstractMesh) -> str:
    """The setting that 'auto' stands for on the devices of a mesh.

    On accelerators, recomputing elements costs less than moving them; on CPU devices it costs more (docs/limits.md).
    """
    has_devices = not isinstance(mesh, AbstractMesh)
    return "dots" if has_devices and mesh.devices.flat[0].platform != "cpu" else "none"


@dataclasses.dataclass(frozen=True)
class RematRules:
    """The `Remat` of every unit: that of the first glob that matches its name, or else `NO_REMAT`."""

    rules: tuple[tuple[str, Remat], ...] = ()

    @classmethod
    def of(cls, setting: Setting | Mapping[str, Setting], auto: str = "none") -> RematRules:
        """The rules of a setting. `auto` is what 'auto' stands for."""
        by_pattern = setting if isinstance(setting, Mapping) else {"*": setting}
        chosen = {pattern: auto if each == AUTO else each for pattern, each in by_pattern.items()}
        return cls(tuple((pattern, Remat.of(each)) for pattern, each in chosen.items()))

    @property
    def title(self) -> str:
        """The setting as it is written in a call."""
        if [pattern for pattern, _ in self.rules] == ["*"]:
            return self.rules[0][1].title
        return "{" + ", ".join(f"{pattern!r}: {remat.title}" for pattern, remat in self.rules) + "}"

    @property
    def saves_everything(self) -> bool:
        return all(remat == NO_REMAT for _, remat in self.rules)

    def matching(self, unit: str) -> tuple[str, Remat]:
        """The glob that a unit matches first, and its `Remat`."""
        return next((rule for rule in self.rules if fnmatchcase(unit, rule[0])), ("", NO_REMAT))

    def __getitem__(self, unit: str) -> Remat:
        return self.matching(unit)[1]

    def check_units(self, units: Sequence[str]) -> None:
        """Raises ValueError if a glob is not the first match of any unit."""
        used = {self.matching(unit)[0] for unit in units}
        for pattern, _ in self.rules:
            if pattern not in used:
                shown = ", ".join(list(dict.fromkeys(units))[:8])
                raise ValueError(
                    f"remat: pattern {pattern!r} applies to no unit\n"
                    f"  got:      units {shown}; to each unit the first pattern that matches applies\n"
                    f"  fix:      a glob on the name of a unit"
                )

    def check_axes(self, model_axes: Sequence[str]) -> None:
        """Raises ValueError if inputs are to be partitioned and the mesh has no other axes than the data axes."""
        for pattern, remat in self.rules:
            if remat.partition_inputs and not model_axes:
                raise ValueError(
                    f"remat: the inputs of {pattern!r} cannot be partitioned\n"
                    f"  got:      a mesh with data axes only\n"
                    f"  fix:      zerojax.make_mesh(model=...), or partition_inputs=False"
                )

    def check_names(self, names: Mapping[str, Set[str]]) -> None:
        """Raises ValueError if no value in the units of a pattern has one of its names. `names` are those by unit."""
        for pattern, remat in self.rules:
            inside = {name for unit, given in names.items() if self.matching(unit)[0] == pattern for name in given}
            for name in sorted(remat.names - inside):
                raise ValueError(
                    f"remat: no value in the units of {pattern!r} is named {name!r}\n"
                    f"  got:      names {', '.join(sorted(inside)) or '(none)'}\n"
                    f"  fix:      name the value in the model: jax.ad_checkpoint.checkpoint_name(x, {name!r}), "
                    "outside of loops within a layer"
                )


NO_RULES = RematRules()
