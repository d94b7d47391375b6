"""The folders of the repository, and the environment of subprocesses that import from them."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TESTS, EXAMPLES, SCRIPTS = REPO / "tests", REPO / "examples", REPO / "scripts"
BENCHMARKS, SUPPORT = SCRIPTS / "benchmarks", TESTS / "support"
DATA = SUPPORT / "data"


def importing(*folders, environ=os.environ):
    """The environment variables of a subprocess that imports from these folders first."""
    path = os.pathsep.join([*map(str, folders), *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, "PYTHONPATH": path}
