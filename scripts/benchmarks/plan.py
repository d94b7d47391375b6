"""Compares the memory that `zerojax plan` predicts by formula with the compiled peak, for presets or other models.

    python scripts/benchmarks/plan.py                                     # all presets on clusters of H100s
    python scripts/benchmarks/plan.py --presets llama3-8b --target h200:8
    python scripts/benchmarks/plan.py --json
    python scripts/benchmarks/plan.py --models qwen2-0.5b linen-1b        # models of `models.py`, at their real sizes
    python scripts/benchmarks/plan.py --models qwen3-8b --formula         # without compiling
    python scripts/benchmarks/plan.py --sent --target h100:8              # what a step sends, without compiling

With --models, the columns are: the peak by formula and as compiled, their ratio, the processor seconds of the plan by
formula with its suggestions, the seconds of compiling, and the predicted model FLOPs utilization. The models of a
package need an environment with that package and the extra `plan-gpu`. Notes of the plan follow, and errors.

With --sent, each line has what a device sends in a step at stage 3 in bf16, as counted in the traced step: GB, and
elements relative to (N-1)/N Psi, of which the formula of ZeRO has 3.

Nothing is allocated and nothing runs. Steps that do not fit are compiled too, because the compiler reports their peak
nevertheless. The last lines give the worst ratio of the steps that fit, and the worst of all.
"""

import argparse
import json
import os

TARGETS = {
    "gpt2-124m": "h100:8",
    "gpt2-1.5b": "h100:8",
    "vit-h14": "h100:8",
    "llama3-8b": "h100:8",
    "gpt-7.5b": "h100:64",
    "mixtral-8x7b": "h100:64",
    "llama3-70b": "h100:64",
    "gpt-128b": "h100:256",
    "llama3-405b": "h100:512",
    "gpt-1t": "h100:1024",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--target", help="one target for all presets (default: one for each preset)")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="models of models.py instead of presets")
    parser.add_argument("--formula", action="store_true", help="with --models: compile nothing")
    parser.add_argument("--sent", action="store_true", help="what presets send at stage 3; compile nothing")
    parser.add_argument("--stages", nargs="+", type=int, default=[3, 2, 1, 0])
    parser.add_argument("--remat", nargs="+", default=["full", "none"])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.models:
        return compare_models(args)
    if args.sent:
        return compare_sent(args)
    from zerojax.plan import Settings, plan

    worst = {"of the steps that fit": (1.0, "none"), "of all": (1.0, "none")}
    for preset in args.presets:
        for stage in args.stages:
            for remat in args.remat:
                settings = Settings(stage=stage, remat=remat)
                made = plan(preset, args.target or TARGETS[preset], settings, compile=True, suggest=False)
                formula, compiled = made.memory.peak_bytes, made.program.peak_bytes
                ratio = formula / compiled
                name = f"{preset} {made.cluster.target} stage {stage} remat {remat}"
                for which in ["of all"] + ["of the steps that fit"] * made.fits:
                    worst[which] = max(worst[which], (ratio, name), key=lambda entry: abs(entry[0] - 1))
                if args.json:
                    print(json.dumps(made.data()), flush=True)
                    continue
                gib = f"{formula / 2**30:9.2f} {compiled / 2**30:9.2f} GiB"
                verdict = "fits" if made.fits else ""
                print(f"{name:46s} {gib}  {ratio:.3f}  {made.program.compile_s:3.0f} s  {verdict}", flush=True)
    for which, (ratio, name) in worst.items():
        print(f"worst {which}: {ratio:.3f}, {name}")


def compare_sent(args):
    import zerojax
    from zerojax.analysis.jaxpr_counts import traced_collectives
    from zerojax.plan import PRESETS, transformer
    from zerojax.plan.job import job_of

    for name in args.presets:
        job = job_of(PRESETS[name], transformer.cudnn_attention_for_tracing)
        num_devices = int((args.target or TARGETS[name]).partition(":")[2])
        zero = zerojax.Zero(zerojax.make_mesh(devices=num_devices), 3, "bf16")
        state = zero.eval_init(job.create_model, job.tx)
        traced = zero.train_step(job.loss_fn, remat="full").trace(state, job.batch(job.rows * num_devices))
        sent_bytes = sum(c.sent_bytes for c in traced_collectives(traced.jaxpr, zero.config.mesh))
        psi = sum(leaf.size for leaf in state.layout.leaves)
        ratio = sent_bytes / (2 * psi * (num_devices - 1) / num_devices)
        if args.json:
            print(json.dumps({"preset": name, "devices": num_devices, "sent_bytes": sent_bytes, "relative": ratio}))
        else:
            print(f"{name:12} {num_devices:5d} devices  {sent_bytes / 1e9:9.2f} GB  {ratio:.3f} Psi")


def compare_models(args):
    """Prints a line for each model at its real size, at stage 3 with the first of `args.remat`."""
    from timing import versions

    target = args.target or "h100:8"
    if not args.json:
        print(f"{target}, stage 3, remat {args.remat[0]}, {', '.join(map(' '.join, versions().items()))}")
    for name in args.models:
        try:
            row = measured(name, target, args.remat[0], compiled=not args.formula)
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines()]
            row = {"model": name, "error": " ".join([type(error).__name__, *lines])[:400]}
        if args.json:
            print(json.dumps(row | {"target": target, "versions": versions()}), flush=True)
            continue
        if "error" in row:
            print(f"{name:16s} {row['error']}", flush=True)
            continue
        gib = "".join(f"{row[key] / 2**30:9.2f}" if row[key] else f"{'':9s}" for key in ("formula", "compiled"))
        ratio = f"{row['ratio']:.3f}" if row["ratio"] else ""
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else ""
        seconds = f"{row['formula_s']:5.1f} s {row['compile_s'] or 0:5.0f} s"
        print(f"{name:16s} {row['parameters'] / 1e9:6.2f} B {gib} GiB {ratio:6s} {seconds} {mfu:6s}", flush=True)
        for note in row["notes"]:
            print(f"    {note}", flush=True)


def measured(name, target, remat, compiled):
    """The figures of one model, as JSON data."""
    import time

    import models
    import optax

    from zerojax import targets
    from zerojax.plan import Job, Settings
    from zerojax.plan.planner import Planner
    from zerojax.plan.search import with_suggestions

    devices = targets.devices(target) if compiled else None
    model = models.model(name)
    models.planned = lambda: Job(
        model.create,
        optax.adamw(1e-4),
        model.loss,
        model.batch_aval,
        rows=model.rows,
        tokens=model.seq,
        options=model.options,
    )
    planner, start = Planner("models:planned", target), time.process_time()
    made = with_suggestions(planner, planner.plan(Settings(remat=remat)))
    seconds = time.process_time() - start
    row = {
        "model": name,
        "parameters": made.parameters,
        "remat": remat,
        "rows": model.rows,
        "formula": made.memory.peak_bytes,
        "formula_s": seconds,
        "notes": list(made.notes),
        **dict.fromkeys(["compiled", "ratio", "compile_s", "mfu", "step_s"]),
    }
    if devices is None:
        return row
    made = planner.plan(made.settings, devices)
    prediction = made.program.prediction
    return row | {
        "compiled": made.program.peak_bytes,
        "ratio": made.memory.peak_bytes / made.program.peak_bytes,
        "compile_s": made.program.compile_s,
        "mfu": prediction and made.throughput.model_flop_utilization,
        "step_s": prediction and prediction.step_s,
        "unread": made.program.unread,
    }


if __name__ == "__main__":
    main()
