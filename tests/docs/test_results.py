"""The page of results: the scripts that it names exist."""

import re

from support.paths import REPO


def test_scripts_of_the_results_exist():
    scripts = set(re.findall(r"scripts/[\w/.]+", (REPO / "docs" / "results.md").read_text()))
    assert scripts and [script for script in scripts if not (REPO / script).exists()] == []
