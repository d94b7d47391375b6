"""Zeros that make shards equal: shapes, shards on the host, the choice of the dim, shares of real models, warnings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Zero
from zerojax.plan.job import PRESETS, job_of
from zerojax.sharding.dim_choice import choose_dim
from zerojax.sharding.padding import NO_PADDING, Padding, between, cropped, padded, read_shard


def test_zeros_are_appended_and_cut_off():
    a = jnp.arange(6.0).reshape(2, 3)
    zeros = Padding(1, 2)
    np.testing.assert_array_equal(zeros.pad(a), [[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]])
    np.testing.assert_array_equal(zeros.crop(zeros.pad(a)), a)
    assert zeros.stored_shape((2, 3)) == (2, 5) and between((2, 3), (2, 5)) == zeros
    assert between((2, 3), (2, 3)) == NO_PADDING and NO_PADDING.pad(a) is a and NO_PADDING.crop(a) is a
    tree = {"a": a, "n": None}
    assert padded(tree, [zeros])["a"].shape == (2, 5)
    np.testing.assert_array_equal(cropped(padded(tree, [zeros]), [zeros])["a"], a)


def test_a_shard_is_read_up_to_the_last_element():
    a, asked = np.arange(10.0).reshape(5, 2), []

    def read(index):
        asked.append(index)
        return a[index]

    shards = [read_shard(read, (slice(3 * k, 3 * k + 3),), (5, 2), (9, 2)) for k in range(3)]
    np.testing.assert_array_equal(np.concatenate(shards), np.pad(a, [(0, 4), (0, 0)]))
    assert [index[0] for index in asked] == [slice(0, 3), slice(3, 5), slice(5, 5)]


def test_the_dim_with_the_fewest_zeros_is_padded():
    for shape, num_shards, options, choice in [
        ((4096, 1000), 24, {}, (0, "padded to 4104", 8)),  # the fewest zeros: 0.2%, not 0.8%
        ((1000, 4096), 24, {}, (1, "padded to 4104", 8)),
        ((13, 7), 8, {}, (1, "padded to 8", 1)),
        ((5, 3), 15, {}, (0, "padded to 15", 10)),
        ((64, 13, 7), 8, {"stacked": True}, (2, "padded to 8", 1)),  # never the layer dim
        ((128256, 4096), 24, {"is_table": True}, (1, "width of a table, padded to 4104", 8)),
        ((50257, 1600), 1000, {"is_table": True}, (0, "padded to 51000", 743)),  # 400 columns of zeros are too many
        ((12, 7), 4, {}, (0, "first divisible dim", 0)),
    ]:
        assert choose_dim(shape, num_shards, **{"stacked": False} | options) == choice


def test_a_dim_that_the_user_chose_is_padded():
    zero = Zero(zerojax.make_mesh(devices=3), 3, shard_dims={"a": 0, "b": None})
    params = zero.eval_init({"a": jnp.ones((4, 6)), "b": jnp.ones((4, 6))}, optax.sgd(0.1)).params
    assert params["a"].shape == (6, 6) and params["b"].shape == (4, 6)
    with pytest.raises(ValueError, match="cannot shard 'a' over data in dim 5\n  got:      shape"):
        Zero(zerojax.make_mesh(devices=3), 3, shard_dims={"a": 5}).eval_init({"a": jnp.ones((4, 6))}, optax.sgd(0.1))


# What devices hold of real models


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("preset", ["gpt2-1.5b", "llama3-8b", "mixtral-8x7b"])
def test_each_device_holds_its_share_of_a_real_model(preset, stage):
    """Before shards were padded, each of 24 devices held all of Llama 3 8B, and each of 12 held 90% of GPT-2 XL."""
    job = job_of(PRESETS[preset])
    for n in (3, 7, 24, 96, 256):
        zero = Zero(zerojax.make_mesh(devices=n), stage, "bf16")
        explanation = zero.explain(zero.eval_init(job.create_model, job.tx))
        categories = ["params", "optimizer"] if stage == 3 else ["optimizer"]
        held, even = (sum(table[c] for c in categories) for table in (explanation.totals, explanation.formula))
        assert even <= held <= 1.05 * even


def large(shape):
    return {"w": jnp.zeros(shape, jnp.float32)}


def test_many_zeros_are_warned_about():
    zero = Zero(zerojax.make_mesh(devices=1000), 3)
    with pytest.warns(UserWarning, match="the shards of 1000 devices hold 25% more than an even division") as caught:
        state = zero.eval_init(lambda key: large((1600, 1600)), optax.sgd(0.1))
    text = str(caught[0].message)
    assert "'w' of shape (1600, 1600) is padded to 2000 in dim 0" in text
    assert "fix:      820 devices hold 2.5% more" in text
    assert zero.explain(state).uneven == text


def test_a_replicated_leaf_is_warned_about():
    zero = Zero(zerojax.make_mesh(devices=8), 1, shard_dims={"w": None})
    with pytest.warns(UserWarning, match=r"100.0% of the parameters are replicated on each of 8 devices\n.*'w' of"):
        zero.eval_init(lambda key: large((1600, 1600)), optax.sgd(0.1))


def test_arrays_that_value_and_grad_cannot_pad_are_warned_about():
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:3]), 3)
    with pytest.warns(UserWarning, match="replicated on each of 3 devices\n.*'w' of shape.*\n.*init and train_step"):
        params = zero.shard({"w": jnp.ones((7, 10)), "v": jnp.ones((9, 2))})
    assert params["w"].sharding.is_fully_replicated and not params["v"].sharding.is_fully_replicated


@pytest.mark.filterwarnings("error")
def test_few_zeros_and_unsharded_stages_are_not_warned_about():
    Zero(zerojax.make_mesh(devices=24), 3).eval_init(lambda key: large((1600, 1600)), optax.sgd(0.1))
    Zero(zerojax.make_mesh(devices=1000), 0).eval_init(lambda key: large((1600, 1600)), optax.sgd(0.1))
