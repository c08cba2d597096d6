"""Settles the jobs of one partition: what many workers acknowledge at a time becomes one request.

One request is in flight; what arrives meanwhile is sent with the next. No record is named twice in a request: a process
that got a record again settles it under both of its receipts, one after the other. Extensions travel apart from
everything else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from quiver.client.delivery import copy_error
from quiver.client.queue_jobs import Range, Receipt, Refusals, SettleKind
from quiver.errors import ConflictError, NotFoundError, QuiverError
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.routing.router import Router
from quiver.tasks import TaskSet
from quiver.wire.messages import TopicInfo
from quiver.wire.queue_messages import (
    QUEUE_RANGES_MAX,
    QUEUE_RECORDS_MAX,
    QueueExtension,
    QueueReject,
    QueueReturn,
    QueueSettle,
    QueueSettled,
    ReceiptRange,
)

Spans = Sequence[tuple[int, int]]
"""Ranges of offsets: the first, and the number of records."""


class Settlement(msgspec.Struct, eq=False):
    """Ranges that one call settles in one way, and the future of the receipts that were refused."""

    kind: SettleKind
    ranges: Sequence[Range]
    argument: Any
    """Of a return, the delay in ms or None; of an extension, the lease in ms; of a rejection, the reason."""
    count: int
    done: asyncio.Future[Refusals]

    def items(self) -> list[Any]:
        """Return its ranges as they are sent."""
        argument = self.argument
        match self.kind:
            case "return":
                return [QueueReturn(*one, argument) for one in self.ranges]
            case "extend":
                return [QueueExtension(*one, argument) for one in self.ranges]
            case "reject":
                return [QueueReject(*one, argument) for one in self.ranges]
            case _:
                return [ReceiptRange(*one) for one in self.ranges]

    def offsets(self) -> set[int]:
        """Return its offsets."""
        return {offset for first, count, _ in self.ranges for offset in range(first, first + count)}

    def finish(self, stale: Spans, before: Spans) -> None:
        """Resolve the future with those of its receipts that are stale, and those that were settled before."""
        if not self.done.done():
            self.done.set_result(Refusals(self._receipts(stale), self._receipts(before)))

    def _receipts(self, spans: Spans) -> frozenset[Receipt]:
        """Return its receipts whose offsets are in ranges of offsets."""
        return frozenset(
            (grant, offset)
            for span_first, span_count in spans
            for first, count, grant in self.ranges
            for offset in range(max(first, span_first), min(first + count, span_first + span_count))
        )

    def fail(self, error: QuiverError) -> None:
        """Fail the call."""
        if not self.done.done():
            self.done.set_exception(copy_error(error))


class PartitionSettler:
    """Settle jobs of a group in one partition."""

    def __init__(
        self,
        topic: TopicInfo,
        partition_id: PartitionId,
        group: str,
        group_id: ConsumerId,
        *,
        router: Router,
        tasks: TaskSet,
    ) -> None:
        self._topic, self._topic_id, self._partition_id = topic.topic, topic.topic_id, partition_id
        self._group, self._group_id = group, group_id
        self._router, self._tasks = router, tasks
        self._pending: deque[Settlement] = deque()
        self._is_running = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being settled."""
        return not self._is_running

    def add(self, kind: SettleKind, ranges: Sequence[Range], argument: Any = None) -> list[asyncio.Future[Refusals]]:
        """Settle ranges; return the futures of those that were refused."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Refusals]] = []
        for part in _cut(ranges):
            future: asyncio.Future[Refusals] = loop.create_future()
            count = sum(one[1] for one in part)
            self._pending.append(Settlement(kind=kind, ranges=part, argument=argument, count=count, done=future))
            futures.append(future)
        if not self._is_running:
            self._is_running = True
            self._tasks.start(self._run(), f"settle-{self._partition_id}")
        return futures

    def abandon(self, error: QuiverError) -> None:
        """Fail what was not sent yet."""
        while self._pending:
            self._pending.popleft().fail(error)

    async def _run(self) -> None:
        try:
            while self._pending:
                await self._send(self._take())
        finally:
            self._is_running = False

    def _take(self) -> list[Settlement]:
        """Return the settlements of the next request."""
        pending = self._pending
        taken = [pending.popleft()]
        is_extension = taken[0].kind == "extend"
        count, ranges = taken[0].count, len(taken[0].ranges)
        named = taken[0].offsets()
        while pending and (pending[0].kind == "extend") == is_extension:
            count, ranges = count + pending[0].count, ranges + len(pending[0].ranges)
            offsets = pending[0].offsets()
            if count > QUEUE_RECORDS_MAX or ranges > QUEUE_RANGES_MAX or named & offsets:
                break
            named |= offsets
            taken.append(pending.popleft())
        return taken

    async def _send(self, taken: list[Settlement]) -> None:
        fields: dict[SettleKind, list[Any]] = {}
        for one in taken:
            fields.setdefault(one.kind, []).extend(one.items())
        request = QueueSettle(
            topic_id=self._topic_id,
            partition_id=self._partition_id,
            group_id=self._group_id,
            acks=tuple(fields.get("ack", ())),
            releases=tuple(fields.get("release", ())),
            returns=tuple(fields.get("return", ())),
            extends=tuple(fields.get("extend", ())),
            rejects=tuple(fields.get("reject", ())),
        )
        unknown: list[None] = []
        try:
            settled = await self._ask(request, on_unknown=lambda: unknown.append(None))
        except QuiverError as error:
            named = name_deleted(error, self._group)
            for one in taken:
                one.fail(named)
        except BaseException:
            for one in taken:
                one.done.cancel()
            raise
        else:
            before = () if unknown else settled.settled_before  # perhaps by an earlier attempt of this request
            for one in taken:
                one.finish(settled.stale, before)

    async def _ask(self, request: QueueSettle, *, on_unknown: Callable[[], object]) -> QueueSettled:
        def build(info: TopicInfo) -> QueueSettle:
            check_topic(info, self._topic_id)
            return request

        asking = self._router.ask_leader(
            self._topic, self._partition_id, build, deadline=self._router.deadline(), on_unknown=on_unknown
        )
        return (await asking)[0]


def check_topic(info: TopicInfo, topic_id: TopicId) -> None:
    """Raise `ConflictError` if a topic was deleted and created again: its records are others."""
    if info.topic_id != topic_id:
        message = f"not done: topic {info.topic!r} was deleted and created again; open the queue again"
        raise ConflictError(message, code="topic_recreated")


def name_deleted(error: QuiverError, group: str) -> QuiverError:
    """Return a partition's error; that of a group that is gone in the words of who works for it."""
    if error.code != "unknown_consumer":
        return error
    message = f"not done: group {group!r} was deleted, or expired, with its jobs; open the queue again"
    return NotFoundError(message, code="unknown_group")


