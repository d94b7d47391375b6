"""What the backward pass finds of a unit's activations: kept on the device, kept in host memory, or computed again."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any

import jax

from zerojax.transform import jaxprs

Equation = Any


class Place(enum.Enum):
    """Where a value waits for the backward pass."""

    DEVICE = "device"
    HOST = "host"


@dataclasses.dataclass(frozen=True)
class Remat:
    """What of a unit is kept between forward and backward. Its inputs always are; all else is computed again.

    Where nothing but the inputs would be kept, the unit whose backward pass follows at once on its forward pass (in a
    transformer: the head and the loss) keeps everything. To compute it again would need the same memory a little later.

    Source: ZeRO section 6.1: P_a is `partition_inputs`, P_a+cpu is that with `offload_inputs`.

    Attributes:
        save: names (`jax.ad_checkpoint.checkpoint_name`) of values that stay on the device.
        offload: names of values that wait in pinned host memory.
        offload_inputs: the unit's floating inputs (in a transformer: the residual stream) wait in pinned host memory,
            but for the batch, which stays on the device anyway. While they come back, those of up to three units are on
            the device.
        partition_inputs: over the mesh axes beside the data axes ('model', M devices), along which the unit's floating
            inputs are the same, each device keeps a 1/M slice of them: of the first dim that M divides. They are
            gathered once before the unit is computed again. The batch, which stays on the device anyway, and scalars
            stay whole.
        policy: a policy of `jax.checkpoint_policies`, asked about what the names do not decide. It is asked about the
            equations of the unit, and not about those inside its loops.

    Raises:
        ValueError: a name in both `save` and `offload`, or a string instead of a tuple of names.
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
        both = sorted(set(self.save) & set(self.offload))
        if both:
            raise ValueError(f"remat: {both[0]!r} is both in `save` and in `offload`\n  fix:      name it in one")

    @property
    def saves_inputs_only(self) -> bool:
        return self.policy is None and not self.names

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.save) | frozenset(self.offload)

    def place(self, equation: Equation) -> Place | None:
        """Where the results of an equation are kept; None: they are computed again."""
        name = equation.params["name"] if jaxprs.is_name(equation) else None
        if name in self.save:
            return Place.DEVICE
        if name in self.offload:
            return Place.HOST
        if self.policy is None:
            return None
        decision = self.policy(equation.primitive, *(atom.aval for atom in equation.invars), **equation.params)
        if isinstance(decision, bool):
            return Place.DEVICE if decision else None
        kind = type(decision).__name__  # jax exports these types under no public name
        if kind not in _DECISIONS:
            raise ValueError(
                f"remat: the policy decides {decision!r} for {equation.primitive.name!r}\n"
                f"  got:      a {kind}\n"
                f"  fix:      a policy that returns bools, or what the policies of jax.checkpoint_policies return"
            )
        return _DECISIONS[kind]


_DECISIONS = {"SaveableType": Place.DEVICE, "Offloadable": Place.HOST, "RecomputeType": None}
NO_REMAT = Remat(policy=jax.checkpoint_policies.everything_saveable)
PRESETS = {
    "none": NO_REMAT,
    "full": Remat(),
    "dots": Remat(policy=jax.checkpoint_policies.dots_saveable),
    "dots_with_no_batch_dims": Remat(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}

Setting = str | Remat | Callable[..., Any]


def resolve(setting: Setting) -> Remat:
    """A preset's name, a `Remat`, or a policy of `jax.checkpoint_policies`."""
    if isinstance(setting, Remat):
        return setting
    if callable(setting):
        return Remat(policy=setting)
    if not isinstance(setting, str) or setting not in PRESETS:
        raise ValueError(
            f"remat: unknown setting {setting!r}\n"
            f"  fix:      one of {', '.join(PRESETS)}, a zerojax.Remat, or a policy of jax.checkpoint_policies"
        )
    return PRESETS[setting]


@dataclasses.dataclass(frozen=True)
class RematRules:
    """A `Remat` for every unit: that of the first glob that matches its name, else `NO_REMAT`."""

    rules: tuple[tuple[str, Remat], ...] = ()

    @classmethod
    def of(cls, setting: Setting | Mapping[str, Setting]) -> RematRules:
        by_pattern = setting if isinstance(setting, Mapping) else {"*": setting}
        return cls(tuple((pattern, resolve(each)) for pattern, each in by_pattern.items()))

    @property
    def saves_everything(self) -> bool:
        return all(remat == NO_REMAT for _, remat in self.rules)

    def _matching(self, unit: str) -> tuple[str, Remat]:
        return next((rule for rule in self.rules if fnmatchcase(unit, rule[0])), ("", NO_REMAT))

    def __getitem__(self, unit: str) -> Remat:
        return self._matching(unit)[1]

    def check_units(self, units: Sequence[str]) -> None:
        """Raises ValueError for a glob that is the first match of no unit."""
        used = {self._matching(unit)[0] for unit in units}
        for pattern, _ in self.rules:
            if pattern not in used:
                shown = ", ".join(list(dict.fromkeys(units))[:8])
                raise ValueError(
                    f"remat: pattern {pattern!r} decides for no unit\n"
                    f"  got:      units {shown}; the first pattern that matches a unit decides for it\n"
                    f"  fix:      a glob on the name of a unit (zero.explain lists the leaves of each)"
                )

    def check_axes(self, beside: Sequence[str]) -> None:
        """Raises ValueError for inputs that are to be partitioned where the mesh has no axes beside the data axes."""
        for pattern, remat in self.rules:
            if remat.partition_inputs and not beside:
                raise ValueError(
                    f"remat: the inputs of {pattern!r} cannot be partitioned\n"
                    f"  got:      a mesh with data axes alone\n"
                    f"  fix:      zerojax.make_mesh(model=...), or partition_inputs=False"
                )

    def check_names(self, names: Mapping[str, Set[str]]) -> None:
        """Raises ValueError for a name that no value of its units carries.

        Args:
            names: those that are given inside each unit.
        """
        for pattern, remat in self.rules:
            inside = frozenset[str]().union(
                *(given for unit, given in names.items() if self._matching(unit)[0] == pattern)
            )
            for name in sorted(remat.names - inside):
                raise ValueError(
                    f"remat: no value in the units of {pattern!r} is named {name!r}\n"
                    f"  got:      names {', '.join(sorted(inside)) or '(none)'}\n"
                    f"  fix:      name the value in the model: jax.ad_checkpoint.checkpoint_name(x, {name!r}), "
                    "outside of loops within a layer"
                )


NO_RULES = RematRules()
