"""Programs that store their own offsets, and hold records against retention until they have read them.

H1: while a hold is in force, the records that it protects are there: those from its offset on that a leader which knew
of the hold still had. H2: holds that nobody renews expire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quiver.client.prefetch import find_offset
from quiver.errors import QuiverError
from quiver.model import Offset, PartitionId, TopicId
from quiver.testing.clusters.clients import ClientWorkload
from quiver.testing.simulator.report import require
from quiver.wire.messages import GetMetadata

if TYPE_CHECKING:
    from quiver.testing.clusters.swarm import TopicPlan
    from quiver.testing.clusters.world import ClusterWorld

_LASTING_S = (1, 9)
"""How long holds last, from and to: some expire before they are looked at again."""
_EXPIRE_WITHIN_MS = 120_000
_P_ADVANCE = 0.2
_P_RELEASE = 0.1


@dataclass(frozen=True, slots=True)
class PlacedHold:
    """A hold whose placing was acknowledged."""

    topic_id: TopicId
    name: str
    partition: PartitionId
    first_offset: Offset
    """The first record that must stay."""


class HolderWorkload(ClientWorkload):
    """Holds records of one partition, looks whether they are there, and moves on."""

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        super().__init__(world, name, topic)
        self._hold: PlacedHold | None = None
        self._count = 0

    async def step(self) -> None:
        """Place a hold, look at what it protects, advance it or release it."""
        try:
            if self._hold is None:
                partition = PartitionId(self.rng.randrange(self.topic.partitions))
                self._hold = await self._place(partition, Offset(0))
            elif self.rng.random() < _P_ADVANCE:
                await self._advance(self._hold)
            elif self.rng.random() < _P_RELEASE:
                await self._release(self._hold)
            else:
                await self._look(self._hold)
        except QuiverError as error:
            self.world.counts[f"hold {error.code}"] += 1
            self.check(error, "a hold")
        else:
            self.progress += 1

    async def _place(self, partition: PartitionId, offset: Offset) -> PlacedHold:
        """Place a hold under a name that was never used, and ask the leader which records it finds there."""
        self._count += 1
        name = f"{self.name}-{self._count}"
        lasting_s = self.rng.randrange(*_LASTING_S)
        await self.cluster.hold(self.topic.name, name, {partition: offset}, lasting=lasting_s)
        found = await self._first_offset(partition)
        info = await self.cluster.router.find_topic(self.topic.name, deadline=self.cluster.router.deadline())
        self.world.counts["hold placed"] += 1
        return PlacedHold(info.topic_id, name, partition, max(offset, found))

    async def _advance(self, hold: PlacedHold) -> None:
        """Hold what comes later, and only then give the earlier records up."""
        end = await find_offset(self.cluster.router, self.topic.name, hold.partition, "latest")
        offset = Offset(hold.first_offset + self.rng.randrange(max(1, end - hold.first_offset)))
        self._hold = await self._place(hold.partition, offset)
        await self.cluster.release_hold(hold.name, self.topic.name)

    async def _release(self, hold: PlacedHold) -> None:
        self._hold = None
        await self.cluster.release_hold(hold.name, self.topic.name)

    async def _look(self, hold: PlacedHold) -> None:
        """H1: what is protected is there, if the hold was in force until after the look."""
        first_offset = await self._first_offset(hold.partition)
        deadline = self.cluster.router.deadline()
        found, _ = await self.cluster.router.ask(GetMetadata(topics=(), is_linearizable=True), deadline=deadline)
        view = self.world.view()
        if view is None or view.index < found.index:
            return  # those who know whether it was in force are down
        if (hold.topic_id, hold.name) not in view.holds:
            self.world.counts["hold expired"] += 1
            self._hold = None
            return
        self.world.counts["hold looked at"] += 1
        facts = {"name": hold.name, "partition": hold.partition, "first": first_offset, "held": hold.first_offset}
        require(first_offset <= hold.first_offset, "H1", "held records were trimmed", **facts)

    async def _first_offset(self, partition: PartitionId) -> Offset:
        return await find_offset(self.cluster.router, self.topic.name, partition, "earliest")


async def require_holds_expired(world: ClusterWorld) -> None:
    """H2: after the programs have ended, no hold stays."""
    deadline_ms = world.now_ms + _EXPIRE_WITHIN_MS
    while (view := world.view()) is None or view.holds:
        require(world.now_ms < deadline_ms, "H2", "holds that nobody renews do not expire")
        await world.wait_checked()
