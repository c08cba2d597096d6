"""The in-memory bookkeeping of one segment file.

A `Segment` holds the ranges of indexes, offsets and bytes of its file, its terms and its sparse index. It does no
I/O. Ranges are half-open, and consecutive segments of a log have no gap in index or offset.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from quiver.model import Index, Offset, Term
from quiver.storage.frames import MARK_BYTES, SEGMENT_HEADER_BYTES, Footer, SegmentHeader, SparseIndex

NO_TIMESTAMP = -(1 << 63)
"""The largest timestamp of a segment without records; smaller than every record's timestamp."""


class StampedHeader(Protocol):
    """The fields of `record.BatchHeader` that a segment reads."""

    @property
    def term(self) -> int: ...  # noqa: D102 - fields of the header, named there
    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def base_offset(self) -> int: ...  # noqa: D102
    @property
    def max_timestamp(self) -> int: ...  # noqa: D102
    @property
    def append_timestamp(self) -> int: ...  # noqa: D102
    @property
    def record_count(self) -> int: ...  # noqa: D102


class Segment:
    """The bookkeeping of one segment file."""

    __slots__ = (
        "end_index",
        "end_offset",
        "header",
        "index",
        "is_sealed",
        "last_append_ms",
        "marked_bytes",
        "max_timestamp",
        "name",
        "next_indexed_position",
        "size_bytes",
        "terms",
    )

    def __init__(self, header: SegmentHeader, name: str) -> None:
        self.header = header
        self.name = name
        self.end_index = header.first_index
        self.end_offset = header.first_offset
        self.size_bytes = SEGMENT_HEADER_BYTES
        self.marked_bytes = 0
        """Bytes of the file that the newest mark found by recovery covers."""
        self.max_timestamp = NO_TIMESTAMP
        self.last_append_ms = header.created_ms
        self.terms: list[tuple[Index, Term]] = []
        self.index = SparseIndex()
        self.next_indexed_position = 0
        self.is_sealed = False

    @property
    def first_index(self) -> Index:
        """Return the index of the segment's first entry, present or future."""
        return self.header.first_index

    @property
    def first_offset(self) -> Offset:
        """Return the offset of the segment's first record, present or future."""
        return self.header.first_offset

    @property
    def last_term(self) -> Term:
        """Return the term of the last entry, or of the entry before the segment if it is empty."""
        return self.terms[-1][1] if self.terms else self.header.previous_term

    @property
    def is_empty(self) -> bool:
        """Return whether the segment holds no batch."""
        return self.end_index == self.header.first_index

    @property
    def is_covered(self) -> bool:
        """Return whether recovery found a mark at the end, by which all before it was synced, the file's name too."""
        return self.marked_bytes + MARK_BYTES == self.size_bytes

    def add(self, batch: StampedHeader, *, position: int, size_bytes: int, index_interval_bytes: int) -> None:
        """Add a batch of `size_bytes` that is, or is about to be, written at `position`."""
        index, term, record_count = batch.index, batch.term, batch.record_count
        if position >= self.next_indexed_position:
            self.index.add(
                position=position,
                index=Index(index),
                offset=Offset(batch.base_offset),
                timestamp_before=self.max_timestamp,
            )
            self.next_indexed_position = position + index_interval_bytes
        if not self.terms or term != self.terms[-1][1]:
            self.terms.append((Index(index), Term(term)))
        self.end_index = Index(index + 1)
        self.end_offset = Offset(batch.base_offset + record_count)
        if record_count and batch.max_timestamp > self.max_timestamp:
            self.max_timestamp = batch.max_timestamp
        self.last_append_ms = batch.append_timestamp
        self.size_bytes = position + size_bytes

    def seal(self) -> Footer:
        """Close the segment to appends and return its footer, to be written at `size_bytes`."""
        self.is_sealed = True
        return Footer(
            header=self.header,
            data_end=self.size_bytes,
            end_index=self.end_index,
            end_offset=self.end_offset,
            max_timestamp=self.max_timestamp,
            last_append_ms=self.last_append_ms,
            terms=tuple(self.terms),
            index=self.index,
        )

    @classmethod
    def from_footer(cls, name: str, footer: Footer) -> Segment:
        """Rebuild a sealed segment's bookkeeping from its file's footer."""
        segment = cls(footer.header, name)
        segment.end_index = footer.end_index
        segment.end_offset = footer.end_offset
        segment.size_bytes = footer.data_end
        segment.max_timestamp = footer.max_timestamp
        segment.last_append_ms = footer.last_append_ms
        segment.terms = list(footer.terms)
        segment.index = footer.index
        segment.is_sealed = True
        return segment

    def rewound(self, index: int) -> Segment:
        """Return a copy that ends at an indexed position at or before the entry `index`."""
        copy = Segment(self.header, self.name)
        entry = bisect_right(self.index.indexes, index) - 1
        if entry < 0:
            return copy
        copy.end_index = Index(self.index.indexes[entry])
        copy.end_offset = Offset(self.index.offsets[entry])
        copy.max_timestamp = self.index.timestamps[entry]
        copy.size_bytes = self.index.positions[entry]
        copy.terms = [(first_index, term) for first_index, term in self.terms if first_index < copy.end_index]
        copy.index = self.index.copy(entry)
        return copy

    def term_at(self, index: int) -> Term:
        """Return the term of an entry of this segment, or of the entry just before it."""
        at = bisect_right(self.terms, index, key=_first_index_of)
        return self.terms[at - 1][1] if at else self.header.previous_term

    def position_before_index(self, index: int) -> int:
        """Return an indexed position at or before the entry `index`."""
        return self._position(bisect_right(self.index.indexes, index) - 1)

    def position_before_offset(self, offset: int) -> int:
        """Return an indexed position at or before the batch that holds `offset`."""
        # Of several batches with one base offset only the last holds records; the others are control batches.
        return self._position(bisect_right(self.index.offsets, offset) - 1)

    def position_before_timestamp(self, timestamp: int) -> int:
        """Return an indexed position at or before the first batch with a timestamp ≥ `timestamp`."""
        return self._position(bisect_left(self.index.timestamps, timestamp) - 1)

    def _position(self, entry: int) -> int:
        return self.index.positions[entry] if entry >= 0 else SEGMENT_HEADER_BYTES


def segment_name(first_index: int) -> str:
    """Return the file name of the segment whose first entry has this index."""
    return f"{first_index:020d}.log"


def is_segment_name(name: str) -> bool:
    """Return whether a file name is that of a segment."""
    return len(name) == 24 and name.endswith(".log") and name[:20].isdigit()


def _first_index_of(boundary: tuple[Index, Term]) -> Index:
    return boundary[0]
