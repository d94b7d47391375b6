"""Prints one line at the end of a build: what it has made, and the number of warnings."""

from typing import Any


def counts(app: Any, error: Exception | None) -> None:
    if error is None:
        names = len(app.env.get_domain("py").objects)
        notebooks = sum("exec_data" in metadata for metadata in app.env.nb_metadata.values())
        print(
            f"{len(app.env.all_docs)} pages, {app._warncount} warnings, {names} names in the reference, "
            f"notebooks run: {notebooks}; the first page is {app.outdir}/index.html"
        )


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", counts, priority=900)  # after the checks
    return {"parallel_read_safe": True}
