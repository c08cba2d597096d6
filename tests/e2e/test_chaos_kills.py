"""Real nodes are killed, paused and restarted under load, and nobody is told anything untrue.

`make chaos` runs the same for longer. When something is found, what there is to see lies in the test's directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from run_chaos import run_chaos

KILLS = 5


@pytest.mark.timeout(900)
def test_clients_are_told_the_truth_while_nodes_are_killed_and_paused(tmp_path: Path) -> None:
    report = run_chaos(tmp_path, kills=KILLS, seed=1)
    assert report.is_clean, str(report)
    assert report.counts["kills"] >= KILLS
    for fact in ("records_acknowledged", "records_read", "end_offsets_read", "names_judged", "consumers_judged"):
        assert report.verdict.facts[fact] > 0, report
    assert report.verdict.facts["replicas_read"] == 9
