"""`quiver produce`: lines of files, or of standard input, as records.

What is read is sent at once, so that a line that is typed, or that comes through a pipe, is a record right away. The
summary counts what the cluster has acknowledged, also when it could not take everything.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

import quiver
from quiver.cli.amounts import show_bytes, show_count
from quiver.cli.connection import connect, topic_argument, url_option
from quiver.cli.examples import examples
from quiver.cli.line_source import STANDARD_INPUT, read_files, total_bytes


@click.command(
    short_help="Send lines as records.",
    epilog=examples("quiver produce logs access.log error.log", "tail -F app.log | quiver produce logs --key app-1"),
)
@topic_argument
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True))
@click.option("--key", help="Key of every record: they all go to one partition.")
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="Partition of every record.")
@click.option("--name", help="Name of the producer; fences off an earlier one of that name.")
@click.option(
    "--compression",
    type=click.Choice(("none", "lz4", "zstd")),
    default="none",
    show_default=True,
    help="How batches are packed, from here to who consumes them.",
)
@url_option
def produce(
    *,
    topic: str,
    files: tuple[str, ...],
    key: str | None,
    partition: int | None,
    name: str | None,
    compression: str,
    url: str,
) -> None:
    """Send each line of FILES, or of standard input, to TOPIC as a record; create the topic if it does not exist.

    Without --key and --partition records are spread over the partitions, and only those of one partition keep their
    order. Ends when every record is acknowledged: on the disks of a majority of its replicas.
    """
    paths = files or (STANDARD_INPUT,)
    with connect(url) as cluster:
        producer = cluster.producer(topic, name, compression=None if compression == "none" else compression)  # type: ignore[arg-type] # one of the choices
        with _Tally(topic, paths) as tally, producer:
            for lines in read_files(paths):
                tally.add(producer.send_many(lines, key, partition), sum(map(len, lines)) + len(lines))
            producer.flush()


class _Tally:
    """Count what was sent and what is acknowledged, show it while it grows, and sum up, however it ends."""

    def __init__(self, topic: str, paths: tuple[str, ...]) -> None:
        self._topic = topic
        self._sent = self._acknowledged = self._acknowledged_bytes = 0
        self._open: deque[tuple[quiver.Deliveries, int]] = deque()  # bounded by the producer's buffer
        self._counting = threading.Lock()  # the bar is drawn by a thread of its own
        self._begun_s = time.monotonic()
        self._total_bytes = total_bytes(paths)
        # Whoever types at a terminal sees the lines; a bar would write over them.
        self._is_typed = STANDARD_INPUT in paths and sys.stdin.isatty()
        self._progress = Progress(
            TextColumn(topic, markup=False),
            SpinnerColumn() if self._total_bytes is None else BarColumn(bar_width=None),
            _Told(self),
            console=Console(stderr=True),
            disable=self._is_typed or not sys.stderr.isatty(),
            transient=True,
            expand=self._total_bytes is not None,
        )
        self._bar = self._progress.add_task("", total=self._total_bytes)

    def __enter__(self) -> _Tally:
        if self._is_typed:
            click.echo(f"each line that you type goes to {self._topic}; Ctrl-D ends it", err=True)
        self._progress.start()
        return self

    def add(self, deliveries: quiver.Deliveries, size_bytes: int) -> None:
        """Take note of records that are on their way, and of how many bytes were read for them."""
        with self._counting:
            self._sent += len(deliveries)
            self._open.append((deliveries, size_bytes))
            self._settle()

    def tell(self) -> str:
        """Return how much is acknowledged and how fast that went."""
        passed_s = max(time.monotonic() - self._begun_s, 1e-9)
        with self._counting:
            self._settle()
            count, size_bytes = self._acknowledged, self._acknowledged_bytes
        self._progress.update(self._bar, completed=size_bytes)
        rates = f"{round(count / passed_s):,} records/s, {show_bytes(size_bytes / passed_s)}/s"
        return f"{show_count(count, 'record')} in {passed_s:.1f} s: {rates}"

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        if kind is None:
            click.echo(f"sent to {self._topic}: {self.tell()}", err=True)
            return
        self._settle()
        acknowledged = self._acknowledged + sum(deliveries.committed_count for deliveries, _ in self._open)
        told = f"{acknowledged:,} of {show_count(self._sent, 'record')} read"
        click.echo(f"stopped; in {self._topic} for certain: {told}", err=True)

    def _settle(self) -> None:
        while self._open and self._open[0][0].is_done:
            deliveries, size_bytes = self._open.popleft()
            self._acknowledged += deliveries.committed_count
            self._acknowledged_bytes += size_bytes


class _Told(ProgressColumn):
    """What the tally says, beside the bar."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__(Column(no_wrap=True))
        self._tally = tally

    def render(self, task: Task) -> Text:  # noqa: ARG002 - there is one
        """Return what stands there now."""
        return Text(self._tally.tell())
