"""The settings of one training step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from zerojax.sharding.axes import Axes
from zerojax.transform.collectives import CollectiveOptions
from zerojax.transform.remat import NO_RULES, RematRules

_WIDEST_ELEMENT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What one step does in its own way; `ZeroConfig` is what all steps share.

    Attributes:
        num_microbatches: equal parts that a device's rows are processed in.
        clip_norm: the largest global norm of the gradients; None: they are not clipped.
        remat: which activations of a unit are saved for its backward pass.
        prefetch: units whose weights are gathered ahead of the one that computes.
        bucket_bytes: what one collective moves at most; None: leaves are moved whole.
    """

    num_microbatches: int = 1
    clip_norm: float | None = None
    remat: RematRules = NO_RULES
    prefetch: int = 1
    bucket_bytes: int | None = None

    @property
    def collectives(self) -> CollectiveOptions:
        return CollectiveOptions(math.inf if self.bucket_bytes is None else self.bucket_bytes)

    def check(self, axes: Axes) -> StepSettings:
        """These settings, if a step over these axes can have them.

        Raises:
            ValueError: a number that is too small, or not an integer.
        """
        if not _is_integer(self.num_microbatches) or self.num_microbatches < 1:
            raise ValueError(f"train_step: num_microbatches is {self.num_microbatches!r}\n  fix:      at least 1")
        if not _is_integer(self.prefetch) or self.prefetch < 0:
            raise ValueError(f"prefetch: {self.prefetch!r}\n  fix:      a number of units, 0 or more")
        least = axes.num_shards * _WIDEST_ELEMENT_BYTES
        if self.bucket_bytes is not None and (not _is_integer(self.bucket_bytes) or self.bucket_bytes < least):
            raise ValueError(
                f"bucket_bytes: {self.bucket_bytes!r} is not a valid buffer size\n"
                f"  got:      {axes.num_shards} shards, each with an element of up to {_WIDEST_ELEMENT_BYTES} bytes\n"
                f"  fix:      {least} or more bytes, or None to move every leaf whole"
            )
        return self


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
