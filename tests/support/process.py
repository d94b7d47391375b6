"""One process of several that run examples/train.py at one stage after another: process.py DIRECTORY STAGES ..."""

import sys

import train

from zerojax import processes

directory, stages, *options = sys.argv[1:]
processes.initialize()
for stage in stages:
    train.train(train.parse([f"{directory}/{stage}", "--stage", stage, *options]))
