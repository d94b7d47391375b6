"""Checkpoints on the command line, and parameters exported to and loaded from safetensors files."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from support.small_run import adam, create, cut, digest_of, flip, largest_file, loss, setting, train

from zerojax.checkpoints import CheckpointMismatch, contents, store
from zerojax.checkpoints.pieces import LimitedReader, verify_arrays
from zerojax.cli import main
from zerojax.exchange import parameters
from zerojax.plan import Job

NAMES = {"layers/*/w": "model.layers.*.weight", "layers/*/b": "model.layers.*.bias", "odd": "odd"}
JOB = f"{__name__}:job"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four steps: (its directory, the parameters of its last state on the host)."""
    directory = tmp_path_factory.mktemp("run")
    _, state = train(setting(), directory, 4)
    return directory, jax.tree.map(np.asarray, state.master)


def command(*arguments):
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)], env={"COLUMNS": "200"})


def test_steps_are_listed_with_a_status(saved, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "copy")
    shown = command("ls", directory, "--verify")
    assert shown.exit_code == 0 and shown.stdout.count(" ok\n") == 2 and "data 8" in shown.stdout
    flip(largest_file(directory))
    assert command("ls", directory).exit_code == 0
    shown = command("ls", directory, "--verify")
    assert shown.exit_code == 1 and "arrays damaged" in shown.stdout and shown.stdout.count(" ok\n") == 1
    (directory / "step_2" / "manifest" / "metadata").write_text("{}")
    (directory / "step_4" / "commit_success.txt").unlink()
    shown = command("ls", directory)
    assert "its save did not complete" in shown.stdout and "step_2 has no readable manifest" in shown.stdout


def test_the_directory_of_a_run_stands_for_its_checkpoints(saved, tmp_path):
    """Not for nothing: a run was listed as an empty table, which `--verify` called good."""
    shutil.copytree(saved[0], tmp_path / "run" / "checkpoints")
    shown = command("ls", tmp_path / "run", "--verify")
    assert shown.exit_code == 0 and shown.stdout.count(" ok\n") == 2
    assert command("verify", tmp_path / "run").exit_code == 0
    (tmp_path / "empty").mkdir()
    for options in ((), ("--verify",)):
        shown = command("ls", tmp_path / "empty", *options)
        assert shown.exit_code == 1 and "there is no step in" in shown.output and "fix: " in shown.output


def test_arrays_are_listed_and_verified(saved, tmp_path):
    shown = command("inspect", saved[0], "--step", 2)
    assert shown.exit_code == 0 and "params/layers/0/w" in shown.stdout and "float32[32,32]" in shown.stdout
    assert "saved at stage 3 on data 8, float32, computed in bfloat16" in shown.stdout
    directory = shutil.copytree(saved[0], tmp_path / "copy")
    shown = command("verify", directory)
    assert shown.exit_code == 0 and re.fullmatch(r"step 4: (\d+) of \1 arrays are intact\n", shown.stdout)
    cut(largest_file(directory))
    shown = command("verify", directory)
    assert shown.exit_code == 1 and " arrays are intact, " in shown.stdout.splitlines()[0]
    manifest = store.read_manifest(directory, 4)
    damaged = [path for path, problem in verify_arrays(directory, 4, manifest) if problem]
    assert damaged and all(path in shown.stdout for path in damaged)
    assert len(shown.stdout.splitlines()) == (1 if len(damaged) == 1 else 1 + len(damaged))


def test_nothing_is_exported_from_a_damaged_array(saved, tmp_path):
    directory = shutil.copytree(saved[0], tmp_path / "copy")
    flip(largest_file(directory))
    shown = command("export", directory, tmp_path / "model")
    assert shown.exit_code == 1 and "arrays of step 4 are damaged" in shown.output
    assert not list((tmp_path / "model").glob("*"))


def test_differences_between_two_steps_are_shown(saved):
    assert command("diff", saved[0], 4, 4).exit_code == 0
    shown = command("diff", saved[0], 2, 4)
    assert shown.exit_code == 1 and "params/odd" in shown.stdout and "opt_state/0/mu/odd" in shown.stdout
    assert "precision" not in shown.stdout and "\nkey " not in shown.stdout


def test_a_missing_step_is_an_error(saved, tmp_path):
    shown = command("verify", saved[0], "--step", 3)
    assert shown.exit_code == 1 and "no step 3 in" in shown.output and "there are: 2, 4" in shown.output
    assert "there are: none" in command("inspect", tmp_path).output


@pytest.mark.parametrize("max_bytes", [64, 1000, 4096, 2**20])
def test_pieces_add_up_to_the_array(saved, max_bytes):
    directory, params = saved
    manifest = store.read_manifest(directory, 4)
    for path in "params/layers/1/w", "params/odd", "step":
        with LimitedReader(directory, 4) as reader:
            parts = list(reader.pieces(path, manifest.leaves[path], max_bytes))
        assert all(part.nbytes <= max(max_bytes, 4) for part in parts)
        whole = np.concatenate([part.reshape(-1) for part in parts])
        leaf = 4 if path == "step" else params["odd"] if path.endswith("odd") else params["layers"]["1"]["w"]
        np.testing.assert_array_equal(whole, np.asarray(leaf).reshape(-1))


