"""The files that operators install come with the package, and the units are as strict as they can be."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from quiver.cli import main
from quiver.cli.deploy import list_files

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
EXPOSURE_MAX = 1.5
"""Of `systemd-analyze security`, from 0 to 10. What is left: the node uses the network."""

Output = pytest.CaptureFixture[str]


def test_package_holds_all_files_of_the_sources() -> None:
    below = ROOT / "deploy"
    there = {str(path.relative_to(below)) for path in below.rglob("*") if path.is_file()}
    assert there == {name for name in list_files() if not name.startswith("completions/")}


def test_files_are_listed_and_shown(capsys: Output) -> None:
    assert main(["deploy", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == list_files()
    for name in list_files():
        assert main(["deploy", "show", name]) == 0
        folder = ROOT / "src" / "quiver" / "deploy"
        assert capsys.readouterr().out == (folder / name).read_text()


@pytest.mark.parametrize("name", ["no-such", "systemd", "../node.py", "__init__.py", ""])
def test_only_files_of_the_list_are_shown(name: str, capsys: Output) -> None:
    assert main(["deploy", "show", name]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "quiver deploy list" in shown.err


def test_directory_is_copied(tmp_path: Path, capsys: Output) -> None:
    assert main(["deploy", "copy", "systemd/", str(tmp_path / "units")]) == 0
    assert sorted(os.listdir(tmp_path / "units")) == [unit.name for unit in UNITS]
    assert main(["deploy", "copy", "systemd", str(tmp_path / "units")]) == 2
    assert "is not empty, nothing was copied" in capsys.readouterr().err
    assert main(["deploy", "copy", "no-such", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def read_unit(path: Path) -> RawConfigParser:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_unit_is_hardened(path: Path) -> None:
    service = read_unit(path)["Service"]
    assert service["User"] == "quiver"
    assert service["UMask"] == "0077"
    assert service["StateDirectoryMode"] == "0700"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == "", "none"
    for name in ("NoNewPrivileges", "PrivateDevices", "MemoryDenyWriteExecute", "RestrictNamespaces"):
        assert service[name] == "true"


def test_units_differ_in_their_places_alone() -> None:
    one, several = ({**read_unit(path)["Service"]} for path in UNITS)
    differing = {name for name in one if one[name] != several[name]}
    assert one.keys() == several.keys()
    assert differing == {"StateDirectory", "ExecStart"}


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed (Debian and Ubuntu: systemd)")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit_and_finds_it_strict(path: Path, tmp_path: Path) -> None:
    assert ANALYZE is not None
    program = tmp_path / "quiver"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/quiver/bin/quiver", str(program)))
    verified = subprocess.run([ANALYZE, "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    complaints = [line for line in verified.stderr.splitlines() if path.stem.rstrip("@") in line]
    assert (verified.returncode, complaints) == (0, [])
    judged = subprocess.run(
        [ANALYZE, "security", "--offline=true", unit], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", judged.stdout)
    assert found, judged.stderr
    assert float(found[1]) <= EXPOSURE_MAX
