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

from quiver.errors import ConflictError, DamageError, NotFoundError, OutOfRangeError, UnavailableError
from quiver.model import NodeId, Offset, PartitionId, TopicId
from quiver.record import Batch, decode_batches
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import Fetch, FindOffset, ReadReplica, ReplicaRead, TopicInfo

OffsetSpec = Literal["earliest", "latest"] | int
"""An offset by meaning: the first one, the high watermark, or that of the first record not older than a time (ms)."""
OffsetSpecs = OffsetSpec | Mapping[int, OffsetSpec]
"""One specification for all partitions, or one for each partition that is named."""

FETCH_BYTES_MIN: Final = 64 * 1024
"""Least bytes to ask for: the guess from earlier batches of what is left may be too small."""

WAIT_MS: Final = 500
"""How long a leader may hold a fetch open that it has nothing for: what is asked for is there, or soon will be."""

REPLICA_POLL_S: Final = 0.1
"""Time between two looks at a replica that has not heard yet of all that is committed."""
REPLICA_LAG_MS_MAX: Final = 5_000
"""How long such a replica is waited for: several times as long as it takes to hear of it."""


class TopicOffsets(msgspec.Struct, frozen=True, kw_only=True):
    """One offset in each partition of a topic, no older than the question."""

    topic: str
    topic_id: TopicId
    created_ms: int
    """When the topic was made: tells it from one of the same id in a cluster that was set up anew."""
    offsets: dict[int, int]


async def find_offsets(
    router: Router,
    topic: str,
    at: OffsetSpecs,
    *,
    topic_id: int | None = None,
    age_ms_max: int = 0,
) -> TopicOffsets:
    """Return where `at` is in every partition, or in those that it names; metadata may be so old.

    Raises:
        NotFoundError: there is no such topic (`unknown_topic`) or partition (`unknown_partition`).
        ConflictError: the topic is not the one with `topic_id` any more (`topic_recreated`).
    """
    info = await router.find_topic(topic, deadline=router.deadline(), age_ms_max=age_ms_max)
    pinned = info.topic_id if topic_id is None else TopicId(topic_id)
    check_incarnation(info, pinned)
    wanted: dict[int, OffsetSpec] = (
        dict(at) if isinstance(at, Mapping) else dict.fromkeys(range(len(info.partitions)), at)
    )
    for partition in wanted:
        check_partition(info, partition)
    found = await asyncio.gather(*(_find_offset(router, topic, pinned, *one) for one in wanted.items()))
    offsets = dict(zip(wanted, found, strict=True))
    return TopicOffsets(topic=topic, topic_id=pinned, created_ms=info.created_ms, offsets=offsets)


def check_incarnation(info: TopicInfo, topic_id: TopicId) -> None:
    """Raise unless a topic is the one that is meant."""
    if info.topic_id != topic_id:
        message = f"topic {info.topic!r} was deleted and made anew: it is {info.topic_id} now, and was {topic_id}"
        raise ConflictError(message, code="topic_recreated")


def check_partition(info: TopicInfo, partition: int) -> None:
    """Raise unless a topic has a partition."""
    if not 0 <= partition < len(info.partitions):
        raise NotFoundError(f"topic {info.topic!r} has no partition {partition}", code="unknown_partition")


async def _find_offset(router: Router, topic: str, topic_id: TopicId, partition: int, at: OffsetSpec) -> int:
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
            self._start_fetch()
        if self._ahead is None:
            return []
        ahead, self._ahead = self._ahead, None
        try:
            batches = await ahead
        except BaseException:
            ahead.cancel()
            raise
        if self._position < self._end_offset:
            self._start_fetch()
        return batches

    def close(self) -> None:
        """Stop fetching; idempotent."""
        if self._ahead is not None and not self._ahead.cancel() and not self._ahead.cancelled():
            self._ahead.exception()  # nobody will ask for it; asyncio wants it looked at
        self._ahead = None

    def _start_fetch(self) -> None:
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
            self._update_record_bytes(batches)
        return batches

    def _update_record_bytes(self, batches: list[Batch]) -> None:
        size_bytes = sum(len(batch.data) for batch in batches)
        self._record_bytes = 1 + size_bytes // sum(len(batch) for batch in batches)

    def _bytes_wanted(self) -> int:
        """Return how much to ask for: what lies behind the range would be fetched for nothing."""
        if self._record_bytes is None:
            return self._fetch_bytes
        left_bytes = (self._end_offset - self._position) * self._record_bytes
        return min(self._fetch_bytes, max(FETCH_BYTES_MIN, left_bytes))


class ReplicaReader(RangeReader):
    """Read the batches that one node stores of a range of offsets; use on one loop."""

    def __init__(
        self,
        router: Router,
        topic: str,
        partition: int,
        *,
        node: int,
        first_offset: int,
        end_offset: int,
        topic_id: int | None,
        fetch_bytes: int,
    ) -> None:
        super().__init__(
            router,
            topic,
            partition,
            first_offset=first_offset,
            end_offset=end_offset,
            topic_id=topic_id,
            fetch_bytes=fetch_bytes,
        )
        self._node = NodeId(node)

    async def _fetch(self) -> list[Batch]:
        deadline, lag_deadline = self._router.deadline(), self._router.deadline(REPLICA_LAG_MS_MAX)
        retry = self._router.retry(deadline, is_read=True)
        while True:
            try:
                read, payload = await self._ask(deadline)
            except UnavailableError as error:
                await retry.wait_turn(error)
                continue
            if batches := self._accept(payload):
                return batches
            place = f"node {self._node}: {self._topic!r} partition {self._partition}"
            if read.end_offset > self._position:
                raise DamageError(f"{place} has nothing from {self._position} on, of {read.end_offset}", code="gap")
            if lag_deadline.is_over or deadline.remaining_ms <= 1000 * REPLICA_POLL_S:
                message = f"{place} ends at {read.end_offset}, before {self._end_offset}"
                raise OutOfRangeError(message, code="past_end")
            await asyncio.sleep(REPLICA_POLL_S)

    async def _ask(self, deadline: Deadline) -> tuple[ReplicaRead, memoryview]:
        info = await self._router.find_topic(self._topic, deadline=deadline)
        if self._topic_id is None:
            self._topic_id = info.topic_id
        check_incarnation(info, self._topic_id)
        check_partition(info, self._partition)
        request = ReadReplica(
            topic_id=self._topic_id,
            partition_id=self._partition,
            offset=self._position,
            bytes_max=self._bytes_wanted(),
        )
        return await self._router.ask_node(self._node, request, deadline=deadline)

    def _accept(self, payload: memoryview) -> list[Batch]:
        batches: list[Batch] = []
        for batch in decode_batches(payload):
            header = batch.header
            if header.is_control or header.end_offset <= self._position or header.base_offset >= self._end_offset:
                continue
            batches.append(batch)
        if batches:
            self._update_record_bytes(batches)
            self._position = batches[-1].header.end_offset
        return batches
