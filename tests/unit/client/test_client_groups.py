"""Members of a group: they share its partitions, follow the assignment, and commit before they give a partition up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from client_world import World

from quiver.client.cluster import AsyncCluster
from quiver.client.consumer import AsyncConsumer
from quiver.client.cursors import PartitionLag, move_planned
from quiver.client.group_admin import ResetTarget, reset_group
from quiver.client.group_consumer import GroupConsumerCore
from quiver.client.group_membership import MembershipView, find_changes
from quiver.client.group_options import glob_of, run_in_thread
from quiver.errors import (
    ConflictError,
    FencedError,
    NotAllowedError,
    NotFoundError,
    OutcomeUnknownError,
    OutOfRangeError,
    QuiverError,
    RequestError,
    UnavailableError,
)
from quiver.model import Buffer, Offset, PartitionId, TopicId
from quiver.record import Record
from quiver.testing.memory_cluster import CallFaults, MemoryCluster
from quiver.wire.group_messages import AssignedPartition, GroupHeartbeat, RestartGroup
from quiver.wire.messages import MoveCursor
from quiver.wire.requests import R, Request, request_name

PARTITIONS = 6


async def fill(cluster: AsyncCluster, topic: str = "logs", *, first: int = 0, count: int = 60) -> None:
    await cluster.create_topic(topic, partitions=PARTITIONS, exist_ok=True)
    async with await cluster.producer(topic) as producer:
        for number in range(first, first + count):
            producer.send(f"{number}", partition=number % PARTITIONS)


def numbers(records: Sequence[Record]) -> list[int]:
    return [int(record.text or "") for record in records]


async def poll_until(consumers: Sequence[AsyncConsumer], count: int) -> list[list[Record]]:
    """Poll all consumers, at the same time, until they have returned so many records together."""
    found: list[list[Record]] = [[] for _ in consumers]

    async def poll(consumer: AsyncConsumer, into: list[Record]) -> None:
        while sum(map(len, found)) < count:
            into += await consumer.poll(timeout=0.5)

    await asyncio.gather(*(poll(one, into) for one, into in zip(consumers, found, strict=True)))
    return found


async def wait_shares(consumers: Sequence[AsyncConsumer], *shares: int) -> None:
    """Poll until the consumers have so many partitions."""
    while sorted(len(one.assignment) for one in consumers) != sorted(shares):
        await asyncio.gather(*(one.poll(timeout=0.1) for one in consumers))


# -- the changes of an assignment --------------------------------------------------------------------


def assigned(partition: int, epoch: int) -> AssignedPartition:
    return AssignedPartition(topic="logs", topic_id=TopicId(1), partition_id=PartitionId(partition), epoch=epoch)


def test_changes_of_an_assignment_are_found() -> None:
    held = {("logs", PartitionId(0)): 5, ("logs", PartitionId(1)): 5, ("logs", PartitionId(2)): 5}
    view = MembershipView(
        owned=(assigned(0, 5), assigned(2, 9), assigned(3, 7)), revoking=(assigned(1, 5), assigned(4, 3))
    )
    changes = find_changes(held, view)
    assert changes.lost == (("logs", 2),)  # it is owned again, at a later epoch
    assert changes.revoked == (assigned(1, 5),)
    assert changes.unused == (assigned(4, 3),)  # asked for before it was begun
    assert changes.granted == (assigned(2, 9), assigned(3, 7))


def test_everything_is_lost_when_the_member_is_not_known() -> None:
    held = {("logs", PartitionId(0)): 5, ("logs", PartitionId(1)): 5}
    assert find_changes(held, MembershipView()).lost == tuple(held)


@pytest.mark.parametrize(
    ("pattern", "glob"),
    [
        ("logs-.*", "logs-*"),
        (r"logs\..", "logs.?"),
        ("logs", "logs"),
        ("logs-[ab]", None),
        ("logs-(a|b)", None),
        ("logs-a+", None),
        (r"logs\*", None),
        (r"\w+", None),
        ("(?i)logs", None),
        ("", None),
    ],
)
def test_pattern_is_given_to_the_cluster_if_it_can_express_it(pattern: str, glob: str | None) -> None:
    assert glob_of(re.compile(pattern)) == glob


# -- sharing -----------------------------------------------------------------------------------------


def test_members_share_all_partitions_and_every_record_comes_once() -> None:
    world = World()

    async def scenario() -> list[list[Record]]:
        async with world.connect() as cluster:
            await fill(cluster, count=0)
            members = [await cluster.consumer("logs", group="billing") for _ in range(3)]
            await wait_shares(members, 2, 2, 2)
            await fill(cluster)
            return await poll_until(members, 60)

    found = world.run(scenario())
    own = [{record.partition for record in records} for records in found]
    assert all(not own[one] & own[two] for one, two in ((0, 1), (0, 2), (1, 2)))
    assert sorted(number for records in found for number in numbers(records)) == list(range(60))


def test_partitions_that_stay_are_not_read_again_when_a_member_joins() -> None:
    world = World()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing")
            seen = await first.poll(timeout=5)
            while len(seen) < 60:
                seen += await first.poll(timeout=5)
            second = await cluster.consumer("logs", group="billing")
            await wait_shares([first, second], 3, 3)
            await fill(cluster, first=60)
            seen += [record for records in await poll_until([first, second], 60) for record in records]
            assert (await first.poll(timeout=1), await second.poll(timeout=1)) == ([], [])
            return numbers(seen)

    assert sorted(world.run(scenario())) == list(range(120))


def test_member_that_closes_commits_and_its_partitions_go_to_others() -> None:
    world = World()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing")
            second = await cluster.consumer("logs", group="billing")
            await wait_shares([first, second], 3, 3)
            await fill(cluster, first=60)
            seen = await second.poll(max_records=7, timeout=5)
            await second.close()
            begun = world.clock.monotonic_ms()
            while len(first.assignment) < PARTITIONS:
                await first.poll(timeout=0.1)
            assert world.clock.monotonic_ms() - begun < 1000
            return numbers(seen)

    first_part = world.run(scenario())
    assert len(first_part) == 7
    cursors = [world.cluster.partition("logs", at).cursors for at in range(PARTITIONS)]
    assert sum(next(iter(one.values())) for one in cursors) >= 60 + 7


def test_a_group_continues_where_the_named_consumer_stopped_and_the_other_way_round() -> None:
    world = World()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster)
            async with await cluster.consumer("logs", name="report") as named:
                seen = await named.poll(max_records=20, timeout=5)
                await named.commit()
            async with await cluster.consumer("logs", group="report") as member:
                while len(seen) < 40:
                    seen += await member.poll(max_records=40 - len(seen), timeout=5)
                with pytest.raises(ConflictError) as refused:
                    await cluster.consumer("logs", name="report")
                assert refused.value.code == "group_active"
            async with await cluster.consumer("logs", name="report", idle_timeout=1) as named:
                return numbers([*seen, *[record async for record in named]])

    assert sorted(world.run(scenario())) == list(range(60))


async def fail(consumer: AsyncConsumer) -> None:
    async with consumer:
        await consumer.poll(timeout=5)
        raise ZeroDivisionError


def test_error_in_the_block_leaves_without_a_commit() -> None:
    world = World()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster)
            with pytest.raises(ZeroDivisionError):
                await fail(await cluster.consumer("logs", group="billing"))
            member = await cluster.consumer("logs", group="billing", idle_timeout=1)
            return numbers([record async for record in member])

    assert sorted(world.run(scenario())) == list(range(60))


async def work_and_fail(cluster: AsyncCluster, *, is_polling: bool, is_failing: bool) -> list[int]:
    """Receive five records of one partition in the cluster's block, the last of which may fail."""
    async with cluster:
        member = await cluster.consumer("logs", group="billing")
        if is_polling:
            finished = [record.offset for record in await member.poll(max_records=3, timeout=5)]
            received = finished + [record.offset for record in await member.poll(max_records=2, timeout=5)]
        else:
            records = aiter(member)
            received = [(await anext(records)).offset for _ in range(5)]
        if is_failing:
            raise ZeroDivisionError
        return [int(offset) for offset in received]


