"""Coalesce many calls for one next message each into few `ConsumeMany` requests.

Without it, a consumer that reads message by message would cost one request and one replicated step per message. Each
partition has a queue of pending calls: calls of any consumers that arrive while its leader is being asked share the
next request. A call that finds no record moves to the queue of its next partition, and ends after the last one.

Invariant: a queue is served while it has calls, and every call is answered, however serving ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from quiver.errors import DecodeError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.gateway.codec import error_response
from quiver.gateway.http import HttpResponse
from quiver.metadata import TopicRow
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.record import Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.consumed_records import decode_consumed
from quiver.wire.messages import ConsumeMany, TopicInfo

COALESCED_MAX = 256
"""Calls in one request."""
PARTITION_TIMEOUT_MS = 2_000
"""Time for a partition's answer when every waiting call has another partition to try."""


class PartitionKey(NamedTuple):
    """A partition, as the key of its queue."""

    topic_id: TopicId
    partition_id: PartitionId


class PendingConsume:
    """One call that waits for its next message."""

    __slots__ = ("consumer_id", "deadline", "done", "failure", "remaining", "topic")

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
        self.remaining = list(reversed(order))
        """The partitions still to ask, the next one last."""
        self.deadline = deadline
        self.done = done
        self.failure: QuiverError | None = None
        """Why a partition could not be asked; returned if no other partition has a record."""


_consumer_id_of = attrgetter("consumer_id")
_remaining_of = attrgetter("remaining")

ResponseBuilder = Callable[[PendingConsume, PartitionId, Record], HttpResponse]
"""Build the response of a call that got a record."""


class ConsumeCoalescer:
    """The queues by partition. `close` ends all pending calls."""

    def __init__(self, router: Router, build_response: ResponseBuilder, *, nothing: HttpResponse) -> None:
        self._router = router
        self._build_response = build_response
        self._nothing = nothing
        self._loop = asyncio.get_running_loop()
        self._queues: dict[PartitionKey, list[PendingConsume]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    def consume(
        self, topic: TopicRow, consumer_id: int, order: Sequence[PartitionId], *, deadline: Deadline
    ) -> asyncio.Future[HttpResponse]:
        """Consume the next record of the first partition in `order` that has one; the future may be cancelled."""
        done: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._enqueue(PendingConsume(topic, ConsumerId(consumer_id), order, deadline=deadline, done=done))
        return done

    async def close(self) -> None:
        """Cancel all pending calls; idempotent."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _enqueue(self, call: PendingConsume) -> None:
        partition = PartitionKey(call.topic.topic_id, call.remaining[-1])
        queue = self._queues.get(partition)
        if queue is not None:
            queue.append(call)
            return
        self._queues[partition] = [call]
        task = self._loop.create_task(self._serve(partition))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, partition: PartitionKey) -> None:
        queue, calls = self._queues[partition], list[PendingConsume]()
        try:
            while queue:
                calls = [call for call in queue[:COALESCED_MAX] if not call.done.done()]
                del queue[:COALESCED_MAX]
                if calls:
                    await self._consume(partition, calls)
                calls = []  # answered, or in another queue
        except Exception as error:  # noqa: BLE001 - a bug; the server reports it for each call
            for call in (*calls, *queue):
                if not call.done.done():
                    call.done.set_exception(error)
        finally:
            del self._queues[partition]
            for call in (*calls, *queue):
                call.done.cancel()

    async def _consume(self, partition: PartitionKey, calls: list[PendingConsume]) -> None:
        try:
            records = await self._ask(partition, calls)
        except QuiverError as error:
            concerns_all = len(calls) == 1 or isinstance(error, UnavailableError) or error.outcome == "unknown"
            for call in calls:
                if concerns_all:
                    self._try_next_partition(call, error)
                else:  # one of the calls may have caused it: ask for each alone
                    await self._consume(partition, [call])
            return
        for call, record in zip(calls, records, strict=False):
            if record is None:
                self._try_next_partition(call)
            elif not call.done.done():
                call.done.set_result(self._build_response(call, partition.partition_id, record))
        for call in calls[len(records) :]:
            self._enqueue(call)  # the answer was full; nothing was consumed for these calls

    async def _ask(self, partition: PartitionKey, calls: list[PendingConsume]) -> list[Record | None]:
        consumer_ids = tuple(map(_consumer_id_of, calls))

        def build(info: TopicInfo) -> ConsumeMany:
            return ConsumeMany(
                topic_id=info.topic_id,
                partition_id=partition.partition_id,
                consumer_ids=consumer_ids,
            )

        deadline = calls[0].deadline
        if min(map(len, map(_remaining_of, calls))) > 1:
            deadline = self._router.deadline(min(PARTITION_TIMEOUT_MS, deadline.remaining_ms))
        _, payload = await self._router.ask_leader(
            calls[0].topic.name, partition.partition_id, build, deadline=deadline
        )
        try:
            return decode_consumed(payload)
        except DecodeError as error:
            # Not the client's mistake, and the cursor has moved already: the outcome is unknown.
            message = f"unknown: the answer of partition {partition.partition_id} is damaged: {error}"
            raise OutcomeUnknownError(message, code="damaged") from error

    def _try_next_partition(self, call: PendingConsume, error: QuiverError | None = None) -> None:
        """Move a call that got no record to its next partition, or answer it."""
        if call.done.done():
            return
        call.remaining.pop()
        # After an unknown outcome the record may be consumed already: asking elsewhere would hide that loss.
        is_unknown = error is not None and error.outcome == "unknown"
        if call.failure is None or is_unknown:
            call.failure = error
        if call.remaining and not is_unknown:
            self._enqueue(call)
        else:
            call.done.set_result(self._nothing if call.failure is None else error_response(call.failure))
