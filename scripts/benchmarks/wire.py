"""Compares what steps send between hosts and within them: one shard for each device, replicas, and hybrid sharding.

    python scripts/benchmarks/wire.py --target h100:32                    # a table, for the GPT of gpt.py
    python scripts/benchmarks/wire.py --target h100:32 --json             # one JSON object
    python scripts/benchmarks/wire.py --model llama3-8b --microbatches 4  # a model of models.py

Each form is compiled for a described cluster, in a process of its own, with `remat='full'` and bf16:

    all      stage 3 over all devices
    replica  stage 3 within each host, all model states replicated over the hosts
    hybrid   the same, with the optimizer's state sharded over all devices: `Zero(outer_sharding='optimizer')`
    int8     as all, with weights and gradients in 8 bits on the wire: `Precision(gather='int8', scatter='int8')`
    both     as hybrid, with the same
    plain    `jit` and `NamedSharding`, sharded over all devices; without microbatches

Bytes between hosts are those that one network card carries, if each device has its own: a ring of m devices of each
host sends over m cards. The formulas, for k microbatches and N devices of each of M hosts, with parameters and
gradients of 2 bytes and sums of microbatches of g (4 if k > 1, otherwise 2), for each parameter: k (4 + 2) (MN - 1) /
MN / N in form all, 2 g (M - 1) / MN in form replica, (g + 2) (M - 1) / MN in form hybrid. Predicted times of GPUs have
links of LINK and cards of NETWORK bytes a second; the limit is the longest of computing and of sending within and
between hosts. On TPUs, slices take the place of hosts.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys

FORMS = ("all", "replica", "hybrid", "int8", "both", "plain")
LINK, NETWORK = 360e9, 50e9


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:32", help="a target of GPUs (default %(default)s)")
    parser.add_argument("--model", help="a model of models.py instead of the GPT")
    parser.add_argument("--layers", type=int, default=16, help="of the GPT (default %(default)s)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 8], help="default: 1 4 8")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="default: all of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)  # (form, microbatches) in a process of its own
    return parser.parse_args()


def main():
    args = arguments()
    if args.compile:
        print(json.dumps(compiled(args, args.compile[0], int(args.compile[1]))))
        return
    from rich.console import Console

    console, forms = Console(stderr=True), {}
    for form in args.forms:
        for k in args.microbatches if form != "plain" else [1]:
            with console.status(f"compiling {form}, k={k}"):
                done = subprocess.run(
                    [sys.executable, *sys.argv, "--compile", form, str(k)], capture_output=True, text=True
                )
            error = {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
            forms[f"{form} k={k}"] = json.loads(done.stdout) if done.returncode == 0 else error
    result = {"target": args.target, "model": args.model or f"gpt-{args.layers}", "forms": forms}
    print(json.dumps(result)) if args.json else table(result)


def compiled(args, form, k):
    """What is in the program of a form with `k` microbatches."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import schedule

    from zerojax import targets
    from zerojax.analysis import hardware, hlo, hlo_collectives
    from zerojax.plan import timeline

    devices, cluster = targets.devices(args.target), hardware.cluster(args.target)
    per_host = cluster.devices_per_slice or cluster.devices_per_host
    num_hosts = len(devices) // per_host
    traced, state, psi = traced_step(args, form, k, devices, num_hosts)
    program, temporaries = schedule.compiled(traced, targets.platform(args.target))
    parsed = hlo.parse_program(program.as_text())
    found = hlo_collectives.compiled_collectives(parsed)

    # What crosses hosts.
    hosts = lambda c: {device // per_host for device in c.group}
    on_cards = lambda c: c.sent_bytes * len(hosts(c)) / c.group_size
    crosses = [c for c in found if len(hosts(c)) > 1]
    inside = [c for c in found if len(hosts(c)) == 1]
    g = 4 if k > 1 else 2
    formulas = {
        "all": k * 6 * (len(devices) - 1) / len(devices) / per_host,
        "replica": 2 * g * (num_hosts - 1) / len(devices),
        "hybrid": (g + 2) * (num_hosts - 1) / len(devices),
    }

    # Predict the time.
    chip = {} if cluster.torus else {"link_rate": hardware.Rate(LINK, 1.0), "network_rate": hardware.Rate(NETWORK, 1.0)}
    priced = dataclasses.replace(cluster, chip=dataclasses.replace(cluster.chip, **chip))
    predicted = timeline.predict(parsed, priced)
    between_bytes, inside_bytes = sum(map(on_cards, crosses)), sum(c.sent_bytes for c in inside)
    within_s = (inside_bytes + sum(c.sent_bytes for c in crosses if c.group_size > len(hosts(c)))) / LINK
    shard = lambda a: a.sharding.shard_shape(a.shape)
    size = lambda a: jax.numpy.dtype(a.dtype).itemsize if a.shape else 0
    return {
        "between_bytes": between_bytes,
        "between_formula_bytes": psi * formulas[form] if form in formulas else None,
        "inside_bytes": inside_bytes,
        "exposed_bytes": sum(c.sent_bytes for c in found if c.exposed),
        "exposed_between_bytes": sum(map(on_cards, [c for c in crosses if c.exposed])),
        "sent_bytes": sum(c.sent_bytes for c in found),
        "state_bytes": sum(size(a) * jax.numpy.prod(jax.numpy.array(shard(a))).item() for a in jax.tree.leaves(state)),
        "peak_bytes": hlo_collectives.peak_bytes(program.memory_analysis(), temporaries),
        "step_s": predicted.step_s,
        "computing_s": predicted.computing_s,
        "limit_s": max(predicted.computing_s, within_s, between_bytes / NETWORK),
    }


def traced_step(args, form, k, devices, num_hosts):
    """(the traced step of a form, its state as avals, the number of parameters)."""
    import gpt
    import jax
    import jax.numpy as jnp
    import models
    import optax
    import plain

    import zerojax

    if args.model:
        model = models.model(args.model)
        create, loss, options, rows = model.create, model.loss, model.options, model.rows
        batch = model.batch_aval(rows * len(devices) * k, model.seq)
    else:
        config = gpt.Config(
            width=4096, layers=args.layers, heads=32, vocab=32768, seq=2048, scan=True, dtype=jnp.bfloat16
        )
        create, loss, options, batch = gpt.create(config), gpt.loss, {}, gpt.batch_aval(config, 2 * len(devices) * k)
    tx = optax.adamw(1e-3)
    if form == "plain":
        if args.model:
            init, step, rows = plain.unedited(model, tx, devices)
        else:
            init, step, rows = plain.layer_by_layer("plain", config, "full", devices)
        state = jax.eval_shape(init)
        batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), batch)
        return step.trace(state, batch), {}, 0
    mesh = zerojax.make_mesh(devices=devices, replica=1 if form in ("all", "int8") else num_hosts)
    outer = "optimizer" if form in ("hybrid", "both") else "none"
    on_wire = {"gather": "int8", "scatter": "int8"} if form in ("int8", "both") else {}
    precision = dataclasses.replace(zerojax.Precision.of("bf16"), **on_wire)
    zero = zerojax.Zero(mesh, 3, precision, outer_sharding=outer, **options)
    state = zero.eval_init(create, tx)
    step = zero.train_step(loss, num_microbatches=k, remat="full")
    return step.trace(state, batch), state, sum(leaf.size for leaf in state.layout.leaves)


def table(result):
    from rich.console import Console
    from rich.table import Table

    title = f"{result['model']} on {result['target']}"
    rows = Table(
        "",
        "between\nMiB",
        "formula\nMiB",
        "inside\nGiB",
        "exposed",
        "state\nGiB",
        "peak\nGiB",
        "ms",
        "limit\nms",
        title=title,
    )
    for column in rows.columns[1:]:
        column.justify = "right"
    mib = lambda size: "" if size is None else f"{size / 2**20:.0f}"
    for name, found in result["forms"].items():
        if "error" in found:
            rows.add_row(name, found["error"][:60])
            continue
        exposed = found["exposed_bytes"] / found["sent_bytes"]
        sizes = (f"{found[key] / 2**30:.2f}" for key in ("state_bytes", "peak_bytes"))
        times = (f"{found[key] * 1e3:.0f}" for key in ("step_s", "limit_s"))
        between = mib(found["between_bytes"]), mib(found["between_formula_bytes"])
        rows.add_row(name, *between, f"{found['inside_bytes'] / 2**30:.1f}", f"{exposed:.1%}", *sizes, *times)
    Console().print(rows)


if __name__ == "__main__":
    main()
