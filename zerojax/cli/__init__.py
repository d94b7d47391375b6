"""The command-line interface: `zerojax`, or `python -m zerojax.cli`."""

from zerojax.cli.commands import main as main
