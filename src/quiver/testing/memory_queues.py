"""The work queues of a `MemoryCluster`: leases, retries, delays, order by key and dead letters, record by record.

It is a naive twin of `quiver.partition.queue_window`: it keeps one entry for each record under way, and moves dead
letters at once. It is never bounded, except by the group's `in_flight_max`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from quiver.clock import Clock
from quiver.errors import ConflictError, NotFoundError
from quiver.groups.settings import QueueSettings, dead_letter_topic_of
from quiver.model import ConsumerId, Offset
from quiver.record import Record, build_batch
from quiver.record.decoded import record_bytes
from quiver.record.delay import find_deliver_at
from quiver.record.queue_headers import (
    DEAD_ATTEMPTS_HEADER,
    DEAD_GROUP_HEADER,
    DEAD_HEADERS,
    DEAD_OFFSET_HEADER,
    DEAD_PARTITION_HEADER,
    DEAD_REASON_HEADER,
    DEAD_TIME_HEADER,
    DEAD_TOPIC_HEADER,
)
from quiver.wire.messages import CreateTopicRequest
from quiver.wire.queue_messages import (
    GetQueue,
    QueueFound,
    QueueLease,
    QueueReceive,
    QueueReceived,
    QueueRecord,
    QueueSettle,
    QueueSettled,
    QueueStall,
    encode_queue_records,
)

if TYPE_CHECKING:
    from quiver.testing.memory_cluster import MemoryCluster, MemoryTopic
    from quiver.testing.memory_partition import MemoryPartition

MAX_ATTEMPTS_REASON = "max attempts"


@dataclass(slots=True)
class _Entry:
    """A record that is leased or waits."""

    state: Literal["leased", "waiting"]
    attempt: int
    grant: int
    time_ms: int
    """When the lease ends, or before when it is not delivered."""
    key: bytes | None


@dataclass(slots=True)
class MemoryQueue:
    """The records of one group in one partition."""

    next_offset: Offset
    grants: int = 0
    entries: dict[Offset, _Entry] = field(default_factory=dict)
    dead: set[Offset] = field(default_factory=set)

    @property
    def first_unsettled(self) -> Offset:
        """The group's cursor."""
        return min(self.entries, default=self.next_offset)

    def due_ms(self) -> int | None:
        """Return when a record that is under way can be delivered again, at the earliest."""
        return min((entry.time_ms for entry in self.entries.values()), default=None)


