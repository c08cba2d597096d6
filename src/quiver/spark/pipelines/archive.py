"""Archive a topic: everything that it holds into a lake, each record once.

A round: see in the lake how far it is, ask the cluster how far the topic goes, share out what lies between as ranges of
offsets, let tasks fetch and write them, commit their files and the new place in one step. Nothing else remembers
anything, so a round that ends anywhere, by whatever means, has either happened or not.
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
from quiver.spark.source import fetch_range

BATCH_RECORDS_MAX: Final = 4_000_000
BATCH_BYTES_MAX: Final = 512 << 20
"""Stored bytes of one round, about: what a crash makes the next run read again."""
WRITE_RECORDS: Final = 100_000
"""Most records of one row group, about."""
MAINTENANCE_S: Final = 3600.0
"""How often a job that follows a topic compacts and vacuums."""


class Archive(Job, frozen=True, kw_only=True):
    """Bring a topic into a lake."""

    topic: str
    to: str
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
            raise _bad("once ends when all is archived, every goes on: give one of them")
        if self.format != "delta" and (self.is_compact or self.is_vacuum):
            raise _bad("compact and vacuum are for format delta")
        parse_duration(self.every or "1s", "every")
        if parse_duration(self.keep, "keep") < MAINTENANCE_S:
            raise _bad("keep is an hour at least: the files of a round that is under way are not in any version yet")

    def run(self, run: JobRun) -> JobResult:
        """Archive what there is; with `every`, go on with what comes until told to stop."""
        cluster = connection(self.cluster_servers())
        if self.is_dry_run:
            return _dry_run(self, cluster)
        work = _ArchiveRun(self, cluster, open_lake(self.to, self.format), run)
        begun_s = due_s = time.monotonic()
        every_s = parse_duration(self.every, "every") if self.every else None
        with closing(work):
            while True:
                round_s = time.monotonic()
                is_complete = work.catch_up()
                if is_complete and time.monotonic() >= due_s:
                    work.maintain()
                    due_s = time.monotonic() + MAINTENANCE_S
                if every_s is None or not run.wait(every_s - (time.monotonic() - round_s)):
                    break
        return work.result(time.monotonic() - begun_s, is_complete=is_complete or every_s is not None)


class _ArchiveRun:
    """A job under way, which holds what it has yet to archive until it is closed."""

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

    def catch_up(self) -> bool:
        """Archive what the topic holds now, in rounds; tell whether that is done: no, if the job is to stop."""
        place, target, lost = find_offsets(self._job, self._cluster, self._lake)
        self._lost += lost
        self._hold.move(place, target)
        total = self._count + records_between(place, target)
        size_bytes = OffsetReader(self._options).average_record_bytes([self._job.topic])
        round_max = max(1, min(BATCH_RECORDS_MAX, BATCH_BYTES_MAX // size_bytes))
        while ranges_between(place, target) and not self._run.is_stopping:
            end = limit_records(place, target, round_max)
            self._run_batch(place, end)
            place = end
            self._hold.move(place, target)
            self._run.report_progress(JobProgress(f"archiving {self._job.topic}", self._count, total))
        return not ranges_between(place, target)

    def _run_batch(self, place: StreamOffset, end: StreamOffset) -> None:
        context = self._run.spark.sparkContext
        self._run.report_progress(
            JobProgress(f"archiving {self._job.topic}", self._count, self._count + records_between(place, end))
        )
        ranges = plan(ranges_between(place, end), context.defaultParallelism)
        write = partial(write_range, self._lake.root, self._options, is_hidden=self._lake.hides_uncommitted)
        files = [file for own in context.parallelize(ranges, len(ranges)).map(write).collect() for file in own]
        begun, own = place.topics[self._job.topic], end.topics[self._job.topic]
        archived = ArchivedRanges(topic=self._job.topic, incarnation=own.id, begins=begun.p, ends=own.p)
        self._lake.commit(files, archived)
        self._count += sum(map(len, ranges))
        self._files += len(files)
        if self._job.consumer:
            self._cluster.move_cursors(self._job.topic, self._job.consumer, own.p)

    def maintain(self) -> None:
        """Compact and vacuum, as far as that is wished."""
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
        """Hold nothing any more; idempotent."""
        self._hold.release()

    def result(self, seconds: float, *, is_complete: bool) -> JobResult:
        """Sum up."""
        job = self._job
        facts: dict[str, object] = {
            "topic": job.topic,
            "to": self._lake.root,
            "records": self._count,
            "lost": self._lost,
            "files": self._files,
            "seconds": round(seconds, 3),
            **self._maintenance,
        }
        told = f"archived {job.topic} to {self._lake.root}: records {self._count:,}, files {self._files:,}"
        for name, count in (("records lost", self._lost), *self._maintenance.items()):
            told += f", {name.replace('_', ' ')} {count:,}" if count else ""
        if not is_complete:
            told += "; stopped before the end: run it again to go on"
        return JobResult(sentence=told, facts=facts, is_complete=is_complete)


def find_offsets(job: Archive, cluster: Cluster, lake: Lake | None) -> tuple[StreamOffset, StreamOffset, int]:
    """Return from where and up to where to archive, and how many records are lost before that.

    Raises:
        ConflictError: the lake has another incarnation of the topic, or more of it than the topic has.
        TrimmedError: records are gone that were not archived, and the job is not to skip them.
    """
    first = cluster.offsets(job.topic, "earliest")
    ends = cluster.offsets(job.topic, topic_id=first.topic_id)
    incarnation = incarnation_of(cluster.cluster_id, first)
    if lake is not None:
        lake.refresh()
    archived = None if lake is None else lake.archived(job.topic, incarnation, list(ends.offsets))
    begun, lost = begin(first, ends, archived or {}, skips_lost=job.is_skip_lost)
    place, target = (
        StreamOffset(topics={job.topic: TopicOffset(id=incarnation, p=dict(offsets))})
        for offsets in (begun, ends.offsets)
    )
    return place, target, lost


def begin(
    first: TopicOffsets, ends: TopicOffsets, archived: Mapping[int, int], *, skips_lost: bool
) -> tuple[dict[int, int], int]:
    """Return where to go on in each partition, and how many records are lost before that."""
    begun: dict[int, int] = {}
    lost = 0
    for partition, end in ends.offsets.items():
        # One that was added after the question where partitions begin has not lost anything yet.
        first_offset = first.offsets.get(partition, 0)
        place = archived.get(partition, first_offset)
        where = f"{ends.topic!r} partition {partition}"
        if place > end:
            message = (
                f"{where} ends at {end}, but is archived up to {place}: it has lost records, or the archive is wrong"
            )
            raise ConflictError(message, code="archive_ahead")
        if place < first_offset and not skips_lost:
            message = f"{where} begins at {first_offset} by now, and is archived up to {place} only: what lies between"
            raise TrimmedError(f"{message} is gone. Give skip-lost to go on without it", code="trimmed")
        lost += max(0, first_offset - place)
        begun[partition] = max(place, first_offset)
    return begun, lost


def write_range(root: str, options: ReadOptions, offset_range: OffsetRange, *, is_hidden: bool) -> list[LakeFile]:
    """Fetch a range and write it into files of a lake; in a task."""
    batches = arrow_batches(fetch_range(options, offset_range), offset_range, RECORD_COLUMNS, records_max=WRITE_RECORDS)
    return LakeWriter(root, topic=offset_range.topic, partition=offset_range.partition, is_hidden=is_hidden).write(
        batches
    )


def _dry_run(job: Archive, cluster: Cluster) -> JobResult:
    try:
        lake = open_lake(job.to)
    except NotFoundError:
        lake = None
    place, target, lost = find_offsets(job, cluster, lake)
    ranges = ranges_between(place, target)
    count = sum(map(len, ranges))
    told = f"would archive {job.topic} to {job.to}, format {job.format}: records {count:,}"
    facts: dict[str, object] = {
        "topic": job.topic,
        "to": job.to,
        "records": count,
        "lost": lost,
        "ranges": [msgspec.structs.asdict(one) for one in ranges],
    }
    return JobResult(sentence=told, facts=facts)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
