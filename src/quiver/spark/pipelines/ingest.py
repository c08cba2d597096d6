"""Ingest files into a topic: each line or row becomes a record; each file's content is ingested once.

A batch is a set of files, divided among senders; a sender is a task that sends the records of its files in order
through a named producer. The ledger stores the batch before any of it is sent, so a restart sends the same records in
the same order through the same producers, and skips what the partitions already store.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec

from quiver.client.batching import split_by_key
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
from quiver.spark.pipelines.place import parse_path
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
"""Approximate bytes of files per batch: a stop signal waits for the end of the batch."""
BATCH_FILES_MAX: Final = 1000
SCAN_TASKS_PER_CORE: Final = 4
"""Scan tasks per core: several, so that cores are not idle while the largest file is scanned."""


class Ingest(Job, frozen=True, kw_only=True):
    """Ingest files into a topic."""

    paths: tuple[str, ...]
    topic: str
    key: str = ""
    time: str = ""
    name: str = "ingest"

    def __post_init__(self) -> None:
        if not self.paths:
            raise RequestError("no files given: name the files or directories to ingest", code="bad_option")
        for path in self.paths:
            parse_path(path, option="path")

    def run(self, run: JobRun) -> JobResult:
        """Ingest new files, and new content of files that have grown."""
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
        """Return the key of this ingest in the ledger."""
        return f"{self.name}/{self.topic}/{incarnation_of(cluster.cluster_id, cluster.offsets(self.topic, {}))}"

    def _dry_run(self, cluster: Cluster) -> JobResult:
        try:
            state = read_state(cluster, self.writer(cluster))
        except NotFoundError:
            state = IngestState()  # the topic does not exist yet
        survey = survey_files(find_files(self.paths), state, _scan_here)
        sentence = f"would ingest into {self.topic}: files {len(survey.fresh):,}, bytes {survey.size_bytes:,}"
        return JobResult(sentence=sentence, facts={"topic": self.topic, **survey.facts()})


Scanner = Callable[[Sequence[str], Sequence[int]], list[FileScan]]
"""Scans files; computes digests of their prefixes of the given sizes."""


def _scan_here(paths: Sequence[str], prefix_sizes: Sequence[int]) -> list[FileScan]:
    return [scan_file(path, prefix_sizes) for path in paths]


class FileSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The files to ingest, and the files that are skipped."""

    fresh: list[SourceFile]
    known_count: int
    same_as: dict[str, str]
    """Files with the same content as another one, and that other path."""

    @property
    def size_bytes(self) -> int:
        """Return the number of new bytes."""
        return sum(file.size_bytes - file.first_byte for file in self.fresh)

    def facts(self) -> dict[str, object]:
        """Return it as fields of the JSON result."""
        return {
            "files": len(self.fresh),
            "bytes": self.size_bytes,
            "files_known": self.known_count,
            "files_same": self.same_as,
        }


class _IngestRun:
    """A running ingest job."""

    def __init__(self, job: Ingest, cluster: Cluster, run: JobRun) -> None:
        self._job, self._run, self._cluster = job, run, cluster
        self._writer = job.writer(cluster)
        self.ledger = IngestLedger(cluster, self._writer)
        self._survey = FileSurvey(fresh=[], known_count=0, same_as={})
        self._count = self._sent = self._resumed = 0

    def ingest(self) -> bool:
        """Finish the open batch, then ingest new files in batches; return False if the job stops before the end."""
        if self.ledger.state.open_batch is not None:
            self._resumed = sum(map(len, self.ledger.state.open_batch.senders))
            self._send(self.ledger.state.open_batch, is_resumed=True)
        self._run.report_progress(JobProgress("scanning files"))
        self._survey = survey_files(find_files(self._job.paths), self.ledger.state, self._scan)
        partitions = len(self._cluster.offsets(self._job.topic, "earliest").offsets)
        batches = plan_batches(self._survey.fresh)
        fields = LineFields(self._job.key, self._job.time)
        done_bytes = 0
        for files in batches:
            if self._run.is_stopping:
                return False
            self._run.report_progress(
                JobProgress(f"ingesting into {self._job.topic}", done_bytes, self._survey.size_bytes, "byte")
            )
            senders_max = self._run.spark.sparkContext.defaultParallelism
            senders = assign_files(files, senders_max, partitions=partitions, first_partition=self.ledger.state.files)
            self._send(self.ledger.begin(senders, partitions=partitions, fields=fields), is_resumed=False)
            done_bytes += sum(file.size_bytes - file.first_byte for file in files)
        return True

    def _scan(self, paths: Sequence[str], prefix_sizes: Sequence[int]) -> list[FileScan]:
        if not paths:
            return []
        context = self._run.spark.sparkContext
        look = partial(scan_file, prefix_sizes=prefix_sizes)
        tasks = min(len(paths), SCAN_TASKS_PER_CORE * context.defaultParallelism)
        found: list[FileScan] = context.parallelize(paths, tasks).map(look).collect()
        return found

    def _send(self, batch: IngestBatch, *, is_resumed: bool) -> None:
        works = [
            SenderTask(
                name=f"quiver.ingest.{producer_prefix(self._writer)}.{number}",
                files=list(writer),
                bases=dict(self.ledger.state.bases[number]),
                partitions=batch.partitions,
                is_resumed=is_resumed,
            )
            for number, writer in enumerate(batch.senders)
        ]
        send = partial(send_files, self._job.cluster_servers(), self._job.topic, batch.fields)
        sent = self._run.spark.sparkContext.parallelize(works, len(works)).map(send).collect()
        self.ledger.end(tuple(counts for counts, _ in sent))
        self._count += sum(sum(counts.values()) for counts, _ in sent)
        self._sent += sum(number for _, number in sent)

    def result(self, seconds: float, *, is_complete: bool) -> JobResult:
        """Return the result of the job."""
        survey, job = self._survey, self._job
        facts = {
            "topic": job.topic,
            **survey.facts(),
            "files_resumed": self._resumed,
            "records": self._count,
            "sent": self._sent,
            "seconds": round(seconds, 3),
        }
        sentence = f"ingested into {job.topic}: files {len(survey.fresh):,}, records {self._count:,}"
        for name, count in (
            ("files resumed from an interrupted run", self._resumed),
            ("files unchanged", survey.known_count),
            ("duplicate files", len(survey.same_as)),
        ):
            sentence += f", {name} {count:,}" if count else ""
        if not is_complete:
            sentence += "; stopped before the end: run the same command to resume"
        return JobResult(sentence=sentence, facts=facts, is_complete=is_complete)