class MemoryQueues:
    """All work queues of a cluster in memory."""

    def __init__(self, cluster: MemoryCluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self._queues: dict[tuple[int, MemoryPartition], MemoryQueue] = {}

    async def answer(
        self, topic: MemoryTopic, partition: MemoryPartition, request: QueueReceive | QueueSettle | GetQueue
    ) -> tuple[QueueReceived | QueueSettled | QueueFound, list[bytes]]:
        """Answer a request as the partition's leader does."""
        name, settings = self._find_group(request.group_id)
        queue = self._queues.setdefault(
            (request.group_id, partition),
            MemoryQueue(Offset(max(partition.first_offset, partition.cursors.get(request.group_id, Offset(0))))),
        )
        try:
            match request:
                case QueueReceive():
                    return await self._receive(name, settings, topic, partition, queue, request)
                case QueueSettle():
                    return self._settle(name, settings, topic, partition, queue, request), []
                case GetQueue():
                    return self._describe(settings, partition, queue), []
        finally:
            partition.cursors[request.group_id] = queue.first_unsettled

    def _find_group(self, group_id: ConsumerId) -> tuple[str, QueueSettings]:
        found = next(
            ((name, one) for name, one in self._cluster.groups.groups.items() if one.group_id == group_id), None
        )
        if found is None:
            raise NotFoundError(f"not done: unknown consumer {group_id}", code="unknown_consumer")
        if found[1].kind == "queue":
            return found[0], found[1].settings
        raise ConflictError(f"not done: group {group_id} is not a queue", code="not_a_queue")

    # -- receiving -------------------------------------------------------------------------------

    async def _receive(
        self,
        name: str,
        settings: QueueSettings,
        topic: MemoryTopic,
        partition: MemoryPartition,
        queue: MemoryQueue,
        request: QueueReceive,
    ) -> tuple[QueueReceived, list[bytes]]:
        until_ms = self._clock.monotonic_ms() + request.wait_ms
        while True:
            now_ms = self._clock.wall_ms()
            offsets = list(self._choose(name, settings, topic, partition, queue, request, now_ms))
            left_ms = until_ms - self._clock.monotonic_ms()
            if offsets or left_ms <= 0:
                break
            due_ms = queue.due_ms()
            await partition.wait_grown(left_ms if due_ms is None else max(1, min(left_ms, due_ms - now_ms)))
        if not offsets:
            return QueueReceived(stall=self._find_stall(settings, queue)), []
        size_bytes = record_bytes(_read(partition, offsets[0]))
        if size_bytes > (request.decoded_bytes_max or size_bytes):
            return QueueReceived(large_bytes=size_bytes), []
        queue.grants += 1
        lease_ms = request.lease_ms or settings.lease_ms
        leases: list[QueueLease] = []
        for offset in offsets:
            entry = queue.entries[offset]
            entry.state, entry.attempt = "leased", entry.attempt + 1
            entry.grant, entry.time_ms = queue.grants, now_ms + lease_ms
            leases.append(QueueLease(offset, 1, entry.attempt))
        records = [_read(partition, offset) for offset in offsets]
        payload = [QueueRecord(one.timestamp, one.value, one.key, one.headers) for one in records]
        received = QueueReceived(
            leases=tuple(leases), grant=queue.grants, deadline_ms=now_ms + lease_ms, lease_ms=lease_ms
        )
        return received, [encode_queue_records(payload)]

    def _choose(
        self,
        name: str,
        settings: QueueSettings,
        topic: MemoryTopic,
        partition: MemoryPartition,
        queue: MemoryQueue,
        request: QueueReceive,
        now_ms: int,
    ) -> Iterator[Offset]:
        """Yield records to lease: those with expired leases, those that waited, new ones; each in order."""
        taken_bytes = count = 0
        for offset in self._candidates(settings, partition, queue, now_ms):
            entry = queue.entries[offset]
            if settings.max_attempts and entry.attempt >= settings.max_attempts:
                self._bury(name, settings, topic, partition, queue, offset, MAX_ATTEMPTS_REASON)
                continue
            size = len(_read(partition, offset).value or b"")
            if count >= request.records_max or (count and taken_bytes + size > request.bytes_max):
                return
            count, taken_bytes = count + 1, taken_bytes + size
            yield offset

    def _candidates(
        self, settings: QueueSettings, partition: MemoryPartition, queue: MemoryQueue, now_ms: int
    ) -> Iterator[Offset]:
        for state in ("leased", "waiting"):
            for offset in sorted(queue.entries):
                entry = queue.entries.get(offset)
                is_due = entry is not None and entry.state == state and entry.time_ms <= now_ms
                if is_due and not self._is_behind(settings, queue, offset):
                    yield offset
        while queue.next_offset < partition.end_offset and len(queue.entries) < settings.in_flight_max:
            offset = queue.next_offset
            record = _read(partition, offset)
            deliver_at_ms = find_deliver_at(record.headers) or 0
            queue.entries[offset] = _Entry("waiting", 0, 0, deliver_at_ms, record.key)
            queue.next_offset = Offset(offset + 1)
            if deliver_at_ms <= now_ms and not self._is_behind(settings, queue, offset):
                yield offset

    def _is_behind(self, settings: QueueSettings, queue: MemoryQueue, offset: Offset) -> bool:
        """Return whether an earlier record of the same key is under way."""
        key = queue.entries[offset].key
        if settings.order != "key" or key is None:
            return False
        return any(before < offset and entry.key == key for before, entry in queue.entries.items())

    def _find_stall(self, settings: QueueSettings, queue: MemoryQueue) -> QueueStall:
        if len(queue.entries) >= settings.in_flight_max:
            return "in_flight_max"
        return "waiting" if any(entry.state == "waiting" for entry in queue.entries.values()) else "empty"

    # -- settling --------------------------------------------------------------------------------

    def _settle(
        self,
        name: str,
        settings: QueueSettings,
        topic: MemoryTopic,
        partition: MemoryPartition,
        queue: MemoryQueue,
        request: QueueSettle,
    ) -> QueueSettled:
        now_ms = self._clock.wall_ms()
        stale: list[tuple[Offset, int]] = []
        before: list[tuple[Offset, int]] = []
        deadline_ms = 0
        for ack in request.acks:
            for offset, _ in self._receipts(queue, ack.first, ack.count, ack.grant, stale, before):
                del queue.entries[offset]
        for release in request.releases:
            for _, entry in self._receipts(queue, release.first, release.count, release.grant, stale):
                entry.state, entry.time_ms, entry.attempt = "waiting", 0, entry.attempt - 1
        for back in request.returns:
            for offset, entry in self._receipts(queue, back.first, back.count, back.grant, stale):
                if settings.max_attempts and entry.attempt >= settings.max_attempts:
                    self._bury(name, settings, topic, partition, queue, offset, MAX_ATTEMPTS_REASON)
                    continue
                delay_ms = settings.retry_delay_ms(entry.attempt) if back.delay_ms is None else back.delay_ms
                entry.state, entry.time_ms = "waiting", now_ms + delay_ms
        for extension in request.extends:
            for _, entry in self._receipts(queue, extension.first, extension.count, extension.grant, stale):
                entry.time_ms = deadline_ms = now_ms + extension.lease_ms
        for reject in request.rejects:
            for offset, _ in self._receipts(queue, reject.first, reject.count, reject.grant, stale, before):
                self._bury(name, settings, topic, partition, queue, offset, reject.reason)
        partition.wake()
        return QueueSettled(stale=tuple(sorted(stale)), settled_before=tuple(sorted(before)), deadline_ms=deadline_ms)

    def _receipts(
        self,
        queue: MemoryQueue,
        first: int,
        count: int,
        grant: int,
        stale: list[tuple[Offset, int]],
        before: list[tuple[Offset, int]] | None = None,
    ) -> Iterator[tuple[Offset, _Entry]]:
        """Yield the entries for which receipts are good; collect the stale ones, and in `before` settled ones."""
        for offset in map(Offset, range(first, first + count)):
            entry = queue.entries.get(offset)
            if entry is not None and entry.state == "leased" and entry.grant == grant:
                yield offset, entry
            elif entry is not None or before is None or offset >= queue.next_offset:
                stale.append((offset, 1))
            else:
                before.append((offset, 1))

    def _bury(
        self,
        name: str,
        settings: QueueSettings,
        topic: MemoryTopic,
        partition: MemoryPartition,
        queue: MemoryQueue,
        offset: Offset,
        reason: str,
    ) -> None:
        """Move a record to the dead letters."""
        entry = queue.entries.pop(offset)
        record = _read(partition, offset)
        at = topic.partitions.index(partition)
        target = self._find_dead_topic(dead_letter_topic_of(settings, topic=topic.name, group=name))
        now_ms = self._clock.wall_ms()
        headers = (
            *(header for header in record.headers if header[0] not in DEAD_HEADERS),
            (DEAD_TOPIC_HEADER, topic.name.encode()),
            (DEAD_PARTITION_HEADER, b"%d" % at),
            (DEAD_OFFSET_HEADER, b"%d" % offset),
            (DEAD_GROUP_HEADER, name.encode()),
            (DEAD_ATTEMPTS_HEADER, b"%d" % entry.attempt),
            (DEAD_REASON_HEADER, reason.encode()),
            (DEAD_TIME_HEADER, b"%d" % now_ms),
        )
        batch = build_batch([record.value], timestamp=record.timestamp, keys=[record.key], headers=[headers])
        target.partitions[at % len(target.partitions)].append(batch, now_ms=now_ms)

    def _find_dead_topic(self, name: str) -> MemoryTopic:
        if name not in self._cluster.topics or self._cluster.topics[name].is_deleted:
            request = CreateTopicRequest(topic=name, partitions=1, request_id=f"dead-letters {name}")
            self._cluster.make_topic(request)
        return self._cluster.topics[name]

    # -- describing ------------------------------------------------------------------------------

    def _describe(self, settings: QueueSettings, partition: MemoryPartition, queue: MemoryQueue) -> QueueFound:
        now_ms = self._clock.wall_ms()
        entries = queue.entries.values()
        due = sum(entry.time_ms <= now_ms for entry in entries)
        ready = due + partition.end_offset - queue.next_offset
        return QueueFound(
            ready=ready,
            leased=sum(entry.state == "leased" and entry.time_ms > now_ms for entry in entries),
            waiting=sum(entry.state == "waiting" and entry.time_ms > now_ms for entry in entries),
            dying=0,
            next_offset=queue.next_offset,
            first_unsettled=queue.first_unsettled,
            first_offset=partition.first_offset,
            end_offset=partition.end_offset,
            in_flight_max=settings.in_flight_max,
            stall="" if due or (ready and len(entries) < settings.in_flight_max) else self._find_stall(settings, queue),
        )


def _read(partition: MemoryPartition, offset: Offset) -> Record:
    for batch in reversed(partition.batches):
        if batch.header.base_offset <= offset < batch.header.end_offset:
            return batch.records(offset, Offset(offset + 1))[0]
    raise AssertionError(f"offset {offset} is not in the partition")
