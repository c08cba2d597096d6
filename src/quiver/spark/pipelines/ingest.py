"""Ingest files into a topic: each line or row becomes a record; each file's content is ingested once.

A batch is a set of files, divided among senders; a sender is a task that sends the records of its files in order
through a named producer. The ledger stores the batch before any of it is sent, so a restart sends the same records in
the same order through the same producers, and skips what the partitions already store.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from quiver.client.batching import split_by_key
from quiver.client.sync import Cluster
from quiver.errors import NotFoundError, RequestError
from quiver.spark.connections import Servers, connection
from quiver.spark.offsets import incarnation_of
from quiver.spark.pipelines.file_survey import FileSurvey, Scanner, locate_batch, survey_files
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
from quiver.spark.pipelines.source_files import FileScan, LineFields, SourceFile, find_files, read_records, scan_file
from quiver.spark.publishing import ResumableWriter

BATCH_BYTES: Final = 1 << 30
"""Approximate bytes of files per batch: a stop signal waits for the end of the batch."""
BATCH_FILES_MAX: Final = 1000
PROBLEMS_SHOWN_MAX: Final = 20
SCAN_TASKS_PER_CORE: Final = 4
"""Scan tasks per core: several, so that cores are not idle while the largest file is scanned."""


class Ingest(Job, frozen=True, kw_only=True):
    """Ingest files into a topic."""

    paths: tuple[str, ...]
    topic: str
    key: str = ""
    time: str = ""
    name: str = "ingest"
    is_final: bool = False

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
        survey = self.survey(state, lambda paths, sizes: [self.scanner(sizes)(path) for path in paths])
        sentence = f"would ingest into {self.topic}: files {len(survey.fresh):,}, bytes {survey.size_bytes:,}"
        sentence += describe_problems(survey.problems)
        facts = {"topic": self.topic, **survey.facts()}
        return JobResult(sentence=sentence, facts=facts, is_clean=not survey.problems)

    def survey(self, state: IngestState, look: Scanner) -> FileSurvey:
        """Find what is new in the files."""
        paths, problems = find_files(self.paths)
        return survey_files(paths, state, look, is_final=self.is_final, problems=problems)

    def scanner(self, prefix_sizes: Sequence[int]) -> Callable[[str], FileScan]:
        """Return the function that scans a file; it runs in tasks."""
        return partial(scan_file, prefix_sizes=prefix_sizes, is_final=self.is_final)


class _IngestRun:
    """A running ingest job."""

    def __init__(self, job: Ingest, cluster: Cluster, run: JobRun) -> None:
        self._job, self._run, self._cluster = job, run, cluster
        self._writer = job.writer(cluster)
        self.ledger = IngestLedger(cluster, self._writer)
        self._survey = FileSurvey()
        self._count = self._sent = self._resumed = 0

    def ingest(self) -> bool:
        """Finish the open batch, then ingest new files in batches; return False if the job stops before the end."""
        if self.ledger.state.open_batch is not None:
            self._resumed = sum(map(len, self.ledger.state.open_batch.senders))
            self._send(locate_batch(self.ledger.state.open_batch, find_files(self._job.paths)[0], self._scan))
        self._run.report_progress(JobProgress("scanning files"))
        self._survey = self._job.survey(self.ledger.state, self._scan)
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
            senders = assign_files(files, senders_max, partitions=partitions, state=self.ledger.state)
            self._send(self.ledger.begin(senders, partitions=partitions, fields=fields))
            done_bytes += sum(file.new_bytes for file in files)
        return True

    def _scan(self, paths: Sequence[str], prefix_sizes: Sequence[int]) -> list[FileScan]:
        if not paths:
            return []
        context = self._run.spark.sparkContext
        tasks = min(len(paths), SCAN_TASKS_PER_CORE * context.defaultParallelism)
        found: list[FileScan] = context.parallelize(paths, tasks).map(self._job.scanner(prefix_sizes)).collect()
        return found

    def _send(self, batch: IngestBatch) -> None:
        works = [
            SenderTask(
                name=f"quiver.ingest.{producer_prefix(self._writer)}.{number}",
                files=list(writer),
                bases=dict(self.ledger.state.bases[number]),
                partitions=batch.partitions,
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
            ("files with an incomplete last line", survey.incomplete_count),
        ):
            sentence += f", {name} {count:,}" if count else ""
        if not is_complete:
            sentence += "; stopped before the end: run the same command to resume"
        sentence += describe_problems(survey.problems)
        return JobResult(sentence=sentence, facts=facts, is_complete=is_complete, is_clean=not survey.problems)


def describe_problems(problems: Mapping[str, str]) -> str:
    """Return lines that name the files that were not ingested, and why; empty if there are none."""
    shown = [f"  {path}: {reason}" for path, reason in sorted(problems.items())[:PROBLEMS_SHOWN_MAX]]
    if len(problems) > len(shown):
        shown.append(f"  and {len(problems) - len(shown):,} more: --json has all of them")
    return "\n".join((f"\nnot ingested: files {len(problems):,}", *shown)) if problems else ""


class SenderTask(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one sender task."""

    name: str
    files: list[AssignedFile]
    bases: dict[int, int]
    partitions: int


# -- batches -----------------------------------------------------------------------------------------


def plan_batches(files: Iterable[SourceFile]) -> list[list[SourceFile]]:
    """Group files into batches of bounded size, in order."""
    batches: list[list[SourceFile]] = []
    left_bytes = 0
    for file in files:
        if left_bytes <= 0 or len(batches[-1]) == BATCH_FILES_MAX:
            batches.append([])
            left_bytes = BATCH_BYTES
        batches[-1].append(file)
        left_bytes -= file.new_bytes
    return batches


def assign_files(
    files: Sequence[SourceFile], senders_max: int, *, partitions: int, state: IngestState
) -> tuple[tuple[AssignedFile, ...], ...]:
    """Divide files among senders by size, and among partitions round-robin; grown files stay in their partition."""
    assigned = [
        AssignedFile(file=file, partition=state.partitions.get(file.continues, (state.files + at) % partitions))
        for at, file in enumerate(files)
    ]
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
            for columns in read_records(assigned.file, fields):
                for partition, part in split_by_key(columns, work.partitions):
                    writer.put(assigned.partition if partition is None else partition, part)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return dict(writer.counts), writer.sent_count
