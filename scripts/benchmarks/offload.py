"""Finds the largest GPT whose compiled step fits a device and its host: offloaded, in few bits, and neither.

    python scripts/benchmarks/offload.py --target h100:1                    # tables
    python scripts/benchmarks/offload.py --target h200:1 --host-gib 128 --json
    python scripts/benchmarks/offload.py --target v5p:2x2x1                 # a compilation takes about a minute

Nothing is allocated and nothing runs. A GPT of scanned layers (bf16, AdamW, `remat='full'`, stage 3) is compiled for a
described cluster. It fits if arguments, temporaries and outputs that are not updated in place are within the share
`--memory` of a device, and what is in pinned host memory is within the share of the host that each device has. The
search ends at a number of layers that fits while two more layers do not. Sizes that are a fifth too large by formula
are not compiled. XLA schedules for the share `--memory` too, as in a process with this
`XLA_PYTHON_CLIENT_MEM_FRACTION`; in a program that takes more, no copy overlaps with another.

The forms are plain AdamW; `offload='optimizer'`; moments in 8 bits and parameters in bf16 without a master copy; an
offloaded optimizer with moments in 16 and in 8 bits and such parameters; and `offload='params'` with AdamW and with
these moments. The second table compares them at the largest size of the first, for several numbers of microbatches,
whether or not they fit. Times are predicted by `zerojax.plan.timeline`. A device waits for copies while it computes
nothing; the share is that of the time in which the host's link is busy in the busier direction. A copy is alone if
neither a matrix product nor an update of as many bytes is scheduled beside it. The formula is that of `step.memory`.
"""

import argparse
import functools
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the programs are for other devices

# name: (offload=, precision=, bits of moments without a master copy)
FORMS = {
    "none": ("none", "bf16", None),
    "optimizer": ("optimizer", "bf16", None),
    "8 bits": ("none", "bf16_params", 8),
    "optimizer, 8 bits": ("optimizer", "bf16_params", 8),
    "optimizer, 16 bits": ("optimizer", "bf16_params", 16),
    "params": ("params", "bf16", None),
    "params, 16 bits": ("params", "bf16_params", 16),
    "params, 8 bits": ("params", "bf16_params", 8),
}
_TOO_LARGE = 1.2  # a share of the memory, by formula, from which on nothing is compiled


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:1", help="a target of zerojax.targets (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--memory", type=float, default=0.9, help="share of a device's memory (default %(default)s)")
    parser.add_argument(
        "--host-gib", type=float, default=128, help="pinned host memory for each device (default %(default)s)"
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="sequences on each device (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--microbatches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--attention", choices=["cudnn", "xla"], help="(default: cudnn on GPUs, xla on TPUs)")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS), help="the forms (default all)")
    return parser.parse_args()


def main():
    args = arguments()
    from ablation import largest
    from rich.console import Console
    from timing import versions

    from zerojax import targets
    from zerojax.analysis.hardware import cluster

    args.attention = args.attention or ("cudnn" if targets.platform(args.target) == "cuda" else "xla")
    devices, budget = targets.devices(args.target), args.memory * cluster(args.target).chip.memory_bytes
    start, found, compared, console = time.perf_counter(), {}, [], Console(stderr=True)
    with console.status("") as status:

        @functools.cache
        def step(form, layers, microbatches=1):
            name = f"{form}: {layers} layers, microbatches: {microbatches}"
            status.update(name)
            found = measure(form, layers, microbatches, args, devices)
            sizes = f"{found['peak_bytes'] / 2**30:.1f} and {found['host_bytes'] / 2**30:.1f} GiB"
            line = f"{name}; {sizes}, {found['step_s']:.2f} s; compiled in {found['compile_s']:.0f} s"
            console.print(line, soft_wrap=True)
            return found

        def used(form, layers):
            """Bytes of a device, or of the host where a larger share of it is used: as a share of the budget."""
            of = lambda peak, host: max(peak, host * budget / (args.host_gib * 2**30))
            train_step, *inputs = build(form, layers, 1, args, devices)
            memory = train_step.memory(*inputs)
            by_formula = of(memory.peak_bytes, memory.host_bytes)
            if by_formula > _TOO_LARGE * budget:
                return by_formula
            measured = step(form, layers)
            return of(measured["peak_bytes"], measured["host_bytes"])

        for form in args.forms:
            layers = largest(functools.partial(used, form), budget)
            found[form] = {"layers": layers, **(step(form, layers) if layers else {})}
        layers = found[args.forms[0]]["layers"]
        for microbatches in args.microbatches if layers else ():
            row = {form: step(form, layers, microbatches) for form in args.forms}
            compared.append({"microbatches": microbatches, **row})
    result = {
        "target": args.target,
        "budget_bytes": budget,
        "shapes": {key: value for key, value in vars(args).items() if key not in ("json", "target")},
        "versions": versions(),
        "largest": found,
        "compared": compared,
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(result)) if args.json else tables(result)


