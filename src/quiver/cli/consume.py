"""`quiver consume` and `quiver tail`: write a topic's records to standard output, or to a file.

A named consumer's cursors move only past records that were written. After Ctrl-C or SIGTERM, the next run repeats
nothing and skips nothing, and a member has left its group; after a crash, or when the reader of the output has gone, it
may repeat the last second's records.

A sink polls a consumer and writes its records, as lines or as Arrow and Parquet tables. When `write_next` returns, the
operating system has the records, unless the format is complete only after `close`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from io import IOBase
from string import Formatter
from typing import Any, BinaryIO, Final, Literal, Protocol, cast

import click
import msgspec

import quiver
from quiver.cli.options import (
    START_HELP,
    TIME_HELP,
    Start,
    StartType,
    TimeType,
    connect,
    examples,
    json_lines_option,
    partitions_option,
    topic_argument,
    url_option,
)
from quiver.cli.output import describe_record, format_count, format_time, printable, terminated_in_order
from quiver.client.frames import require_arrow
from quiver.errors import FencedError, NotFoundError
from quiver.model import Offset, PartitionId
from quiver.record.batch import Record

POLL_S = 0.5
"""Longest wait for records; bounds the delay of noticing the end of a topic, and of a due commit."""
COMMIT_INTERVAL_S = 1.0
NO_PARTITION_S = 3.0
"""Time without a partition after which a member of a group stops, unless it follows."""
_LATEST = Start(offset="latest")

TEMPLATE_FIELDS: Final = ("time", "timestamp", "partition", "offset", "key", "value", "headers")
"""Fields of `--template`."""

_MAX = click.option("--max", "records_max", type=click.IntRange(min=0), metavar="N", help="Stop after N records.")


@click.command(
    short_help="Print or save records.",
    epilog=examples(
        "quiver consume logs --from 15m --follow",
        "quiver consume logs --last 20",
        "quiver consume logs --from 2h --until 1h --template '{time} {key} {value}'",
        "quiver consume logs --group report --max 1000 --json | jq .value",
        "quiver consume logs --format parquet --output logs.parquet",
    ),
)
@topic_argument
@click.option("--from", "start", type=StartType(), help=f"Start position: {START_HELP}.  [default: earliest]")
@click.option(
    "--last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start N records before the end of each partition.",
)
@click.option("--until", type=TimeType(), help=f"Stop before the first record of this time: {TIME_HELP}.")
@click.option("--follow", is_flag=True, help="Keep waiting for new records, until Ctrl-C or SIGTERM.")
@partitions_option
@_MAX
@click.option("--group", metavar="NAME", help="Share the partitions with the other members of this group.")
@click.option("--consumer", "name", metavar="NAME", help="Resume at the cursors of this name, and move them.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(("text", "json", "arrow", "parquet")),
    default="text",
    show_default=True,
    help="Values or JSON objects, one per line; or a table.",
)
@click.option("--json", "format_", flag_value="json", help="Same as --format json.")
@click.option(
    "--template",
    metavar="TEXT",
    help=f"Print each record by this template, with {{FIELD}} for: {', '.join(TEMPLATE_FIELDS)}.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False, writable=True), help="File to write, instead of standard output."
)
@url_option
def consume(
    *,
    topic: str,
    start: Start | None,
    last: int | None,
    until: datetime | None,
    follow: bool,
    partitions: tuple[int, ...],
    records_max: int | None,
    group: str | None,
    name: str | None,
    format_: Format,
    template: str | None,
    output: str | None,
    url: str,
) -> None:
    """Write the records of TOPIC, in order within each partition; stop at the end offsets of the start of the command.

    With --group or --consumer, start at the cursors of that name, unless --from is given, and move them past the
    records that were written. Members of a group get different partitions; one that has none for a while stops. Arrow
    is written as a stream to a pipe and as a file with --output; Arrow and Parquet need pyarrow.
    """
    _check_usage(format_, follow=follow, output=output)
    if group is not None and (name is not None or partitions):
        raise click.UsageError("--group goes with neither --consumer nor --partition: the group has the partitions")
    if (start is not None) + (last is not None) > 1 or (follow and until is not None):
        raise click.UsageError("give at most one of --from and --last, and of --follow and --until")
    if template is not None and format_ != "text":
        raise click.UsageError("give at most one of --template and --format")
    render = None if template is None else make_template(template)
    with terminated_in_order(), connect(url) as cluster, ExitStack() as opened:
        place = _make_placement(cluster, topic, start, last)
        member = None if group is None else _Member(place, is_line=format_ in ("text", "json"))
        if member is not None and group is not None:
            consumer = member.join(cluster, topic, group, start)
        else:
            consumer = _open_consumer(cluster, topic, name, partitions=partitions, start=start)
            if place is not None:
                for partition in consumer.partitions:
                    place(consumer, partition)
        stream = opened.enter_context(_open_output(output))  # not before: an existing file is overwritten
        opened.enter_context(consumer)  # after an error, a member leaves its group without a commit
        is_terminal = output is None and sys.stdout.isatty()
        sink: Sink
        if render is None:
            sink = open_sink(format_, stream, is_terminal=is_terminal, is_file=output is not None)
        else:
            sink = LineSink(stream, render)
        if member is not None:
            member.stream = stream
        ends = None if follow else cluster.offsets(topic, "latest").offsets
        copy = _RecordCopy(consumer, sink, stream, records_max=records_max, ends=ends)
        if until is not None:
            copy.stop_at(cluster.offsets(topic, round(until.timestamp() * 1000)).offsets)
        copy.run()
        if output is not None:
            click.echo(f"wrote {format_count(copy.count, 'record')} of {topic} to {output}", err=True)


@click.command(
    short_help="Print records as they arrive.",
    epilog=examples("quiver tail logs", "quiver tail logs --partition 0 --json"),
)
@topic_argument
@partitions_option
@_MAX
@json_lines_option
@url_option
def tail(*, topic: str, partitions: tuple[int, ...], records_max: int | None, as_json: bool, url: str) -> None:
    """Print new records of TOPIC as they arrive: time, partition and offset, key, value. Ctrl-C and SIGTERM stop it."""
    with terminated_in_order(), connect(url) as cluster, _open_output(None) as stream:
        consumer = _open_consumer(cluster, topic, None, partitions=partitions, start=_LATEST)
        if sys.stderr.isatty():
            click.echo(f"waiting for records of {topic}; Ctrl-C stops", err=True)
        render = json_line if as_json else coloured_line if sys.stdout.isatty() else pretty_line
        _RecordCopy(consumer, LineSink(stream, render), stream, records_max=records_max, ends=None).run()


def _check_usage(format_: Format, *, follow: bool, output: str | None) -> None:
    if format_ in ("arrow", "parquet") and output is None and sys.stdout.isatty():
        raise click.UsageError(f"{format_} cannot be shown at a terminal: give --output, or use a pipe")
    if format_ == "parquet" and follow:
        raise click.UsageError(
            "--follow never writes the footer of a Parquet file, without which it cannot be read; use arrow"
        )


@contextmanager
def _open_output(path: str | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdout.buffer
        return
    with open(path, "wb") as file:
        yield file


Place = Callable[[quiver.Consumer, int], None]
"""Moves a consumer to its start in a partition."""


def _open_consumer(
    cluster: quiver.Cluster, topic: str, name: str | None, *, partitions: tuple[int, ...], start: Start | None
) -> quiver.Consumer:
    first = "latest" if start == _LATEST else "earliest"
    return cluster.consumer(topic, name, partitions=partitions, start=first, on_trimmed="earliest")  # type: ignore[arg-type] # one of the two


def _make_placement(cluster: quiver.Cluster, topic: str, start: Start | None, last: int | None) -> Place | None:
    """Return what moves a consumer to its start in a partition; None: it starts at its cursor."""
    if last is not None:
        first, ends = cluster.offsets(topic, "earliest").offsets, cluster.offsets(topic, "latest").offsets
        return lambda consumer, at: consumer.seek(at, max(ends.get(at, 0) - last, first.get(at, 0)))
    if start is not None:
        return lambda consumer, at: consumer.seek(at, start.offset, timestamp=start.timestamp)
    return None


class _Member:
    """A member of a group: places each partition that it gets for the first time, and syncs before it gives one up."""

    def __init__(self, place: Place | None, *, is_line: bool) -> None:
        self.stream: BinaryIO | None = None
        self._place, self._is_line = place, is_line
        self._placed: set[int] = set()
        self._consumer: quiver.Consumer | None = None

    def join(self, cluster: quiver.Cluster, topic: str, group: str, start: Start | None) -> quiver.Consumer:
        """Return a consumer that is a member of the group.

        Only lines are complete when they are written: the cursors of other formats move when the output is closed.
        """
        self._consumer = cluster.consumer(
            topic,
            group=group,
            start="latest" if start == _LATEST else "earliest",
            on_trimmed="earliest",
            commit_on_release=self._is_line,
            on_assign=self._assign,
            on_revoke=self._revoke,
        )
        return self._consumer

    def _assign(self, places: Sequence[tuple[str, int]]) -> None:
        for _, partition in places:
            if self._place is not None and self._consumer is not None and partition not in self._placed:
                self._placed.add(partition)
                self._place(self._consumer, partition)

    def _revoke(self, _: Sequence[tuple[str, int]]) -> None:
        if self.stream is not None and self._is_line:
            _sync(self.stream)


def _sync(stream: BinaryIO) -> None:
    """Put a file on disk, before cursors move: a crash may repeat records in it, and never skips any."""
    if stream is not sys.stdout.buffer:
        stream.flush()
        os.fsync(stream.fileno())


class _RecordCopy:
    """Copies records from a consumer to a sink until the end, and commits the consumer's cursors."""

    def __init__(
        self,
        consumer: quiver.Consumer,
        sink: Sink,
        stream: BinaryIO,
        *,
        records_max: int | None,
        ends: Mapping[int, int] | None,
    ) -> None:
        """Copy up to the end offsets of the partitions, or for ever if they are None."""
        self.count = 0
        self._consumer, self._sink, self._stream = consumer, sink, stream
        self._records_max = sys.maxsize if records_max is None else records_max
        self._end_offsets: dict[int, int] = dict(ends or {})
        self._is_following = ends is None
        self._read_s = time.monotonic()
        """When it had a partition last: a member of a group may have none."""
        self._cuts: Mapping[int, int] = {}
        """Offsets inside of partitions at which it ends: records that were polled from there on are left out."""
        self._written = self._positions()
        self._committed_s = time.monotonic()

    def stop_at(self, end_offsets: Mapping[int, int]) -> None:
        """End at these offsets, if they come before the end of the partition."""
        self._end_offsets = {at: min(end, end_offsets.get(at, end)) for at, end in self._end_offsets.items()}
        self._cuts = self._end_offsets

    def run(self) -> None:
        """Copy records; when interrupted, close the sink and commit what was written."""
        try:
            self._copy()
        except KeyboardInterrupt:
            self._finish()
            raise
        self._finish()
        if skipped := self._consumer.skipped_count:
            click.echo(
                f"skipped {format_count(skipped, 'record')} that retention removed before they were read", err=True
            )

    def _copy(self) -> None:
        while self.count < self._records_max and not self._is_at_end():
            count_max = self._records_max - self.count
            self.count += self._sink.write_next(self._consumer, count_max, POLL_S, self._cuts)
            self._written = self._positions()
            if not self._sink.is_whole_when_closed and time.monotonic() - self._committed_s >= COMMIT_INTERVAL_S:
                self._commit()

    def _is_at_end(self) -> bool:
        if self._is_following:
            return False
        positions = self._find_positions()
        if not positions:
            return time.monotonic() - self._read_s > NO_PARTITION_S
        self._read_s = time.monotonic()
        return all(offset >= self._end_offsets.get(at, 0) for at, offset in positions.items())

    def _finish(self) -> None:
        self._sink.close()
        self._commit()

    def _commit(self) -> None:
        """Commit the cursors of a named consumer after the last written record."""
        self._committed_s = time.monotonic()
        if self._consumer.consumer_id is None:
            return
        _sync(self._stream)
        for partition, offset in self._find_positions().items():
            written = self._written.get(partition, offset)
            if offset != written:  # polled, but an interrupt came before the write
                self._consumer.seek(partition, written)
        try:
            self._consumer.commit()
        except FencedError as error:
            if self._consumer.member_id is None:
                raise
            click.echo(str(error), err=True)

    def _positions(self) -> dict[int, int]:
        return {at: min(offset, self._cuts.get(at, offset)) for at, offset in self._find_positions().items()}

    def _find_positions(self) -> dict[int, int]:
        """Return the positions in the partitions that it has now; a group may take one at any time."""
        found: dict[int, int] = {}
        for partition in self._consumer.partitions:
            with suppress(NotFoundError):
                found[partition] = self._consumer.position(partition)
        return found


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

    def write_next(self, consumer: quiver.Consumer, records_max: int, timeout_s: float, ends: Mapping[int, int]) -> int:
        """Write the next records that come before the ends; wait for the first one at most this long.

        Return how many were written.
        """

    def close(self) -> None:
        """Write the end of the format; the stream stays open."""


