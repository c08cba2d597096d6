"""A cache of decoded batches, for readers that get a few records of a batch at a time.

Such a reader asks for the same batch again and again; with a thousand records in it, the batch would otherwise be
verified and decoded a thousand times. Committed batches never change, so an entry is never stale. The cache is bounded
by bytes and by number of batches; the least recently used batch is evicted first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from quiver.record.batch import Batch
from quiver.record.header import HEADER_BYTES, decode_header

K = TypeVar("K", bound=Hashable)

UNCACHED_RECORDS_MAX = 1
"""`decode_batches_cached` does not cache batches with this many records or fewer: they are hardly ever read twice."""


class DecodedBatchCache(Generic[K]):
    """Decoded batches by key, least recently used first.

    `bytes_max` counts the batches as stored; their decoded columns may be several times as large.
    """

    def __init__(self, *, bytes_max: int, batches_max: int | None = None) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
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
        """Cache a verified batch, and return the cached copy."""
        replaced = self._batches.pop(key, None)
        if replaced is not None:
            self._size_bytes -= len(replaced.data)
        # The copy owns its bytes: the original may be a slice that keeps a much larger buffer alive.
        kept = self._batches[key] = Batch(bytes(batch.data), batch.header)
        self._size_bytes += len(kept.data)
        while len(self._batches) > 1 and self._is_over():
            self._size_bytes -= len(self._batches.pop(next(iter(self._batches))).data)
        return kept

    def _is_over(self) -> bool:
        return self._size_bytes > self._bytes_max or (
            self._batches_max is not None and len(self._batches) > self._batches_max
        )


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