@pytest.mark.parametrize(("is_polling", "cursor"), [(False, 4), (True, 3)])
def test_error_that_leaves_the_clusters_block_commits_only_finished_records(is_polling: bool, cursor: int) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            async with await cluster.producer("logs") as producer:
                for number in range(10):
                    producer.send(f"{number}")
            with pytest.raises(ZeroDivisionError):
                await work_and_fail(world.connect(), is_polling=is_polling, is_failing=True)
            assert [lag.cursor for lag in await cluster.group_lag("billing")] == [cursor]
            received = await work_and_fail(world.connect(), is_polling=is_polling, is_failing=False)
            assert received == list(range(cursor, cursor + 5))
            assert [lag.cursor for lag in await cluster.group_lag("billing")] == [cursor + 5]

    world.run(scenario())


# -- revoking ----------------------------------------------------------------------------------------


def test_partition_is_released_only_after_its_records_are_finished() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing")
            records = aiter(first)
            record = await anext(records)  # being processed
            second = await cluster.consumer("logs", group="billing")
            await asyncio.sleep(20)  # longer than the session timeout: its process lives
            held = {(one.topic, one.partition_id) for one in first_core(first).view.revoking}
            assert ("logs", record.partition) not in {*second.assignment}
            assert len(second.assignment) + len(held) == 3
            cursor = next(iter(world.cluster.partition("logs", record.partition or 0).cursors.values()))
            assert cursor == 0  # nothing that is not finished was committed
            await anext(records)  # it is finished
            await asyncio.sleep(1)
            assert ("logs", record.partition) in second.assignment
            assert (len(first.assignment), len(second.assignment)) == (3, 3)
            own = [one for one in await second.poll(timeout=1) if one.partition == record.partition]
            assert own[0].offset == 1

    world.run(scenario())


