"""The next message for each of many calls, taken together.

Consumers that take message by message would pay a request and a replicated step for each. Here the calls for a
partition stand in a line: what comes while its leader is being asked is asked for in one go (`ConsumeMany`), whichever
consumers' it is. A call that finds nothing goes on to its next partition, and ends when it has been to all.

Invariant: a line is served as long as somebody stands in it, and every call is answered, however serving ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quiver.errors import DecodeError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.gateway.failures import failure_of
from quiver.gateway.http import HttpResponse
from quiver.metadata import TopicRow
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.record import Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.consume_many import ConsumeMany, decode_taken
from quiver.wire.messages import TopicInfo

TOGETHER_MAX = 256
"""How many calls are answered together."""
PATIENCE_MS = 2_000
"""How long a partition that does not answer is waited for by calls that have another to ask."""


class Place(NamedTuple):
    """A partition, as the key of its line."""

    topic_id: TopicId
    partition_id: PartitionId


class Call:
    """One call for one message."""

    __slots__ = ("consumer_id", "deadline", "done", "failure", "left", "topic")

    def __init__(
        self,
        topic: TopicRow,
        consumer_id: ConsumerId,
        order: Sequence[PartitionId],
        *,
        deadline: Deadline,
        done: asyncio.Future[HttpResponse],
    ) -> None:
        self.topic = topic
        self.consumer_id = consumer_id
        self.left = list(reversed(order))
        """The partitions to ask, the next one last."""
        self.deadline = deadline
        self.done = done
        self.failure: QuiverError | None = None
        """Why a partition could not be asked: told if no other has something."""


Answer = Callable[[Call, PartitionId, Record], HttpResponse]
"""Make the response of a call that got a record."""


class ConsumeCoalescer:
    """The lines. `close` ends what is under way."""

    def __init__(self, router: Router, answer: Answer, *, nothing: HttpResponse) -> None:
        self._router = router
        self._answer = answer
        self._nothing = nothing
        self._loop = asyncio.get_running_loop()
        self._lines: dict[Place, list[Call]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    def take(
        self, topic: TopicRow, consumer_id: int, order: Sequence[PartitionId], *, deadline: Deadline
    ) -> asyncio.Future[HttpResponse]:
        """Take the next record of the first partition that has one; the future may be cancelled."""
        done: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._queue(Call(topic, ConsumerId(consumer_id), order, deadline=deadline, done=done))
        return done

    async def close(self) -> None:
        """Serve nobody any more; idempotent."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _queue(self, call: Call) -> None:
        place = Place(call.topic.topic_id, call.left[-1])
        line = self._lines.get(place)
        if line is not None:
            line.append(call)
            return
        self._lines[place] = [call]
        task = self._loop.create_task(self._serve(place))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, place: Place) -> None:
        line, calls = self._lines[place], list[Call]()
        try:
            while line:
                calls = [call for call in line[:TOGETHER_MAX] if not call.done.done()]
                del line[:TOGETHER_MAX]
                if calls:
                    await self._take(place, calls)
                calls = []  # they have their answers, or stand in another line
        except Exception as error:  # noqa: BLE001 - a defect; the server tells it for each call
            for call in (*calls, *line):
                if not call.done.done():
                    call.done.set_exception(error)
        finally:
            del self._lines[place]
            for call in (*calls, *line):
                call.done.cancel()

    async def _take(self, place: Place, calls: list[Call]) -> None:
        try:
            records = await self._ask(place, calls)
        except QuiverError as error:
            is_of_all = len(calls) == 1 or isinstance(error, UnavailableError) or error.outcome == "unknown"
            for call in calls:
                if is_of_all:
                    self._go_on(call, error)
                else:  # it may be the fault of one of them alone
                    await self._take(place, [call])
            return
        for call, record in zip(calls, records, strict=False):
            if record is None:
                self._go_on(call)
            elif not call.done.done():
                call.done.set_result(self._answer(call, place.partition_id, record))
        for call in calls[len(records) :]:
            self._queue(call)  # there was too much for one answer

    async def _ask(self, place: Place, calls: list[Call]) -> list[Record | None]:
        consumer_ids = tuple(call.consumer_id for call in calls)

        def build(info: TopicInfo) -> ConsumeMany:
            return ConsumeMany(
                topic_id=info.topic_id,
                partition_id=place.partition_id,
                consumer_ids=consumer_ids,
            )

        deadline = calls[0].deadline
        if all(len(call.left) > 1 for call in calls):
            deadline = self._router.deadline(min(PATIENCE_MS, deadline.remaining_ms))
        _, payload = await self._router.ask_leader(calls[0].topic.name, place.partition_id, build, deadline=deadline)
        try:
            return decode_taken(payload)
        except DecodeError as error:
            # Not the client's mistake; and its cursor has moved.
            raise OutcomeUnknownError(f"perhaps done: the answer is damaged: {error}", code="damaged") from error

    def _go_on(self, call: Call, error: QuiverError | None = None) -> None:
        """Send a call that got nothing here to its next partition, or answer it."""
        if call.done.done():
            return
        call.left.pop()
        is_unknown = error is not None and error.outcome == "unknown"
        if call.failure is None or is_unknown:
            call.failure = error
        if call.left and not is_unknown:
            self._queue(call)
        else:
            call.done.set_result(self._nothing if call.failure is None else failure_of(call.failure))
