"""What is planned: a training job, and the settings of its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import optax

from zerojax.contrib.low_bit.moments import low_bit_moments
from zerojax.contrib.low_bit.parameters import stochastic_rounding


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
        moment_bits: 8 or 16 for `zerojax.low_bit_moments` around the optimizer of the job, and with 'bf16_params'
            `zerojax.stochastic_rounding` around both; None for the optimizer as it is.
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
    moment_bits: int | None = None

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns an optimizer with moments in `moment_bits`.

        Args:
            tx: the optimizer of the job.
        """
        if self.moment_bits is None:
            return tx
        tx = low_bit_moments(tx, self.moment_bits)
        return stochastic_rounding(tx) if self.precision == "bf16_params" else tx

    def python(self) -> str:
        """Returns the Python calls that build the step."""
        given = (("replica", self.replica), ("model", self.model))
        mesh = ", ".join(f"{name}={size}" for name, size in given if size not in (None, 1))
        remat = "zerojax.Remat(offload_inputs=True)" if self.remat == "offload" else repr(self.remat)
        step = [f"remat={remat}", f"prefetch={self.prefetch}"]
        step += [f"num_microbatches={self.num_microbatches}"] if self.num_microbatches > 1 else []
        step += [f"bucket_bytes={self.bucket_bytes}"] if self.bucket_bytes else []
        tx = f"zerojax.low_bit_moments(tx, {self.moment_bits})"
        tx = f"zerojax.stochastic_rounding({tx})" if self.precision == "bf16_params" else tx
        first = f"tx = {tx}\n" if self.moment_bits else ""
        zero = [f"zerojax.make_mesh({mesh})", f"stage={self.stage}", f"precision={self.precision!r}"]
        zero += [f"offload={self.offload!r}"] if self.offload != "none" else []
        return f"{first}zero = zerojax.Zero({', '.join(zero)})\nstep = zero.train_step(loss_fn, {', '.join(step)})"


DEFAULT_SETTINGS = Settings()