def test_exported_parameters_are_loaded_again(saved, tmp_path):
    directory, params = saved
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    folder = tmp_path / "model"
    shown = command("export", directory, folder, "--mapping", tmp_path / "names.json")
    assert shown.exit_code == 0 and str(folder / "model.safetensors") in shown.output
    theirs = load_file(folder / "model.safetensors")
    assert set(theirs) == {f"model.layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")} | {"odd"}
    np.testing.assert_array_equal(theirs["model.layers.2.weight"], params["layers"]["2"]["w"])
    assert "already contains a model" in command("export", directory, folder).output
    with pytest.raises(ValueError, match=r"no step 3 in .*\n  got:      steps 2, 4\n"):
        parameters.export(directory, 3, tmp_path / "other")

    zero = setting(2, num_devices=4)
    state = zero.init(create, adam())
    before = digest_of(state)
    state = parameters.load(state, folder, mapping=NAMES)
    after = digest_of(state)
    expected = {path: leaf.digest for path, leaf in store.read_manifest(directory, 4).leaves.items()}
    for path in after:
        assert after[path] == (expected if path.startswith("params/") else before)[path]
    np.testing.assert_array_equal(np.asarray(state.params["odd"]), params["odd"].astype(jnp.bfloat16))
    zero.train_step(loss)


def test_parameters_are_cast_and_written_to_several_files(saved, tmp_path):
    directory, params = saved
    shown = command("export", directory, tmp_path, "--dtype", "bfloat16", "--max-file-gib", 4096 / 2**30)
    assert shown.exit_code == 0 and "model.safetensors.index.json" in shown.output
    zero = setting()
    with pytest.raises(CheckpointMismatch) as raised:
        parameters.load(zero.init(create, adam()), tmp_path)
    line = "dtype:    7 leaves: the file is bfloat16, the state has float32 (cast=True allows it): params/layers/*/b"
    assert line in str(raised.value)
    state = parameters.load(zero.init(create, adam()), tmp_path, cast=True)
    narrow = params["odd"].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(state.master["odd"]), narrow)


def job():
    """The job that `import` creates the state of."""
    return Job(create, adam(), loss, lambda rows: {})


def test_a_run_resumes_from_imported_parameters(saved, tmp_path, monkeypatch):
    directory, params = saved
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    command("export", directory, tmp_path / "model", "--mapping", "names.json")
    arguments = ["import", "run", "model", "--job", JOB, "--mapping", "names.json"]
    shown = command(*arguments)
    assert shown.exit_code == 0 and "run/step_0: 7 parameters of model" in shown.output, shown.output
    zero = setting(1, num_devices=2)
    with zero.checkpoints(tmp_path / "run") as checkpoints:
        state, start = checkpoints.resume(zero.init(create, adam()))
    assert start == 0 and int(state.opt_state[0].count) == 0
    np.testing.assert_array_equal(np.asarray(state.master["layers"]["1"]["w"]), params["layers"]["1"]["w"])
    assert command(*arguments).exit_code == 1 and "run has steps already: 0" in command(*arguments).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--job", JOB], "params/layers/0/b: the files have no layers.0.b"),
        (["--job", f"{__name__}:none"], f"'{__name__}:none' cannot be called"),
        (["--job", JOB, "--precision", "bf17"], "bf17"),
    ],
)
def test_a_failed_import_writes_nothing(tmp_path, options, message):
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    shown = command("import", tmp_path / "run", tmp_path / "model.safetensors", *options)
    assert shown.exit_code in (1, 2) and message in shown.output and "Traceback" not in shown.output
    assert not (tmp_path / "run").exists()


def test_an_import_of_a_nan_is_refused(tmp_path):
    arrays = {
        name.removeprefix("params/").replace("/", "."): np.zeros(a.shape, a.dtype) for name, a in params().items()
    }
    save_file(arrays | {"odd": np.full(7, np.nan, np.float32)}, tmp_path / "model.safetensors")
    shown = command("import", tmp_path / "run", tmp_path / "model.safetensors", "--job", JOB, "--layout", "flax")
    assert shown.exit_code == 1 and "model.safetensors is not finite: params/odd" in shown.output
    assert not (tmp_path / "run").exists()


def params():
    """The avals of the parameters, by path."""
    avals = contents.arrays(setting().eval_init(create, adam()))
    return {path: a for path, a in avals.items() if path.startswith("params/")}


def test_an_error_with_many_leaves_counts_the_rest(tmp_path):
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    many = lambda key: {f"w{i}": jax.random.normal(key, (8,)) for i in range(45)}
    with pytest.raises(CheckpointMismatch, match=r"missing:  45 leaves: .*, and 41 more; .* allows it\)\n  .*\n  fix:"):
        parameters.load(setting().init(many, adam()), tmp_path)


def test_a_mismatch_of_files_is_reported_by_leaf(tmp_path):
    arrays = {"layers.0.w": np.zeros((32, 16), np.float32), "odd": np.zeros(7, np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    state = setting().init(create, adam())
    with pytest.raises(CheckpointMismatch) as raised:
        parameters.load(state, tmp_path)
    assert "params/layers/0/b: the files have no layers.0.b" in str(raised.value)
    assert "shape:    params/layers/0/w: layers.0.w has (32, 16), the state has (32, 32)" in str(raised.value)
    with pytest.raises(ValueError, match="the mapping has no name for a parameter"):
        parameters.load(state, tmp_path, mapping={"odd": "odd"})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
