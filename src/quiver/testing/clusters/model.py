"""The model of clusters: its clients, its liveness checks after healing, and its final comparison."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from quiver.clock import Rng
from quiver.testing.clusters.clients import ClientWorkload, EndOffsetWorkload, ProducerWorkload, TopicWorkload
from quiver.testing.clusters.consumers import CommitWorkload, ConsumeWorkload, ReaderWorkload
from quiver.testing.clusters.operations import FAULTS
from quiver.testing.clusters.settlement import compare_replicas, create_topics, require_settled, restore_capacity
from quiver.testing.clusters.swarm import ALL_KINDS, ClusterKnobs, draw_cluster_knobs
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.history import check_history, parse_history
from quiver.testing.simulator.report import SeedReport, require
from quiver.testing.simulator.runner import Model
from quiver.testing.simulator.world import SimulationRun

PROGRESS_WITHIN_MS = 30_000
"""F3: how long after healing a client may take to complete a call."""
END_WITHIN_MS = 60_000
"""F3: how long clients may take to end."""


@dataclass(frozen=True, slots=True)
class ClusterModel(Model[ClusterKnobs, ClusterWorld]):
    """Clusters of whole nodes."""

    is_cluster: ClassVar = True
    stream_prefix: ClassVar = "cluster-"
    events_max: ClassVar = 4_000_000
    time_max_s: ClassVar = 900.0
    faults: ClassVar = FAULTS
    required_faults: ClassVar = ALL_KINDS

    def draw_knobs(self, rng: Rng) -> ClusterKnobs:
        """Draw the knobs of one seed."""
        return draw_cluster_knobs(rng)

    def make_world(self, run: SimulationRun, knobs: ClusterKnobs) -> ClusterWorld:
        """Return the world of one run."""
        return ClusterWorld(run, knobs)

    async def begin(self, world: ClusterWorld) -> None:
        """Create the topics and start the clients."""
        await create_topics(world)
        world.clients = _make_clients(world)
        world.client_tasks = [world.spawn(client.run()) for client in world.clients]

    async def verify(self, world: ClusterWorld) -> None:
        """Check that clients progress, that the cluster settles, and that all copies and the history agree."""
        await _require_progress(world)
        await restore_capacity(world)
        await require_settled(world)
        world.is_over = True
        await _wait_ended(world)
        await require_settled(world)
        await _drain(world)
        await compare_replicas(world)
        result = check_history(parse_history(io.StringIO(world.history.getvalue())))
        require(result.is_clean, "J", str(result))
        world.check_result = result

    def fill(self, report: SeedReport, world: ClusterWorld) -> None:
        """Add the figures of clients and of the checked history."""
        report.effects += world.counts
        if world.check_result is not None:
            facts = world.check_result.facts
            report.sends = Counter({outcome: facts[f"sends_{outcome}"] for outcome in ("ok", "fail", "info")})
            report.reads = facts["end_offsets_read"]
            report.consumed = facts["records_read"]


def _make_clients(world: ClusterWorld) -> list[ClientWorkload]:
    knobs = world.knobs
    kinds: tuple[tuple[type[ClientWorkload], str, int], ...] = (
        (ProducerWorkload, "sender", knobs.senders),
        (ReaderWorkload, "reader", knobs.readers),
        (CommitWorkload, "committer", knobs.committers),
        (ConsumeWorkload, "taker", knobs.takers),
        (EndOffsetWorkload, "watcher", 1),
        (TopicWorkload, "maker", knobs.makers),
    )
    return [
        kind(world, f"{name}-{number}", knobs.topics[number % len(knobs.topics)])
        for kind, name, count in kinds
        for number in range(count)
    ]


async def _require_progress(world: ClusterWorld) -> None:
    """F3: every client completes a call soon after healing."""
    before = {client.name: client.progress for client in world.clients}
    waiting = list(world.clients)
    deadline_ms = world.now_ms + PROGRESS_WITHIN_MS
    while waiting:
        require(world.now_ms < deadline_ms, "F3", "no progress after healing", clients=[one.name for one in waiting])
        await world.wait_checked()
        waiting = [client for client in waiting if client.progress == before[client.name]]


async def _wait_ended(world: ClusterWorld) -> None:
    """F3: every client ends its work."""
    deadline_ms = world.now_ms + END_WITHIN_MS
    while not all(task.done() for task in world.client_tasks):
        require(world.now_ms < deadline_ms, "F3", "clients do not end")
        await world.wait_checked()


async def _drain(world: ClusterWorld) -> None:
    """Read every record of every topic."""
    for topic in world.knobs.topics:
        await ReaderWorkload(world, f"drain-{topic.name}", topic).drain()
