"""Audit a topic: prove that all sources have the same records, or name the records that differ.

The driver plans, tasks compute digests, the driver compares them, and tasks compare single records in the few segments
that differ. The content of most replicas is the reference, since the leader itself may be wrong. The plan reads client
statements first, then the archive, then end offsets: later reads can only see more, so nothing looks missing that was
written meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Final, TypeVar
from uuid import uuid4

from quiver.client.sync import Cluster
from quiver.errors import QuiverError, RequestError
from quiver.record.digest import Digest
from quiver.spark.connections import Servers, connection
from quiver.spark.offsets import incarnation_of
from quiver.spark.pipelines.audit_comparison import RecordFault, check_runs, choose_reference, find_differences
from quiver.spark.pipelines.audit_plan import LEADER, ArchivedPart, PartitionPlan, plan_edges, plan_pieces
from quiver.spark.pipelines.audit_report import AuditFinding, AuditReport, PartitionSummary, SourceSummary
from quiver.spark.pipelines.audit_sources import (
    AuditSource,
    AuditVerdict,
    Mismatch,
    Piece,
    choose_clients,
    digest_piece,
    examine,
    read_statements,
)
from quiver.spark.pipelines.job import Job, JobProgress, JobResult, JobRun
from quiver.spark.pipelines.lake import open_lake
from quiver.spark.pipelines.place import Place, parse_output_file, parse_place

MISMATCHES_MAX: Final = 500
"""Maximum segments that are compared record by record; further ones are reported as a whole."""
HOLD_S: Final = 600.0
"""Duration of the hold on the topic; renewed before each group of tasks, which takes less."""
TASKS_PER_CORE: Final = 4
"""Tasks per core in one group; the stop signal is checked between groups."""

T = TypeVar("T")
U = TypeVar("U")


class Audit(Job, frozen=True, kw_only=True):
    """Prove that all sources have the same records of a topic, or name those that differ."""

    topic: str
    archive: str = ""
    endpoint: str = ""
    source: str = ""
    consumers: str = ""
    report: str = ""

    def __post_init__(self) -> None:
        self.lake_place()
        if self.report:
            parse_output_file(self.report, option="report")
        if self.source and not self.archive:
            raise RequestError("source needs archive: it names a topic in the archive", code="bad_option")

    def lake_place(self) -> Place | None:
        """Return the place of the archive, None without one; raise `RequestError` if the option is invalid."""
        if not self.archive and self.endpoint:
            raise RequestError("endpoint needs archive: it is the server of an object store", code="bad_option")
        return parse_place(self.archive, option="archive", endpoint=self.endpoint) if self.archive else None

    def run(self, run: JobRun) -> JobResult:
        """Audit the current content of the topic."""
        begun_s = time.monotonic()
        servers = self.cluster_servers()
        cluster = connection(servers)
        with _holding(cluster, self.topic) as hold:
            plans, unreachable = make_plans(self, cluster)
            if self.is_dry_run:
                return _dry_run(self, plans)
            work = _AuditRun(self.topic, servers, plans, run, hold)
            findings = [*unreachable, *work.examine_all()]
        report = AuditReport(
            topic=self.topic,
            archive=self.archive,
            partitions=tuple(work.summaries()),
            sources=tuple(_summarise(plans, findings)),
            findings=tuple(findings),
            is_complete=not run.is_stopping,
            seconds=round(time.monotonic() - begun_s, 3),
        )
        if self.report:
            with open(parse_output_file(self.report, option="report"), "w", encoding="utf-8") as file:
                file.write(report.to_markdown())
        return JobResult(
            sentence=report.to_text(),
            facts=report.to_facts(),
            is_clean=not findings,
            is_complete=report.is_complete,
        )


# -- planning ----------------------------------------------------------------------------------------


@contextmanager
def _holding(cluster: Cluster, topic: str) -> Iterator[Callable[[], None]]:
    """Hold the topic against retention; yield the function that renews the hold."""
    found = cluster.offsets(topic, "earliest")
    name = f"audit-{uuid4().hex[:8]}"

    def hold() -> None:
        cluster.hold(topic, name, found.offsets, lasting=HOLD_S, owner="quiver pipeline audit", topic_id=found.topic_id)

    hold()
    try:
        yield hold
    finally:
        with suppress(QuiverError):  # the hold expires; an earlier error is more important
            cluster.release_hold(name)


def make_plans(job: Audit, cluster: Cluster) -> tuple[list[PartitionPlan], list[AuditFinding]]:
    """Return the plan of each partition, and findings for replicas on nodes that are down."""
    found = cluster.offsets(job.topic, "earliest")
    consumers = tuple(part.strip() for part in job.consumers.split(",") if part.strip())
    stated = choose_clients(read_statements(cluster, found.topic_id), consumers, job.topic)
    archived = _find_archived(job, incarnation_of(cluster.cluster_id, found), list(found.offsets))
    ends = cluster.offsets(job.topic, "latest", topic_id=found.topic_id)
    alive = {node.node for node in cluster.status().nodes if node.is_alive}
    plans: list[PartitionPlan] = []
    findings: list[AuditFinding] = []
    for own in cluster.describe_topic(job.topic).partitions:
        if own.partition not in found.offsets or own.partition not in ends.offsets:
            continue  # the partition was added meanwhile
        first, end = found.offsets[own.partition], ends.offsets[own.partition]
        runs = {source: by_partition.get(own.partition, []) for source, by_partition in stated.items()}
        part = archived.get(own.partition)
        archived_end = None if part is None else part.end_offset
        plans.append(
            PartitionPlan(
                topic=job.topic,
                topic_id=found.topic_id,
                partition=own.partition,
                edges=plan_edges(first, end, archived_end=archived_end, runs=list(runs.values())),
                nodes=tuple(sorted(alive.intersection(own.replicas), key=lambda node: (node != own.leader, node))),
                archived=part,
                runs=runs,
            )
        )
        for node in sorted(set(own.replicas) - alive):
            fault = RecordFault(kind="unreachable", offset=first, end_offset=end, detail="the node does not respond")
            findings.append(
                AuditFinding(source=str(AuditSource("replica", str(node))), partition=own.partition, fault=fault)
            )
    return plans, findings


def _find_archived(job: Audit, incarnation: str, partitions: Sequence[int]) -> dict[int, ArchivedPart]:
    place = job.lake_place()
    if place is None:
        return {}
    lake = open_lake(place)
    files = lake.files(job.source or job.topic)
    if job.source:  # another topic or incarnation: its files alone tell its end
        ends = {
            part: max((file.last_offset for file in files if file.partition == part), default=-1) + 1
            for part in partitions
        }
    else:
        ends = lake.archived(job.topic, incarnation, partitions) or {}
    source = AuditSource("archive", lake.place.url)
    return {
        partition: ArchivedPart(
            source=source,
            place=lake.place,
            end_offset=ends.get(partition, 0),
            files=tuple(file for file in files if file.partition == partition),
        )
        for partition in partitions
    }


# -- comparing ---------------------------------------------------------------------------------------


class _AuditRun:
    """A running audit."""

    def __init__(
        self, topic: str, servers: Servers, plans: Sequence[PartitionPlan], run: JobRun, hold: Callable[[], None]
    ) -> None:
        self._topic, self._servers, self._plans = topic, servers, plans
        self._run, self._hold = run, hold
        self._digests: dict[tuple[AuditSource, int], dict[int, Digest]] = {}
        self._faults: dict[tuple[AuditSource, int], list[RecordFault]] = {}
        self._references: dict[int, dict[int, tuple[Digest, int]]] = {}

    def examine_all(self) -> list[AuditFinding]:
        """Compute digests, compare them and examine differences; end early if the job must stop."""
        self._digest()
        findings: list[AuditFinding] = []
        mismatches: list[Mismatch] = []
        for plan in self._plans if not self._run.is_stopping else ():
            self._references[plan.partition] = choose_reference(
                plan.edges, [self._digests.get((source, plan.partition), {}) for source in self._copies(plan)]
            )
            findings += self._check_reference(plan)
            mismatches += self._find_mismatches(plan)
            findings += self._check_clients(plan)
        for (source, partition), faults in self._faults.items():
            findings += [AuditFinding(source=str(source), partition=partition, fault=fault) for fault in faults]
        findings += self._examine(mismatches)
        return sorted(findings, key=lambda finding: (finding.partition, finding.fault.offset, finding.source))

    def summaries(self) -> Iterator[PartitionSummary]:
        """Yield the summary of each partition: the content of most replicas."""
        for plan in self._plans:
            total = Digest()
            for digest, _ in self._references.get(plan.partition, {}).values():
                total += digest
            first, end = plan.bounds
            yield PartitionSummary(
                partition=plan.partition, first_offset=first, end_offset=end, count=total.count, digest=total.text
            )

    def _digest(self) -> None:
        pieces = plan_pieces(self._plans, self._run.spark.sparkContext.defaultParallelism if self._plans else 1)
        total = sum(piece.end_offset - piece.first_offset for piece in pieces)
        done = 0
        for result in self._run_tasks(pieces, partial(digest_piece, self._servers)):
            key = (result.piece.source, result.piece.partition)
            own = self._digests.setdefault(key, {})
            for first, digest in result.digests.items():
                own[first] = own.get(first, Digest()) + digest
            if result.fault is not None:
                self._faults.setdefault(key, []).append(result.fault)
            done += result.piece.end_offset - result.piece.first_offset
            self._run.report_progress(JobProgress(f"digesting {self._topic}", done, total))

    def _run_tasks(self, work: Sequence[T], do: Callable[[T], U]) -> Iterator[U]:
        """Run a function over many items in groups of tasks; end early if the job must stop."""
        context = self._run.spark.sparkContext
        count = TASKS_PER_CORE * context.defaultParallelism
        for at in range(0, len(work), count):
            if self._run.is_stopping:
                return
            self._hold()
            own = work[at : at + count]
            yield from context.parallelize(own, len(own)).map(do).collect()

    def _copies(self, plan: PartitionPlan) -> list[AuditSource]:
        """Return the sources that vote on the reference: readable replicas, else the leader."""
        replicas = [AuditSource("replica", str(node)) for node in plan.nodes]
        whole = [source for source in replicas if (source, plan.partition) not in self._faults]
        return whole or [LEADER]

    def _check_reference(self, plan: PartitionPlan) -> Iterator[AuditFinding]:
        """Report segments of the reference with gaps: offsets are dense, so each offset must have a record."""
        for first, end in pairwise(plan.edges):
            digest, _ = self._references[plan.partition][first]
            if digest.count != end - first:
                detail = f"most replicas have {digest.count} records there"
                fault = RecordFault(kind="lost", offset=first, end_offset=end, detail=detail)
                yield AuditFinding(source="most replicas", partition=plan.partition, fault=fault)

    def _find_mismatches(self, plan: PartitionPlan) -> Iterator[Mismatch]:
        reference = self._references[plan.partition]
        digests = {first: digest for first, (digest, _) in reference.items()}
        copies = self._copies(plan)
        for source, edges in self._scopes(plan):
            for difference in find_differences(edges, digests, self._digests.get((source, plan.partition), {})):
                believed = copies[reference[difference.first_offset][1]]
                bounds = (difference.first_offset, difference.end_offset)
                yield Mismatch(reference=plan.piece(believed, *bounds), suspect=plan.piece(source, *bounds))

    def _scopes(self, plan: PartitionPlan) -> Iterator[tuple[AuditSource, Sequence[int]]]:
        """Yield each source with the edges to compare: all offsets except unreadable and not yet archived ones."""
        for source in (LEADER, *(AuditSource("replica", str(node)) for node in plan.nodes)):
            faults = self._faults.get((source, plan.partition), [])
            yield from ((source, own) for own in _without(plan.edges, faults))
        if plan.archived is not None:
            edges = [edge for edge in plan.edges if edge <= plan.archived.end_offset]
            faults = self._faults.get((plan.archived.source, plan.partition), [])
            yield from ((plan.archived.source, own) for own in _without(edges, faults))

    def _check_clients(self, plan: PartitionPlan) -> Iterator[AuditFinding]:
        digests = {first: digest for first, (digest, _) in self._references[plan.partition].items()}
        for source, runs in plan.runs.items():
            for fault in check_runs(runs, plan.edges, digests, is_gapless=source.role == "consumer"):
                yield AuditFinding(source=str(source), partition=plan.partition, fault=fault)
        if plan.archived is not None and plan.archived.end_offset > plan.bounds[1]:
            end = plan.bounds[1]
            detail = f"archived, but the partition ends at {end}"
            fault = RecordFault(kind="lost", offset=end, end_offset=plan.archived.end_offset, detail=detail)
            yield AuditFinding(source=str(LEADER), partition=plan.partition, fault=fault)

    def _examine(self, mismatches: Sequence[Mismatch]) -> Iterator[AuditFinding]:
        examined, rest = mismatches[:MISMATCHES_MAX], mismatches[MISMATCHES_MAX:]
        for done, verdict in enumerate(self._run_tasks(examined, partial(examine, self._servers)), 1):
            self._run.report_progress(JobProgress("comparing records that differ", done, len(examined), "segment"))
            yield from _findings(verdict)
        for mismatch in rest:
            yield _whole_range(mismatch.suspect, "differs; too many segments differ to compare each record")


def _without(edges: Sequence[int], faults: Sequence[RecordFault]) -> Iterator[Sequence[int]]:
    """Yield the runs of edges between which a source could be read."""
    own: list[int] = []
    for first, end in pairwise(edges):
        if any(fault.offset < end and first < fault.end_offset for fault in faults):
            yield from [own] if own else []
            own = []
        else:
            own = [*(own or [first]), end]
    yield from [own] if own else []


def _findings(verdict: AuditVerdict) -> Iterator[AuditFinding]:
    suspect = verdict.suspect
    for fault in verdict.faults:
        yield AuditFinding(source=str(suspect.source), partition=suspect.partition, fault=fault)
    if verdict.count > len(verdict.faults):
        yield _whole_range(suspect, f"{verdict.count - len(verdict.faults)} more faults")


def _whole_range(suspect: Piece, detail: str) -> AuditFinding:
    fault = RecordFault(kind="altered", offset=suspect.first_offset, end_offset=suspect.end_offset, detail=detail)
    return AuditFinding(source=str(suspect.source), partition=suspect.partition, fault=fault)


def _summarise(plans: Sequence[PartitionPlan], findings: Sequence[AuditFinding]) -> Iterator[SourceSummary]:
    """Yield each source with its number of records, and whether they equal the reference."""
    counts: dict[str, int] = {}
    for plan in plans:
        shares = {LEADER: plan.count} | {AuditSource("replica", str(node)): plan.count for node in plan.nodes}
        if plan.archived is not None:
            shares[plan.archived.source] = max(0, min(plan.archived.end_offset, plan.bounds[1]) - plan.bounds[0])
        for source, runs in plan.runs.items():
            shares[source] = sum(end - first for first, end, _ in runs)
        for source, count in shares.items():
            counts[str(source)] = counts.get(str(source), 0) + count
    blamed = {finding.source for finding in findings}
    for name in dict.fromkeys((*counts, *sorted(blamed))):
        yield SourceSummary(source=name, count=counts.get(name, 0), is_identical=name not in blamed)


def _dry_run(job: Audit, plans: Sequence[PartitionPlan]) -> JobResult:
    count = sum(plan.count for plan in plans)
    names = [summary.source for summary in _summarise(plans, ())]
    sentence = f"would audit {job.topic}: records {count:,}, sources {', '.join(names)}"
    return JobResult(sentence=sentence, facts={"topic": job.topic, "records": count, "witnesses": names})
