"""The demonstration is a test, too: real processes, a real disk, SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo_log.py"


def test_demonstration_holds() -> None:
    run = subprocess.run(
        [sys.executable, str(DEMO), "--batches", "50", "--kills", "3"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("All of it held.\n")
    assert "damage: 00000000000000000001.log: bytes " in run.stdout
