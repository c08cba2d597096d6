"""The sources of an audit: leaders, replicas and archives, read in tasks; producers and consumers, by statements.

A *piece* is what one task reads of one source: offsets of one partition, from a broker or from files. A task computes
digests between edges, or, where digests differ, digests of single records. A source that cannot be read is part of the
result: a node that is down or a damaged file is a finding and does not end the audit.

Clients state digests of what they produced or consumed; see `quiver.client.digest_reporter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver.client.digest_reporter import TOPIC, Statement, decode_statement
from quiver.client.sync import Cluster
from quiver.errors import NotFoundError, OutOfRangeError, QuiverError, RequestError, StorageError, TrimmedError
from quiver.model import Offset
from quiver.record import Batch
from quiver.record.arrow import ARROW_SCHEMA, to_arrow
from quiver.record.digest import Digest, digest_contents, digest_ranges, offsets_of
from quiver.spark.connections import Servers, connection
from quiver.spark.pipelines.audit_comparison import FaultKind, RecordDigests, RecordFault, find_faults
from quiver.spark.pipelines.place import Place

CHUNK_RECORDS: Final = 20_000
CHUNK_BYTES: Final = 4 << 20
"""Records and bytes per digest step: small batches are joined, since each step has a fixed cost, but not beyond the
size of the processor's cache."""
FAULTS_MAX: Final = 1000
"""Maximum faults that a task reports one by one."""
READ_RECORDS: Final = 65_536

Role = Literal["leader", "replica", "archive", "producer", "consumer"]


class AuditSource(msgspec.Struct, frozen=True, order=True):
    """A source of a topic's records; the name of a replica is its node."""

    role: Role
    name: str = ""

    def __str__(self) -> str:
        match self.role:
            case "leader":
                return "the topic as its leaders serve it"
            case "replica":
                return f"replica on node {self.name}"
            case _:
                return f"{self.role} {self.name}".strip()


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The records that a task reads; digests are computed between `edges`."""

    source: AuditSource
    topic: str
    topic_id: int
    partition: int
    edges: tuple[int, ...]
    place: Place | None = None
    """Place of the archive."""
    paths: tuple[str, ...] = ()

    @property
    def first_offset(self) -> int:
        """The first offset."""
        return self.edges[0]

    @property
    def end_offset(self) -> int:
        """The end offset."""
        return self.edges[-1]


class DigestResult(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of a piece by first offset, and the fault if it could not be read to its end."""

    piece: Piece
    digests: dict[int, Digest]
    fault: RecordFault | None = None


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Two pieces whose digests differ: the reference and the one to examine."""

    reference: Piece
    suspect: Piece


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of examining a mismatch: the first faults, and their total number."""

    suspect: Piece
    faults: tuple[RecordFault, ...]
    count: int


def digest_piece(servers: Servers, piece: Piece) -> DigestResult:
    """Compute the digests of a piece. Runs in a task."""
    digests: dict[int, Digest] = {}
    reached = piece.first_offset
    try:
        for records in read_piece(servers, piece):
            for first, digest in digest_ranges(records, piece.edges).items():
                digests[first] = digests.get(first, Digest()) + digest
            reached = max(reached, int(offsets_of(records).max()) + 1)
    except (QuiverError, OSError, pa.ArrowInvalid) as error:
        # Files are not read in offset order: an unreadable file makes the whole piece uncertain.
        reached = piece.first_offset if piece.paths else reached
        return DigestResult(piece=piece, digests=digests, fault=to_fault(error, piece, reached))
    return DigestResult(piece=piece, digests=digests)


def examine(servers: Servers, mismatch: Mismatch) -> AuditVerdict:
    """Compare two pieces record by record. Runs in a task."""
    suspect = mismatch.suspect
    try:
        faults = find_faults(read_digests(servers, mismatch.reference), read_digests(servers, suspect))
    except (QuiverError, OSError, pa.ArrowInvalid) as error:
        faults = [to_fault(error, suspect, suspect.first_offset)]
    if not faults:
        detail = "the digests differed, but the records are equal now: they changed during the audit"
        faults = [
            RecordFault(kind="altered", offset=suspect.first_offset, end_offset=suspect.end_offset, detail=detail),
        ]
    return AuditVerdict(suspect=suspect, faults=tuple(faults[:FAULTS_MAX]), count=len(faults))


def read_digests(servers: Servers, piece: Piece) -> RecordDigests:
    """Return every record of a piece, in the order in which it was found; files in the order of offsets."""
    offsets: list[int] = []
    contents: list[bytes] = []
    for records in read_piece(servers, piece):
        places = offsets_of(records)
        inside = np.flatnonzero((places >= piece.first_offset) & (places < piece.end_offset))
        if len(inside):
            seen = RecordDigests.of(places[inside].tolist(), digest_contents(records)[:, inside])
            offsets += seen.offsets
            contents += seen.contents
    if not piece.paths:
        return RecordDigests(offsets, contents)
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    return RecordDigests([offsets[at] for at in order], [contents[at] for at in order])


