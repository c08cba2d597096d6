"""Ranges of offsets for programs that keep their own place: where partitions begin and end, and what lies between.

Nothing here leaves a trace in the cluster: no consumer, no cursor. All of it holds on to one *incarnation* of a topic
(its id): a topic that was deleted and made anew under the same name is another topic, and is refused with
`topic_recreated` instead of being read as if it were the old one.

`RangeReader` fetches one answer ahead of its user. It never skips: what retention removed is a `TrimmedError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from quiver.client.cursors import Cursors
from quiver.errors import ConflictError, DamageError, NotFoundError, OutOfRangeError, RequestError, UnavailableError
from quiver.model import Offset, PartitionId, TopicId
from quiver.record import Batch, decode_batches
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import Fetch, FindOffset, TopicInfo

At = Literal["earliest", "latest"] | int
"""Where in a partition: its first record, its high watermark, or the first record not older than a timestamp (ms)."""

FETCH_BYTES_MIN: Final = 64 * 1024
"""Least bytes to ask for: the guess from earlier batches of what is left may be too small."""

WAIT_MS: Final = 500
"""How long a leader may hold a fetch open that it has nothing for: what is asked for is there, or soon will be."""


class TopicOffsets(msgspec.Struct, frozen=True, kw_only=True):
    """One offset in each partition of a topic, no older than the question."""

    topic: str
    topic_id: TopicId
    created_ms: int
    """When the topic was made: tells it from one of the same id in a cluster that was set up anew."""
    offsets: dict[int, int]


async def find_offsets(
    router: Router, topic: str, at: At | Mapping[int, At], *, topic_id: int | None = None, age_ms_max: int = 0
) -> TopicOffsets:
    """Return where `at` is in every partition, or in those that it names; metadata may be so old.

    Raises:
        NotFoundError: there is no such topic (`unknown_topic`) or partition (`unknown_partition`).
        ConflictError: the topic is not the one with `topic_id` any more (`topic_recreated`).
    """
    info = await router.find_topic(topic, deadline=router.deadline(), age_ms_max=age_ms_max)
    pinned = info.topic_id if topic_id is None else TopicId(topic_id)
    check_incarnation(info, pinned)
    wanted: dict[int, At] = dict(at) if isinstance(at, Mapping) else dict.fromkeys(range(len(info.partitions)), at)
    for partition in wanted:
        check_partition(info, partition)
    found = await asyncio.gather(*(_find_offset(router, topic, pinned, *one) for one in wanted.items()))
    offsets = dict(zip(wanted, found, strict=True))
    return TopicOffsets(topic=topic, topic_id=pinned, created_ms=info.created_ms, offsets=offsets)


class NamedCursors:
    """The cursors of named consumers that read elsewhere; each is registered when it is first moved."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._known: dict[tuple[str, str], Cursors] = {}

    async def move(self, topic: str, name: str, offsets: Mapping[int, int]) -> None:
        """Set a consumer's cursors, by partition."""
        deadline = self._router.deadline()
        cursors = self._known.get((topic, name))
        if cursors is None:
            cursors = Cursors(self._router, topic)
            await cursors.register(name=name, consumer_id=None, partitions=(), start="earliest", deadline=deadline)
            self._known[topic, name] = cursors
        try:
            await asyncio.gather(
                *(cursors.move(PartitionId(part), Offset(at), deadline=deadline) for part, at in offsets.items())
            )
        except RequestError:
            self._known.pop((topic, name), None)  # it may have been forgotten, or its topic made anew
            raise


def check_incarnation(info: TopicInfo, topic_id: TopicId) -> None:
    """Raise unless a topic is the one that is meant."""
    if info.topic_id != topic_id:
        message = f"topic {info.topic!r} was deleted and made anew: it is {info.topic_id} now, and was {topic_id}"
        raise ConflictError(message, code="topic_recreated")


def check_partition(info: TopicInfo, partition: int) -> None:
    """Raise unless a topic has a partition."""
    if not 0 <= partition < len(info.partitions):
        raise NotFoundError(f"topic {info.topic!r} has no partition {partition}", code="unknown_partition")


async def _find_offset(router: Router, topic: str, topic_id: TopicId, partition: int, at: At) -> int:
    def build(info: TopicInfo) -> FindOffset:
        check_incarnation(info, topic_id)
        return FindOffset(
            topic_id=topic_id,
            partition_id=PartitionId(partition),
            at=at,
        )

    found, _ = await router.ask_leader(topic, PartitionId(partition), build, deadline=router.deadline())
    return found.offset


