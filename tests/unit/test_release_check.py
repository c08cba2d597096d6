"""The check of a release: what it makes of versions that do not agree."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-01\n\n### Added\n\n- x\n"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for path, text in (
        ("CHANGELOG.md", CHANGES),
        ("src/quiver/__init__.py", '__version__ = "1.2.0"\n'),
        ("deploy/kubernetes/quiver/Chart.yaml", 'appVersion: "1.2.0"\n'),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return module


def test_versions_that_agree_are_fine(check: Any) -> None:
    assert check.find_wrong_versions("1.2.0") == []


def test_every_place_with_another_version_is_named(check: Any) -> None:
    changes, program, chart = check.find_wrong_versions("1.3.0")
    assert "CHANGELOG.md has no section for 1.3.0" in changes
    assert program.startswith("src/quiver/__init__.py")
    assert chart.startswith("deploy/kubernetes/quiver/Chart.yaml")


def test_changes_that_no_release_names_are_found(check: Any, tmp_path: Path) -> None:
    text = CHANGES.replace("[Unreleased]\n", "[Unreleased]\n\n### Fixed\n\n- y\n")
    (tmp_path / "CHANGELOG.md").write_text(text)
    (wrong,) = check.find_wrong_versions("1.2.0")
    assert "under [Unreleased]" in wrong


def test_version_before_its_release_has_a_section_without_a_date(check: Any, tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.replace("2030-01-01", "unreleased"))
    assert check.find_wrong_versions("1.2.0") == []
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.replace("2030-01-01", "soon"))
    (wrong,) = check.find_wrong_versions("1.2.0")
    assert "'## [1.2.0] - soon' must end with ' - YYYY-MM-DD'" in wrong


def test_tree_has_one_version_and_its_section_of_the_changelog() -> None:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from quiver import __version__

    assert module.find_wrong_versions(__version__) == []
    assert any("no section for 99.0.0" in one for one in module.find_wrong_versions("99.0.0"))
