"""Caches of decoded batches, and the one bound on all decoded batches of a node.

`DecodedBatchCache` serves readers that get a few records of a batch at a time: without it, a batch of a thousand
records would be verified and decoded a thousand times. Committed batches never change, so an entry is never stale. The
least recently used batch is evicted first.

`DecodedBatchBudget` bounds the memory of all caches of a node together with the batches that requests are using. A
request reserves what it may decode before it does anything: cached batches make room, and if those in use alone reach
the bound, the request is refused. A batch counts with its stored bytes, its decompressed payload and its columns.

`DecodedAllowance` bounds what one call decodes. A batch of 2 kB may have a payload of 64 MiB: a bound on stored bytes
is none on memory.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from quiver.errors import OverloadedError
from quiver.model import Offset
from quiver.record.batch import Batch, Record
from quiver.record.compression import Compression
from quiver.record.header import HEADER_BYTES, decode_header

K = TypeVar("K", bound=Hashable)

UNCACHED_RECORDS_MAX = 1
"""`decode_batches_cached` does not cache batches with this many records or fewer: they are hardly ever read twice."""
COLUMN_BYTES_PER_RECORD = 16
"""Memory of the decoded columns beyond the payload that they are views of."""
RETRY_AFTER_MS = 100
"""Hint for a request that was refused: requests hold decoded batches for milliseconds."""


class Reservation:
    """Memory reserved for one request; leaving the block releases it."""

    __slots__ = ("_budget", "_size_bytes")

    def __init__(self, budget: DecodedBatchBudget, size_bytes: int) -> None:
        self._budget = budget
        self._size_bytes = size_bytes

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.release(self._size_bytes)
        self._size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Reserve more or less than before; raises `OverloadedError` as `reserve` does, and changes nothing then."""
        self._budget.release(self._size_bytes)
        try:
            self._budget.take(size_bytes)
        except OverloadedError:
            self._budget.reserved_bytes += self._size_bytes
            raise
        self._size_bytes = size_bytes


