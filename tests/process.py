"""One of several processes that train together: python process.py PORT INDEX COUNT DEVICES STAGE. Prints its losses.

Each passes its own rows of every batch.
"""

import json
import sys

import jax


def main(port, index, count, devices, stage):
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=index)
    import zerojax

    zerojax.simulate_devices(devices)
    import zoo
    from parity import batches, loss_of, optimizer

    model, zero = zoo.ZOO["unused"], zerojax.Zero(zerojax.make_mesh(), stage)
    state, losses = zero.init(model.create, optimizer()), []
    step = zero.train_step(loss_of(model), num_microbatches=4)
    for batch in batches(model, 3):
        own = jax.tree.map(lambda a: a[len(a) // count * index : len(a) // count * (index + 1)], batch)
        state, metrics = step(state, own)
        losses.append(float(metrics["loss"]))
    print(json.dumps({"losses": losses, "devices": jax.device_count()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