def first_core(consumer: AsyncConsumer) -> GroupConsumerCore:
    assert isinstance(consumer.core, GroupConsumerCore)
    return consumer.core


def test_iteration_returns_every_record_once_while_members_come_and_go() -> None:
    world = World(seed=5)
    seen: list[int] = []

    async def work(cluster: AsyncCluster, lives_s: float) -> None:
        until = world.clock.monotonic_ms() + lives_s * 1000
        async with await cluster.consumer("logs", group="billing", idle_timeout=0.2) as member:
            while world.clock.monotonic_ms() < until:
                async for record in member:
                    seen.append(int(record.text or ""))
                    await asyncio.sleep(world.rng.random() / 50)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=300)
            await asyncio.gather(*(work(cluster, lives_s) for lives_s in (2, 5, 12, 12)))

    world.run(scenario())
    assert sorted(seen) == list(range(300))


class DeadTransport:
    """Passes calls on until it is dead, as those of a process that was killed."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.is_dead = False
        self._cluster = cluster

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        if self.is_dead:
            await asyncio.sleep(timeout_ms / 1000)
            raise UnavailableError("dead")
        return await self._cluster.call(address, request, payload, timeout_ms=timeout_ms)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_skipped_while_members_die_and_calls_are_lost(seed: int) -> None:
    world = World(seed=seed)
    seen: set[int] = set()

    async def work(session_timeout: float, records_max: int, *, is_killed: bool) -> None:
        transport = DeadTransport(world.cluster)
        cluster = AsyncCluster(["node-1:9002"], transport=transport, clock=world.clock, rng=world.rng)
        async with cluster:
            member = await cluster.consumer(
                "logs", group="billing", session_timeout=session_timeout, auto_commit=0.3, idle_timeout=3
            )
            count = 0
            async for record in member:
                seen.add(int(record.text or ""))
                count += 1
                await asyncio.sleep(world.rng.random() / 20)
                if count >= records_max:
                    break
            transport.is_dead = is_killed

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster, count=240)
            world.cluster.faults = CallFaults(lost_request=0.03, dropped_request=0.03, lost_answer=0.03)
            works = [work(1 + world.rng.random() * 2, 20 + 10 * at, is_killed=at % 2 == 0) for at in range(5)]
            await asyncio.gather(*works, return_exceptions=True)
            world.cluster.faults = CallFaults()
            async with await cluster.consumer("logs", group="billing", idle_timeout=15) as member:
                seen.update(numbers([record async for record in member]))
            return [lag.lag for lag in await cluster.group_lag("billing")]

    assert world.run(scenario()) == [0] * PARTITIONS
    assert seen == set(range(240))


# -- callbacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_callbacks_are_called_before_the_first_and_after_the_last_record(is_async: bool) -> None:
    world = World()
    events: list[tuple[str, object]] = []

    def on_assign(places: Sequence[tuple[str, int]]) -> object:
        events.append(("assign", tuple(places)))
        return asyncio.sleep(0.05) if is_async else None

    def on_revoke(places: Sequence[tuple[str, int]]) -> object:
        events.append(("revoke", tuple(places)))
        return asyncio.sleep(0.05) if is_async else None

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing", on_assign=on_assign, on_revoke=on_revoke)
            assert not events  # the consumer is not known to the application yet
            events.extend(("record", record.partition) for record in await first.poll(max_records=60, timeout=5))
            second = await cluster.consumer("logs", group="billing")
            await wait_shares([first, second], 3, 3)
            await first.close()

    world.run(scenario())
    assert events[0] == ("assign", tuple(("logs", at) for at in range(PARTITIONS)))
    revoked = [places for kind, places in events if kind == "revoke"]
    assert sorted(place for places in revoked for place in places) == [("logs", at) for at in range(PARTITIONS)]  # type: ignore[attr-defined]


def test_busy_member_with_a_callback_releases_what_it_is_asked_for() -> None:
    world = World()
    revoked: list[tuple[str, int]] = []

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing", on_revoke=revoked.extend)
            assert await first.poll(max_records=1, timeout=5)
            second = await cluster.consumer("logs", group="billing")
            for _ in range(40):  # there are always records at hand: it never waits
                await asyncio.sleep(0.1)
                assert await first.poll(max_records=1, timeout=5)
                if second.assignment:
                    break
            assert second.assignment
            assert set(second.assignment) <= set(revoked)

    world.run(scenario())


def test_positions_may_be_changed_and_committed_in_callbacks() -> None:
    world = World()
    consumer: list[AsyncConsumer] = []

    async def on_assign(places: Sequence[tuple[str, int]]) -> None:
        for topic, partition in places:
            await consumer[0].seek(partition, 8, topic=topic)

    async def on_revoke(_: Sequence[tuple[str, int]]) -> None:
        await consumer[0].commit()

    async def scenario() -> list[int]:
        async with world.connect() as cluster:
            await fill(cluster)
            consumer.append(
                await cluster.consumer(
                    "logs", group="billing", commit_on_release=False, on_assign=on_assign, on_revoke=on_revoke
                )
            )
            found = await poll_until(consumer, 12)
            await consumer[0].close()
            return numbers(found[0])

    assert sorted(world.run(scenario())) == list(range(48, 60))
    assert {next(iter(world.cluster.partition("logs", at).cursors.values())) for at in range(PARTITIONS)} == {10}


def test_error_of_a_callback_is_raised_where_records_are_asked_for() -> None:
    world = World()

    def on_assign(places: Sequence[tuple[str, int]]) -> None:
        raise LookupError(len(places))

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            member = await cluster.consumer("logs", group="billing", on_assign=on_assign)
            with pytest.raises(LookupError):
                await member.poll(timeout=5)
            assert await member.poll(timeout=5)

    world.run(scenario())


# -- lost members ------------------------------------------------------------------------------------


class SilentTransport:
    """Loses the signs of life of members while it is silent, and nothing else."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.is_silent = False
        self._cluster = cluster

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        if self.is_silent and isinstance(request, GroupHeartbeat):
            await asyncio.sleep(timeout_ms / 1000)
            raise UnavailableError("not answered")
        return await self._cluster.call(address, request, payload, timeout_ms=timeout_ms)


