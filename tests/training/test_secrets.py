"""Secrets in the configuration or the command line are not written down, and a run is private to its owner."""

import json
import stat
import subprocess
import sys

import pytest
from support.paths import TESTS, importing
from support.small_run import loss, run, setting

from zerojax.utils.masking import MASK, is_secret_name, masked, masked_command, masked_json

FORMS = [
    "hf_" + "aB3" * 11,
    "sk-proj-" + "a1B2_" * 8,
    "sk-ant-api03-" + "a1B2-" * 8,
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2" * 9,
    "glpat-" + "a1B2" * 5,
    "AKIA" + "ABCD1234" * 2,
    "AIza" + "a1-_B" * 7,
    "xoxb-1234567890-abc",
    "wandb_v1_" + "a1B2" * 6,
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hf_token", "API_TOKEN", "HFToken", "accessToken", "api_key", "apikey", "APIKey", "x-api-key"),
        *("openai.api_key", "wandb_api_key", "secret", "client-secret", "clientSecretId", "password", "db_password2"),
        *(
            "passwd",
            "credential",
            "credentials",
            "private_key",
            "aws_access_key_id",
            "authorization",
            "config['token']",
        ),
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name) and masked({name: "abc"}) == {name: MASK}


@pytest.mark.parametrize(
    "name",
    [
        *("num_tokens", "max_tokens", "tokens", "tokenizer", "token_embed", "token_ids", "tokens_per_s", "key"),
        *("experts_per_token", "pad_token", "eos_token", "seed_key", "keys", "key_dim", "public_key", "secretary"),
        *("compass", "monkey", "access", "private", "lr", ""),
    ],
)
def test_names_that_are_not_secrets(name):
    assert not is_secret_name(name) and masked({name: "abc"}) == {name: "abc"}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_known_by_their_form(form):
    assert masked({"note": f"({form}), {form}"}) == {"note": f"({MASK}), {MASK}"}
    assert masked_command(["train", form]) == ["train", MASK]


@pytest.mark.parametrize(
    "text",
    [
        *("hf_hub", "sk-learn-with-a-rather-long-name", "task-1234567890-1234567890-12", "a_hf_" + "a" * 30, "AKIA"),
        *("https://host:8080/a@b", "0f" * 20, "a: token: b", "gpt2"),
    ],
)
def test_other_text_is_not_masked(text):
    assert masked({"note": text}) == {"note": text}


def test_configurations_of_any_depth():
    config = {
        "data": [{"url": "s3://me:pw@host/a", "token": "a"}, {"url": "https://host/a?lr=1&token=abc&x=2"}],
        "auth": {"credentials": {"user": "me", "pin": 1234, "is_new": True, "none": None, "empty": ""}},
        "image_token": 256,
        "api_key": ["a", "b"],
        "wandb": {"wandb_run": "0f" * 20},
        "lr": 0.1,
    }
    assert masked(config) == {
        "data": [{"url": f"s3://{MASK}@host/a", "token": MASK}, {"url": f"https://host/a?lr=1&token={MASK}&x=2"}],
        "auth": {"credentials": {"user": MASK, "pin": MASK, "is_new": True, "none": None, "empty": ""}},
        "image_token": 256,
        "api_key": [MASK, MASK],
        "wandb": {"wandb_run": MASK},
        "lr": 0.1,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--api-key=abc --lr=1", f"--api-key={MASK} --lr=1"),
        ("--api-key abc --lr 1", f"--api-key {MASK} --lr 1"),
        ("--use-secret --lr 1", "--use-secret --lr 1"),
        ("API_TOKEN=abc --max-tokens 4", f"API_TOKEN={MASK} --max-tokens 4"),
        ("+config.api_key=a=b c", f"+config.api_key={MASK} c"),
        ("--url=https://me:pw@host/ 3", f"--url=https://{MASK}@host/ 3"),
        (["-c", 'x(api_key="abc", n=1)'], ["-c", f'x(api_key="{MASK}", n=1)']),
        (["-H", "Authorization: Bearer abc"], ["-H", f"Authorization: {MASK} {MASK}"]),
        (["--password=two words"], [f"--password={MASK}"]),
        (['{"token": "abc", "lr": 1}'], [f'{{"token": "{MASK}", "lr": 1}}']),
    ],
)
def test_command_lines(arguments, expected):
    split = lambda text: text.split() if isinstance(text, str) else text
    assert masked_command(split(arguments)) == split(expected)


def test_values_of_a_difference_between_processes():
    assert masked_json('{"token": "abc", "lr": 1}', "config['model']") == f'{{"lr": 1, "token": "{MASK}"}}'
    assert masked_json('"abc"', "config['api_key']") == f'"{MASK}"'
    assert masked_json("no value", "config['api_key']") == "no value"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory of a run in a process of its own, with secrets in its command and its configuration."""
    directory = tmp_path_factory.mktemp("secret")
    (directory / "train.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom zerojax import simulate_devices; simulate_devices(8)\n"
        "from support.small_run import run, setting, loss\n"
        "config = {'lr': 0.1, 'hub': {'token': 'hidden-2'}, 'url': 'https://me:hidden-3@host'}\n"
        "run(setting().train_step(loss), Path(sys.argv[1]), 1, config=config)\n"
    )
    command = [sys.executable, "train.py", "run", "--api-key", "hidden-1", "--lr", "0.1"]
    wandb = {"WANDB_PROJECT": "test", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    env = importing(directory, TESTS) | wandb
    subprocess.run(command, check=True, cwd=directory, env=env, timeout=180, umask=0o022)
    return directory / "run"


def test_secrets_are_in_no_file_of_a_run(folder):
    """Nor in what wandb records."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"config.json", "starts.jsonl", "README.md", "metrics.jsonl"} <= {file.name for file in files}
    assert any(file.suffix == ".wandb" for file in files)
    assert [file for file in files if b"hidden" in file.read_bytes()] == []
    expected = {"hub": {"token": MASK}, "lr": 0.1, "url": f"https://{MASK}@host"}
    assert json.loads((folder / "config.json").read_text()) == expected
    start = json.loads((folder / "starts.jsonl").read_text())
    assert start["config"] == expected and start["command"].endswith(f"train.py run --api-key '{MASK}' --lr 0.1")
    assert f"--api-key '{MASK}' --lr 0.1\n" in (folder / "README.md").read_text()


def test_a_new_directory_is_private(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_permissions_of_a_directory_that_exists_stay(folder):
    folder.chmod(0o750)
    run(setting().train_step(loss), folder, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