class DecodedBatchBudget:
    """The memory for decoded batches of one node. For one event loop."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.cached_bytes = 0
        self.reserved_bytes = 0
        """What the requests in progress may decode."""
        self.refused = 0
        """Requests refused because those in progress have reserved everything."""
        self._caches: dict[DecodedBatchCache[Any], None] = {}
        """The caches that hold batches, ordered by last addition, the newest last."""

    def reserve(self, size_bytes: int) -> Reservation:
        """Reserve memory for what a request decodes; release it by ``with``. A request alone is never refused.

        Raises:
            OverloadedError: not done; the requests in progress use all memory for decoded batches.
        """
        self.take(size_bytes)
        return Reservation(self, size_bytes)

    def take(self, size_bytes: int) -> None:
        """Count what a reservation holds; raises as `reserve` does."""
        if self.reserved_bytes and self.reserved_bytes + size_bytes > self.bytes_max:
            self.refused += 1
            raise OverloadedError(
                f"not done: requests in progress hold {self.reserved_bytes} bytes of decoded batches "
                f"(limit gateway.decoded_bytes_max, {self.bytes_max}); retry with backoff",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.reserved_bytes += size_bytes
        self._make_room()

    def release(self, size_bytes: int) -> None:
        """Release what a reservation holds."""
        self.reserved_bytes -= size_bytes

    def handle_added(self, cache: DecodedBatchCache[Any], size_bytes: int) -> None:
        """Count a batch that was added to a cache, and evict others until all fit."""
        self._caches.pop(cache, None)
        self._caches[cache] = None
        self.cached_bytes += size_bytes
        if self.cached_bytes + self.reserved_bytes > self.bytes_max:
            self._make_room()

    def handle_evicted(self, size_bytes: int) -> None:
        """Count a batch that left a cache."""
        self.cached_bytes -= size_bytes

    def drop(self, cache: DecodedBatchCache[Any]) -> None:
        """Remove a cache that has no batches."""
        self._caches.pop(cache, None)

    def _make_room(self) -> None:
        while self._caches and self.cached_bytes + self.reserved_bytes > self.bytes_max:
            next(iter(self._caches)).evict_oldest()


class DecodedBatchCache(Generic[K]):
    """Decoded batches by key, least recently used first."""

    def __init__(
        self, *, bytes_max: int, batches_max: int | None = None, budget: DecodedBatchBudget | None = None
    ) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._budget = budget or DecodedBatchBudget(bytes_max)
        self._size_bytes = 0
        self._batches: dict[K, Batch] = {}

    def items(self) -> Iterator[tuple[K, Batch]]:
        """Yield the cached batches, most recently used first."""
        return reversed(self._batches.items())

    def get(self, key: K) -> Batch | None:
        """Return a batch, if it is cached, and mark it as used."""
        batch = self._batches.pop(key, None)
        if batch is not None:
            self._batches[key] = batch
        return batch

    def add(self, key: K, batch: Batch) -> Batch:
        """Cache a verified batch, and return the cached copy, which may have been evicted already."""
        if key in self._batches:
            self._evict(key)
        # The copy owns its bytes: the original may be a slice that keeps a much larger buffer alive.
        kept = self._batches[key] = Batch(bytes(batch.data), batch.header)
        size_bytes = decoded_bytes(kept)
        self._size_bytes += size_bytes
        while len(self._batches) > 1 and self._is_over():
            self.evict_oldest()
        self._budget.handle_added(self, size_bytes)
        return kept

    def evict_oldest(self) -> None:
        """Evict the batch that was used least recently."""
        self._evict(next(iter(self._batches)))

    def clear(self) -> None:
        """Evict every batch."""
        while self._batches:
            self.evict_oldest()

    def _evict(self, key: K) -> None:
        batch = self._batches.pop(key, None)
        if batch is None:
            return
        size_bytes = decoded_bytes(batch)
        self._size_bytes -= size_bytes
        self._budget.handle_evicted(size_bytes)
        if not self._batches:
            self._budget.drop(self)

    def _is_over(self) -> bool:
        return self._size_bytes > self._bytes_max or (
            self._batches_max is not None and len(self._batches) > self._batches_max
        )


class DecodedAllowance:
    """What one call may decode of one partition.

    The first batch passes whatever its size, so that the call makes progress, unless it exceeds both limits: then it is
    `large_bytes`, and the call has to reserve that many and begin again.
    """

    __slots__ = ("_bytes_left", "_first_bytes_max", "_taken", "large_bytes")

    def __init__(self, bytes_max: int, *, first_bytes_max: int = sys.maxsize) -> None:
        self._bytes_left = bytes_max
        self._first_bytes_max = max(bytes_max, first_bytes_max)
        self.large_bytes = 0
        self._taken: set[Offset] = set()

    def take(self, batch: Batch) -> bool:
        """Count a batch before it is decoded; return False if it must be left to the next call."""
        base_offset = batch.header.base_offset
        if base_offset in self._taken:
            return True
        size_bytes = decoded_bytes(batch)
        if self._taken and size_bytes > self._bytes_left:
            return False
        if size_bytes > self._first_bytes_max:
            self.large_bytes = size_bytes
            return False
        self._taken.add(base_offset)
        self._bytes_left -= size_bytes
        return True


def decoded_bytes(batch: Batch) -> int:
    """Return the memory that a batch uses once its columns are decoded, from its header alone."""
    header = batch.header
    is_compressed = header.compression != Compression.NONE
    raw_bytes = header.raw_bytes if is_compressed else 0
    return len(batch.data) + raw_bytes + COLUMN_BYTES_PER_RECORD * header.record_count


def record_bytes(record: Record) -> int:
    """Return the bytes of a record's value, key and headers."""
    size_bytes = len(record.value or b"") + len(record.key or b"")
    if not record.headers:
        return size_bytes
    return size_bytes + sum(len(name) + len(value or b"") for name, value in record.headers)


def decode_batches_cached(
    payload: memoryview, cache: DecodedBatchCache[tuple[K, bytes]], *, partition: K
) -> Iterator[Batch]:
    """Yield the consecutive batches of a payload, and decode each only if it is not cached.

    A batch is identified by its partition and its header, which includes its offset and the checksum of its payload.

    Raises:
        DecodeError: a batch is malformed or damaged.
    """
    position = 0
    while position < len(payload):
        header = decode_header(payload, position)
        if header.record_count <= UNCACHED_RECORDS_MAX:
            yield Batch.decode(payload, position)
        else:
            key = (partition, bytes(payload[position : position + HEADER_BYTES]))
            cached = cache.get(key)
            yield cached if cached is not None else cache.add(key, Batch.decode(payload, position))
        position += header.batch_bytes
