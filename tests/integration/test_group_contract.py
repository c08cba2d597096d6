"""What members of groups rely on, in requests of the wire protocol: real nodes and the cluster in memory alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

import pytest

import quiver
from quiver.client.cluster import AsyncCluster
from quiver.errors import ConflictError, FencedError, NotFoundError
from quiver.model import ConsumerId, Offset
from quiver.testing import LocalCluster, RandomStreams, SimulatedClock, SimulatedLoop
from quiver.testing.memory_cluster import MemoryCluster
from quiver.wire.group_messages import (
    AssignedPartition,
    DeleteGroup,
    DescribeGroups,
    GroupAssignment,
    GroupHeartbeat,
    GroupInfo,
    JoinGroup,
    LeaveGroup,
    PartitionEpoch,
    RestartGroup,
)
from quiver.wire.messages import Consume, ConsumeMany, Fetch, MoveCursor, RegisterConsumerRequest, Selection
from quiver.wire.requests import R, Request

Scenario = Callable[["Group"], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]
_NUMBERS = count()
PARTITIONS = 4


def run_in_memory(scenario: Scenario) -> None:
    streams = RandomStreams(1)
    loop = SimulatedLoop(streams.schedule, time_max_s=3600.0)
    clock = SimulatedClock(loop)

    async def main() -> None:
        memory = MemoryCluster(clock=clock, rng=streams.network)
        connecting = AsyncCluster(memory.addresses, transport=memory, clock=clock, rng=streams.workload)
        async with connecting as cluster:
            await run_scenario(scenario, cluster, "logs")

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1) as running:
        yield running


@pytest.fixture(params=["memory", "nodes"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "memory":
        return run_in_memory
    local: LocalCluster = request.getfixturevalue("local")

    def run_against_nodes(scenario: Scenario) -> None:
        async def main() -> None:
            async with quiver.connect_async(*local.addresses) as cluster:
                await run_scenario(scenario, cluster, f"logs-{next(_NUMBERS)}")

        asyncio.run(main())

    return run_against_nodes


async def run_scenario(scenario: Scenario, cluster: AsyncCluster, topic: str) -> None:
    await cluster.create_topic(topic, partitions=PARTITIONS)
    await scenario(Group(cluster, topic))


class Group:
    """A group with the name of its topic, used as members use it."""

    def __init__(self, cluster: AsyncCluster, topic: str) -> None:
        self.cluster, self.topic = cluster, topic
        self.group_id = ConsumerId(0)
        self._seen: dict[str, int] = {}

    async def ask(self, request: Request[R]) -> R:
        router = self.cluster.router
        answer, _ = await router.ask(request, deadline=router.deadline())
        if (index := getattr(answer, "index", None)) is not None:
            router.cache.record_index(index)
        return answer

    async def join(self, member_id: str, **about: Any) -> None:
        request = JoinGroup(group=self.topic, topics=(self.topic,), member_id=member_id, **about)
        self.group_id = (await self.ask(request)).group_id
        self._seen[member_id] = 0

    async def beat(self, member_id: str, *released: AssignedPartition, wait_ms: int = 100) -> GroupAssignment:
        request = GroupHeartbeat(
            group_id=self.group_id,
            member_id=member_id,
            seen=self._seen.get(member_id, 0),
            released=tuple(PartitionEpoch(one.topic_id, one.partition_id, one.epoch) for one in released),
            wait_ms=wait_ms,
        )
        answer = await self.ask(request)
        self._seen[member_id] = answer.version
        return answer

    async def wait_owned(self, member_id: str, number: int) -> GroupAssignment:
        """Send heartbeats until a member owns so many partitions, and releases none."""
        while len((found := await self.beat(member_id)).owned) != number or found.revoking:
            pass
        return found

    async def commit(self, one: AssignedPartition) -> None:
        await self.ask_leader(
            one,
            MoveCursor(
                topic_id=one.topic_id,
                partition_id=one.partition_id,
                cursors=((self.group_id, Offset(0)),),
                session=one.epoch,
            ),
        )

    async def fetch(self, one: AssignedPartition) -> None:
        reader = (self.group_id, one.epoch)
        request = Fetch(topic_id=one.topic_id, partition_id=one.partition_id, offset=Offset(0), reader=reader)
        await self.ask_leader(one, request)

    async def ask_leader(self, one: AssignedPartition, request: Request[Any]) -> None:
        router = self.cluster.router
        await router.ask_leader(self.topic, one.partition_id, lambda _: request, deadline=router.deadline())

    async def describe(self) -> GroupInfo:
        (found,) = (await self.ask(DescribeGroups(groups=(self.topic,)))).groups
        return found


def test_partition_is_taken_before_it_is_given_and_the_next_owner_has_a_higher_epoch(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a")
        first = await group.wait_owned("a", PARTITIONS)
        assert all(one.epoch > 0 for one in first.owned)
        await group.join("b")
        while len((asked := await group.beat("a")).revoking) < 2:
            pass
        assert len(asked.owned) == 2
        assert {*asked.owned, *asked.revoking} == {*first.owned}  # what stays keeps its epoch
        assert (await group.beat("b")).owned == ()
        assert (await group.describe()).state == "rebalancing"
        for one in asked.revoking:
            await group.commit(one)
        await group.beat("a", *asked.revoking)
        second = await group.wait_owned("b", 2)
        epochs = {one.partition_id: one.epoch for one in asked.revoking}
        assert all(one.epoch > epochs[one.partition_id] for one in second.owned)
        for one in second.owned:
            await group.commit(one)
        for one in asked.revoking:
            with pytest.raises(FencedError):
                await group.commit(one)
            with pytest.raises(FencedError):
                await group.fetch(one)
        assert (await group.beat("a")).owned == asked.owned
        assert (await group.describe()).state == "stable"

    run(scenario)


def test_who_has_no_session_is_refused_while_there_are_members(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a")
        one = (await group.wait_owned("a", PARTITIONS)).owned[0]
        await group.commit(one)
        where: Any = {"topic_id": one.topic_id, "partition_id": one.partition_id}
        plain = (
            MoveCursor(**where, cursors=((group.group_id, Offset(0)),)),
            Consume(**where, consumer_id=group.group_id),
            ConsumeMany(**where, consumer_ids=(group.group_id,)),
        )
        for request in plain:
            with pytest.raises(FencedError):
                await group.ask_leader(one, request)
        await group.ask(LeaveGroup(group_id=group.group_id, member_id="a"))
        for request in plain:
            await group.ask_leader(one, request)
        await group.join("b")
        await group.wait_owned("b", PARTITIONS)
        for request in plain:  # also before the member begins to read
            with pytest.raises(FencedError):
                await group.ask_leader(one, request)

    run(scenario)


def test_partitions_of_a_member_that_leaves_are_free_at_once(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a")
        await group.wait_owned("a", PARTITIONS)
        await group.ask(LeaveGroup(group_id=group.group_id, member_id="a"))
        await group.ask(LeaveGroup(group_id=group.group_id, member_id="a"))  # again is no error
        with pytest.raises(NotFoundError) as unknown:
            await group.beat("a")
        assert unknown.value.code == "unknown_member"
        await group.join("b")
        await group.wait_owned("b", PARTITIONS)

    run(scenario)


def test_silent_member_expires(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a", session_timeout_ms=1_000)
        await group.wait_owned("a", PARTITIONS)
        await group.join("b")
        await group.wait_owned("b", PARTITIONS)
        with pytest.raises(NotFoundError) as unknown:
            await group.beat("a")
        assert unknown.value.code == "unknown_member"
        assert [one.member_id for one in (await group.describe()).members] == ["b"]

    run(scenario)


def test_member_with_the_same_instance_replaces_the_one_before_it(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a", instance="one")
        await group.wait_owned("a", PARTITIONS)
        await group.join("b", instance="two")
        while len((asked := await group.beat("a")).revoking) < 2:
            pass
        await group.beat("a", *asked.revoking)
        before = await group.wait_owned("b", 2)
        await group.join("c", instance="two")
        after = await group.wait_owned("c", 2)
        assert [one.partition_id for one in after.owned] == [one.partition_id for one in before.owned]
        assert all(new.epoch > old.epoch for new, old in zip(after.owned, before.owned, strict=True))
        assert (await group.beat("a")).owned == asked.owned
        with pytest.raises(FencedError) as replaced:
            await group.beat("b")
        assert replaced.value.code == "member_replaced"

    run(scenario)


def test_restart_takes_everything_under_a_session_above_all_epochs(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a")
        before = await group.wait_owned("a", PARTITIONS)
        restarted = await group.ask(RestartGroup(group=group.topic, pause_ms=60_000))
        assert restarted.session > max(one.epoch for one in before.owned)
        assert (await group.beat("a")).owned == ()
        assert (await group.describe()).state == "paused"
        await group.ask(RestartGroup(group=group.topic))
        after = await group.wait_owned("a", PARTITIONS)
        assert min(one.epoch for one in after.owned) > restarted.session

    run(scenario)


def test_active_group_is_neither_deleted_nor_used_by_a_plain_consumer(run: Run) -> None:
    async def scenario(group: Group) -> None:
        await group.join("a")
        plain = RegisterConsumerRequest(topics=(Selection(topic=group.topic),), request_id=group.topic)
        with pytest.raises(ConflictError) as refused:
            await group.ask(plain)
        assert refused.value.code == "group_active"
        with pytest.raises(ConflictError) as refused:
            await group.ask(DeleteGroup(group=group.topic))
        assert refused.value.code == "group_active"
        await group.ask(DeleteGroup(group=group.topic, is_forced=True))
        with pytest.raises(NotFoundError) as unknown:
            await group.beat("a")
        assert unknown.value.code == "unknown_group"
        with pytest.raises(NotFoundError) as unknown:
            await group.ask(DeleteGroup(group=group.topic))
        assert unknown.value.code == "unknown_group"

    run(scenario)
