"""Measures what a call of `zero.value_and_grad` costs outside of `jax.jit`, relative to the same call inside of it.

    python scripts/benchmarks/without_jit.py
    python scripts/benchmarks/without_jit.py --layers 8 --width 512 --rows 256 --stage 3

It prints a JSON object: milliseconds of a call with and without jit (the median of several calls, after the first), and
their ratio. Without jit, each call traces the loss and its gradient, and each operation is a program of its own.
"""

import argparse
import json
import statistics
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

import zerojax


def loss(params, x):
    """A chain of layers with two matrices each."""
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def create(layers, width):
    rng = np.random.default_rng(0)
    matrix = lambda *shape: rng.standard_normal(shape, np.float32) / shape[0]
    return {"layers": [{"up": matrix(width, 4 * width), "down": matrix(4 * width, width)} for _ in range(layers)]}


def median_ms(call, times):
    """The median of the milliseconds that a call takes until its results are there, without the first call."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("devices", 8), ("stage", 3), ("layers", 4), ("width", 128), ("rows", 64), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if jax.config.jax_platforms in (None, "", "cpu"):
        zerojax.simulate_devices(args.devices)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage)
    params = zero.shard(create(args.layers, args.width))
    x = zero.shard_batch(np.ones((args.rows, args.width), np.float32))
    value_and_grad = zero.value_and_grad(loss)
    jitted = jax.jit(value_and_grad)
    inside, outside = (
        median_ms(lambda: jitted(params, x), args.times),
        median_ms(lambda: value_and_grad(params, x), args.times),
    )
    device = jax.devices()[0]
    print(
        json.dumps(
            vars(args)
            | {"device": device.device_kind, "jax": metadata.version("jax")}
            | {
                "with_jit_ms": round(inside, 2),
                "without_jit_ms": round(outside, 1),
                "ratio": round(outside / inside, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
