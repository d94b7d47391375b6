"""One process of several that run train_gpt.py at one stage after another: process.py DIRECTORY STAGES ..."""

import sys

import train_gpt

from zerojax import processes

directory, stages, *options = sys.argv[1:]
processes.initialize()
for stage in stages:
    train_gpt.train(train_gpt.parse([f"{directory}/{stage}", "--stage", stage, *options]))
