"""The whole demonstration, with its end on Spark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_demonstration_ends_with_an_audit_that_finds_nothing_and_a_report() -> None:
    command = [sys.executable, str(DEMO), "--seconds", "6"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    told = " ".join(run.stdout.split())
    assert "archived orders to" in told
    assert "The archive, the leaders and every replica have the same records. All of it held." in told
    assert "parsed orders into" in told
    report = Path(re.findall(r"The report of what the records say: (\S+)", told)[0])
    assert "<h1>orders</h1>" in report.read_text()
    report.unlink()
