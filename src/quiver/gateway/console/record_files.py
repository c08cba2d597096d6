"""Records as files to download: JSON lines, CSV, Arrow IPC, Parquet.

The records of a file are within the bounds of one answer (`record_scan`). Lines are made while they are sent, the other
formats as a whole: `room_bytes` says how much memory that takes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from quiver.errors import RequestError
from quiver.gateway.codec import record_fields
from quiver.gateway.console import contract
from quiver.gateway.contract import MessageItem
from quiver.gateway.http import HttpResponse
from quiver.gateway.record_answers import PIECE_BYTES, Item, line_pieces, stream_response
from quiver.model import PartitionId
from quiver.record import Record
from quiver.record.decoded import record_bytes
from quiver.wire.answer_room import AnswerRoom

ROW_FACTOR: Final = 8
"""How much larger than a record the texts of its row are together: cells, their quotes, four bytes a character."""
COLUMNS_FACTOR: Final = 4
"""The same for columns: rows, columns, the file, and its copy."""
_encode = msgspec.json.Encoder().encode


def room_bytes(file_format: str, records: Sequence[tuple[PartitionId, Record]], size_bytes: int) -> int:
    """Return the memory, at most, of a file while it is sent; the records have `size_bytes` together."""
    if file_format == "jsonl":
        return size_bytes
    if file_format == "csv":
        return size_bytes + ROW_FACTOR * max((record_bytes(one) for _, one in records), default=0)
    return COLUMNS_FACTOR * size_bytes


def make_file(
    topic: str, file_format: str, records: Sequence[tuple[PartitionId, Record]], room: AnswerRoom
) -> HttpResponse:
    """Return records as a download; the caller bounds their number and bytes, and reserves `room_bytes` for many."""
    if file_format == "jsonl":
        pieces = line_pieces(Item(partial(MessageItem, partition_id=at), one) for at, one in records)
    elif file_format == "csv":
        pieces = _csv_pieces(records)
    else:
        pieces = _cut(_make_columns(topic, file_format, records))
    name = f'attachment; filename="{topic}.{file_format}"'
    about: dict[str, Any] = {
        "content_type": contract.FILE_TYPES[file_format],
        "headers": (("Content-Disposition", name),),
    }
    if room.held_bytes:
        return stream_response(pieces, room, room.held_bytes, **about)
    return HttpResponse(status=200, body=b"".join(pieces), **about)


def _csv_pieces(records: Sequence[tuple[PartitionId, Record]]) -> Iterator[bytes]:
    """Yield records as CSV; values that are not text are in base64, in a column of their own.

    A cell that a spreadsheet would take for a formula begins with an apostrophe.
    """
    yield _csv_row("partition", "offset", "timestamp", "key", "key_b64", "message", "message_b64", "headers")
    for partition_id, record in records:
        fields = record_fields(record)
        headers = {**fields.get("headers", {}), **fields.get("headers_b64", {})}
        yield _csv_row(
            partition_id,
            record.offset,
            record.timestamp,
            _as_cell(fields.get("key")),
            fields.get("key_b64", ""),
            _as_cell(fields.get("message")),
            fields.get("message_b64", ""),
            _encode(headers).decode() if headers else "",
        )


def _csv_row(*cells: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().encode()


def _cut(body: bytes) -> Iterator[bytes]:
    return (body[first : first + PIECE_BYTES] for first in range(0, len(body), PIECE_BYTES))


def _as_cell(value: str | None) -> str:
    if value is None:
        return ""
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _make_columns(topic: str, file_format: str, records: Sequence[tuple[PartitionId, Record]]) -> bytes:
    """Return records as a stream of Arrow IPC, or as a Parquet file, with the columns of the SDK's tables."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        message = "this node cannot write Arrow and Parquet: install quivermq[arrow] there, or choose jsonl or csv"
        raise RequestError(message, code="no_arrow") from None
    from quiver.client.tables import TABLE_SCHEMA

    rows = [
        {
            "topic": topic,
            "partition": partition_id,
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": record.key,
            "value": record.value,
            "headers": [{"key": key, "value": value} for key, value in record.headers] or None,
        }
        for partition_id, record in records
    ]
    table = pa.Table.from_pylist(rows, schema=TABLE_SCHEMA)
    sink = pa.BufferOutputStream()
    if file_format == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()
