"""Models of other packages at their real sizes, and two written here, for benchmarks of plans and schedules.

`model(name)` returns one of `NAMES`. Its dtypes are those of training in bf16: what a package calls `dtype`, the dtype
of computation, is bf16, and parameters are created in fp32. Nothing else of a published configuration is changed, but
for dropout, which is off. Nothing is allocated: the packages are imported when one of their models is asked for.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

AXES = {"fsdp": "data", "tp": None}  # the axes that Tunix's annotations name


@dataclasses.dataclass(frozen=True)
class RealModel:
    """A model at its real size.

    Attributes:
        name: its name.
        create: creates it, as in `Zero.init`.
        loss: `loss(model, batch)`, as in `Zero.train_step`.
        avals: `avals(rows, seq)` returns the avals of a batch; models of images ignore `seq`.
        rows, seq: rows of a device, and tokens in a row; for images, seq is the number of patches, or 1.
        options: those of `Zero` that the model needs, such as `axis_names`.
    """

    name: str
    create: Callable[..., Any]
    loss: Callable[..., Any]
    avals: Callable[[int, int], Any]
    rows: int = 1
    seq: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def batch_aval(self, rows: int, seq: int | None = None) -> Any:
        """The avals of a batch of `rows` rows."""
        return self.avals(rows, seq or self.seq)


def model(name: str) -> RealModel:
    """Returns the model with this name.

    Raises:
        ValueError: if there is none.
        ImportError: if its package is not installed.
    """
    if name not in NAMES:
        raise ValueError(f"models: no model {name!r}\n  fix:      use one of {', '.join(NAMES)}")
    return NAMES[name](name)


def cross_entropy(logits, labels):
    """The mean cross entropy in fp32."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, labels[..., None], axis=-1).mean()


def token_avals(rows, seq):
    """Tokens and the tokens after them."""
    return {name: jax.ShapeDtypeStruct((rows, seq), jnp.int32) for name in ("x", "y")}


def image_avals(rows, _, *, channels_first=True):
    shape = (3, 224, 224) if channels_first else (224, 224, 3)
    return {"x": jax.ShapeDtypeStruct((rows, *shape), jnp.float32), "y": jax.ShapeDtypeStruct((rows,), jnp.int32)}


# Tunix: NNX


def tunix(name, package, module, config, rows, seq, **fields):
    """A language model of Tunix in its own configuration, with the loss of the next token."""
    import importlib

    package = importlib.import_module(f"tunix.models.{package}.model")
    config = dataclasses.replace(getattr(package.ModelConfig, config)(), **fields)

    def create(rngs):
        return getattr(package, module)(config, rngs=rngs)

    def loss(model, batch):
        x = batch["x"]
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), (len(x), x.shape[1], x.shape[1]))
        logits, _ = model(x, positions, None, mask)
        return cross_entropy(logits, batch["y"])

    return RealModel(name, create, loss, token_avals, rows, seq, {"axis_names": AXES})


# Transformers: Linen


def transformers(name, model, config, fields, call, avals, rows, seq=1):
    """A Flax model of Transformers, without weights until it is created. `call(model, params, batch)` is its loss."""
    import transformers

    @functools.cache
    def made():
        return getattr(transformers, model)(getattr(transformers, config)(**fields), dtype=jnp.bfloat16, _do_init=False)

    def create(key):
        return made().init_weights(key, made().input_shape)

    return RealModel(name, create, lambda params, batch: call(made(), params, batch), avals, rows, seq)


def _tokens_classified(model, params, batch):
    return cross_entropy(model(batch["x"], params=params).logits, batch["y"])


def _images_classified(model, params, batch):
    """Batch normalization uses the running statistics, because Transformers' modules cannot share them over devices."""
    extra = {} if "vit" in params else {"train": False}
    return cross_entropy(model(batch["x"], params=params, **extra).logits, batch["y"])


def _speech_avals(rows, seq):
    return {"sound": jax.ShapeDtypeStruct((rows, 80, 3000), jnp.float32), **token_avals(rows, seq)}


def _transcribed(model, params, batch):
    logits = model(batch["sound"], decoder_input_ids=batch["x"], params=params).logits
    return cross_entropy(logits, batch["y"])


