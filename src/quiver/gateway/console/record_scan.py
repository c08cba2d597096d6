"""Which records of partitions are shown: those that match, the first or the last of them, within a number and bytes.

Pure: batches come in as they are read, and none is kept. Records are copies of their parts of a batch.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from quiver.gateway.console import contract
from quiver.model import Offset, PartitionId
from quiver.record import Batch, Record
from quiver.record.decoded import record_bytes

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of values, keys and headers in one answer, of all partitions; a single larger record is returned whole."""

STEP_BYTES: Final = 1024 * 1024
"""Bytes of batches that are asked for at once, and that are decoded in one turn of the event loop."""
SCANNED_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of batches of a partition, once decoded, that one call reads, or a single larger batch."""
RANGE_RECORDS: Final = 128
"""Records that are read first of the newest: as many as the console asks for, and usually less than `STEP_BYTES`."""
RANGE_BYTES_MAX: Final = 4 * STEP_BYTES
"""Bytes that are read of one range of the newest records, once decoded, or a single larger batch."""
RANGE_FACTOR: Final = 4
"""How much a range may grow, and how much it shrinks at least."""

Matches = Callable[[Record], bool]


class PartitionRecords(NamedTuple):
    """What was read of one partition: of all matches in its range, none is left out."""

    range: contract.RecordRangeItem
    records: list[Record]
    scanned: int


def make_matcher(key: str | None, search: str | None) -> Matches | None:
    """Return whether a record is one of those that are looked for; None if all are."""
    if key is None and not search:
        return None
    wanted_key = None if key is None else key.encode()
    wanted = (search or "").lower().encode()

    def matches(record: Record) -> bool:
        if wanted_key is not None and record.key != wanted_key:
            return False
        return not wanted or wanted in bytes(record.value or b"").lower() or wanted in bytes(record.key or b"").lower()

    return matches


class KeptRecords:
    """The first records that are added, or the last ones, within a number and bytes."""

    def __init__(self, count_max: int, bytes_max: int, *, keeps_last: bool, has_one: bool = True) -> None:
        """With `has_one`, a single record that is larger than `bytes_max` is kept."""
        self.records: deque[Record] = deque()
        self.size_bytes = 0
        self.has_dropped = False
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._keeps_last = keeps_last
        self._count_min = int(has_one)

    @property
    def is_full(self) -> bool:
        """Whether a further record has no room; of the last ones, it takes that of earlier ones."""
        has_all = len(self.records) >= self._count_max or self.size_bytes >= self._bytes_max
        return not self._keeps_last and (has_all or self.has_dropped)

    def add(self, record: Record) -> bool:
        """Keep a record, instead of earlier ones if the last are wanted; return False if it has no room."""
        self.records.append(record)
        self.size_bytes += record_bytes(record)
        while len(self.records) > self._count_min and self._is_over:
            dropped = self.records.popleft() if self._keeps_last else self.records.pop()
            self.size_bytes -= record_bytes(dropped)
            self.has_dropped = True
        return self._keeps_last or not self.has_dropped

    @property
    def _is_over(self) -> bool:
        return len(self.records) > self._count_max or self.size_bytes > self._bytes_max


class PartitionScan:
    """Look at the records in [`start`, `stop`) of one partition, as their batches are read.

    With `low`, it begins earlier if the first batch does, which is decoded in any case, but not before `low`.
    """

    def __init__(
        self, start: Offset, stop: Offset, kept: KeptRecords, matches: Matches | None, *, low: Offset | None = None
    ) -> None:
        self.start = start
        self.stop = stop
        self.position = start
        self.kept = kept
        self._matches = matches
        self._low = start if low is None else low

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to be read."""
        return self.position >= self.stop or self.kept.is_full

    def accept(self, batch: Batch) -> None:
        """Look at the records of the next batch."""
        if self.position == self.start:
            self.start = self.position = Offset(max(self._low, min(self.start, batch.header.base_offset)))
        for record in batch.records(self.position, self.stop):
            if (self._matches is None or self._matches(record)) and not self.kept.add(record):
                return
            self.position = Offset(record.offset + 1)
            if self.kept.is_full:
                return
        self.position = Offset(max(self.position, min(self.stop, batch.header.end_offset)))


