"""Weights in and out of models of other packages: shared by the tests of each package."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax.exchange import parameters

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = dict(**SMALL, vocab_size=64, num_key_value_heads=2, max_position_embeddings=32)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 12))


def zeros(params):
    """A state with zeros in place of the parameters, sharded over eight devices."""
    return zerojax.Zero(zerojax.make_mesh(), 3).init(lambda: jax.tree.map(jnp.zeros_like, params), optax.sgd(0.1))


def exported(params, directory, **options):
    """Writes parameters as files, by way of a checkpoint. Returns the folder."""
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state = zero.init(lambda: params, optax.sgd(0.1))
    with zero.checkpoints(directory / "run") as checkpoints:
        checkpoints.save(state)
    parameters.export(directory / "run", 0, directory / "model", **options)
    return directory / "model"


def saved_by_pytorch(model, inputs, directory):
    """Writes the files of a PyTorch model with random weights, as it does itself. Returns its logits."""
    import torch  # only `scripts/test --zoo --full` installs it

    model = model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        logits = model(torch.from_numpy(inputs))[0].numpy()
    model.save_pretrained(directory)
    return logits


def assert_same_logits(got, want):
    difference = np.abs(got - want).max()
    print(f"largest logit {np.abs(want).max():.2f}, largest difference {difference:.1e}")
    assert difference < 2e-5 * np.abs(want).max()
