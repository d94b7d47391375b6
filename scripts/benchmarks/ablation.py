"""Finds the largest model of each configuration of ZeRO's ablation study whose compiled step fits a device.

    python scripts/benchmarks/ablation.py                # a table; hundreds of devices, no accelerator needed
    python scripts/benchmarks/ablation.py --json --configurations C4 C5

Nothing is allocated and nothing runs. The training step of a GPT is compiled for data x model devices. It fits if the
sum of its arguments, its temporaries and the outputs that are not updated in place is within the budget. The search
ends at a number of layers that fits while two more layers do not. Configurations (section 10.5 of the paper):

    C1  stage 1                                       C3  stage 2
    C2  stage 1, inputs of layers partitioned (P_a)   C4  stage 2, P_a
                                                      C5  stage 2, P_a in host memory (P_a+cpu)

All configurations recompute each layer from its input. Buffers have a constant size (C_B), and the state is updated in
place (M_D).
"""

import argparse
import functools
import json
import math
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the programs are for other devices

CONFIGURATIONS = {
    "C1": (1, {}),
    "C2": (1, {"partition_inputs": True}),
    "C3": (2, {}),
    "C4": (2, {"partition_inputs": True}),
    "C5": (2, {"partition_inputs": True, "offload_inputs": True}),
}
PAPER = {"C1": 40, "C2": 60, "C4": 140, "C5": 150}  # billions of parameters, figure 6


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=25, help="devices along the data axis (default %(default)s)")
    parser.add_argument("--model", type=int, default=16, help="devices along the model axis (default %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=32, metavar="GB", help="memory of a device (default %(default)s)"
    )
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--width", type=int, default=6400)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16, help="sequences per data index (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=51200)
    parser.add_argument("--bucket-mib", type=int, default=256, help="largest buffer of a collective")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def main():
    args = arguments()
    from rich.console import Console

    from zerojax import targets

    devices = targets.devices(f"h100:{args.data * args.model}")
    start, found = time.perf_counter(), {}
    with Console(stderr=True).status("") as status:
        for name in args.configurations:

            @functools.cache
            def step(layers, name=name):
                status.update(f"{name}: {layers} layers")
                measured = measure(name, layers, args, devices)
                status.console.print(f"{name}: {layers} layers, {measured['peak_bytes'] / 1e9:.1f} GB", highlight=False)
                return measured

            layers = largest(lambda layers: step(layers)["peak_bytes"], args.budget * 1e9)
            found[name] = {"layers": layers, **(step(layers) if layers else {})}
    result = {
        "target": f"{args.data} x {args.model}",
        "budget_bytes": args.budget * 1e9,
        "shapes": {key: value for key, value in vars(args).items() if key not in ("json", "configurations")},
        "configurations": found,
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(result)) if args.json else table(result)


def largest(peak, budget, group=2, small=8):
    """The largest number of layers, in steps of `group`, whose peak is within the budget; 0 if `small` is too large.

    Uses the secant method, between the largest known number that fits and the smallest known number that does not.
    """
    if peak(small) > budget:
        return 0
    fits, over = small, math.inf
    before, now = small, small + 4 * group
    while over - fits > group:
        if peak(now) <= budget:
            fits = now
        else:
            over = now
        layer = max(1, (peak(now) - peak(before)) / (now - before))
        room = (budget - peak(now)) / layer + now - small
        guess = small + math.floor(room / group) * group
        before, now = now, min(max(guess, fits + group), over - group)
    return fits


def measure(name, layers, args, devices):
    """The number of parameters, and the memory of the compiled step of a configuration."""
    import gpt
    import jax.numpy as jnp
    import optax

    import zerojax
    from zerojax.analysis.hlo_collectives import peak_bytes

    stage, remat = CONFIGURATIONS[name]
    config = gpt.Config(
        width=args.width, layers=layers, heads=args.heads, vocab=args.vocab, seq=args.seq,
        scan=True, dtype=jnp.bfloat16, annotated=True,
    )  # fmt: skip
    zero = zerojax.Zero(zerojax.make_mesh(model=args.model, devices=devices), stage=stage, precision="bf16")
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    step = zero.train_step(gpt.loss, remat=zerojax.Remat(**remat), bucket_bytes=args.bucket_mib * 2**20)
    start = time.perf_counter()
    traced = step.trace(state, gpt.batch_aval(config, args.rows * args.data))
    # Without a GPU for autotuning, the compiler chooses tiles for some Triton kernels that do not divide the shapes.
    options = {"xla_gpu_enable_triton_gemm": False}
    memory = traced.lower(lowering_platforms=("cuda",)).compile(options).memory_analysis()
    return {
        "parameters": sum(leaf.size for leaf in state.layout.leaves),
        "peak_bytes": peak_bytes(memory),
        "state_bytes": memory.argument_size_in_bytes,
        "temporaries_bytes": memory.temp_size_in_bytes,
        "host_bytes": memory.host_temp_size_in_bytes,
        "compile_s": time.perf_counter() - start,
    }


def table(result):
    from rich.console import Console
    from rich.table import Table

    title = f"Largest model in {result['budget_bytes'] / 1e9:.0f} GB, data x model {result['target']}"
    rows = Table("configuration", "layers", "B parameters", "paper", title=title, title_justify="left")
    for part in ("state", "temporaries", "peak", "host"):
        rows.add_column(f"GB {part}")
    for column in rows.columns[1:]:
        column.justify = "right"
    for name, found in result["configurations"].items():
        if not found["layers"]:
            rows.add_row(name, "none fits")
            continue
        gb = [f"{found[f'{part}_bytes'] / 1e9:.1f}" for part in ("state", "temporaries", "peak", "host")]
        size = f"{found['parameters'] / 1e9:.0f}"
        rows.add_row(name, str(found["layers"]), size, str(PAPER.get(name, "")), *gb)
    Console().print(rows)


if __name__ == "__main__":
    main()
