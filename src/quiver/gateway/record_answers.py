"""Answers with records as JSON: made at once if they are small, else in pieces, as the client reads them.

JSON can be six times as large as the records in it, so a large answer never exists as a whole: in memory are its
records, which its `AnswerRoom` counts, and one piece. The pieces together are the bytes that encoding the whole answer
would give.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from quiver.gateway.codec import RecordFields, record_fields
from quiver.gateway.http import HttpResponse
from quiver.record import Record
from quiver.record.decoded import record_bytes
from quiver.wire.answer_room import AnswerRoom

SMALL_BYTES = 64 * 1024
"""Bytes of the records of an answer that is made at once, and counts nowhere until its client does not read it."""
PIECE_BYTES = 48 * 1024
"""Bytes of a record that become JSON at once, about; a multiple of three, so that pieces of base64 fit together."""

_encode = msgspec.json.Encoder().encode
_MARK = b"\0"
"""Where a part is put into encoded JSON, which never has this byte."""
_RAW_MARK: Any = msgspec.Raw(_MARK)


class Item(NamedTuple):
    """A record, and what makes its struct in an answer out of the fields that `record_fields` names."""

    make: Callable[..., Any]
    record: Record


def respond_with_one(item: Item, room: AnswerRoom, size_bytes: int) -> HttpResponse:
    """Return an answer that is one record."""
    return stream_response(_item_pieces(item), room, size_bytes)


def respond_with_list(
    make: Callable[[Any], msgspec.Struct], items: Sequence[Item], room: AnswerRoom, size_bytes: int
) -> HttpResponse:
    """Return an answer that `make` makes of a list of records."""
    return stream_response(_fill_in(make(_RAW_MARK), [_list_pieces(items)]), room, size_bytes)


def stream_response(pieces: Iterable[bytes], room: AnswerRoom, size_bytes: int, **about: Any) -> HttpResponse:
    """Return a response whose body is made while it is sent, from records that take `size_bytes` of `room`."""
    return HttpResponse(status=200, stream=_send(pieces), room=room, stream_bytes=size_bytes, **about)


def line_pieces(items: Iterable[Item]) -> Iterator[bytes]:
    """Yield records as lines of JSON."""
    for item in items:
        yield from _item_pieces(item)
        yield b"\n"


async def _send(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces of some size, each in a turn of the event loop of its own."""
    gathered: list[bytes] = []
    size_bytes = 0
    for piece in pieces:
        gathered.append(piece)
        size_bytes += len(piece)
        if size_bytes >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size_bytes = [], 0
            await asyncio.sleep(0)
    yield b"".join(gathered)


# -- parts of JSON -----------------------------------------------------------------------------------


def _fill_in(struct: msgspec.Struct, parts: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a struct as JSON with parts in the places of its marks."""
    first, *others = _encode(struct).split(_MARK)
    yield first
    for part, literal in zip(parts, others, strict=True):
        yield from part
        yield literal


def _list_pieces(items: Sequence[Item]) -> Iterator[bytes]:
    yield b"["
    for number, item in enumerate(items):
        if number:
            yield b","
        yield from _item_pieces(item)
    yield b"]"


def _item_pieces(item: Item) -> Iterator[bytes]:
    if record_bytes(item.record) <= SMALL_BYTES:
        return iter((_encode(item.make(**record_fields(item.record))),))
    fields, parts = _split_record(item.record)
    return _fill_in(item.make(**fields), parts)


def _split_record(record: Record) -> tuple[RecordFields, list[Iterable[bytes]]]:
    """Return a record's fields with marks for what may be large, and the parts for these, in the order of structs."""
    fields: RecordFields = {"offset": record.offset, "timestamp": record.timestamp}
    parts: list[Iterable[bytes]] = []
    if record.value is None:
        fields["message"] = None
    else:
        fields["message" if (as_text := is_text(record.value)) else "message_b64"] = _RAW_MARK
        parts.append(_string_pieces(record.value, as_text=as_text))
    if record.key is not None:
        fields["key" if (as_text := is_text(record.key)) else "key_b64"] = _RAW_MARK
        parts.append(_string_pieces(record.key, as_text=as_text))
    headers = dict(record.headers)
    encoded = {name for name, value in headers.items() if value is not None and not is_text(value)}
    if len(encoded) < len(headers):
        fields["headers"] = _RAW_MARK
        shown = {name: value for name, value in headers.items() if name not in encoded}
        parts.append(_header_pieces(shown, as_text=True))
    if encoded:
        fields["headers_b64"] = _RAW_MARK
        parts.append(_header_pieces({name: headers[name] for name in headers if name in encoded}, as_text=False))
    return fields, parts


def _header_pieces(headers: Mapping[str, bytes | None], *, as_text: bool) -> Iterator[bytes]:
    separator = b"{"
    for name, value in headers.items():
        yield separator
        separator = b","
        yield from _string_pieces(name.encode(), as_text=True)
        yield b":"
        yield from (b"null",) if value is None else _string_pieces(value, as_text=as_text)
    yield b"}"


def _string_pieces(value: bytes, *, as_text: bool) -> Iterator[bytes]:
    """Yield bytes as a string of JSON: UTF-8 as text, or anything in base64."""
    quote = (b'"',)
    if not as_text:
        return chain(quote, map(base64.b64encode, _cut(value)), quote)
    decoder = codecs.getincrementaldecoder("utf-8")()
    return chain(quote, (_encode(decoder.decode(piece))[1:-1] for piece in _cut(value)), quote)


def is_text(value: bytes) -> bool:
    """Return whether bytes are UTF-8, without making a text of all of them."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in _cut(value):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _cut(value: bytes) -> Iterator[memoryview]:
    view = memoryview(value)
    return (view[first : first + PIECE_BYTES] for first in range(0, len(view), PIECE_BYTES))
