"""Fetch the libraries of the web console from the package registry, check them, and write them beside its own files.

`make console` runs it; what it writes is committed, so that neither users nor tests need npm. A package is accepted only
with the checksum below. One thing is changed in what is written: an import of the bare name "preact" becomes that of the
file, since a page under a strict content security policy has no import map.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

STATIC = Path(__file__).parents[1] / "src" / "quiver" / "gateway" / "console" / "static"


class Package(NamedTuple):
    """A package of the registry: its version, the checksum of its archive, and which of its files become which."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "vendor-preact.js", "hooks/dist/hooks.mjs": "vendor-hooks.js"},
    ),
    Package(
        "htm",
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.module.js": "vendor-htm.js"},
    ),
    Package(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {"dist/uPlot.esm.js": "vendor-uplot.js", "dist/uPlot.min.css": "vendor-uplot.css"},
    ),
)


def main() -> int:
    licenses, checksums = [], []
    for package in PACKAGES:
        archive = fetch(package)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            text = read(tar, "LICENSE").decode()
            licenses.append(f"{package.name} {package.version}\n{'=' * 40}\n{text.strip()}\n")
            for path, written in package.files.items():
                data = adapt(read(tar, path))
                (STATIC / written).write_bytes(data)
                checksums.append(f"{hashlib.sha256(data).hexdigest()}  {written}  {package.name}@{package.version}")
    (STATIC / "vendor-licenses.txt").write_text("\n\n".join(licenses))
    (STATIC / "vendor-checksums.txt").write_text("\n".join(sorted(checksums)) + "\n")
    return 0


def fetch(package: Package) -> bytes:
    """Return the archive of a package, once its checksum is right."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["npm", "pack", f"{package.name}@{package.version}", "--silent", "--pack-destination", directory]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(directory).iterdir()
        archive = path.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if found != package.integrity:
        sys.exit(f"error: {package.name}@{package.version} has the checksum {found}, expected {package.integrity}")
    return archive


def read(tar: tarfile.TarFile, path: str) -> bytes:
    """Return a file of a package."""
    file = tar.extractfile(f"package/{path}")
    if file is None:
        sys.exit(f"error: the package has no file {path}")
    return file.read()


def adapt(data: bytes) -> bytes:
    """Return a module that imports files, not names, and names no map that is not there."""
    data = data.replace(b'from"preact"', b'from"./vendor-preact.js"').replace(b"from 'preact'", b"from './vendor-preact.js'")
    lines = [line for line in data.splitlines(keepends=True) if not line.startswith(b"//# sourceMappingURL=")]
    return b"".join(lines)


if __name__ == "__main__":
    sys.exit(main())
