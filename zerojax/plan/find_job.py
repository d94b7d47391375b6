"""Finds the job of a preset, of a described model, or of the user's function."""

from __future__ import annotations

import importlib

from zerojax.analysis.hardware import Chip
from zerojax.plan import attention, presets
from zerojax.plan.job import Job
from zerojax.plan.transformer import Transformer


def shapes_of(what: str | Transformer) -> Transformer | None:
    """The shapes of a preset or of a described model; None for the user's function."""
    return presets.PRESETS.get(what) if isinstance(what, str) else what


def find_job(what: str | Transformer, chip: Chip | None = None, compiled: bool = False) -> Job:
    """Returns the job of a preset, of a described model, or of the user's function.

    Args:
        what: as in `plan`.
        chip: the chip of the target. Programs for GPUs use fused attention, if it takes the heads of the model.
        compiled: whether the job will be compiled. If not, it can only be traced, which needs no package of the
            platform.

    Raises:
        ValueError: if there is no such preset or function, or if the function does not return a `Job`.
    """
    if (shapes := shapes_of(what)) is not None:
        fused = attention.cudnn_attention if compiled else attention.cudnn_attention_for_tracing
        return presets.job(shapes, fused if chip and can_fuse(shapes, chip) else None)
    assert isinstance(what, str)
    module, colon, name = what.partition(":")
    if not colon:
        raise ValueError(
            f"plan: no preset {what!r}\n  fix:      use one of {', '.join(presets.PRESETS)}, or 'module:function'"
        )
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"plan: {what!r} cannot be called\n  got:      {error}\n"
            f"  fix:      pass 'module:function', with a module that Python can import (PYTHONPATH=.)"
        ) from error
    if not isinstance(found, Job):
        raise ValueError(
            f"plan: {what!r} does not return a Job\n  got:      {type(found).__name__}\n"
            f"  fix:      return zerojax.plan.Job(create_model, tx, loss_fn, batch, rows=..., tokens=...)"
        )
    return found


def can_fuse(shapes: Transformer, chip: Chip) -> bool:
    """Whether the attention of a model can be a fused kernel on a chip."""
    head_dim = shapes.width_of_head
    return (
        chip.platform == "cuda"
        and not shapes.caps_scores
        and head_dim <= widest_head(chip)
        and head_dim % attention.FUSED_HEAD_MULTIPLE == 0
    )


def widest_head(chip: Chip) -> int:
    """The width of the widest heads that fused attention takes on a chip."""
    return attention.widest_fused_head((8, 0) if chip.name == "a100" else (9, 0))
