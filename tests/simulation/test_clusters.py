"""Seeds of whole clusters: no check finds anything, and a seed repeats exactly.

A failure shows the command that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quiver.manager.client_expiry import ClientExpiry
from quiver.metadata import EntityKind
from quiver.testing import RandomStreams
from quiver.testing.clusters.model import ClusterModel
from quiver.testing.simulator.runner import run_seed

SEEDS = 12
"""`make sim` runs hundreds."""
CHUNK = 2

_PRINT_DIGEST = (
    "import sys; from quiver.testing.clusters.model import ClusterModel; "
    "from quiver.testing.simulator.runner import run_seed; print(run_seed(ClusterModel(), int(sys.argv[1])).digest)"
)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds_of_whole_clusters_find_nothing(first: int) -> None:
    for seed in range(first, first + CHUNK):
        report = run_seed(ClusterModel(), seed)
        assert report.finding is None, f"{report.finding}\nreplay: {report.replay}\n" + "\n".join(report.tail)
        assert report.sends["ok"], f"seed {seed} acknowledged nothing"


def test_seed_of_a_whole_cluster_does_not_depend_on_hash_order() -> None:
    digests = set()
    for hash_seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", _PRINT_DIGEST, "25"]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1


def find_calm_seed() -> int:
    """Return the first seed without faults, in which no client may expire while it shows life."""
    model = ClusterModel()
    seeds = (seed for seed in range(100) if model.draw_knobs(RandomStreams(f"cluster-{seed}").stream("knobs")).is_calm)
    return next(seeds)


def hear_nothing(_: ClientExpiry, __: EntityKind, ___: int) -> None:
    pass


def test_cluster_that_ignores_signs_of_life_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientExpiry, "note_alive", hear_nothing)
    report = run_seed(ClusterModel(), find_calm_seed())
    assert report.finding is not None
    assert "E1" in str(report.finding)