_GPT2 = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_BERT_LARGE |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VIT_L16 = {**_BERT_LARGE, "image_size": 224, "patch_size": 16, "num_labels": 1000}
_RESNET50 = {"num_labels": 1000}  # the configuration's defaults are those of ResNet-50
_WHISPER_MEDIUM = {
    "d_model": 1024,
    "encoder_layers": 24,
    "decoder_layers": 24,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "vocab_size": 51865,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


# Written here: Linen


def vgg16(name):
    """VGG-16 (arXiv 1409.1556, configuration D) for 224 x 224 pixels and 1000 classes."""
    import flax.linen as nn

    class VGG(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
                for _ in range(count):
                    x = nn.relu(nn.Conv(width, (3, 3))(x))
                x = nn.max_pool(x, (2, 2), (2, 2))
            x = x.reshape(len(x), -1)
            for width in (4096, 4096):
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(1000)(x)

    net = VGG()
    avals = functools.partial(image_avals, channels_first=False)

    def loss(variables, batch):
        images = batch["x"].astype(jax.tree.leaves(variables)[0].dtype)
        return cross_entropy(net.apply(variables, images), batch["y"])

    return RealModel(name, lambda key: net.init(key, jnp.zeros((1, 224, 224, 3))), loss, avals, rows=64)


def linen_1b(name, *, scan=False, layers=18, width=2048, heads=16, vocab=32768, seq=2048):
    """A transformer of 1.04 B parameters in Linen, pre-norm, with Linen's own attention and MLPs four times as wide."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            mask = nn.make_causal_mask(x[..., 0])
            h = nn.LayerNorm(dtype=x.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(heads, use_bias=False)(h, mask=mask)
            h = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm(dtype=x.dtype)(x)))
            return x + nn.Dense(width)(h), None

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(vocab, width)
            x = embed(tokens) + self.param("position", nn.initializers.normal(0.02), (seq, width))[: tokens.shape[1]]
            if scan:
                stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
                x, _ = stack()(x, None)
            else:
                for _ in range(layers):
                    x, _ = Block()(x)
            return nn.Dense(vocab, use_bias=False)(nn.LayerNorm(dtype=x.dtype)(x))

    net = Transformer()

    def loss(variables, batch):
        return cross_entropy(net.apply(variables, batch["x"]), batch["y"])

    return RealModel(name, lambda key: net.init(key, jnp.zeros((1, seq), jnp.int32)), loss, token_avals, 2, seq)


_BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
_IMAGES = (_images_classified, image_avals, 64)

NAMES: dict[str, Callable[[str], RealModel]] = {
    "qwen3-8b": lambda name: tunix(name, "qwen3", "Qwen3", "qwen3_8b", 1, 8192, **_BF16),
    "qwen3-8b-8-layers": lambda name: tunix(name, "qwen3", "Qwen3", "qwen3_8b", 1, 8192, num_layers=8, **_BF16),
    "qwen2-7b": lambda name: tunix(name, "qwen2", "Qwen2", "qwen2p5_7b", 1, 4096, **_BF16),
    "qwen2-0.5b": lambda name: tunix(name, "qwen2", "Qwen2", "qwen2p5_0p5b", 4, 2048, **_BF16),
    "llama3-8b": lambda name: tunix(name, "llama3", "Llama3", "llama3p1_8b", 1, 8192),
    "gemma2-2b": lambda name: tunix(name, "gemma", "Gemma", "gemma2_2b", 1, 4096),
    "gemma3-4b": lambda name: tunix(name, "gemma3", "Gemma3", "gemma3_4b_pt", 1, 4096, param_dtype=jnp.float32),
    "gpt2-124m": lambda name: transformers(
        name, "FlaxGPT2LMHeadModel", "GPT2Config", _GPT2, _tokens_classified, token_avals, 16, 1024
    ),
    "bert-large": lambda name: transformers(
        name, "FlaxBertForMaskedLM", "BertConfig", _BERT_LARGE, _tokens_classified, token_avals, 32, 512
    ),
    "vit-l16": lambda name: transformers(name, "FlaxViTForImageClassification", "ViTConfig", _VIT_L16, *_IMAGES),
    "resnet-50": lambda name: transformers(
        name, "FlaxResNetForImageClassification", "ResNetConfig", _RESNET50, *_IMAGES
    ),
    "whisper-medium": lambda name: transformers(
        name,
        "FlaxWhisperForConditionalGeneration",
        "WhisperConfig",
        _WHISPER_MEDIUM,
        _transcribed,
        _speech_avals,
        8,
        448,
    ),
    "vgg-16": vgg16,
    "linen-1b": linen_1b,
    "linen-1b-scan": functools.partial(linen_1b, scan=True),
}
