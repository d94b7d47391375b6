"""A zoo of tiny Flax and JAX models, written as an ordinary user would write them.

``ZOO`` maps a name to a ``Model``, which says how to create the parameters, how to compute the loss and how to draw a
global batch of ``ROWS`` rows. There are two kinds:

- NNX: ``create(rngs)`` returns an ``nnx.Module`` and ``loss(model, batch)`` may change its state in place.
- Linen and plain JAX: ``create(key)`` returns a tree, either bare parameters or a dict of Linen variables, and
  ``loss(tree, batch)``, or ``loss(tree, batch, key)`` with dropout, returns new collections by name in its dict.

A loss is a scalar, or a pair of a scalar and a dict. It is the mean over rows, each of which is an independent sample.
There are two exceptions: batch normalization mixes rows, and the loss of a ``weighted`` model returns the pair
``(loss_sum, weight_sum)``.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROWS, SEQ, VOCAB, WIDTH, HEADS, LAYERS, CLASSES = 32, 8, 64, 16, 2, 3, 8


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    create: Callable  # create(rngs) -> nnx.Module, or create(key) -> tree
    loss: Callable
    batch: Callable  # batch(seed) -> dict of numpy arrays with ROWS rows
    batch_norm: bool = False
    dropout: bool = False
    weighted: bool = False


def cross_entropy(logits, labels):
    """The cross entropy of each prediction, in the shape of the labels."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def accuracy(logits, labels):
    return jnp.mean(logits.argmax(-1) == labels)


# Batches


def normal(rng, *shape):
    return rng.standard_normal((ROWS, *shape), dtype=np.float32)


def integers(rng, high, *shape):
    return rng.integers(0, high, (ROWS, *shape), dtype=np.int32)


def token_batch(seed):
    rng = np.random.default_rng(seed)
    tokens = integers(rng, VOCAB, SEQ + 1)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def masked_batch(seed):
    """Tokens with a mask: between 1 and SEQ tokens of each row count, in most rows few."""
    rng = np.random.default_rng(seed)
    lengths = 1 + np.floor(SEQ * rng.random(ROWS) ** 3)
    return token_batch(seed) | {"mask": (np.arange(SEQ) < lengths[:, None]).astype(np.float32)}


def vector_batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": normal(rng, WIDTH), "y": integers(rng, CLASSES)}


def sequence_batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": normal(rng, SEQ, WIDTH), "y": integers(rng, CLASSES)}


def image_batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": normal(rng, 8, 8, 3), "y": integers(rng, CLASSES)}


def denoise_batch(seed):
    rng = np.random.default_rng(seed)
    clean = normal(rng, 8, 8, 3)
    return {"x": clean + 0.5 * normal(rng, 8, 8, 3), "y": clean}


def graph_batch(seed):
    """One graph of 6 nodes and 12 directed edges in each row."""
    rng = np.random.default_rng(seed)
    return {
        "nodes": normal(rng, 6, 8),
        "edges": normal(rng, 12, 4),
        "senders": integers(rng, 6, 12),
        "receivers": integers(rng, 6, 12),
        "y": normal(rng),
    }


def function_batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": normal(rng, 13), "y": normal(rng, 3)}


# GPT in Linen


class LinenBlock(nn.Module):
    """A transformer block, with the signature of a scan body."""

    @nn.compact
    def __call__(self, x, _=None):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class LinenGPT(nn.Module):
    remat: bool = False
    scan: bool = False
    tied: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        position = self.param("position", nn.initializers.normal(0.02), (SEQ, WIDTH))
        x = embed(tokens) + position
        block = nn.remat(LinenBlock, prevent_cse=not self.scan) if self.remat else LinenBlock
        if self.scan:
            blocks = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = blocks()(x, None)
        else:
            for _ in range(LAYERS):
                x, _ = block()(x)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, use_bias=False)(x)


def gpt_linen(name, **options):
    net = LinenGPT(**options)

    def create(key):
        return net.init(key, jnp.zeros((1, SEQ), jnp.int32))

    def loss(variables, batch):
        return cross_entropy(net.apply(variables, batch["x"]), batch["y"]).mean()

    return Model(name, create, loss, token_batch)


# GPT in NNX


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap(in_axes=0, out_axes=0)
def stack_blocks(rngs):
    return NNXBlock(rngs)


