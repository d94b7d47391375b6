"""Mixed precision: dtypes of master parameters, computation and gradient reductions, and the loss scale."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.sharding.wire import DTYPES_OF_8_BITS
from zerojax.utils.typing import Array, DTypeLike

MIN_LOSS_SCALE = 1.0
DTYPE_FIELDS = ("param_dtype", "compute_dtype", "reduce_dtype")  # fields of Precision
# The values of fields that say in which dtypes leaves are sent.
WIRE_DTYPES = {"gather": DTYPES_OF_8_BITS, "scatter": (*DTYPES_OF_8_BITS, "bfloat16", "float16")}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a training step, and its loss scaling.

    Attributes:
        param_dtype: dtype of the master parameters, which the optimizer reads and writes.
        compute_dtype: dtype of the parameters that the model computes with and that are gathered, and with
            `cast_inputs` also of the batch.
        reduce_dtype: dtype in which gradients are communicated and summed.
        cast_inputs: whether floating leaves of the batch are cast to compute_dtype, or globs on the paths of those that
            are. With True, these keep their dtype: leaves with at most one number per row (weights, targets,
            advantages), which the loss would otherwise get rounded; leaves whose name contains 'mask' or 'weight',
            since their sums would be rounded; and what is marked `Whole`. Norms and losses compute in the dtype that
            the model chooses; Flax's norms compute their statistics in fp32.
        initial_scale: the first loss scale, or None for no loss scaling.
        growth_interval: number of consecutive finite steps after which the loss scale doubles. It halves at each
            skipped step.
        gather: at stage 3, the dtype of 8 bits in which large weights are sent, 'int8' or 'float8_e4m3fn': in blocks of
            128 elements with a scale. The model computes with the rounded weights, in compute_dtype. Master copies and
            shards stay exact. None sends them in compute_dtype.
        scatter: the dtype in which parts of gradients are sent to the devices that sum them in fp32: one of these two,
            for large weights, or 'bfloat16' or 'float16'. The sums are rounded to reduce_dtype. None sums in
            reduce_dtype on the way.

    Raises:
        ValueError: if `gather` or `scatter` is none of these.

    Source of `gather` and `scatter`: Wang et al., "ZeRO++", arXiv 2306.10209, 2023 (qwZ and qgZ).
    """

    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    reduce_dtype: DTypeLike = jnp.float32
    cast_inputs: bool | tuple[str, ...] = True
    initial_scale: float | None = None
    growth_interval: int = 2000
    gather: str | None = None
    scatter: str | None = None

    def __post_init__(self) -> None:
        for name, known in WIRE_DTYPES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(
                    f"precision: unknown {name} {value!r}\n  fix:      {', '.join(map(repr, known))} or None"
                )

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """The `Precision` of a preset's name, or the given `Precision`.

        Args:
            precision: 'fp32', 'bf16', 'bf16_reduce_fp32', 'bf16_params', 'fp16' or a `Precision`.

        Raises:
            ValueError: if the name is unknown.
        """
        if isinstance(precision, Precision):
            return precision
        if precision not in PRECISIONS:
            raise ValueError(
                f"precision: unknown preset {precision!r}\n  fix:      one of {', '.join(PRECISIONS)}, or a Precision"
            )
        return PRECISIONS[precision]

    def leaf_dtype(self, dtype: DTypeLike, trainable: bool) -> np.dtype:
        """The dtype in which a parameter of `dtype` is gathered and computed with, unless the user chooses another.

        A frozen leaf is never widened: a base in bf16, fp8 or int8 stays as it is.

        Args:
            dtype: the dtype of the parameter in the model.
            trainable: whether the parameter is trained.
        """
        frozen_is_narrow = jnp.dtype(dtype).itemsize <= jnp.dtype(self.compute_dtype).itemsize
        if not jnp.issubdtype(dtype, jnp.floating) or (not trainable and frozen_is_narrow):
            return jnp.dtype(dtype)
        return jnp.dtype(self.compute_dtype)

    def wire_dtype(self, dtype: DTypeLike) -> np.dtype:
        """The dtype in which a gradient of `dtype` is communicated: `reduce_dtype`, or its own, if that is wider than
        compute_dtype, as of a leaf that is computed in fp32 in spite of the precision.

        Args:
            dtype: the dtype of the gradient.
        """
        is_wide = jnp.dtype(dtype).itemsize > jnp.dtype(self.compute_dtype).itemsize
        return jnp.promote_types(dtype, self.reduce_dtype) if is_wide else jnp.dtype(self.reduce_dtype)

    @property
    def sum_dtype(self) -> np.dtype:
        """The dtype in which the gradients of microbatches are summed: `param_dtype`, or fp32 if that is narrower."""
        return jnp.promote_types(self.param_dtype, jnp.float32)

    @property
    def title(self) -> str:
        """The preset's name, or the dtypes of the parameters, the computation and the reductions."""
        dtypes = [jnp.dtype(getattr(self, name)).name for name in DTYPE_FIELDS]
        own = f"parameters {dtypes[0]}, computed in {dtypes[1]}, reduced in {dtypes[2]}"
        plain = dataclasses.replace(self, gather=None, scatter=None)
        title = next((f"precision {name!r}" for name, preset in PRECISIONS.items() if preset == plain), own)
        return title + "".join(f", {name}={dtype!r}" for name, dtype in self.on_wire.items())

    @property
    def on_wire(self) -> dict[str, str]:
        """The dtypes `gather` and `scatter` that are set, by name."""
        return {name: getattr(self, name) for name in WIRE_DTYPES if getattr(self, name)}

    def __str__(self) -> str:
        scaling = "none"
        if self.initial_scale:
            scaling = f"dynamic, from {self.initial_scale:g}, doubles after {self.growth_interval} finite steps"
        inputs = jnp.dtype(self.compute_dtype).name if self.cast_inputs else "as given"
        if not isinstance(self.cast_inputs, bool):
            inputs += f" for {', '.join(self.cast_inputs)}"
        sent = lambda dtype, own: f"{jnp.dtype(own).name}; large leaves in {dtype}" if dtype else jnp.dtype(own).name
        rows = {
            "master parameters": jnp.dtype(self.param_dtype).name,
            "sums over microbatches": jnp.dtype(self.sum_dtype).name,
            "computation, all-gather": sent(self.gather, self.compute_dtype),
            "reduce-scatter, all-reduce": sent(self.scatter, self.reduce_dtype),
            "floating batch leaves": inputs,
            "loss scaling": scaling,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}s}  {value}" for name, value in rows.items())


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16),
    "bf16_reduce_fp32": Precision(compute_dtype=jnp.bfloat16),
    "bf16_params": Precision(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    "fp16": Precision(compute_dtype=jnp.float16, reduce_dtype=jnp.float16, initial_scale=2.0**15),
}


