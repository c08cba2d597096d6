"""Encode the frames of a segment file other than batches: its header, flush marks, and the footer of a sealed one.

    segment = header · (mark | batch)* · footer?

A **mark** states that every byte of this file before `durable_end` was on disk when the mark was written. It
distinguishes damage from a torn tail after a crash: sectors of an unsynced write may reach the disk in any order, so
valid bytes *after* a hole prove nothing, but a later mark that covers the hole proves that it was once on disk. The
**footer** lets a restart load a sealed segment without reading its batches.

Pure functions over bytes, little-endian; every frame carries a CRC-32C of all its other bytes.
`docs/protocol/log.md` has the tables.
"""

from __future__ import annotations

import struct
from array import array

import msgspec

from quiver.errors import DecodeError
from quiver.model import Buffer, Index, Offset, Term
from quiver.record.checksum import crc32c

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"SEGQ"
MARK_MAGIC = b"MRKQ"
FOOTER_MAGIC = b"FTRQ"
"""The magics differ from each other and from a batch's in several bytes: one flipped byte is never another magic."""

_HEADER = struct.Struct("<4sIB3xQQqQq12x")
_MARK = struct.Struct("<4sIQ")
_FOOTER = struct.Struct("<4sQQqqqII")
_TRAILER = struct.Struct("<II4s")
_TERM = struct.Struct("<QQ")
_CHECKED = slice(8, None)
"""Header and mark: the checksum covers everything after it."""

SEGMENT_HEADER_BYTES = _HEADER.size
MARK_BYTES = _MARK.size
TRAILER_BYTES = _TRAILER.size
INDEX_ENTRY_BYTES = 4 * 8


class SegmentHeader(msgspec.Struct, frozen=True):
    """The start of a segment file: written once, before its first batch."""

    generation: int
    """Increases when the log is reset; segments of an older generation are leftovers."""
    first_index: Index
    first_offset: Offset
    previous_term: Term
    """Term of the entry before `first_index`; that entry may be removed already."""
    created_ms: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        body = _HEADER.pack(
            SEGMENT_MAGIC,
            0,
            FORMAT_VERSION,
            self.generation,
            self.first_index,
            self.first_offset,
            self.previous_term,
            self.created_ms,
        )
        return _with_checksum(body)


def decode_segment_header(data: Buffer) -> SegmentHeader:
    """Return the header at the start of a segment file.

    Raises:
        DecodeError: too short, wrong magic, checksum or version.
    """
    if len(data) < SEGMENT_HEADER_BYTES:
        raise DecodeError(f"segment header: {len(data)} bytes, needs {SEGMENT_HEADER_BYTES}")
    magic, checksum, version, *fields = _HEADER.unpack_from(data)
    if magic != SEGMENT_MAGIC or crc32c(memoryview(data)[:SEGMENT_HEADER_BYTES][_CHECKED]) != checksum:
        raise DecodeError("segment header: wrong magic or checksum")
    if version != FORMAT_VERSION:
        raise DecodeError(f"segment header: version {version} is unsupported, expected version {FORMAT_VERSION}")
    return SegmentHeader(*fields)


def encode_mark(durable_end: int) -> bytes:
    """Return a mark that covers the bytes before position `durable_end`."""
    return _with_checksum(_MARK.pack(MARK_MAGIC, 0, durable_end))


def decode_mark(data: Buffer, position: int) -> int:
    """Return the `durable_end` of the mark at `position`.

    Raises:
        DecodeError: the mark is incomplete or not intact.
    """
    if position + MARK_BYTES > len(data):
        raise DecodeError("mark: crosses the end of the file")
    magic, checksum, durable_end = _MARK.unpack_from(data, position)
    body = memoryview(data)[position : position + MARK_BYTES]
    if magic != MARK_MAGIC or crc32c(body[_CHECKED]) != checksum:
        raise DecodeError("mark: wrong magic or checksum")
    return int(durable_end)


