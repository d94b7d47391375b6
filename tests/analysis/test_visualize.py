"""Pictures: who holds which shard, and the order of a step. They agree with the arrays and with the traced program."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from rich.text import Text

import zerojax
from zerojax import Zero
from zerojax.analysis import jaxpr_counts, visualize
from zerojax.analysis.visualize import Activity, holdings, shard_numbers, step_order

WIDTHS = [24, 40, 56, 72, 88]  # of the layers, so that the sizes of gathers tell which unit is gathered
TOKENS = np.zeros((8, 4), np.int32)
MESHES = [{}, {"model": 2}, {"replica": 2}, {"replica": 2, "model": 2}]


def create():
    layers = [{"up": jnp.ones((16, width)), "down": jnp.ones((width, 16))} for width in WIDTHS]
    return {"embed": jnp.ones((512, 16)), "layers": layers, "norm": jnp.ones(3), "head": jnp.ones((16, 128))}


def loss(params, tokens):
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x * params["norm"][0]) @ params["head"])


def started(stage=3, mesh=None, create_model=create, **options):
    zero = Zero(zerojax.make_mesh(**(mesh or {})), stage, **options)
    return zero, zero.eval_init(create_model, optax.adam(1e-3))


# Who holds which shard


def test_shards_are_numbered_as_jax_divides_arrays():
    """Devices have the same number exactly if they hold the same part."""
    for mesh in MESHES:
        mesh = zerojax.make_mesh(**mesh)
        names = [None, *mesh.axis_names, tuple(mesh.axis_names)]
        for entries in itertools.product(names, names):
            if len({name for e in entries if e for name in ([e] if isinstance(e, str) else e)}) != sum(
                1 if isinstance(e, str) else len(e) for e in entries if e
            ):
                continue  # an axis divides one dim
            parts = NamedSharding(mesh, P(*entries)).devices_indices_map((16, 16))
            starts = [tuple(part.start or 0 for part in parts[device]) for device in mesh.devices.flat]
            in_order = {start: k for k, start in enumerate(sorted(set(starts)))}
            assert shard_numbers(P(*entries), dict(mesh.shape)) == tuple(in_order[start] for start in starts)


@pytest.mark.parametrize(("stage", "mesh"), [*zip(range(4), MESHES, strict=True), (3, {})], ids=str)
def test_holdings_have_the_bytes_of_all_leaves(stage, mesh):
    zero, state = started(stage, mesh, partition_specs={"*/up": P(None, "model")} if "model" in mesh else None)
    held = holdings(state)
    totals = zero.explain(state).totals
    for category in totals:
        assert sum(row.num_bytes for row in held.rows if row.category == category) == totals[category]
    of_params = [row for row in held.rows if row.category == "params" and row.name.startswith("layers")]
    num_shards = held.axes["data"] if stage == 3 else 1
    assert {row.num_shards for row in of_params} <= {num_shards, num_shards * mesh.get("model", 1)}
    is_divided = "model" in mesh
    assert (max(row.num_shards for row in of_params) == num_shards * mesh.get("model", 1)) or not is_divided


def many_leaves():
    return {f"component_{name}": {f"leaf_{k}": jnp.ones((64, 64 + k)) for k in range(20)} for name in "abcde"}


@pytest.mark.parametrize(
    ("create_model", "width", "num_devices"), [(create, 80, 16), (many_leaves, 80, 64), (many_leaves, 150, 8)]
)
def test_a_picture_fits_into_the_terminal(create_model, width, num_devices):
    zero = Zero(zerojax.make_mesh(devices=num_devices, replica=2, model=2), 3)
    held = holdings(zero.eval_init(create_model, optax.adam(1e-3)))
    text = visualize.holdings_picture(held, width).plain
    assert max(len(line.rstrip()) for line in text.split("\n")) <= width
    digits = visualize._DIGITS[:num_devices] if num_devices > 16 else [str(k) for k in range(num_devices)]
    devices = "".join(line.split("device")[1] for line in text.split("\n") if re.match(" +device ", line))
    assert devices.replace(" ", "") == "".join(digits)


def test_a_picture_on_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, state = started(3, {"model": 2}, partition_specs={"layers/0/up": P(None, "model")})
    zerojax.visualize(state)
    lines = capsys.readouterr().out.split("\n")
    embed = next(line for line in lines if line.strip().startswith("embed"))
    assert embed.split() == ["embed", "8", "KiB", *"00112233"]
    divided = next(line for line in lines if line.split()[-8:] == list("01234567") and "device" not in line)
    assert "layers/0" in divided
    assert next(line for line in lines if line.strip().startswith("norm")).count("■") == 8


def test_colors_tell_shards_apart():
    colors = {visualize.shard_style(k, 64).bgcolor for k in range(64)}
    assert len(colors) == 64 and visualize.shard_style(0, 1).bgcolor not in colors
    _, state = started()
    assert isinstance(picture := visualize.holdings_picture(holdings(state), 80), Text) and picture.spans


# The order of a step


def order_of(stage=3, most=99, **settings):
    zero, state = started(stage)
    step = zero.train_step(loss, **settings)
    uses = step.uses(state, TOKENS)
    sizes = step.settings.prefetch, step.settings.num_microbatches, most
    return step_order(state.layout.leaves, uses, zero.config.stage, *sizes), step, state


def turns_of(order, unit, *activities):
    row = order.units.index(unit)
    return sorted(turn for (n, turn), activity in order.cells.items() if n == row and activity in activities)


@pytest.mark.parametrize(("stage", "prefetch"), [(0, 1), (1, 1), (2, 0), (3, 0), (3, 1), (3, 3)])
def test_units_compute_in_order_and_back(stage, prefetch):
    order, _, _ = order_of(stage, prefetch=prefetch)
    assert order.units == ("embed", *(f"layers/{k}" for k in range(len(WIDTHS))), "norm", "head")
    forward = [turns_of(order, unit, Activity.FORWARD) for unit in order.units]
    backward = [turns_of(order, unit, Activity.BACKWARD) for unit in order.units]
    assert all(len(each) == 1 for each in forward + backward)
    assert forward == sorted(forward) and backward == sorted(backward, reverse=True) and forward[-1] < backward[-1]
    for unit, (b,) in zip(order.units, backward, strict=True):
        (reduced,) = turns_of(order, unit, Activity.REDUCE)
        assert reduced == (b + 1 if stage >= 2 else order.first_of_end)
        gathers = turns_of(order, unit, Activity.GATHER)
        at_stage_3 = {"embed": 0, "head": 1}.get(unit, 2)  # rows of the table travel; the head is gathered once
        is_replicated = unit == "norm"  # of three elements
        assert len(gathers) == (0 if stage == 0 or is_replicated else 1 if stage < 3 else at_stage_3)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_at_most_prefetch_and_one_units_are_gathered(prefetch):
    order, _, _ = order_of(3, prefetch=prefetch)
    held = Activity.GATHER, Activity.HELD, Activity.FORWARD, Activity.BACKWARD
    at = lambda turn: [n for n in range(len(order.units)) if order.cells.get((n, turn)) in held]
    gathered = [[n for n in at(turn) if n not in order.looked_up] for turn in range(order.first_of_end)]
    assert max(map(len, gathered)) == prefetch + 1


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_order_of_gathers_is_that_of_the_traced_step(prefetch):
    """The sizes of the layers tell which of them each all_gather of the program is for."""
    order, step, state = order_of(3, prefetch=prefetch)
    unit_of = {2 * 16 * width: f"layers/{k}" for k, width in enumerate(WIDTHS)}  # both leaves in one all-gather
    assert {leaf.unit for leaf in state.layout.leaves} > set(unit_of.values())
    found = [
        unit_of[aval.size]
        for each in jaxpr_counts.transfers(step.trace(state, TOKENS).jaxpr.eqns)
        if each.kind == "all-gather"
        for aval in each.values
        if aval.size in unit_of
    ]
    shown = [(turn, unit) for unit in unit_of.values() for turn in turns_of(order, unit, Activity.GATHER)]
    turning = turns_of(order, f"layers/{len(WIDTHS) - 1}", Activity.FORWARD)[0]
    forward = sorted(pair for pair in shown if pair[0] < turning)
    backward = sorted((turn, -int(unit[-1]), unit) for turn, unit in shown if turn > turning)
    assert found == [unit for _, unit in forward] + [unit for *_, unit in backward]


@pytest.mark.parametrize("width", [80, 150])
def test_units_that_do_not_fit_are_left_out(width):
    order, _, _ = order_of(3, most=5)
    assert order.units == ("embed", "layers/0", "layers/1", "norm", "head")
    assert order.left_out == "3 segments left out: layers/2 to layers/4"
    text = visualize.order_picture(order, width).plain
    assert "3 segments left out" in text and max(map(len, text.split("\n"))) <= width
    assert "embed (rows)" in text and "looks up rows" in text
    assert visualize.most_segments(80) < visualize.most_segments(150)


def test_the_order_of_a_step_on_the_terminal(capsys):
    zero, state = started(2)
    zerojax.visualize(state, zero.train_step(loss, num_microbatches=2), np.zeros((16, 4), np.int32))
    out = capsys.readouterr().out
    assert out.startswith("stage 2 (P_os+g), prefetch=1, 2 microbatches, of which one is shown\n")
    head = next(line for line in out.split("\n") if line.startswith("head"))
    assert head.split() == ["head", *"FBrUg"]


# Files, and errors


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_pictures_are_written_to_files(tmp_path, suffix):
    zero, state = started(3, {"replica": 2, "model": 2})
    placement, order = tmp_path / "new" / f"placement.{suffix}", tmp_path / f"order.{suffix}"
    zerojax.visualize(state, path=placement)
    zerojax.visualize(state, zero.train_step(loss), TOKENS, path=str(order))
    for path, text in (placement, "params"), (order, "prefetch"):
        written = path.read_text()
        assert (
            f"<{suffix}" in written and text in written and written.count("fill=" if suffix == "svg" else "color:") > 8
        )
    with pytest.raises(ValueError, match=r"visualize: cannot write 'a.bmp'\n  fix:      pass a path that ends in .svg"):
        zerojax.visualize(state, path="a.bmp")


def test_a_step_without_a_batch_and_a_donated_state():
    zero = Zero(zerojax.make_mesh(), 3)
    state = zero.init(create, optax.adam(1e-3))
    step = zero.train_step(loss)
    with pytest.raises(
        ValueError, match=r"visualize: .*\n.*a step without a batch\n  fix:      visualize\(state, step"
    ):
        zerojax.visualize(state, step)
    jax.tree.map(lambda a: a.delete(), state)
    with pytest.raises(ValueError, match="it was donated to a step"):
        zerojax.visualize(state)