class NewestScan:
    """Choose the ranges in which the newest records of one partition are read, from `end` backwards to `low`.

    A range is as long as `STEP_BYTES` are expected to be. One that turns out to be larger than `RANGE_BYTES_MAX` is not
    read to its end: a shorter one nearer to the end of the partition takes its place.
    """

    def __init__(self, low: Offset, end: Offset, wanted: int, matches: Matches | None) -> None:
        self.start = end
        """All matches from here on are kept."""
        self.lowest = end
        """All records from here on were looked at."""
        self.size_bytes = 0
        self.is_done = low >= end
        self._low, self._end = low, end
        self._wanted = wanted
        self._matches = matches
        self._parts: list[deque[Record]] = []
        self._count = 0
        self._length = RANGE_RECORDS
        self._bytes_left = SCANNED_BYTES_MAX

    @property
    def records(self) -> list[Record]:
        """Return the records that were found, in order."""
        return [record for part in reversed(self._parts) for record in part]

    @property
    def range_bytes_max(self) -> int:
        """Return how many bytes the next range may have."""
        return max(1, min(RANGE_BYTES_MAX, self._bytes_left))

    def begin_range(self) -> PartitionScan:
        """Return the scan of the next range."""
        start = Offset(max(self._low, self.lowest - self._length))
        bytes_max, has_one = ANSWER_BYTES_MAX - self.size_bytes, not self._count
        kept = KeptRecords(self._wanted - self._count, bytes_max, keeps_last=True, has_one=has_one)
        return PartitionScan(start, self.lowest, kept, self._matches, low=self._low)

    def end_range(self, scan: PartitionScan, decoded: int) -> None:
        """Take what was found in a range, or choose a shorter one."""
        self._bytes_left -= decoded
        average = max(1, decoded // max(1, scan.position - scan.start))
        count = STEP_BYTES // average
        if scan.position < scan.stop:
            self._length = max(1, min(count, (scan.stop - scan.start) // RANGE_FACTOR))
            has_nothing = self.lowest == self._end
            self.is_done = not decoded or (self._bytes_left <= 0 and not has_nothing)
            return
        self._length = max(1, min(count, (scan.stop - scan.start) * RANGE_FACTOR))
        self._take(scan)

    def _take(self, scan: PartitionScan) -> None:
        kept = scan.kept
        self.lowest = scan.start
        if not kept.has_dropped:
            self.start = scan.start
        elif kept.records:
            self.start = kept.records[0].offset
        self._parts.append(kept.records)
        self._count += len(kept.records)
        self.size_bytes += kept.size_bytes
        has_enough = kept.has_dropped or self._count >= self._wanted or self.size_bytes >= ANSWER_BYTES_MAX
        self.is_done = has_enough or self.lowest <= self._low or self._bytes_left <= 0


class FoundRecords:
    """The records of one call, of all partitions: the first or the last by time, within the bounds of an answer."""

    def __init__(self, wanted: int, *, is_newest: bool) -> None:
        self.partitions: list[PartitionRecords] = []
        self.size_bytes = 0
        self._count = 0
        self._wanted = wanted
        self._is_newest = is_newest

    def add(self, one: PartitionRecords) -> None:
        """Add what was read of a partition, and drop what cannot be in the answer any more."""
        self.partitions.append(one)
        self._count += len(one.records)
        self.size_bytes += sum(map(record_bytes, one.records))
        if self.size_bytes > ANSWER_BYTES_MAX or self._count > 2 * self._wanted:
            self.choose()

    def choose(self) -> list[tuple[PartitionId, Record]]:
        """Return the records of all partitions by time, those of one partition in order, and drop all others."""
        chosen = self._choose()
        counts = Counter(partition_id for partition_id, _ in chosen)
        cut = _cut_last if self._is_newest else _cut_first
        self.partitions = [cut(one, counts[PartitionId(one.range.partition_id)]) for one in self.partitions]
        self._count = len(chosen)
        self.size_bytes = sum(record_bytes(record) for _, record in chosen)
        return chosen

    def _choose(self) -> list[tuple[PartitionId, Record]]:
        each = [[(PartitionId(one.range.partition_id), record) for record in one.records] for one in self.partitions]
        every = list(heapq.merge(*each, key=lambda item: (item[1].timestamp, item[0])))
        if self._is_newest:
            every.reverse()
        size_bytes, count = 0, 0
        for _, record in every[: self._wanted]:
            size_bytes += record_bytes(record)
            if count and size_bytes > ANSWER_BYTES_MAX:
                break
            count += 1
        return every[:count][::-1] if self._is_newest else every[:count]


def _cut_first(one: PartitionRecords, count: int) -> PartitionRecords:
    """Return the first of what was read: who reads on begins with the others."""
    if count == len(one.records):
        return one
    next_offset = one.records[count].offset
    shown = msgspec.structs.replace(one.range, next_offset=next_offset)
    return PartitionRecords(shown, one.records[:count], next_offset - one.range.start)


def _cut_last(one: PartitionRecords, count: int) -> PartitionRecords:
    """Return the last of what was read, which begins with the first of them."""
    if count == len(one.records):
        return one
    records = one.records[len(one.records) - count :]
    start = records[0].offset if records else one.range.next_offset
    return PartitionRecords(msgspec.structs.replace(one.range, start=start), records, one.scanned)
