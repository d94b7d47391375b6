"""Secrets in the configuration or the command line are not written down, and a run is private to its owner."""

import contextlib
import json
import os
import stat
import sys

import pytest
from support.small_run import loss, run, setting

from zerojax.utils.text import MASK, masked


def test_text_under_names_of_secrets_is_masked():
    secret = {"api_key": "a", "HFToken": ["b", "c"], "client-secret": {"user": "me"}, "db": [{"password": "d"}]}
    assert masked(secret) == {
        "api_key": MASK, "HFToken": [MASK, MASK], "client-secret": {"user": MASK}, "db": [{"password": MASK}]
    }  # fmt: skip
    assert masked("abc", "config['token']") == MASK
    shown = {"lr": 0.1, "tokenizer": "gpt2", "max_tokens": 256, "use_key": True, "token": "", "note": "a: token"}
    assert masked(shown) == shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory of a run with secrets in its command and its configuration."""
    folder = tmp_path_factory.mktemp("secret") / "run"
    config = {"lr": 0.1, "hub": {"token": "hidden-2"}}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("argv", "orig_argv"):
            patch.setattr(sys, name, [*getattr(sys, name), "--api-key", "hidden-1"])
        for name, value in (("PROJECT", "test"), ("MODE", "offline"), ("SILENT", "true")):
            patch.setenv(f"WANDB_{name}", value)
        umask = os.umask(0o022)
        run(setting().train_step(loss), folder, 1, config=config)
        os.umask(umask)
    return folder


def test_secrets_are_in_no_file_of_a_run(folder):
    """Nor in what wandb records."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"config.json", "starts.jsonl", "metrics.jsonl"} <= {file.name for file in files}
    assert any(file.suffix == ".wandb" for file in files)
    assert [file for file in files if b"hidden" in file.read_bytes()] == []
    expected = {"hub": {"token": MASK}, "lr": 0.1}
    assert json.loads((folder / "config.json").read_text()) == expected
    assert json.loads((folder / "starts.jsonl").read_text())["config"] == expected


def test_a_new_directory_is_private(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_permissions_of_a_directory_that_exists_stay(folder):
    folder.chmod(0o750)
    run(setting().train_step(loss), folder, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "starts.jsonl"])
def test_links_in_the_directory_of_a_run_are_not_written_through(tmp_path, name):
    """Somebody else who may write there cannot make a run change a file outside."""
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        run(setting().train_step(loss), tmp_path / "run", 1)
    assert outside.read_text() == "mine\n"
