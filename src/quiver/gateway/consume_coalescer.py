"""Coalesce many calls for one next message each into few `ConsumeMany` requests.

Without it, a consumer that reads message by message would cost one request and one replicated step per message. Each
partition has a queue of pending calls: calls of any consumers that arrive while its leader is being asked share the
next request. A call that finds no record moves to the queue of its next partition, and ends after the last one.

Few bytes are asked for at a time. A record that needs more room is taken by a request of its own, once that memory is
reserved: until then no cursor moves, and nobody else waits for it.

Invariant: a queue is served while it has calls, and every call is answered, however serving ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from quiver.errors import DecodeError, OutcomeUnknownError, QuiverError, UnavailableError
from quiver.gateway.codec import error_response
from quiver.gateway.http import HttpResponse
from quiver.gateway.partition_reader import WAIT_SHARE
from quiver.metadata import TopicRow
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.record import Record
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.security import ANONYMOUS, Principal
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom
from quiver.wire.consumed_records import decode_consumed
from quiver.wire.messages import ConsumeMany, TopicInfo

COALESCED_MAX = 256
"""Calls in one request."""
ROOM_BYTES = 256 * 1024
"""Bytes of the records of one request that are not reserved before it."""
PARTITION_TIMEOUT_MS = 2_000
"""Time for a partition's answer when every waiting call has another partition to try."""


class PartitionKey(NamedTuple):
    """A partition, as the key of its queue."""

    topic_id: TopicId
    partition_id: PartitionId


class PendingConsume:
    """One call that waits for its next message."""

    __slots__ = ("consumer_id", "deadline", "done", "failure", "principal", "remaining", "topic")

    def __init__(
        self,
        topic: TopicRow,
        consumer_id: ConsumerId,
        order: Sequence[PartitionId],
        *,
        deadline: Deadline,
        done: asyncio.Future[HttpResponse],
        principal: Principal,
    ) -> None:
        self.principal = principal
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

    def __init__(
        self, router: Router, build_response: ResponseBuilder, answers: AnswerMemory, *, nothing: HttpResponse
    ) -> None:
        self._router = router
        self._answers = answers
        self._build_response = build_response
        self._nothing = nothing
        self._loop = asyncio.get_running_loop()
        self._queues: dict[PartitionKey, list[PendingConsume]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    def consume(
        self,
        topic: TopicRow,
        consumer_id: int,
        order: Sequence[PartitionId],
        *,
        deadline: Deadline,
        principal: Principal = ANONYMOUS,
    ) -> asyncio.Future[HttpResponse]:
        """Consume the next record of the first partition in `order` that has one; the future may be cancelled."""
        done: asyncio.Future[HttpResponse] = self._loop.create_future()
        call = PendingConsume(topic, ConsumerId(consumer_id), order, deadline=deadline, done=done, principal=principal)
        self._enqueue(call)
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
        self._start(self._serve(partition))

    def _start(self, serving: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(serving)
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
            if self._answers.is_tight:
                await self._wait_room(calls[0])
                calls = [call for call in calls if not call.done.done()]
                if not calls:
                    return
            records, large_bytes = await self._ask(partition, calls, ROOM_BYTES)
        except QuiverError as error:
            concerns_all = len(calls) == 1 or isinstance(error, UnavailableError) or error.outcome == "unknown"
            for call in calls:
                if concerns_all:
                    self._try_next_partition(call, error)
                else:  # one of the calls may have caused it: ask for each alone
                    await self._consume(partition, [call])
            return
        if large_bytes:
            first_id = calls[0].consumer_id
            of_first = [call for call in calls if call.consumer_id == first_id]
            self._start(self._consume_large(partition, of_first, large_bytes))
            calls = [call for call in calls if call.consumer_id != first_id]
        self._answer(partition, calls, records)

    def _answer(self, partition: PartitionKey, calls: list[PendingConsume], records: list[Record | None]) -> None:
        for call, record in zip(calls, records, strict=False):
            if record is None:
                self._try_next_partition(call)
            elif not call.done.done():
                call.done.set_result(self._build_response(call, partition.partition_id, record))
        for call in calls[len(records) :]:
            self._enqueue(call)  # the answer was full; nothing was consumed for these calls

    async def _wait_room(self, call: PendingConsume) -> None:
        """Wait until an answer of few bytes fits beside the others."""
        room = AnswerRoom(self._answers, call.principal)
        await room.reserve(ROOM_BYTES, timeout_s=call.deadline.remaining_ms / 1000 * WAIT_SHARE)
        room.release()

    async def _consume_large(self, partition: PartitionKey, calls: list[PendingConsume], large_bytes: int) -> None:
        """Consume for the calls of one consumer whose next record is large, or in a large batch."""
        room = AnswerRoom(self._answers, calls[0].principal)
        try:
            records: list[Record | None] = []
            while large_bytes:
                await room.reserve_large(large_bytes, timeout_s=calls[0].deadline.remaining_ms / 1000 * WAIT_SHARE)
                calls = [call for call in calls if not call.done.done()]
                if not calls:
                    return
                records, large_bytes = await self._ask(partition, calls, large_bytes)
            room.release()  # each response counts its own record from now on, in the same turn of the loop
            self._answer(partition, calls, records)
            calls = []
        except QuiverError as error:
            for call in calls:
                self._try_next_partition(call, error)
            calls = []
        except Exception as error:  # noqa: BLE001 - a bug; the server reports it for each call
            for call in calls:
                if not call.done.done():
                    call.done.set_exception(error)
        finally:
            room.release()
            for call in calls:
                call.done.cancel()

    async def _ask(
        self, partition: PartitionKey, calls: list[PendingConsume], room_bytes: int
    ) -> tuple[list[Record | None], int]:
        """Return records, or how much room the first of them needs."""
        consumer_ids = tuple(map(_consumer_id_of, calls))

        def build(info: TopicInfo) -> ConsumeMany:
            return ConsumeMany(
                topic_id=info.topic_id,
                partition_id=partition.partition_id,
                consumer_ids=consumer_ids,
                decoded_bytes_max=room_bytes,
            )

        deadline = calls[0].deadline
        if min(map(len, map(_remaining_of, calls))) > 1:
            deadline = self._router.deadline(min(PARTITION_TIMEOUT_MS, deadline.remaining_ms))
        consumed, payload = await self._router.ask_leader(
            calls[0].topic.name, partition.partition_id, build, deadline=deadline
        )
        if consumed.large_bytes:
            return [], consumed.large_bytes
        try:
            return decode_consumed(payload), 0
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