class LineSink:
    """Writes a line for each record."""

    is_whole_when_closed = False

    def __init__(self, stream: BinaryIO, render: Callable[[Record], bytes]) -> None:
        self._stream = stream
        self._render = render

    def write_next(self, consumer: quiver.Consumer, records_max: int, timeout_s: float, ends: Mapping[int, int]) -> int:
        """Write the next records as lines."""
        records = consumer.poll(min(records_max, POLL_RECORDS), timeout_s)
        if ends:
            records = [one for one in records if one.offset < ends.get(one.partition or 0, sys.maxsize)]
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

    def write_next(self, consumer: quiver.Consumer, records_max: int, timeout_s: float, ends: Mapping[int, int]) -> int:
        """Write the next records as one table."""
        table = consumer.fetch_arrow(min(records_max, self._records_max), timeout_s, with_headers=True)
        if ends and table.num_rows:
            import numpy as np

            stops = np.full(max(ends) + 1, sys.maxsize)
            stops[list(ends)] = list(ends.values())
            table = table.filter(table["offset"].to_numpy() < stops[table["partition"].to_numpy()])
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


def make_template(template: str) -> Callable[[Record], bytes]:
    """Return what renders records by a template; ``\\n`` and ``\\t`` in it are a line feed and a tab.

    Raises:
        click.UsageError: the template names another field, or is not valid.
    """
    template = template.replace("\\n", "\n").replace("\\t", "\t")
    try:
        given = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise click.UsageError(f"--template: {error}") from None
    if given - set(TEMPLATE_FIELDS):
        names = ", ".join(TEMPLATE_FIELDS)
        raise click.UsageError(f"--template has {{{min(given - set(TEMPLATE_FIELDS))}}}; the fields are: {names}")

    def render(record: Record) -> bytes:
        line = template.format(
            time=format_time(record.timestamp),
            timestamp=record.timestamp,
            partition=record.partition,
            offset=record.offset,
            key=printable(record.key),
            value=printable(record.value),
            headers=" ".join(f"{name}={printable(value)}" for name, value in record.headers),
        )
        return line.encode() + b"\n"

    try:
        render(Record(Offset(0), 0, b"", b"", (), PartitionId(0)))
    except (ValueError, LookupError, AttributeError) as error:  # such as {value:d}
        raise click.UsageError(f"--template: {error}") from None
    return render


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
