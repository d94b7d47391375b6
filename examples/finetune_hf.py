"""Fine-tunes a checkpoint of Hugging Face, Qwen 3 or Llama 3, on the source of a package of Python's standard library.

The directory has config.json, tokenizer.json and safetensors files, such as one that was downloaded, or that
pretrain_gpt.py has exported. The model is Tunix's, as it is; adapters and quantization are qwix's, as it is.

python examples/finetune_hf.py --model DIR --out /tmp/tuned --devices 8                # all weights
python examples/finetune_hf.py --model DIR --out /tmp/tuned --devices 8 --tune lora    # adapters, base in bf16
python examples/finetune_hf.py --model DIR --out /tmp/tuned --devices 8 --tune int8    # adapters, base in int8 (or fp8)

The tuned model is exported to OUT/model in the layout that it came in, with the adapters merged into the weights.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import pathlib
import shutil
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
import text
from flax import nnx
from tokenizers import Tokenizer

import zerojax
from zerojax import processes
from zerojax.checkpoints import store
from zerojax.exchange import adapters, parameters, quantized
from zerojax.exchange.tensors import Reader

# model_type of config.json -> module and class of Tunix, and its option for tied embeddings
MODELS = {"qwen3": ("qwen3", "Qwen3", "use_tied_embedding"), "llama": ("llama3", "Llama3", "weight_tying")}
QUANTIZED = {"int8": "int8", "fp8": "float8_e4m3fn"}
LINEAR = ".*(q|k|v|o|gate|up|down)_proj"  # the layers that get adapters
WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".pth", ".gguf")  # all others are copied
MAX_FILE_BYTES = 2**30  # of the arrays in one exported file
AXES = {"fsdp": "data", "tp": None}  # names of mesh axes in Tunix's models


class Model(NamedTuple):
    """A model of Tunix.

    Attributes:
        create: `create(rngs=rngs)` returns the module.
        family: the names and dims of its weights in files, see `zerojax.exchange.names`.
        is_tied: whether the embedding is the head too.
    """

    create: Callable[..., nnx.Module]
    family: str
    is_tied: bool


def read_model(folder: pathlib.Path, dtype: Any) -> Model:
    """The model that config.json describes, computed in `dtype`."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in MODELS:
        raise SystemExit(f"{folder}: model_type is {config['model_type']!r}, and not one of {', '.join(MODELS)}")
    name, cls, tied = MODELS[config["model_type"]]
    module = importlib.import_module(f"tunix.models.{name}.model")
    rope = config.get("rope_parameters") or config
    # Tunix 0.1.7 has this in its configuration, and rotates by the default of this function in any case.
    module.apply_rope.__defaults__ = (rope["rope_theta"],)
    if (rope.get("rope_scaling") or rope).get("rope_type", "default") != "default":
        logging.warning("%s: Tunix does not scale rotations, so that long texts are not computed as intended", folder)
    options = {tied: config["tie_word_embeddings"]} | ({"dtype": dtype} if name == "qwen3" else {})
    sizes = module.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=rope["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        **options,
    )
    return Model(functools.partial(getattr(module, cls), sizes), config["model_type"], config["tie_word_embeddings"])


def inputs(tokens: jax.Array) -> tuple[Any, ...]:
    """The arguments of Tunix's models: tokens, positions, no cache, and a causal mask."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return tokens, positions, None, mask


def loss_fn(model: Any, batch: Any) -> jax.Array:
    logits, _ = model(*inputs(batch["x"]))
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()


def optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0, args.lr, args.steps // 10, args.steps, args.lr / 10))


class Adapters(qwix.LoraProvider):
    """Adapters as qwix adds them, also to quantized weights that a model casts, as Tunix's Qwen 3 does."""

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        cast = jnp.astype

        def astype(x: Any, dtype: Any, **options: Any) -> Any:
            is_quantized = hasattr(x, "how")
            return x.replace(array=x.array.astype(dtype)) if is_quantized else cast(x, dtype, **options)

        return super().get_intercept_map() | {"jax.numpy.astype": astype}


def frozen_base(model: Model, rngs: nnx.Rngs) -> nnx.Module:
    """The model with weights in bf16."""
    module = model.create(rngs=rngs)
    weights = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(module, nnx.Param))
    # qwix looks for the weight that an array is computed from. It must not look beyond the weight, at an initializer.
    nnx.update(module, jax.lax.optimization_barrier(weights))
    return module


def with_adapters(model: Model, args: argparse.Namespace, rngs: nnx.Rngs) -> nnx.Module:
    """The model with a base in bf16, int8 or fp8, and adapters."""
    quantization = {"weight_qtype": QUANTIZED[args.tune]} if args.tune in QUANTIZED else {}
    provider = Adapters(module_path=LINEAR, rank=args.rank, alpha=args.alpha, **quantization)
    example = inputs(jnp.zeros((1, 8), jnp.int32))
    return qwix.apply_lora_to_model(frozen_base(model, rngs), provider, *example, rngs=rngs)


def is_new(args: argparse.Namespace) -> bool:
    """Whether the run has no checkpoint, which would contain the weights."""
    return not store.steps(args.out / "checkpoints")


