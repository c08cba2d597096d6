"""The newest batches of a log, kept in memory.

Followers that keep up and consumers that tail the log read from here and never touch the disk. It
also holds every batch that is not on disk yet, whatever the bound: those have no other home.

What a batch costs beside its bytes counts, too: otherwise a bound of 16 MiB would hold 60 of small batches.

Invariant: the batches are consecutive by index; `first_index` is that of the oldest one kept.
"""

from __future__ import annotations

from bisect import bisect_right

from quiver.model import Index, Term
from quiver.record.batch import Batch

BATCH_OVERHEAD_BYTES = 550
"""What CPython keeps for a batch beside its bytes: the objects of the batch, its header and the numbers in it."""
_COMPACT_AT = 1024
"""Evicted slots to let pile up at the list's front before it is rebuilt."""


class TailCache:
    """A window of consecutive batches that ends at the log's end."""

    def __init__(self, end_index: Index, *, bytes_max: int) -> None:
        self._batches: list[Batch | None] = []
        self._end_offsets: list[int] = []
        self._evicted = 0
        self._base_index = int(end_index)
        self._bytes_max = bytes_max
        self.size_bytes = 0
        """What the batches kept cost in memory."""

    @property
    def first_index(self) -> Index:
        """Return the index of the oldest batch kept, or the end index when there is none."""
        return Index(self._base_index + self._evicted)

    @property
    def end_index(self) -> Index:
        """Return the index behind the newest batch."""
        return Index(self._base_index + len(self._batches))

    def add(self, batch: Batch) -> None:
        """Append the next batch."""
        self._batches.append(batch)
        self._end_offsets.append(batch.header.end_offset)
        self.size_bytes += len(batch.data) + BATCH_OVERHEAD_BYTES

    def get(self, index: int) -> Batch:
        """Return the batch of an index in the window."""
        batch = self._batches[index - self._base_index]
        assert batch is not None, "an evicted batch lies before first_index"
        return batch

    def term_at(self, index: int) -> Term:
        """Return the term of an index in the window."""
        return Term(self.get(index).header.term)

    def index_of_offset(self, offset: int) -> Index | None:
        """Return the index of the data batch that holds `offset`; None if it is before the window or at the end."""
        at = bisect_right(self._end_offsets, offset, lo=self._evicted)
        if at == len(self._batches):
            return None
        if at == self._evicted and self.get(self._base_index + at).header.base_offset > offset:
            return None
        return Index(self._base_index + at)

    def evict(self, durable_end_index: Index) -> None:
        """Drop the oldest batches over the byte bound, but none at or behind `durable_end_index`."""
        while self.size_bytes > self._bytes_max and self.first_index < min(durable_end_index, self.end_index):
            self._drop_oldest()
        self._compact()

    def forget(self, first_index: Index) -> None:
        """Drop the batches below `first_index`: the log starts there now."""
        while self.first_index < min(first_index, self.end_index):
            self._drop_oldest()
        self._compact()

    def _drop_oldest(self) -> None:
        oldest = self._batches[self._evicted]
        assert oldest is not None, "batches are dropped from old to new"
        self.size_bytes -= len(oldest.data) + BATCH_OVERHEAD_BYTES
        self._batches[self._evicted] = None
        self._evicted += 1

    def _compact(self) -> None:
        if self._evicted >= _COMPACT_AT and self._evicted * 2 >= len(self._batches):
            del self._batches[: self._evicted]
            del self._end_offsets[: self._evicted]
            self._base_index += self._evicted
            self._evicted = 0

    def truncate(self, end_index: int) -> None:
        """Drop the batches at or behind `end_index`; the window then ends there."""
        keep = max(end_index - self._base_index, 0)
        for batch in self._batches[keep:]:
            if batch is not None:  # not `if batch`: a control batch has no records, and so a length of 0
                self.size_bytes -= len(batch.data) + BATCH_OVERHEAD_BYTES
        del self._batches[keep:]
        del self._end_offsets[keep:]
        if self.first_index >= end_index:
            self._batches.clear()
            self._end_offsets.clear()
            self._base_index, self._evicted = end_index, 0
