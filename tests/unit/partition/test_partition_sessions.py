"""Sessions of consumers: of the users of one consumer the latest moves its cursor, also after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from partition_harness import PartitionHarness, record, run, run_harness

from quiver.errors import ConflictError, FencedError, UnavailableError
from quiver.features import SESSIONS_LEVEL
from quiver.groups.machine import epoch_at
from quiver.model import ConsumerId, Index, Offset
from quiver.partition import KnownGroups, PartitionState, Replica
from quiver.partition.entries import ForgetEntry

ALICE, BOB = ConsumerId(1), ConsumerId(2)


async def move(replica: Replica, offset: int, session: int, *, only_new: bool = False) -> None:
    await replica.move_cursors([(ALICE, Offset(offset))], only_new=only_new, session=session)


def test_later_session_ends_the_earlier_one() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b", b"c"))
        await move(replica, 1, 5)
        await move(replica, 1, 7, only_new=True)  # opened elsewhere: the cursor stays where it is
        assert replica.state.cursors == {ALICE: 1}
        for offset in (0, 2):
            with pytest.raises(FencedError, match="opened again"):
                await move(replica, offset, 5)
        with pytest.raises(FencedError):
            replica.check_session(ALICE, 5)
        replica.check_session(ALICE, 7)
        await move(replica, 3, 7)
        await replica.move_cursors([(ALICE, Offset(2)), (BOB, Offset(1))])  # an operator is no user
        assert (replica.state.cursors, replica.state.sessions) == ({ALICE: 2, BOB: 1}, {ALICE: 7})

    run(test)


def test_moves_of_one_session_write_it_once() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a"))
        await move(replica, 0, 5)
        before = replica.member.log.end_index
        await move(replica, 0, 5, only_new=True)
        assert replica.member.log.end_index == before

    run(test)


def test_session_that_begins_ends_moves_that_are_not_planned_yet() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b", b"c"))
        await move(replica, 0, 5)
        results = await asyncio.gather(
            move(replica, 1, 5), move(replica, 0, 9, only_new=True), move(replica, 2, 5), return_exceptions=True
        )
        assert list(results[:2]) == [None, None]
        assert isinstance(results[2], FencedError)
        assert (replica.state.cursors, replica.state.sessions) == ({ALICE: 1}, {ALICE: 9})

    run(test)


def test_session_survives_a_restart_and_ends_when_the_consumer_is_forgotten() -> None:
    async def test(harness: PartitionHarness) -> None:
        async with harness.open_replica() as replica:
            await replica.append(record(b"a"))
            await move(replica, 0, 9)
        async with harness.open_replica() as replica:
            with pytest.raises(FencedError):
                await move(replica, 1, 5)
            copy = PartitionState()
            copy.restore(replica.state.snapshot())
            assert copy.sessions == {ALICE: 9}
            copy._forget(ForgetEntry(copy.metadata_index, consumers=(ALICE,)))
            assert copy.sessions == {}

    run_harness(test)


def test_cluster_below_the_level_writes_no_sessions() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a"))
        replica._gate._feature_level = lambda: SESSIONS_LEVEL - 1
        await move(replica, 0, 9)
        await move(replica, 1, 5)
        assert replica.state.sessions == {}

    run(test)


def test_leader_whose_metadata_lags_behind_the_level_still_refuses_earlier_sessions() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b"))
        await move(replica, 1, 7)
        replica._gate._feature_level = lambda: SESSIONS_LEVEL - 1
        with pytest.raises(FencedError):
            await move(replica, 2, 5)
        assert replica.state.cursors == {ALICE: 1}

    run(test)


PLAIN = [
    lambda replica, groups: replica.consume(ALICE, bytes_max=1 << 20, groups=groups),
    lambda replica, groups: replica.consume(ALICE, offset=Offset(0), bytes_max=1 << 20, groups=groups),
    lambda replica, groups: replica.consume_many([(BOB, "earliest"), (ALICE, "earliest")], groups=groups),
    lambda replica, groups: replica.move_cursors([(BOB, Offset(1)), (ALICE, Offset(0))], groups=groups),
]


@pytest.mark.parametrize("use", PLAIN, ids=["consume", "consume_at", "consume_many", "move"])
def test_consumer_is_used_without_a_session_only_while_no_member_has_the_partition(
    use: Callable[[Replica, KnownGroups], Awaitable[object]],
) -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b", b"c"))
        await move(replica, 2, epoch_at(Index(7)))
        with pytest.raises(FencedError, match="group with members"):
            await use(replica, KnownGroups(epoch_at(Index(9)), active=frozenset((ALICE,))))
        for older in (KnownGroups(), KnownGroups(epoch_at(Index(6)))):  # who knows less cannot tell
            with pytest.raises(UnavailableError, match="older than that"):
                await use(replica, older)
        assert replica.state.cursors == {ALICE: 2}
        await use(replica, KnownGroups(epoch_at(Index(7))))  # all members have left since
        assert replica.state.cursors[ALICE] != 2
        assert replica.state.sessions == {ALICE: epoch_at(Index(7))}

    run(test)


def test_member_that_begins_while_a_plain_call_reads_is_not_passed() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b", b"c"))

        async def admit(_: int) -> int:
            await move(replica, 0, epoch_at(Index(7)), only_new=True)
            return 1 << 20

        with pytest.raises(UnavailableError):
            await replica.consume(ALICE, bytes_max=1 << 20, groups=KnownGroups(epoch_at(Index(6))), admit=admit)
        assert replica.state.cursors == {ALICE: 0}

    run(test)


def test_cursor_of_a_work_queue_only_begins() -> None:
    async def test(replica: Replica) -> None:
        await replica.append(record(b"a", b"b", b"c"))
        queue = KnownGroups(queues=frozenset((ALICE,)))
        await replica.move_cursors([(ALICE, Offset(1))], only_new=True, groups=queue)
        await replica.move_cursors([(ALICE, Offset(2))], only_new=True, groups=queue)
        with pytest.raises(ConflictError, match="work queue") as refused:
            await replica.move_cursors([(ALICE, Offset(0))], groups=queue)
        assert refused.value.code == "group_kind"
        with pytest.raises(ConflictError, match="work queue"):
            await replica.consume(ALICE, bytes_max=1 << 20, groups=queue)
        assert replica.state.cursors == {ALICE: 1}

    run(test)
