"""A newcomer follows the page on clusters on three hosts and a fourth, as far as Spark. See cluster_walk.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chaos_namespace import find_obstacle

PROGRAM = Path(__file__).parent / "shared/cluster_walk.py"


@pytest.mark.timeout(1800)
def test_cluster_page_works_word_for_word_on_three_hosts(newcomer: Path, tmp_path: Path) -> None:
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(f"this user cannot make hosts of their own here: {obstacle}")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(newcomer), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
