"""Trains an image classifier in Flax Linen on handwritten digits: a ResNet with BatchNorm, or a vision transformer.

python examples/train_vision.py --out /tmp/run --devices 8                     # ResNet: 99.4% of the test images
python examples/train_vision.py --out /tmp/run --devices 8 --model vit         # transformer: 97.5%

The images are the 1797 digits of scikit-learn, of 8 x 8 pixels. 359 of them are the test set, always the same; neither
8 nor any other number divides them. BatchNorm takes its statistics over the whole batch (`axis_name="data"`), so that
the result depends on neither the number of devices nor the stage.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets, model_selection

import zerojax
from zerojax import processes


class ResidualBlock(nn.Module):
    width: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, self.width, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name="data")
        y = nn.relu(norm()(conv((3, 3), self.strides)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv((3, 3))(y))
        shortcut = x if x.shape == y.shape else conv((1, 1), self.strides)(x)
        return nn.relu(shortcut + y)


class ResNet(nn.Module):
    widths: tuple[int, ...] = (16, 32, 64)

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.widths[0], (3, 3), use_bias=False)(images)
        for i, width in enumerate(self.widths):
            x = ResidualBlock(width, strides=2 if i else 1)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


class TransformerBlock(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class ViT(nn.Module):
    width: int = 64
    heads: int = 4
    layers: int = 3

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = nn.gelu(nn.Conv(self.width // 2, (3, 3))(images))
        x = nn.Conv(self.width, (2, 2), strides=2)(x)  # patches of 2 x 2 pixels
        x = x.reshape(len(x), -1, self.width)
        x = x + self.param("position", nn.initializers.normal(0.5), x.shape[1:])
        for _ in range(self.layers):
            x = TransformerBlock(self.heads)(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


MODELS = {"resnet": ResNet(), "vit": ViT()}
LEARNING_RATES = {"resnet": 5e-3, "vit": 2e-3}


def load() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(training set, test set), as images [rows, 8, 8, 1] between 0 and 1 and labels [rows]."""
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels.astype(np.int32)
    x, test_x, y, test_y = model_selection.train_test_split(
        images, labels, test_size=359, random_state=0, stratify=labels
    )
    return {"images": x, "labels": y}, {"images": test_x, "labels": test_y}


def batch(data: dict[str, np.ndarray], rows: int, i: int) -> dict[str, np.ndarray]:
    """The batch of step i + 1: the next rows of a permutation that is drawn for each epoch."""
    per_epoch = len(data["labels"]) // rows
    epoch, position = divmod(i, per_epoch)
    chosen = np.random.default_rng(epoch).permutation(len(data["labels"]))[position * rows : (position + 1) * rows]
    return {name: a[chosen] for name, a in data.items()}


def shifted(images: jax.Array, key: jax.Array) -> jax.Array:
    """Each image moved by up to one pixel in both directions, as augmentation."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    starts = jax.random.randint(key, (len(images), 2), 0, 3)
    cut = lambda image, start: jax.lax.dynamic_slice(image, (*start, 0), images.shape[1:])
    return jax.vmap(cut)(padded, starts)


def loss_fn(model: nn.Module, variables: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
    """The loss of a training step. The key differs for each step and device, so no two images are moved alike."""
    images = shifted(batch["images"], key)
    logits, updated = model.apply(variables, images, train=True, mutable=["batch_stats"])
    targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), 0.1)
    accuracy = jnp.mean(logits.argmax(-1) == batch["labels"])
    return optax.softmax_cross_entropy(logits, targets).mean(), {"accuracy": accuracy, **updated}


def test_loss_fn(model: nn.Module, variables: Any, batch: dict[str, jax.Array]) -> Any:
    logits = model.apply(variables, batch["images"], train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), {"accuracy": jnp.mean(logits.argmax(-1) == batch["labels"])}


def job(args: argparse.Namespace) -> common.Job:
    model, (data, test) = MODELS[args.model], load()
    schedule = optax.warmup_cosine_decay_schedule(0, LEARNING_RATES[args.model], args.steps // 10, args.steps)
    return common.Job(
        model=lambda key: model.init(key, jnp.zeros((1, 8, 8, 1)), train=False),
        loss_fn=functools.partial(loss_fn, model),
        optimizer=optax.adamw(schedule, weight_decay=1e-2),
        batch=functools.partial(batch, data, args.batch),
        step_options={"clip_norm": 1.0},
        test_loss_fn=functools.partial(test_loss_fn, model),
        test=test,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.parser(__doc__, steps=300)
    parser.add_argument("--model", default="resnet", choices=MODELS, help="(default: resnet)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images per step (default: 128)")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> dict[str, float]:
    """Trains, or continues to, and returns the loss and the accuracy on the test set."""
    common.start(args)
    pieces, rows = job(args), processes.own_rows(args.batch)
    zero = zerojax.Zero(zerojax.make_mesh(), args.stage, args.precision)
    state, evaluate = zero.init(pieces.model, pieces.optimizer), common.tester(zero, pieces)
    state = zerojax.fit(
        zero,
        state,
        zero.train_step(pieces.loss_fn, remat=args.remat, **pieces.step_options),
        lambda i: jax.tree.map(lambda a: a[rows], pieces.batch(i)),
        args.steps,
        args.out,
        evaluate=evaluate,
        evaluate_every=50,
        config={"model": args.model, "batch": args.batch, "steps": args.steps},
        checkpoints={"every": 50},
    )
    return evaluate(state)


def main() -> None:
    result = train(parse())
    print(f"test set of 359 images: loss {result['loss']:.3f}, accuracy {result['accuracy']:.1%}")


if __name__ == "__main__":
    main()
