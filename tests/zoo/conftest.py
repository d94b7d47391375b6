"""Leaves out the tests of the package that belongs into the other environment. Nothing is skipped: an environment that
lacks its own package fails."""

from zoo.entries import ENVIRONMENT

collect_ignore_glob = {
    "tunix": ["test_transformers*.py"],
    "transformers": ["test_tunix*.py"],
}[ENVIRONMENT]
