"""The program behind `scripts/demo`: trains the GPT of gpt_nnx.py with ZeRO, compares the stages and samples text."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import math
import platform
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import options
import rich.box
import rich.table
import rich.text
import text
from flax import nnx
from gpt_nnx import GPT, loss_fn

import zerojax
from zerojax.training.display import ProgressBar, ProgressLines, on_terminal

CONTEXT, CLIP_NORM, COMPARED_STEPS, SAMPLE_BYTES = 64, 1.0, 5, 320
NAMES = ("0  data parallel", "1  P_os", "2  P_os+g", "3  P_os+g+p")
PROMPT = 'import os\nimport sys\n\n\nclass Reader:\n    """Reads a file."""\n\n    def __init__(self, path):\n'
# precision -> (dtype of the computation, bytes per parameter of (parameters, gradients, Adam's state and fp32 copy))
PRECISIONS = {
    "fp32": (jnp.float32, (4, 4, 8)),
    "bf16": (jnp.bfloat16, (2, 2, 12)),
    "bf16_reduce_fp32": (jnp.bfloat16, (2, 4, 12)),
    "fp16": (jnp.float16, (2, 2, 12)),
}

console = rich.get_console()


def create_model(rngs: nnx.Rngs) -> GPT:
    return GPT(context=CONTEXT, rngs=rngs)


def create_optimizer(steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.cosine_decay_schedule(1e-3, steps, alpha=0.1), b2=0.95)


# Measurements


def place(state: zerojax.TrainState, like: zerojax.TrainState) -> zerojax.TrainState:
    """A copy of a state with the shardings of another stage, so that all stages start from the same weights."""
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True)
    copies = [jax.device_put(a, aval.sharding, may_alias=False) for a, aval in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), copies)


def single_device(
    state: zerojax.TrainState, tx: optax.GradientTransformation, precision: str, batches: list[Any]
) -> list[float]:
    """The losses of a plain jitted step on one device, with Flax and Optax alone, from the weights of a state."""
    dtype = PRECISIONS[precision][0]
    scale = 2.0**15 if precision == "fp16" else 1.0
    tx = optax.chain(optax.clip_by_global_norm(CLIP_NORM), tx)
    graph, like = nnx.split(state.model())
    weights = jax.tree.leaves(state.params if state.master is None else state.master)
    params = jax.tree.unflatten(jax.tree.structure(like), weights)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def scaled_loss(params: Any) -> jax.Array:
            return scale * loss_fn(nnx.merge(graph, jax.tree.map(lambda a: a.astype(dtype), params)), batch)

        loss, grads = jax.value_and_grad(scaled_loss)(params)
        updates, opt_state = tx.update(jax.tree.map(lambda g: g / scale, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss / scale

    params, opt_state = jax.device_put((params, tx.init(params)), jax.devices()[0])
    losses = []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses


def bytes_per_device(tree: Any) -> int:
    """The bytes of the shards of a tree, on the device that holds most."""
    held: collections.Counter[Any] = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def gradient_bytes(zero: zerojax.Zero, state: zerojax.TrainState, stage: int, devices: int) -> int:
    """The bytes per device of the gradients that `zero.value_and_grad` returns; at stage 1, of those in a step."""
    if stage == 1:
        return zero.explain(state).totals["grads"]
    graph, params = nnx.split(state.model())
    value_and_grad = zero.value_and_grad(lambda params, batch: loss_fn(nnx.merge(graph, params), batch))
    excerpt = jnp.zeros((devices, 8), jnp.int32)
    return bytes_per_device(jax.jit(value_and_grad)(params, {"x": excerpt, "y": excerpt})[1])


def formula_bytes(stage: int, parameters: int, devices: int, precision: str) -> float:
    """Bytes per device by table 1 of ZeRO. Each term is divided by the number of devices from its stage on."""
    of_params, of_grads, of_optimizer = PRECISIONS[precision][1]
    part = lambda size, first_stage: size * parameters / (devices if stage >= first_stage else 1)
    return part(of_params, 3) + part(of_grads, 2) + part(of_optimizer, 1)


@functools.partial(jax.jit, static_argnames=("graph", "length"))
def sample(graph: Any, params: Any, window: jax.Array, key: jax.Array, length: int) -> jax.Array:
    """Samples `length` bytes that continue a window of bytes, at temperature 0.7."""

    def extend(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params, copy=True)(window[None])[0, -1].astype(jnp.float32)
        drawn = jax.random.categorical(key, logits / 0.7)
        return jnp.append(window[1:], drawn), drawn

    return jax.lax.scan(extend, window, jax.random.split(key, length))[1]


# Training and the terminal


def train(zero: zerojax.Zero, state: zerojax.TrainState, batches: list[Any]) -> tuple[Any, list[float]]:
    """Trains with a progress bar, or with plain lines if the output is not a terminal."""
    step, losses, start = zero.train_step(loss_fn, clip_norm=CLIP_NORM), [], 0.0
    with contextlib.closing(ProgressBar(len(batches)) if on_terminal() else ProgressLines(len(batches))) as shown:
        for i, batch in enumerate(batches):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            rate = {"rows_per_s": i * len(batch["x"]) / (time.perf_counter() - start)} if i else {}
            start = start or time.perf_counter()  # the first step compiles
            if on_terminal() or i % 10 == 9 or i in (0, len(batches) - 1):
                shown.write(i + 1, {"loss": losses[-1], "grad_norm": float(metrics["grad_norm"])} | rate)
    return state, losses


def print_table(rows: list[dict[str, Any]], choice: argparse.Namespace, compared: int) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("params", "grads", "optimizer", "sum", "formula", "loss diff."):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        held = [row[f"{name}_bytes"] for name in ("params", "grads", "optimizer")]
        numbers = [f"{size / 1e6:.2f}" for size in (*held, sum(held), row["formula_bytes"])]
        numbers[1] += "*" if row["stage"] == 1 else " "
        style = "bold" if row["stage"] == choice.stage else None
        table.add_row(NAMES[row["stage"]], *numbers, f"{row['max_loss_difference']:.1e}", style=style)
    p, g, o = PRECISIONS[choice.precision][1]
    held = rows[3]["params_bytes"] + rows[3]["grads_bytes"] + rows[3]["optimizer_bytes"]
    note = f"The sum exceeds the formula because leaves without a dim that {choice.devices} divides are replicated.\n"
    console.print("\nMB per device, from the shards of the arrays", highlight=False)
    console.print(table)
    console.print(
        f"formula     ({p} + {g} + {o}) bytes x parameters, each term / {choice.devices} from its stage on\n"
        f"loss diff.  largest difference from a single device in {compared} steps, with the same weights and data\n"
        f"*           in full form until the reduce-scatter at the end of the step\n"
        + (note if held > 1.01 * rows[3]["formula_bytes"] else ""),
        highlight=False,
        style="dim",
    )


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), a) for path, a in jax.tree.leaves_with_path(tree)]


def run(choice: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    zerojax.simulate_devices(choice.devices)
    source, tx, mesh = text.load(), create_optimizer(choice.steps), zerojax.make_mesh()
    batches = [text.batch(source, choice.batch, CONTEXT, seed) for seed in range(choice.steps)]
    compared = batches[:COMPARED_STEPS]
    zeros = [zerojax.Zero(mesh, stage, choice.precision) for stage in range(4)]
    avals = zeros[choice.stage].eval_init(create_model, tx)
    parameters = sum(math.prod(a.shape) for a in jax.tree.leaves(avals.params))
    versions = {
        "zerojax": zerojax.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
    }
    console.print("  ".join(f"{name} {version}" for name, version in versions.items()), style="dim", highlight=False)
    devices = f"{choice.devices} simulated device{'' if choice.devices == 1 else 's'}"
    console.print(
        f"GPT of {parameters / 1e6:.2f} M parameters on {len(source) / 1e6:.1f} MB of Python's own source, as bytes\n"
        f"ZeRO stage {choice.stage} on {devices}, {choice.precision}, {choice.batch} x {CONTEXT} bytes per step\n",
        highlight=False,
    )

    initial = zeros[choice.stage].init(create_model, tx)
    spare = place(initial, avals)  # the step donates the arrays of its state
    state, losses = train(zeros[choice.stage], initial, batches)
    del initial

    rows = []
    if not console.is_interactive:
        print("comparing the stages with a single device", flush=True)
    with console.status("single device: plain Flax and Optax") as status:
        expected = single_device(spare, tx, choice.precision, compared)
        for stage, zero in enumerate(zeros):
            status.update(f"stage {stage}: {len(compared)} steps and the gradients")
            if stage == choice.stage:
                after, first = state, losses[: len(compared)]
            else:
                step, first = zero.train_step(loss_fn, clip_norm=CLIP_NORM), []
                after = place(spare, zero.eval_init(create_model, tx))
                for batch in compared:
                    after, metrics = step(after, batch)
                    first.append(float(metrics["loss"]))
            row = {
                "stage": stage,
                "params_bytes": bytes_per_device(after.params),
                "grads_bytes": gradient_bytes(zero, after, stage, choice.devices),
                "optimizer_bytes": bytes_per_device((after.opt_state, after.master)),
                "formula_bytes": formula_bytes(stage, parameters, choice.devices, choice.precision),
                "max_loss_difference": max(abs(a - b) for a, b in zip(first, expected, strict=True)),
            }
            rows.append(row)
    print_table(rows, choice, len(compared))

    graph, params = nnx.split(jax.device_put(state.model(), jax.devices()[0]))
    window = np.frombuffer(PROMPT.encode()[-CONTEXT:], np.uint8).astype(np.int32)
    drawn = bytes(np.asarray(sample(graph, params, window, jax.random.key(0), SAMPLE_BYTES)).tolist())
    console.rule("A sample, after its prompt", align="left", style="dim")
    console.print(rich.text.Text.assemble((PROMPT, "dim"), drawn.decode(errors="replace")))
    console.rule(rich.text.Text(f"{time.perf_counter() - began:.0f} s"), align="right", style="dim")
    return {
        "loss": losses[-1],
        "losses": losses,
        "max_loss_difference": max(row["max_loss_difference"] for row in rows),
        "stages": rows,
        "stage": choice.stage,
        "devices": choice.devices,
        "steps": choice.steps,
        "precision": choice.precision,
        "parameters": parameters,
        "shapes": {name: list(a.shape) for name, a in named_leaves(avals.params)},
        "batch_shape": list(batches[0]["x"].shape),
        "versions": versions,
    }


def main() -> None:
    choice = options.parse()
    result = run(choice)
    if choice.json:
        choice.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