def test_expired_member_is_fenced_and_joins_again() -> None:
    world = World()

    async def scenario() -> None:
        silent = SilentTransport(world.cluster)
        slow = AsyncCluster(["node-1:9002"], transport=silent, clock=world.clock, rng=world.rng)
        async with slow as cluster, world.connect() as other:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing", session_timeout=1)
            assert await first.poll(max_records=30, timeout=5)
            member_id = first.member_id
            silent.is_silent = True
            second = await other.consumer("logs", group="billing", session_timeout=1)
            while len(second.assignment) < PARTITIONS:
                await second.poll(max_records=1, timeout=0.1)
            await second.commit()
            before = [dict(world.cluster.partition("logs", at).cursors) for at in range(PARTITIONS)]
            with pytest.raises(FencedError):
                await first.commit()
            assert [dict(world.cluster.partition("logs", at).cursors) for at in range(PARTITIONS)] == before
            silent.is_silent = False
            await wait_shares([first, second], 3, 3)
            assert first.member_id != member_id
            await first.commit()

    world.run(scenario())


def test_member_that_takes_too_long_leaves_and_comes_back() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing", max_processing_time=3)
            assert await first.poll(timeout=5)
            second = await cluster.consumer("logs", group="billing")
            await asyncio.sleep(10)
            await second.poll(timeout=0.1)
            assert len(second.assignment) == PARTITIONS
            with pytest.raises(FencedError):
                await first.commit()
            await wait_shares([first, second], 3, 3)

    world.run(scenario())


