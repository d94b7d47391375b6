"""A training run for tests of faults, such as kills: python trainee.py DIRECTORY NUM_STEPS [options].

Runs as a single process, or as one of the processes that the ZEROJAX variables describe. Each process passes its own
rows of the same batches. When a step is done and its save has begun, it prints `loss STEP VALUE`, with all digits of
the value.
"""

import argparse
import ctypes
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import orbax.checkpoint

import zerojax
from zerojax import processes
from zerojax.checkpoints import CheckpointCorrupted, store

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("num_steps", type=int)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--keep", type=int, default=3)
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--devices", type=int, default=4, help="number of devices of this process")
parser.add_argument("--slow", type=float, default=0, help="least seconds per step")
parser.add_argument("--slow-from", type=int, default=0, help="the step after which steps are slow")
parser.add_argument("--block-at", type=int, help="the step after which the main thread runs no Python any more")
parser.add_argument("--announce", action="store_true", help="wait for each save, and print `complete STEP`")
parser.add_argument("--record-syncs", type=Path, help="a folder to record in what was synced, for a `RecordedDisk`")
parser.add_argument("--no-close", action="store_true", help="end without closing the checkpoints")
parser.add_argument("--full-at", type=int, help="the step at which writing fails, as on a full disk")
parser.add_argument("--die-deleting", action="store_true", help="die when a file of an old step has been deleted")
parser.add_argument("--hang-at", type=int, help="the step after which to hang")
parser.add_argument("--hang-in", type=int, default=0, help="the process that hangs")
parser.add_argument("--flip-at", type=int, help="the step after which a bit flips on the first device of process 1")
parser.add_argument("--verify-every", type=int, help="steps between two comparisons of replicas")
parser.add_argument("--data", action="store_true", help="use a data iterator, which differs between processes")
parser.add_argument("--fallback", action="store_true", help="fall back to an earlier step if one is damaged")
parser.add_argument("--unreadable", choices=["arrays", "manifest", "mark"], help="what process 1 cannot read of step 4")
parser.add_argument("--watchdog", type=float)
parser.add_argument("--copy-to", help="a URL to which steps are copied")
parser.add_argument("--heartbeat", type=int, default=10)
args = parser.parse_args()


class Data:
    """The position of this process in its part of the data."""

    def __init__(self, index):
        self.index, self.at = index, 0

    def get_state(self):
        return {"process": "x" * self.index + str(self.index), "at": self.at}  # of different lengths

    def set_state(self, state):
        assert state["process"] == "x" * self.index + str(self.index), state
        self.at = state["at"]


def make_unreadable(what):
    """Simulates a file system to which one machine has lost the connection, or of which it sees an old version."""
    read, read_manifest, is_complete = (
        orbax.checkpoint.PyTreeCheckpointHandler.restore,
        store.read_manifest,
        store.is_complete,
    )

    def restore(handler, where, *args, **kwargs):
        if "step_4" in str(where):
            raise OSError(f"{where}: the connection is lost")
        return read(handler, where, *args, **kwargs)

    def manifest(directory, step):
        if step == 4:
            raise CheckpointCorrupted("the connection is lost")
        return read_manifest(directory, step)

    if what == "arrays":
        orbax.checkpoint.PyTreeCheckpointHandler.restore = restore
    if what == "manifest":
        store.read_manifest = manifest
    if what == "mark":
        store.is_complete = lambda folder: folder.name != "step_4" and is_complete(folder)


def die_deleting():
    """Sends SIGKILL to this process when the manifest of a step has been deleted."""
    unlink = os.unlink

    def deleted(path, **kwargs):
        unlink(path, **kwargs)
        if os.path.basename(path) == "metadata":
            os.kill(os.getpid(), signal.SIGKILL)

    os.unlink = deleted


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background processes ignore it
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    own = zerojax.initialize(timeout_s=60, heartbeat_s=args.heartbeat)
    zerojax.simulate_devices(args.devices)
    from support.disk import record_syncs
    from support.small_run import ROWS, adam, batch, create, loss, with_flipped_bit

    rows = processes.own_rows(ROWS)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, "bf16")
    state, step = zero.init(create, adam()), zero.train_step(loss)
    if args.unreadable and own.index == 1:
        make_unreadable(args.unreadable)
    if args.die_deleting:
        die_deleting()
    if args.record_syncs:
        record_syncs(Path(args.directory), args.record_syncs)
    options = {"every": args.every, "keep": args.keep, "watchdog_s": args.watchdog}
    options |= {"verify_replicas_every": args.verify_every, "copy_to": args.copy_to}
    checkpoints = zero.checkpoints(args.directory, **options)
    data = Data(own.index) if args.data else None
    state, start = checkpoints.resume(state, data, fallback=args.fallback)
    assert data is None or data.at == start
    print("start", start, flush=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for i in range(start, args.num_steps):
        state, metrics = step(state, {name: a[rows] for name, a in batch(i).items()})
        if i + 1 == args.full_at:
            time.sleep(1)  # so that the previous save ends
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        if i + 1 == args.flip_at:
            state = with_flipped_bit(state, "odd", jax.local_devices()[0].id if own.index == 1 else None)
        if data:
            data.at += 1
        checkpoints.update(state, metrics, data)
        if i + 1 == args.full_at:
            time.sleep(1)  # the save runs in the background
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        print("loss", i + 1, float(metrics["loss"]).hex(), flush=True)
        if args.announce:
            checkpoints.wait()
            if checkpoints._saver.saved_step == i + 1:  # a failure is logged
                print("complete", i + 1, flush=True)
        time.sleep(args.slow if i + 1 >= args.slow_from else 0)
        if i + 1 == args.block_at:
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second waits forever, and no signal interrupts it
        if i + 1 == args.hang_at and own.index == args.hang_in:
            signal.pause()
    if not args.no_close:
        checkpoints.close()
    print("end", os.getpid(), flush=True)


if __name__ == "__main__":
    main()
