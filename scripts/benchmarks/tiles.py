"""Compares a step whose widest arrays exist for a tile of tokens at a time with the same step without tiles.

    python scripts/benchmarks/tiles.py --model qwen3-8b --target h100:8          # a table
    python scripts/benchmarks/tiles.py --model qwen3-8b --target h100:8 --json   # one JSON object
    python scripts/benchmarks/tiles.py --preset llama3-8b --seq 131072 --target h100:8 --inputs-in-host

Each form is compiled for a described cluster, in a process of its own, at stage 3 with bf16 and `remat='full'`. Models
are those of models.py, unedited, or presets of `zerojax plan`, with the attention of cuDNN on GPUs:

    tiles    with tiles of at most 1/128 of the device's memory, as 'auto' chooses, or of --tokens
    none     all tokens at once
    auto     whichever 'auto' chooses

`logits_bytes` are those of the largest array of all tokens of a row by the vocabulary; 0 if there is none. With
`--context`, the tokens of a row are divided over devices. `sent_bytes` without what the compiler moves for attention
are `states_bytes`, beside the formula of stage 3, which counts the gathers of both passes for all units.
"""

import argparse
import dataclasses
import json
import math
import os

from forms import compiled_forms

FORMS = ("tiles", "none", "auto")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8", help="(default %(default)s)")
    parser.add_argument("--model", help="of models.py")
    parser.add_argument("--preset", help="of `zerojax plan`, instead of a model")
    parser.add_argument("--seq", type=int, help="tokens of a row (default: of the model)")
    parser.add_argument("--rows", type=int, help="rows of a device (default: of the model)")
    parser.add_argument("--tokens", type=int, help="of a tile (default: by memory)")
    parser.add_argument("--inputs-in-host", action="store_true", help="inputs of layers are saved in host memory")
    parser.add_argument("--context", type=int, default=1, help="devices over which the tokens of a row are divided")
    parser.add_argument("--layers", type=int, help="of a preset")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS[:2], help="(default: tiles none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # a form, in a process of its own
    return parser.parse_args()


def main():
    args = arguments()
    if args.compile:
        print(json.dumps(compiled(args, args.compile)))
        return
    forms = compiled_forms(args.forms)
    result = {
        "target": args.target,
        "model": args.model or args.preset,
        "seq": args.seq,
        "context": args.context,
        "forms": forms,
    }
    print(json.dumps(result)) if args.json else table(result)


def model_of(args):
    """(Create, loss, options of Zero, `avals(rows)` of a batch, rows of a device, tokens in a row)."""
    if not args.preset:
        import models

        model = models.model(args.model)
        seq = args.seq or model.seq
        avals = lambda rows: model.batch_aval(rows, seq)
        return model.create, model.loss, model.options, avals, args.rows or model.rows, seq

    from zerojax.analysis import hardware
    from zerojax.plan.job import PRESETS, find_job
    from zerojax.plan.transformer import with_seq

    shapes = with_seq(PRESETS[args.preset], args.seq)
    shapes = dataclasses.replace(shapes, layers=args.layers or shapes.layers)
    job = find_job(shapes, hardware.cluster(args.target).chip, compiled=True)
    return job.create_model, job.loss_fn, job.options, job.batch, args.rows or job.rows, job.tokens


def compiled(args, form):
    """What is in the program of a form."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import optax
    import schedule

    import zerojax
    from zerojax import targets
    from zerojax.analysis import hardware, hlo, hlo_collectives
    from zerojax.analysis.expectation import along_context
    from zerojax.analysis.step import TrainStep, auto_tiling, device_memory
    from zerojax.plan import timeline

    devices = targets.devices(args.target)
    create, loss, options, avals, rows, seq = model_of(args)
    zero = zerojax.Zero(zerojax.make_mesh(devices=devices, context=args.context), 3, "bf16", **options)
    state = zero.eval_init(create, optax.adamw(1e-3))
    remat = zerojax.Remat(offload_inputs=True) if args.inputs_in_host else "full"
    step = zero.train_step(loss, remat=remat, tiles=form if form != "tiles" else args.tokens or "auto")
    if step.settings.tiles == "auto" and form == "tiles":
        tiling = auto_tiling(device_memory(zero.config))
        step = TrainStep(zero.config, dataclasses.replace(step.settings, tiles=tiling), loss, "off")
    batch = avals(rows * len(devices) // args.context)
    traced = step.trace(state, batch)
    program, temporaries = schedule.compiled(traced, targets.platform(args.target))
    parsed = hlo.parse_program(program.as_text())
    sent = [c for c in hlo_collectives.compiled_collectives(parsed) if c.full_bytes > 256]
    of_model, expected = along_context(sent, zero.config), step.expectation(state, batch)
    total = lambda found: sum(c.sent_bytes for c in found)
    predicted = timeline.predict(parsed, hardware.cluster(args.target))
    vocabulary = max(max(leaf.shape) for leaf in state.layout.leaves if "embed" in leaf.path.lower())
    return {
        "tokens": rows * seq // args.context,
        "tiles": str(step.settings.tiles),
        "estimated_bytes": step.memory(state, batch).peak_bytes,
        "peak_bytes": hlo_collectives.peak_bytes(program.memory_analysis(), temporaries),
        "logits_bytes": logits_bytes(traced.jaxpr.jaxpr, vocabulary, rows, seq - 1),
        "sent_bytes": total(sent),
        "exposed_bytes": total(c for c in sent if c.exposed),
        "states_bytes": total(sent) - total(c for c in of_model if c.kind != "reduce-scatter"),
        "states_formula_bytes": expected.most.total + sum(expected.context_bytes),
        "step_s": predicted.step_s,
        "computing_s": predicted.computing_s,
        "tokens_per_s": rows * seq / args.context / predicted.step_s,
    }


def logits_bytes(jaxpr, vocabulary, rows, tokens):
    """The bytes of the largest array of at least so many rows and tokens by the vocabulary, in any part of a step."""
    from zerojax.program import jaxprs

    def is_logits(shape):
        others = [size for size in shape if size != vocabulary]
        return len(others) < len(shape) and max(others, default=0) >= tokens and math.prod(others) >= rows * tokens

    avals = (v.aval for e in jaxprs.walk(jaxpr.eqns) for v in e.outvars if is_logits(getattr(v.aval, "shape", ())))
    return max((math.prod(a.shape) * a.dtype.itemsize for a in avals), default=0)


def table(result):
    from rich.console import Console
    from rich.table import Table

    title = f"{result['model']} on {result['target']}" + (f", context {n}" if (n := result["context"]) > 1 else "")
    rows = Table("", "peak\nGiB", "logits\nGiB", "sent\nGiB", "exposed", "ms", "tokens/s\nof a device", title=title)
    for name, found in result["forms"].items():
        if "error" in found:
            rows.add_row(name, found["error"][:60])
        else:
            gib = (f"{found[key] / 2**30:.2f}" for key in ("peak_bytes", "logits_bytes", "sent_bytes"))
            exposed = f"{found['exposed_bytes'] / max(found['sent_bytes'], 1):.0%}"
            rows.add_row(name, *gib, exposed, f"{found['step_s'] * 1e3:.0f}", f"{found['tokens_per_s']:,.0f}")
    Console().print(rows)


if __name__ == "__main__":
    main()
