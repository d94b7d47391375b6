"""Predicts whether a training step fits on a cluster, what it sends, how long it takes, and which changes help."""

from zerojax.analysis.hardware import Cluster, calibrate, cluster
from zerojax.plan.job import PRESETS, Job, Settings, from_hugging_face
from zerojax.plan.planner import Plan, Suggestion
from zerojax.plan.search import plan

__all__ = ["PRESETS", "Cluster", "Job", "Plan", "Settings", "Suggestion"]
__all__ += ["calibrate", "cluster", "from_hugging_face", "plan"]
