"""Seeds of whole clusters: no check finds anything, and a seed repeats exactly.

A failure shows the command that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from metadata_world import NOW_MS, create_topic, do, init_cluster, register_broker

from quiver.manager.client_expiry import ClientExpiry
from quiver.metadata import EntityKind, LeaderReport, MetadataState, ReportLeaders
from quiver.model import NodeId, PartitionId, Term, TopicId
from quiver.testing import RandomStreams
from quiver.testing.clusters.model import ClusterModel, usable_partitions
from quiver.testing.loop import SimulatedLoop
from quiver.testing.simulator.runner import run_seed
from quiver.testing.simulator.world import SimulationRun
from quiver.testing.trace import Trace

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


@pytest.mark.parametrize(("replicas", "is_usable"), [((3,), False), ((1,), True), ((2, 3), False), ((1, 2, 3), True)])
def test_partition_placed_on_machines_that_were_lost_before_needs_no_leader(
    replicas: tuple[int, ...], is_usable: bool
) -> None:
    streams, trace = RandomStreams("lost"), Trace()
    loop = SimulatedLoop(streams.schedule, trace=trace)
    world = ClusterModel().make_world(
        SimulationRun(loop, trace, streams), ClusterModel().draw_knobs(streams.stream("knobs"))
    )
    state = MetadataState()
    do(state, init_cluster())
    for number in (1, 2, 3):
        do(state, register_broker(number))
        world.add_node()
    do(state, create_topic("logs", replicas, replicas=len(replicas)))
    world.nodes[NodeId(3)].is_retired = True
    assert bool(usable_partitions(world, state.view())) == is_usable
    led = LeaderReport(TopicId(1), PartitionId(0), NodeId(replicas[0]), Term(1))
    do(state, ReportLeaders(now_ms=NOW_MS, reports=(led,)))
    assert usable_partitions(world, state.view()), "it had a leader, and perhaps records"
    loop.close()
    world.close()
