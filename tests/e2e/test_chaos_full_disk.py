"""The disk of one broker is full for a while: the others go on, it comes back, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "chaos" / "run_full_disk.py"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("behaviour", ["refuses", "waits"])
def test_full_disk_of_one_broker_loses_nothing(tmp_path: Path, behaviour: str) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), behaviour]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sends were acknowledged while the disk was full" in done.stdout
