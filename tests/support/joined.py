"""One process of several: sums the rows of all processes and prints what it knows of itself as JSON.

The options make one process fail in some way; see tests/processes/test_launch.py.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
for option in ("absent", "differ", "kill", "fail", "exit", "unread", "silent"):
    parser.add_argument(f"--{option}", type=int, default=-1)
parser.add_argument("--late", action="store_true", help="end two seconds after the process that exits")
parser.add_argument("--preempted", action="store_true")
parser.add_argument("--uneven", help="a directory to train in, with less data in process 1")
parser.add_argument("--slow", help="a directory to train in, with slower data in process 1")
parser.add_argument("--meet", help="a directory to wait in until all but the absent one have started Python")
parser.add_argument("--timeout", type=int, default=30)
parser.add_argument("--heartbeat", type=int, default=100)
args = parser.parse_args()

if args.absent == int(os.environ.get("ZEROJAX_PROCESS_ID", -2)):
    sys.exit(0)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

import zerojax  # noqa: E402
from zerojax import Zero, make_mesh, processes  # noqa: E402
from zerojax.processes import agreement  # noqa: E402

if args.meet:
    Path(args.meet, os.environ["ZEROJAX_PROCESS_ID"]).touch()
    while len(os.listdir(args.meet)) < int(os.environ["ZEROJAX_NUM_PROCESSES"]) - (args.absent >= 0):
        time.sleep(0.01)
differs = args.differ == int(os.environ.get("ZEROJAX_PROCESS_ID", -2))
if differs:
    versions = agreement.versions()
    agreement.versions = lambda: {**versions, "jax": "0.0"}
config = {"lr": 0.2 if differs else 0.1, "layers": [1, 2]}
own = processes.initialize(timeout_s=args.timeout, heartbeat_s=args.heartbeat, config=config)
if args.fail == own.index:
    raise KeyError("here")
if args.exit == own.index:
    sys.exit(3)
if args.late:
    time.sleep(2)
    sys.exit()
if args.unread == own.index:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout = os.fdopen(1, "w")  # buffered: what could not be written is written again at the end
    print("nobody reads this")
    sys.stdout.flush()
if args.silent == own.index:
    time.sleep(60)
if args.silent >= 0:
    processes.agree({}, timeout_s=args.timeout)
if args.preempted:
    print("running", flush=True)
    for step in range(600):
        if multihost_utils.reached_preemption_sync_point(step):
            sys.stdout.write(f"saved at {step}\n")
            sys.exit(75)
        time.sleep(0.1 + 0.05 * own.index)
if args.uneven:
    zero = Zero(make_mesh(), 1)
    step = zero.train_step(lambda params, batch: (params["w"] * batch).mean())
    data = iter([np.ones((4, 8), np.float32)] * (4 - own.index))
    zerojax.fit(zero, zero.init(lambda: {"w": np.ones(8, np.float32)}, optax.sgd(0.1)), step, data, 9, args.uneven)
if args.slow:
    zero = Zero(make_mesh(), 1)
    step = zero.train_step(lambda params, batch: (params["w"] * batch).mean())

    def slow(i):
        time.sleep(0.05 if own.index == 1 else 0)
        return np.ones((4, 8), np.float32)

    init = lambda: zero.init(lambda: {"w": np.ones(8, np.float32)}, optax.sgd(0.1))
    zerojax.fit(zero, init(), step, slow, 45, args.slow)
    zerojax.fit(zero, init(), step, lambda i: np.full((4, 8), own.index, np.float32), 1)
rows = processes.own_rows(8)
batch = Zero(make_mesh(), 1).shard_batch(np.arange(8.0, dtype=np.float32)[rows])
total = float(jax.jit(lambda a: a.sum())(batch))
if args.kill == own.index:
    os.kill(os.getpid(), signal.SIGKILL)
if args.kill >= 0:
    time.sleep(60)
summary = {
    "count": own.count,
    "index": own.index,
    "found": own.found,
    "devices": jax.device_count(),
    "rows": [rows.start, rows.stop],
    "sum": total,
}
sys.stdout.write(json.dumps(summary) + "\n")  # one write: `print` would write the newline separately
