"""Compares the compiled schedule of a training step of zerojax with that of plain JAX, for a described cluster.

    python scripts/benchmarks/schedule.py --target h100:8           # tables
    python scripts/benchmarks/schedule.py --target h100:64 --json   # one JSON object
    python scripts/benchmarks/schedule.py --target v5e:4x4 --forms ours plain --dump programs
    python scripts/benchmarks/schedule.py --target 'v5p:4x4x2*2' --forms ours flags    # two slices
    python scripts/benchmarks/schedule.py --model qwen3-8b --json   # a model of another package, as it is

Nothing is allocated and nothing runs: a GPT of 3.5 billion parameters is compiled from avals, and the compiled programs
are analyzed (zerojax.analysis, zerojax.plan.timeline). Forms:

    ours        zerojax at stage 3
    plain       the strongest plain form that we know: `jit` and `NamedSharding`, parameters sharded in fp32 and cast to
                bf16 once per step, each layer gathered by a sharding constraint inside the checkpointed loop, gradients
                constrained to shards
    replicated  the same with nothing sharded: data parallelism
    single      one device, with the rows of one device
    flags       for TPUs: `plain` with the compiler options that MaxText sets for its fully sharded models
    options     for TPUs: `plain` with the compiler options that zerojax sets

With `--model`, a model of `models.py` at its real size takes the place of the GPT. `plain` is then what one would write
for a model that is not edited: the same jit and shardings without a constraint in the layers, and without
rematerialization, which would be written into the model. Its computing time is its own, so the limit of each form is
that of its own computing time, and there is no bound of the memory.

Exposed bytes are those of collectives that overlap with no matrix product. Copies in loop bodies count if they have at
least 1/16 of the bytes of a layer's largest leaf; transpositions of that size are listed separately. The formula of the
bytes sent is that of bf16: 3 Psi (N-1)/N x 2 for the sharded forms, 2 Psi (N-1)/N x 2 for the replicated one. Each of S
TPU slices, such as those of 'v5p:4x4x2*2', holds a copy of the state; its N chips then also send 2 Psi/N (S-1)/S x 2 to
other slices, or 2 Psi (S-1)/S x 2 in the replicated form.

Times are predicted with two lanes and compared with the limit max(compute, formula bytes / link), where compute is the
smallest computing time of all forms; for TPUs, `torus` is the time with the rates of the chip, of the links along each
dim of its torus, and of the network between slices; in the JSON, `over_products` has the matrix products at their peak
rate instead. The GPU compiler starts an all-gather as late as its model of the links allows, so the time on the slow
link is that of a second program of each form, compiled with the rate of that link; `slow_untold` is the time of the
first program. The bound of the peak memory is the sum of these terms, plus 5%:

    state        14 bytes for each parameter that a device holds: bf16, fp32, two moments
    gradients    2 bytes for each
    checkpoints  the input of each layer and of the head; if they are offloaded, only the three that are in transit
    gathered     the largest unit in bf16, once for the unit that computes and once for each that is prefetched
    in flight    the full gradient of the largest unit
    activations  the temporaries of a layer, or of the head and the loss, forward and backward, in a separate program
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FORMS = ("ours", "plain", "replicated", "single", "flags", "options")
PLAIN = ("plain", "flags", "options")  # the same step with different compiler options

# The names of MaxText's flags (benchmarks/xla_flags_library.py, 2026-11), for chips with SparseCores and without.
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
_SPARSE_CORES = [f"{_OFFLOAD}_all_gather", f"{_OFFLOAD}_reduce_scatter", f"{_OFFLOAD}_all_reduce"]
_FUSION = "xla_tpu_enable_async_collective_fusion"
_FUSIONS = [_FUSION, f"{_FUSION}_fuse_all_gather", f"{_FUSION}_multiple_steps", "xla_tpu_overlap_compute_collective_tc"]
_FUSIONS += ["xla_enable_async_all_gather"]
_LAYOUT = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
}
FLOPS, MEMORY = 700e12, 3e12  # flops and bytes of memory per second of one device
INPUTS_IN_TRANSIT = 3  # to or from host memory: those of the layer that computes, of the next one, and of the head
LINKS = {"fast": 360e9, "slow": 50e9}  # bytes per second that one device sends


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8", help="a target of zerojax.targets (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write the texts of the compiled programs to DIR")
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, help="default: the first four; with --model, ours and plain"
    )
    parser.add_argument("--model", help="a model of models.py, such as qwen3-8b or linen-1b, instead of the GPT")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seq", type=int, help="default 2048, or that of the model")
    parser.add_argument("--rows", type=int, help="sequences on each device (default 2, or that of the model)")
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument(
        "--remat",
        choices=["full", "offload", "dots", "none"],
        default="full",
        help="'offload' is 'full' with the inputs of layers in host memory, in form ours (default %(default)s)",
    )
    parser.add_argument(
        "--prefetch", type=int, default=1, help="units gathered ahead, in form ours (default %(default)s)"
    )
    parser.add_argument(
        "--link",
        type=float,
        metavar="GB/S",
        help="compile all programs for GPUs under the assumption that every device sends at this rate",
    )
    parser.add_argument("--wire", help="the dtype of 8 bits in which form ours sends large leaves, such as int8")
    parser.add_argument("--unrolled", action="store_true", help="a list of layers instead of a scanned stack")
    as_layers = lambda text: int(text) if text.isdigit() else text
    parser.add_argument(
        "--run-layers", type=as_layers, help="train_step(layers=), in form ours: loop, list or a number"
    )
    args = parser.parse_args()
    args.forms = args.forms or (["ours", "plain"] if args.model else list(FORMS[:4]))
    if {"flags", "options"} & set(args.forms) and args.target.split(":")[0] not in ("v4", "v5e", "v5p", "v6e"):
        parser.error("the forms flags and options are for TPUs")
    if args.model and not set(args.forms) <= {"ours", *PLAIN}:
        parser.error("--model has no forms replicated and single")
    return args


def main():
    args = arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the programs are for other devices
    if args.link:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {link_flag(args.link)}"
    from rich.console import Console
    from timing import versions

    from zerojax import targets

    devices = targets.devices(args.target)
    platform = targets.platform(args.target)
    subject = (Unedited if args.model else GPT)(args, devices)
    slow_process = compile_for_slow_link(args) if platform == "cuda" and not args.link else None
    result = {
        "target": args.target,
        "num_devices": len(devices),
        "parameters": subject.psi,
        "rates": {"flops": FLOPS, "memory": MEMORY, **LINKS},
        "shapes": {k: v for k, v in vars(args).items() if k not in ("json", "dump", "target", "forms")},
        "versions": versions(),
        "forms": {},
    }
    forms = result["forms"]
    with Console(stderr=True).status("") as status:
        for form in args.forms:
            status.update(f"compiling {form}")
            start, processor = time.perf_counter(), time.process_time()
            traced = subject.trace(form)
            trace_s, trace_processor_s = time.perf_counter() - start, time.process_time() - processor
            forms[form] = report(traced, form, args, options_of(form, devices), copy_bytes=2 * subject.leaf // 16)
            forms[form] |= {
                "trace_s": trace_s,
                "compile_s": time.perf_counter() - start,
                "trace_processor_s": trace_processor_s,
                "processor_s": time.process_time() - processor,
            }
            forms[form]["formula_bytes"] = formula_bytes(form, subject.psi, devices)
            status.update("compiling one unit")
            forms[form] |= subject.memory(form, platform)
    if slow_process:
        for name, form in forms_of(slow_process).items():
            forms[name]["slow_untold_s"], forms[name]["slow_s"] = forms[name].get("slow_s"), form.get("slow_s")
            forms[name]["slow_exposed_bytes"] = form.get("exposed_bytes")
    limits(result, own_compute=bool(args.model))
    print(json.dumps(result)) if args.json else tables(result)


def zero_over(devices, wire, **options):
    """The `Zero` of form ours. `wire` is the dtype in which large leaves are sent, or None for bf16."""
    from plain import num_slices

    import zerojax

    precision = dataclasses.replace(zerojax.Precision.of("bf16"), gather=wire, scatter=wire)
    return zerojax.Zero(zerojax.make_mesh(devices=devices, replica=num_slices(devices)), 3, precision, **options)


def formula_bytes(form, psi, devices):
    """The bytes that a device sends, in bf16: within a slice by the formula of the stage; between slices it all-reduces
    the gradients that it holds."""
    from plain import num_slices

    slices = num_slices(devices)
    shards = 1 if form == "single" else len(devices) // slices
    volume = {"replicated": 2, "single": 0}.get(form, 3)  # elements for each parameter
    held = psi if form == "replicated" else psi / shards
    return 2 * (volume * psi * (shards - 1) / shards + 2 * held * (slices - 1) / slices)


class GPT:
    """The GPT of gpt.py in all forms.

    Attributes:
        psi: its number of parameters.
        leaf: the number of elements of the largest leaf of a layer.
    """

    def __init__(self, args, devices):
        import gpt

        args.seq, args.rows = args.seq or 2048, args.rows or 2
        self.args, self.devices, self.config = args, devices, gpt_config(args)
        layer, table = gpt.layer_sizes(self.config), self.config.vocab * self.config.width
        self.psi = self.config.layers * sum(layer) + 2 * table
        self.unit, self.leaf = max(sum(layer), table), max(layer)
        self.activations = None

    def used(self, form):
        return self.devices[:1] if form == "single" else self.devices

    def trace(self, form):
        used = self.used(form)
        form = "plain" if form in PLAIN else form
        return ours(self.config, self.args, used) if form == "ours" else trace_plain(form, self.config, self.args, used)

    def memory(self, form, platform):
        """The terms of the bound of the memory, and the bound."""
        if self.activations is None:
            self.activations = activation_bytes(self.config, self.args, self.devices[:1], platform)
        from plain import num_slices

        used = len(self.used(form)) // num_slices(self.used(form))
        terms = memory_terms(form, self.config, self.args, used, self.psi, self.unit, self.activations)
        return terms | {"bound_bytes": 1.05 * sum(terms.values()) if self.args.remat in ("full", "offload") else None}


class Unedited:
    """A model of models.py. Attributes as of `GPT`."""

    def __init__(self, args, devices):
        import models
        import optax

        self.model = models.model(args.model)
        args.seq, args.rows = args.seq or self.model.seq, args.rows or self.model.rows
        self.args, self.devices = args, devices
        self.batch = self.model.batch_aval(args.rows * len(devices), args.seq)
        self.zero = zero_over(devices, args.wire, **self.model.options)
        self.tx = optax.adamw(1e-3)
        leaves = self.zero.eval_init(self.model.create, self.tx).layout.leaves
        self.psi, self.leaf = sum(leaf.size for leaf in leaves), max(leaf.size_at_once for leaf in leaves)

    def trace(self, form):
        if form == "ours":
            state = self.zero.eval_init(self.model.create, self.tx)
            return self.zero.train_step(self.model.loss, **options_of_step(self.args)).trace(state, self.batch)
        import jax
        import plain

        init, step, rows = plain.unedited(self.model, self.tx, self.devices)
        aval = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows)
        return step.trace(jax.eval_shape(init), jax.tree.map(aval, self.batch))

    def memory(self, form, platform):
        return {"bound_bytes": None}


def options_of_step(args):
    """The options of `train_step` for the arguments of this script."""
    import zerojax

    remat = zerojax.Remat(offload_inputs=True) if args.remat == "offload" else args.remat
    return {"remat": remat, "prefetch": args.prefetch, "layers": args.run_layers}


def link_flag(rate):
    """Returns the flag for the rate of the links. Without it, the compiler assumes the rate of NVLink within a host.

    Next to the rate in GiB/s, it has the microseconds to start a collective, to prepare a chunk and for a round trip,
    which matter little for large collectives. With one device per host, everything is sent over the network.
    """
    options = {"nccl_op_launch_us": 20, "nic_speed_gbps": int(rate * 1e9 / 2**30), "chunk_prep_us": 1, "rtt_us": 20}
    options |= {"gpus_per_node": 1, "chunk_size_bytes": 4 * 2**20}
    return "--xla_gpu_analytical_latency_estimator_options=" + ",".join(f"{k}={v}" for k, v in options.items())


def compile_for_slow_link(args):
    """Starts a process whose compiler has the rate of the slow link; the compiler reads the flag only at its start."""
    command = [sys.executable, __file__, *sys.argv[1:], "--json", "--link", str(LINKS["slow"] / 1e9)]
    if args.dump:
        command += ["--dump", str(args.dump / "slow")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def forms_of(process):
    """Waits for a process of this script, and returns the forms in its JSON."""
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the process with --link exited with code {process.returncode}")
    return json.loads(printed)["forms"]


def gpt_config(args):
    import gpt
    import jax.numpy as jnp

    return gpt.Config(
        width=args.width, layers=args.layers, heads=args.heads, vocab=args.vocab, seq=args.seq,
        scan=not args.unrolled, dtype=jnp.bfloat16,
    )  # fmt: skip


def ours(config, args, devices):
    import gpt
    import optax

    zero = zero_over(devices, args.wire)
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    step = zero.train_step(gpt.loss, **options_of_step(args))
    return step.trace(state, gpt.batch_aval(config, args.rows * len(devices)))


def trace_plain(form, config, args, devices):
    """Traces `plain.layer_by_layer` on avals."""
    import gpt
    import jax
    import plain

    init, step, rows = plain.layer_by_layer(form, config, args.remat, devices)
    batch = gpt.batch_aval(config, args.rows * len(devices))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), batch)
    return step.trace(jax.eval_shape(init), batch)


def activation_bytes(config, args, devices, platform):
    """Returns the temporaries of the largest unit, forward and backward, in a separate program on one device."""
    import gpt
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())
    aval = lambda shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    x_BSD = aval((args.rows, args.seq, args.width))
    captured = {}

    def block():
        captured["graph"], state = nnx.split(gpt.Block(config, nnx.Rngs(0)))
        return state

    def layer(weights, x_BSD, grad_BSD):
        _, vjp = jax.vjp(lambda weights, x_BSD: nnx.merge(captured["graph"], weights)(x_BSD), weights, x_BSD)
        return vjp(grad_BSD)

    def head(weights, x_BSD, targets):
        return jax.grad(lambda weights, x_BSD: gpt.cross_entropy(x_BSD @ weights, targets), (0, 1))(weights, x_BSD)

    weights = jax.tree.map(lambda a: aval(a.shape), jax.eval_shape(block))
    units = [
        jax.jit(layer).trace(weights, x_BSD, x_BSD),
        jax.jit(head).trace(aval((args.width, args.vocab)), x_BSD, aval((args.rows, args.seq), jnp.int32)),
    ]
    return max(compiled(unit, platform)[1] for unit in units)


def compiled(traced, platform, options=None):
    """Returns the compiled program and the bytes of its temporaries."""
    from zerojax.plan.buffers import read_dump
    from zerojax.plan.program import compile_with_dump

    with tempfile.TemporaryDirectory() as folder:
        program = compile_with_dump(traced, platform, Path(folder), options)
        return program, read_dump(Path(folder)).allocated_bytes


def memory_terms(form, config, args, num_devices, psi, unit, activations):
    """Returns the terms of the bound in bytes. The formulas assume that only the inputs of layers are saved."""
    sharded = form in ("ours", *PLAIN)
    num_shards = num_devices if sharded else 1
    ahead = args.prefetch if form == "ours" else 0
    offloaded = form == "ours" and args.remat == "offload"
    inputs = INPUTS_IN_TRANSIT if offloaded else config.layers + 1
    return {
        "state_bytes": 14 * psi / num_shards,
        "gradients_bytes": 2 * psi / num_shards,
        "checkpoints_bytes": inputs * args.rows * args.seq * args.width * 2,
        "gathered_bytes": 2 * unit * (ahead + 1) if sharded else 0,
        "in_flight_gradients_bytes": 2 * unit if sharded else 0,
        "activations_bytes": activations,
    }


def options_of(form, devices):
    """Returns the compiler options of a form that adds some to those of its step."""
    from zerojax.sharding.tpu import SPARSE_CORES
    from zerojax.step.compiler_options import compiler_options

    if form == "options":
        return compiler_options(zero_over(devices).config, [])
    if form != "flags":
        return {}
    return dict.fromkeys(_SPARSE_CORES if devices[0].device_kind in SPARSE_CORES else _FUSIONS, True) | _LAYOUT


def report(traced, form, args, options, copy_bytes):
    """Compiles a form and returns its communication, copies, memory and times, or the error of the compiler."""
    import jax

    from zerojax import targets
    from zerojax.analysis import hlo, hlo_collectives, hlo_costs

    platform, dump = targets.platform(args.target), args.dump
    try:
        program, temporaries = compiled(traced, platform, options)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    text = program.as_text()
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / f"{form}.txt").write_text(text)
    parsed = hlo.parse_program(text)
    found = hlo_collectives.compiled_collectives(parsed)
    sent = lambda collectives: sum(c.sent_bytes for c in collectives)
    crosses = lambda c: max(c.group) >= parsed.num_devices  # the program is that of one slice
    by_kind = {}
    for c in found:
        key = f"{c.kind} {c.dtype}"
        by_kind[key] = by_kind.get(key, 0) + c.sent_bytes
    moves = hlo_costs.moves(parsed, copy_bytes, in_loops=True)
    moved = lambda op: sum(move.num_bytes for move in moves if move.op == op)
    memory = program.memory_analysis()
    return {
        "sent_bytes": sent(found),
        "sent_bytes_by_kind": by_kind,
        "loop_bytes": sent(c for c in found if c.looped),
        "exposed_bytes": sent(c for c in found if c.exposed),
        "exposed_loop_bytes": sent(c for c in found if c.exposed and c.looped),
        "between_slices_bytes": sent(c for c in found if crosses(c)),
        "exposed_between_slices_bytes": sent(c for c in found if crosses(c) and c.exposed),
        "copies_in_loops": moved("copy"),
        "transpositions_in_loops": moved("transpose"),
        "copied": [
            {"name": m.name, "op": m.op, "dtype": m.buffer.dtype, "dims": m.buffer.dims, "trips": m.trips}
            for m in moves
            if m.op in ("copy", "transpose")
        ],
        "communication_buffer_bytes": hlo_collectives.in_flight_bytes(parsed),
        "peak_bytes": hlo_collectives.peak_bytes(memory, temporaries),
        "arguments_bytes": memory.argument_size_in_bytes,
        "temporaries_bytes": temporaries,
        "host_temporaries_bytes": memory.host_temp_size_in_bytes,
        **times(parsed, between_slices=any(map(crosses, found))),
        **(times_on_torus(parsed, args.target) if platform == "tpu" else {}),
    }


def times(program, between_slices):
    """Returns the seconds for each link; None, and the reason as `no_time`, if they cannot be predicted.

    `between_slices`: whether it communicates between slices.
    """
    from zerojax.analysis.hardware import INSIDE_HOST
    from zerojax.plan import timeline

    if between_slices:
        return {f"{link}_s": None for link in LINKS} | {"no_time": "two lanes have no network between slices"}
    try:
        found = {link: timeline.predict(program, two_lanes(program.num_devices, rate)) for link, rate in LINKS.items()}
    except ValueError as error:
        return {f"{link}_s": None for link in LINKS} | {"no_time": str(error)}
    return {
        f"{link}_s": {
            "step": time.step_s,
            "compute": time.computing_s,
            "products": time.products_s,
            "link": time.busy_s.get(INSIDE_HOST, 0.0),
        }
        for link, time in found.items()
    }


def times_on_torus(program, target):
    """Returns the predicted seconds with the rates of the chip and of the links along each dim of the torus."""
    from zerojax.analysis.hardware import cluster
    from zerojax.plan import timeline

    predicted = timeline.predict(program, cluster(target))
    return {"torus_s": {"step": predicted.step_s, "computing": predicted.computing_s, "busy": dict(predicted.busy_s)}}


def two_lanes(num_devices, link):
    """Returns a cluster of devices that reach FLOPS and MEMORY, send to all others at one rate, and have no latency."""
    from zerojax.analysis.hardware import CHIPS, Cluster, Rate

    rates = {"flops": FLOPS, "memory_rate": MEMORY, "link_rate": link, "network_rate": link}
    latencies = dict.fromkeys(["kernel_s", "collective_s", "hop_s", "network_hop_s"], 0.0)
    chip = dataclasses.replace(
        CHIPS["h100"], **{name: Rate(rate, 1.0) for name, rate in rates.items()}, **latencies, f32_share=1.0
    )
    return Cluster("two lanes", chip, num_devices, num_devices)


def limits(result, own_compute):
    """Adds the limit of each form on each link, and the ratios of its time to this limit and to the products' limit.

    A form that sends less than the formula has the limit of what it sends.
    """
    timed = [form for form in result["forms"].values() if form.get("fast_s")]
    for form in result["forms"].values():
        of_limit = [form] if own_compute and form.get("fast_s") else timed
        least = lambda part, forms=of_limit: min((form["fast_s"][part] for form in forms), default=0)
        for link, rate in LINKS.items():
            sending = min(form["formula_bytes"], form.get("sent_bytes", form["formula_bytes"])) / rate
            form[f"limit_{link}_s"] = max(least("compute"), sending)
            for suffix in "", "_untold":
                if suffix and f"{link}{suffix}_s" not in form:
                    continue
                seconds = form.get(f"{link}{suffix}_s")
                form[f"over_limit_{link}{suffix}"] = seconds and seconds["step"] / form[f"limit_{link}_s"]
                form[f"over_products_{link}{suffix}"] = seconds and seconds["step"] / max(least("products"), sending)


def tables(result):
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 160)
    gib = lambda size: "" if size is None else f"{size / 2**30:.2f}"
    forms = {name: form for name, form in result["forms"].items() if "error" not in form}

    def table(title, columns):
        rows = Table("form", *columns, title=title)
        for column in rows.columns[1:]:
            column.justify = "right"
        for name, form in forms.items():
            rows.add_row(name, *(show(form) for show in columns.values()))
        console.print(rows)

    share = lambda part, whole: lambda form: f"{form[part] / form[whole]:.1%}" if form[whole] else ""
    size = lambda key: lambda form: gib(form[key])
    kinds = sorted({kind for form in forms.values() for kind in form["sent_bytes_by_kind"]})
    between_slices = {
        "between\nslices": size("between_slices_bytes"),
        "exposed\nof these": share("exposed_between_slices_bytes", "between_slices_bytes"),
    }
    title = f"{result['parameters'] / 1e9:.2f} B parameters on {result['target']}"
    table(
        f"{title}: GiB sent by a device per step",
        {
            "formula": size("formula_bytes"),
            "sent": size("sent_bytes"),
            **{kind.replace(" ", "\n"): lambda form, k=kind: gib(form["sent_bytes_by_kind"].get(k)) for kind in kinds},
            "in loops": size("loop_bytes"),
            "exposed": share("exposed_bytes", "sent_bytes"),
            "exposed\nin loops": share("exposed_loop_bytes", "loop_bytes"),
            **(between_slices if any(form["between_slices_bytes"] for form in forms.values()) else {}),
        },
    )
    table(
        "Memory of a device in GiB",
        {
            "peak": size("peak_bytes"),
            "bound": size("bound_bytes"),
            **{
                term.replace(" ", "\n"): size(f"{term.replace(' ', '_')}_bytes")
                for term in ("state", "gradients", "checkpoints", "gathered", "in flight gradients", "activations")
                if all(f"{term.replace(' ', '_')}_bytes" in form for form in forms.values())
            },
            "collectives'\nbuffers": size("communication_buffer_bytes"),
            "host": size("host_temporaries_bytes"),
        },
    )
    ms = lambda link, part: lambda form: f"{form[f'{link}_s'][part] * 1e3:.1f}" if form[f"{link}_s"] else ""
    limit = lambda link: lambda form: f"{form[f'limit_{link}_s'] * 1e3:.1f}" if form[f"{link}_s"] else ""
    over = lambda link: lambda form: f"{form[f'over_limit_{link}']:.3f}" if form.get(f"over_limit_{link}") else ""
    columns = {"compute": ms("fast", "compute"), "products": ms("fast", "products")}
    for link, rate in LINKS.items():
        columns[f"{rate / 1e9:.0f} GB/s"] = ms(link, "step")
        columns[f"limit\n{link}"] = limit(link)
        columns[f"time / limit\n{link}"] = over(link)
    if any(form.get("slow_untold_s") for form in forms.values()):
        columns["time / limit\nslow, no flag"] = over("slow_untold")
    if any("torus_s" in form for form in forms.values()):
        columns["torus"] = ms("torus", "step")
        columns["computing\n(torus)"] = ms("torus", "computing")
    columns |= {"trace and\ncompile, s": lambda form: f"{form['compile_s']:.0f}"}
    columns |= {"GiB copied\nin loops": size("copies_in_loops"), "transposed": size("transpositions_in_loops")}
    table("Predicted ms per step with two lanes, and copies in loops", columns)
    for name, form in result["forms"].items():
        if "error" in form or "no_time" in form:
            reason = " ".join((form.get("error") or "no time: " + form["no_time"]).split())
            console.print(f"{name}: {reason[:200]}", soft_wrap=True, markup=False)
        for copy in form.get("copied", ()):
            shape = f"{copy['dtype']}[{','.join(map(str, copy['dims']))}]"
            console.print(
                f"{name}: {copy['trips']} x {copy['op']} {shape} {copy['name']}", soft_wrap=True, markup=False
            )


if __name__ == "__main__":
    main()
