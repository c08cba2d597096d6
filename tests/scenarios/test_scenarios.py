"""Re-enact every transcript; `QUIVER_REWRITE_SCENARIOS=1` records what happens now instead.

The language of the transcripts is described in `tests/unit/raft/raft_transcript.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from raft_transcript import SEPARATOR, replay

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_scenario_happens_as_told(path: Path) -> None:
    told = path.read_text()
    happens = replay(told)
    if os.environ.get("QUIVER_REWRITE_SCENARIOS") == "1":
        path.write_text(happens)
        return
    assert happens == told


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_scenario_opens_with_its_story(path: Path) -> None:
    lines = path.read_text().splitlines()
    story = lines[: lines.index("")]
    assert len(story) >= 3
    assert all(line.startswith("#") for line in story)
    assert SEPARATOR in lines
