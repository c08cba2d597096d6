"""Links between real nodes are cut, both ways and one way, while nodes are killed and paused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "chaos" / "run_chaos.py"


@pytest.mark.timeout(900)
def test_clients_are_told_the_truth_while_links_are_cut(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--kills", "6", "--seed", "4", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cut " in (tmp_path / "nemesis.log").read_text()
