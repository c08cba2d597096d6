"""The way into the database: in order, together where there is load, and never again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from metadata_world import NOW_MS, create_topic, formed_state, register_broker, register_consumer

from quiver.errors import OutcomeUnknownError, StorageError
from quiver.metadata import database_writer
from quiver.metadata.apply import apply
from quiver.metadata.change_log import ChangeLog, WatchEvent
from quiver.metadata.commands import AnyCommand, ForgetClientCommand
from quiver.metadata.database import DatabaseLostError, DatabaseOutdatedError, Transaction
from quiver.metadata.database_writer import INTERRUPT_MS, STALL_MS, DatabaseWriter
from quiver.metadata.rows import EntityKind, Table
from quiver.metadata.state import Change, Counters, LogPosition, MetadataState
from quiver.model import Index, Term
from quiver.testing import Latency, RandomStreams, SimulatedClock, SimulatedExecutor, SimulatedLoop


def at(index: int) -> LogPosition:
    return LogPosition(Index(index), Term(1))


class Notebook:
    """A database that only notes what it was asked to write, and fails as it is told."""

    def __init__(self) -> None:
        self.written: list[Transaction] = []
        self.failures: list[Exception] = []
        self.position = at(0)
        self.cluster_id = ""
        self.interrupts = 0

    def attach(self) -> tuple[Counters, LogPosition]:
        if self.failures:
            raise self.failures.pop(0)
        return Counters(cluster_id=self.cluster_id), self.position

    def write(self, transaction: Transaction) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.written.append(transaction)

    def interrupt(self) -> None:
        self.interrupts += 1


class World:
    """A state, and a projector behind it."""

    def __init__(
        self, loop: SimulatedLoop, streams: RandomStreams, *, is_known: bool = True, latency_ms: int = 1
    ) -> None:
        self.loop = loop
        self.database = Notebook()
        self.failed: list[StorageError] = []
        self.state = formed_state()
        self.projector = DatabaseWriter(
            self.database,
            SimulatedExecutor(self.loop, streams.disk, Latency(minimum_ms=latency_ms, spread_ms=1)),
            stored=at(0) if is_known else None,
            view=lambda: self.state.view(),
            clock=SimulatedClock(self.loop),
            rng=streams.schedule,
            on_failure=self.failed.append,
        )

    async def wait_back(self) -> None:
        while self.projector.outage is not None:  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.1)
        await self.projector.wait_stored(self.state.position.index)

    def do(self, command: AnyCommand) -> Index:
        changes = apply(self.state, command).changes
        self.state.advance_to(at(self.state.position.index + 1))
        self.projector.add(changes, self.state.counters, self.state.position)
        return self.state.position.index


def run(test: Callable[[World], Coroutine[Any, Any, None]], **options: Any) -> None:
    streams = RandomStreams(1)
    loop = SimulatedLoop(streams.schedule, time_max_s=600)

    async def main() -> None:
        await test(World(loop, streams, **options))

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_what_gathers_goes_with_the_next_transaction() -> None:
    async def test(world: World) -> None:
        world.do(register_broker(4))
        for _ in range(5):
            world.do(register_consumer())
        last = world.do(register_broker(4, now_ms=2_000_000))
        assert world.projector.pending_rows > 0
        await world.projector.wait_stored(last)
        first, second = world.database.written
        assert (first.before, first.after) == (at(0), at(1))
        assert (second.before, second.after) == (at(1), at(7))
        assert second.counters == world.state.counters
        assert [key for key in second.changes if key[0] is Table.CONSUMERS] == [
            (Table.CONSUMERS, n) for n in range(1, 6)
        ]
        assert world.projector.transactions == 2
        await world.projector.wait_stored(last)

    run(test)


def test_snapshot_drops_what_gathered_before_it() -> None:
    async def test(world: World) -> None:
        world.do(register_broker(4))
        world.do(register_consumer())
        world.state.advance_to(at(50))
        world.projector.replace(world.state.view())
        last = world.do(create_topic("later"))
        await world.projector.wait_stored(last)
        second = world.database.written[1]
        assert second.base is not None
        assert (second.base.index, second.before, second.after) == (50, at(1), at(51))
        assert {key[0] for key in second.changes} == {Table.TOPICS, Table.PARTITIONS}

    run(test)


def test_lost_server_is_asked_again_for_the_same_transaction() -> None:
    async def test(world: World) -> None:
        world.database.failures = [DatabaseLostError("away")] * 5
        first = world.do(register_broker(4))
        await world.projector.wait_stored(first)  # the log has it
        assert world.projector.outage is not None
        assert world.projector.outage.reason == "away"
        assert not world.database.written
        second = world.do(register_consumer())
        await world.projector.wait_stored(second)
        await world.wait_back()
        assert [(item.before, item.after) for item in world.database.written] == [(at(0), at(1)), (at(1), at(2))]
        assert not world.failed

    run(test)


def test_server_that_stays_away_never_stops_the_node() -> None:
    async def test(world: World) -> None:
        world.database.failures = [DatabaseLostError("away")] * 100
        await world.projector.wait_stored(world.do(register_broker(4)))
        await asyncio.sleep(120)
        assert world.projector.outage is not None
        assert (world.failed, world.projector.failure) == ([], None)
        await world.projector.wait_stored(world.do(register_consumer()))
        await world.projector.close()
        assert world.database.interrupts == 1
        tries = len(world.database.failures)
        await asyncio.sleep(60)
        assert len(world.database.failures) == tries, "a closed writer must not try again"

    run(test)


def test_clients_that_come_and_go_in_an_outage_leave_no_growing_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_writer, "CHANGES_MAX", 50)

    async def test(world: World) -> None:
        world.database.failures = [DatabaseLostError("gone") for _ in range(5)]
        world.do(register_broker(4))
        for number in range(1, 301):
            world.do(register_consumer())
            world.do(ForgetClientCommand(now_ms=NOW_MS, kind=EntityKind.CONSUMER, id=number))
            assert world.projector.pending_rows <= 50
        await asyncio.sleep(0.05)
        assert world.projector.outage is not None
        await world.wait_back()
        first, second = world.database.written
        assert (first.base, second.before, second.after) == (None, at(1), world.state.position)
        assert second.base is not None
        stored = MetadataState.decode(second.base.encode())
        for (table, key), row in second.changes.items():
            stored.apply_changes([Change(table, key, row)], second.counters)
        assert stored.view().digest() == world.state.view().digest()

    run(test)


def test_server_that_does_not_answer_is_unreachable() -> None:
    async def test(world: World) -> None:
        first = world.do(register_broker(4))
        await world.projector.wait_stored(first)
        assert world.projector.outage is not None
        assert f"{STALL_MS} ms" in world.projector.outage.reason
        interrupts = world.database.interrupts
        await asyncio.sleep(INTERRUPT_MS / 1000)
        assert (interrupts, world.database.interrupts) == (0, 1)
        await world.wait_back()
        assert world.projector.stored == at(1)

    run(test, latency_ms=2 * INTERRUPT_MS)


def test_server_that_lost_its_last_transactions_gets_all_rows() -> None:
    async def test(world: World) -> None:
        await world.projector.wait_stored(world.do(register_broker(4)))
        await world.projector.wait_stored(world.do(register_broker(5)))
        world.database.failures = [DatabaseOutdatedError("older", at(1))]
        last = world.do(register_consumer())
        await world.projector.wait_stored(last)
        again = world.database.written[-1]
        assert again.base is not None
        assert (again.before, again.after, again.base.index, again.changes) == (at(1), at(3), 3, {})
        assert world.projector.outage is None

    run(test)


def test_database_that_was_away_at_the_start_gets_all_rows() -> None:
    async def test(world: World) -> None:
        world.database.failures = [DatabaseLostError("away")] * 3
        world.database.position = at(1)
        last = [world.do(register_broker(4)), world.do(register_consumer())][-1]
        await world.projector.wait_stored(last)
        assert world.projector.stored == LogPosition()
        await world.wait_back()
        [written] = world.database.written
        assert written.base is not None
        assert (written.before, written.after) == (at(1), at(2))

    run(test, is_known=False)


def test_database_that_was_away_at_the_start_and_has_everything_is_left_alone() -> None:
    async def test(world: World) -> None:
        world.database.position = at(2)
        world.do(register_broker(4))
        await asyncio.sleep(10)
        assert world.projector.outage is not None  # the log is still being replayed
        world.do(register_consumer())
        await world.wait_back()
        assert world.projector.stored == at(2)
        assert not world.database.written

    run(test, is_known=False)


def test_database_of_another_cluster_ends_the_node() -> None:
    async def test(world: World) -> None:
        world.database.cluster_id = "another"
        world.do(register_broker(4))
        await asyncio.sleep(10)
        assert ["another" in error.message for error in world.failed] == [True]

    run(test, is_known=False)


@pytest.mark.parametrize("failure", [StorageError("full"), ZeroDivisionError("a mistake of ours")])
def test_any_other_failure_is_final(failure: Exception) -> None:
    async def test(world: World) -> None:
        world.database.failures = [failure]
        index = world.do(register_broker(4))
        given_up = asyncio.ensure_future(world.projector.wait_stored(index))
        await asyncio.sleep(0.0005)
        given_up.cancel()
        with pytest.raises(OutcomeUnknownError, match=str(failure)):
            await world.projector.wait_stored(index)
        world.do(register_consumer())
        await asyncio.sleep(1)
        assert not world.database.written
        assert (len(world.failed), world.projector.failure) == (1, world.failed[0])
        with pytest.raises(OutcomeUnknownError):
            await world.projector.wait_stored(index)
        await world.projector.close()

    run(test)


def test_closing_waits_for_what_was_applied() -> None:
    async def test(world: World) -> None:
        world.do(register_broker(4))
        last = world.do(register_consumer())
        await world.projector.close()
        assert world.projector.stored.index == last
        await world.projector.close()
        behind = world.do(register_consumer())
        with pytest.raises(OutcomeUnknownError, match="is closing"):
            await world.projector.wait_stored(behind)

    run(test)


class Source:
    """Whoever has a state."""

    def __init__(self) -> None:
        self.state = formed_state()
        self.history = ChangeLog(self, changes_max=8)

    def do(self, command: AnyCommand) -> tuple[Change, ...]:
        changes = apply(self.state, command).changes
        self.state.advance_to(at(self.state.position.index + 1))
        self.history.add(changes, self.state.counters, self.state.position)
        return changes


def collect(source: Source, after_index: int, *, count: int) -> list[WatchEvent]:
    async def main() -> list[WatchEvent]:
        watch = source.history.watch(Index(after_index))
        return [await asyncio.wait_for(anext(watch), 5) for _ in range(count)]

    return asyncio.run(main())


def test_watcher_that_is_too_late_begins_anew() -> None:
    source = Source()
    consumers = [source.do(register_consumer()) for _ in range(10)]
    [changed] = collect(source, 8, count=1)
    assert (changed.is_reset, changed.changes) == (False, (*consumers[8], *consumers[9]))
    [changed] = collect(source, 2, count=1)
    assert (changed.is_reset, changed.changes, changed.index) == (True, (), 10)


def test_watcher_begins_anew_after_a_restored_snapshot() -> None:
    source = Source()
    source.do(register_consumer())
    source.state = MetadataState.decode(source.state.view().encode())
    source.state.advance_to(at(30))
    source.history.replace(source.state.view())
    [changed] = collect(source, 1, count=1)
    assert (changed.is_reset, changed.index) == (True, 30)


def test_watcher_is_not_woken_by_what_changes_nothing() -> None:
    async def main() -> None:
        source = Source()
        source.do(register_consumer())
        watch = source.history.watch(Index(1))
        waiting = asyncio.ensure_future(anext(watch))
        for _ in range(2):
            await asyncio.sleep(0)
            source.do(create_topic())  # refused
        given_up = asyncio.ensure_future(source.history.wait_newer(Index(9)))
        await asyncio.sleep(0)
        assert not waiting.done()
        given_up.cancel()
        changes = source.do(register_consumer())
        assert (await waiting).changes == changes
        source.history.close()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)

    asyncio.run(main())