def _cut(ranges: Sequence[Range]) -> list[Sequence[Range]]:
    """Return ranges in parts that fit into one request each, and that name no record twice."""
    if _are_overlapping(ranges):
        by_grant: dict[int, list[Range]] = {}
        for one in ranges:
            by_grant.setdefault(one[2], []).append(one)
        return [part for own in by_grant.values() for part in _cut(own)]
    count = sum(one[1] for one in ranges)
    if count <= QUEUE_RECORDS_MAX and len(ranges) <= QUEUE_RANGES_MAX:
        return [ranges]
    parts: list[list[Range]] = [[]]
    size = 0
    for first, length, grant in ranges:
        for start in range(first, first + length, QUEUE_RECORDS_MAX):
            piece = (start, min(QUEUE_RECORDS_MAX, first + length - start), grant)
            if parts[-1] and (size + piece[1] > QUEUE_RECORDS_MAX or len(parts[-1]) == QUEUE_RANGES_MAX):
                parts.append([])
                size = 0
            parts[-1].append(piece)
            size += piece[1]
    return parts  # type: ignore[return-value] # lists are sequences


def _are_overlapping(ranges: Sequence[Range]) -> bool:
    """Return whether ranges, of at least two grants, name a record twice."""
    if len({grant for _, _, grant in ranges}) < 2:
        return False
    ends = sorted((first, first + count) for first, count, _ in ranges)
    return any(end > first for (_, end), (first, _) in pairwise(ends))
