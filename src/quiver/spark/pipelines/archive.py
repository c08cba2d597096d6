"""Archive a topic into a lake, each record once.

One batch: read the archived offsets from the lake and the end offsets from the cluster, split the difference into
ranges, let tasks fetch and write them, then commit their files and the new offsets in one step. There is no other
state, so a batch that is interrupted at any point has happened completely or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Final

import msgspec

from quiver.client.ranges import TopicOffsets
from quiver.client.sync import Cluster
from quiver.errors import ConflictError, NotFoundError, RequestError, TrimmedError
from quiver.spark.columns import arrow_batches
from quiver.spark.connections import connection
from quiver.spark.holds import QueryHold
from quiver.spark.offset_reader import OffsetReader as OffsetReader
from quiver.spark.offsets import (
    OffsetRange,
    StreamOffset,
    TopicOffset,
    incarnation_of,
    limit_records,
    plan,
    ranges_between,
    records_between,
)
from quiver.spark.options import OffsetBound, ReadOptions, parse_duration
from quiver.spark.pipelines.delta_lake import DeltaLake, compact
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.pipelines.lake import (
    RECORD_COLUMNS,
    ArchivedRanges,
    Lake,
    LakeFile,
    LakeFormat,
    LakeWriter,
    open_lake,
)
from quiver.spark.pipelines.place import Place, parse_place
from quiver.spark.source import fetch_range

BATCH_RECORDS_MAX: Final = 4_000_000
BATCH_BYTES_MAX: Final = 512 << 20
"""Approximate stored bytes per batch: the most that is read again after a crash."""
WRITE_RECORDS: Final = 100_000
"""Approximate maximum of records per row group."""
MAINTENANCE_S: Final = 3600.0
"""Interval at which a job with `every` compacts and vacuums."""


class Archive(Job, frozen=True, kw_only=True):
    """Archive a topic into a lake."""

    topic: str
    to: str
    endpoint: str = ""
    format: LakeFormat = "delta"
    is_once: bool = False
    every: str = ""
    consumer: str = ""
    is_skip_lost: bool = False
    is_compact: bool = False
    is_vacuum: bool = False
    keep: str = "7d"

    def __post_init__(self) -> None:
        if self.is_once and self.every:
            raise _bad("set only one of once (end when everything is archived) and every (continue with new records)")
        if self.format != "delta" and (self.is_compact or self.is_vacuum):
            raise _bad("compact and vacuum need format delta")
        if not self.lake_place().is_local and self.format == "parquet":
            raise _bad(f"format parquet renames files, which object stores cannot do: use format delta for {self.to}")
        parse_duration(self.every or "1s", "every")
        if parse_duration(self.keep, "keep") < MAINTENANCE_S:
            raise _bad("keep must be at least 1h: vacuum would remove files that a running batch has not committed yet")

    def lake_place(self) -> Place:
        """Return the place of the lake; raise `RequestError` if the option is invalid."""
        return parse_place(self.to, option="to", endpoint=self.endpoint)

    def run(self, run: JobRun) -> JobResult:
        """Archive the existing records; with `every`, continue with new records until the job is stopped."""
        cluster = connection(self.cluster_servers())
        if self.is_dry_run:
            return _dry_run(self, cluster)
        work = _ArchiveRun(self, cluster, open_lake(self.lake_place(), self.format), run)
        begun_s = due_s = time.monotonic()
        every_s = parse_duration(self.every, "every") if self.every else None
        with closing(work):
            while True:
                batch_s = time.monotonic()
                is_complete = work.catch_up()
                if is_complete and time.monotonic() >= due_s:
                    work.maintain()
                    due_s = time.monotonic() + MAINTENANCE_S
                if every_s is None or not run.wait(every_s - (time.monotonic() - batch_s)):
                    break
        return work.result(time.monotonic() - begun_s, is_complete=is_complete or every_s is not None)


class _ArchiveRun:
    """A running archive job; it holds unarchived records against retention until it is closed."""

    def __init__(self, job: Archive, cluster: Cluster, lake: Lake, run: JobRun) -> None:
        self._job, self._cluster, self._lake, self._run = job, cluster, lake, run
        self._options = ReadOptions(
            servers=job.cluster_servers(),
            topics=(job.topic,),
            columns=RECORD_COLUMNS,
            starting=OffsetBound(default="earliest"),
            group_id=job.consumer or "archive",
        )
        self._hold = QueryHold(self._options)
        self._count = self._lost = self._files = 0
        self._maintenance: dict[str, int] = {}
        self._reported: JobProgress | None = None

    def catch_up(self) -> bool:
        """Archive the current content of the topic in batches; return False if the job stops before the end."""
        start, target, lost = find_offsets(self._job, self._cluster, self._lake)
        self._lost += lost
        self._hold.move(start, target)
        total = self._count + records_between(start, target)
        size_bytes = OffsetReader(self._options).average_record_bytes([self._job.topic])
        batch_records = max(1, min(BATCH_RECORDS_MAX, BATCH_BYTES_MAX // size_bytes))
        while ranges_between(start, target) and not self._run.is_stopping:
            end = limit_records(start, target, batch_records)
            self._run_batch(start, end, total)
            start = end
            self._hold.move(start, target)
        self._report(total)
        return not ranges_between(start, target)

    def _report(self, total: int) -> None:
        progress = JobProgress(f"archiving {self._job.topic}", self._count, total, lag=total - self._count)
        if progress != self._reported:
            self._reported = progress
            self._run.report_progress(progress)

    def _run_batch(self, start: StreamOffset, end: StreamOffset, total: int) -> None:
        context = self._run.spark.sparkContext
        self._report(total)
        ranges = plan(ranges_between(start, end), context.defaultParallelism)
        write = partial(write_range, self._lake.place, self._options, is_hidden=self._lake.hides_uncommitted)
        files = [file for own in context.parallelize(ranges, len(ranges)).map(write).collect() for file in own]
        starts, own = start.topics[self._job.topic], end.topics[self._job.topic]
        archived = ArchivedRanges(topic=self._job.topic, incarnation=own.id, begins=starts.p, ends=own.p)
        self._lake.commit(files, archived)
        self._count += sum(map(len, ranges))
        self._files += len(files)
        if self._job.consumer:
            self._cluster.move_cursors(self._job.topic, self._job.consumer, own.p)

    def maintain(self) -> None:
        """Compact and vacuum, if the options ask for it."""
        lake = self._lake
        if not isinstance(lake, DeltaLake):
            return
        if self._job.is_compact:
            self._run.report_progress(JobProgress("compacting"))
            before, after = compact(self._run.spark, lake, self._job.topic)
            self._maintenance |= {"compacted_files": before, "compacted_into": after}
        if self._job.is_vacuum:
            self._run.report_progress(JobProgress("vacuuming"))
            keep = timedelta(seconds=parse_duration(self._job.keep, "keep"))
            self._maintenance["vacuumed_files"] = lake.vacuum(keep)

    def close(self) -> None:
        """Release the hold; idempotent."""
        self._hold.release()

    def result(self, seconds: float, *, is_complete: bool) -> JobResult:
        """Return the result of the job."""
        job = self._job
        facts: dict[str, object] = {
            "topic": job.topic,
            "to": self._lake.place.url,
            "records": self._count,
            "lost": self._lost,
            "files": self._files,
            "seconds": round(seconds, 3),
            **self._maintenance,
        }
        sentence = f"archived {job.topic} to {self._lake.place}: records {self._count:,}, files {self._files:,}"
        for name, count in (("records lost", self._lost), *self._maintenance.items()):
            sentence += f", {name.replace('_', ' ')} {count:,}" if count else ""
        if not is_complete:
            sentence += "; stopped before the end: run the same command to resume"
        return JobResult(sentence=sentence, facts=facts, is_complete=is_complete)


def find_offsets(job: Archive, cluster: Cluster, lake: Lake | None) -> tuple[StreamOffset, StreamOffset, int]:
    """Return the start and end offsets to archive, and the number of records lost before the start.

    Raises:
        ConflictError: the lake has another incarnation of the topic, or offsets beyond the topic's end.
        TrimmedError: retention removed records that were not archived, and `skip-lost` is not set.
    """
    first = cluster.offsets(job.topic, "earliest")
    ends = cluster.offsets(job.topic, topic_id=first.topic_id)
    incarnation = incarnation_of(cluster.cluster_id, first)
    return stream_offsets(lake, first, ends, incarnation, stream_id=incarnation, skips_lost=job.is_skip_lost)


def stream_offsets(
    lake: Lake | None, first: TopicOffsets, ends: TopicOffsets, incarnation: str, *, stream_id: str, skips_lost: bool
) -> tuple[StreamOffset, StreamOffset, int]:
    """Return where a job goes on that keeps its offsets in a lake, where it ends, and how many records are lost."""
    topic = ends.topic
    if lake is not None:
        lake.refresh()
    stored = None if lake is None else lake.archived(topic, incarnation, list(ends.offsets))
    starts, lost = start_offsets(first, ends, stored or {}, skips_lost=skips_lost)
    start, target = (
        StreamOffset(topics={topic: TopicOffset(id=stream_id, p=dict(offsets))}) for offsets in (starts, ends.offsets)
    )
    return start, target, lost


def start_offsets(
    first: TopicOffsets, ends: TopicOffsets, archived: Mapping[int, int], *, skips_lost: bool
) -> tuple[dict[int, int], int]:
    """Return the next offset to archive per partition, and the number of records lost before it."""
    starts: dict[int, int] = {}
    lost = 0
    for partition, end in ends.offsets.items():
        # A partition that was added after `first` was read begins at 0.
        first_offset = first.offsets.get(partition, 0)
        start = archived.get(partition, first_offset)
        where = f"topic {ends.topic!r} partition {partition}"
        if start > end:
            message = (
                f"{where} ends at {end}, but the archive has offsets up to {start}: the topic lost records, or the "
                "archive belongs to another topic. Nothing was archived; compare both before continuing"
            )
            raise ConflictError(message, code="archive_ahead")
        if start < first_offset and not skips_lost:
            message = (
                f"{where}: retention removed offsets {start} to {first_offset - 1} before they were archived. "
                "Set skip-lost to continue without them"
            )
            raise TrimmedError(message, code="trimmed")
        lost += max(0, first_offset - start)
        starts[partition] = max(start, first_offset)
    return starts, lost


def write_range(place: Place, options: ReadOptions, offset_range: OffsetRange, *, is_hidden: bool) -> list[LakeFile]:
    """Fetch a range and write it to files of a lake. Runs in a task."""
    batches = arrow_batches(fetch_range(options, offset_range), offset_range, RECORD_COLUMNS, records_max=WRITE_RECORDS)
    return LakeWriter(place, topic=offset_range.topic, partition=offset_range.partition, is_hidden=is_hidden).write(
        batches
    )


def _dry_run(job: Archive, cluster: Cluster) -> JobResult:
    try:
        lake = open_lake(job.lake_place())
    except NotFoundError:
        lake = None
    start, target, lost = find_offsets(job, cluster, lake)
    ranges = ranges_between(start, target)
    count = sum(map(len, ranges))
    sentence = f"would archive {job.topic} to {job.lake_place()}, format {job.format}: records {count:,}"
    facts: dict[str, object] = {
        "topic": job.topic,
        "to": job.lake_place().url,
        "records": count,
        "lost": lost,
        "ranges": [msgspec.structs.asdict(one) for one in ranges],
    }
    return JobResult(sentence=sentence, facts=facts)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
