"""`quiver produce`: send the lines of files, or of standard input, as records, plain or as JSON.

A block is sent as soon as it is read, so that a line that is typed, or that comes through a pipe, becomes a record
without delay. A line ends with a line feed, which is not part of it; every other byte is. The last line may lack it.
Memory holds one block and at most one unfinished line, whose length is limited. The closing line counts the records
that the cluster has acknowledged, also when the command fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from io import BufferedReader
from typing import Protocol, cast

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

import quiver
from quiver.cli.json_lines import parse_record
from quiver.cli.options import TIME_HELP, TimeType, connect, examples, topic_argument, url_option
from quiver.cli.output import format_bytes, format_count
from quiver.cli.quantities import DurationType
from quiver.errors import TooLargeError
from quiver.record.header import PAYLOAD_BYTES_MAX

STANDARD_INPUT = "-"
BLOCK_BYTES = 1 << 20
"""Most bytes of one read: about a batch."""
PACE_S = 0.05
"""How much is sent at a time under a rate."""


@click.command(
    short_help="Send lines as records.",
    epilog=examples(
        "quiver produce logs access.log error.log",
        "tail -F app.log | quiver produce logs --key app-1 --header host=web-1",
        "quiver consume logs --json | quiver produce copy --json --rate 1000",
        "quiver produce jobs jobs.txt --delay 10m",
    ),
)
@topic_argument
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True))
@click.option("--key", help="Key of every record; all records go to the same partition.")
@click.option(
    "--header", "headers", metavar="NAME=VALUE", multiple=True, help="Header of every record; may be repeated."
)
@click.option(
    "--timestamp",
    type=TimeType(),
    help=f"Time of every record: {TIME_HELP}.  [default: when it is sent]",
)
@click.option(
    "--delay", "delay_ms", type=DurationType(), help="Time after which work queues deliver the records, such as 10m."
)
@click.option(
    "--deliver-at",
    type=TimeType(),
    help="Time at which work queues deliver the records: 2026-01-31T12:00; UTC unless it has a zone.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Each line is a JSON object: value, and optionally key, headers, timestamp (ms), partition.",
)
@click.option("--rate", type=click.FloatRange(min=0.001), metavar="N", help="Send at most N records per second.")
@click.option("--progress/--no-progress", default=None, help="Show the progress.  [default: at a terminal]")
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="Partition of every record.")
@click.option("--name", help="Name of the producer; fences an earlier producer of that name.")
@click.option(
    "--compression",
    type=click.Choice(("none", "lz4", "zstd")),
    default="none",
    show_default=True,
    help="Compression of batches; they stay compressed until a consumer reads them.",
)
@url_option
def produce(
    *,
    topic: str,
    files: tuple[str, ...],
    key: str | None,
    headers: tuple[str, ...],
    timestamp: datetime | None,
    delay_ms: int | None,
    deliver_at: datetime | None,
    as_json: bool,
    rate: float | None,
    progress: bool | None,
    partition: int | None,
    name: str | None,
    compression: str,
    url: str,
) -> None:
    """Send each line of FILES, or of standard input, to TOPIC as a record; create the topic if it does not exist.

    Without --key and --partition, records are spread over the partitions; order is kept within a partition only. The
    command ends when every record is acknowledged: on the disks of a majority of its replicas.
    """
    if delay_ms is not None and deliver_at is not None:
        raise click.UsageError("give at most one of --delay and --deliver-at")
    paths = files or (STANDARD_INPUT,)
    fields = RecordFields(
        key=key,
        partition=partition,
        timestamp=None if timestamp is None else round(timestamp.timestamp() * 1000),
        headers=_parse_headers(headers),
        is_json=as_json,
        delay_s=None if delay_ms is None else delay_ms / 1000,
        deliver_at=deliver_at,
    )
    with connect(url) as cluster:
        producer = cluster.producer(topic, name, compression=None if compression == "none" else compression)  # type: ignore[arg-type] # one of the choices
        with _Tally(topic, paths, is_shown=progress) as tally, producer:
            number = 0
            for lines in pace(read_files(paths), rate):
                fields.send(producer, lines, number, tally)
                number += len(lines)
            producer.flush()


class SentRecords(Protocol):
    """Records that were sent together: `Deliveries`, or those of single records."""

    @property
    def is_done(self) -> bool:
        """Whether all of them are acknowledged or failed."""
        ...

    @property
    def committed_count(self) -> int:
        """How many are acknowledged."""
        ...

    def __len__(self) -> int: ...


class _SingleDeliveries:
    """Deliveries of records that were sent one by one."""

    def __init__(self, deliveries: list[quiver.Delivery]) -> None:
        self._deliveries = deliveries

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self._deliveries)

    @property
    def committed_count(self) -> int:
        return sum(one.is_done and one.error is None for one in self._deliveries)

    def __len__(self) -> int:
        return len(self._deliveries)


class RecordFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every record gets beside its value, and whether lines are JSON, which may say otherwise."""

    key: str | None
    partition: int | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes], ...]
    is_json: bool
    delay_s: float | None = None
    deliver_at: datetime | None = None

    def send(self, producer: quiver.Producer, lines: list[bytes], before: int, tally: _Tally) -> None:
        """Send lines, of which `before` others came first, and count those that were sent.

        Raises:
            RequestError: a line is not a record; it and those after it are not sent.
        """
        if not (self.is_json or self.headers or self.timestamp is not None):
            sent_all = producer.send_many(
                lines, self.key, self.partition, delay=self.delay_s, deliver_at=self.deliver_at
            )
            tally.add(sent_all, _size(lines))
            return
        sent: list[quiver.Delivery] = []
        try:
            for at, line in enumerate(lines, 1):
                sent.append(self._send_one(producer, line, before + at))
        finally:
            tally.add(_SingleDeliveries(sent), _size(lines[: len(sent)]))

    def _send_one(self, producer: quiver.Producer, line: bytes, number: int) -> quiver.Delivery:
        if not self.is_json:
            return producer.send(
                line,
                self.key,
                self.partition,
                self.timestamp,
                self.headers or None,
                delay=self.delay_s,
                deliver_at=self.deliver_at,
            )
        given = parse_record(line, f"line {number}")
        headers = (*self.headers, *given.headers.items())
        return producer.send(
            given.value,
            self.key if given.key is None else given.key,
            self.partition if given.partition is None else given.partition,
            self.timestamp if given.timestamp is None else given.timestamp,
            headers or None,
            delay=self.delay_s,
            deliver_at=self.deliver_at,
        )