class SparseIndex:
    """Map an index, an offset or a timestamp to a position in a segment, to within `index_interval_bytes`.

    Four parallel columns. `timestamps[i]` is the largest timestamp of all batches *before* entry i. It
    never decreases, so bisection works although record timestamps may decrease.
    """

    __slots__ = ("indexes", "offsets", "positions", "timestamps")

    def __init__(self) -> None:
        self.positions = array("q")
        self.indexes = array("q")
        self.offsets = array("q")
        self.timestamps = array("q")

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, *, position: int, index: Index, offset: Offset, timestamp_before: int) -> None:
        """Append an entry for the batch at `position`."""
        self.positions.append(position)
        self.indexes.append(index)
        self.offsets.append(offset)
        self.timestamps.append(timestamp_before)

    def copy(self, entries: int) -> SparseIndex:
        """Return a new index with the first `entries` entries of this one."""
        copy = SparseIndex()
        copy.positions = self.positions[:entries]
        copy.indexes = self.indexes[:entries]
        copy.offsets = self.offsets[:entries]
        copy.timestamps = self.timestamps[:entries]
        return copy

    def encode(self) -> bytes:
        """Return the four columns, one after the other."""
        return b"".join(column.tobytes() for column in (self.positions, self.indexes, self.offsets, self.timestamps))

    @classmethod
    def decode(cls, data: memoryview, count: int) -> SparseIndex:
        """Decode what `encode` returned; the caller has checked the checksum and the length."""
        index = cls()
        columns = (index.positions, index.indexes, index.offsets, index.timestamps)
        for number, column in enumerate(columns):
            column.frombytes(data[number * count * 8 : (number + 1) * count * 8])
        return index


class Footer(msgspec.Struct, frozen=True):
    """The bookkeeping of a sealed segment that a restart needs, with its sparse index."""

    header: SegmentHeader
    """A copy of the segment header, in case the one at the start of the file is damaged."""
    data_end: int
    """Position after the last batch or mark; the footer starts here."""
    end_index: Index
    end_offset: Offset
    max_timestamp: int
    last_append_ms: int
    terms: tuple[tuple[Index, Term], ...]
    """For each term in the segment, its first index in this segment."""
    index: SparseIndex

    def encode(self) -> bytes:
        """Return the footer's bytes: magic first, trailer last, so that its length can be read from the file's end."""
        body = b"".join(
            (
                _FOOTER.pack(
                    FOOTER_MAGIC,
                    self.data_end,
                    self.end_index,
                    self.end_offset,
                    self.max_timestamp,
                    self.last_append_ms,
                    len(self.terms),
                    len(self.index),
                ),
                self.header.encode(),
                *(_TERM.pack(*term) for term in self.terms),
                self.index.encode(),
            )
        )
        return body + _TRAILER.pack(len(body), crc32c(body), FOOTER_MAGIC)


def footer_bytes(trailer: Buffer) -> int:
    """Return the length of the footer (with its trailer) that ends with these `TRAILER_BYTES` bytes.

    Raises:
        DecodeError: these bytes are not a trailer.
    """
    if len(trailer) != TRAILER_BYTES:
        raise DecodeError("footer: the file is shorter than a trailer")
    body_bytes, _, magic = _TRAILER.unpack(trailer)
    if magic != FOOTER_MAGIC:
        raise DecodeError("footer: no trailer at the end of the file")
    return int(body_bytes) + TRAILER_BYTES


def decode_footer(data: Buffer) -> Footer:
    """Decode a footer with its trailer.

    Raises:
        DecodeError: wrong length, magic or checksum.
    """
    if len(data) < TRAILER_BYTES:
        raise DecodeError(f"footer: {len(data)} bytes are too few for a trailer")
    view = memoryview(data)
    body = view[:-TRAILER_BYTES]
    body_bytes, checksum, last_magic = _TRAILER.unpack(view[-TRAILER_BYTES:])
    if (
        last_magic != FOOTER_MAGIC
        or body_bytes != len(body)
        or len(body) < _FOOTER.size + SEGMENT_HEADER_BYTES
        or crc32c(body) != checksum
    ):
        raise DecodeError("footer: wrong length or checksum")
    magic, data_end, end_index, end_offset, max_timestamp, last_append_ms, terms, entries = _FOOTER.unpack_from(body)
    terms_start = _FOOTER.size + SEGMENT_HEADER_BYTES
    index_start = terms_start + terms * _TERM.size
    if magic != FOOTER_MAGIC or len(body) != index_start + entries * INDEX_ENTRY_BYTES:
        raise DecodeError("footer: its length does not match its counts of terms and index entries")
    return Footer(
        header=decode_segment_header(body[_FOOTER.size : terms_start]),
        data_end=data_end,
        end_index=end_index,
        end_offset=end_offset,
        max_timestamp=max_timestamp,
        last_append_ms=last_append_ms,
        terms=tuple(_TERM.iter_unpack(body[terms_start:index_start])),
        index=SparseIndex.decode(body[index_start:], entries),
    )


def _with_checksum(body: bytes) -> bytes:
    return body[:4] + crc32c(body[_CHECKED]).to_bytes(4, "little") + body[_CHECKED]
