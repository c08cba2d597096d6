"""Cache the newest batches of a log in memory.

Followers that keep up and consumers that tail the log read from this cache and never touch the disk. It also holds
every batch that is not on disk yet, whatever the byte limit, because there is no other copy of it.

The size of a batch includes the memory of its Python objects. Without it, a limit of 16 MiB would allow 60 MiB of
small batches. Small batches are added, read and dropped in runs of thousands: their lengths are running sums, and
bisection finds the end of a run.

The tails of all logs of a node share one `TailBudget`; it evicts the tail with the oldest write first.

Invariant: the batches have consecutive indexes; `first_index` is the index of the oldest cached batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quiver.model import Index, Term
from quiver.record.batch import Batch

BATCH_OVERHEAD_BYTES = 590
"""Memory that CPython uses for a batch in addition to its bytes: the batch, its header and the header's numbers."""
_COMPACT_AT = 1024
"""Number of evicted slots at the front of the list that triggers its compaction."""


class TailBudget:
    """Limit the total size of the tails of several logs; batches not on disk yet are exempt. For one event loop."""

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self.hits = 0
        """Reads of records that memory answered."""
        self.misses = 0
        """Reads of records that went to the disk."""
        self._bytes_max = bytes_max
        self._sizes: dict[TailCache, int] = {}
        """Ordered by last write, the newest last."""

    def update(self, tail: TailCache, size_bytes: int) -> None:
        """Set the size of a tail that was just written, and evict other tails until the total is within the limit."""
        self.drop(tail)
        self._sizes[tail] = size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max and (oldest := next(iter(self._sizes))) is not tail:
            self.drop(oldest)
            oldest.drop_durable()

    def drop(self, tail: TailCache) -> None:
        """Remove a tail from the budget."""
        self.size_bytes -= self._sizes.pop(tail, 0)


class TailCache:
    """A window of consecutive batches that ends at the log's end."""

    def __init__(self, end_index: Index, *, bytes_max: int, budget: TailBudget | None = None) -> None:
        self._batches: list[Batch | None] = []
        self._end_offsets: list[int] = []
        self._end_bytes: list[int] = []
        """For each batch, the total bytes added since the window was empty, up to and including it."""
        self._evicted = 0
        self._evicted_bytes = 0
        """The `_end_bytes` of the last dropped batch."""
        self._base_index = int(end_index)
        self._bytes_max = bytes_max
        self._budget = budget
        self._durable_end_index = int(end_index)
        """As of the last eviction, lowered by truncations: batches appended after a truncation are not on disk yet."""

    @property
    def first_index(self) -> Index:
        """Return the index of the oldest cached batch, or the end index if there is none."""
        return Index(self._base_index + self._evicted)

    @property
    def end_index(self) -> Index:
        """Return the index after the newest batch."""
        return Index(self._base_index + len(self._batches))

    @property
    def size_bytes(self) -> int:
        """Return the memory that the cached batches use."""
        return self._cost_from(self._evicted)

    def extend(self, batches: Sequence[Batch]) -> None:
        """Append the next batches."""
        total_bytes = self._end_bytes[-1] if self._end_bytes else self._evicted_bytes
        for batch in batches:
            header = batch.header
            total_bytes += len(batch.data)
            self._end_bytes.append(total_bytes)
            self._end_offsets.append(header.base_offset + header.record_count)
        self._batches.extend(batches)

    def count_read(self, *, is_hit: bool) -> None:
        """Count a read of records in the budget."""
        if self._budget is not None:
            if is_hit:
                self._budget.hits += 1
            else:
                self._budget.misses += 1

    def get(self, index: int) -> Batch:
        """Return the batch at an index in the window."""
        batch = self._batches[index - self._base_index]
        assert batch is not None, "evicted batches are before first_index"
        return batch

    def take(self, first_index: int, *, end_index: int, bytes_max: int) -> list[Batch]:
        """Return batches of the window from `first_index` on: at most `bytes_max` bytes, but at least one batch."""
        first, end = first_index - self._base_index, end_index - self._base_index
        if first >= end:
            return []
        bytes_before = self._end_bytes[first - 1] if first else self._evicted_bytes
        if self._end_bytes[end - 1] - bytes_before > bytes_max:
            end = max(first + 1, bisect_right(self._end_bytes, bytes_before + bytes_max, first, end))
        return self._batches[first:end]  # type: ignore[return-value]  # none of them is evicted

    def term_at(self, index: int) -> Term:
        """Return the term at an index in the window."""
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
        """Drop the oldest batches beyond the byte limit, but none at or after `durable_end_index`."""
        self._durable_end_index = durable_end_index
        if self.size_bytes > self._bytes_max:
            droppable = range(self._evicted, min(durable_end_index, self.end_index) - self._base_index)
            # Costs fall from old to new; bisection needs ascending keys.
            dropped = bisect_right(droppable, -self._bytes_max - 1, key=lambda at: -self._cost_from(at))
            self._drop_until(self._evicted + dropped)
        if self._budget is not None:
            self._budget.update(self, self.size_bytes)

    def drop_durable(self) -> None:
        """Drop every batch that is on disk."""
        self._drop_until(min(self._durable_end_index, self.end_index) - self._base_index)

    def close(self) -> None:
        """Remove this tail from its budget; idempotent."""
        if self._budget is not None:
            self._budget.drop(self)

    def forget(self, first_index: Index) -> None:
        """Drop the batches below `first_index`: the log starts there now."""
        self._drop_until(min(first_index, self.end_index) - self._base_index)

    def _cost_from(self, first: int) -> int:
        """Return the memory that the batches from position `first` on use."""
        if not self._end_bytes:
            return 0
        bytes_before = self._end_bytes[first - 1] if first > self._evicted else self._evicted_bytes
        return self._end_bytes[-1] - bytes_before + BATCH_OVERHEAD_BYTES * (len(self._batches) - first)

    def _drop_until(self, first: int) -> None:
        """Move the start of the window to position `first`; do nothing if it starts there or later already."""
        if first <= self._evicted:
            return
        self._batches[self._evicted : first] = [None] * (first - self._evicted)
        self._evicted, self._evicted_bytes = first, self._end_bytes[first - 1]
        if first >= _COMPACT_AT and first * 2 >= len(self._batches):
            del self._batches[:first]
            del self._end_offsets[:first]
            del self._end_bytes[:first]
            self._base_index += first
            self._evicted = 0

    def truncate(self, end_index: int) -> None:
        """Drop the batches at or after `end_index`; the window then ends there."""
        self._durable_end_index = min(self._durable_end_index, end_index)
        keep = max(end_index - self._base_index, 0)
        if keep <= self._evicted:
            self._base_index, self._evicted, self._evicted_bytes, keep = end_index, 0, 0, 0
        del self._batches[keep:]
        del self._end_offsets[keep:]
        del self._end_bytes[keep:]
