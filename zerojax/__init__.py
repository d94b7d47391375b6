"""ZeRO for JAX: model states sharded over the data axes of a mesh, for Flax and Optax scripts as they are."""

from zerojax.versions import __version__  # first: refuses unsupported versions before anything else is imported

# isort: split
from zerojax.audit.audit import audit
from zerojax.audit.expectation import Promise
from zerojax.audit.findings import Audit, Finding, Verdict
from zerojax.losses import chunked_cross_entropy
from zerojax.processes import initialize
from zerojax.report.placement import Explanation
from zerojax.sharding.mesh import make_mesh, simulate_devices
from zerojax.sharding.precision import Precision
from zerojax.step.models import Weighted
from zerojax.step.state import TrainState
from zerojax.training import fit
from zerojax.transform.remat import Keep
from zerojax.zero import Zero

__all__ = [
    "Audit",
    "Explanation",
    "Finding",
    "Keep",
    "Precision",
    "Promise",
    "TrainState",
    "Verdict",
    "Weighted",
    "Zero",
    "__version__",
    "audit",
    "chunked_cross_entropy",
    "fit",
    "initialize",
    "make_mesh",
    "simulate_devices",
]