class NNXGPT(nnx.Module):
    def __init__(self, rngs, remat=False, scan=False, tied=False):
        self.remat, self.scan = remat, scan
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (SEQ, WIDTH)))
        if scan:
            self.blocks = stack_blocks(rngs)
        else:
            self.blocks = nnx.List([NNXBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = None if tied else nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        def step(block, x):
            return block(x)

        x = self.embed(tokens) + self.position[...]
        if self.remat:
            step = nnx.remat(step)
        if self.scan:
            x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = step(block, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)


def gpt_nnx(name, **options):
    def create(rngs):
        return NNXGPT(rngs, **options)

    def loss(model, batch):
        logits = model(batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), {"accuracy": accuracy(logits, batch["y"])}

    return Model(name, create, loss, token_batch)


# Multilayer perceptrons in NNX: with shared or unused parameters, with dropout, and with experts


class Residual(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = nnx.gelu(self.up(self.norm(x)))
        return x + self.down(h if self.drop is None else self.drop(h))


class SharedMLP(nnx.Module):
    """The same layer in three places."""

    def __init__(self, rngs):
        self.layers = nnx.List([Residual(rngs)] * 3)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UnusedMLP(nnx.Module):
    """Has a second head that is never called."""

    def __init__(self, rngs):
        self.body = Residual(rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.unused = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))


class DropoutMLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Residual(rngs, rate=0.25) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Experts(nnx.Module):
    """A mixture of the two best of eight experts for each token. All experts are computed densely."""

    def __init__(self, rngs, experts=8, top=2):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.top = top
        self.router = nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (experts, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(init(rngs.params(), (experts, 2 * WIDTH, WIDTH)))

    def __call__(self, x):
        probs = nnx.softmax(self.router(x))
        best, index = jax.lax.top_k(probs, self.top)
        best = best / best.sum(-1, keepdims=True)
        gates = jnp.einsum("...k,...ke->...e", best, jax.nn.one_hot(index, probs.shape[-1]))
        h = nnx.gelu(jnp.einsum("...d,edh->...eh", x, self.up[...]))
        return jnp.einsum("...eh,ehd,...e->...d", h, self.down[...], gates)


class MoE(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.experts = Experts(rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.experts(self.norm1(x))
        return self.head(self.norm2(x))


def classifier_nnx(name, net, batch, **flags):
    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"]).mean()

    return Model(name, lambda rngs: net(rngs), loss, batch, **flags)


# Dropout in Linen


class LinenDropoutMLP(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            h = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
            h = nn.Dropout(0.25, deterministic=not train)(h)
            x = x + nn.Dense(WIDTH)(h)
        return nn.Dense(CLASSES)(x)


def dropout_linen():
    net = LinenDropoutMLP()

    def create(key):
        return net.init(key, jnp.zeros((1, WIDTH)), train=False)

    def loss(variables, batch, key):
        logits = net.apply(variables, batch["x"], train=True, rngs={"dropout": key})
        return cross_entropy(logits, batch["y"]).mean(), {"accuracy": accuracy(logits, batch["y"])}

    return Model("dropout_linen", create, loss, vector_batch, dropout=True)


# ResNet


class LinenResNet(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        def norm(x):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(x)

        def conv(x, width, kernel=3, stride=1):
            return nn.Conv(width, (kernel, kernel), strides=stride, use_bias=False)(x)

        x = nn.relu(norm(conv(x, 8)))
        for width, stride in (8, 1), (16, 2):
            h = nn.relu(norm(conv(x, width, stride=stride)))
            h = norm(conv(h, width))
            x = nn.relu(h + (x if stride == 1 else norm(conv(x, width, kernel=1, stride=stride))))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def resnet_linen(axis_name=None):
    net = LinenResNet(axis_name)

    def create(key):
        return net.init(key, jnp.zeros((1, 8, 8, 3)), train=True)

    def loss(variables, batch):
        logits, updates = net.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        aux = {"batch_stats": updates["batch_stats"], "accuracy": accuracy(logits, batch["y"])}
        return cross_entropy(logits, batch["y"]).mean(), aux

    return Model("resnet_linen", create, loss, image_batch, batch_norm=True)


class ConvNorm(nnx.Module):
    def __init__(self, inputs, outputs, rngs, kernel=3, stride=1, axis_name=None):
        self.conv = nnx.Conv(inputs, outputs, (kernel, kernel), strides=stride, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class NNXStage(nnx.Module):
    def __init__(self, inputs, outputs, rngs, stride=1, axis_name=None):
        self.conv1 = ConvNorm(inputs, outputs, rngs, stride=stride, axis_name=axis_name)
        self.conv2 = ConvNorm(outputs, outputs, rngs, axis_name=axis_name)
        self.short = None if stride == 1 else ConvNorm(inputs, outputs, rngs, 1, stride, axis_name)

    def __call__(self, x):
        h = self.conv2(nnx.relu(self.conv1(x)))
        return nnx.relu(h + (x if self.short is None else self.short(x)))


class NNXResNet(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.stem = ConvNorm(3, 8, rngs, axis_name=axis_name)
        self.stage1 = NNXStage(8, 8, rngs, axis_name=axis_name)
        self.stage2 = NNXStage(8, 16, rngs, stride=2, axis_name=axis_name)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.stage2(self.stage1(nnx.relu(self.stem(x))))
        return self.head(x.mean((1, 2)))


def resnet_nnx(axis_name=None):
    def create(rngs):
        return NNXResNet(rngs, axis_name)

    def loss(model, batch):
        logits = model(batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), {"accuracy": accuracy(logits, batch["y"])}

    return Model("resnet_nnx", create, loss, image_batch, batch_norm=True)


# LSTM


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
        return nn.Dense(CLASSES)(x[:, -1])


def lstm():
    net = LSTM()

    def create(key):
        return net.init(key, jnp.zeros((1, SEQ, WIDTH)))["params"]

    def loss(params, batch):
        logits = net.apply({"params": params}, batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), {"accuracy": accuracy(logits, batch["y"])}

    return Model("lstm", create, loss, sequence_batch)


# Graph network


class GraphNet(nn.Module):
    """Message passing on one graph, followed by a mean over its nodes."""

    steps: int = 2

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        h = nn.Dense(WIDTH)(nodes)
        for _ in range(self.steps):
            message = nn.Dense(WIDTH)(jnp.concatenate([h[senders], h[receivers], edges], axis=-1))
            total = jax.ops.segment_sum(nn.gelu(message), receivers, num_segments=len(nodes))
            h = nn.LayerNorm()(h + nn.Dense(WIDTH)(jnp.concatenate([h, total], axis=-1)))
        return nn.Dense(1)(nn.gelu(nn.Dense(WIDTH)(h)).mean(0))[0]


def gnn():
    net = GraphNet()

    def create(key):
        index = jnp.zeros(12, jnp.int32)
        return net.init(key, jnp.zeros((6, 8)), jnp.zeros((12, 4)), index, index)["params"]

    def loss(params, batch):
        def predict(nodes, edges, senders, receivers):
            return net.apply({"params": params}, nodes, edges, senders, receivers)

        y = jax.vmap(predict)(batch["nodes"], batch["edges"], batch["senders"], batch["receivers"])
        return jnp.mean((y - batch["y"]) ** 2)

    return Model("gnn", create, loss, graph_batch)


# U-Net


class UNet(nnx.Module):
    def __init__(self, rngs, channels=3, width=8):
        def conv(inputs, outputs, stride=1):
            return nnx.Conv(inputs, outputs, (3, 3), strides=stride, rngs=rngs)

        def up(inputs, outputs):
            return nnx.ConvTranspose(inputs, outputs, (2, 2), strides=2, rngs=rngs)

        self.stem = conv(channels, width)
        self.down1 = conv(width, 2 * width, 2)
        self.down2 = conv(2 * width, 4 * width, 2)
        self.up2 = up(4 * width, 2 * width)
        self.merge2 = conv(4 * width, 2 * width)
        self.up1 = up(2 * width, width)
        self.merge1 = conv(2 * width, width)
        self.head = nnx.Conv(width, channels, (1, 1), rngs=rngs)

    def __call__(self, x):
        full = nnx.silu(self.stem(x))
        half = nnx.silu(self.down1(full))
        x = nnx.silu(self.down2(half))
        x = nnx.silu(self.merge2(jnp.concatenate([self.up2(x), half], axis=-1)))
        x = nnx.silu(self.merge1(jnp.concatenate([self.up1(x), full], axis=-1)))
        return self.head(x)


def unet():
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    return Model("unet", lambda rngs: UNet(rngs), loss, denoise_batch)


# A pure function, with leaves that no mesh size divides


def function():
    def create(key):
        keys = jax.random.split(key, 3)
        init = jax.nn.initializers.lecun_normal()
        return {
            "encoder": {
                "first": {"w": init(keys[0], (13, 7)), "b": jnp.zeros(7)},
                "second": {"w": init(keys[1], (7, 17)), "b": jnp.zeros(17)},
            },
            "decoder": {"w": init(keys[2], (17, 3)), "b": jnp.zeros(3)},
            "scale": jnp.ones(()),
        }

    def loss(params, batch):
        x = batch["x"]
        for layer in params["encoder"].values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        y = params["scale"] * (x @ params["decoder"]["w"]) + params["decoder"]["b"]
        return jnp.mean((y - batch["y"]) ** 2), {"norm": jnp.mean(y**2)}

    return Model("function", create, loss, function_batch)


# A language model that weights its tokens


class MaskedLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB)(x)


def weighted():
    net = MaskedLM()

    def create(key):
        return net.init(key, jnp.zeros((1, SEQ), jnp.int32))["params"]

    def loss(params, batch):
        losses = cross_entropy(net.apply({"params": params}, batch["x"]), batch["y"])
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    return Model("weighted", create, loss, masked_batch, weighted=True)


ZOO: dict[str, Model] = {
    model.name: model
    for model in (
        gpt_linen("gpt_linen"),
        gpt_linen("gpt_linen_remat", remat=True, tied=True),
        gpt_linen("gpt_linen_scan", scan=True),
        gpt_linen("gpt_linen_scan_remat", scan=True, remat=True),
        gpt_nnx("gpt_nnx"),
        gpt_nnx("gpt_nnx_remat", remat=True, tied=True),
        gpt_nnx("gpt_nnx_scan", scan=True),
        gpt_nnx("gpt_nnx_scan_remat", scan=True, remat=True),
        gpt_nnx("tied", tied=True),
        classifier_nnx("shared", SharedMLP, vector_batch),
        classifier_nnx("unused", UnusedMLP, vector_batch),
        classifier_nnx("dropout_nnx", DropoutMLP, vector_batch, dropout=True),
        dropout_linen(),
        resnet_linen(),
        resnet_nnx(),
        lstm(),
        classifier_nnx("moe", MoE, token_batch),
        gnn(),
        unet(),
        function(),
        weighted(),
    )
}
