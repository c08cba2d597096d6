"""The whole demonstration, with its end on Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_demonstration_ends_with_an_archive_and_an_audit_that_finds_nothing() -> None:
    command = [sys.executable, str(DEMO), "--seconds", "6"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    told = " ".join(run.stdout.split())
    assert "archived orders to" in told
    assert "What is archived, what leaders serve and what every replica stores is the same." in told
