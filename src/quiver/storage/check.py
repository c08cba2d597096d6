"""Check one segment file, frame by frame, against itself and its footer.

Every batch must follow the one before it in index, offset and term; every mark must vouch for bytes before
itself only; a sealed segment must be what its footer says. Reads the file once, in chunks.
"""

from __future__ import annotations

from quiver.model import Index
from quiver.record.header import HEADER_BYTES, BatchHeader
from quiver.storage.disk import File
from quiver.storage.frames import SEGMENT_HEADER_BYTES
from quiver.storage.inspection import Finding, SegmentInspection
from quiver.storage.scan import Frame
from quiver.storage.segment import Segment
from quiver.storage.walk import BadRange, walk


def check_segment(file: File, segment: Segment, *, end_position: int) -> tuple[SegmentInspection, list[Finding]]:
    """Read a segment's frames up to `end_position` and compare them with what `segment` says of them."""
    return _SegmentCheck(segment).run(file, end_position)


class _SegmentCheck:
    """The walk through one file, and what it has seen so far."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._seen = Segment(segment.header, segment.name)
        self._places = _indexed_places(segment)
        self._findings: list[Finding] = []
        self._hole: BadRange | None = None
        self._batches = 0
        self._records = 0
        self._marks = 0
        self._vouched_bytes = 0

    def run(self, file: File, end_position: int) -> tuple[SegmentInspection, list[Finding]]:
        for found in walk(file, SEGMENT_HEADER_BYTES, end_position, next_index=self._segment.first_index):
            if isinstance(found, BadRange):
                self._close_hole(None)
                self._hole = found
            elif found.header is None:
                self._take_mark(found)
            else:
                self._take_batch(found, found.header)
        self._close_hole(None)
        if self._segment.is_sealed and not self._findings:
            self._check_footer()
        return self._summarise(file.size()), self._findings

    def _take_mark(self, mark: Frame) -> None:
        self._marks += 1
        self._vouched_bytes = max(self._vouched_bytes, mark.durable_end)
        if mark.durable_end > mark.position:
            self._report(mark.position, mark.end, f"a mark vouches for byte {mark.durable_end}, behind itself")

    def _take_batch(self, frame: Frame, header: BatchHeader) -> None:
        was_hole = self._hole is not None
        self._close_hole(Index(header.index))
        complaint = None if was_hole else self._complaint(header)
        if complaint is not None:
            self._report(frame.position, frame.end, complaint, end_index_max=header.index)
        self._batches += 1
        self._records += header.record_count
        if self._places.get(frame.position) == (header.index, header.base_offset):
            del self._places[frame.position]
        self._seen.add(header, position=frame.position, size_bytes=frame.end - frame.position, index_interval_bytes=1)

    def _complaint(self, header: BatchHeader) -> str | None:
        """Return what is wrong with an intact batch at this place, if anything is."""
        seen = self._seen
        if header.index != seen.end_index:
            return f"entry {header.index} stands where entry {seen.end_index} should be"
        if header.base_offset != seen.end_offset:
            return f"entry {header.index} begins with offset {header.base_offset} instead of {seen.end_offset}"
        if header.term < seen.last_term:
            return f"entry {header.index} is of term {header.term}, the one before it of term {seen.last_term}"
        return None

    def _close_hole(self, resumed_index: Index | None) -> None:
        """Report the bad range before an intact batch, or before the end; only now its entries are known."""
        hole, self._hole = self._hole, None
        if hole is None:
            return
        if resumed_index is None and self._segment.is_sealed:
            resumed_index = self._segment.end_index
        if resumed_index is None:
            resumed_index = Index(self._seen.end_index + 1 + (hole.end - hole.position) // HEADER_BYTES)
        self._report(hole.position, hole.end, hole.reason, end_index_max=resumed_index)

    def _report(self, first_position: int, end_position: int, reason: str, *, end_index_max: int = 0) -> None:
        first_index = self._seen.end_index
        self._findings.append(
            Finding(
                name=self._segment.name,
                first_position=first_position,
                end_position=end_position,
                reason=reason,
                first_index=first_index,
                end_index_max=Index(max(first_index, end_index_max)),
            )
        )

    def _check_footer(self) -> None:
        segment, seen = self._segment, self._seen
        if (seen.end_index, seen.end_offset, seen.terms) != (segment.end_index, segment.end_offset, segment.terms):
            reason = f"the footer says that entries end at {segment.end_index}, and they end at {seen.end_index}"
            self._report(seen.size_bytes, segment.size_bytes, reason, end_index_max=segment.end_index)
        elif self._places:
            reason = f"the footer's index names byte {min(self._places)}, where no such batch begins"
            self._report(segment.size_bytes, segment.size_bytes, reason)

    def _summarise(self, size_bytes: int) -> SegmentInspection:
        seen = self._seen
        return SegmentInspection(
            name=seen.name,
            is_sealed=self._segment.is_sealed,
            first_index=seen.first_index,
            end_index=seen.end_index,
            first_offset=seen.first_offset,
            end_offset=seen.end_offset,
            terms=tuple(term for _, term in seen.terms),
            size_bytes=size_bytes,
            batches=self._batches,
            records=self._records,
            marks=self._marks,
            vouched_bytes=self._vouched_bytes,
            torn_bytes=0,
        )


def _indexed_places(segment: Segment) -> dict[int, tuple[int, int]]:
    """Return what a sealed segment's footer claims: position → index and offset of the batch there."""
    if not segment.is_sealed:
        return {}
    index = segment.index
    return dict(zip(index.positions, zip(index.indexes, index.offsets, strict=True), strict=True))
