"""A convolutional network that reads handwritten digits, in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn import datasets, model_selection

import zerojax


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.conv = nnx.Conv(width, width, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.conv(self.norm(x)))


class Model(nnx.Module):
    def __init__(self, width: int = 32, num_blocks: int = 3, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs=rngs) for _ in range(num_blocks)])
        self.head = nnx.Linear(4 * width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = nnx.avg_pool(x, (4, 4), (4, 4))  # 8 x 8 pixels to 2 x 2
        return self.head(x.reshape(len(x), -1))


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = model(batch["images"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
    return loss, {"accuracy": jnp.mean(logits.argmax(-1) == batch["labels"])}


def train(num_steps: int = 200, batch_size: int = 64) -> list[float]:
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    x, test_x, y, test_y = model_selection.train_test_split(images, labels, test_size=0.2, random_state=0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(3e-3, num_steps)))
    model = Model(rngs=nnx.Rngs(0))
    zero = zerojax.Zero(zerojax.make_mesh(), stage=3)
    state = zero.init(model, tx)
    train_step = zero.train_step(loss_fn)
    losses = []
    for i in range(num_steps):
        rows = np.random.default_rng(i).choice(len(x), batch_size, replace=False)
        state, metrics = train_step(state, {"images": x[rows], "labels": y[rows]})
        losses.append(float(metrics["loss"]))
        if i % 20 == 0:
            print(f"step {i:3d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.3f}")
    _, metrics = nnx.jit(loss_fn)(state.model(), {"images": test_x, "labels": test_y})
    print(f"accuracy on {len(test_x)} other digits: {metrics['accuracy']:.3f}")
    return losses


if __name__ == "__main__":
    train()
