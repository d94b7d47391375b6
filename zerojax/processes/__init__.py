"""Several processes that train as one."""

from zerojax.processes.join import Processes, agree, initialize, own_rows

__all__ = ["Processes", "agree", "initialize", "own_rows"]