def for_reduction(grad: Array, dtype: DTypeLike) -> Array:
    """Casts a gradient to the dtype in which it is reduced, with no more mantissa bits than it was computed with.

    A compiler may fuse a widening cast into the preceding matrix product and skip the rounding in between. Stages whose
    programs are fused differently would then sum different numbers.
    """
    if jnp.finfo(dtype).nmant > jnp.finfo(grad.dtype).nmant:
        info = jnp.finfo(grad.dtype)
        return lax.reduce_precision(grad.astype(dtype), info.nexp, info.nmant)
    return grad.astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale."""

    value: Array  # fp32 scalar by which the loss is multiplied
    finite_steps: Array  # int32 scalar, the number of finite steps since `value` last changed

    @classmethod
    def create(cls, precision: Precision) -> LossScale | None:
        """The initial loss scale, or None if the precision has no loss scaling."""
        if precision.initial_scale is None:
            return None
        return cls(jnp.float32(precision.initial_scale), jnp.int32(0))

    def update(self, finite: Array, growth_interval: int) -> LossScale:
        """Halves the scale (down to 1) if the step was not finite; doubles it after `growth_interval` finite steps."""
        grows = finite & (self.finite_steps + 1 >= growth_interval)
        halved = jnp.maximum(self.value / 2, MIN_LOSS_SCALE)
        value = jnp.where(finite, jnp.where(grows, self.value * 2, self.value), halved)
        return LossScale(value, jnp.where(finite & ~grows, self.finite_steps + 1, 0))
