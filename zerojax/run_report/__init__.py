"""A page about a run: what its directory says, as one HTML file with charts."""

from zerojax.run_report.page import write_report

__all__ = ["write_report"]