def test_member_without_records_is_never_too_slow() -> None:
    world = World()

    async def scenario() -> str | None:
        async with world.connect() as cluster:
            await fill(cluster)
            member = await cluster.consumer("logs", group="billing", max_processing_time=1)
            known = member.member_id
            await asyncio.sleep(10)
            assert known == member.member_id
            return known

    assert world.run(scenario())


def test_member_whose_instance_another_process_has_is_fenced_for_good() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            first = await cluster.consumer("logs", group="billing", instance="a")
            second = await cluster.consumer("logs", group="billing", instance="a")
            with pytest.raises(FencedError) as refused:
                await poll_until([first], 1000)
            assert refused.value.code == "member_replaced"
            assert len(second.assignment) == PARTITIONS
            await first.close()
            assert len((await cluster.describe_group("billing")).members) == 1

    world.run(scenario())


def test_deleted_group_is_reported_to_its_members() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            member = await cluster.consumer("logs", group="billing")
            await cluster.delete_group("billing", force=True)
            with pytest.raises(NotFoundError) as refused:
                await poll_until([member], 1000)
            assert refused.value.code == "unknown_group"

    world.run(scenario())


# -- topics ------------------------------------------------------------------------------------------


def test_members_with_a_pattern_get_topics_that_are_created_later() -> None:
    world = World()

    async def scenario(pattern: str) -> set[str]:
        async with world.connect() as cluster:
            await fill(cluster, "logs-a", count=6)
            member = await cluster.consumer(re.compile(pattern), group="billing")
            found = await poll_until([member], 6)
            await fill(cluster, "logs-b", count=6)
            await fill(cluster, "other", count=6)
            found = await poll_until([member], 6)
            return {record.topic or "" for record in found[0]}

    assert world.run(scenario("logs-.*")) == {"logs-b"}
    world = World()
    assert world.run(scenario("logs-[a-z]")) == {"logs-b"}


def test_partitions_that_are_added_or_vanish_are_followed() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=6)
            await fill(cluster, "more", count=6)
            member = await cluster.consumer(["logs", "more"], group="billing")
            await poll_until([member], 12)
            await cluster.add_partitions("logs", 8)
            await wait_shares([member], 14)
            await cluster.delete_topic("more")
            await wait_shares([member], 8)

    world.run(scenario())


