"""Shells complete commands, options, and the names of presets, targets and settings."""

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support.paths import REPO, importing

from zerojax.analysis.hardware import cluster
from zerojax.cli import main
from zerojax.cli.completion import target_names
from zerojax.plan import PRESETS

SHELLS = {"bash": "complete -o nosort -F _zerojax_completion", "zsh": "#compdef zerojax", "fish": "complete --no-files"}


def completions(*words):
    """What a shell gets for the last word: the protocol of click's script for bash."""
    environ = {"_ZEROJAX_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["zerojax", *words])}
    environ |= {"COMP_CWORD": str(len(words))}
    shown = CliRunner().invoke(main, env=environ, prog_name="zerojax")
    return [line.partition(",")[2] for line in shown.stdout.splitlines() if line]


def test_commands_and_their_commands():
    assert set(completions("")) == set(main.commands)
    assert completions("pl") == ["plan"] and set(completions("checkpoint", "e")) == {"export"}
    assert "--explain" in completions("plan", "--ex")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("plan", "--preset", ""), list(PRESETS)),
        (("plan", "--preset", "llama3-7"), ["llama3-70b"]),
        (("plan", "--target", "h100:1"), ["h100:1", "h100:16", "h100:128", "h100:1024"]),
        (("plan", "--target", "v5e:4"), ["v5e:4x4", "v5e:4x8"]),
        (("plan", "--precision", "bf16_"), ["bf16_reduce_fp32", "bf16_params"]),
        (("plan", "--remat", "o"), ["offload"]),
        (("doctor", "--precision", "fp"), ["fp32", "fp16"]),
        (("checkpoint", "export", "--family", "qwen3"), ["qwen3"]),
        (("completion", "f"), ["fish"]),
        (("plan", "--preset", "nothing"), []),
    ],
)
def test_names_of_values(words, names):
    assert completions(*words) == names


def test_every_completed_target_is_one():
    names = list(target_names())
    assert len(names) > 50 and {cluster(name).target for name in names} == set(names)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell(shell):
    shown = CliRunner().invoke(main, ["completion", shell])
    assert (
        shown.exit_code == 0 and SHELLS[shell] in shown.stdout and f"_ZEROJAX_COMPLETE={shell}_complete" in shown.stdout
    )
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=shown.stdout, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


def test_an_unknown_shell_is_an_error():
    shown = CliRunner().invoke(main, ["completion", "tcsh"])
    assert shown.exit_code == 2 and "'bash', 'zsh', 'fish'" in shown.output


@pytest.mark.once
def test_bash_completes_a_preset(tmp_path):
    """With the script as a user sources it, and a command of this name."""
    program = tmp_path / "zerojax"
    call = "from zerojax.cli import main; main(prog_name='zerojax')"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -c "{call}" "$@"\n')
    program.chmod(0o755)
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    words = "COMP_WORDS=(zerojax plan --preset llama3-8); COMP_CWORD=3; _zerojax_completion zerojax"
    command = ["bash", "-c", f"{script}\n{words}; echo ${{COMPREPLY[@]}}"]
    environ = os.environ | importing(REPO) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert ended.stdout.strip() == "llama3-8b", ended.stderr