def create_state(zero: zerojax.Zero, model: Model, args: argparse.Namespace) -> zerojax.TrainState:
    """The sharded state, with the weights of the files. A run that has a checkpoint restores them from it."""
    is_full = args.tune == "full"
    create = (lambda rngs: model.create(rngs=rngs)) if is_full else (lambda rngs: with_adapters(model, args, rngs))
    state = zero.init(create, optimizer(args))
    options = {"family": model.family, "extra": ["lm_head.weight"] if model.is_tied else []}
    options |= {} if is_full else {"missing": ["params/*_lora_a", "params/*_lora_b"]}
    if not is_new(args):
        return state
    files = Reader(args.model, follow_links=True)  # as they are in the cache of Hugging Face
    if args.tune not in QUANTIZED:
        return parameters.load(state, files, cast=True, **options)
    base = nnx.eval_shape(lambda: frozen_base(model, nnx.Rngs(0)))
    tuned = nnx.eval_shape(lambda: with_adapters(model, args, nnx.Rngs(0)))
    quantize = functools.partial(qwix.quantize_params, abstract_quantized_params=tuned)
    return quantized.load_quantized(state, files, nnx.to_pure_dict(nnx.state(base)), quantize, **options)


def export(state: zerojax.TrainState, model: Model, args: argparse.Namespace, dtype: str = "bfloat16") -> pathlib.Path:
    """Writes config.json, the tokenizer and the weights, with merged adapters."""
    folder = args.out / "model"
    params = state if args.tune == "full" else adapters.merged(state, args.alpha / args.rank, dtype)
    options = {"dtype": dtype, "max_file_bytes": MAX_FILE_BYTES, "overwrite": True}
    if parameters.export_params(params, folder, family=model.family, **options):  # in one of the processes
        for file in args.model.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                shutil.copy(file, folder)
        config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": dtype, "dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def load_text(args: argparse.Namespace) -> np.ndarray:
    """The tokens of the modules of a package of the standard library."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib"), args.package).glob("*.py"))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    return np.array(tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in files)).ids, np.int32)


def report(zero: zerojax.Zero, step: Any, state: zerojax.TrainState, batch: Any) -> str:
    """What a device holds, and sends in a step, next to the formula of the stage. What is sent is at most that."""
    explained, expected = zero.explain(state), step.expectation(state, batch)
    most, least = expected.most._asdict(), expected.least._asdict()
    rows = [(f"{name}, bytes", explained.totals[name], formula) for name, formula in explained.formula.items()]
    rows += [(f"{name}, bytes per step", least[name], formula) for name, formula in most.items()]
    return "\n".join(f"{name:32s} {found:>14,.0f}   formula {formula:>14,.0f}" for name, found, formula in rows)


def train(args: argparse.Namespace) -> dict[str, float]:
    options = {} if args.tune == "full" else {"trainable": nnx.LoRAParam}
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision, axis_names=AXES, **options)
    model = read_model(args.model, zero.config.precision.compute_dtype)
    state = create_state(zero, model, args)
    step, eval_step = zero.train_step(loss_fn, remat=args.remat), zero.eval_step(loss_fn)

    tokens, rows = load_text(args), processes.own_rows(args.batch)
    held_out = len(tokens) // 10

    def batch(tokens: np.ndarray, seed: int) -> Any:
        return jax.tree.map(lambda a: a[rows], text.batch(tokens, args.batch, args.context, seed))

    def evaluate(state: zerojax.TrainState) -> dict[str, float]:
        return {"loss": float(np.mean([eval_step(state, batch(tokens[-held_out:], i))["loss"] for i in range(4)]))}

    show = print if jax.process_index() == 0 else lambda text: None
    if is_new(args):
        show(f"loss of the model as it comes: {evaluate(state)['loss']:.4f}")
        show(report(zero, step, state, batch(tokens, 0)))
    config = {name: str(value) for name, value in vars(args).items() if name not in ("out", "resume", "devices")}
    state = zerojax.fit(
        zero,
        state,
        step,
        lambda i: batch(tokens[:-held_out], i),
        args.steps,
        args.out,
        evaluate=evaluate,
        config=config,
        checkpoints={"every": args.every, "keep": 1},
    )
    final = evaluate(state)
    show(f"loss of the tuned model: {final['loss']:.4f}, exported to {export(state, model, args)}")
    return final


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, steps=100, precision="bf16")
    add = parser.add_argument
    add("--model", type=pathlib.Path, required=True, metavar="DIR", help="a directory in the layout of Hugging Face")
    add("--tune", choices=("full", "lora", *QUANTIZED), default="full", help="all weights, or adapters (default: full)")
    add("--rank", type=int, default=8, metavar="N", help="rank of the adapters (default: 8)")
    add("--alpha", type=float, default=16.0, help="adapters are scaled by alpha / rank (default: 16)")
    add("--lr", type=float, default=3e-4, help="the highest learning rate (default: 3e-4)")
    add("--batch", type=int, default=32, help="rows per step, over all devices (default: 32)")
    add("--context", type=int, default=128, help="tokens per row (default: 128)")
    add("--every", type=int, default=50, help="steps between checkpoints (default: 50)")
    add("--package", default="asyncio", help="a package of the standard library (default: asyncio)")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    common.start(args)
    train(args)


if __name__ == "__main__":
    main()