def build(form, layers, microbatches, args, devices):
    """(A step, its state and batch as avals)."""
    import gpt
    import jax.numpy as jnp
    import optax

    import zerojax

    shapes = {"width": args.width, "heads": args.heads, "vocab": args.vocab, "seq": args.seq}
    config = gpt.Config(**shapes, layers=layers, scan=True, dtype=jnp.bfloat16, attention=args.attention)
    offload, precision, bits = FORMS[form]
    tx = optax.adamw(1e-3)
    if bits:
        tx = zerojax.stochastic_rounding(zerojax.low_bit_moments(tx, bits))
    zero = zerojax.Zero(zerojax.make_mesh(devices=devices), stage=3, precision=precision, offload=offload)
    state = zero.eval_init(gpt.create(config), tx)
    batch = gpt.batch_aval(config, args.rows * microbatches * len(devices))
    return zero.train_step(gpt.loss, remat="full", num_microbatches=microbatches), state, batch


def measure(form, layers, microbatches, args, devices):
    """The number of parameters, the memory and the predicted time of a compiled step."""
    from schedule import compiled

    from zerojax.analysis import hlo, hlo_costs
    from zerojax.analysis.hardware import cluster
    from zerojax.analysis.hlo_collectives import peak_bytes
    from zerojax.plan import timeline
    from zerojax.plan.program import scheduling_options

    step, state, batch = build(form, layers, microbatches, args, devices)
    start, formula = time.perf_counter(), step.memory(state, batch)
    chip = cluster(args.target).chip
    options = scheduling_options(chip, formula.arguments_bytes, int(args.memory * chip.memory_bytes))
    program, temporaries = compiled(step.trace(state, batch), chip.platform, options)
    memory = program.memory_analysis()
    parsed = hlo.parse_program(program.as_text())
    predicted, copies = timeline.predict(parsed, cluster(args.target)), hlo_costs.read_host_copies(parsed)
    lanes = [predicted.busy_s.get(lane, 0.0) for lane in (hlo_costs.FROM_HOST, hlo_costs.TO_HOST)]
    copying_s = max(lanes)
    return {
        "parameters": sum(leaf.size for leaf in state.layout.leaves),
        "peak_bytes": peak_bytes(memory, temporaries),
        "formula_bytes": formula.peak_bytes,
        "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        "host_temporaries_bytes": memory.host_temp_size_in_bytes,
        "copied_bytes": sum(copy.num_bytes for copy in copies),
        "alone_bytes": sum(copy.num_bytes for copy in copies if copy.alone),
        "step_s": predicted.step_s,
        "computing_s": predicted.computing_s,
        "copying_s": copying_s,
        "waiting_share": predicted.waiting_s / copying_s if copying_s else 0.0,
        "tokens_per_s": args.rows * microbatches * args.seq * len(devices) / predicted.step_s,
        "compile_s": time.perf_counter() - start,
    }


def tables(result):
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 140)
    gib = lambda size: f"{size / 2**30:.1f}"
    shapes = result["shapes"]
    title = f"Largest model on {result['target']}: {gib(result['budget_bytes'])} GiB of a device"
    rows = Table(
        "form", "layers", "B parameters", "GiB on a device", "of formula", "GiB on the host", "GiB copied", "alone",
        "s", "computes s", title=f"{title}, {shapes['host_gib']:g} GiB of its host", title_justify="left",
    )  # fmt: skip
    for name, found in result["largest"].items():
        if not found["layers"]:
            rows.add_row(name, "none fits")
            continue
        peak = found["peak_bytes"]
        sizes = gib(peak), f"{peak / found['formula_bytes']:.2f}", gib(found["host_bytes"]), gib(found["copied_bytes"])
        alone = f"{found['alone_bytes'] / found['copied_bytes']:.0%}" if found["copied_bytes"] else ""
        seconds = f"{found['step_s']:.2f}", f"{found['computing_s']:.2f}"
        rows.add_row(name, str(found["layers"]), f"{found['parameters'] / 1e9:.2f}", *sizes, alone, *seconds)
    right(rows)
    console.print(rows)
    rows = Table(
        "microbatches", "form", "GiB on a device", "s", "waits, of copies", "tokens/s",
        title="The largest model of the first form", title_justify="left",
    )  # fmt: skip
    for compared in result["compared"]:
        for name in shapes["forms"]:
            found = compared[name]
            rows.add_row(
                str(compared["microbatches"]), name, gib(found["peak_bytes"]), f"{found['step_s']:.2f}",
                f"{found['waiting_share']:.0%}" if found["copying_s"] else "", f"{found['tokens_per_s']:,.0f}",
            )  # fmt: skip
    right(rows)
    console.print(rows)


def right(table):
    for column in table.columns[1:]:
        column.justify = "right"


if __name__ == "__main__":
    main()
