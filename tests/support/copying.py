"""A training run that copies its steps to remote storage: copying.py DIRECTORY URL NUM_STEPS. Prints each step."""

import logging
import sys
import time

import zerojax

zerojax.simulate_devices(2)

from support.small_run import adam, batch, create, loss, setting  # noqa: E402
from zerojax.checkpoints import lease, remote_copy  # noqa: E402

lease.EXPIRY_S = 1.0  # of the lease of a run that was killed
remote_copy.STILL_S = 2.0
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)  # absl has configured it
logging.getLogger("absl").setLevel(logging.ERROR)
directory, url, num_steps = sys.argv[1:]


def data(i):
    time.sleep(0.1)
    sys.stdout.write(f"step {i}\n")
    sys.stdout.flush()
    return batch(i)


zero = setting(num_devices=2)
options = {"every": 1, "keep": 2, "copy_to": url}
state = zero.init(create, adam())
zerojax.fit(zero, state, zero.train_step(loss), data, int(num_steps), directory, log_every=1, checkpoints=options)
