"""One of two processes that try what differs between them, and print each error: differing.py DIRECTORY.

Errors of this kind are raised in both processes, so that one start serves for all of them. The last case is the same in
both, and has no error. Prints a JSON object with the error of each case.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import zerojax
from zerojax import processes
from zerojax.checkpoints.replicas import ReplicasDiffer
from zerojax.processes import agreement

agreement._SEEN_TIMEOUT_S = 0.5
own = zerojax.initialize(timeout_s=60)
directory, mine = Path(sys.argv[1]), own.index == 1
mesh = zerojax.make_mesh()


def create(key):
    return {f"w{i}": jax.random.normal(key, (4, 4)) for i in range(2)}


def loss(params, batch):
    return sum(jax.numpy.tanh(jax.numpy.tanh(batch["x"] @ w)).sum() for w in params.values())


def optimizer(rate=0.1):
    return optax.sgd(lambda count: rate / (1 + count))


def make_zero(stage=3, mesh=mesh, precision="fp32"):
    return zerojax.Zero(mesh, stage, precision)


def init(zero=None, create=create, seed=0):
    return (zero or make_zero()).init(create, optimizer(), seed)


def wider(key):
    return {**create(key), "w1": jax.random.normal(key, (4, 8))}


def rows(num=4, dtype=np.float32, **more):
    return {"x": np.ones((num, 4), dtype), **more}


def step(batch, rate=0.1, state=None, **settings):
    state = state or make_zero().init(create, optimizer(rate))
    make_zero().train_step(loss, **settings)(state, batch)


def evaluation(batch):
    make_zero().eval_step(loss)(make_zero().init(create, optimizer()), batch)


def saves(folder=directory / "same", **options):
    make_zero().checkpoints(folder, **options).close()


def fit(**options):
    batches = lambda i: rows(4)
    zerojax.fit(make_zero(), init(), make_zero().train_step(loss), batches, 1, directory / "run", **options)


def locked():
    """Process 0 finds that another run uses the directory."""
    if not mine:
        import fcntl

        (directory / "locked").mkdir()
        file = (directory / "locked" / ".lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        locked.file = file
    saves(directory / "locked")


def lost():
    """The directory is replaced while it is in use."""
    with make_zero().checkpoints(directory / "lost") as checkpoints:
        if not mine:
            (directory / "lost").rename(directory / "moved")
            (directory / "lost").mkdir()
        checkpoints.save(init())


STATE = init()
CASES = {
    "stage": lambda: init(make_zero(2 if mine else 3)),
    "precision": lambda: init(make_zero(precision="bf16" if mine else "fp32")),
    "mesh": lambda: init(make_zero(mesh=zerojax.make_mesh(replica=2) if mine else mesh)),
    "seed": lambda: init(seed=int(mine)),
    "key": lambda: init(seed=jax.random.key(int(mine))),
    "model": lambda: init(create=wider if mine else create),
    "call": lambda: step(rows(), state=STATE) if mine else init(),
    "rows": lambda: step(rows(8 if mine else 4)),
    "rows that the devices do not divide": lambda: step(rows(3 if mine else 4)),
    "dtype": lambda: step(rows(dtype=np.float16 if mine else np.float32)),
    "leaf": lambda: step(rows(mask=np.ones(4)) if mine else rows()),
    "learning rate": lambda: step(rows(), rate=0.2 if mine else 0.1),
    "clip_norm": lambda: step(rows(), clip_norm=1.0 if mine else None),
    "num_microbatches": lambda: step(rows(), num_microbatches=2 if mine else 1),
    "remat": lambda: step(rows(), remat="full" if mine else "none"),
    "evaluation": lambda: evaluation(rows(8 if mine else 4)),
    "every": lambda: saves(every=5 if mine else 4),
    "watchdog": lambda: saves(watchdog_s=5.0 if mine else None),
    "evaluate": lambda: fit(evaluate=(lambda state: {}) if mine else None),
    "num_steps": lambda: fit(log_every=5 if mine else 10),
    "fit checkpoints": lambda: fit(checkpoints={"keep": 2 if mine else 3}),
    "directory": lambda: saves(directory / f"of_{own.index}"),
    "locked": locked,
    "lost": lost,
    "nothing": lambda: (step(rows()), evaluation(rows()), fit()),
}


def error_of(case):
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    except ReplicasDiffer as error:
        return str(error)
    return ""


sys.stdout.write(json.dumps({name: error_of(case) for name, case in CASES.items()}) + "\n")
assert processes.own_rows(8)
