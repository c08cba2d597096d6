"""Ingest files into a topic: every line, or row, a record; each file's content once, whatever happens.

A round takes some files, shared out over lanes; a lane is a task that sends the records of its files, one after the
other, through a named producer. The ledger has the round before any of it is sent, so whoever goes on after a crash
sends the same records in the same order through the same lanes, and the partitions leave out what they have.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec

from quiver.client.chunks import split_by_key
from quiver.client.sync import Cluster
from quiver.errors import ConflictError, NotFoundError, RequestError
from quiver.spark.connections import Servers, connection
from quiver.spark.offsets import incarnation_of
from quiver.spark.pipelines.ingest_ledger import (
    AssignedFile,
    IngestBatch,
    IngestLedger,
    IngestState,
    producer_prefix,
    read_state,
)
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.pipelines.source_files import (
    FileScan,
    LineFields,
    SourceFile,
    check_unchanged,
    find_files,
    read_records,
    scan_file,
)
from quiver.spark.publishing import ResumableWriter

BATCH_BYTES: Final = 1 << 30
"""Bytes of files in one round, about: what a signal to stop waits for."""
BATCH_FILES_MAX: Final = 1000
SCAN_TASKS_PER_CORE: Final = 4
"""Tasks for each core that look at files: enough for none to wait long for the last."""


class Ingest(Job, frozen=True, kw_only=True):
    """Bring files into a topic."""

    paths: tuple[str, ...]
    topic: str
    key: str = ""
    time: str = ""
    name: str = "ingest"

    def __post_init__(self) -> None:
        if not self.paths:
            raise RequestError("name the files or folders to ingest", code="bad_option")

    def run(self, run: JobRun) -> JobResult:
        """Ingest what is new."""
        cluster = connection(self.cluster_servers())
        if self.is_dry_run:
            return self._dry_run(cluster)
        cluster.create_topic(self.topic, exist_ok=True)
        begun_s = time.monotonic()
        work = _IngestRun(self, cluster, run)
        try:
            is_complete = work.ingest()
        finally:
            work.ledger.close()
        return work.result(time.monotonic() - begun_s, is_complete=is_complete)

    def writer(self, cluster: Cluster) -> str:
        """Return what the ingest is known by in the ledger."""
        return f"{self.name}/{self.topic}/{incarnation_of(cluster.cluster_id, cluster.offsets(self.topic, {}))}"

    def _dry_run(self, cluster: Cluster) -> JobResult:
        try:
            state = read_state(cluster, self.writer(cluster))
        except NotFoundError:
            state = IngestState()  # there is no such topic yet
        survey = survey_files(find_files(self.paths), state, _scan_here)
        told = f"would ingest into {self.topic}: files {len(survey.fresh):,}, bytes {survey.size_bytes:,}"
        return JobResult(sentence=told, facts={"topic": self.topic, **survey.facts()})


Scanner = Callable[[Sequence[str], Sequence[int]], list[FileScan]]
"""Looks at files, each with regard to what it begins with at some sizes."""


def _scan_here(paths: Sequence[str], begin_sizes: Sequence[int]) -> list[FileScan]:
    return [scan_file(path, begin_sizes) for path in paths]


class FileSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """Which files are to be ingested, and which not, and why."""

    fresh: list[SourceFile]
    known_count: int
    same_as: dict[str, str]
    """Files with the content of another one, and that one."""

    @property
    def size_bytes(self) -> int:
        """Return how many bytes are new."""
        return sum(file.size_bytes - file.first_byte for file in self.fresh)

    def facts(self) -> dict[str, object]:
        """Return what it says, for programs."""
        return {
            "files": len(self.fresh),
            "bytes": self.size_bytes,
            "files_known": self.known_count,
            "files_same": self.same_as,
        }


class _IngestRun:
    """A job under way."""

    def __init__(self, job: Ingest, cluster: Cluster, run: JobRun) -> None:
        self._job, self._run, self._cluster = job, run, cluster
        self._writer = job.writer(cluster)
        self.ledger = IngestLedger(cluster, self._writer)
        self._survey = FileSurvey(fresh=[], known_count=0, same_as={})
        self._count = self._sent = self._resumed = 0

    def ingest(self) -> bool:
        """Finish what was begun, then ingest what is new, in rounds; tell whether that is done."""
        if self.ledger.state.open_batch is not None:
            self._resumed = sum(map(len, self.ledger.state.open_batch.lanes))
            self._send(self.ledger.state.open_batch, is_resumed=True)
        self._run.report_progress(JobProgress("looking at files"))
        self._survey = survey_files(find_files(self._job.paths), self.ledger.state, self._scan)
        partitions = len(self._cluster.offsets(self._job.topic, "earliest").offsets)
        rounds = plan_batches(self._survey.fresh)
        fields = LineFields(self._job.key, self._job.time)
        done_bytes = 0
        for files in rounds:
            if self._run.is_stopping:
                return False
            self._run.report_progress(
                JobProgress(f"ingesting into {self._job.topic}", done_bytes, self._survey.size_bytes, "byte")
            )
            lanes_max = self._run.spark.sparkContext.defaultParallelism
            lanes = assign_files(files, lanes_max, partitions=partitions, turn=self.ledger.state.files)
            self._send(self.ledger.begin(lanes, partitions=partitions, fields=fields), is_resumed=False)
            done_bytes += sum(file.size_bytes - file.first_byte for file in files)
        return True

    def _scan(self, paths: Sequence[str], begin_sizes: Sequence[int]) -> list[FileScan]:
        if not paths:
            return []
        context = self._run.spark.sparkContext
        look = partial(scan_file, begin_sizes=begin_sizes)
        tasks = min(len(paths), SCAN_TASKS_PER_CORE * context.defaultParallelism)
        found: list[FileScan] = context.parallelize(paths, tasks).map(look).collect()
        return found

    def _send(self, round_: IngestBatch, *, is_resumed: bool) -> None:
        works = [
            SenderTask(
                name=f"quiver.ingest.{producer_prefix(self._writer)}.{number}",
                files=list(writer),
                bases=dict(self.ledger.state.bases[number]),
                partitions=round_.partitions,
                is_resumed=is_resumed,
            )
            for number, writer in enumerate(round_.lanes)
        ]
        send = partial(send_files, self._job.cluster_servers(), self._job.topic, round_.fields)
        sent = self._run.spark.sparkContext.parallelize(works, len(works)).map(send).collect()
        self.ledger.end(tuple(counts for counts, _ in sent))
        self._count += sum(sum(counts.values()) for counts, _ in sent)
        self._sent += sum(number for _, number in sent)

    def result(self, seconds: float, *, is_complete: bool) -> JobResult:
        """Sum up."""
        survey, job = self._survey, self._job
        facts = {
            "topic": job.topic,
            **survey.facts(),
            "files_resumed": self._resumed,
            "records": self._count,
            "sent": self._sent,
            "seconds": round(seconds, 3),
        }
        told = f"ingested into {job.topic}: files {len(survey.fresh):,}, records {self._count:,}"
        for name, count in (
            ("files finished that were begun before", self._resumed),
            ("files known", survey.known_count),
            ("files with the content of another", len(survey.same_as)),
        ):
            told += f", {name} {count:,}" if count else ""
        if not is_complete:
            told += "; stopped before the end: run it again to go on"
        return JobResult(sentence=told, facts=facts, is_complete=is_complete)


class SenderTask(msgspec.Struct, frozen=True, kw_only=True):
    """What one task sends."""

    name: str
    files: list[AssignedFile]
    bases: dict[int, int]
    partitions: int
    is_resumed: bool


# -- what is new -------------------------------------------------------------------------------------


def survey_files(paths: Iterable[str], state: IngestState, look: Scanner) -> FileSurvey:
    """Return which files are new, by a look at those that are not as they were when they were ingested."""
    changed, known_count = [], 0
    for path in paths:
        if is_in_place(state.by_path.get(path)):
            known_count += 1
        elif os.path.getsize(path):
            changed.append(path)
    lost = [known for known in state.by_path.values() if not is_in_place(known)] if changed else []
    looks = look(changed, [known.size_bytes for known in lost])
    # What a file has grown from, or what was renamed: unless that is still where it was.
    there = {found.file.path for found in looks if starts_with(found, state.by_path.get(found.file.path))}
    moved = [known for known in lost if known.path not in there]
    fresh: list[SourceFile] = []
    same_as: dict[str, str] = {}
    digests = dict(state.digests)
    for found in looks:
        file, own = found.file, state.by_path.get(found.file.path)
        if own is not None and own.digest == file.digest:
            known_count += 1
        elif file.digest in digests:
            same_as[file.path] = digests[file.digest]
        else:
            digests[file.digest] = file.path
            fresh.append(continued(found, [own] if own is not None and file.path in there else moved))
    return FileSurvey(fresh=fresh, known_count=known_count, same_as=same_as)


def is_in_place(known: SourceFile | None) -> bool:
    """Tell whether a file is just as it was when it was ingested."""
    if known is None:
        return False
    try:
        status = os.stat(known.path)
    except OSError:
        return False
    return (known.size_bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns)


def starts_with(found: FileScan, known: SourceFile | None) -> bool:
    """Tell whether a file begins with what another one held."""
    begin = None if known is None else found.begins.get(known.size_bytes)
    return begin is not None and known is not None and begin.digest == known.digest


def continued(found: FileScan, candidates: Iterable[SourceFile]) -> SourceFile:
    """Return a file from where it goes on behind what was ingested of it; as a whole, if nothing was.

    Raises:
        ConflictError: it has grown in a way that cannot be continued (`file_grown`).
    """
    file = found.file
    known = max(
        (one for one in candidates if starts_with(found, one)), key=lambda known: known.size_bytes, default=None
    )
    if known is None:
        return file
    if file.format == "parquet" or file.compression:
        message = f"{file.path} has grown since it was ingested, which only plain files of lines may do"
        raise ConflictError(message, code="file_grown")
    if not found.begins[known.size_bytes].ends_line:
        message = f"{file.path} has grown since it was ingested, in the middle of a line that was its last one then"
        raise ConflictError(message, code="file_grown")
    return msgspec.structs.replace(file, first_byte=known.size_bytes)


def plan_batches(files: Iterable[SourceFile]) -> list[list[SourceFile]]:
    """Return files in rounds of a bounded size, in order."""
    rounds: list[list[SourceFile]] = []
    left_bytes = 0
    for file in files:
        if left_bytes <= 0 or len(rounds[-1]) == BATCH_FILES_MAX:
            rounds.append([])
            left_bytes = BATCH_BYTES
        rounds[-1].append(file)
        left_bytes -= file.size_bytes - file.first_byte
    return rounds


def assign_files(
    files: Sequence[SourceFile], lanes_max: int, *, partitions: int, turn: int
) -> tuple[tuple[AssignedFile, ...], ...]:
    """Share files out over lanes by their size, and over partitions in turn."""
    placed = [AssignedFile(file=file, partition=(turn + at) % partitions) for at, file in enumerate(files)]
    loads = [(0, number) for number in range(min(lanes_max, len(files)))]
    shared: list[list[AssignedFile]] = [[] for _ in loads]
    for one in sorted(placed, key=lambda one: -one.file.size_bytes):
        load, number = heapq.heappop(loads)
        shared[number].append(one)
        heapq.heappush(loads, (load + one.file.size_bytes, number))
    return tuple(tuple(sorted(writer, key=lambda one: one.file.path)) for writer in shared)


# -- in tasks ----------------------------------------------------------------------------------------


def send_files(servers: Servers, topic: str, fields: LineFields, work: SenderTask) -> tuple[dict[int, int], int]:
    """Send what the topic does not have of a lane's records; return how many they are by partition, and those sent."""
    writer = ResumableWriter(connection(servers), topic, work.name, work.bases)
    try:
        for placed in work.files:
            if work.is_resumed:
                check_unchanged(placed.file)
            for columns in read_records(placed.file, fields):
                for partition, part in split_by_key(columns, work.partitions):
                    writer.put(placed.partition if partition is None else partition, part)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return dict(writer.counts), writer.sent_count
