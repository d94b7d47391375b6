"""The scripts are modules of the tests, as they are of each other when one of them runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
