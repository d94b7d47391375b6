"""examples/migrate: a script for one device becomes one for many by a few lines, and trains the same."""

import difflib
import functools
import importlib
from pathlib import Path

import numpy as np
import pytest

import zerojax

pytestmark = pytest.mark.examples
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migrate"
SIZES = {"nnx": (16,), "linen": (8, 16)}  # rows of a batch, and bytes of a row


def changed_lines(kind):
    """The lines of the script for many devices that the script for one does not have."""
    before, after = (FOLDER.joinpath(f"{kind}_{name}.py").read_text().splitlines() for name in ("before", "after"))
    return [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]


def losses(name, kind):
    return importlib.import_module(name).train(4, *SIZES[kind])


@functools.cache
def losses_on_one_device(kind):
    return losses(f"{kind}_before", kind)


@pytest.mark.parametrize("kind", SIZES)
def test_an_import_and_at_most_five_lines_change(kind):
    lines = changed_lines(kind)
    assert "import zerojax" in lines
    assert 1 < len(lines) <= 6, "\n".join(lines)


@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("kind", SIZES)
def test_losses_are_those_of_the_script_for_one_device(kind, stage, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    zero = zerojax.Zero
    monkeypatch.setattr(zerojax, "Zero", lambda mesh, **options: zero(mesh, **options | {"stage": stage}))
    want, got = losses_on_one_device(kind), losses(f"{kind}_after", kind)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert want[-1] != want[0]
