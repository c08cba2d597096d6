"""Reads ranges of offsets for programs that store their own offsets: partition bounds and the batches between them.

Nothing here leaves state in the cluster: no consumer, no cursor. All calls pin one *incarnation* of a topic by its id:
a topic that was deleted and created again under the same name is refused with `topic_recreated`.

`RangeReader` reads from the leader and prefetches one answer. It never skips a record: a range that retention has
trimmed raises `TrimmedError`. `ReplicaReader` reads from one named node, leader or not, to compare replicas (`quiver
pipeline audit`). It returns committed records as that node knows them, and waits a short time for a replica that lags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
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
"""Minimum bytes of a fetch: the size of the rest, estimated from earlier batches, may be too small."""

WAIT_MS: Final = 500
"""How long a leader may hold a fetch open: the records of a range exist already or will soon."""

REPLICA_POLL_S: Final = 0.1
"""Interval of polls of a replica that does not know yet that the records are committed."""
REPLICA_LAG_MS_MAX: Final = 5_000
"""How long to wait for such a replica: several times the usual delay of the commit index."""


class ReadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a long read is; `total` is the number of records to read, None if it is not known."""

    records: int
    bytes: int
    """Bytes of the batches that were read, as stored: compressed, if they are."""
    total: int | None = None


OnProgress = Callable[[ReadProgress], object]
"""Called after each batch of a long read, on the client's event loop; it must not block."""


class TopicOffsets(msgspec.Struct, frozen=True, kw_only=True):
    """One offset in each partition of a topic, read after the request was made."""

    topic: str
    topic_id: TopicId
    created_ms: int
    """When the topic was created: distinguishes it from a topic of the same id in a newly created cluster."""
    offsets: dict[int, int]


async def find_offsets(
    router: Router,
    topic: str,
    at: OffsetSpecs,
    *,
    topic_id: int | None = None,
    age_ms_max: int = 0,
) -> TopicOffsets:
    """Return the offset of `at` in every partition, or in those that it names; metadata may be `age_ms_max` old.

    Raises:
        NotFoundError: unknown topic (`unknown_topic`) or partition (`unknown_partition`).
        ConflictError: the topic no longer has `topic_id` (`topic_recreated`).
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
    """Raise `ConflictError` if a topic does not have the expected id."""
    if info.topic_id != topic_id:
        message = f"topic {info.topic!r} was deleted and created again: its id is {info.topic_id}, expected {topic_id}"
        raise ConflictError(message, code="topic_recreated")


def check_partition(info: TopicInfo, partition: int) -> None:
    """Raise `NotFoundError` if a topic does not have a partition."""
    if not 0 <= partition < len(info.partitions):
        raise NotFoundError(f"not done: topic {info.topic!r} has no partition {partition}", code="unknown_partition")


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
    """Read the batches of one partition that hold a range of offsets; use on one event loop.

    The first and the last batch may extend beyond the range: pass its bounds to `Batch.records` or `to_arrow`.
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
            raise OutOfRangeError(f"not done: offsets from {first_offset} up to {end_offset} are not a valid range")
        self._router, self._topic, self._partition = router, topic, PartitionId(partition)
        self._topic_id = None if topic_id is None else TopicId(topic_id)
        self._position, self._end_offset = Offset(first_offset), Offset(end_offset)
        self._fetch_bytes = fetch_bytes
        self._record_bytes: int | None = None
        """Average size of a record in the last answer."""
        self._ahead: asyncio.Task[list[Batch]] | None = None

    async def read_next(self) -> list[Batch]:
        """Return the next batches, in order and without a gap; an empty list at the end of the range.

        Raises:
            TrimmedError: retention has removed the next records.
            ConflictError: the topic was deleted and created again (`topic_recreated`).
            OutOfRangeError: the partition ends before the range (`past_end`).
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
            self._ahead.exception()  # retrieved, so that asyncio does not log it as never retrieved
        self._ahead = None

    def _start_fetch(self) -> None:
        self._ahead = asyncio.get_running_loop().create_task(self._fetch(), name=f"range-{self._partition}")

    async def _fetch(self) -> list[Batch]:
        """Return the next batches, at least one record."""
        deadline = self._router.deadline()
        while not (batches := await self._try_fetch(deadline)):
            # A deposed leader may still answer with an old end, so ask for a confirmed one.
            assert self._topic_id is not None
            end_offset = await _find_offset(self._router, self._topic, self._topic_id, self._partition, "latest")
            place = f"topic {self._topic!r} partition {self._partition}"
            if end_offset <= self._position:
                message = f"{place} ends at {end_offset}, before {self._end_offset}"
                raise OutOfRangeError(message, code="past_end")
            if deadline.is_over:
                raise UnavailableError(
                    f"not read: {place}, offset {self._position}: the leader returned no records in time; retry",
                    code="timeout",
                )
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
                place = f"topic {self._topic!r} partition {self._partition}"
                missing = f"offsets {self._position} to {header.base_offset - 1}"
                raise DamageError(f"{place}: the leader's answer has a gap, {missing} are missing", code="gap")
            batches.append(batch)
            self._position = header.end_offset
        if batches:
            self._update_record_bytes(batches)
        return batches

    def _update_record_bytes(self, batches: list[Batch]) -> None:
        size_bytes = sum(len(batch.data) for batch in batches)
        self._record_bytes = 1 + size_bytes // sum(len(batch) for batch in batches)

    def _bytes_wanted(self) -> int:
        """Return the bytes to ask for: records beyond the range are not needed."""
        if self._record_bytes is None:
            return self._fetch_bytes
        left_bytes = (self._end_offset - self._position) * self._record_bytes
        return min(self._fetch_bytes, max(FETCH_BYTES_MIN, left_bytes))


class ReplicaReader(RangeReader):
    """Read the batches of a range as one node stores them; use on one event loop."""

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
            place = f"node {self._node}: topic {self._topic!r} partition {self._partition}"
            if read.end_offset > self._position:
                raise DamageError(
                    f"{place} has no records from offset {self._position} on, but ends at {read.end_offset}", code="gap"
                )
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
