"""Parse a topic's log lines into a table, each record once.

The table is a lake of parsed lines: a Delta table, or plain Parquet files. One batch: read the parsed offsets from the
table and the end offsets from the topic or the archive, parse the difference in tasks that write files, store the
model, and commit files, offsets and the model's name in one step. There is no other state: a batch that is interrupted
at any point has happened completely or not at all, and the table always agrees with its model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow as pa

from quiver.client.ranges import TopicOffsets
from quiver.errors import NotFoundError, RequestError
from quiver.model import TopicId
from quiver.spark.connections import connection
from quiver.spark.holds import QueryHold
from quiver.spark.logs.formats import layout_of_format
from quiver.spark.offset_reader import OffsetReader
from quiver.spark.offsets import (
    OffsetRange,
    StreamOffset,
    incarnation_of,
    limit_records,
    ranges_between,
    records_between,
)
from quiver.spark.options import OffsetBound, ReadOptions, parse_duration
from quiver.spark.pipelines.archive import stream_offsets
from quiver.spark.pipelines.events import EVENTS, FILE_SCHEMA, RECORD_COLUMNS
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.pipelines.lake import (
    ArchivedRanges,
    FileWriter,
    Lake,
    LakeFile,
    LakeFormat,
    hidden_path,
    incarnation_digest,
    open_lake,
)
from quiver.spark.pipelines.model_store import load_model, save_model
from quiver.spark.pipelines.parsing import (
    BATCH_TASKS_MAX,
    BatchParser,
    LakeReader,
    RecordReader,
    TopicReader,
    task_records,
)
from quiver.spark.pipelines.place import Place, parse_place

FILE_OPTIONS: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["level", "source", "host", "thread_or_pid", "template_id", "template"],
    "column_encoding": {
        "offset": "DELTA_BINARY_PACKED",
        "timestamp": "DELTA_BINARY_PACKED",
        "time": "DELTA_BINARY_PACKED",
    },
    "write_statistics": ["offset", "timestamp", "time"],
}

ARCHIVED: Final = "archive/0/0"
"""Stands for the incarnation of an archived topic in offsets: the archive has only a digest of it."""


class Parse(Job, frozen=True, kw_only=True):
    """Parse log lines into a table."""

    topic: str
    to: str
    endpoint: str = ""
    from_archive: str = ""
    table_format: LakeFormat = "delta"
    format: tuple[str, ...] = ()
    is_once: bool = False
    every: str = ""
    is_skip_lost: bool = False

    def __post_init__(self) -> None:
        if self.is_once and self.every:
            raise _bad("set only one of once (end when everything is parsed) and every (continue with new records)")
        if not self.table_place().is_local and self.table_format == "parquet":
            raise _bad(f"table-format parquet renames files, which object stores cannot do: use delta for {self.to}")
        parse_duration(self.every or "1s", "every")
        if self.from_archive:
            self.archive_place()
        for pattern in self.format:
            layout_of_format(pattern)

    def table_place(self) -> Place:
        """Return the place of the table; raise `RequestError` if the option is invalid."""
        return parse_place(self.to, option="to", endpoint=self.endpoint)

    def archive_place(self) -> Place:
        """Return the place of the archive; raise `RequestError` if the option is invalid."""
        place = parse_place(self.from_archive, option="from-archive")
        return (
            place if place.is_local else parse_place(self.from_archive, option="from-archive", endpoint=self.endpoint)
        )

    def run(self, run: JobRun) -> JobResult:
        """Parse the existing records; with `every`, continue with new records until the job is stopped."""
        source = ArchiveSource(self) if self.from_archive else TopicSource(self)
        if self.is_dry_run:
            return _dry_run(self, source)
        table = open_lake(self.table_place(), self.table_format, EVENTS)
        work = _ParseRun(self, source, table, run)
        begun_s = time.monotonic()
        every_s = parse_duration(self.every, "every") if self.every else None
        with closing(source):
            while True:
                batch_s = time.monotonic()
                is_complete = work.catch_up()
                if every_s is None or not run.wait(every_s - (time.monotonic() - batch_s)):
                    break
        return work.result(time.monotonic() - begun_s, is_complete=is_complete or every_s is not None)


class TopicSource:
    """The records of a topic; unparsed ones are held against retention until it is closed."""

    incarnation = ""
    """A digest of the topic's incarnation, known after `find`: tables and archives know the topic by it."""

    def __init__(self, job: Parse) -> None:
        self._job, self._cluster = job, connection(job.cluster_servers())
        options = ReadOptions(
            servers=job.cluster_servers(),
            topics=(job.topic,),
            columns=RECORD_COLUMNS,
            starting=OffsetBound(default="earliest"),
            group_id="parse",
        )
        self._offsets, self._hold = OffsetReader(options), QueryHold(options)
        self._reader = TopicReader(options)

    def find(self, table: Lake | None) -> tuple[StreamOffset, StreamOffset, int]:
        """Return the start and end offsets to parse, and the number of records lost before the start."""
        first = self._cluster.offsets(self._job.topic, "earliest")
        ends = self._cluster.offsets(self._job.topic, topic_id=first.topic_id)
        known = incarnation_of(self._cluster.cluster_id, first)
        self.incarnation = str(incarnation_digest(known))
        is_skip_lost = self._job.is_skip_lost
        return stream_offsets(table, first, ends, self.incarnation, stream_id=known, skips_lost=is_skip_lost)

    def reader(self) -> RecordReader:
        """Return how tasks read records."""
        return self._reader

    def record_bytes(self) -> int:
        """Return the average size of a record."""
        return self._offsets.average_record_bytes([self._job.topic])

    def move(self, start: StreamOffset, end: StreamOffset) -> None:
        """Note what is yet to be parsed."""
        self._hold.move(start, end)

    def close(self) -> None:
        """Release the hold; idempotent."""
        self._hold.release()


