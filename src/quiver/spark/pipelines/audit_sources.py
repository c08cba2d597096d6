"""Who can tell what a topic holds: its leaders, each replica, an archive. What each is asked is done in tasks.

A *piece* is what one task reads of one witness: offsets of one partition, from the broker or from files. It is read
once and added up between edges, or, where digests differ, kept record by record. What a witness cannot tell is part of
the answer: a node that is down or a file that is damaged is a finding, not an end of the audit.
"""

from __future__ import annotations

import os
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

CHUNK_RECORDS: Final = 20_000
CHUNK_BYTES: Final = 4 << 20
"""Records, or bytes of them, that are digested at once: small batches are joined, since each step has a price, but no
further than what a processor's own memory holds."""
FAULTS_MAX: Final = 1000
"""Most faults that a task tells one by one."""
READ_RECORDS: Final = 65_536

Role = Literal["leader", "replica", "archive", "producer", "consumer"]


class AuditSource(msgspec.Struct, frozen=True, order=True):
    """Somebody who can tell what a topic holds; a replica's name is its node."""

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
    """What a task reads; `edges` are the bounds of what it adds up."""

    source: AuditSource
    topic: str
    topic_id: int
    partition: int
    edges: tuple[int, ...]
    root: str = ""
    """Of the archive."""
    paths: tuple[str, ...] = ()

    @property
    def first_offset(self) -> int:
        """Where it begins."""
        return self.edges[0]

    @property
    def end_offset(self) -> int:
        """Where it ends."""
        return self.edges[-1]


class DigestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a witness told of a piece: digests by first offset, and from where on it could not."""

    piece: Piece
    digests: dict[int, Digest]
    fault: RecordFault | None = None


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Two witnesses whose digests differ: one that is believed, and one to be looked at."""

    reference: Piece
    suspect: Piece


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a suspect's records; the first of the faults, and how many there are."""

    suspect: Piece
    faults: tuple[RecordFault, ...]
    count: int


def digest_piece(servers: Servers, piece: Piece) -> DigestResult:
    """Add up what a witness has; in a task."""
    digests: dict[int, Digest] = {}
    reached = piece.first_offset
    try:
        for records in read_piece(servers, piece):
            for first, digest in digest_ranges(records, piece.edges).items():
                digests[first] = digests.get(first, Digest()) + digest
            reached = max(reached, int(offsets_of(records).max()) + 1)
    except (QuiverError, OSError, pa.ArrowInvalid) as error:
        # Files come in any order: one that cannot be read leaves all of the piece in doubt.
        reached = piece.first_offset if piece.paths else reached
        return DigestResult(piece=piece, digests=digests, fault=to_fault(error, piece, reached))
    return DigestResult(piece=piece, digests=digests)


def examine(servers: Servers, mismatch: Mismatch) -> AuditVerdict:
    """Compare two witnesses record by record; in a task."""
    suspect = mismatch.suspect
    try:
        faults = find_faults(see_piece(servers, mismatch.reference), see_piece(servers, suspect))
    except (QuiverError, OSError, pa.ArrowInvalid) as error:
        faults = [to_fault(error, suspect, suspect.first_offset)]
    if not faults:
        detail = "the digests differed, the records do not any more: they changed meanwhile"
        faults = [
            RecordFault(kind="altered", offset=suspect.first_offset, end_offset=suspect.end_offset, detail=detail),
        ]
    return AuditVerdict(suspect=suspect, faults=tuple(faults[:FAULTS_MAX]), count=len(faults))


def see_piece(servers: Servers, piece: Piece) -> RecordDigests:
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
    """Yield a piece's records, many at a time; those of files may lie outside of its bounds."""
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
    """Return what it means that a witness could not be read further than that."""
    kind: FaultKind = "unreachable"
    is_of_topic = isinstance(error, RequestError) and error.code not in ("no_replica", "decode_failed")
    if isinstance(error, OutOfRangeError) and error.code == "past_end":
        kind = "lost"
    elif isinstance(error, TrimmedError) and piece.source.role == "replica":
        kind = "lost"  # the leader begins before: these records are held
    elif is_of_topic or isinstance(error, TrimmedError):
        raise error  # the topic was made anew, is gone, or was not held: there is nothing to audit
    elif isinstance(error, StorageError | RequestError | OSError | pa.ArrowInvalid):
        kind = "unreadable"
    return RecordFault(kind=kind, offset=reached, end_offset=piece.end_offset, detail=str(error))


def _to_arrow(batch: Batch, bounds: tuple[int, int]) -> pa.RecordBatch:
    return to_arrow(batch, Offset(bounds[0]), Offset(bounds[1]))


def _read_files(piece: Piece) -> Iterator[pa.RecordBatch]:
    for path in piece.paths:
        with pq.ParquetFile(os.path.join(piece.root, path)) as file:
            yield from file.iter_batches(READ_RECORDS, columns=ARROW_SCHEMA.names)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield batches joined; all that came before an error, then the error."""
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
"""First offsets, end offsets and digests, in the order in which they were stated."""
StatedRuns = dict[AuditSource, dict[int, Runs]]


def read_statements(cluster: Cluster, topic_id: int) -> StatedRuns:
    """Return everything that is stated about one incarnation of a topic.

    Raises:
        DecodeError: there is something among the statements that is none.
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
    """Return the runs of the statements about one incarnation of a topic."""
    stated: StatedRuns = {}
    for statement in statements:
        if statement.topic_id == topic_id:
            own = stated.setdefault(AuditSource(statement.role, statement.name), {})
            own.setdefault(statement.partition, []).extend(
                (run.first_offset, run.end_offset, run.digest) for run in statement.runs
            )
    return stated


def choose_clients(stated: StatedRuns, consumers: tuple[str, ...], topic: str) -> StatedRuns:
    """Return the statements of all producers, and of the consumers that are named; of all, if none is.

    Raises:
        NotFoundError: a consumer that is named has stated nothing.
    """
    known = {source.name for source in stated if source.role == "consumer"}
    for name in consumers:
        if name not in known:
            message = (
                f"consumer {name!r} has stated nothing about {topic!r}: open it with digests=True. "
                f"Those that have: {', '.join(sorted(known)) or 'none'}"
            )
            raise NotFoundError(message, code="no_statements")
    return {
        source: own
        for source, own in sorted(stated.items())
        if source.role == "producer" or not consumers or source.name in consumers
    }
