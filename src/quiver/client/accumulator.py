"""The buffer of records that wait to be sent: the only state of a producer that several threads share.

`add` is the hot path of `send`. It appends to the open batch of a partition under a lock, and wakes the sending loop
at most once until that loop has called `drain_dirty`. Records without key and partition go to one partition until its
batch is sent or full, then to the next, so that few records make few batches.

Invariants: `pending_bytes` counts every record from its acceptance until its outcome is settled, and never exceeds
`buffer_bytes` by more than one chunk. Records of a partition keep the order in which they were accepted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from quiver.client.batching import RECORD_BYTES, RecordRows, RecordSource, StoredHeaders
from quiver.client.delivery import Delivery, Outcome, copy_error
from quiver.clock import Clock
from quiver.errors import OutOfRangeError, QuiverError
from quiver.model import PartitionId

MERGED_FACTOR: Final = 2
"""A chunk is merged into an open batch if the result is at most this many full batches large."""


class Accumulator:
    """Accept records from any thread and pass them to the sending loop in batches."""

    def __init__(
        self,
        partition_ids: Sequence[PartitionId],
        *,
        partition_count: int,
        clock: Clock,
        batch_bytes: int,
        buffer_bytes: int,
        announce: Callable[[], object],
    ) -> None:
        """Accept the partitions for records without a key; `announce` notifies the loop that there is work."""
        self.partition_count = partition_count
        """The number of partitions that the topic is known to have."""
        self.pending_bytes = 0
        self.first_error: QuiverError | None = None
        """The first failure since the last `ProducerCore.pop_error`."""
        self._partition_ids = tuple(partition_ids)
        self._clock = clock
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._announce = announce
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._room_waiters = 0
        """Threads that wait for room: without one, there is nobody to notify."""
        self._room_callbacks: list[Callable[[], object]] = []
        self._refusal: QuiverError | None = None
        self._open: list[RecordRows | None] = [None] * partition_count
        self._closed: list[deque[RecordSource]] = [deque() for _ in range(partition_count)]
        self._unsettled: dict[Outcome, None] = {}
        self._turn = 0
        self._sticky: RecordRows | None = None
        self._dirty: set[PartitionId] = set()
        self._is_announced = False

    # -- accepting records -----------------------------------------------------------------------

    def add(
        self,
        value: bytes | None,
        partition: PartitionId | None,
        key: bytes | None,
        timestamp: int | None,
        headers: StoredHeaders | None,
    ) -> Delivery | None:
        """Accept one record; None if the buffer has no room for it now. Raises the error given to `refuse`."""
        size_bytes = RECORD_BYTES + (len(value) if value is not None else 0) + (len(key) if key is not None else 0)
        with self._lock:
            if self.pending_bytes + size_bytes > self._buffer_bytes and self.pending_bytes:
                return None
            rows = self._sticky if partition is None else self._open[partition]
            if rows is None:
                rows = self._begin(partition)
            values = rows.values
            delivery = Delivery(rows.outcome, len(values))
            values.append(value)
            if rows.keys is not None or key is not None or timestamp is not None or headers is not None:
                rows.add_rest(key, timestamp, headers)
            self.pending_bytes += size_bytes
            rows.size_bytes += size_bytes
            if rows.size_bytes < self._batch_bytes:
                return delivery
            self._close(rows)
        return delivery

    def extend(
        self,
        values: Sequence[bytes | None],
        partition: PartitionId | None,
        key: bytes | None,
        *,
        size_bytes: int,
        headers: StoredHeaders | None = None,
    ) -> tuple[Outcome, int] | None:
        """Accept values into one batch; return its outcome and their first index in it, None without room."""
        with self._lock:
            if self.pending_bytes + size_bytes > self._buffer_bytes and self.pending_bytes:
                return None
            rows = self._sticky if partition is None else self._open[partition]
            if rows is not None and rows.size_bytes + size_bytes > MERGED_FACTOR * self._batch_bytes:
                self._close(rows)
                rows = None
            if rows is None:
                rows = self._begin(partition)
            index = len(rows)
            rows.extend(values, key, headers, size_bytes)
            self.pending_bytes += size_bytes
            if rows.size_bytes >= self._batch_bytes:
                self._close(rows)
            return rows.outcome, index

    def put(
        self, build: Callable[[PartitionId], RecordSource], partition: PartitionId | None, size_bytes: int
    ) -> Outcome | None:
        """Accept a whole batch that `build` creates for its partition; None without room."""
        with self._lock:
            if self.pending_bytes + size_bytes > self._buffer_bytes and self.pending_bytes:
                return None
            self._check_open()
            partition_id = self._next_turn() if partition is None else partition
            if (rows := self._open[partition_id]) is not None:
                self._close(rows)
            source = build(partition_id)
            self.pending_bytes += source.size_bytes
            self._unsettled[source.outcome] = None
            self._closed[partition_id].append(source)
            self._mark(partition_id)
            return source.outcome

    def check_partition(self, partition: PartitionId) -> None:
        """Raise `OutOfRangeError` if the topic has no such partition."""
        if not 0 <= partition < len(self._open):
            raise OutOfRangeError(
                f"not sent: unknown partition {partition}; the topic has {len(self._open)}",
                code="unknown_partition",
            )

    def wait_room(self, size_bytes: int, timeout_s: float | None) -> bool:
        """Block until there is room for `size_bytes`, or records are refused; False after `timeout_s`."""
        with self._room:
            self._room_waiters += 1
            try:
                return self._room.wait_for(lambda: self._has_room(size_bytes), timeout_s)
            finally:
                self._room_waiters -= 1

    def on_room(self, size_bytes: int, callback: Callable[[], object]) -> bool:
        """Return whether there is room; if not, call back once when some becomes free."""
        with self._lock:
            if self._has_room(size_bytes):
                return True
            self._room_callbacks.append(callback)
            return False

    def close_open(self) -> list[Outcome]:
        """Close all open batches, full or not; return the outcomes that are not settled yet."""
        with self._lock:
            for rows in [rows for rows in self._open if rows is not None]:
                self._close(rows)
            return list(self._unsettled)

    # -- the sending loop ------------------------------------------------------------------------

    def drain_dirty(self) -> set[PartitionId]:
        """Return the partitions with new records since the last call; later records are announced again."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            self._is_announced = False
            return dirty

    def pop_batch(self, partition: PartitionId, *, open_before_ms: int | None) -> RecordSource | None:
        """Return the next batch: a closed one, or the open one if it was opened no later than `open_before_ms`."""
        with self._lock:
            if self._closed[partition]:
                return self._closed[partition].popleft()
            rows = self._open[partition]
            if rows is None or open_before_ms is None or rows.opened_ms > open_before_ms:
                return None
            self._detach(rows)
            return rows

    def opened_ms(self, partition: PartitionId) -> int | None:
        """Return when a partition's open batch was opened; None without one."""
        rows = self._open[partition]
        return None if rows is None else rows.opened_ms

    def waiting_records(self, partition: PartitionId) -> int:
        """Return the number of a partition's records that wait in the buffer."""
        with self._lock:
            rows = self._open[partition]
            return sum(map(len, self._closed[partition])) + (0 if rows is None else len(rows))

    def settle(self, outcome: Outcome, size_bytes: int) -> None:
        """Free the room of a batch whose outcome is settled."""
        with self._lock:
            if self._unsettled.pop(outcome, self) is self:
                return
            self.pending_bytes -= size_bytes
            if outcome.error is not None and self.first_error is None:
                self.first_error = outcome.error
            if self._room_waiters:
                self._room.notify_all()
            callbacks, self._room_callbacks = self._room_callbacks, []
        for callback in callbacks:
            callback()

    def grow(self, partition_count: int, *, is_for_all: bool = True) -> None:
        """Add partitions up to `partition_count`; with `is_for_all` records without a key may go to them."""
        with self._lock:
            for partition in range(len(self._open), partition_count):
                self._open.append(None)
                self._closed.append(deque())
                if is_for_all:
                    self._partition_ids += (PartitionId(partition),)
            self.partition_count = len(self._open)

    def refuse(self, error: QuiverError) -> list[RecordSource]:
        """Refuse all further records with `error`; return the batches that were not sent yet."""
        with self._room:
            self._refusal = self._refusal or error
            for rows in [rows for rows in self._open if rows is not None]:
                self._close(rows)
            left = [source for closed in self._closed for source in closed]
            for closed in self._closed:
                closed.clear()
            self._room.notify_all()
            callbacks, self._room_callbacks = self._room_callbacks, []
        for callback in callbacks:
            callback()
        return left

    # -- internals, under the lock ---------------------------------------------------------------

    def _has_room(self, size_bytes: int) -> bool:
        return (
            self.pending_bytes + size_bytes <= self._buffer_bytes or not self.pending_bytes or self._refusal is not None
        )

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise copy_error(self._refusal)

    def _next_turn(self) -> PartitionId:
        self._turn = (self._turn + 1) % len(self._partition_ids)
        return self._partition_ids[self._turn]

    def _begin(self, partition: PartitionId | None) -> RecordRows:
        """Open a batch for a partition, or for the one whose turn it is."""
        self._check_open()
        partition_id = self._next_turn() if partition is None else partition
        rows = self._open[partition_id]
        if rows is None:
            rows = RecordRows(partition_id, opened_ms=self._clock.monotonic_ms(), timestamp=self._clock.wall_ms())
            self._open[partition_id] = rows
            self._unsettled[rows.outcome] = None
            self._mark(partition_id)
        if partition is None:
            self._sticky = rows
        return rows

    def _close(self, rows: RecordRows) -> None:
        self._detach(rows)
        self._closed[rows.outcome.partition].append(rows)
        self._mark(rows.outcome.partition)

    def _detach(self, rows: RecordRows) -> None:
        self._open[rows.outcome.partition] = None
        if self._sticky is rows:
            self._sticky = None

    def _mark(self, partition: PartitionId) -> None:
        self._dirty.add(partition)
        if not self._is_announced:
            self._is_announced = True
            self._announce()