class ArchiveSource:
    """The records of a topic in an archive."""

    incarnation = ""

    def __init__(self, job: Parse) -> None:
        self._job, self._lake = job, open_lake(job.archive_place())

    def find(self, table: Lake | None) -> tuple[StreamOffset, StreamOffset, int]:
        """Return the start and end offsets to parse, and the number of records lost before the start."""
        lake, topic = self._lake, self._job.topic
        lake.refresh()
        files = lake.files(topic)
        if not files:
            found = ", ".join(lake.topics()) or "none"
            raise NotFoundError(
                f"the archive {lake.place} has no topic {topic!r}; its topics are {found}", code="unknown_topic"
            )
        firsts: dict[int, int] = {}
        ends = dict.fromkeys(range(lake.partition_count(topic)), 0)
        for file in files:
            firsts[file.partition] = min(firsts.get(file.partition, file.first_offset), file.first_offset)
            ends[file.partition] = max(ends[file.partition], file.last_offset + 1)
        first, end = (
            TopicOffsets(topic=topic, topic_id=TopicId(0), created_ms=0, offsets=offsets) for offsets in (firsts, ends)
        )
        self.incarnation = lake.incarnation(topic)
        is_skip_lost = self._job.is_skip_lost
        return stream_offsets(table, first, end, self.incarnation, stream_id=ARCHIVED, skips_lost=is_skip_lost)

    def reader(self) -> RecordReader:
        """Return how tasks read records."""
        return LakeReader(self._lake.place, tuple(self._lake.files(self._job.topic)))

    def record_bytes(self) -> int:
        """Return an upper estimate of the average size of a record: files are compressed."""
        files = self._lake.files(self._job.topic)
        return max(1, 8 * sum(file.size_bytes for file in files) // max(1, sum(file.count for file in files)))

    def move(self, start: StreamOffset, end: StreamOffset) -> None:
        """Do nothing: an archive keeps its records."""

    def close(self) -> None:
        """Do nothing."""


class _ParseRun:
    """A running parse job."""

    def __init__(self, job: Parse, source: TopicSource | ArchiveSource, table: Lake, run: JobRun) -> None:
        self._job, self._source, self._table, self._run = job, source, table, run
        self._count = self._rows = self._lost = self._files = self._new = 0
        self._templates = 0
        self._reported: JobProgress | None = None

    def catch_up(self) -> bool:
        """Parse the current content of the source in batches; return False if the job stops before the end."""
        job, table, source = self._job, self._table, self._source
        start, target, lost = source.find(table)
        self._lost += lost
        source.move(start, target)
        total = self._count + records_between(start, target)
        if total == self._count:
            self._report(total)
            return True
        record_bytes = source.record_bytes()
        model = load_model(table.place, table.model(job.topic))
        parser = BatchParser(self._run.spark, source.reader(), model, formats=job.format)
        while (ranges := ranges_between(start, target)) and not self._run.is_stopping:
            self._report(total)
            end = limit_records(start, target, BATCH_TASKS_MAX * task_records(record_bytes))
            ranges = ranges_between(start, end)
            self._run_batch(parser, ranges, start, end, record_bytes)
            start = end
            source.move(start, target)
        self._report(total)
        return not ranges_between(start, target)

    def _report(self, total: int) -> None:
        progress = JobProgress(f"parsing {self._job.topic}", self._count, total, lag=total - self._count)
        if progress != self._reported:
            self._reported = progress
            self._run.report_progress(progress)

    def _run_batch(
        self, parser: BatchParser, ranges: list[OffsetRange], start: StreamOffset, end: StreamOffset, record_bytes: int
    ) -> None:
        topic, table = self._job.topic, self._table
        write = partial(write_rows, table.place, is_hidden=table.hides_uncommitted)
        discard = partial(remove_files, table.place, is_hidden=table.hides_uncommitted)
        results = parser.run(ranges, write, discard, record_bytes=record_bytes)
        files = [file for own in results for file in own.output]
        data = parser.model.to_bytes()
        parsed = ArchivedRanges(
            topic=topic,
            incarnation=self._source.incarnation,
            begins=start.topics[topic].p,
            ends=end.topics[topic].p,
            model=save_model(table.place, data),
        )
        # The model is durable. After the commit the records are parsed; before it, nothing has happened.
        table.commit(files, parsed)
        self._count += sum(map(len, ranges))
        self._rows += sum(own.lines for own in results)
        self._new += sum(own.new_lines for own in results)
        self._files += len(files)
        self._templates = len(parser.model.templates)

    def result(self, seconds: float, *, is_complete: bool) -> JobResult:
        """Return the result of the job."""
        job = self._job
        facts: dict[str, object] = {
            "topic": job.topic,
            "to": self._table.place.url,
            "records": self._count,
            "rows": self._rows,
            "templates": self._templates,
            "lost": self._lost,
            "files": self._files,
            "seconds": round(seconds, 3),
        }
        sentence = f"parsed {job.topic} into {self._table.place}: records {self._count:,}, rows {self._rows:,}"
        sentence += f", templates {self._templates:,}" if self._count else ""
        sentence += f", records lost {self._lost:,}" if self._lost else ""
        if not is_complete:
            sentence += "; stopped before the end: run the same command to resume"
        return JobResult(sentence=sentence, facts=facts, is_complete=is_complete)


def write_rows(place: Place, own: OffsetRange, batches: Iterator[pa.RecordBatch], *, is_hidden: bool) -> list[LakeFile]:
    """Write the rows of a range to a file of a table; return it, durable. Runs in a task."""
    first = next((batch for batch in batches if len(batch)), None)
    if first is None:
        return []
    path = f"topic={own.topic}/partition={own.partition}/part-{uuid4().hex}.parquet"
    writer = FileWriter(place, path, is_hidden=is_hidden, schema=FILE_SCHEMA, options=FILE_OPTIONS)
    writer.write(first)
    for batch in batches:
        if len(batch):
            writer.write(batch)
    size_bytes = writer.close()
    return [
        LakeFile(
            path=path,
            topic=own.topic,
            partition=own.partition,
            size_bytes=size_bytes,
            count=writer.count,
            first_offset=writer.first_offset,
            last_offset=writer.last_offset,
        )
    ]


def remove_files(place: Place, files: Sequence[LakeFile], *, is_hidden: bool) -> None:
    """Remove files that no commit will name; those that cannot be removed are left for a vacuum."""
    for file in files:
        path, filesystem = place.locate(hidden_path(file.path) if is_hidden else file.path)
        with suppress(OSError):
            if filesystem is None:
                os.unlink(path)
            else:
                filesystem.delete_file(path)


def _dry_run(job: Parse, source: TopicSource | ArchiveSource) -> JobResult:
    try:
        table = open_lake(job.table_place(), layout=EVENTS)
    except NotFoundError:
        table = None
    start, target, lost = source.find(table)
    ranges = ranges_between(start, target)
    count = sum(map(len, ranges))
    facts: dict[str, object] = {
        "topic": job.topic,
        "to": job.table_place().url,
        "records": count,
        "lost": lost,
        "ranges": [msgspec.structs.asdict(one) for one in ranges],
    }
    return JobResult(sentence=f"would parse {job.topic} into {job.table_place()}: records {count:,}", facts=facts)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
