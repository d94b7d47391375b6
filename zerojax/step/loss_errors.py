"""Errors that JAX raises in a loss, in words that name the line of the model and the setting that helps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from zerojax.sharding.precision import Precision
from zerojax.utils.warn import line_of

# What JAX says of a constraint that names a manual axis of shard_map: by a NamedSharding, when the step is lowered; and
# by a PartitionSpec, when the loss is traced.
_CONSTRAINS_DATA_AXES = ("contains a manual axes", "can only refer to Auto axes of the mesh")


class LossError(ValueError):
    """An error of JAX that has been explained."""


@contextlib.contextmanager
def explaining_errors(precision: Precision) -> Iterator[None]:
    """Explains errors about constraints on data axes, about placement and about dtypes. Others stay as they are.

    Raises:
        LossError: in place of an error that it explains.
    """
    try:
        yield
    except LossError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        if (text := _explanation(error, jnp.dtype(precision.compute_dtype).name)) is None:
            raise
        raise LossError(text) from error


def constraint_text(got: str, line: str | None) -> str:
    """The text of an error about a constraint that names data axes."""
    return (
        f"loss: a with_sharding_constraint names axes that split the batch. The loss runs on the rows of one "
        f"device, where there is nothing to divide over them\n"
        f"  got:      {got}, at {line or 'an unknown line'}\n"
        f"  fix:      name other axes only: P(None, 'model') instead of P('data', 'model'); map the logical name\n"
        f"            of the batch to None; if the model constrains only within `with mesh:`, call the step outside"
    )


def kernel_text(got: str, line: str | None, axes: Sequence[str]) -> str:
    """The text of an error about a kernel that JAX cannot divide over mesh axes."""
    names = ", ".join(map(repr, axes))
    return (
        f"loss: JAX cannot divide this kernel over the axes {names} inside of a step\n"
        f"  got:      {got}, at {line or 'an unknown line'}\n"
        f"  fix:      call it on the heads of one device, inside jax.shard_map(fn, in_specs=heads, out_specs=heads,\n"
        f"            axis_names={{{names}}}) with heads = P(None, None, {axes[0]!r}); or implementation='xla'"
    )


def _explanation(error: Exception, compute_dtype: str) -> str | None:
    text = str(error).strip()
    seen, line = text.splitlines()[0] if text else type(error).__name__, line_of(error)
    got = f"  got:      {seen}, at {line or 'an unknown line'}\n"
    if any(said in text for said in _CONSTRAINS_DATA_AXES):
        return constraint_text(seen, line)
    if compute_dtype != "float32" and compute_dtype in text and "float32" in text:
        return (
            f"precision: the model mixes float32 and {compute_dtype} where all must have one dtype\n"
            f"{got}"
            f"  fix:      create the array there in the dtype of its input (x.dtype); or compute the weights "
            f"before it in fp32, Zero(..., dtypes={{glob: 'float32'}})"
        )
    if isinstance(error, NotImplementedError) and "Manual" in text:
        return (
            f"sharding: the model places an array over axes of the mesh itself\n"
            f"{got}"
            f"  fix:      leave out_sharding= out: a step runs on the rows of one device"
        )
    return None
