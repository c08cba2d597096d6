"""Bring this package to executors that do not have it: as one zip, made from the package that runs here.

Executors still need what the package itself needs (msgspec, pyarrow, …) and Python of the same minor version. A zip is
named by the files in it, so that two drivers with different versions never share one.
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
"""The time of every file in the zip: equal packages give equal zips."""


def find_package() -> Path:
    """Return this package as a zip in the cache directory, made if it is not there yet."""
    path = cache_directory(os.environ) / f"quiver-{_mark():08x}.zip"
    return path if path.exists() else write_package(path)


def write_package(path: Path) -> Path:
    """Write this package as a zip that `--py-files` takes; return its path."""
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


def _mark() -> int:
    """Return what tells one version of the package from another."""
    told = [(name, file.stat().st_size, file.stat().st_mtime_ns) for name, file in _files()]
    return crc32c(repr(told).encode())


if __name__ == "__main__":
    write_package(Path(sys.argv[1] if len(sys.argv) > 1 else "quiver.zip"))
