"""What states, steps and `Zero` print: a few lines, also of avals and of donated states, without waiting."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Remat, Zero
from zerojax.utils.text import bytes_text

treescope = pytest.importorskip("treescope")  # Flax brings it

X = np.ones((8, 64), np.float32)


def create():
    return {"layers": [{"w": jnp.ones((64, 64)), "s": jnp.ones(())} for _ in range(4)]}


def mean_loss(params, x):
    for layer in params["layers"]:
        x = x @ layer["w"] * layer["s"]
    return jnp.mean(x) / 1e6


def started(**options):
    zero = Zero(zerojax.make_mesh(model=2), 3, "bf16", **options)
    return zero, zero.init(create, optax.adam(1e-3))


def held_bytes(tree):
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))


def test_a_state_has_its_step_its_stage_and_its_bytes():
    zero, state = started(frozen=["layers/0/*"])
    step = zero.train_step(mean_loss)
    state, _ = step(state, X)
    jax.block_until_ready(state)
    held = [bytes_text(held_bytes(tree)) for tree in (state.params, (state.master, state.opt_state))]
    total = bytes_text(held_bytes((state.params, state.master, state.opt_state)))
    assert repr(state).split("\n") == [
        "TrainState(step 1, stage 3 (P_os+g+p) on data 4 x model 2",
        "  16.39k parameters in 8 leaves, 12.29k of them trained",
        f"  on a device: {total} (parameters {held[0]}, optimizer state {held[1]})",
        "  not sharded: layers/*/s × 4)",
    ]


def test_avals_donated_states_and_traced_states_have_a_repr():
    zero, state = started()
    jax.block_until_ready(state)
    avals = repr(zero.eval_init(create, optax.adam(1e-3)))
    assert avals == repr(state).replace("step 0", "avals")
    zero.train_step(mean_loss)(state, X)
    assert repr(state) == avals.replace("avals", "donated to a step")
    texts = []
    jax.eval_shape(lambda state: texts.append(repr(state)), zero.eval_init(create, optax.adam(1e-3)))
    assert texts[0].startswith("TrainState(traced, stage 3")


class Running:
    """Stands for an array of a step that runs: the CPU client runs small programs before it returns."""

    shape, dtype = (), jnp.dtype(jnp.int32)

    def is_ready(self):
        return False

    def addressable_data(self, index):
        pytest.fail("reads an array that is not ready")


def test_a_step_that_runs_is_not_waited_for():
    _, state = started()
    running = dataclasses.replace(state, step=Running())
    assert repr(running).startswith("TrainState(step not ready, stage 3")


def test_no_parameters_are_read():
    """Only the number of the step comes from the devices."""
    _, state = started()
    jax.block_until_ready(state)
    with jax.transfer_guard("disallow"):
        assert "TrainState(step 0" in repr(state)


def test_zero_has_the_options_that_are_not_the_default():
    assert repr(Zero(zerojax.make_mesh(), 1)) == "Zero(stage 1 (P_os) over data on a mesh of data 8, precision 'fp32')"
    zero = Zero(zerojax.make_mesh(replica=2), 3, "bf16", frozen="embed/*", shard_dims={"*/kernel": 0})
    assert repr(zero) == (
        "Zero(stage 3 (P_os+g+p) over data on a mesh of replica 2 x data 4, precision 'bf16', "
        "shard_dims={'*/kernel': 0}, frozen=('embed/*',))"
    )
    narrow = zerojax.Precision(param_dtype=jnp.bfloat16)
    own = "parameters bfloat16, computed in float32, reduced in float32"
    assert own in repr(Zero(zerojax.make_mesh(devices=8), precision=narrow))


REMATS = "remat={'layers/1': 'dots', '*': Remat(save=('a',))}"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        ({"num_microbatches": 4, "clip_norm": 1.0, "audit": "warn"}, "num_microbatches=4, clip_norm=1.0, audit='warn'"),
        ({"remat": "full", "prefetch": 0, "bucket_bytes": 2**20}, "prefetch=0, bucket_bytes=1048576, remat='full'"),
        ({"remat": {"layers/1": "dots", "*": Remat(save=("a",))}}, REMATS),
    ],
)
def test_a_step_has_its_loss_and_the_settings_that_are_not_the_default(options, text):
    step = Zero(zerojax.make_mesh(), 2).train_step(mean_loss, **options)
    parts = ["mean_loss", "stage 2 (P_os+g) on a mesh of data 8", *([text] if text else [])]
    assert repr(step) == f"TrainStep({', '.join(parts)})"


def test_losses_without_a_name():
    zero = Zero(zerojax.make_mesh(), 2)
    assert repr(zero.eval_step(functools.partial(mean_loss))).startswith("EvalStep(mean_loss, stage 2")

    class Loss:
        def __call__(self, params, x):
            return jnp.mean(x)

    assert repr(zero.train_step(Loss())).startswith("TrainStep(Loss, ")


def test_tables_print_as_tables_in_a_session():
    zero, state = started()
    explanation = zero.explain(state)
    assert repr(explanation) == str(explanation)
    memory = zero.train_step(mean_loss).memory(state, X)
    assert repr(memory) == str(memory) and repr(memory).startswith("parameters ")


def test_treescope_shows_states():
    """With its own view of dataclasses; of a donated state too."""
    zero, state = started()
    assert "layers" in treescope.render_to_text(state)
    zero.train_step(mean_loss)(state, X)
    assert "TrainState" in treescope.render_to_text(state)