# -- arguments ---------------------------------------------------------------------------------------


def test_wrong_arguments_of_a_member_are_refused() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster, count=6)
            for options in ({"name": "x"}, {"partitions": [1]}, {"consumer_id": 1}):
                with pytest.raises(RequestError, match="a member of a group"):
                    await cluster.consumer("logs", group="billing", **options)
            with pytest.raises(OutOfRangeError, match=r"not done: session_timeout=0\.5 .* 1 to 3600 seconds"):
                await cluster.consumer("logs", group="billing", session_timeout=0.5)
            with pytest.raises(OutOfRangeError, match=r"not done: max_processing_time=0 .* 0\.001 to"):
                await cluster.consumer("logs", group="billing", max_processing_time=0)
            with pytest.raises(OutOfRangeError, match="not done: the group has no name"):
                await cluster.consumer("logs", group="")

    world.run(scenario())


def test_coroutine_function_is_no_callback_of_a_blocking_consumer() -> None:
    async def on_assign(places: Sequence[tuple[str, int]]) -> None:
        raise AssertionError(places)

    with pytest.raises(RequestError, match="on_assign is a coroutine function"):
        run_in_thread(on_assign, "on_assign")


# -- administration ----------------------------------------------------------------------------------


def test_cursors_are_reset_by_every_target() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            async with await cluster.consumer("logs", group="billing") as member:
                await poll_until([member], 60)
            assert [lag.lag for lag in await cluster.group_lag("billing")] == [0] * PARTITIONS
            planned = await cluster.reset_group("billing", "earliest", dry_run=True)
            assert [(one.cursor, one.target, one.lag) for one in planned] == [(10, 0, 10)] * PARTITIONS
            assert [lag.cursor for lag in await cluster.group_lag("billing")] == [10] * PARTITIONS
            await cluster.reset_group("billing", shift=-4)
            assert [lag.cursor for lag in await cluster.group_lag("billing")] == [6] * PARTITIONS
            await cluster.reset_group("billing", 2, partitions=[1])
            await cluster.reset_group("billing", timestamp=0, partitions=[2])
            await cluster.reset_group("billing", shift=1000, partitions=[3])
            assert [lag.cursor for lag in await cluster.group_lag("billing")] == [6, 2, 0, 10, 6, 6]
            with pytest.raises(OutOfRangeError):
                await cluster.reset_group("billing", 11)
            with pytest.raises(OutOfRangeError, match="pass one of"):
                await cluster.reset_group("billing")
            with pytest.raises(NotFoundError):
                await cluster.reset_group("billing", 0, partitions=[9])
            with pytest.raises(NotFoundError):
                await cluster.reset_group("nobody", 0)

    world.run(scenario())


def test_reset_is_refused_while_members_are_active_and_fences_them_if_forced() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            member = await cluster.consumer("logs", group="billing")
            await poll_until([member], 60)
            with pytest.raises(ConflictError) as refused:
                await cluster.reset_group("billing", "earliest")
            assert refused.value.code == "group_active"
            await cluster.reset_group("billing", 5, force=True)
            with pytest.raises(FencedError):
                await member.commit()  # it has not committed what it read, and cannot undo the reset
            again = await poll_until([member], 30)
            assert sorted({record.offset for record in again[0]}) == [5, 6, 7, 8, 9]
            await member.commit()
            await member.close()
            assert [lag.lag for lag in await cluster.group_lag("billing")] == [0] * PARTITIONS

    world.run(scenario())


