"""Checks that this machine can run a training job, and that no setting is in the way, with a fix for each finding."""

from zerojax.cli.diagnosis.checks import Check, Status
from zerojax.cli.diagnosis.diagnosis import diagnose, table

__all__ = ["Check", "Status", "diagnose", "table"]
