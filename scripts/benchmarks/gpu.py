"""Measures training steps on the GPUs of this machine: zerojax against plain JAX, `remat` and `offload`.

    python scripts/benchmarks/gpu.py                  # a table
    python scripts/benchmarks/gpu.py --json           # one JSON object
    python scripts/benchmarks/gpu.py --json gpu.json  # a table, and the object in a file
    python scripts/benchmarks/gpu.py --json gpu.json --parity 14 --disk /mnt/nvme  # all, and the losses of parity.py
    python scripts/benchmarks/gpu.py --forms full optimizer params --microbatches 4
    python scripts/benchmarks/gpu.py --simulate 2 --width 64 --heads 4 --seq 16 --vocab 64  # on CPU, to try the script

A scanned GPT in bf16 with a norm before its head, AdamW and attention by cuDNN, on all devices. Forms:

    plain      the plain form of schedule.py: `jit` and `NamedSharding`, weights cast to bf16 once per step, each layer
               in `jax.checkpoint`
    full       zerojax at stage 3 with remat='full': like `plain`, saves the inputs of the layers and recomputes the
               rest
    dots       zerojax at stage 3 with remat='dots', the default on GPUs: recomputes what is cheap
    list       like `dots`, with `layers='list'`: no loop over layers
    four       like `dots`, with `layers=4`: four layers in an iteration
    none       zerojax at stage 3 with remat='none': saves all that the backward pass needs
    offloaded  like `full`, with the inputs of the layers in host memory
    optimizer  like `full`, with the optimizer's state in host memory
    params     like `full`, with the parameters and the optimizer's state in host memory
    disk       like `full`, with the optimizer's state in a file in `--disk`; only with this option

Runs are paired: in each round every form has a process of its own, which creates the state, takes one step that is not
timed, and then `--steps` timed steps; the order rotates. The ratio is the median over the rounds of the time of `full`
relative to that of `plain`. Losses start from the same weights; in bf16 they may differ from those of the first form by
TOLERANCE. The plain form has no microbatches. A form that fails, or whose process
is killed, is reported, and the others go on. With `--parity`, one call and one file have all that a GPU can show.

The model's flops are 6 Psi + 12 L S d per token, for Psi parameters without the embedding table, L layers, sequences of
S tokens and width d. They count the matrix products of the forward and the backward pass, and attention as if it were
not causal, but no recomputation. Model flop utilization (mfu) is relative to the peak of the device in bf16 without
sparsity; `measured_flops` is the rate that products of square matrices reach on it.

Peak memory is that of `memory_stats()`, which does not count memory that JAX preallocates; `init` is the peak before
the first step. The compiled peak is the sum of arguments, temporaries and outputs that are not aliased with an
argument. The formula and the host memory are those of `step.memory`. The predicted time is that of
`zerojax.plan.timeline` for the same compiled program. What an audit of it finds broken is printed. Without `--layers`,
the number of layers is chosen to fill FILL of the memory that JAX may use (see `fitting_layers`), which is
XLA_CLIENT_MEM_FRACTION of the device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from timing import ratio, rotated

OURS = {  # (remat=, offload=)
    "full": ("full", "none"),
    "dots": ("dots", "none"),
    "list": ("dots", "none"),
    "four": ("dots", "none"),
    "none": ("none", "none"),
    "offloaded": ({"offload_inputs": True}, "none"),
    "optimizer": ("full", "optimizer"),
    "params": ("full", "params"),
    "disk": ("full", "optimizer"),
}
LAYERS = {"list": "list", "four": 4}
FORMS = ("plain", *OURS)
SHAPES = ("width", "heads", "seq", "rows", "microbatches", "vocab", "steps", "rounds")  # reported with the results
FILL = 0.85  # by a formula that overestimates what compilers save: on an H100 the compiled peak is near 0.7
FOUND = (
    "losses", "broken", "peak_bytes", "init_peak_bytes", "compiled_peak_bytes", "formula_bytes", "host_bytes",
    "predicted_s", "compile_s", "step_s",
)  # fmt: skip
OUT_OF_MEMORY = "out of memory"
TOLERANCE = 0.05  # for a loss near log(vocab). A guess: a wrong gradient changes it by tenths after a few steps


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="print or write one JSON object")
    parser.add_argument("--forms", nargs="+", choices=FORMS, help="(default: all)")
    parser.add_argument(
        "--layers", type=int, help="(default: enough to fill the memory; 2 if the devices report no limit)"
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4, help="sequences on each device (default %(default)s)")
    parser.add_argument("--microbatches", type=int, default=1, help="of `--rows` each (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--attention", choices=["cudnn", "xla"], help="(default: cudnn, and xla on simulated devices)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per run (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="paired runs (default %(default)s)")
    parser.add_argument("--disk", metavar="DIRECTORY", help="on a local disk, for the form `disk`")
    parser.add_argument("--simulate", type=int, metavar="N", help="on N simulated CPU devices")
    parser.add_argument("--parity", type=int, metavar="PROCESSES", help="also run parity.py, in so many processes")
    parser.add_argument("--measure", choices=["device", *FORMS], help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    args.attention = args.attention or ("xla" if args.simulate else "cudnn")
    if not args.forms:
        forms = FORMS if args.microbatches == 1 else tuple(OURS)
        args.forms = tuple(name for name in forms if name != "disk" or args.disk)
    if "disk" in args.forms and not args.disk:
        parser.error("the form disk needs --disk DIRECTORY")
    if "plain" in args.forms and args.microbatches > 1:
        parser.error("the plain form has no microbatches: leave it out of --forms, or --microbatches")
    return args


def main():
    args = arguments()
    if args.measure:
        if args.simulate:
            import zerojax

            zerojax.simulate_devices(args.simulate)
        print(json.dumps(device(args) if args.measure == "device" else form(args)))
        return
    with tempfile.TemporaryDirectory() as cache:  # the rounds share the programs
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        result = measured("device")
        layers = str(result["shapes"]["layers"])
        runs = {name: [] for name in args.forms}
        for i in range(args.rounds):
            for name in rotated(list(runs), i):
                if not (runs[name] and runs[name][-1]["error"]):
                    runs[name].append(measured(name, "--layers", layers))
    result |= summary(runs, result["model_flops"], result["peak_flops"])
    if args.parity:
        command = [sys.executable, Path(__file__).with_name("parity.py"), "--json", "--processes", str(args.parity)]
        simulated = ["--simulate", str(args.simulate)] if args.simulate else []
        answer = subprocess.run([*command, *simulated], stdout=subprocess.PIPE, text=True).stdout.splitlines()
        result["parity"] = json.loads(answer[-1]) if answer else None
    if args.json != "-":
        table(result)
    if args.json:
        text = json.dumps(result)
        print(text) if args.json == "-" else Path(args.json).write_text(text)
    failed = [name for name, form in result["forms"].items() if form["error"] and OUT_OF_MEMORY not in form["error"]]
    if failed:
        sys.exit(f"{', '.join(failed)}: failed")
    if not result["max_loss_difference"] <= TOLERANCE:
        sys.exit(f"the forms compute different losses: they differ by {result['max_loss_difference']:.3g}")
    if args.parity and not (result["parity"] and all(run["agrees"] for run in result["parity"].values())):
        sys.exit("parity: some forms compute other losses than the form that offloads nothing")


def measured(what, *options):
    """The measurements of a separate process. Only one process at a time uses the devices, and this one never does.

    A process that ends without an answer has an error that says how.
    """
    command = [sys.executable, __file__, *sys.argv[1:], *options, "--measure", what]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if what == "device":
        sys.exit(f"the device cannot be measured: exit code {done.returncode}")
    return {"error": f"the process ended with exit code {done.returncode}"}


def device(args):
    """What all forms are compared with."""
    import jax
    from timing import versions

    chip = chip_of(jax.devices()[0])
    limit_bytes = memory_stat("bytes_limit")
    config = gpt_config(args, limit_bytes)
    return {
        "measured_flops": measured_flops(),
        "model_flops": model_flops(config) * args.rows * args.microbatches * args.seq,  # of one device
        "shapes": {name: getattr(args, name) for name in SHAPES} | {"layers": config.layers},
        "peak_flops": chip.flops.peak if chip else None,
        "versions": versions(),
        "device": {"kind": jax.devices()[0].device_kind, "count": jax.device_count(), "limit_bytes": limit_bytes},
    }


def form(args):
    """One round of a form: seconds of a step, losses, and what its program says."""
    measured = Form(args.measure, gpt_config(args, None), args)
    measured.attempt(measured.compile)
    measured.attempt(measured.run, args.steps)
    return measured.found


def summary(runs, flops, peak_flops):
    """The rounds of each form together, and the forms compared."""
    forms, seconds, losses = {}, {}, {}
    for name, rounds in runs.items():
        error = next((each["error"] for each in rounds if each["error"]), None)
        timed = [each["step_s"] for each in rounds if not each["error"]]
        found = {key: rounds[0].get(key) for key in FOUND}
        if timed and not error:
            seconds[name], losses[name] = timed, found["losses"]
        step_s = statistics.median(timed) if timed and not error else None
        mfu = flops / step_s / peak_flops if step_s and peak_flops else None
        forms[name] = found | {"step_s": step_s, "mfu": mfu, "error": error}
    reference = next(iter(losses.values()), [])
    differences = [abs(a - b) for series in losses.values() for a, b in zip(series, reference, strict=bool(reference))]
    return {
        "ratio": ratio(seconds["full"], seconds["plain"]) if {"full", "plain"} <= seconds.keys() else None,
        "mfu": max((each["mfu"] for each in forms.values() if each["mfu"]), default=None),
        "max_loss_difference": max(differences, default=0.0, key=lambda d: (d != d, d)),  # NaN if there is one
        "forms": forms,
    }


def chip_of(device):
    """The rates of a kind of device; None for a CPU, and if they are not known."""
    from zerojax.analysis.hardware import CHIPS

    known = (chip for chip in CHIPS.values() if chip.platform != "cpu" and device.device_kind in chip.device_kinds)
    return next(known, None)


def memory_stat(name):
    """The largest value of a memory statistic over the local devices; None if a device does not report it."""
    import jax

    stats = [device.memory_stats() for device in jax.local_devices()]
    return max(each[name] for each in stats) if all(stats) else None


class Form:
    """A compiled step with its measured times and memory."""

    def __init__(self, name, config, args):
        self.name, self.config, self.rows, self.num_microbatches = name, config, args.rows, args.microbatches
        self.where = {"offload_dir": args.disk} if name == "disk" else {}
        self.found = {**dict.fromkeys(FOUND), "error": None, "broken": [], "losses": []}

    def attempt(self, measure, *args):
        """Calls `measure(*args)` and records an error, so that the other forms go on. Does nothing after an error."""
        if self.found["error"]:
            return
        start = time.perf_counter()
        try:
            measure(*args)
            print(f"{self.name}: {measure.__name__} took {time.perf_counter() - start:.1f} s", file=sys.stderr)
        except Exception as error:
            traceback.print_exc()
            what = OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in str(error) else type(error).__name__
            self.found["error"] = f"{what}: " + " ".join(str(error).split())[:200]

    def compile(self):
        import gpt
        import jax
        import numpy as np
        import plain

        from zerojax.analysis.hlo_collectives import peak_bytes

        batch = gpt.batch_aval(self.config, self.rows * self.num_microbatches * jax.device_count())
        if self.name == "plain":
            self.init, step, rows = plain.layer_by_layer("plain", self.config, "full", jax.devices())
            state = jax.eval_shape(self.init)
            batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), batch)
        else:
            self.init, step, state = self.ours()
        start = time.perf_counter()
        compiled = step.trace(state, batch).lower().compile()
        self.found["compile_s"] = time.perf_counter() - start
        self.step = step if self.where else compiled  # Python runs a part of it
        self.found["compiled_peak_bytes"] = peak_bytes(compiled.memory_analysis())
        if self.name != "plain":
            self.analyze(step, compiled, state, batch)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab, batch["tokens"].shape, np.int32)
        self.batch = jax.device_put({"tokens": tokens}, compiled.input_shardings[0][1])

    def ours(self):
        """(`init() -> state`, the step, its state as avals) of zerojax."""
        import gpt
        import jax
        import optax

        import zerojax

        remat, offload = OURS[self.name]
        zero = zerojax.Zero(zerojax.make_mesh(), stage=3, precision="bf16", offload=offload, **self.where)
        model, tx = gpt.create(self.config), optax.adamw(1e-3)
        state = zero.eval_init(model, tx)
        remat = zerojax.Remat(**remat) if isinstance(remat, dict) else remat
        options = {"remat": remat, "num_microbatches": self.num_microbatches, "layers": LAYERS.get(self.name)}
        step = zero.train_step(gpt.loss, **options)
        avals, tree = jax.tree.flatten(state)
        leaves = lambda: jax.tree.leaves(zero.init(model, tx))
        if offload == "none":  # jitted once, because `Zero.init` compiles each time
            leaves = jax.jit(leaves, out_shardings=[a.sharding for a in avals])
        return lambda: jax.tree.unflatten(tree, leaves()), step, state

    def analyze(self, step, compiled, state, batch):
        """What zerojax says of the compiled program: its memory by formula, its time, and what is broken."""
        import jax

        import zerojax
        from zerojax.analysis import hlo
        from zerojax.analysis.hardware import cluster
        from zerojax.plan import timeline

        memory = step.memory(state, batch)
        self.found |= {"formula_bytes": memory.peak_bytes, "host_bytes": memory.host_bytes}
        audit = zerojax.audit_step(compiled, step.expectation(state, batch))
        self.found["broken"] = [f"{each.name}: expected {each.expected}, found {each.found}" for each in audit.broken]
        chip = chip_of(jax.devices()[0])
        if chip:
            target = cluster(f"{chip.name}:{jax.device_count()}")
            self.found["predicted_s"] = timeline.predict(hlo.parse_program(compiled.as_text()), target).step_s

    def run(self, steps):
        """Measures the mean seconds of `steps` steps, after one that is not timed, and the losses of all."""
        import jax

        state, losses = jax.block_until_ready(self.init()), []
        self.found["init_peak_bytes"] = memory_stat("peak_bytes_in_use")
        for i in range(steps + 1):
            if i == 1:
                jax.block_until_ready(state)
                start = time.perf_counter()
            state, metrics = self.step(state, self.batch)
            losses.append(metrics["loss"])
        jax.block_until_ready((state.params, losses) if self.name != "plain" else state)
        step_s = (time.perf_counter() - start) / steps
        peak_bytes = memory_stat("peak_bytes_in_use")
        self.found |= {"step_s": step_s, "peak_bytes": peak_bytes, "losses": [float(loss) for loss in losses]}


def gpt_config(args, limit_bytes):
    import gpt
    import jax.numpy as jnp

    layers = args.layers or (fitting_layers(args, limit_bytes) if limit_bytes else 2)
    shapes = {"width": args.width, "layers": layers, "heads": args.heads, "vocab": args.vocab, "seq": args.seq}
    return gpt.Config(**shapes, scan=True, dtype=jnp.bfloat16, attention=args.attention, final_norm=True)


def model_flops(config):
    """Flops per token: 6 Psi + 12 L S d. Psi counts the head, but not the embedding table of the same size."""
    import gpt

    layer, table = sum(gpt.layer_sizes(config)), config.vocab * config.width
    return 6 * (config.layers * layer + table) + 12 * config.layers * config.seq * config.width


def fitting_layers(args, limit_bytes):
    """The number of layers that fills FILL of the memory if all activations are saved.

    On one of N devices, each parameter takes 16 / N bytes (weights and gradients in bf16, an fp32 copy and two
    moments), and each layer also takes its saved activations. In addition to the layers there are the embedding table,
    the head, and 12 bytes per logit (bf16 and fp32, each with its gradient).
    """
    import gpt
    import jax
    import jax.numpy as jnp
    from flax import nnx

    config = gpt.Config(
        width=args.width, heads=args.heads, vocab=args.vocab, seq=args.seq, dtype=jnp.bfloat16, attention=args.attention
    )
    layer, table = sum(gpt.layer_sizes(config)), config.vocab * config.width
    num_devices, tokens = jax.device_count(), args.rows * args.seq

    def residuals(x_BSD):
        graph, weights = nnx.split(gpt.Block(config, nnx.Rngs(0)))
        weights = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
        return jax.vjp(lambda weights, x_BSD: nnx.merge(graph, weights)(x_BSD), weights, x_BSD)[1]

    x_BSD = jax.ShapeDtypeStruct((args.rows, args.seq, args.width), jnp.bfloat16)
    saved = jax.tree.leaves(jax.eval_shape(residuals, x_BSD))
    activations = sum(a.size * a.dtype.itemsize for a in saved) - 2 * layer
    fixed_bytes = 16 * 2 * table / num_devices + 12 * tokens * args.vocab
    return max(2, int((FILL * limit_bytes - fixed_bytes) / (16 * layer / num_devices + activations)))


def measured_flops():
    """Flops per second of products of square bf16 matrices on one device: the best of five chains of ten products."""
    import jax
    import jax.numpy as jnp

    size, length = (8192, 10) if jax.default_backend() == "gpu" else (256, 10)
    x, w = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) * size**-0.5 for i in range(2))
    chain = jax.jit(lambda x, w: jax.lax.fori_loop(0, length, lambda _, x: x @ w, x)).lower(x, w).compile()
    seconds = []
    for _ in range(6):  # the first is discarded
        start = time.perf_counter()
        jax.block_until_ready(chain(x, w))
        seconds.append(time.perf_counter() - start)
    return length * 2 * size**3 / min(seconds[1:])


def table(result):
    from rich.console import Console
    from rich.table import Table

    device, shapes = result["device"], result["shapes"]
    tokens = f"{shapes['rows'] * shapes['microbatches']} x {shapes['seq']} tokens per device"
    title = f"{device['count']} x {device['kind']}: {shapes['layers']} layers of width {shapes['width']}, {tokens}"
    columns = (
        "step\nms", "predicted\nms", "mfu\n", "peak\nGiB", "compiled\nGiB", "formula\nGiB", "init\nGiB", "host\nGiB",
        "compile\ns",
    )  # fmt: skip
    rows = Table("form", *columns, title=title)
    for column in rows.columns[1:]:
        column.justify = "right"
    shown = lambda value, scale, digits, absent="": absent if value is None else f"{value * scale:.{digits}f}"
    gib = lambda form, key: shown(form[key], 2**-30, 2)
    for name, form in result["forms"].items():
        keys = ("peak_bytes", "compiled_peak_bytes", "formula_bytes", "init_peak_bytes", "host_bytes")
        sizes = [gib(form, key) for key in keys]
        mfu = shown(form["mfu"], 100, 1) + ("%" if form["mfu"] else "")
        milliseconds = [shown(form[key], 1e3, 1) for key in ("step_s", "predicted_s")]
        rows.add_row(name, *milliseconds, mfu, *sizes, shown(form["compile_s"], 1, 1))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(rows)
    console.print(f"full / plain: time {shown(result['ratio'], 1, 3, 'not measured')}")
    rate = lambda key: shown(result[key], 1e-12, 1 if (result[key] or 0) > 1e12 else 3, "unknown")
    console.print(
        f"Tflop/s: peak {rate('peak_flops')}, measured for matrix products {rate('measured_flops')}. "
        f"Losses differ by {result['max_loss_difference']:.2g} (tolerance {TOLERANCE})",
        soft_wrap=True,
    )
    if not device["limit_bytes"]:
        console.print("Peaks are not measured: these devices do not report their memory.")
    for name, form in result["forms"].items():
        if form["error"]:
            console.print(f"{name}: {form['error']}", soft_wrap=True, markup=False)
        for finding in form["broken"]:
            console.print(f"{name}: the audit says: {finding}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