def read_piece(servers: Servers, piece: Piece) -> Iterator[pa.Table]:
    """Yield a piece's records in chunks; records of files may be outside its bounds."""
    if piece.source.role == "archive":
        yield from _joined(_read_files(piece))
        return
    cluster, bounds = connection(servers), (piece.first_offset, piece.end_offset)
    if piece.source.role == "leader":
        batches = cluster.read_range(piece.topic, piece.partition, *bounds, topic_id=piece.topic_id)
    else:
        node = int(piece.source.name)
        batches = cluster.read_replica(piece.topic, piece.partition, node, *bounds, topic_id=piece.topic_id)
    yield from _joined(_to_arrow(batch, bounds) for batch in batches)


def to_fault(error: Exception, piece: Piece, reached: int) -> RecordFault:
    """Return the fault for a source that is unreadable beyond `reached`; raise if the topic itself is gone."""
    kind: FaultKind = "unreachable"
    is_of_topic = isinstance(error, RequestError) and error.code not in ("no_replica", "decode_failed")
    if isinstance(error, OutOfRangeError) and error.code == "past_end":
        kind = "lost"
    elif isinstance(error, TrimmedError) and piece.source.role == "replica":
        kind = "lost"  # the leader still has these records: they are held
    elif is_of_topic or isinstance(error, TrimmedError):
        raise error  # the topic was recreated, deleted or not held: there is nothing to audit
    elif isinstance(error, StorageError | RequestError | OSError | pa.ArrowInvalid):
        kind = "unreadable"
    return RecordFault(kind=kind, offset=reached, end_offset=piece.end_offset, detail=str(error))


def _to_arrow(batch: Batch, bounds: tuple[int, int]) -> pa.RecordBatch:
    return to_arrow(batch, Offset(bounds[0]), Offset(bounds[1]))


def _read_files(piece: Piece) -> Iterator[pa.RecordBatch]:
    assert piece.place is not None
    for path in piece.paths:
        where, filesystem = piece.place.locate(path)
        with pq.ParquetFile(where, filesystem=filesystem) as file:
            yield from file.iter_batches(READ_RECORDS, columns=ARROW_SCHEMA.names)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield joined batches; after an error yield what was read before it, then raise."""
    waiting: list[pa.RecordBatch] = []
    count = size_bytes = 0
    failure: Exception | None = None
    try:
        for batch in batches:
            waiting.append(batch)
            count, size_bytes = count + len(batch), size_bytes + batch.nbytes
            if count >= CHUNK_RECORDS or size_bytes >= CHUNK_BYTES:
                yield pa.Table.from_batches(waiting)
                waiting, count, size_bytes = [], 0, 0
    except (QuiverError, OSError, pa.ArrowInvalid) as error:
        failure = error
    if waiting:
        yield pa.Table.from_batches(waiting)
    if failure is not None:
        raise failure


Runs = list[tuple[int, int, Digest]]
"""First offset, end offset and digest of each stated run, in order."""
StatedRuns = dict[AuditSource, dict[int, Runs]]


def read_statements(cluster: Cluster, topic_id: int) -> StatedRuns:
    """Read all statements about one incarnation of a topic.

    Raises:
        DecodeError: a record in the topic of statements is not a statement.
    """
    try:
        begins, ends = cluster.offsets(TOPIC, "earliest"), cluster.offsets(TOPIC, "latest")
    except NotFoundError:
        return {}
    statements: list[Statement] = []
    for partition, end_offset in ends.offsets.items():
        first_offset = begins.offsets.get(partition, 0)
        for batch in cluster.read_range(TOPIC, partition, first_offset, end_offset, topic_id=ends.topic_id):
            statements += map(decode_statement, batch.values())
    return sort_statements(statements, topic_id)


def sort_statements(statements: Iterable[Statement], topic_id: int) -> StatedRuns:
    """Group the runs of statements about one incarnation of a topic by client and partition."""
    stated: StatedRuns = {}
    for statement in statements:
        if statement.topic_id == topic_id:
            own = stated.setdefault(AuditSource(statement.role, statement.name), {})
            own.setdefault(statement.partition, []).extend(
                (run.first_offset, run.end_offset, run.digest) for run in statement.runs
            )
    return stated


def choose_clients(stated: StatedRuns, consumers: tuple[str, ...], topic: str) -> StatedRuns:
    """Return the statements of all producers, and of the named consumers; of all consumers if none is named.

    Raises:
        NotFoundError: a named consumer has no statements (`no_statements`).
    """
    known = {source.name for source in stated if source.role == "consumer"}
    for name in consumers:
        if name not in known:
            message = (
                f"consumer {name!r} has reported no digests of topic {topic!r}: open it with digests=True. "
                f"Consumers with digests: {', '.join(sorted(known)) or 'none'}"
            )
            raise NotFoundError(message, code="no_statements")
    return {
        source: own
        for source, own in sorted(stated.items())
        if source.role == "producer" or not consumers or source.name in consumers
    }
