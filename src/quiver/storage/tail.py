"""The newest batches of a log, kept in memory.

Followers that keep up and consumers that tail the log read from here and never touch the disk. It
also holds every batch that is not on disk yet, whatever the bound: those have no other home.

What a batch costs beside its bytes counts, too: otherwise a bound of 16 MiB would hold 60 of small batches.
Small batches come and go by the thousand, so that a run of them is added, taken and dropped at once: lengths
are kept as running sums, and where a run ends is found by bisection.

A node has many logs, and their tails share what it can spare: the one that was written longest ago is dropped first.

Invariant: the batches are consecutive by index; `first_index` is that of the oldest one kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quiver.model import Index, Term
from quiver.record.batch import Batch

BATCH_OVERHEAD_BYTES = 590
"""What CPython keeps for a batch beside its bytes: the objects of the batch, its header and the numbers in it."""
_COMPACT_AT = 1024
"""Evicted slots to let pile up at the list's front before it is rebuilt."""


class TailBudget:
    """What the tails of several logs may hold together, beside what is not on disk yet. For one event loop."""

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._sizes: dict[TailCache, int] = {}
        """The one that was written last comes last."""

    def note(self, tail: TailCache, size_bytes: int) -> None:
        """Take note of how large a tail is that was written just now, and make room for it."""
        self.drop(tail)
        self._sizes[tail] = size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max and (oldest := next(iter(self._sizes))) is not tail:
            self.drop(oldest)
            oldest.give_up()

    def drop(self, tail: TailCache) -> None:
        """Count a tail no more."""
        self.size_bytes -= self._sizes.pop(tail, 0)


class TailCache:
    """A window of consecutive batches that ends at the log's end."""

    def __init__(self, end_index: Index, *, bytes_max: int, budget: TailBudget | None = None) -> None:
        self._batches: list[Batch | None] = []
        self._end_offsets: list[int] = []
        self._end_bytes: list[int] = []
        """How many bytes were added, with each batch, since the window was empty."""
        self._evicted = 0
        self._evicted_bytes = 0
        """As `_end_bytes`, of the last batch that was dropped."""
        self._base_index = int(end_index)
        self._bytes_max = bytes_max
        self._budget = budget
        self._durable_end_index = int(end_index)
        """As of the last eviction, or of a cut before it: what comes behind a cut is not on disk yet."""

    @property
    def first_index(self) -> Index:
        """Return the index of the oldest batch kept, or the end index when there is none."""
        return Index(self._base_index + self._evicted)

    @property
    def end_index(self) -> Index:
        """Return the index behind the newest batch."""
        return Index(self._base_index + len(self._batches))

    @property
    def size_bytes(self) -> int:
        """Return what the batches kept cost in memory."""
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

    def get(self, index: int) -> Batch:
        """Return the batch of an index in the window."""
        batch = self._batches[index - self._base_index]
        assert batch is not None, "an evicted batch lies before first_index"
        return batch

    def take(self, first_index: int, *, end_index: int, bytes_max: int) -> list[Batch]:
        """Return batches of the window from `first_index` on: at most `bytes_max` bytes, but at least one."""
        first, end = first_index - self._base_index, end_index - self._base_index
        if first >= end:
            return []
        bytes_before = self._end_bytes[first - 1] if first else self._evicted_bytes
        if self._end_bytes[end - 1] - bytes_before > bytes_max:
            end = max(first + 1, bisect_right(self._end_bytes, bytes_before + bytes_max, first, end))
        return self._batches[first:end]  # type: ignore[return-value]  # none of them is evicted

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
        self._durable_end_index = durable_end_index
        if self.size_bytes > self._bytes_max:
            droppable = range(self._evicted, min(durable_end_index, self.end_index) - self._base_index)
            # Costs fall from old to new, and bisection wants them to rise.
            dropped = bisect_right(droppable, -self._bytes_max - 1, key=lambda at: -self._cost_from(at))
            self._drop_until(self._evicted + dropped)
        if self._budget is not None:
            self._budget.note(self, self.size_bytes)

    def give_up(self) -> None:
        """Drop every batch that is on disk."""
        self._drop_until(min(self._durable_end_index, self.end_index) - self._base_index)

    def close(self) -> None:
        """Count no more among those that share a budget."""
        if self._budget is not None:
            self._budget.drop(self)

    def forget(self, first_index: Index) -> None:
        """Drop the batches below `first_index`: the log starts there now."""
        self._drop_until(min(first_index, self.end_index) - self._base_index)

    def _cost_from(self, first: int) -> int:
        """Return what the batches from position `first` on cost in memory."""
        if not self._end_bytes:
            return 0
        bytes_before = self._end_bytes[first - 1] if first > self._evicted else self._evicted_bytes
        return self._end_bytes[-1] - bytes_before + BATCH_OVERHEAD_BYTES * (len(self._batches) - first)

    def _drop_until(self, first: int) -> None:
        """Let the window begin at position `first`, if that is later than now."""
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
        """Drop the batches at or behind `end_index`; the window then ends there."""
        self._durable_end_index = min(self._durable_end_index, end_index)
        keep = max(end_index - self._base_index, 0)
        if keep <= self._evicted:
            self._base_index, self._evicted, self._evicted_bytes, keep = end_index, 0, 0, 0
        del self._batches[keep:]
        del self._end_offsets[keep:]
        del self._end_bytes[keep:]
