"""Rewrites an sdist so that it has the same bytes whenever and by whomever it is built.

    SOURCE_DATE_EPOCH=1767225600 python scripts/repack.py dist/zerojax-0.1.0.tar.gz

setuptools keeps the times, the permissions and the owner of each file, and gzip the time of the build. Here all times
are SOURCE_DATE_EPOCH (https://reproducible-builds.org/specs/source-date-epoch/), files belong to root, are readable by
all and are sorted. Contents stay as they are. Wheels need nothing of this: setuptools makes them reproducible itself.
"""

import argparse
import gzip
import io
import os
import tarfile
from pathlib import Path


def normalized(member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """The member with the same name and contents, and nothing else of the machine that built it."""
    info = tarfile.TarInfo(member.name)
    info.type, info.size, info.mtime = member.type, member.size, epoch
    info.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    info.uname = info.gname = "root"
    return info


def repacked(data: bytes, epoch: int) -> bytes:
    """The bytes of an equal .tar.gz."""
    result = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        gzip.GzipFile(filename="", mode="wb", fileobj=result, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            if not (member.isfile() or member.isdir()):
                raise SystemExit(f"{member.name}: neither a file nor a directory")
            new.addfile(normalized(member, epoch), old.extractfile(member))
    return result.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sdist", type=Path, nargs="+")
    for sdist in parser.parse_args().sdist:
        sdist.write_bytes(repacked(sdist.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))


if __name__ == "__main__":
    main()
