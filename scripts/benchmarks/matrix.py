"""Compares the update of Muon with each matrix whole on one device, with that of GSPMD, and with AdamW.

    python scripts/benchmarks/matrix.py --target h100:8                  # a table, for the GPT of gpt.py
    python scripts/benchmarks/matrix.py --target h100:8 --json           # one JSON object
    python scripts/benchmarks/matrix.py --model qwen3-8b --target h100:64
    python scripts/benchmarks/matrix.py --target cpu                     # runs small models on eight simulated devices

Muon is `optax.contrib.muon` for the matrices of layers, and AdamW for all else. Each form is compiled for a described
cluster, in a process of its own, at stage 3, with `remat='full'` and bf16:

    owners   zerojax: matrices of equal shapes are divided among the devices
    gspmd    the update left to the compiler, as it would be in a `jit`
    adamw    AdamW for all parameters

Bytes of the update are those of the step, less those of AdamW's. The formula is 2 (N - 1) / N of the fp32 bytes of the
matrices that a device has a shard of. The flops are those of the products of the step, less those of AdamW's; their
share is N times those of a device over the sum of all matrices, as traced for one device.
"""

import argparse
import json
import math
import os
import time

from forms import compiled_forms

FORMS = ("owners", "gspmd", "adamw")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8", help="a target, or cpu (default %(default)s)")
    parser.add_argument("--model", help="a model of models.py instead of the GPT")
    parser.add_argument("--layers", type=int, default=16, help="of the GPT (default %(default)s)")
    parser.add_argument("--unrolled", action="store_true", help="the GPT as a list of layers instead of a scan")
    parser.add_argument("--microbatches", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--offload", default="none", help="of Zero (default %(default)s)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="default: all of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # a form, in a process of its own
    return parser.parse_args()


def main():
    args = arguments()
    if args.compile:
        print(json.dumps(compiled(args, args.compile)))
        return
    if args.target == "cpu":
        result = {"target": "cpu", "forms": timed(args)}
    else:
        result = {"target": args.target, "model": args.model or f"gpt-{args.layers}", "forms": forms_of(args)}
    print(json.dumps(result)) if args.json else table(result)


def forms_of(args):
    """What is in the programs of all forms."""
    found = compiled_forms(dict.fromkeys(["adamw", *args.forms]))
    base = found["adamw"]
    for form in found.values():
        if "error" in form or "error" in base:
            continue
        form["update_sent_bytes"] = form["sent_bytes"] - base["sent_bytes"]
        form["update_collectives"] = form["collectives"] - base["collectives"]
        flops = form["flops"] - base["flops"]
        form["flops_share"] = flops * form["num_devices"] / form["update_flops"] if form["update_flops"] else 0.0
        form["step_ratio"] = form["step_s"] / base["step_s"]
    return found


def dimension_numbers(path, a):
    """How Muon reads a parameter as matrices: [.., in, out], or None for AdamW. Dim 0 of a stack counts layers."""
    import jax
    from optax.contrib import MuonDimensionNumbers

    parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    first = int(not any(part.isdigit() for part in parts))
    is_layer = any("block" in part.lower() or part.startswith("layers") for part in parts)
    dims = tuple(range(first, a.ndim))
    if not is_layer or len(dims) < 2:
        return None
    inputs = len(dims) - 1 if parts[-2].startswith("o") else 1  # heads are inputs of the output projection
    return MuonDimensionNumbers(dims[:inputs], dims[inputs:])


def optimizer(form):
    """Muon for the matrices of layers, or AdamW."""
    import jax
    import optax
    from optax.contrib import muon

    if form == "adamw":
        return optax.adamw(1e-3)
    return muon(
        1e-3, muon_weight_dimension_numbers=lambda tree: jax.tree_util.tree_map_with_path(dimension_numbers, tree)
    )


def prepare(form):
    """Leaves the update to the compiler, in the form that has it so."""
    from zerojax.step import owned_update, update

    update.owned_update = owned_update.owned_update
    if form == "gspmd":
        update.owned_update = lambda *_: None


def compiled(args, form):
    """What is in the program of a form."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import gpt
    import jax
    import jax.numpy as jnp
    import models
    import schedule
    from plain import num_slices

    import zerojax
    from zerojax import targets
    from zerojax.analysis import hardware, hlo, hlo_collectives, jaxpr_counts
    from zerojax.plan import timeline

    prepare(form)
    devices = targets.devices(args.target)
    if args.model:
        model = models.model(args.model)
        create, loss, options = model.create, model.loss, model.options
        batch = model.batch_aval(model.rows * len(devices) * args.microbatches, model.seq)
    else:
        config = gpt.Config(
            width=4096,
            layers=args.layers,
            heads=32,
            vocab=32768,
            seq=2048,
            scan=not args.unrolled,
            dtype=jnp.bfloat16,
        )
        create, loss, options = gpt.create(config), gpt.loss, {}
        batch = gpt.batch_aval(config, 2 * len(devices) * args.microbatches)
    mesh = zerojax.make_mesh(devices=devices, replica=num_slices(devices))
    zero, tx = zerojax.Zero(mesh, 3, "bf16", offload=args.offload, **options), optimizer(form)
    state = zero.eval_init(create, tx)
    traced = zero.train_step(loss, num_microbatches=args.microbatches, remat="full").trace(state, batch)
    program, temporaries = schedule.compiled(traced, targets.platform(args.target))
    parsed = hlo.parse_program(program.as_text())
    sent = [c for c in hlo_collectives.compiled_collectives(parsed) if c.full_bytes > 256]
    predicted = timeline.predict(parsed, hardware.cluster(args.target))

    # The products of the update on one device, and what they are computed from.
    trained = state.layout.trained_avals()
    opt_state = jax.eval_shape(tx.init, trained)
    update = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(trained, opt_state, trained)
    with_paths = jax.tree_util.tree_leaves_with_path(trained)
    size = sum(math.prod(a.shape) for path, a in with_paths if dimension_numbers(path, a)) if form != "adamw" else 0
    n = len(devices)
    return {
        "num_devices": n,
        "sent_bytes": sum(c.sent_bytes for c in sent),
        "collectives": len(sent),
        "exposed_bytes": sum(c.sent_bytes for c in sent if c.exposed),
        "formula_bytes": 2 * (n - 1) / n * 4 * size / n,
        "flops": flops_of(parsed.entry.instructions),
        "update_flops": sum(product.flops for product in jaxpr_counts.products(update.jaxpr.eqns)),
        "peak_bytes": hlo_collectives.peak_bytes(program.memory_analysis(), temporaries),
        "step_s": predicted.step_s,
        "computing_s": predicted.computing_s,
    }


def flops_of(instructions):
    """The flops of the products of some instructions, of the longest branch where there are several."""
    from zerojax.analysis import hlo, hlo_costs

    total = 0
    for i in instructions:
        if i.op in ("while", "call", "conditional"):
            inner = [flops_of(computation.instructions) for computation in i.computations]
            total += max(inner) if i.op == "conditional" else sum(inner) * (hlo.trip_count(i) if i.op == "while" else 1)
        else:
            total += hlo_costs.dot_flops(i)
    return total


def timed(args):
    """Seconds of a step on eight simulated devices, with a small model: medians of runs in turn."""
    os.environ["NPROC"] = "24"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import statistics

    import gpt
    import jax
    import jax.numpy as jnp

    import zerojax

    config = gpt.Config(width=256, layers=8, heads=4, vocab=256, seq=64, scan=not args.unrolled)
    batch = {"tokens": jnp.zeros((8, config.seq + 1), jnp.int32)}
    running = {}
    for form in args.forms:
        prepare(form)
        zero = zerojax.Zero(zerojax.make_mesh())
        state, step = zero.init(gpt.create(config), optimizer(form)), zero.train_step(gpt.loss)
        running[form] = step, step(state, batch)[0]
    seconds = {form: [] for form in running}
    for _ in range(12):
        for form, (step, state) in running.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            seconds[form].append(time.perf_counter() - start)
            running[form] = step, state
    return {form: {"step_s": statistics.median(each)} for form, each in seconds.items()}


def table(result):
    from rich.console import Console
    from rich.table import Table

    title = f"{result.get('model', 'a small GPT')} on {result['target']}"
    columns = ("", "update\nMiB", "formula\nMiB", "collec-\ntives", "flops\nshare", "peak\nGiB", "ms", "of\nAdamW")
    rows = Table(*columns, title=title)
    for column in rows.columns[1:]:
        column.justify = "right"
    for name, found in result["forms"].items():
        if "error" in found:
            rows.add_row(name, found["error"][:60])
            continue
        of_program = [""] * 5
        if "flops_share" in found:
            mib = (f"{found[key] / 2**20:.0f}" for key in ("update_sent_bytes", "formula_bytes"))
            share = f"{found['flops_share']:.2f}"
            of_program = [*mib, str(found["update_collectives"]), share, f"{found['peak_bytes'] / 2**30:.1f}"]
        ratio = f"{found['step_s'] / result['forms']['adamw']['step_s']:.3f}" if "adamw" in result["forms"] else ""
        rows.add_row(name, *of_program, f"{found['step_s'] * 1e3:.0f}", ratio)
    Console().print(rows)


if __name__ == "__main__":
    main()
