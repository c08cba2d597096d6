"""The same chaos with every node's metadata in PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
from postgresql_server import running_server
from run_chaos import run_chaos

KILLS = 3


@pytest.mark.timeout(900)
def test_metadata_in_postgresql_survives_kills(tmp_path: Path) -> None:
    with running_server() as server:
        report = run_chaos(tmp_path, kills=KILLS, seed=3, database=server.url)
    assert report.is_clean, str(report)
    assert report.counts["kills"] >= KILLS
