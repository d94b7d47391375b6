"""One of several processes that run examples/train.py together, at each stage in turn: DIRECTORY STAGES OPTIONS."""

import sys

import train

from zerojax import processes

directory, stages, *options = sys.argv[1:]
processes.initialize()
for stage in stages:
    train.train(train.parse([f"{directory}/{stage}", "--stage", stage, *options]))
