"""Compares the memory that `zerojax plan` predicts by formula with the compiled peak, for presets at every stage.

    python scripts/benchmarks/plan.py                                     # all presets on clusters of H100s
    python scripts/benchmarks/plan.py --presets llama3-8b --target h200:8
    python scripts/benchmarks/plan.py --json

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
    parser.add_argument("--stages", nargs="+", type=int, default=[3, 2, 1, 0])
    parser.add_argument("--remat", nargs="+", default=["full", "none"])
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
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


if __name__ == "__main__":
    main()
