"""Batches: what is split, what every device gets whole, which dtypes are kept, and padding."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax import Weighted, Whole, Zero
from zerojax.step.batch import RowsOfSet

ROWS, CLASSES = 32, 8


def create(key):
    return {"w": jax.random.normal(key, (16, CLASSES))}


def batch_of(rows=ROWS):
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((rows, 16), np.float32), "y": rng.integers(0, CLASSES, rows)}


CLASS_WEIGHTS = np.linspace(0.5, 4, CLASSES, dtype=np.float32)


def losses(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["y"])


def weighted_by_class(params, batch):
    return jnp.mean(losses(params, batch) * batch["classes"][batch["y"]])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_what_is_whole_is_the_same_on_every_device_and_in_every_microbatch(stage, num_microbatches):
    zero = Zero(zerojax.make_mesh(), stage)
    state = zero.init(create, optax.sgd(0.1))
    params = jax.device_get(state.params)
    want, grads = jax.value_and_grad(weighted_by_class)(params, batch_of() | {"classes": CLASS_WEIGHTS})
    step = zero.train_step(weighted_by_class, num_microbatches=num_microbatches)
    after, metrics = step(state, batch_of() | {"classes": Whole(CLASS_WEIGHTS)})
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)
    np.testing.assert_allclose(after.params["w"], params["w"] - 0.1 * grads["w"], rtol=1e-5, atol=1e-6)


def test_a_tree_is_whole_in_value_and_grad():
    zero = Zero(zerojax.make_mesh(), 3)
    params, batch = create(jax.random.key(0)), batch_of()
    loss = lambda params, x, y, table: weighted_by_class(params, {"x": x, "y": y, "classes": table["classes"]})
    want = jax.value_and_grad(loss)(params, batch["x"], batch["y"], {"classes": CLASS_WEIGHTS})
    table = Whole({"classes": CLASS_WEIGHTS})
    got = jax.jit(zero.value_and_grad(loss))(zero.shard(params), batch["x"], batch["y"], table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("rows", [ROWS // 4, 2 * ROWS])
def test_arrays_with_other_rows_are_refused_before_anything_compiles(rows):
    """Both numbers divide over the devices: such an array would be cut, and the loss silently wrong."""
    zero, table = Zero(zerojax.make_mesh()), np.ones(rows, np.float32)
    step = zero.train_step(weighted_by_class)
    with pytest.raises(ValueError, match="different numbers of rows") as raised:
        step(zero.init(create, optax.sgd(0.1)), batch_of() | {"classes": table})
    assert all(text in str(raised.value) for text in ("'classes'", "'x'", f"({rows},)", "(32, 16)", "zerojax.Whole"))
    with pytest.raises(ValueError, match="different numbers of rows"):
        zero.value_and_grad(lambda params, x, table: jnp.sum(table))(create(jax.random.key(0)), batch_of()["x"], table)


def test_a_batch_with_no_rows_is_refused():
    zero = Zero(zerojax.make_mesh())
    with pytest.raises(
        ValueError, match=r"batch: 'x' has no rows\n  got:      shape \(0, 16\)\n  fix: .* multiple of 8"
    ):
        zero.train_step(weighted_by_class)(zero.eval_init(create, optax.sgd(0.1)), batch_of(0))


def test_strings_are_refused_by_name():
    zero = Zero(zerojax.make_mesh())
    step, state = zero.train_step(weighted_by_class), zero.eval_init(create, optax.sgd(0.1))
    for text in (np.array(["text"] * ROWS), "text"):
        with pytest.raises(ValueError, match=r"'caption' is not an array of numbers"):
            step(state, batch_of() | {"caption": text})


@pytest.mark.parametrize("name", ["mask", "loss_weights", "valid"])
def test_masks_and_numbers_per_row_are_not_rounded(name):
    """In bf16 a sum of 1797 ones would be 1800."""
    rows = 2048
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:1]), precision="bf16")
    mask = (np.arange(rows) < 1797).astype(np.float32)

    def loss(params, batch):
        seen.append((batch["x"].dtype, batch[name].dtype, batch["table"].dtype))
        kept = losses(params, batch) * batch[name]
        return Weighted(jnp.sum(kept), jnp.sum(batch[name])), {"count": jnp.sum(batch[name])}

    seen = []
    table = Whole(np.ones(3, np.float32))
    metrics = zero.eval_step(loss)(zero.init(create, optax.sgd(0.1)), batch_of(rows) | {name: mask, "table": table})
    assert metrics["count"] == 1797
    assert set(seen) == {(jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("float32"))}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_what_has_no_dims_but_rows_keeps_its_dtype(num_microbatches, stage):
    """Targets and numbers of the whole batch; what has further dims is cast."""
    zero = Zero(zerojax.make_mesh(), stage, "bf16")
    target, count = np.full(ROWS, 257, np.float32), np.float32(1797)  # both would be rounded, to 256 and to 1800
    seen = []

    def loss(params, batch):
        seen.append((batch["x"].dtype, batch["target"].dtype, batch["count"].dtype))
        off = jnp.mean(batch["x"] @ params["w"], 1) - batch["target"]
        return jnp.mean(off**2), {"target": jnp.mean(batch["target"]), "count": batch["count"]}

    batch = {"x": batch_of()["x"], "target": target, "count": count}
    _, metrics = zero.train_step(loss, num_microbatches=num_microbatches)(zero.init(create, optax.sgd(0.1)), batch)
    assert metrics["target"] == 257 and metrics["count"] == 1797
    assert set(seen) == {(jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("float32"))}


def test_globs_choose_the_inputs_that_are_cast():
    precision = zerojax.Precision(compute_dtype=jnp.bfloat16, cast_inputs=("x", "*/mask"))
    zero = Zero(zerojax.make_mesh(), precision=precision)
    seen = []

    def loss(params, batch):
        seen.append((batch["x"].dtype, batch["z"].dtype, batch["of"]["mask"].dtype))
        return jnp.mean(losses(params, batch))

    ones = np.ones(ROWS, np.float32)
    batch = batch_of() | {"z": ones, "of": {"mask": ones}}
    zero.train_step(loss).trace(zero.eval_init(create, optax.sgd(0.1)), batch)
    assert set(seen) == {(jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("bfloat16"))}
    assert "bfloat16 for x, */mask" in str(precision)


@pytest.mark.parametrize("num_rows", [None, 24])
def test_the_last_batch_of_an_evaluation_is_padded_with_weight_0(num_rows):
    zero, batch = Zero(zerojax.make_mesh()), batch_of(13)
    state = zero.init(create, optax.sgd(0.1))
    want = jnp.mean(losses(jax.device_get(state.params), batch))
    padded, weights = zero.pad_batch(batch, num_rows)
    assert weights.sum() == 13 and len(weights) == len(padded["x"]) == (num_rows or 16)

    def loss(params, batch):
        return Weighted(jnp.sum(batch["weights"] * losses(params, batch)), jnp.sum(batch["weights"]))

    metrics = zero.eval_step(loss)(state, padded | {"weights": weights})
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-6)


def test_a_batch_is_not_padded_to_fewer_or_to_different_rows():
    zero = Zero(zerojax.make_mesh())
    with pytest.raises(ValueError, match="more rows than it is padded to"):
        zero.pad_batch(batch_of(13), 8)
    with pytest.raises(ValueError, match="different numbers of rows"):
        zero.pad_batch(batch_of(13) | {"table": CLASS_WEIGHTS})


def test_graphs_are_stacked_one_per_device():
    """Arrays of nodes and of edges have different lengths; of a stack of padded graphs, all have the same rows."""
    rng, num, nodes, edges = np.random.default_rng(0), 8, 6, 10
    graphs = {
        "nodes": rng.standard_normal((num, nodes, 16), np.float32),
        "senders": rng.integers(0, nodes, (num, edges)),
        "receivers": rng.integers(0, nodes, (num, edges)),
        "y": rng.integers(0, CLASSES, (num, nodes)),
        "node_mask": (rng.random((num, nodes)) < 0.7).astype(np.float32),
    }

    def loss(params, graphs):
        def one(nodes, senders, receivers, y, node_mask):
            received = jax.ops.segment_sum(nodes[senders], receivers, nodes.shape[0])
            return jnp.sum(node_mask * losses(params, {"x": nodes + received, "y": y}))

        names = ("nodes", "senders", "receivers", "y", "node_mask")
        return Weighted(jnp.sum(jax.vmap(one)(*map(graphs.get, names))), jnp.sum(graphs["node_mask"]))

    zero = Zero(zerojax.make_mesh())
    state = zero.init(create, optax.sgd(0.1))
    params = jax.device_get(state.params)
    mean = lambda params: (lambda pair: pair.sum / pair.weight)(loss(params, graphs))
    want, grads = jax.value_and_grad(mean)(params)
    after, metrics = zero.train_step(loss)(state, graphs)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    np.testing.assert_allclose(after.params["w"], params["w"] - 0.1 * grads["w"], rtol=1e-5, atol=1e-6)


# Arrays that a loss closes over

ALL = np.ones((8, 16), np.float32)
DATA_SET = np.ones((24, CLASSES), np.float32)
TABLE = np.ones((8, CLASSES), np.float32)  # has as many rows as a batch of 8, which CLASSES is too


@pytest.mark.parametrize(
    ("seen", "loss"),
    [
        (r"float32\[8, 8\]", lambda params, x: jnp.mean((x @ params["w"] - TABLE) ** 2)),
        (r"float32\[8, 8\]", jax.jit(lambda params, x: jnp.mean(optax.softmax_cross_entropy(x @ params["w"], TABLE)))),
        (r"int32\[8\]", lambda params, x: jnp.mean((x @ params["w"])[jnp.arange(8), np.arange(8)])),
        (r"float32\[8, 16\]", lambda params, x: jnp.mean(ALL @ params["w"])),
        (r"float32\[8, 8\]", lambda params, x: jnp.mean((x @ params["w"] - jnp.asarray(DATA_SET)[8:16]) ** 2)),
    ],
    ids=["targets", "jit", "labels", "batch", "cut"],
)
def test_rows_that_a_loss_closes_over_are_named_with_their_line(seen, loss):
    """With one row on each device, all of them broadcast: the loss would be that of all pairs."""
    zero = Zero(zerojax.make_mesh())
    state = zero.eval_init(create, optax.sgd(0.1))
    got = rf"\n  got:      {seen} at {__file__}:\d+, where a device has 1 of 8 rows at a time\n"
    for step in zero.train_step(loss), zero.eval_step(loss):
        with pytest.warns(UserWarning, match=f"as many rows as the batch.*{got}") as caught:
            step.trace(state, ALL)
        assert len(caught) == 1


def test_elements_that_all_devices_take_for_their_rows_are_named():
    loss = lambda params, x: jnp.mean((x @ params["w"] - jnp.asarray(DATA_SET)[: len(x)]) ** 2)
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:4]))
    state, line = zero.eval_init(create, optax.sgd(0.1)), loss.__code__.co_firstlineno
    for step, what in (zero.train_step(loss), "loss"), (zero.eval_step(loss), "eval_step"):
        with pytest.warns(UserWarning, match=rf"{what}: .* same elements of an array\n  got: .*py:{line}\n") as caught:
            step.trace(state, ALL)
        assert len(caught) == 1


def test_a_loss_that_works_with_all_rows_only_says_so():
    loss = lambda params, x: jnp.mean((x @ params["w"] - TABLE) ** 2)
    zero = Zero(zerojax.make_mesh(devices=jax.devices()[:4]))
    params, state = create(jax.random.key(0)), zero.eval_init(create, optax.sgd(0.1))
    for call in (
        lambda: zero.train_step(loss).trace(state, ALL),
        lambda: zero.eval_step(loss).trace(state, ALL),
        lambda: zero.eval_step(loss).rows.trace(state, RowsOfSet(ALL, np.ones(8, bool))),
        lambda: zero.value_and_grad(loss)(params, ALL),
    ):
        with pytest.raises(
            ValueError, match=r"all 8 rows of the batch, but not with the 2 .*\n  got:  .*\(2, 8\)"
        ) as raised:
            call()
        assert f"at {__file__}:" in str(raised.value) and "into the batch, instead of closing over" in str(raised.value)
    with pytest.raises(TypeError, match="contracting"):  # also with all rows
        zero.train_step(lambda params, x: loss(params, x[:, 1:])).trace(state, ALL)


@pytest.mark.parametrize(
    "loss",
    [
        lambda params, x: jnp.mean((x @ params["w"])[:, None] + TABLE),  # of positions
        lambda params, x: jnp.mean(jnp.where(TABLE > 0, (x @ params["w"])[:, None], 0)),  # a mask
        lambda params, x: jnp.mean(x @ params["w"] * TABLE[0] @ TABLE),  # weights of classes, and a layer
        lambda params, x: jnp.mean(jnp.take(TABLE, jnp.argmax(x, -1), axis=0) * (x @ params["w"])),  # looked up
    ],
    ids=["positions", "mask", "weights", "lookup"],
)
def test_tables_with_as_many_rows_as_the_batch_may_be_closed_over(loss):
    zero = Zero(zerojax.make_mesh())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.train_step(loss).trace(zero.eval_init(create, optax.sgd(0.1)), ALL)


def test_value_and_grad_refuses_a_module_with_its_statistics():
    zero = Zero(zerojax.make_mesh())
    module = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="takes parameters, not a module") as raised:
        zero.value_and_grad(lambda module, x: jnp.mean(module(x)))(module, batch_of()["x"])
    assert "got:      BatchNorm" in str(raised.value) and "nnx.split" in str(raised.value)
    with pytest.raises(ValueError, match="takes parameters, not a module"):
        zero.shard(module)


def test_a_step_takes_one_batch_and_names_it():
    zero = Zero(zerojax.make_mesh())
    state, x = zero.eval_init(create, optax.sgd(0.1)), np.ones((30, 16), np.float32)
    step = zero.train_step(weighted_by_class)
    with pytest.raises(ValueError, match=r"the state and one batch\n.*\n  fix:  .*{'x': x"):
        step(state, x, x)
    for batch, name in ((x, "the array"), ((x, x), "element 0"), ({"x": x}, "'x'")):
        with pytest.raises(ValueError, match=rf"batch: {name} does not divide"):
            step(state, batch)


def test_an_error_in_a_loss_with_a_key_says_what_the_third_argument_is():
    """A loss of (model, x, y) gets a key as its y."""
    zero = Zero(zerojax.make_mesh())
    step = zero.train_step(lambda params, x, y: jnp.mean(x @ params["w"] - y.shape[3]))
    with pytest.raises(IndexError) as raised:
        step(zero.eval_init(create, optax.sgd(0.1)), np.ones((32, 16), np.float32))
    assert any("a key of jax.random" in note for note in raised.value.__notes__)


def test_a_key_in_the_batch_is_the_same_on_every_device_and_a_warning_says_so(recwarn):
    zero, key = Zero(zerojax.make_mesh()), jax.random.key(0)
    state = zero.eval_init(create, optax.sgd(0.1))

    def loss(params, batch):
        return jnp.mean(jax.random.uniform(batch["key"], batch["x"].shape) * batch["x"] @ params["w"])

    trace = lambda key: zero.train_step(loss).trace(state, batch_of() | {"key": key})
    for chosen in key, jax.random.PRNGKey(0):
        trace(Whole(chosen))  # the user says so
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"batch: 'key' is a random key.*\n.*\n  fix:  .*a third parameter `key`"):
        trace(key)
