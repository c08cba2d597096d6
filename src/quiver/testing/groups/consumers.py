"""Consumers of consensus groups: one kind relies on the cluster's cursor, the other tracks its offset itself.

A `CursorConsumer` asks without an offset, several calls at a time, and must never get a record twice; at the end it may
miss only what unanswered calls may have consumed. An `OffsetConsumer` asks with an offset, retries what had no answer,
and must get every record in order; its cursor is where it left it. A call without an answer may still move a cursor
later, so an `OffsetConsumer` continues under a new id after one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from quiver.clock import Rng
from quiver.errors import OutOfRangeError, QuiverError, TrimmedError, UnavailableError
from quiver.model import GroupId, NodeId, Offset
from quiver.partition import ConsumeResult, CursorsResult, Replica
from quiver.record import Record
from quiver.tasks import timeout
from quiver.testing.checkers.committed import check_consumed, check_nothing_skipped, check_taken
from quiver.testing.groups.node import SimulatedNode
from quiver.testing.groups.producers import GroupClient
from quiver.testing.simulator.report import require

if TYPE_CHECKING:
    from quiver.testing.groups.world import GroupWorld

T = TypeVar("T")
_BYTES_MAX = 4096
_WAIT_MS = 300
_CALLS_MAX = 3


class _GroupConsumer(GroupClient):
    """What both kinds share: calls that are answered, refused, or neither."""

    def __init__(self, world: GroupWorld, group: GroupId, rng: Rng) -> None:
        super().__init__(world, group, rng)
        self.consumer_id = world.next_consumer()

    async def _ask(self, work: Callable[[Replica], Awaitable[T]]) -> tuple[NodeId, T] | None:
        """Ask the leader; None if it was certainly not done.

        Raises:
            TimeoutError: there was no answer, or none that says what was done.
        """
        asked = self.target()

        async def serve(node: SimulatedNode) -> T:
            return await work(node.serve(self.group))

        try:
            async with timeout(self.world.knobs.attempt_timeout_ms / 1000):
                return asked, await self.world.rpc.call(asked, serve)
        except UnavailableError:
            self.learn(asked)
            return None
        except (TrimmedError, OutOfRangeError):
            raise
        except (TimeoutError, QuiverError) as error:
            self._guess = None
            raise TimeoutError from error

    async def _consume(self, *, offset: Offset | None, records_max: int, wait_ms: int = 0) -> ConsumeResult | None:
        consumer_id = self.consumer_id  # of now: a late copy of the call must not speak for whom comes after

        def work(replica: Replica) -> Awaitable[ConsumeResult]:
            return replica.consume(
                consumer_id, offset=offset, records_max=records_max, bytes_max=_BYTES_MAX, wait_ms=wait_ms
            )

        answer = await self._ask(work)
        if answer is None:
            return None
        check_consumed(answer[1], self.world.observer.committed[self.group], node=answer[0])
        self.world.history.consumed += answer[1].cursor - answer[1].first_offset
        return answer[1]


class CursorConsumer(_GroupConsumer):
    """A consumer whose cursor the cluster keeps."""

    def __init__(self, world: GroupWorld, group: GroupId, rng: Rng) -> None:
        super().__init__(world, group, rng)
        self._seen: set[Offset] = set()
        self._cursor = Offset(0)
        self._lost_max = 0

    async def run(self) -> None:
        """Consume records until the load ends."""
        while self.world.wants_load:
            await self.pause(self.world.knobs.send_gap_ms)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(1 + self.rng.randrange(_CALLS_MAX)):
                    tasks.create_task(self._consume_once(1 + self.rng.randrange(5)))

    async def finish(self) -> None:
        """Consume the rest, and check what was seen."""
        committed = self.world.observer.committed[self.group]
        while self._cursor < committed.end_offset:
            await self.pause(20)
            await self._consume_once(100)
        check_nothing_skipped(
            self._seen,
            committed,
            first_offset=committed.first_offset,
            lost_max=self._lost_max,
            consumer=self.consumer_id,
        )

    async def _consume_once(self, records_max: int) -> None:
        """Ask once: for a range of records, or for so many times the next one."""
        may_be_doubled = self.world.rpc.p_double > 0
        try:
            taken = await (
                self._consume_some(records_max) if self.rng.random() < 0.7 else self._consume_each(records_max)
            )
        except TimeoutError:
            self._lost_max += 2 * records_max
            return
        if may_be_doubled:
            self._lost_max += records_max
        for offset in taken:
            facts = {"group": self.group, "consumer": self.consumer_id, "offset": offset}
            require(offset not in self._seen, "I17", "a consumer was given a record twice", **facts)
            self._seen.add(Offset(offset))
            self._cursor = max(self._cursor, Offset(offset + 1))

    async def _consume_some(self, records_max: int) -> Iterable[int]:
        wait_ms = _WAIT_MS if self.rng.random() < 0.3 else 0
        consumed = await self._consume(offset=None, records_max=records_max, wait_ms=wait_ms)
        if consumed is None:
            return ()
        self._cursor = max(self._cursor, consumed.cursor)
        return range(consumed.first_offset, consumed.cursor)

    async def _consume_each(self, count: int) -> list[int]:
        def work(replica: Replica) -> Awaitable[list[Record | None]]:
            return replica.consume_many([(self.consumer_id, "earliest")] * count)

        answer = await self._ask(work)
        if answer is None:
            return []
        records = [record for record in answer[1] if record is not None]
        check_taken(records, self.world.observer.committed[self.group], node=answer[0])
        self.world.history.consumed += len(records)
        return [record.offset for record in records]


class OffsetConsumer(_GroupConsumer):
    """A consumer that tracks its offset itself, and retries what had no answer."""

    def __init__(self, world: GroupWorld, group: GroupId, rng: Rng) -> None:
        super().__init__(world, group, rng)
        self._offset = Offset(0)
        self._has_cursor = False

    async def run(self) -> None:
        """Read in order until the load ends."""
        while self.world.wants_load:
            await self.pause(self.world.knobs.send_gap_ms)
            may_be_doubled = self.world.rpc.p_double > 0
            try:
                await (self._check_cursor() if self._has_cursor and self.rng.random() < 0.3 else self._read())
            except TimeoutError:
                may_be_doubled = True
            if may_be_doubled or self.world.rpc.p_double > 0:
                self.consumer_id, self._has_cursor = self.world.next_consumer(), False

    async def _read(self) -> None:
        offset, facts = self._offset, {"group": self.group, "consumer": self.consumer_id, "offset": self._offset}
        try:
            consumed = await self._consume(offset=offset, records_max=1 + self.rng.randrange(20))
        except TrimmedError:
            committed = self.world.observer.committed[self.group]
            require(offset < committed.first_offset, "I18", "a record that is kept was called trimmed", **facts)
            self._offset = committed.first_offset
            return
        except OutOfRangeError as error:
            require(False, "I7", f"a reader was sent away from what it has read: {error}", **facts)  # noqa: FBT003
            return
        if consumed is not None:
            require(consumed.first_offset == offset, "I17", "records are not from where they were wanted", **facts)
            self._offset, self._has_cursor = consumed.cursor, True

    async def _check_cursor(self) -> None:
        consumer_id = self.consumer_id

        def work(replica: Replica) -> Awaitable[CursorsResult]:
            return replica.get_cursors([consumer_id])

        answer = await self._ask(work)
        if answer is None:
            return
        read = answer[1]
        expected = max(self._offset, read.first_offset)
        facts = {"group": self.group, "node": answer[0], "consumer": self.consumer_id, "found": read.cursors[0]}
        require(read.cursors == (expected,), "I17", "a cursor is not where it was left", expected=expected, **facts)


def make_consumer(world: GroupWorld, group: GroupId, number: int) -> CursorConsumer | OffsetConsumer:
    """Return the world's next consumer: every other one is an `OffsetConsumer`."""
    rng = world.streams.stream(f"consumer-{number}")
    return OffsetConsumer(world, group, rng) if number % 2 else CursorConsumer(world, group, rng)
