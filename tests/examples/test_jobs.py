"""The jobs of examples/train_*.py: as on one device without zerojax, learning, and the same after an interruption."""

import functools
import importlib
import json

import common
import jax
import numpy as np
import one_device
import pytest

import zerojax

pytestmark = [pytest.mark.examples, pytest.mark.xdist_group("jobs")]
STEPS = 4
OPTIONS = {
    "resnet": ["train_vision", "--batch", "16"],
    "vit": ["train_vision", "--batch", "16", "--model", "vit"],
    "moe": ["train_moe", "--batch", "8", "--context", "16", "--width", "32", "--capacity", "0.8"],
    "gnn": ["train_gnn", "--packs", "8", "--width", "16", "--layers", "2"],
    "diffusion": ["train_diffusion", "--batch", "16"],
    "distill": ["train_distill", "--batch", "16", "--teacher-steps", "2", "--soft", "0.5"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The directory of the teacher, which is trained by the first test that needs it."""
    return tmp_path_factory.mktemp("teacher") / "run"


@functools.cache
def job_of(name, teacher, num_steps=STEPS, stage=3, out="unused", resume=False):
    """(the module of an example, its arguments, its job)."""
    module, *options = OPTIONS[name]
    options += ["--steps", str(num_steps), "--stage", str(stage), "--out", str(out), *(["--resume"] if resume else [])]
    options += ["--teacher", str(teacher)] if name == "distill" else []
    example = importlib.import_module(module)
    args = example.parse(options)
    return example, args, example.job(args)


@functools.cache
def on_one_device(name, teacher):
    return one_device.run(job_of(name, teacher)[2], STEPS)


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_test_results_are_those_of_one_device(name, stage, teacher):
    job, want = job_of(name, teacher)[2], on_one_device(name, teacher)
    zero = zerojax.Zero(zerojax.make_mesh(), stage, **job.zero_options)
    state, losses = zero.init(job.model, job.optimizer), []
    step = zero.train_step(job.loss_fn, **job.step_options)
    for i in range(STEPS):
        state, metrics = step(state, job.batch(i))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, want.losses, rtol=1e-4)
    got = common.tester(zero, job)(state)
    assert got.keys() == want.test.keys()
    np.testing.assert_allclose([got[key] for key in want.test], list(want.test.values()), rtol=1e-3)
    assert len(set(want.losses)) == STEPS


@pytest.mark.parametrize("name", ("resnet", "gnn"))
def test_a_run_that_is_resumed_ends_as_one_that_is_not(name, teacher, tmp_path, monkeypatch):
    fit = zerojax.fit
    saved = lambda *args, **options: fit(*args, **options | {"checkpoints": {"every": 2}})
    monkeypatch.setattr(zerojax, "fit", saved)
    whole, args, _ = job_of(name, teacher, out=tmp_path / "whole")
    want = whole.train(args)
    example, args, _ = job_of(name, teacher, out=tmp_path / "parts")

    def stopped(*args, **options):
        return saved(*args[:4], 2, *args[5:], **options)

    monkeypatch.setattr(zerojax, "fit", stopped)
    example.train(args)
    monkeypatch.setattr(zerojax, "fit", saved)
    got = example.train(job_of(name, teacher, out=tmp_path / "parts", resume=True)[1])
    assert got == want
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} >= {1, STEPS}


def test_a_run_is_not_continued_by_mistake(teacher, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    example, args, _ = job_of("gnn", teacher, out=tmp_path)
    with pytest.raises(SystemExit, match="has a run: pass --resume"):
        example.train(args)


def test_experts_that_are_full_drop_tokens(teacher):
    """With four fifths of the slots that the tokens need, at least a fifth of the choices is dropped."""
    job = job_of("moe", teacher)[2]
    zero = zerojax.Zero(zerojax.make_mesh(), 3)
    state = zero.init(job.model, job.optimizer)
    dropped = float(zero.eval_step(job.loss_fn)(state, job.batch(0))["dropped"])
    assert 0.2 <= dropped < 0.9


def test_a_frozen_teacher_has_no_optimizer_state_and_does_not_move(teacher):
    job = job_of("distill", teacher)[2]
    zero = zerojax.Zero(zerojax.make_mesh(), 3, **job.zero_options)
    state = zero.init(job.model, job.optimizer)
    start = state.model()
    start = jax.tree.map(np.array, (start["params"], start["batch_stats"]))  # the step donates the arrays
    num_moments = sum(a.size for a in jax.tree.leaves(state.opt_state) if a.ndim)
    state, _ = zero.train_step(job.loss_fn)(state, job.batch(0))
    model = state.model()
    same = jax.tree.map(np.array_equal, (model["params"], model["batch_stats"]), start)
    assert all(jax.tree.leaves((same[0]["teacher"], same[1])))
    assert not any(jax.tree.leaves(same[0]["student"]))
    assert num_moments < 2.1 * sum(a.size for a in jax.tree.leaves(start[0]["student"]))
