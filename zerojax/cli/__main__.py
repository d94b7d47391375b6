"""Runs the command-line interface as a module: `python -m zerojax.cli`."""

from zerojax.cli.commands import main

if __name__ == "__main__":
    main()
