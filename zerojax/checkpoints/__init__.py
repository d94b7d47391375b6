"""What outlives a run: training states on disk, with a digest of every array, for any mesh and any stage."""

from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, CheckpointMismatch, Manifest
from zerojax.checkpoints.preemption import EXIT_CODE
from zerojax.checkpoints.run import Checkpoints

__all__ = ["EXIT_CODE", "Allowed", "CheckpointCorrupted", "CheckpointMismatch", "Checkpoints", "Manifest"]
