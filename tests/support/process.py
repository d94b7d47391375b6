"""One of several processes that together run examples/train.py, at one stage after the other: DIRECTORY STAGES ..."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train  # noqa: E402

from zerojax import processes  # noqa: E402

directory, stages, *options = sys.argv[1:]
processes.initialize()
for stage in stages:
    train.train(train.parse([f"{directory}/{stage}", "--stage", stage, *options]))
