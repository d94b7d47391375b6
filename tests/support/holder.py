"""Measures the host memory of checkpoints in one process of several: saves, restores or exports a state of 256 MiB.

    python holder.py save|restore|export DIRECTORY NUM_ARRAYS

Prints by how many bytes the peak memory of the process grew. An export reads in a process of its own, whose memory is
not counted.
"""

import resource
import sys

import jax
import jax.numpy as jnp
import optax

import zerojax
from zerojax import processes
from zerojax.exchange import parameters

NUM_BYTES, FILE_BYTES = 2**28, 2**25


def create(key, num_arrays):
    keys = jax.random.split(key, num_arrays)
    return {f"w{i}": jax.random.normal(k, (NUM_BYTES // 4 // 1024 // num_arrays, 1024)) for i, k in enumerate(keys)}


def peak_resident_bytes():
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(action, directory, num_arrays):
    processes.initialize()
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    make = zero.init if action == "save" else zero.eval_init
    state = make(lambda key: create(key, int(num_arrays)), optax.sgd(0.1))
    jax.block_until_ready(jnp.ones(1024) + 1)
    before = peak_resident_bytes()
    if action == "export":
        parameters.export(directory, 0, f"{directory}/model", max_file_bytes=FILE_BYTES)
    else:
        with zero.checkpoints(directory) as checkpoints:
            if action == "save":
                checkpoints.save(state)
            else:
                state, _ = checkpoints.resume(state)
    sys.stdout.write(f"{peak_resident_bytes() - before}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
