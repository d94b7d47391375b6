"""Says where a run starts: from which step, on which mesh and stage it was saved, and on which the run continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zerojax.checkpoints.manifest import Manifest
from zerojax.step.config import ZeroConfig


def origin_text(config: ZeroConfig, directory: Path, step: int, saved: Manifest | None) -> str:
    """One line about the start of a run.

    Args:
        config: mesh and stage on which the run continues.
        directory: of the checkpoints.
        step: the step from which the run continues.
        saved: the manifest of the step that was restored; None if there was none.
    """
    now = _setting(dict(config.mesh.shape), config.stage)
    if saved is None:
        return f"no checkpoint in {directory}; the run starts at step {step} on {now}"
    before = _setting(saved.mesh, saved.stage)
    rest = "the run continues on the same" if before == now else f"the run continues on {now}"
    return f"step {step} of {directory} is restored, which was saved on {before}; {rest}"


def _setting(mesh: Mapping[str, int], stage: int) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.items())
    return f"mesh ({sizes}) at stage {int(stage)}"
