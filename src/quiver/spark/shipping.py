"""Build a zip of this package for executors that do not have it installed.

Executors still need the package's dependencies (msgspec, pyarrow, …) and the same Python minor version. The file name
has a checksum over the package's files, so two drivers with different versions never share a zip.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import quiver
from quiver.record import crc32c
from quiver.spark.session import cache_directory

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Modification time of every file in the zip: equal packages give identical zips."""


def find_package() -> Path:
    """Return the zip of this package in the cache directory; build it if it does not exist."""
    path = cache_directory(os.environ) / f"quiver-{_version_mark():08x}.zip"
    return path if path.exists() else write_package(path)


def write_package(path: Path) -> Path:
    """Write this package as a zip for `--py-files`; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with zipfile.ZipFile(fresh, "w") as archive:
        for name, file in _files():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), file.read_bytes(), zipfile.ZIP_DEFLATED)
    fresh.replace(path)
    return path


def _files() -> list[tuple[str, Path]]:
    root = Path(quiver.__file__).parent
    found = [(f"quiver/{file.relative_to(root).as_posix()}", file) for file in root.rglob("*.py")]
    return sorted(found)


def _version_mark() -> int:
    """Return a checksum over names, sizes and times of the package's files."""
    stamps = [(name, file.stat().st_size, file.stat().st_mtime_ns) for name, file in _files()]
    return crc32c(repr(stamps).encode())


if __name__ == "__main__":
    write_package(Path(sys.argv[1] if len(sys.argv) > 1 else "quiver.zip"))
