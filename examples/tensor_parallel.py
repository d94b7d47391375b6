"""Trains the GPT of gpt_nnx.py with tensor parallelism and ZeRO on data 4 x model 2, and compares the losses.

The model is not changed. PartitionSpecs by path divide its weights over `model` as Megatron does: attention heads and
hidden units by columns of the first weight and by rows of the second, and the vocabulary of the embedding and the head.
A model can contain the same specs as Flax metadata. ZeRO shards another dim of the same weights over `data`. The
compiler adds the communication over `model`: two all-reduces of activations per block in the forward pass, and two in
the backward pass.
"""

from __future__ import annotations

import jax
import optax
import text
from gpt_nnx import GPT, loss_fn
from jax.sharding import PartitionSpec as P

import zerojax

PARTITION_SPECS = {  # dim 0 of the blocks' leaves counts layers
    "blocks/qkv/kernel": P(None, None, None, "model", None),  # layers, width, qkv, heads, head
    "blocks/out/kernel": P(None, "model", None),
    "blocks/up/kernel": P(None, None, "model"),
    "blocks/up/bias": P(None, "model"),
    "blocks/down/kernel": P(None, "model", None),
    "embed/embedding": P("model", None),
    "head/kernel": P(None, "model"),
}


def train(mesh: jax.sharding.Mesh, steps: int) -> list[float]:
    zero = zerojax.Zero(mesh, stage=3, partition_specs=PARTITION_SPECS)
    state = zero.init(GPT, optax.adamw(1e-3, b2=0.95), seed=0)
    step = zero.train_step(loss_fn, clip_norm=1.0)
    kernel = state.params["blocks"]["up"]["kernel"]
    shard = kernel.sharding.shard_shape(kernel.shape)
    print(
        f"{dict(mesh.shape)}: a device holds a {shard} shard of blocks/up/kernel {kernel.shape}, {kernel.sharding.spec}"
    )
    source, losses = text.load(), []
    for i in range(steps):
        state, metrics = step(state, text.batch(source, 16, 64, seed=i))
        losses.append(float(metrics["loss"]))
    return losses


def main() -> None:
    zerojax.simulate_devices(8)  # eight devices on a CPU; delete this line on a machine with accelerators
    one = train(zerojax.make_mesh(model=1, devices=jax.devices()[:1]), steps=5)
    eight = train(zerojax.make_mesh(model=2), steps=5)
    for i, (a, b) in enumerate(zip(one, eight, strict=True)):
        print(f"step {i}  loss on one device {a:.6f}  on data 4 x model 2 {b:.6f}")


if __name__ == "__main__":
    main()
