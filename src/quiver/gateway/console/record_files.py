"""Records as files to download: JSON lines, CSV, Arrow IPC, Parquet.

A file is made in one turn of the event loop: its records are within the bounds of one answer (`record_scan`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec

from quiver.errors import RequestError
from quiver.gateway.codec import record_fields
from quiver.gateway.console import contract
from quiver.gateway.contract import MessageItem
from quiver.gateway.http import HttpResponse
from quiver.model import PartitionId
from quiver.record import Record

_encode = msgspec.json.Encoder().encode


def make_file(topic: str, file_format: str, records: Sequence[tuple[PartitionId, Record]]) -> HttpResponse:
    """Return records as a download; the caller bounds their number and bytes."""
    if file_format == "jsonl":
        items = (MessageItem(partition_id=at, **record_fields(one)) for at, one in records)
        body = b"".join(_encode(item) + b"\n" for item in items)
    elif file_format == "csv":
        body = _make_csv(records)
    else:
        body = _make_columns(topic, file_format, records)
    name = f'attachment; filename="{topic}.{file_format}"'
    return HttpResponse(
        status=200, body=body, content_type=contract.FILE_TYPES[file_format], headers=(("Content-Disposition", name),)
    )


def _make_csv(records: Sequence[tuple[PartitionId, Record]]) -> bytes:
    """Return records as CSV; values that are not text are in base64, in a column of their own.

    A cell that a spreadsheet would take for a formula begins with an apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(("partition", "offset", "timestamp", "key", "key_b64", "message", "message_b64", "headers"))
    for partition_id, record in records:
        fields = record_fields(record)
        headers = {**fields.get("headers", {}), **fields.get("headers_b64", {})}
        writer.writerow(
            (
                partition_id,
                record.offset,
                record.timestamp,
                _as_cell(fields.get("key")),
                fields.get("key_b64", ""),
                _as_cell(fields.get("message")),
                fields.get("message_b64", ""),
                _encode(headers).decode() if headers else "",
            )
        )
    return text.getvalue().encode()


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
