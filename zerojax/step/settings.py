"""The settings of one training step."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from zerojax.comm.collectives import CollectiveOptions
from zerojax.program.remat import NO_RULES, RematRules
from zerojax.sharding.axes import Axes

_WIDEST_ELEMENT_BYTES = 8  # float64 and int64


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """The settings of one step. Those that all steps share are in `ZeroConfig`.

    Attributes:
        num_microbatches: number of equal parts in which a device's rows are processed.
        clip_norm: the largest global norm of the gradients; None for no clipping.
        remat: which activations of a unit are saved for its backward pass.
        prefetch: number of units that are gathered ahead of the unit that computes.
        bucket_bytes: the most bytes that one collective moves; None to move every leaf in one piece.
    """

    num_microbatches: int = 1
    clip_norm: float | None = None
    remat: RematRules = NO_RULES
    prefetch: int = 1
    bucket_bytes: int | None = None

    def texts(self) -> dict[str, str]:
        """The settings that are numbers as texts by name, for comparison between processes."""
        names = ("num_microbatches", "clip_norm", "prefetch", "bucket_bytes")
        return {name: str(getattr(self, name)) for name in names}

    def changed_texts(self) -> dict[str, str]:
        """The settings that are not the default, as they are written in a call."""
        default = StepSettings()
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "remat"}
        changed = {name: repr(value) for name, value in named.items() if value != getattr(default, name)}
        return changed | ({} if self.remat.saves_everything else {"remat": self.remat.title})

    @property
    def collectives(self) -> CollectiveOptions:
        """The options of the step's collectives."""
        return CollectiveOptions(math.inf if self.bucket_bytes is None else self.bucket_bytes)

    def check(self, axes: Axes) -> StepSettings:
        """Checks the settings against the data axes, and returns them.

        Raises:
            ValueError: if `num_microbatches`, `prefetch` or `bucket_bytes` is not an integer, or too small, or if
                `clip_norm` is not a number above 0.
        """
        if not _is_integer(self.num_microbatches) or self.num_microbatches < 1:
            raise ValueError(
                f"train_step: num_microbatches is {self.num_microbatches!r}\n  fix:      pass an integer of at least 1"
            )
        if not _is_integer(self.prefetch) or self.prefetch < 0:
            raise ValueError(
                f"prefetch: {self.prefetch!r} is not a valid number of units\n  fix:      pass an integer of at least 0"
            )
        is_number = isinstance(self.clip_norm, numbers.Real) and not isinstance(self.clip_norm, bool)
        if self.clip_norm is not None and not (is_number and self.clip_norm > 0):  # NaN is not
            raise ValueError(
                f"clip_norm: {self.clip_norm!r} is not a norm\n"
                f"  fix:      pass a number above 0, or None to leave gradients as they are"
            )
        least = axes.num_shards * _WIDEST_ELEMENT_BYTES
        if self.bucket_bytes is not None and (not _is_integer(self.bucket_bytes) or self.bucket_bytes < least):
            raise ValueError(
                f"bucket_bytes: {self.bucket_bytes!r} is not a valid buffer size\n"
                f"  got:      {axes.num_shards} shards, each with an element of up to {_WIDEST_ELEMENT_BYTES} bytes\n"
                f"  fix:      pass {least} or more bytes, or None to move every leaf in one piece"
            )
        return self


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
