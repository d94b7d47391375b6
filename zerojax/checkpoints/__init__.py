"""What outlives a run: training states on disk, with a digest of every array, for any mesh and any stage."""

from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, CheckpointMismatch, Manifest
from zerojax.checkpoints.run import Checkpoints

__all__ = ["Allowed", "CheckpointCorrupted", "CheckpointMismatch", "Checkpoints", "Manifest"]
