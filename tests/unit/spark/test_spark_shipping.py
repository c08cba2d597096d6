"""The package as a zip: whole, the same each time, and importable as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from quiver.spark.shipping import write_package


def test_equal_packages_give_equal_zips_without_leftovers(tmp_path: Path) -> None:
    first, second = write_package(tmp_path / "a" / "q.zip"), write_package(tmp_path / "b" / "q.zip")
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["q.zip"]
    names = ZipFile(first).namelist()
    assert {"quiver/__init__.py", "quiver/spark/source.py", "quiver/record/header.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)


def test_package_is_imported_from_its_zip(tmp_path: Path) -> None:
    path = write_package(tmp_path / "q.zip")
    code = "import quiver, quiver.spark.source; print(quiver.__file__)"
    told = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip().startswith(str(path))
