"""Directories of runs and of checkpoints, as users pass them."""

from __future__ import annotations

import re
from pathlib import Path

_PATTERN = re.compile(r"[\[\]*?\\]")  # Orbax looks for files with glob patterns that contain the directory
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # `Path` makes gs:/bucket of gs://bucket


def local_directory(directory: str | Path, who: str) -> Path:
    """Returns the absolute path of a directory, which need not exist.

    Args:
        directory: on a file system.
        who: what needs it, for errors.

    Raises:
        ValueError: if it is a URL, which as a path would be a local folder with the name of the scheme; or if its
            absolute path contains a character that has a meaning in patterns, since what is saved there could not be
            read, or would be read from another directory that matches.
    """
    if match := _URL.match(str(directory)):
        raise ValueError(
            f"{who}: {match[1]}:// is not supported as a directory\n"
            f"  got:      {str(directory)!r}\n"
            f"  fix:      a directory on a file system; checkpoints(copy_to={str(directory)!r}) copies its steps there"
        )
    path = Path(directory).absolute()
    if match := _PATTERN.search(str(path)):
        raise ValueError(
            f"{who}: a directory must not have {match[0]!r} in its path\n"
            f"  got:      {str(path)!r}\n"
            f"  fix:      another name, without any of [ ] * ? \\"
        )
    return path
