"""ZeRO for JAX: shards model states over the data axes of a mesh, for unmodified Flax and Optax training scripts."""

from zerojax.utils import interrupts  # noqa: F401  # must be first: keeps Ctrl-C from being lost in what follows
from zerojax.utils.versions import __version__  # rejects unsupported versions

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from zerojax.analysis.expectation import Expectation
from zerojax.analysis.explanation import Explanation
from zerojax.analysis.findings import Audit, Finding, Verdict
from zerojax.analysis.step import audit_step
from zerojax.analysis.visualize import visualize
from zerojax.contrib.attention import attention
from zerojax.contrib.losses import chunked_cross_entropy
from zerojax.contrib.low_bit import low_bit_moments, stochastic_rounding
from zerojax.processes import initialize
from zerojax.program.remat import Remat
from zerojax.sharding.mesh import make_mesh, simulate_devices
from zerojax.sharding.precision import Precision
from zerojax.step.batch import Whole
from zerojax.step.losses import Weighted
from zerojax.step.optimizers import ema
from zerojax.step.state import TrainState
from zerojax.training import evaluate, fit
from zerojax.zero import Zero

if TYPE_CHECKING:
    from zerojax import checkpoints, exchange, plan, processes
    from zerojax.analysis import targets

__all__ = [
    "Audit",
    "Expectation",
    "Explanation",
    "Finding",
    "Precision",
    "Remat",
    "TrainState",
    "Verdict",
    "Weighted",
    "Whole",
    "Zero",
    "__version__",
    "attention",
    "audit_step",
    "checkpoints",
    "chunked_cross_entropy",
    "ema",
    "evaluate",
    "exchange",
    "fit",
    "initialize",
    "low_bit_moments",
    "make_mesh",
    "plan",
    "processes",
    "simulate_devices",
    "stochastic_rounding",
    "targets",
    "visualize",
]

# Imported on first use, because importing Orbax alone takes a second.
_MODULES = {
    "checkpoints": "zerojax.checkpoints",
    "exchange": "zerojax.exchange",
    "plan": "zerojax.plan",
    "processes": "zerojax.processes",
    "targets": "zerojax.analysis.targets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'zerojax' has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    globals()[name] = module
    return module


def __dir__() -> list[str]:
    return __all__
