"""`zerojax completion`: lets a shell complete commands, options, and the names of presets, targets and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

_SHELLS = ("bash", "zsh", "fish")
_PROGRAM, _VARIABLE = "zerojax", "_ZEROJAX_COMPLETE"
_GPU_COUNTS = ("1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1024")
_FLAT, _CUBIC = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"), ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
_SIZES = {"cpu": ("1", "2", "4", "8"), "v5e": _FLAT, "v6e": _FLAT, "v4": _CUBIC, "v5p": _CUBIC}  # common ones

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete(names: Callable[[], Iterable[str]]) -> Completion:
    """Completes the value of an option to one of some names. They are not needed until then."""
    return lambda context, parameter, incomplete: [
        CompletionItem(name) for name in names() if name.startswith(incomplete)
    ]


def preset_names() -> Iterable[str]:
    from zerojax.plan.job import PRESETS

    return PRESETS


def precision_names() -> Iterable[str]:
    from zerojax.sharding.precision import PRECISIONS

    return PRECISIONS


def remat_names() -> Iterable[str]:
    from zerojax.plan.job import REMATS

    return REMATS


def offload_names() -> Iterable[str]:
    from zerojax.step.config import OFFLOADS

    return OFFLOADS


def family_names() -> Iterable[str]:
    from zerojax.exchange.families import FAMILIES

    return FAMILIES


def target_names() -> Iterable[str]:
    """The targets of usual sizes, of all chips."""
    from zerojax.analysis.hardware import CHIPS

    for name in CHIPS:
        yield from (f"{name}:{size}" for size in _SIZES.get(name, _GPU_COUNTS))


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete zerojax.

    \b
    bash: zerojax completion bash > ~/.zerojax-complete; echo '. ~/.zerojax-complete' >> ~/.bashrc
    zsh:  zerojax completion zsh  > ~/.zerojax-complete; echo '. ~/.zerojax-complete' >> ~/.zshrc
    fish: zerojax completion fish > ~/.config/fish/completions/zerojax.fish

    A completion takes as long as importing JAX, some seconds. bash ends a word at ':', so it completes h100:8 from h1,
    but not from h100:.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, _PROGRAM, _VARIABLE).source())
