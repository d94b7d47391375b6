"""Training with several processes: joins them, checks that they agree, and divides the rows of a batch among them."""

from zerojax.processes.agreement import agree
from zerojax.processes.join import Processes, initialize, own_rows

__all__ = ["Processes", "agree", "initialize", "own_rows"]
