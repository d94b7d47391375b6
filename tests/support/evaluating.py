"""One process of several that evaluate a data set, of which each has other rows: evaluating.py COUNTS FILE [FAILING].

COUNTS are the rows of each process. The process FAILING passes arrays with different numbers of rows.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax import processes

counts, file, *failing = sys.argv[1:]
counts = [int(count) for count in counts.split(",")]
own = processes.initialize()
data = np.random.default_rng(0).standard_normal((sum(counts), 4), np.float32)
start = sum(counts[: own.index])
mine = {"x": data[start : start + counts[own.index]], "w": np.ones(counts[own.index], np.float32)}
if str(own.index) in failing:
    mine["w"] = mine["w"][1:]


def loss(params, batch):
    error = jnp.mean((batch["x"] @ params["w"]) ** 2, axis=-1)
    return error.mean(), {"weighted": zerojax.Weighted(jnp.sum(error * batch["w"]), jnp.sum(batch["w"]))}


zero = zerojax.Zero(zerojax.make_mesh(), 3)
state = zero.init(lambda key: {"w": jax.random.normal(key, (4, 8))}, optax.sgd(0.1))
try:
    found = zerojax.evaluate(zero.eval_step(loss), state, mine, batch_size=8)
except (ValueError, RuntimeError) as error:
    found = str(error)
pathlib.Path(f"{file}.{own.index}").write_text(json.dumps(found))
