"""Compiles each form of a benchmark in a process of its own, so that none finds what another one has left in memory."""

import json
import os
import subprocess
import sys


def compiled_forms(forms):
    """The JSON objects that this script prints with `--compile FORM`, or {"error": ...}, by form."""
    from rich.console import Console

    console, found, env = Console(stderr=True), {}, os.environ | {"JAX_TRACEBACK_FILTERING": "off"}
    for form in forms:
        with console.status(f"compiling {form}"):
            command = [sys.executable, *sys.argv, "--compile", form]
            done = subprocess.run(command, capture_output=True, text=True, env=env)
        error = {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
        found[form] = json.loads(done.stdout) if done.returncode == 0 else error
    return found
