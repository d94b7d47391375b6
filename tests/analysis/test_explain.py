"""The tables of `explain`, `audit` and `zerojax checkpoint`: their width, their totals, and the reason of each leaf."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import nnx
from support.small_run import setting, train

import zerojax
from zerojax import Finding, Verdict, Zero
from zerojax.analysis.findings import Audit
from zerojax.checkpoints import store
from zerojax.cli import checkpoint_tables as show, main
from zerojax.utils.tables import TO_FILE, Screen
from zerojax.utils.text import bytes_text

NUM_LAYERS = 32


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.feed_forward_network = nnx.Linear(16, width, rngs=rngs)
        self.output_projection = nnx.Linear(width, 16, rngs=rngs)


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.transformer_encoder = nnx.Dict(layers=nnx.List([Block(32, rngs) for _ in range(NUM_LAYERS)]))
        self.head = nnx.Linear(16, 5, rngs=rngs)


def explain(stage, create=Deep, **options):
    zero = Zero(zerojax.make_mesh(), stage, **options)
    return zero.explain(zero.eval_init(create, optax.adamw(1e-3)))


@pytest.mark.parametrize("width", [80, 120, 150])
def test_equal_layers_are_folded_on_a_terminal(width):
    text = explain(3).text(Screen(width, folds=True))
    lines = text.split("\n")
    assert max(map(len, lines)) <= width and len(lines) < 120
    unbroken = re.sub(r"/\s+(\S+)?", "/", text)
    assert "layers/0" not in text and "layers/*" in unbroken and f"× {NUM_LAYERS}" in text
    for name in ("transformer_encoder", "feed_forward_network", "output_projection"):
        assert name in text


def test_a_file_has_a_row_for_each_leaf():
    explanation = explain(3)
    text = explanation.text(TO_FILE)
    assert max(map(len, text.split("\n"))) <= 120
    rows = [line for line in text.split("\n") if re.search(r"^\S+/\S+ .*(float32|int32)\[", line)]
    assert len(rows) == len(explanation.rows)


def test_folded_rows_have_the_bytes_of_all_layers():
    explanation = explain(3)
    text = explanation.text(Screen(200, folds=True))
    layers = [row for row in explanation.rows if row.path.endswith("feed_forward_network/kernel")]
    of_params = sum(row.bytes_per_device for row in layers if row.category == "params")
    assert of_params == NUM_LAYERS * 16 * 32 * 4 // 8 == 8 * 2**10
    assert re.search(r"feed_forward_network/kernel × 32 +float32\[16,32\] +8 KiB", text)


@pytest.mark.parametrize(
    ("stage", "categories"),
    [(0, {"params", "grads", "optimizer"}), (1, {"params", "grads"}), (2, {"params"}), (3, set())],
)
def test_a_whole_leaf_says_what_the_stage_shards(stage, categories):
    explanation = explain(stage)
    shards = ("nothing", "the optimizer state only", "the gradients and the optimizer state only", "everything")
    reason = f"stage {stage} shards {shards[stage]}"
    assert {row.category for row in explanation.rows if row.reason == reason} == categories
    for row in explanation.rows:
        assert (row.reason == reason) == (row.category in categories)
    text = explanation.text(Screen(150, folds=True))
    assert text.count(f"on a device ({reason})") == len(categories)


def test_one_shard_is_the_reason_on_one_device():
    zero = Zero(zerojax.make_mesh(devices=1), 3)
    explanation = zero.explain(zero.eval_init(Deep, optax.sgd(0.1)))
    assert {row.reason for row in explanation.rows} == {"there is one shard only"}


def test_totals_come_first_with_the_formula_and_their_sum():
    explanation = explain(2, precision="bf16")
    text = explanation.text(Screen(120, folds=True))
    size = sum(row.shape and int(np.prod(row.shape)) for row in explanation.rows if row.category == "params")
    assert explanation.formula == {"params": 2 * size, "grads": 2 * size / 8, "optimizer": 12 * size / 8 + 4 / 8}
    assert explanation.num_shards == {"params": 1, "grads": 8, "optimizer": 8}
    assert sum(explanation.totals[name] for name in ("params", "grads")) >= 2 * size * 9 / 8
    title, _, totals = text.partition("\n\n")
    assert title.startswith("stage 2 (P_os+g) on a mesh of data 8: a device holds ") and totals.startswith("Totals\n")
    of_grads = f"{bytes_text(2 * size)} / 8 = {bytes_text(size / 4)}"
    assert re.search(rf"\ngrads +8\.\d+ KiB +{of_grads}", totals)
    assert re.search(rf"\nsum +{re.search('holds (.*),', title)[1]} +", totals)


def test_replicated_leaves_have_a_row_and_a_reason():
    explanation = explain(3, lambda: {"layers": [{"w": jnp.ones((8, 8)), "s": jnp.ones(3)} for _ in range(4)]})
    text = explanation.text(Screen(80, folds=True))
    assert re.search(r"params +layers/\*/s × 4 +float32\[3\] +48 B +replicated: 3 % 8 = 3", text)


def test_an_audit_follows_the_width_of_the_terminal(monkeypatch):
    long_path = "/".join(["transformer_encoder", "layers", "3", "feed_forward_network", "kernel"])
    found = f"{long_path}: P(), 8 KiB instead of P('data'), 1 KiB"
    findings = [
        Finding("sharded", "24 of 27 leaves sharded over data", found, Verdict.BROKEN),
        Finding("wire dtype", "gathers in bfloat16, reductions in bfloat16", "no wider dtype", Verdict.OK),
    ]
    for width in (60, 80, 150):
        monkeypatch.setenv("COLUMNS", str(width))
        text = str(Audit(tuple(findings)))
        assert max(map(len, text.split("\n"))) <= width
        assert text.startswith("Audit of the compiled step: 1 ok, 1 BROKEN\n")
        assert all(name in text for name in ("transformer_encoder", "feed_forward_network", "bfloat16", "8 KiB"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    train(setting(), directory, 4)
    return directory


def test_checkpoints_fold_equal_layers_on_a_terminal(saved):
    manifest = store.read_manifest(saved, 4)
    folded = show.leaves_table(manifest, Screen(80, folds=True)).text(80)
    assert max(map(len, folded.split("\n"))) <= 80
    assert re.search(r"params/layers/\*/w × 3 +float32\[32,32\] +12 KiB +one each", folded)
    complete = CliRunner().invoke(main, ["checkpoint", "inspect", str(saved)]).output
    for path, leaf in manifest.leaves.items():
        assert re.search(rf"^{path} .*{leaf.digest}$", complete, re.MULTILINE), path


def test_differences_fold_equal_layers(saved):
    first, second = (store.read_manifest(saved, step) for step in (2, 4))
    lines = show.differences(first, second, Screen(80, folds=True)).text(80)
    assert max(map(len, lines.split("\n"))) <= 80
    assert re.search(r"params/layers/\*/w × 3 +float32\[32,32\] +one digest each +one digest each", lines)
    assert not show.differences(first, first, TO_FILE).rows
