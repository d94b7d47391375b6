"""Know before you rent: whether a step fits on a cluster, what travels, and what would change that."""

from zerojax.analysis.hardware import Cluster, cluster
from zerojax.plan.planner import Plan, Settings, Suggestion, plan
from zerojax.plan.presets import PRESETS, Job

__all__ = ["PRESETS", "Cluster", "Job", "Plan", "Settings", "Suggestion", "cluster", "plan"]