def test_reset_that_fails_in_some_partitions_says_which() -> None:
    world = World()
    unknown = OutcomeUnknownError("may have been done: the answer was lost", code="unanswered")
    refused = UnavailableError("not done: no leader is known", code="no_leader")

    async def reset(cluster: AsyncCluster, *outcomes: QuiverError | None) -> None:
        lags = await cluster.group_lag("billing")

        async def move(lag: PartitionLag, _: Offset) -> None:
            if lag.partition < len(outcomes) and (error := outcomes[lag.partition]) is not None:
                raise error

        await move_planned([(lag, Offset(0)) for lag in lags[: len(outcomes)]], move)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            await (await cluster.consumer("logs", group="billing")).close()
            await reset(cluster, None, None)
            with pytest.raises(UnavailableError, match="no leader"):
                await reset(cluster, refused, refused)
            for outcomes, shown in (
                ((None, refused, unknown), "moved: logs/0; not moved: logs/1; perhaps moved: logs/2"),
                ((refused, unknown), "not moved: logs/0; perhaps moved: logs/1"),
            ):
                with pytest.raises(OutcomeUnknownError, match=shown) as failed:
                    await reset(cluster, *outcomes)
                assert failed.value.code == "partly_done"

    world.run(scenario())


class HalfResetTransport:
    """Refuses to move cursors from partition 3 on, and to end the pause of a reset."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    async def call(
        self, address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        if isinstance(request, MoveCursor) and request.partition_id >= 3:
            raise FencedError("not done: somebody else reads there")
        if isinstance(request, RestartGroup) and not request.pause_ms:
            raise NotAllowedError("not done: the right was taken away")
        return await self._cluster.call(address, request, payload, timeout_ms=timeout_ms)


def test_pause_that_cannot_be_ended_hides_no_error_of_a_reset(caplog: pytest.LogCaptureFixture) -> None:
    world = World()

    async def scenario() -> None:
        transport = HalfResetTransport(world.cluster)
        half = AsyncCluster(["node-1:9002"], transport=transport, clock=world.clock, rng=world.rng)
        async with world.connect() as cluster, half as broken:
            await fill(cluster)
            await (await cluster.consumer("logs", group="billing")).close()
            with pytest.raises(OutcomeUnknownError, match="moved: logs/0, logs/1, logs/2; not moved: logs/3") as failed:
                await broken.reset_group("billing", 5)
            assert failed.value.code == "partly_done"
            await broken.reset_group("billing", 7, partitions=[0, 1])
            assert [lag.cursor for lag in await cluster.group_lag("billing")] == [7, 7, 5, 0, 0, 0]
            assert caplog.text.count("until the pause of a reset ends by itself") == 2

    world.run(scenario())


def test_groups_are_described_and_deleted() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            member = await cluster.consumer("logs", group="billing", instance="a")
            (known,) = await cluster.groups()
            assert (known.group, known.state, known.group_id) == ("billing", "stable", member.consumer_id)
            assert [one.instance for one in known.members] == ["a"]
            assert len(known.members[0].owned) == PARTITIONS
            with pytest.raises(ConflictError):
                await cluster.delete_group("billing")
            await member.close()
            await cluster.delete_group("billing")
            assert await cluster.groups() == []
            with pytest.raises(NotFoundError):
                await cluster.describe_group("billing")

    world.run(scenario())


def test_node_resets_a_group_in_the_name_of_its_caller() -> None:
    """Those who lead the partitions decide, too; metadata is asked for as the node: all callers share the cache."""
    world = World()
    asked: list[tuple[str, str]] = []
    call = world.cluster.call

    async def record(
        address: str, request: Request[R], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[R, memoryview]:
        asked.append((request_name(request), request.on_behalf_of))
        return await call(address, request, payload, timeout_ms=timeout_ms)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await fill(cluster)
            async with await cluster.consumer("logs", name="c") as consumer:
                await consumer.poll(timeout=1)
            with patch.object(world.cluster, "call", record):
                await reset_group(
                    cluster.router.acting_for("user:alice"),
                    "c",
                    ResetTarget(offset="earliest"),
                    topic=None,
                    partitions=(),
                    is_dry_run=False,
                    is_forced=False,
                )

    world.run(scenario())
    names = {name for name, _ in asked}
    assert names >= {"get_metadata", "describe_groups", "get_cursors", "find_offset", "move_cursor", "restart_group"}
    assert all(principal == ("" if name == "get_metadata" else "user:alice") for name, principal in asked)
