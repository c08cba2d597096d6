"""Members of groups over simulated managers: they join, send heartbeats, use what they own, release it when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from manager_world import QUICK, WorkingWorld, run

from quiver.errors import NotFoundError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.metadata import CreateTopicCommand, GroupRow
from quiver.model import ConsumerId, NodeId, PartitionId, TopicId
from quiver.wire.group_messages import (
    DescribeGroups,
    GroupAssignment,
    GroupHeartbeat,
    GroupInfo,
    JoinGroup,
    LeaveGroup,
    PartitionEpoch,
)

Key = tuple[TopicId, PartitionId]
PATIENT = msgspec.structs.replace(QUICK, dead_after_ms=60_000, suspect_after_ms=30_000)


class GroupWorld(WorkingWorld):
    """Managers, brokers, and members of groups."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.members: list[SimulatedMember] = []
        self.used: dict[tuple[str, Key], SimulatedMember] = {}
        """Who uses which partition of a group; members that were stopped by force do not count."""
        self.moves: list[tuple[str, Key]] = []
        """Who began to use which partition, in order."""
        self.shared: list[str] = []
        """What two members used at the same time."""
        self.unfenced: list[str] = []
        """What somebody began to use under an epoch that does not fence the one that used it."""

    async def prepare(self, **topics: int) -> None:
        """Let brokers live and create topics with so many partitions."""
        await self.primary()
        await self.wait(lambda: self.view.cluster_id or None)
        await self.join(1, 2, 3)
        for topic, partitions in topics.items():
            await self.create(topic, partitions)

    async def create(self, topic: str, partitions: int) -> None:
        assignments = tuple((NodeId(number % 3 + 1),) for number in range(partitions))
        await self.submit(CreateTopicCommand(now_ms=1, topic=topic, replicas=1, assignments=assignments))

    def enter(self, name: str, **fields: Any) -> SimulatedMember:
        """Start a member of the group `g` of the topic `logs`, unless told otherwise."""
        member = SimulatedMember(self, name, **fields)
        self.members.append(member)
        member.start()
        return member

    async def describe(self, group: str = "g") -> GroupInfo:
        found = await self.ask(DescribeGroups(groups=(group,), known_index=self.view.index))
        return found.groups[0]

    def row(self, group_id: int = 1) -> GroupRow:
        return self.view.consumer_groups[ConsumerId(group_id)]

    async def wait_settled(self, partitions: int, *members: SimulatedMember) -> None:
        """Wait until these members use all partitions, evenly, and nothing is left to do."""

        def is_settled() -> bool | None:
            counts = [len(member.owned) for member in members]
            revoking = any(one.is_revoking for row in self.view.group_members.values() for one in row.owned)
            return (sum(counts) == partitions and max(counts) - min(counts) <= 1 and not revoking) or None

        await self.wait(is_settled)


class SimulatedMember:
    """One process with a membership."""

    def __init__(
        self, world: GroupWorld, name: str, *, release_s: float = 0.0, pause_s: float = 0.0, **fields: Any
    ) -> None:
        given: dict[str, Any] = {"group": "g", "topics": ("logs",), "session_timeout_ms": 2_000} | fields
        self.world = world
        self.name = name
        self.request = JoinGroup(member_id=name, **given)
        self.release_s = release_s
        """How long it takes to release what it is asked for."""
        self.pause_s = pause_s
        """How long it waits between heartbeats."""
        self.owned: dict[Key, int] = {}
        self.seen = 0
        self.joins = 0
        self.changes = 0
        """How often something that it owned changed."""
        self.error: QuiverError | None = None
        self.group_id = ConsumerId(0)
        self._task: asyncio.Task[None]
        self._released: list[PartitionEpoch] = []

    @property
    def partitions(self) -> list[int]:
        return sorted(int(key[1]) for key in self.owned)

    def start(self) -> None:
        self._task = self.world.loop.create_task(self._run())

    def crash(self) -> None:
        """Stop without a word."""
        self._task.cancel()
        for key in list(self.owned):
            self._stop(key)

    async def leave(self) -> None:
        self.crash()
        await self._ask(LeaveGroup(group_id=self.group_id, member_id=self.name))

    async def beat(self, **fields: Any) -> GroupAssignment:
        """Send one heartbeat."""
        found: GroupAssignment = await self._ask(GroupHeartbeat(group_id=self.group_id, member_id=self.name, **fields))
        return found

    async def join(self) -> None:
        joined = await self._ask(self.request)
        self.group_id, self.joins, self.seen = joined.group_id, self.joins + 1, 0

    async def _run(self) -> None:
        await self._retry(self.join)
        while True:
            try:
                found = await self.beat(seen=self.seen, released=tuple(self._released), wait_ms=600)
            except (UnavailableError, OutcomeUnknownError):
                await asyncio.sleep(0.05)
            except NotFoundError:
                for key in list(self.owned):
                    self._stop(key)
                await self._retry(self.join)
            except QuiverError as error:
                self.error = error
                return
            else:
                self._released = []
                await self._take(found)
                await asyncio.sleep(self.pause_s)

    async def _retry(self, action: Callable[[], Any]) -> None:
        while True:
            with suppress(UnavailableError, OutcomeUnknownError):
                await action()
                return
            await asyncio.sleep(0.05)

    async def _ask(self, request: Any, *, timeout_ms: int = 1_500) -> Any:
        running = [node for node, manager in self.world.managers.items() if manager.is_up]
        if not running:
            raise UnavailableError("no manager runs")
        return await self.world.ask(request, of=running[len(self.name) % len(running)], timeout_ms=timeout_ms)

    async def _take(self, found: GroupAssignment) -> None:
        self.seen = found.version
        now = {(one.topic_id, one.partition_id): one.epoch for one in (*found.owned, *found.revoking)}
        for key in [key for key in self.owned if now.get(key) != self.owned[key]]:
            self._stop(key)
        for key, epoch in now.items():
            if key not in self.owned:
                self._begin(key, epoch)
        if found.revoking:
            await asyncio.sleep(self.release_s)
        for one in found.revoking:
            self._stop((one.topic_id, one.partition_id))
            self._released.append(PartitionEpoch(one.topic_id, one.partition_id, one.epoch))

    def _begin(self, key: Key, epoch: int) -> None:
        user = self.world.used.get((self.request.group, key))
        if user is not None and user.owned[key] >= epoch:
            self.world.unfenced.append(
                f"{self.name} begins to use {key} at {epoch}, {user.name} is at {user.owned[key]}"
            )
        if user is not None:
            self.world.shared.append(f"{self.name} begins to use {key}, which {user.name} uses")
        self.world.used[self.request.group, key] = self
        self.world.moves.append((self.name, key))
        self.owned[key] = epoch
        self.changes += 1

    def _stop(self, key: Key) -> None:
        if self.owned.pop(key, None) is not None:
            if self.world.used.get((self.request.group, key)) is self:
                del self.world.used[self.request.group, key]
            self.changes += 1


def work(test: Any, *, may_overlap: bool = False, **settings: Any) -> None:
    """Run `async def test(world)` over managers that formed their cluster themselves, at the newest level.

    Whatever else a test demands: no two members ever use a partition of their group at the same time. If they may,
    since partitions are taken from members by force, the later one has the higher epoch, which fences the other.
    """

    async def checked(world: Any) -> None:
        await test(world)
        assert may_overlap or not world.shared, world.shared
        assert not world.unfenced, world.unfenced

    run(checked, make_world=GroupWorld, formed=False, **({"manager_settings": PATIENT} | settings))
