"""One segment: a file of batches, and what memory knows of it.

A `Segment` is bookkeeping only: the ranges of indexes, offsets and bytes that the file holds, its
terms and its sparse index. It does no input or output. Ranges are half-open and segments of a log
follow one another without a gap in index or offset.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from quiver.model import Index, Offset, Term
from quiver.storage.frames import SEGMENT_HEADER_BYTES, Footer, SegmentHeader, SparseIndex

NO_TIMESTAMP = -(1 << 63)
"""Smaller than every record's timestamp: the largest timestamp of nothing."""


class StampedHeader(Protocol):
    """What a segment needs to know of a batch: fields of `record.BatchHeader`."""

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
        """Return the index of the first entry that is or will be here."""
        return self.header.first_index

    @property
    def first_offset(self) -> Offset:
        """Return the offset of the first record that is or will be here."""
        return self.header.first_offset

    @property
    def last_term(self) -> Term:
        """Return the term of the last entry up to the end of this segment."""
        return self.terms[-1][1] if self.terms else self.header.previous_term

    @property
    def is_empty(self) -> bool:
        """Tell whether the segment holds no batch."""
        return self.end_index == self.header.first_index

    def add(self, batch: StampedHeader, *, position: int, size_bytes: int, index_interval_bytes: int) -> None:
        """Note a batch of `size_bytes` that stands, or is about to stand, at `position`."""
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
        """Close the segment to appends and return its footer, which goes to `size_bytes`."""
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
        """Return a copy as it was when it had grown to an indexed position at or before the entry `index`."""
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
        """Return the term of an entry of this segment, or of the one just before it."""
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
    """Return the file name of the segment that begins with this index."""
    return f"{first_index:020d}.log"


def is_segment_name(name: str) -> bool:
    """Tell whether a file name is a segment's."""
    return len(name) == 24 and name.endswith(".log") and name[:20].isdigit()


def _first_index_of(boundary: tuple[Index, Term]) -> Index:
    return boundary[0]