class RangeReader:
    """Read the batches of one partition that hold the offsets from one to another; use on one loop.

    The first and the last batch may reach beyond the range: `Batch.records` and `to_arrow` take its bounds.
    """

    def __init__(
        self,
        router: Router,
        topic: str,
        partition: int,
        *,
        first_offset: int,
        end_offset: int,
        topic_id: int | None,
        fetch_bytes: int,
    ) -> None:
        if not 0 <= first_offset <= end_offset:
            raise OutOfRangeError(f"offsets from {first_offset} up to {end_offset} are no range")
        self._router, self._topic, self._partition = router, topic, PartitionId(partition)
        self._topic_id = None if topic_id is None else TopicId(topic_id)
        self._position, self._end_offset = Offset(first_offset), Offset(end_offset)
        self._fetch_bytes = fetch_bytes
        self._record_bytes: int | None = None
        """How large records were so far."""
        self._ahead: asyncio.Task[list[Batch]] | None = None

    async def read_next(self) -> list[Batch]:
        """Return the next batches, in order and without a gap; none at the end of the range.

        Raises:
            TrimmedError: retention has removed what comes next.
            ConflictError: the topic was deleted and made anew (`topic_recreated`).
            OutOfRangeError: the partition ends before the range does (`past_end`).
        """
        if self._ahead is None and self._position < self._end_offset:
            self._look_ahead()
        if self._ahead is None:
            return []
        ahead, self._ahead = self._ahead, None
        try:
            batches = await ahead
        except BaseException:
            ahead.cancel()
            raise
        if self._position < self._end_offset:
            self._look_ahead()
        return batches

    def close(self) -> None:
        """Stop fetching; idempotent."""
        if self._ahead is not None and not self._ahead.cancel() and not self._ahead.cancelled():
            self._ahead.exception()  # nobody will ask for it; asyncio wants it looked at
        self._ahead = None

    def _look_ahead(self) -> None:
        self._ahead = asyncio.get_running_loop().create_task(self._fetch(), name=f"range-{self._partition}")

    async def _fetch(self) -> list[Batch]:
        """Return batches of at least one record."""
        deadline = self._router.deadline()
        while not (batches := await self._try_fetch(deadline)):
            # A leader that was replaced and does not know it yet may have less: only a confirmed end counts.
            assert self._topic_id is not None
            end_offset = await _find_offset(self._router, self._topic, self._topic_id, self._partition, "latest")
            place = f"{self._topic!r} partition {self._partition}"
            if end_offset <= self._position:
                message = f"{place} ends at {end_offset}, before {self._end_offset}"
                raise OutOfRangeError(message, code="past_end")
            if deadline.is_over:
                raise UnavailableError(f"{place}: offset {self._position} was not served in time", code="timeout")
        return batches

    async def _try_fetch(self, deadline: Deadline) -> list[Batch]:
        def build(info: TopicInfo) -> Fetch:
            if self._topic_id is None:
                self._topic_id = info.topic_id
            check_incarnation(info, self._topic_id)
            check_partition(info, self._partition)
            return Fetch(
                topic_id=self._topic_id,
                partition_id=self._partition,
                offset=self._position,
                bytes_max=self._bytes_wanted(),
                wait_ms=WAIT_MS,
            )

        _, payload = await self._router.ask_leader(
            self._topic, self._partition, build, deadline=deadline, wait_ms=WAIT_MS
        )
        return self._accept(payload)

    def _accept(self, payload: memoryview) -> list[Batch]:
        batches: list[Batch] = []
        for batch in decode_batches(payload):
            header = batch.header
            if header.is_control or header.end_offset <= self._position:
                continue
            if header.base_offset >= self._end_offset:
                break
            if header.base_offset > self._position:
                message = f"partition {self._partition}: offset {header.base_offset} follows {self._position}"
                raise DamageError(f"the leader left records out: {message}", code="gap")
            batches.append(batch)
            self._position = header.end_offset
        if batches:
            self._note_size(batches)
        return batches

    def _note_size(self, batches: list[Batch]) -> None:
        size_bytes = sum(len(batch.data) for batch in batches)
        self._record_bytes = 1 + size_bytes // sum(len(batch) for batch in batches)

    def _bytes_wanted(self) -> int:
        """Return how much to ask for: what lies behind the range would be fetched for nothing."""
        if self._record_bytes is None:
            return self._fetch_bytes
        left_bytes = (self._end_offset - self._position) * self._record_bytes
        return min(self._fetch_bytes, max(FETCH_BYTES_MIN, left_bytes))
