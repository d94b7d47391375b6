"""Weights with other names, dims and layouts: what is read, what is refused, and that shards are read alone."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import linen as nn, nnx
from safetensors.numpy import load_file, save_file
from support.copied import record_copies
from support.small_run import setting

from zerojax.checkpoints import CheckpointMismatch
from zerojax.cli import main
from zerojax.exchange import parameters
from zerojax.exchange.names import FAMILIES, family_sources, find_family, parse_dims
from zerojax.exchange.tensors import Reader
from zerojax.plan import Job


def filled(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def state_of(params, stage=3, **options):
    """A state with zeros in place of the parameters."""
    return setting(stage, "fp32", **options).init(lambda: jax.tree.map(jnp.zeros_like, params), optax.sgd(0.1))


def stored(tmp_path, arrays, **metadata):
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, tmp_path / "model.safetensors", metadata)
    return tmp_path / "model.safetensors"


# Dims

CASES = [  # dims, the shape in the file, our shape, and the same with numpy
    ("out in -> in out", (6, 4), (4, 6), lambda a: a.T),
    ("(heads size) width -> width heads size", (6, 4), (4, 2, 3), lambda a: a.T.reshape(4, 2, 3)),
    ("(heads size) width -> heads width size", (6, 4), (2, 4, 3), lambda a: a.reshape(2, 3, 4).transpose(0, 2, 1)),
    ("width (heads size) -> heads size width", (4, 6), (2, 3, 4), lambda a: a.T.reshape(2, 3, 4)),
    ("out in height width -> height width in out", (3, 2, 4, 5), (4, 5, 2, 3), lambda a: a.transpose(2, 3, 1, 0)),
    ("heads size width -> width (heads size)", (2, 3, 4), (4, 6), lambda a: a.reshape(6, 4).T),
    ("a b c -> (c a) b", (2, 3, 4), (8, 3), lambda a: a.transpose(2, 0, 1).reshape(8, 3)),
    ("rows columns -> 1 rows columns 1", (2, 3), (1, 2, 3, 1), lambda a: a[None, ..., None]),
    ("1 n 1 -> n", (1, 5, 1), (5,), lambda a: a[0, :, 0]),
    ("a b -> a b", (2, 3), (2, 3), lambda a: a),
    ("a b -> b a", (0, 3), (3, 0), lambda a: a.T),
]


@pytest.mark.parametrize(("text", "theirs", "ours", "expected"), CASES)
def test_a_rearranged_array_is_that_of_numpy(text, theirs, ours, expected):
    """Without a copy, so that a slice of it reads nothing else, unless one of our dims is a product."""
    dims, array = parse_dims(text), filled(*theirs)
    got = dims.to_ours(array, ours)
    np.testing.assert_array_equal(got, expected(array))
    assert got.shape == ours
    if all(len(dim) < 2 for dim in dims.ours):
        assert array.size == 0 or np.shares_memory(got, array)
        assert dims.their_shape(ours) == theirs
        np.testing.assert_array_equal(dims.to_theirs(got), array)


@pytest.mark.parametrize(
    ("text", "theirs", "ours"),
    [
        ("out in -> in out", (6, 4), (6, 4)),
        ("out in -> in out", (6, 4), (4, 6, 1)),
        ("(heads size) width -> width heads size", (6, 4), (4, 2, 2)),
        ("(a b) c -> c (b a)", (6, 4), (4, 6)),  # several sizes of a and b would do
        ("1 n -> n", (2, 3), (3,)),
    ],
)
def test_shapes_that_the_dims_do_not_connect(text, theirs, ours):
    assert not parse_dims(text).fits(theirs, ours)


# What a file is read as

WEIGHTS = {"up": {"kernel": filled(16, 16)}, "heads": {"w": filled(16, 4, 8)}, "scale": filled(16)}
THEIRS = {"fc.weight": WEIGHTS["up"]["kernel"].T, "q.weight": WEIGHTS["heads"]["w"].reshape(16, 32).T}
THEIRS |= {"norm.weight": WEIGHTS["scale"]}
MAPPING = {
    "up/kernel": {"name": "fc.weight", "dims": "out in -> in out"},
    "heads/w": {"name": "q.weight", "dims": "(heads size) width -> width heads size"},
    "scale": "norm.weight",
}


def assert_loaded(state, want):
    for (path, got), expected in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got), expected, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("stage", "mesh"), [(0, {}), (3, {}), (3, {"num_devices": 4, "replica": 2})])
def test_files_with_other_dims_are_loaded(tmp_path, stage, mesh):
    path = stored(tmp_path, THEIRS, format="pt")
    assert_loaded(parameters.load(state_of(WEIGHTS, stage, **mesh), path, mapping=MAPPING), WEIGHTS)


@pytest.mark.parametrize(("precision", "frozen"), [("bf16", ("up/*",)), ("bf16", ()), ("fp32", ("scale",))])
def test_leaves_that_files_may_lack_stay(tmp_path, precision, frozen):
    """Frozen ones too, of which the state holds no second copy."""
    path = stored(tmp_path, {"heads.w": WEIGHTS["heads"]["w"]}, format="flax")
    zero = setting(3, precision)
    zero = type(zero)(zero.config.mesh, 3, precision, frozen=frozen) if frozen else zero
    state = zero.init(lambda: WEIGHTS | {"heads": {"w": jnp.zeros((16, 4, 8))}}, optax.sgd(0.1))
    with pytest.raises(CheckpointMismatch, match="missing:  params/scale: the files have no scale"):
        parameters.load(state, path, missing=("params/up/*",))
    state = parameters.load(state, path, missing=("params/up/*", "params/scale"))
    rounded = jax.tree.map(lambda a, got: np.asarray(a).astype(got.dtype), WEIGHTS, state.params)
    assert_loaded(state, rounded)


def test_stacks_are_loaded_from_their_elements(tmp_path):
    layers, both = filled(3, 16, 8), filled(2, 4, 8, 2)
    arrays = {f"h.{i}.fc.weight": layers[i].T for i in range(3)}
    arrays |= {name: both[i].transpose(0, 2, 1).reshape(8, 8) for i, name in enumerate(("k.weight", "v.weight"))}
    path = stored(tmp_path, arrays, format="pt")
    mapping = {
        "layers/kernel": {"name": "h.#.fc.weight", "dims": "out in -> in out"},
        "kv": {"name": ["k.weight", "v.weight"], "dims": "(heads size) width -> heads width size"},
    }
    want = {"layers": {"kernel": layers}, "kv": both}
    assert_loaded(parameters.load(state_of(want), path, mapping=mapping), want)
    short = {"layers": {"kernel": layers}, "kv": filled(3, 4, 8, 2)}
    with pytest.raises(CheckpointMismatch, match=r"params/kv: 2 arrays are stacked, the state has \(3, 4, 8, 2\)"):
        parameters.load(state_of(short), path, mapping=mapping)


def test_each_device_reads_its_slice_of_a_transposed_array(tmp_path, monkeypatch):
    """Of 8 shards each element is read once; of a stack too."""
    arrays = {f"h.{i}": filled(8, 24) for i in range(2)} | {f"expert.{i}": filled(3, 2) for i in range(16)}
    path = stored(tmp_path, THEIRS | arrays, format="pt")
    weights = WEIGHTS | {"stack": filled(2, 24, 8), "experts": filled(16, 2, 3)}
    stack = {"name": "h.#", "dims": "out in -> in out"}
    mapping = MAPPING | {"stack": stack, "experts": stack | {"name": "expert.#"}}
    sizes = record_copies(monkeypatch)
    parameters.load(state_of(weights), path, mapping=mapping)
    assert sum(sizes) == sum(a.size for a in jax.tree.leaves(weights)) and max(sizes) == 2 * 32
    assert sizes.count(2 * 32) == sizes.count(2 * 16) == 8 and sizes.count(3 * 8) == sizes.count(3 * 2) == 16


# What is refused


def refused(error, state, path, **options):
    """The text of the error. The state is not donated."""
    with pytest.raises(error) as raised:
        parameters.load(state, path, **options)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    return str(raised.value)


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"format": "np"}])
def test_a_square_matrix_of_an_unknown_layout_is_refused(tmp_path, metadata):
    path = stored(tmp_path, {"kernel": filled(16, 16), "bias": filled(16)}, **metadata)
    weights = {"kernel": filled(16, 16), "bias": filled(16)}
    text = refused(ValueError, state_of(weights), path)
    assert "does not state its layout: matrices may be transposed" in text
    assert f"'kernel' of shape (16, 16) and 0 others; the metadata state 'format' {metadata.get('format')!r}" in text
    assert "fix:      layout='flax' if" in text
    names = {"kernel": "kernel", "bias": "bias"}
    assert "does not state its layout" in refused(ValueError, state_of(weights), path, mapping=names)
    assert_loaded(parameters.load(state_of(weights), path, layout="flax"), weights)
    dims = names | {"kernel": {"name": "kernel", "dims": "in out -> in out"}}
    assert_loaded(parameters.load(state_of(weights), path, mapping=dims), weights)


def test_vectors_need_no_layout(tmp_path):
    path = stored(tmp_path, {"bias": filled(16)})
    assert_loaded(parameters.load(state_of({"bias": filled(16)}), path), {"bias": filled(16)})


def test_shapes_that_are_transposed_have_a_fix(tmp_path):
    path = stored(tmp_path, {"kernel": filled(16, 8)}, format="pt")
    state = state_of({"kernel": filled(8, 16)})
    text = refused(CheckpointMismatch, state, path)
    assert (
        "shape:    params/kernel: kernel has (16, 8), the state has (8, 16)\n  fix:      if shapes are transp" in text
    )
    mapping = {"kernel": {"name": "kernel", "dims": "out in -> in out"}}
    assert_loaded(parameters.load(state, path, mapping=mapping), {"kernel": filled(16, 8).T})
    text = refused(CheckpointMismatch, state_of({"kernel": filled(16, 8)}), path, mapping=mapping)
    assert "kernel has (16, 8), which the dims do not turn into (16, 8)\n  fix:      if shapes are transp" in text


def test_arrays_that_nothing_takes_are_refused(tmp_path):
    path = stored(tmp_path, {"bias": filled(16), "head.bias": filled(2), "mask": filled(3)}, format="flax")
    state = state_of({"bias": filled(16)})
    text = refused(CheckpointMismatch, state, path, extra=("mask",))
    assert "extra:    head.bias: nothing in the state takes it (extra=('head.bias',) allows it)" in text
    assert "mask" not in text
    assert_loaded(parameters.load(state, path, extra=("head.*", "mask")), {"bias": filled(16)})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"family": "gpt5"}, "there is no such family\n  got:      'gpt5'\n  fix:      use one of llama"),
        ({"layout": "pt"}, "there is no such layout"),
        ({"family": "llama"}, "is in the layout of Flax, and a family turns it around"),
        ({"mapping": {"other": "a"}}, "the mapping has no name for a parameter or an array of the model state"),
        ({"mapping": {"mlp/kernel": {"name": "a", "dims": "a"}}}, "not of the form 'theirs -> ours'"),
    ],
)
def test_options_that_contradict_the_file_or_themselves(tmp_path, options, expected):
    path = stored(tmp_path, {"mlp.weight": filled(16, 16)}, format="flax")
    assert expected in refused(ValueError, state_of({"mlp": {"kernel": filled(16, 16)}}), path, **options)


def test_an_override_of_a_family_needs_dims(tmp_path):
    """Tied embeddings: the head is the embedding of the file."""
    embedding = filled(16, 16)
    path = stored(tmp_path, {"model.embed_tokens.weight": embedding}, format="pt")
    weights = {"model": {"embed_tokens": {"embedding": embedding}}, "lm_head": {"kernel": embedding.T}}
    text = refused(CheckpointMismatch, state_of(weights), path, family="llama")
    assert "missing:  params/lm_head/kernel: the files have no lm_head.weight" in text
    tied = {"lm_head/kernel": "model.embed_tokens.weight"}
    assert "does not state its layout" in refused(ValueError, state_of(weights), path, family="llama", mapping=tied)
    tied = {"lm_head/kernel": {"name": "model.embed_tokens.weight", "dims": "out in -> in out"}}
    assert_loaded(parameters.load(state_of(weights), path, family="llama", mapping=tied), weights)


# Families

FAMILY_CASES = [  # family, our name, the names that the files have, the name that is found
    ("gpt2", "transformer/h/0/attn/c_attn/kernel", (), "transformer.h.0.attn.c_attn.weight"),
    ("gpt2", "transformer/h/0/attn/c_attn/kernel", ("h.0.attn.c_attn.weight",), "h.0.attn.c_attn.weight"),
    ("gpt2", "h/0/ln_1/scale", ("transformer.h.0.ln_1.weight",), "transformer.h.0.ln_1.weight"),
    (
        "bert",
        "bert/embeddings/LayerNorm/scale",
        ("bert.embeddings.LayerNorm.gamma",),
        "bert.embeddings.LayerNorm.gamma",
    ),
    ("bert", "embeddings/LayerNorm/bias", ("bert.embeddings.LayerNorm.beta",), "bert.embeddings.LayerNorm.beta"),
    ("llama", "lm_head/kernel", ("lm_head.weight",), "lm_head.weight"),
    ("llama", "model/layers/11/mlp/up_proj/kernel", (), "model.layers.11.mlp.up_proj.weight"),
    ("qwen3", "model/layers/mlp/up_proj/kernel", (), "model.layers.#.mlp.up_proj.weight"),
    ("qwen3", "layers/norm/scale", ("model.layers.0.norm.weight",), "model.layers.#.norm.weight"),
    ("qwen2", "model/layers/self_attn/q_proj/bias", (), "model.layers.#.self_attn.q_proj.bias"),
]
TUNIX_CASES = [
    ("llama", "layers/11/attn/q_proj/w", (), "model.layers.11.self_attn.q_proj.weight"),
    ("qwen3", "layers/0/mlp/gate_proj", (), "model.layers.0.mlp.experts.#.gate_proj.weight"),
    ("gemma", "layers/0/pre_ffw_norm/scale", (), "model.layers.0.post_attention_layernorm.weight"),
    ("gemma2", "layers/0/pre_ffw_norm/scale", (), "model.layers.0.pre_feedforward_layernorm.weight"),
    ("gemma3", "final_norm/scale", ("language_model.model.norm.weight",), "language_model.model.norm.weight"),
]


@pytest.mark.parametrize(("family", "ours", "theirs", "want"), FAMILY_CASES)
def test_names_of_families(family, ours, theirs, want):
    """Files have or lack the prefix of the model, and old ones have other names for norms."""
    assert family_sources(find_family(family), [ours], theirs)[ours].names == (want,)


@pytest.mark.parametrize(("family", "ours", "theirs", "want"), TUNIX_CASES)
def test_names_of_families_for_tunix(family, ours, theirs, want):
    found = family_sources(find_family(family), [ours, "embedder/input_embedding", "vision/w"], theirs)
    assert found[ours].names == (want,) and "vision/w" not in found


def test_layers_of_a_scan_are_exported_one_by_one(tmp_path):
    """And loaded again, into the stack. Nothing has to be mapped."""
    layers = {"up": {"kernel": filled(3, 16, 8), "bias": filled(3, 8)}, "norm": {"scale": filled(3, 16)}}
    weights = {"model": {"layers": layers, "norm": {"scale": filled(16)}}}
    with setting(3, "fp32").checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(setting(3, "fp32").init(lambda: weights, optax.sgd(0.1)))
    files = parameters.export(tmp_path / "run", 0, tmp_path / "model", family="qwen3", max_file_bytes=1024)
    assert len(files) > 2 and files[-1].name == "model.safetensors.index.json"
    arrays = {name: array for file in files[:-1] for name, array in load_file(file).items()}
    names = {f"model.layers.{i}.{name}" for i in range(3) for name in ("up.weight", "up.bias", "norm.weight")}
    assert arrays.keys() == {*names, "model.norm.weight"}
    for i in range(3):
        np.testing.assert_array_equal(arrays[f"model.layers.{i}.up.weight"], layers["up"]["kernel"][i].T)
        np.testing.assert_array_equal(arrays[f"model.layers.{i}.norm.weight"], layers["norm"]["scale"][i])
    assert_loaded(parameters.load(state_of(weights), tmp_path / "model", family="qwen3"), weights)


def test_a_family_knows_what_is_no_weight(tmp_path):
    """The masks in the files of GPT-2, whose matrices are stored as in Flax, but for the transpose."""
    kernel, mask = filled(16, 48), np.ones((1, 1, 4, 4), np.float32)
    path = stored(tmp_path, {"h.0.attn.c_attn.weight": kernel, "h.0.attn.bias": mask}, format="pt")
    weights = {"transformer": {"h": {"0": {"attn": {"c_attn": {"kernel": kernel.T}}}}}}
    assert_loaded(parameters.load(state_of(weights), path, family="gpt2"), weights)


# Model state


class NormNNX(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(16, momentum=0.5, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.norms[0](self.dropout(self.dense(x)))


class NormLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16)(x))


X = np.random.default_rng(0).standard_normal((32, 16), np.float32)


def nnx_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def linen_loss(variables, batch):
    out, updates = NormLinen().apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["x"]) ** 2), updates


KINDS = {"nnx": (NormNNX, nnx_loss), "linen": (lambda key: NormLinen().init(key, X), linen_loss)}
NAMES = {
    "nnx": {"dense.kernel", "dense.bias", *(f"norms.0.{name}" for name in ("scale", "bias", "mean", "var"))},
    "linen": {
        *("Dense_0.kernel", "Dense_0.bias", "BatchNorm_0.scale", "BatchNorm_0.bias"),
        *("batch_stats.BatchNorm_0.mean", "batch_stats.BatchNorm_0.var"),
    },
}


def trained(kind, directory):
    """Trains three steps, so that the running statistics move, and saves the state. Returns the state."""
    create, loss = KINDS[kind]
    zero = setting(3, "fp32")
    state, step = zero.init(create, optax.sgd(0.1)), zero.train_step(loss)
    with zero.checkpoints(directory, every=3) as checkpoints:
        for _ in range(3):
            state, metrics = step(state, {"x": 2 + X})
            checkpoints.update(state, metrics)
    return state


def inference(kind, model):
    if kind == "nnx":
        model.eval()
        return np.asarray(model(X))
    return np.asarray(NormLinen().apply(model, X, train=False))


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_are_exported_and_loaded(tmp_path, kind, caplog):
    state = trained(kind, tmp_path / "run")
    with caplog.at_level(logging.WARNING, "zerojax"):
        (path,) = parameters.export(tmp_path / "run", 3, tmp_path / "model", dtype="bfloat16")
    left_out = "left out, since they are not floating: model_state/dropout/rngs/count"
    assert (left_out in caplog.text) == (kind == "nnx")
    arrays = load_file(path)
    assert arrays.keys() == NAMES[kind]
    assert {name for name, a in arrays.items() if a.dtype == np.float32} == {n for n in NAMES[kind] if n[-1] in "nr"}
    parameters.export(tmp_path / "run", 3, tmp_path / "model", overwrite=True)
    assert Reader(path).metadata == {"format": "flax", "step": "3"}
    create, _ = KINDS[kind]
    other = setting(1, "fp32", num_devices=4).init(create, optax.sgd(0.1), seed=7)
    before = inference(kind, other.model())
    after = inference(kind, parameters.load(other, path).model())
    np.testing.assert_allclose(after, inference(kind, state.model()), atol=1e-6)
    assert np.abs(after - before).max() > 0.1


def test_files_without_running_statistics_are_refused(tmp_path):
    trained("linen", tmp_path / "run")
    (path,) = parameters.export(tmp_path / "run", 3, tmp_path / "model")
    arrays = {name: a for name, a in load_file(path).items() if not name.startswith("batch_stats")}
    stored(tmp_path, arrays, format="flax")
    state = setting(3, "fp32").init(KINDS["linen"][0], optax.sgd(0.1))
    text = refused(CheckpointMismatch, state, tmp_path)
    assert "missing:  model_state/batch_stats/BatchNorm_0/mean: the files have no batch_stats.BatchNorm_0.mean" in text
    parameters.load(state, tmp_path, missing=("model_state/*",))


# Export with dims, and the command line

JOB = f"{__name__}:job"


def job():
    return Job(lambda: WEIGHTS, optax.sgd(0.1), lambda params, batch: 0.0, lambda rows: {})


def command(*arguments):
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "200"})


def test_an_export_with_dims_is_in_their_layout(tmp_path):
    (tmp_path / "names.json").write_text(json.dumps(MAPPING))
    theirs = stored(tmp_path, THEIRS, format="pt")
    arguments = ["import", tmp_path / "run", theirs, "--job", JOB, "--precision", "fp32"]
    shown = command(*arguments, "--layout", "flax")
    assert shown.exit_code == 1 and "missing:  params/heads/w: the files have no heads.w" in shown.output
    shown = command(*arguments, "--mapping", tmp_path / "names.json")
    assert shown.exit_code == 0, shown.output
    shown = command("export", tmp_path / "run", tmp_path / "model", "--mapping", tmp_path / "names.json")
    assert shown.exit_code == 0, shown.output
    assert Reader(tmp_path / "model").metadata["format"] == "pt"
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == THEIRS.keys()
    for name, array in THEIRS.items():
        np.testing.assert_array_equal(written[name], array)


def test_the_command_names_families_and_allows_differences(tmp_path):
    assert all(name in command("import", "--family", "gpt5").output for name in FAMILIES)
    arrays = {name.replace("/", "."): a for name, a in {"up/kernel": filled(16, 16), "more": filled(2)}.items()}
    path = stored(tmp_path, arrays)
    arguments = ["import", tmp_path / "run", path, "--job", JOB, "--precision", "fp32"]
    assert "extra=('more',) allows it" in command(*arguments).output
    arguments += ["--extra", "more", "--missing", "params/heads/*", "--missing", "params/scale"]
    assert "does not state its layout" in command(*arguments).output
    assert command(*arguments, "--layout", "flax").exit_code == 0