def _size(lines: list[bytes]) -> int:
    """Return the bytes that were read for lines."""
    return sum(map(len, lines)) + len(lines)


def _parse_headers(given: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    headers = [one.partition("=") for one in given]
    for name, sign, _ in headers:
        if not name or not sign:
            raise click.UsageError("a header is given as NAME=VALUE, for example --header host=web-1")
    return tuple((name, value.encode()) for name, _, value in headers)


def pace(blocks: Iterable[list[bytes]], rate: float | None) -> Iterator[list[bytes]]:
    """Yield lines at most at a rate per second, in blocks of about 50 ms; without a rate, as they come."""
    if rate is None:
        yield from blocks
        return
    size = max(1, int(rate * PACE_S))
    due_s = time.monotonic()
    for block in blocks:
        for at in range(0, len(block), size):
            time.sleep(max(0.0, due_s - time.monotonic()))
            lines = block[at : at + size]
            # A source that was slow does not make up for it in a burst.
            due_s = max(due_s, time.monotonic() - PACE_S) + len(lines) / rate
            yield lines


class _Tally:
    """Counts sent and acknowledged records, shows the count while it grows, and prints it at the end."""

    def __init__(self, topic: str, paths: tuple[str, ...], *, is_shown: bool | None) -> None:
        self._topic = topic
        self._sent = self._acknowledged = self._acknowledged_bytes = 0
        self._pending: deque[tuple[SentRecords, int]] = deque()  # bounded by the producer's buffer
        self._lock = threading.Lock()  # rich draws the bar in a thread of its own
        self._start_s = time.monotonic()
        self._total_bytes = total_bytes(paths)
        # The lines that a user types are visible at the terminal; a bar would overwrite them.
        self._is_typed = STANDARD_INPUT in paths and sys.stdin.isatty()
        self._progress = Progress(
            TextColumn(topic, markup=False),
            SpinnerColumn() if self._total_bytes is None else BarColumn(bar_width=None),
            _TallyColumn(self),
            console=Console(stderr=True),
            disable=not (sys.stderr.isatty() and not self._is_typed if is_shown is None else is_shown),
            transient=True,
            expand=self._total_bytes is not None,
        )
        self._bar = self._progress.add_task("", total=self._total_bytes)

    def __enter__(self) -> _Tally:
        if self._is_typed:
            click.echo(f"each line that you type is sent to {self._topic}; Ctrl-D ends the command", err=True)
        self._progress.start()
        return self

    def add(self, deliveries: SentRecords, size_bytes: int) -> None:
        """Count records that were sent, and the bytes that were read for them."""
        with self._lock:
            self._sent += len(deliveries)
            self._pending.append((deliveries, size_bytes))
            self._settle()

    def describe(self) -> str:
        """Return how many records are acknowledged, and at what rate."""
        passed_s = max(time.monotonic() - self._start_s, 1e-9)
        with self._lock:
            self._settle()
            count, size_bytes = self._acknowledged, self._acknowledged_bytes
        self._progress.update(self._bar, completed=size_bytes)
        rates = f"{round(count / passed_s):,} records/s, {format_bytes(size_bytes / passed_s)}/s"
        return f"{format_count(count, 'record')} in {passed_s:.1f} s: {rates}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        if kind is None:
            click.echo(f"sent to {self._topic}: {self.describe()}", err=True)
            return
        self._settle()
        acknowledged = self._acknowledged + sum(deliveries.committed_count for deliveries, _ in self._pending)
        click.echo(
            f"stopped; acknowledged by {self._topic}: {acknowledged:,} of {format_count(self._sent, 'record')} read",
            err=True,
        )

    def _settle(self) -> None:
        while self._pending and self._pending[0][0].is_done:
            deliveries, size_bytes = self._pending.popleft()
            self._acknowledged += deliveries.committed_count
            self._acknowledged_bytes += size_bytes


class _TallyColumn(ProgressColumn):
    """The tally's count, beside the bar."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__(Column(no_wrap=True))
        self._tally = tally

    def render(self, task: Task) -> Text:  # noqa: ARG002 - there is one
        """Return the column's text."""
        return Text(self._tally.describe())


def read_files(paths: Iterable[str]) -> Iterator[list[bytes]]:
    """Yield the lines of files, one file after the other; `-` is standard input."""
    for path in paths:
        if path == STANDARD_INPUT:
            yield from read_lines(cast("BufferedReader", sys.stdin.buffer), "standard input")
            continue
        with open(path, "rb") as file:
            yield from read_lines(file, path)


def read_lines(stream: BufferedReader, name: str) -> Iterator[list[bytes]]:
    """Yield the lines of a stream as they arrive, several at a time.

    Raises:
        TooLargeError: a line is longer than any record can be.
    """
    begun: list[bytes] = []
    begun_bytes = 0
    number = 1
    # `read1` returns what is available: `read` would keep complete lines waiting for a full block.
    while block := stream.read1(BLOCK_BYTES):
        first, *rest = block.split(b"\n")
        begun.append(first)
        begun_bytes += len(first)
        if begun_bytes > PAYLOAD_BYTES_MAX:
            raise TooLargeError(f"line {number} of {name} is longer than {PAYLOAD_BYTES_MAX} bytes")
        if rest:
            lines = [b"".join(begun), *rest]
            begun = [lines.pop()]
            begun_bytes = len(begun[0])
            number += len(lines)
            yield lines
    if begun_bytes:
        yield [b"".join(begun)]


def total_bytes(paths: Iterable[str]) -> int | None:
    """Return the bytes to read; None if that is unknown, as for standard input and pipes."""
    paths = list(paths)
    if not all(path != STANDARD_INPUT and os.path.isfile(path) for path in paths):
        return None
    return sum(map(os.path.getsize, paths))
