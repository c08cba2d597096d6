"""The demonstration is a test, too: real processes, real disks, SIGKILL, the SDK and plain HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_demonstration_holds() -> None:
    command = [sys.executable, str(DEMO), "--seconds", "9", "--no-spark"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "was killed with SIGKILL" in run.stdout
    assert "All of it held." in " ".join(run.stdout.split())
