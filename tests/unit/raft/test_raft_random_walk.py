"""Random walks keep every invariant and recover; a seed replays alone with `-k "walk and <seed>"`."""

from __future__ import annotations

import pytest
from raft_walk import SEEDS, Walk


@pytest.mark.parametrize("seed", SEEDS)
def test_walk_keeps_every_invariant_and_recovers(seed: int) -> None:
    Walk(seed).run()
