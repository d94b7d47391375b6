"""Saves and restores training states: a digest for every array, on any mesh, stage and number of processes."""

from zerojax.checkpoints.manifest import Allowed, CheckpointCorrupted, CheckpointMismatch, Manifest
from zerojax.checkpoints.run import CheckpointOptions, Checkpoints
from zerojax.processes.preemption import EXIT_CODE, INTERRUPT_EXIT_CODE

__all__ = [
    "EXIT_CODE",
    "INTERRUPT_EXIT_CODE",
    "Allowed",
    "CheckpointCorrupted",
    "CheckpointMismatch",
    "CheckpointOptions",
    "Checkpoints",
    "Manifest",
]
