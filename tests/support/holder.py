"""Measures the host memory of checkpoints in one process of several: saves, restores or exports a state of 256 MiB.

    python holder.py save|restore|export|disk DIRECTORY NUM_ARRAYS

With `disk`, the state has 768 MiB on a disk: it is created and trained for two steps, and what counts is the memory in
which it is then saved and restored.
Prints by how many bytes the peak memory of the process grew. An export reads in a process of its own, whose memory is
not counted.
"""

import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax import processes
from zerojax.exchange import parameters
from zerojax.offload import disk_update
from zerojax.step import creation

NUM_BYTES, FILE_BYTES = 2**28, 2**25


def create(key, num_arrays):
    keys = jax.random.split(key, num_arrays)
    return {f"w{i}": jax.random.normal(k, (NUM_BYTES // 4 // 1024 // num_arrays, 1024)) for i, k in enumerate(keys)}


def peak_resident_bytes():
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(action, directory, num_arrays):
    processes.initialize()
    jax.block_until_ready(jnp.ones(1024) + 1)
    model, before = (lambda key: create(key, int(num_arrays))), peak_resident_bytes()
    if action == "disk":
        sys.stdout.write(f"{saved_and_restored_on_disk(model, directory)}\n")
        return
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    make = zero.init if action == "save" else zero.eval_init
    state = make(model, optax.sgd(0.1))
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


def saved_and_restored_on_disk(model, directory):
    """The bytes by which the memory of the process grows meanwhile."""
    disk_update.RECORD_BYTES, creation.PART_BYTES = 2**22, 2**22
    zero = zerojax.Zero(zerojax.make_mesh(), 3, "bf16", offload="optimizer", offload_dir=directory)
    step = zero.train_step(lambda params, x: sum(jnp.sum(w**2) for w in params.values()) * x.mean())
    with zero.checkpoints(directory) as checkpoints:
        state = zero.init(model, optax.adam(0.1))
        rows = processes.own_rows(2)
        for _ in range(2):
            state, _ = step(state, np.ones((2, 1), np.float32)[rows])
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
        before = peak_since()
        checkpoints.save(state)
        checkpoints.restore(state, 2)
        return peak_since() - before


def peak_since():
    """The largest resident size since it was reset, on Linux."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
