"""Where consumed records go: lines for people and programs, or Arrow and Parquet for tables.

A sink polls a consumer and writes the records. When `write_next` returns, the records are handed to the operating
system, unless the format is complete only after `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from io import IOBase
from typing import Any, BinaryIO, Final, Literal, Protocol, cast

import click
import msgspec

import quiver
from quiver.cli.output import describe_record, format_time, printable
from quiver.client.consumer import require_arrow
from quiver.record.records import Record

Format = Literal["text", "json", "arrow", "parquet"]

POLL_RECORDS: Final = 10_000
"""Most records of one poll that become lines."""
TABLE_BYTES: Final = 64 << 20
"""Approximate size of one table, which becomes record batches or a row group."""
TABLE_RECORDS_FIRST: Final = 1_000
"""Records of the first table, before their size is known."""
TABLE_RECORDS_MAX: Final = 1_000_000


class Sink(Protocol):
    """Polls records from a consumer and writes them."""

    is_whole_when_closed: bool
    """Whether the output can be read only after `close`."""

    def write_next(self, consumer: quiver.Consumer, records_max: int, timeout_s: float) -> int:
        """Write the next records; wait for the first one at most this long. Return how many were written."""

    def close(self) -> None:
        """Write the end of the format; the stream stays open."""


class LineSink:
    """Writes a line for each record."""

    is_whole_when_closed = False

    def __init__(self, stream: BinaryIO, render: Callable[[Record], bytes]) -> None:
        self._stream = stream
        self._render = render

    def write_next(self, consumer: quiver.Consumer, records_max: int, timeout_s: float) -> int:
        """Write the next records as lines."""
        records = consumer.poll(min(records_max, POLL_RECORDS), timeout_s)
        self._stream.write(b"".join(map(self._render, records)))
        self._stream.flush()
        return len(records)

    def close(self) -> None:
        """Do nothing: every line is written."""


class TableSink:
    """Writes tables with one of pyarrow's writers."""

    is_whole_when_closed = True

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._records_max = TABLE_RECORDS_FIRST

    def write_next(self, consumer: quiver.Consumer, records_max: int, timeout_s: float) -> int:
        """Write the next records as one table."""
        table = consumer.fetch_arrow(min(records_max, self._records_max), timeout_s, with_headers=True)
        if table.num_rows:
            self._writer.write_table(table)
            self._records_max = max(1, min(TABLE_RECORDS_MAX, TABLE_BYTES * table.num_rows // max(1, table.nbytes)))
        return table.num_rows

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


def open_sink(format_: Format, stream: BinaryIO, *, is_terminal: bool, is_file: bool) -> Sink:
    """Return the sink of a format.

    Raises:
        RequestError: the format needs pyarrow, which is not installed.
    """
    match format_:
        case "text":
            return LineSink(stream, printable_line if is_terminal else raw_line)
        case "json":
            return LineSink(stream, json_line)
        case "arrow":
            require_arrow()
            import pyarrow as pa

            from quiver.client.tables import TABLE_SCHEMA

            # Tools expect Arrow's file format in a file and seek in it; a pipe gets the stream format.
            opened = pa.PythonFile(cast("IOBase", stream), mode="w")
            return TableSink((pa.ipc.new_file if is_file else pa.ipc.new_stream)(opened, TABLE_SCHEMA))
        case "parquet":
            require_arrow()
            import pyarrow.parquet as pq

            from quiver.client.tables import TABLE_SCHEMA

            return TableSink(pq.ParquetWriter(stream, TABLE_SCHEMA, compression="zstd"))


def raw_line(record: Record) -> bytes:
    """Return a value unchanged, for pipes and files."""
    return (record.value or b"") + b"\n"


def printable_line(record: Record) -> bytes:
    """Return a value with control characters escaped, for terminals."""
    return printable(record.value).encode() + b"\n"


def json_line(record: Record) -> bytes:
    """Return a record as a JSON object."""
    return msgspec.json.encode(describe_record(record)) + b"\n"


def pretty_line(record: Record) -> bytes:
    """Return a record with its time, partition, offset and key, without colours."""
    place = f"{format_time(record.timestamp)}  {record.partition}:{record.offset}"
    key = "" if record.key is None else f"  {printable(record.key)}"
    return f"{place}{key}  {printable(record.value)}\n".encode()


def coloured_line(record: Record) -> bytes:
    """Return the same line with everything but the value dimmed or coloured."""
    place = click.style(f"{format_time(record.timestamp)}  {record.partition}:{record.offset}", dim=True)
    key = "" if record.key is None else "  " + click.style(printable(record.key), fg="cyan")
    return f"{place}{key}  {printable(record.value)}\n".encode()
