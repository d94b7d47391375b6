"""Runs train_gpt.py to its end, and again until it is killed: killed.py STEP DIRECTORY KILLED OPTIONS ...

The second run, in the directory KILLED, is killed before step STEP + 1, after the checkpoint of step STEP is complete.
"""

import os
import signal
import sys
import time
from pathlib import Path

import text
import train_gpt

import zerojax

step, directory, killed, *options = sys.argv[1:]
zerojax.simulate_devices(8)
train_gpt.train(train_gpt.parse([directory, *options]))

load = text.batch
mark = Path(killed, "checkpoints", f"step_{step}", "commit_success.txt")


def killing(source, rows, length, seed):
    while seed == int(step):
        if mark.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    return load(source, rows, length, seed)


text.batch = killing
train_gpt.train(train_gpt.parse([killed, *options]))