class SenderTask(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one sender task."""

    name: str
    files: list[AssignedFile]
    bases: dict[int, int]
    partitions: int
    is_resumed: bool


# -- what is new -------------------------------------------------------------------------------------


def survey_files(paths: Iterable[str], state: IngestState, look: Scanner) -> FileSurvey:
    """Find new and grown files; scan only files whose size or modification time changed."""
    changed, known_count = [], 0
    for path in paths:
        if is_in_place(state.by_path.get(path)):
            known_count += 1
        elif os.path.getsize(path):
            changed.append(path)
    lost = [known for known in state.by_path.values() if not is_in_place(known)] if changed else []
    looks = look(changed, [known.size_bytes for known in lost])
    # Ingested content whose path is gone or changed: a scanned file may be its renamed or grown copy.
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
    """Return whether a file has the size and modification time that it had when it was ingested."""
    if known is None:
        return False
    try:
        status = os.stat(known.path)
    except OSError:
        return False
    return (known.size_bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns)


def starts_with(found: FileScan, known: SourceFile | None) -> bool:
    """Return whether a file starts with the ingested content of another."""
    begin = None if known is None else found.prefixes.get(known.size_bytes)
    return begin is not None and known is not None and begin.digest == known.digest


def continued(found: FileScan, candidates: Iterable[SourceFile]) -> SourceFile:
    """Return a file with `first_byte` set after the content that was already ingested; 0 if there is none.

    Raises:
        ConflictError: the file has grown in a way that cannot be resumed (`file_grown`).
    """
    file = found.file
    known = max(
        (one for one in candidates if starts_with(found, one)), key=lambda known: known.size_bytes, default=None
    )
    if known is None:
        return file
    if file.format == "parquet" or file.compression:
        message = f"{file.path} has grown since it was ingested; only uncompressed text files can be resumed"
        raise ConflictError(message, code="file_grown")
    if not found.prefixes[known.size_bytes].ends_line:
        message = f"{file.path} has grown since it was ingested, but its last ingested line was incomplete"
        raise ConflictError(message, code="file_grown")
    return msgspec.structs.replace(file, first_byte=known.size_bytes)


def plan_batches(files: Iterable[SourceFile]) -> list[list[SourceFile]]:
    """Group files into batches of bounded size, in order."""
    batches: list[list[SourceFile]] = []
    left_bytes = 0
    for file in files:
        if left_bytes <= 0 or len(batches[-1]) == BATCH_FILES_MAX:
            batches.append([])
            left_bytes = BATCH_BYTES
        batches[-1].append(file)
        left_bytes -= file.size_bytes - file.first_byte
    return batches


def assign_files(
    files: Sequence[SourceFile], senders_max: int, *, partitions: int, first_partition: int
) -> tuple[tuple[AssignedFile, ...], ...]:
    """Divide files among senders by size, and among partitions round-robin."""
    assigned = [AssignedFile(file=file, partition=(first_partition + at) % partitions) for at, file in enumerate(files)]
    loads = [(0, number) for number in range(min(senders_max, len(files)))]
    shared: list[list[AssignedFile]] = [[] for _ in loads]
    for one in sorted(assigned, key=lambda one: -one.file.size_bytes):
        load, number = heapq.heappop(loads)
        shared[number].append(one)
        heapq.heappush(loads, (load + one.file.size_bytes, number))
    return tuple(tuple(sorted(writer, key=lambda one: one.file.path)) for writer in shared)


# -- in tasks ----------------------------------------------------------------------------------------


def send_files(servers: Servers, topic: str, fields: LineFields, work: SenderTask) -> tuple[dict[int, int], int]:
    """Send a sender's records that the topic does not store; return record counts by partition and the number sent."""
    writer = ResumableWriter(connection(servers), topic, work.name, work.bases)
    try:
        for assigned in work.files:
            if work.is_resumed:
                check_unchanged(assigned.file)
            for columns in read_records(assigned.file, fields):
                for partition, part in split_by_key(columns, work.partitions):
                    writer.put(assigned.partition if partition is None else partition, part)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return dict(writer.counts), writer.sent_count
