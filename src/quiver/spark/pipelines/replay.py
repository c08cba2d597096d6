"""Replay an archive into a topic: each record once, into the partition it came from, in order.

A batch covers a range of offsets, one task per partition. The records to send follow from the archive and the
selection alone, and the topic's partitions report how many of them they store. So the same replay run again, after a
crash or when more was archived, adds only what is missing. Another `name` is another replay.

Selections: offsets are `FIRST:END`, half-open, both optional: `100:200`, `:50`, `100:`; for all partitions, or by
partition: `0=100:200,2=:50`, which excludes all others. Times are `FROM/TO`, half-open, both optional, ISO 8601, UTC by
default: `2026-11-15T10:00/2026-11-15T12:00`, `2026-11-15T10:00/`.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from quiver.client.sync import Cluster
from quiver.errors import ConflictError, NotFoundError, RequestError
from quiver.spark.connections import Servers, connection
from quiver.spark.offsets import incarnation_of
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.pipelines.lake import RECORD_COLUMNS, Lake, LakeFile, open_lake, read_in_order
from quiver.spark.pipelines.place import Place, parse_place
from quiver.spark.publishing import ResumableWriter

OFFSET_MAX: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RANGE: Final = re.compile(r"(?:(\d+)=)?(\d*):(\d*)")
_HOUR_US: Final = 3_600_000_000

Bounds = tuple[int, int]
"""A half-open range."""
EVERYTHING: Final[Bounds] = (0, OFFSET_MAX)


class RecordSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Which archived records to replay: by offsets, by time, or all."""

    every_partition: Bounds | None = EVERYTHING
    by_partition: dict[int, Bounds] = {}
    times_us: Bounds | None = None

    def offsets(self, partition: int) -> Bounds | None:
        """Return the selected offsets of a partition; None if there are none."""
        return self.by_partition.get(partition, self.every_partition)

    def files(self, files: Iterable[LakeFile]) -> list[LakeFile]:
        """Return the files that may contain selected records."""
        return [file for file in files if self._may_hold(file)]

    def records(self, batch: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """Return the selected records of a batch that is sorted by offset."""
        bounds = self.offsets(partition)
        if bounds is None:
            return batch.slice(0, 0)
        first, end = np.searchsorted(batch["offset"].to_numpy(), bounds).tolist()
        batch = batch.slice(first, end - first)
        if self.times_us is None:
            return batch
        times = batch["timestamp"].cast(pa.int64()).to_numpy()
        return batch.filter(pa.array((times >= self.times_us[0]) & (times < self.times_us[1])))

    def _may_hold(self, file: LakeFile) -> bool:
        bounds = self.offsets(file.partition)
        if bounds is None or file.last_offset < bounds[0] or file.first_offset >= bounds[1]:
            return False
        if self.times_us is None:
            return True
        hour_us = int(np.datetime64(file.hour, "us").astype(np.int64))
        return hour_us + _HOUR_US > self.times_us[0] and hour_us < self.times_us[1]


def select(offsets: str, time: str) -> RecordSelection:
    """Parse the options `offsets` and `time`; raise `RequestError` (`bad_option`) if one is invalid."""
    every, by_partition = _parse_offsets(offsets) if offsets else (EVERYTHING, {})
    return RecordSelection(
        every_partition=every, by_partition=by_partition, times_us=_parse_time(time) if time else None
    )


def _parse_offsets(text: str) -> tuple[Bounds | None, dict[int, Bounds]]:
    every: Bounds | None = None
    by_partition: dict[int, Bounds] = {}
    parts = text.split(",")
    for part in parts:
        found = _RANGE.fullmatch(part.strip())
        if not found or (found[1] is None and len(parts) > 1):
            raise _bad(f"offsets must be FIRST:END, or a comma-separated list of PARTITION=FIRST:END, not {text!r}")
        bounds = (int(found[2] or 0), int(found[3] or OFFSET_MAX))
        if bounds[0] >= bounds[1]:
            raise _bad(f"offsets {part.strip()} is an empty range: END must be greater than FIRST")
        if found[1] is None:
            every = bounds
        else:
            by_partition[int(found[1])] = bounds
    return every, by_partition


def _parse_time(text: str) -> Bounds:
    begin, is_there, end = text.partition("/")
    if not is_there:
        raise _bad(f"time must be FROM/TO, such as 2026-11-15T10:00/2026-11-15T12:00, not {text!r}")
    bounds = (_to_us(begin, -OFFSET_MAX), _to_us(end, OFFSET_MAX))
    if bounds[0] >= bounds[1]:
        raise _bad(f"time {text} is an empty range: TO must be later than FROM")
    return bounds


def _to_us(text: str, default: int) -> int:
    if not text.strip():
        return default
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _bad(f"{text!r} is not an ISO 8601 time such as 2026-11-15T10:00") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")


BATCH_OFFSETS: Final = 1_000_000
"""Offsets of each partition per batch."""
_SENT_COLUMNS: Final = RECORD_COLUMNS[1:]


class Replay(Job, frozen=True, kw_only=True):
    """Replay archived records into a topic."""

    from_: str
    endpoint: str = ""
    topic: str
    source: str = ""
    offsets: str = ""
    time: str = ""
    name: str = "replay"
    is_same: bool = False
    is_more_partitions: bool = False

    def __post_init__(self) -> None:
        if self.offsets and self.time:
            raise RequestError("set only one of offsets, time", code="bad_option")
        select(self.offsets, self.time)
        self.lake_place()

    def lake_place(self) -> Place:
        """Return the place of the lake; raise `RequestError` if the option is invalid."""
        return parse_place(self.from_, option="from", endpoint=self.endpoint)

    def run(self, run: JobRun) -> JobResult:
        """Replay archived records that the topic does not store yet."""
        cluster = connection(self.cluster_servers())
        lake = open_lake(self.lake_place())
        selection = select(self.offsets, self.time)
        source = find_source(self, lake)
        files = selection.files(lake.files(source))
        partitions = lake.partition_count(source)
        target = find_partitions(self, cluster, lake)
        if target is not None:
            self._check_partitions(source, partitions, target)
        if self.is_dry_run:
            return self._summary(source, sum(file.count for file in files), None)
        cluster.create_topic(self.topic, partitions=target or partitions, exist_ok=True)
        begun_s = time.monotonic()
        work = _ReplayRun(self, lake, producer_name_of(self, lake.identity, source), run)
        is_complete = work.replay(files, selection)
        result = self._summary(source, work.count, work.sent_count, is_complete=is_complete)
        return msgspec.structs.replace(result, facts={**result.facts, "seconds": round(time.monotonic() - begun_s, 3)})

    def _check_partitions(self, source: str, archived: int, target: int) -> None:
        """Raise if the topic's keys would not hash to the partitions of the archived records."""
        message = f"topic {self.topic!r} has {target} partitions, but the archive of {source!r} has {archived}"
        if target < archived:
            raise ConflictError(f"{message}: add partitions, or replay into another topic", code="too_few_partitions")
        if target > archived and not self.is_more_partitions:
            message += ": new records of a key would go to another partition than its replayed ones. Nothing was sent"
            raise ConflictError(f"{message}; replay into another topic, or set more-partitions", code="more_partitions")

    def _summary(self, source: str, count: int, sent: int | None, *, is_complete: bool = True) -> JobResult:
        facts: dict[str, object] = {"from": self.from_, "source": source, "topic": self.topic, "records": count}
        if sent is None:
            sentence = f"would replay {source} from {self.from_} into {self.topic}: records at most {count:,}"
            return JobResult(sentence=sentence, facts=facts)
        facts |= {"sent": sent, "there_before": count - sent}
        sentence = f"replayed {source} from {self.from_} into {self.topic}: records sent {sent:,}"
        if count > sent:
            sentence += f", already there {count - sent:,}"
        if not is_complete:
            sentence += "; stopped before the end: run the same command to resume"
        return JobResult(sentence=sentence, facts=facts, is_complete=is_complete)


class ReplayTask(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one task: the archived records of one partition in a range of offsets."""

    partition: int
    files: list[LakeFile]
    selection: RecordSelection
    base: int
    """Number of the replay's records before them in the partition."""


class _ReplayRun:
    """A running replay job."""

    def __init__(self, job: Replay, lake: Lake, producer_name: str, run: JobRun) -> None:
        self._job, self._lake, self._producer_name, self._run = job, lake, producer_name, run
        self._bases: Counter[int] = Counter()
        self.sent_count = 0

    @property
    def count(self) -> int:
        """Return the number of records confirmed to be in the topic."""
        return self._bases.total()

    def replay(self, files: list[LakeFile], selection: RecordSelection) -> bool:
        """Replay in batches; return False if the job stops before the end."""
        total = sum(file.count for file in files)
        for tasks in plan_batches(files, selection):
            if self._run.is_stopping:
                return False
            self._run.report_progress(JobProgress(f"replaying into {self._job.topic}", self.count, total))
            self._run_batch(tasks)
        return True

    def _run_batch(self, tasks: list[ReplayTask]) -> None:
        placed = [msgspec.structs.replace(task, base=self._bases[task.partition]) for task in tasks]
        send = partial(send_task, self._lake.place, self._job.cluster_servers(), self._job.topic, self._producer_name)
        for partition, count, sent in self._run.spark.sparkContext.parallelize(placed, len(placed)).map(send).collect():
            self._bases[partition] += count
            self.sent_count += sent


def find_source(job: Replay, lake: Lake) -> str:
    """Return the archived topic to replay: `source`, else the target's name, else the only topic in the lake."""
    topics = lake.topics()
    if job.source:
        found = job.source if job.source in topics else None
    else:
        found = job.topic if job.topic in topics else topics[0] if len(topics) == 1 else None
    if found is None:
        message = (
            f"cannot determine the archived topic: the lake {lake.place} has {', '.join(topics) or 'none'}. "
            "Set source to one of them"
        )
        raise NotFoundError(message, code="unknown_source")
    return found


def find_partitions(job: Replay, cluster: Cluster, lake: Lake) -> int | None:
    """Return the partition count of the target topic; None if it does not exist.

    Raises:
        ConflictError: the target is the topic that was archived (`same_topic`), and `same` is not set.
    """
    try:
        found = cluster.offsets(job.topic, "earliest")
    except NotFoundError:
        return None
    try:
        archived = lake.archived(job.topic, incarnation_of(cluster.cluster_id, found), list(found.offsets))
    except ConflictError:
        archived = None  # another topic of that name
    if archived is not None and not job.is_same:
        message = f"topic {job.topic!r} is the topic that was archived: records that it still has would be duplicated"
        raise ConflictError(f"{message}. Replay into another topic, or set same", code="same_topic")
    return len(found.offsets)


def producer_name_of(job: Replay, identity: str, source: str) -> str:
    """Return the producer name of a replay: the same for the same selection, however far the archive has grown."""
    what = "\0".join((job.name, identity, source, job.offsets, job.time))
    return f"quiver.replay.{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}"


def plan_batches(files: list[LakeFile], selection: RecordSelection) -> Iterator[list[ReplayTask]]:
    """Yield batches: for each partition with records left, the next range of offsets."""
    by_partition: dict[int, list[LakeFile]] = defaultdict(list)
    for file in files:
        by_partition[file.partition].append(file)
    begin = {part: min(file.first_offset for file in own) for part, own in by_partition.items()}
    end = {part: max(file.last_offset for file in own) + 1 for part, own in by_partition.items()}
    while left := [part for part in by_partition if begin[part] < end[part]]:
        batch = []
        for part in left:
            bounds = (begin[part], begin[part] + BATCH_OFFSETS)
            begin[part] = bounds[1]
            narrowed = _narrow(selection, part, bounds)
            if narrowed is not None and (own := narrowed.files(by_partition[part])):
                batch.append(ReplayTask(partition=part, files=own, selection=narrowed, base=0))
        if batch:
            yield batch


def _narrow(selection: RecordSelection, partition: int, task: tuple[int, int]) -> RecordSelection | None:
    bounds = selection.offsets(partition)
    if bounds is None or (first := max(bounds[0], task[0])) >= (end := min(bounds[1], task[1])):
        return None
    return msgspec.structs.replace(selection, every_partition=None, by_partition={partition: (first, end)})


def send_task(place: Place, servers: Servers, topic: str, producer_name: str, task: ReplayTask) -> tuple[int, int, int]:
    """Send the task's records that the topic does not store; return partition, record count and number sent."""
    writer = ResumableWriter(
        connection(servers), topic, f"{producer_name}.{task.partition}", {task.partition: task.base}
    )
    try:
        for batch in read_in_order(place, task.files, task.selection.offsets(task.partition)):
            chosen = task.selection.records(batch, task.partition)
            if len(chosen):
                writer.put(task.partition, {name: chosen[name] for name in _SENT_COLUMNS})
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return task.partition, writer.counts[task.partition], writer.sent_count
