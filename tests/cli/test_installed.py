"""The tests run what a user installs: a package in site-packages, not the checkout, with all of its modules."""

import json
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import zerojax

CHECKOUT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
SITE_PACKAGES = Path(sysconfig.get_path("purelib")).resolve()


@pytest.fixture(autouse=True)
def not_editable():
    """Environments of scripts/test are never editable; those of a developer may be."""
    url = json.loads(metadata.distribution("zerojax").read_text("direct_url.json") or "{}")
    made_by_scripts = Path(sys.prefix).resolve().parent == CHECKOUT and Path(sys.prefix).name.startswith(".venv")
    if url.get("dir_info", {}).get("editable") and not made_by_scripts:
        pytest.skip("zerojax is installed editable")


def files(package):
    return {str(path.relative_to(package)) for path in package.rglob("*.py")} | {"py.typed"}


def test_the_package_is_imported_from_site_packages():
    assert Path(zerojax.__file__).resolve().parent == SITE_PACKAGES / "zerojax"


def test_a_process_of_the_tests_imports_it_from_there_too():
    code = "import zerojax; print(zerojax.__file__)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == zerojax.__file__


def test_every_module_of_the_checkout_is_installed_and_no_other():
    installed = SITE_PACKAGES / "zerojax"
    assert files(installed) == files(CHECKOUT / "zerojax")
    assert [name for name in files(installed) if not (installed / name).is_file()] == []
    stale = [
        name
        for name in files(installed)
        if (installed / name).read_bytes() != (CHECKOUT / "zerojax" / name).read_bytes()
    ]
    assert stale == []
