"""Compares the losses of small steps with state or activations in host memory with those of steps without, on devices.

    python scripts/benchmarks/parity.py                 # on the accelerators of this machine
    python scripts/benchmarks/parity.py --processes 14  # the same, sooner: most of the time is tracing
    python scripts/benchmarks/parity.py --simulate 2 --models odd --forms none params  # on CPU, to try the script

What the tests compare on CPU devices, where host memory is like any other, is compared here where copies take time: a
part that is read before it has arrived, or from a wrong place, changes the losses. Each form trains each model for
`--steps` steps of AdamW with a large learning rate, and all losses have to agree with those of the form `none` (or
`clipped`, for forms that clip) to TOLERANCE of the loss. What an audit of a program finds broken is printed, and is no
failure. Products are computed in full precision (`jax_default_matmul_precision`), and on GPUs without autotuning, so
that the same products have the same rounding. The state is updated in pieces of PIECES_BYTES, so that small models have
several.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of the loss. In bf16 the order of sums differs in the last of 8 bits
PIECES_BYTES = 2**20
ROWS, SEQ = 8, 64  # on each device
MODELS = {  # (shapes, precision, number of microbatches)
    "scanned": ({"width": 256, "layers": 5, "vocab": 512, "scan": True}, "fp32", 1),
    "odd": ({"width": 192, "layers": 3, "vocab": 509, "scan": False}, "fp32", 1),
    "scanned, 4 microbatches": ({"width": 256, "layers": 5, "vocab": 512, "scan": True}, "fp32", 4),
    "odd, 2 microbatches": ({"width": 192, "layers": 3, "vocab": 509, "scan": False}, "fp32", 2),
    "bf16, 2 microbatches": ({"width": 256, "layers": 5, "vocab": 512, "scan": True}, "bf16", 2),
}
FORMS = {  # (offload=, remat= or 'inputs' for those of layers in host memory, clip_norm=)
    "none": ("none", "none", None),
    "clipped": ("none", "none", 0.5),
    "remat": ("none", "full", None),
    "inputs": ("none", "inputs", None),
    "optimizer": ("optimizer", "none", None),
    "optimizer, remat": ("optimizer", "full", None),
    "optimizer, inputs": ("optimizer", "inputs", None),
    "optimizer, clipped": ("optimizer", "full", 0.5),
    "params": ("params", "none", None),
    "params, remat": ("params", "full", None),
    "params, inputs": ("params", "inputs", None),
    "params, clipped": ("params", "full", 0.5),
    "disk": ("disk", "none", None),
    "disk, clipped": ("disk", "full", 0.5),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="(default: all)")
    parser.add_argument("--steps", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that train at the same time (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "FORM"), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--simulate", type=int, metavar="N", help="on N simulated CPU devices")
    args = parser.parse_args()
    if any(reference(form) not in args.forms for form in args.forms):
        parser.error("the other forms are compared with 'none' or 'clipped': add it to --forms")
    return args


def reference(form):
    return "clipped" if FORMS[form][2] else "none"


def main():
    args = arguments()
    if args.run:
        prepare(args.simulate)
        print(json.dumps(losses(*args.run, args.steps)))
        return
    start, runs, found = time.perf_counter(), list(itertools.product(args.models, args.forms)), {}
    with ThreadPoolExecutor(args.processes) as pool:
        answers = {pool.submit(train, run, sys.argv[1:]): run for run in runs}
        for answer in as_completed(answers):
            run, (found[run], broken) = answers[answer], answer.result()
            problems = "; ".join(broken) if isinstance(found[run], list) else found[run]
            print(f"{len(found)} of {len(runs)}: {': '.join(run)} {problems}".rstrip(), file=sys.stderr, flush=True)
    results = {}
    for model, form in runs:
        text, agrees = compared(found[model, form], found[model, reference(form)], TOLERANCE[MODELS[model][1]])
        results[f"{model}: {form}"] = {"losses": found[model, form], "text": text, "agrees": agrees}
        if not args.json:
            print(f"{'ok' if agrees else 'WRONG':6s}{model:26s}{form:20s}{text}")
    right = sum(each["agrees"] for each in results.values())
    if args.json:
        print(json.dumps(results))
    else:
        print(f"{right} of {len(runs)} agree, in {time.perf_counter() - start:.0f} s")
    sys.exit(right < len(runs))


def compared(losses, expected, tolerance):
    """(What to print, whether the losses agree). Either is a text if the run failed."""
    if not isinstance(losses, list) or not isinstance(expected, list):
        return ("it failed" if isinstance(expected, list) else "nothing to compare with"), False
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    same = "bit for bit" if losses == expected else f"difference {max(differences):.1e}"
    agree = all(difference <= tolerance for difference in differences)  # NaN is not
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {same}", agree


def prepare(simulated):
    """Before JAX is imported."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    flags = [os.environ.get("XLA_FLAGS", ""), *([] if simulated else ["--xla_gpu_autotune_level=0"])]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    import jax

    import zerojax
    from zerojax.offload import disk_update, host_pieces

    if simulated:
        zerojax.simulate_devices(simulated)
    host_pieces.PIECES_BYTES = disk_update.RECORD_BYTES = PIECES_BYTES
    jax.config.update("jax_default_matmul_precision", "highest")


def train(run, options):
    """(The losses of a run or its error, what the audit of its program finds broken), from a process of its own."""
    command = [sys.executable, __file__, *options, "--run", *run]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"exit code {done.returncode}: {last}", []


def losses(model, form, steps):
    import gpt
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import zerojax

    shapes, precision, num_microbatches = MODELS[model]
    offload, remat, clip_norm = FORMS[form]
    dtype = jnp.bfloat16 if precision == "bf16" else None
    config = gpt.Config(**shapes, heads=4, seq=SEQ, dtype=dtype)
    where = (
        {"offload": "optimizer", "offload_dir": tempfile.gettempdir()} if offload == "disk" else {"offload": offload}
    )
    zero = zerojax.Zero(zerojax.make_mesh(), 3, precision, **where)
    remat = zerojax.Remat(offload_inputs=True) if remat == "inputs" else remat
    step = zero.train_step(gpt.loss, remat=remat, num_microbatches=num_microbatches, clip_norm=clip_norm)
    state = zero.init(gpt.create(config), optax.adamw(1e-3))
    shape = (ROWS * jax.device_count(), SEQ + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, config.vocab, shape, np.int32)}
    broken = [f"the audit says: {each.name}: {each.found}" for each in step.audit(state, batch).broken]
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found, broken


if __name__ == "__main__":
    main()
