"""Encodes and decodes a partition's state in small steps, so that a large state never holds the event loop. Pure.

A document is one msgpack array: the items of its head, the `StateSnapshot`, and two more that readers of the array
ignore: an *index* of the slices of rows in it, and a tail of fixed size by which the index is found. A reader decodes
slice by slice with the index, and a document without one, of an earlier program, as a whole.

Encoding freezes nothing by itself: `FrozenContents` holds copies that nobody changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import msgspec

from quiver.errors import DecodeError
from quiver.model import ConsumerId, Index, Offset, ProducerId
from quiver.partition.entries import ProducerSnapshot, StateSnapshot, TrimPoint
from quiver.partition.queue_operations import QueuePart
from quiver.partition.queue_window import FrozenWindow, QueueWindow, add_part, count_parts, frozen_parts
from quiver.replication import SLICE_ROWS, array_header, encode_rows, encode_sorted

_CONTENTS_ITEMS = len(StateSnapshot.__struct_fields__)
_MAGIC = b"QVIX"
_TAIL = struct.Struct(">2s4sI")
"""A msgpack string of eight bytes: the magic, and the size of the index item before it."""
_TAIL_TYPE = b"\xc4\x08"


class FrozenContents(msgspec.Struct, frozen=True):
    """A partition's state at one moment."""

    head: tuple[Offset, Index, int, int]
    """First offset, trimmed index, record bytes, newest time: the first fields of `StateSnapshot`."""
    producers: Sequence[ProducerSnapshot]
    cursors: dict[ConsumerId, Offset]
    trim_points: Sequence[TrimPoint]
    metadata_index: Index
    sessions: dict[ConsumerId, int]
    queues: dict[ConsumerId, FrozenWindow]


class DecodedState(msgspec.Struct):
    """A decoded document."""

    items: Sequence[Any] = ()
    """The items before the contents."""
    head: tuple[Offset, Index, int, int] = (Offset(0), Index(0), 0, 0)
    producers: dict[ProducerId, ProducerSnapshot] = {}
    cursors: dict[ConsumerId, Offset] = {}
    trim_points: list[TrimPoint] = []
    metadata_index: Index = Index(0)
    sessions: dict[ConsumerId, int] = {}
    queues: dict[ConsumerId, QueueWindow] = {}

    def take(self, contents: StateSnapshot) -> None:
        """Take over contents that were decoded as a whole."""
        self.head = (contents.first_offset, contents.trimmed_index, contents.record_bytes, contents.newest_ms)
        self.producers = {row.producer_id: row for row in contents.producers}
        self.cursors = dict(contents.cursors)
        self.trim_points = list(contents.trim_points)
        self.metadata_index = contents.metadata_index
        self.sessions = dict(contents.sessions)
        for part in contents.queues:
            add_part(self.queues, part)


DecodeWhole = Callable[[bytes], tuple[Sequence[Any], StateSnapshot]]
"""Decodes a document without an index into the items before the contents, and the contents."""


class _TableIndex(msgspec.Struct, array_like=True):
    """Where the rows of one table are: the position of the first, their number, and the sizes of their slices."""

    first: int
    count: int
    slices: list[int] = []

    @property
    def header(self) -> int:
        """Return the position of the table's array."""
        return self.first - len(array_header(self.count))

    @property
    def end(self) -> int:
        """Return the position after the last row."""
        return self.first + sum(self.slices)


class _SliceIndex(msgspec.Struct, frozen=True, array_like=True):
    """Where the rows of a document are, by byte positions."""

    contents: int
    rows: int
    """Rows in every slice but the last; a slice of queues has one."""
    producers: _TableIndex
    cursors: _TableIndex
    sessions: _TableIndex
    queues: _TableIndex | None = None
    """None in documents of programs that know no work queues."""


_encode = msgspec.msgpack.Encoder().encode
_index_decoder = msgspec.msgpack.Decoder(_SliceIndex)
_head_decoder = msgspec.msgpack.Decoder(tuple[Offset, Index, int, int])
_producers_decoder = msgspec.msgpack.Decoder(list[ProducerSnapshot])
_pairs_decoder = msgspec.msgpack.Decoder(list[tuple[ConsumerId, Offset]])
"""For cursors, and for sessions, whose values are plain numbers as well."""
_parts_decoder = msgspec.msgpack.Decoder(list[QueuePart])
_middle_decoder = msgspec.msgpack.Decoder(tuple[list[TrimPoint], Index])


