"""The audit of pinned versions: what it makes of a report of pip-audit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _report(**vulns: list[str]) -> str:
    flaws = {
        name: [{"id": flaw, "fix_versions": ["2"], "description": "…"} for flaw in ids] for name, ids in vulns.items()
    }
    return json.dumps(
        {"dependencies": [{"name": name, "version": "1", "vulns": own} for name, own in flaws.items()], "fixes": []}
    )


def test_known_vulnerability_is_named_with_its_fix(audit: Any) -> None:
    assert audit.judge(_report(django=["PYSEC-1"], click=["PYSEC-2"], rich=[])) == ["click==1: PYSEC-2, fixed in 2"]


def test_index_that_knows_the_vulnerable_release_is_believed(audit: Any) -> None:
    assert audit.judge(_report(django=["PYSEC-1"], click=[])) == []


def test_index_without_data_is_not_believed(audit: Any) -> None:
    assert audit.judge(_report(django=[], click=[])) is None


def test_vulnerable_release_is_not_one_of_the_pinned_ones(audit: Any) -> None:
    name = audit.CANARY.partition("==")[0]
    assert name not in (ROOT / "constraints.txt").read_text().lower()
