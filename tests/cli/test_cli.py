"""The command-line interface as a whole. Each command is tested with what it does."""

import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from click.testing import CliRunner
from support.paths import REPO

import zerojax.cli

COMMANDS = ("plan", "launch", "doctor", "checkpoint", "init")


def test_the_script_is_the_group_of_all_commands():
    module, _, name = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["scripts"]["zerojax"].partition(
        ":"
    )
    main = getattr(import_module(module), name)
    assert set(main.commands) == set(COMMANDS)
    commands = {"ls", "inspect", "verify", "diff", "fetch", "export", "import"}
    assert set(main.commands["checkpoint"].commands) == commands
    for command in COMMANDS:
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0


def test_the_help_says_of_each_command_what_it_does_in_whole_sentences():
    shown = CliRunner().invoke(zerojax.cli.main, ["--help"], terminal_width=80).output
    assert "Write a starting project into DIRECTORY." in shown and "..." not in shown.split("Commands:")[1]


@pytest.mark.once
def test_the_interface_runs_as_a_module():
    ended = subprocess.run([sys.executable, "-P", "-m", "zerojax.cli", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "python -m zerojax.cli" in ended.stdout and all(name in ended.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("pl",), ["plan"]),
        (("plan", "--preset", "llama3-7"), ["llama3-70b"]),
        (("doctor", "--precision", "fp"), ["fp32", "fp16"]),
    ],
)
def test_a_shell_completes_commands_and_values(words, names):
    environ = {"_ZEROJAX_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["zerojax", *words])}
    environ |= {"COMP_CWORD": str(len(words))}
    shown = CliRunner().invoke(zerojax.cli.main, env=environ, prog_name="zerojax")
    assert [line.partition(",")[2] for line in shown.stdout.splitlines()] == names