def encode_steps(items: Sequence[object], contents: FrozenContents) -> Iterator[bytes]:
    """Yield a document in parts, each made in one step; equal contents give equal bytes."""
    begin = array_header(len(items) + 3) + b"".join(map(_encode, items))
    opening = begin + array_header(_CONTENTS_ITEMS) + b"".join(map(_encode, contents.head))
    cursors, sessions = contents.cursors, contents.sessions
    producers_at = yield from _encode_table(opening, 0, len(contents.producers), encode_rows(contents.producers))
    rows = encode_sorted(cursors, lambda key: (key, cursors[key]))
    cursors_at = yield from _encode_table(b"", producers_at.end, len(cursors), rows)
    middle = _encode(contents.trim_points) + _encode(contents.metadata_index)
    rows = encode_sorted(sessions, lambda key: (key, sessions[key]))
    sessions_at = yield from _encode_table(middle, cursors_at.end, len(sessions), rows)
    rows = map(_encode, frozen_parts(contents.queues))
    queues_at = yield from _encode_table(b"", sessions_at.end, count_parts(contents.queues), rows)
    index = _encode(_SliceIndex(len(begin), SLICE_ROWS, producers_at, cursors_at, sessions_at, queues_at))
    yield index + _TAIL.pack(_TAIL_TYPE, _MAGIC, len(index))


def _encode_table(
    before: bytes, position: int, count: int, parts: Iterator[bytes]
) -> Generator[bytes, None, _TableIndex]:
    """Yield what comes before a table at a position, and the table; return where its rows are."""
    opening = before + array_header(count)
    yield opening
    found = _TableIndex(position + len(opening), count)
    for part in parts:
        if part:  # else a step of sorting
            found.slices.append(len(part))
        yield part
    return found


def decode_steps(data: bytes, found: DecodedState, decode_whole: DecodeWhole) -> Iterator[None]:
    """Fill `found` from a document, step by step; one without an index is decoded by `decode_whole`, in one step.

    Raises:
        DecodeError: the document is malformed.
    """
    try:
        index = _find_index(data)
        if index is None:
            found.items, contents = decode_whole(data)
            found.take(contents)
            yield
            return
        found.items = msgspec.msgpack.decode(array_header((data[0] & 0x0F) - 3) + data[1 : index.contents])
        found.head = _head_decoder.decode(array_header(4) + data[index.contents + 1 : index.producers.header])
        for rows in _slices(data, index.producers, index.rows):
            found.producers.update([(row.producer_id, row) for row in _producers_decoder.decode(rows)])
            yield
        for table, pairs in ((index.cursors, found.cursors), (index.sessions, found.sessions)):
            for rows in _slices(data, table, index.rows):
                pairs.update(_pairs_decoder.decode(rows))
                yield
        for rows in _slices(data, index.queues, 1) if index.queues is not None else ():
            for part in _parts_decoder.decode(rows):
                add_part(found.queues, part)
            yield
        middle = data[index.cursors.end : index.sessions.header]
        found.trim_points, found.metadata_index = _middle_decoder.decode(array_header(2) + middle)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"malformed partition state: {error}") from None


def _find_index(data: bytes) -> _SliceIndex | None:
    if len(data) < _TAIL.size:
        return None
    kind, magic, size = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if (kind, magic) != (_TAIL_TYPE, _MAGIC):
        return None
    end = len(data) - _TAIL.size
    try:
        return _index_decoder.decode(data[end - size : end])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None  # bytes of an earlier program that happen to end like a tail


def _slices(data: bytes, table: _TableIndex, rows: int) -> Iterator[bytes]:
    """Yield the slices of a table, each as an array of its own."""
    first, count = table.first, table.count
    for size in table.slices:
        yield array_header(min(rows, count)) + data[first : first + size]
        first, count = first + size, count - rows
