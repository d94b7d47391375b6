"""What is planned: a training job, and the settings of its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax


class Job(NamedTuple):
    """The training job that is planned: a model, its optimizer, its loss and the shapes of its batch.

    Attributes:
        create_model: creates the model, as in `Zero.init`.
        tx: the optax transformation.
        loss_fn: the loss, as in `Zero.train_step`.
        batch: `batch(rows) -> tree of avals`, where `rows` is the number of rows on all devices together.
        rows: the default number of rows on a device in a microbatch.
        tokens: tokens in a row, for tokens/s.
        options: further options of `Zero`, such as `axis_names`.
    """

    create_model: Callable[..., Any]
    tx: optax.GradientTransformation
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    rows: int = 1
    tokens: int = 1
    options: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of a step.

    Attributes:
        stage, precision: as in `Zero`.
        rows: rows of a device in a microbatch; None for the default of the model.
        num_microbatches: as in `Zero.train_step`.
        remat: 'none', 'dots', 'full', or 'offload', which is 'full' with the inputs of layers in host memory.
        prefetch, bucket_bytes: as in `Zero.train_step`.
        replica, model: sizes of the mesh axes, as in `make_mesh`.
        offload: as in `Zero`.
    """

    stage: int = 3
    precision: str = "bf16"
    rows: int | None = None
    num_microbatches: int = 1
    remat: str = "full"
    prefetch: int = 1
    bucket_bytes: int | None = None
    replica: int = 1
    model: int | None = None
    offload: str = "none"

    def python(self) -> str:
        """Returns the Python calls that build the step."""
        given = (("replica", self.replica), ("model", self.model))
        mesh = ", ".join(f"{name}={size}" for name, size in given if size not in (None, 1))
        remat = "zerojax.Remat(offload_inputs=True)" if self.remat == "offload" else repr(self.remat)
        step = [f"remat={remat}", f"prefetch={self.prefetch}"]
        step += [f"num_microbatches={self.num_microbatches}"] if self.num_microbatches > 1 else []
        step += [f"bucket_bytes={self.bucket_bytes}"] if self.bucket_bytes else []
        zero = [f"zerojax.make_mesh({mesh})", f"stage={self.stage}", f"precision={self.precision!r}"]
        zero += [f"offload={self.offload!r}"] if self.offload != "none" else []
        return f"zero = zerojax.Zero({', '.join(zero)})\nstep = zero.train_step(loss_fn, {', '.join(step)})"


DEFAULT_SETTINGS = Settings()
