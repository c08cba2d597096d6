"""The journal of ingested files, stored in the cluster beside the data.

The topic `quiver.ingest` has the batches of every ingest. Before a batch is sent, an entry assigns its files to
senders; after it, an entry has the record counts. Files are identified by a digest of their content, so a renamed or
copied file is not ingested again. Opening the journal fences the previous process of the ingest; a batch that was
started and not finished is finished with exactly the same files.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec

from quiver.client.sync import Cluster, Producer
from quiver.errors import DecodeError, NotFoundError, QuiverError
from quiver.spark.pipelines.source_files import LineFields, SourceFile
from quiver.wire.messages import RetentionInfo

TOPIC: Final = "quiver.ingest"
VERSION: Final = 1
_PARTITION: Final = 0


class AssignedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, and the partition for its records without a key."""

    file: SourceFile
    partition: int


class IngestBatch(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Journal entry before a batch is sent: the files of each sender, in order."""

    v: int = VERSION
    number: int
    partitions: int
    """Number of partitions that keys are hashed over."""
    fields: LineFields
    senders: tuple[tuple[AssignedFile, ...], ...] = msgspec.field(name="lanes")
    """Stored as `lanes`, the name in version 1 of the journal."""


class IngestBatchEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Journal entry after a batch: records of each sender by partition."""

    v: int = VERSION
    number: int
    counts: tuple[dict[int, int], ...]


class IngestState:
    """The state of one ingest, folded from its journal entries."""

    def __init__(self) -> None:
        self.open_batch: IngestBatch | None = None
        """The batch that was started and not finished."""
        self.batches = 0
        self.files = 0
        self.by_path: dict[str, SourceFile] = {}
        """The last ingested content of each path."""
        self.digests: dict[str, str] = {}
        """Digests of all ingested content, and the path of each."""
        self.contents: dict[str, SourceFile] = {}
        """Ingested content by digest, without content that a grown file has continued."""
        self.partitions: dict[str, int] = {}
        """Partition of ingested content by digest."""
        self.bases: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """Records of each sender by partition, from finished batches."""

    def add(self, entry: IngestBatch | IngestBatchEnd) -> None:
        """Apply the next journal entry."""
        if isinstance(entry, IngestBatchEnd):
            for sender, counts in enumerate(entry.counts):
                self.bases[sender].update(counts)
            self.open_batch = None
            return
        self.open_batch = entry
        self.batches = entry.number + 1
        for assigned in (assigned for sender in entry.senders for assigned in sender):
            self.files += 1
            self.contents.pop(assigned.file.continues or self._former_digest(assigned.file), None)
            self.contents[assigned.file.digest] = assigned.file
            self.partitions[assigned.file.digest] = assigned.partition
            self.by_path[assigned.file.path] = assigned.file
            self.digests.setdefault(assigned.file.digest, assigned.file.path)

    def _former_digest(self, file: SourceFile) -> str:
        """Return the digest of what a file continues, for entries of older releases, which do not have it."""
        known = self.by_path.get(file.path)
        return known.digest if known is not None and file.first_byte and known.content_end == file.first_byte else ""


class IngestLedger:
    """Append to the journal of one ingest."""

    def __init__(self, cluster: Cluster, writer: str) -> None:
        """Fence other processes of the ingest, then read its state."""
        self._writer = writer
        cluster.create_topic(TOPIC, partitions=1, retention=RetentionInfo(), exist_ok=True)
        self._producer: Producer = cluster.producer(TOPIC, name=f"{TOPIC}.journal.{producer_prefix(writer)}")
        self._producer.next_sequence(_PARTITION)  # registers the producer: no other process can append after this
        self.state = read_state(cluster, writer)

    def begin(
        self, senders: tuple[tuple[AssignedFile, ...], ...], *, partitions: int, fields: LineFields
    ) -> IngestBatch:
        """Store the next batch durably, before any of it is sent."""
        entry = IngestBatch(number=self.state.batches, partitions=partitions, fields=fields, senders=senders)
        self._add(entry)
        return entry

    def end(self, counts: tuple[Mapping[int, int], ...]) -> None:
        """Store durably that the open batch is complete in the topic."""
        assert self.state.open_batch is not None
        self._add(IngestBatchEnd(number=self.state.open_batch.number, counts=tuple(map(dict, counts))))

    def close(self) -> None:
        """Stop the journal's producer; idempotent."""
        with suppress(QuiverError):
            self._producer.abort()

    def _add(self, entry: IngestBatch | IngestBatchEnd) -> None:
        self._producer.send(msgspec.json.encode(entry), key=self._writer, partition=_PARTITION).result()
        self.state.add(entry)


def read_state(cluster: Cluster, writer: str) -> IngestState:
    """Read the state of an ingest; empty if the journal does not exist."""
    state = IngestState()
    try:
        first = cluster.offsets(TOPIC, "earliest").offsets[_PARTITION]
        end = cluster.offsets(TOPIC).offsets[_PARTITION]
    except NotFoundError:
        return state
    for batch in cluster.read_range(TOPIC, _PARTITION, first, end):
        for record in batch.records():
            if record.key == writer.encode():
                state.add(_decode(record.value or b""))
    return state


def producer_prefix(writer: str) -> str:
    """Return the name prefix of an ingest's producers."""
    return hashlib.blake2b(writer.encode(), digest_size=8).hexdigest()


def _decode(encoded: bytes) -> IngestBatch | IngestBatchEnd:
    try:
        entry = msgspec.json.decode(encoded, type=IngestBatch | IngestBatchEnd)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"an entry of topic {TOPIC!r} cannot be decoded: {error}") from None
    if entry.v != VERSION:
        raise DecodeError(f"an entry of topic {TOPIC!r} has version {entry.v}; this release reads version {VERSION}")
    return entry
