"""The share of the training state that a device holds, for models of other packages and any number of devices.

    python scripts/benchmarks/shares.py                                      # presets
    python scripts/benchmarks/shares.py --models qwen2-0.5b gemma3-4b        # of models.py, at their real sizes
    python scripts/benchmarks/shares.py --presets gpt2-1.5b --devices 5 12 --stage 1 --json

Each number is the bytes of a device relative to the bytes of the whole state (parameters and optimizer state of AdamW
in bf16 with a master copy, or the optimizer state alone at stages 1 and 2), times the number of devices: 1 would be an
even division without any padding, and N is replication. Nothing is allocated. The models of a package need an
environment with that package.
"""

import argparse
import json
import os

DEVICES = [3, 5, 6, 7, 12, 24, 40, 48, 96, 100, 128, 256, 384, 1000]
PRESETS = ["gpt2-1.5b", "llama3-8b", "mixtral-8x7b"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", default=None)
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME", help="models of models.py")
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    presets = args.presets if args.presets is not None else [] if args.models else PRESETS
    if not args.json:
        print(f"{'share x devices':16}" + "".join(f"{n:>7}" for n in args.devices))
    for name in [*presets, *args.models]:
        create, tx, options = job_of(name, name in args.models)
        shares = {n: share(create, tx, options, n, args.stage) for n in args.devices}
        if args.json:
            print(json.dumps({"model": name, "stage": args.stage, "share_times_devices": shares}), flush=True)
        else:
            print(f"{name:16}" + "".join(f"{each:7.3f}" for each in shares.values()), flush=True)


def job_of(name, is_model):
    """(create, optimizer, options of `Zero`) of a preset or a model."""
    import optax

    if is_model:
        import models

        model = models.model(name)
        return model.create, optax.adamw(1e-3), dict(model.options)
    from zerojax.plan.job import PRESETS, job_of

    job = job_of(PRESETS[name])
    return job.create_model, job.tx, {}


def share(create, tx, options, num_devices, stage):
    """The bytes that a device holds of what the stage shards, relative to all of it, times the number of devices."""
    import zerojax

    zero = zerojax.Zero(zerojax.make_mesh(devices=num_devices), stage, "bf16", **options)
    explained = zero.explain(zero.eval_init(create, tx))
    categories = ["params", "optimizer"] if stage == 3 else ["optimizer"]
    held = sum(explained.totals[name] for name in categories)
    return held / sum(explained.formula[name] for name in categories)


if __name__ == "__main__":
    main()
