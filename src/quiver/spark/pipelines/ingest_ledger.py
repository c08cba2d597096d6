"""What was ingested: a journal in the cluster, beside the data that it is about.

One topic, `quiver.ingest`, has the rounds of every ingest: before a round the files that it takes and which lane takes
which, after it how many records they were. Files are known by the digest of what they held, so that one that was
renamed or copied is not ingested again. Whoever opens the journal for an ingest fences off whoever wrote for it before;
a round that has begun and not ended is finished with the very same files.
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
    """A file, and the partition that its records without a key go to."""

    file: SourceFile
    partition: int


class IngestBatch(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """What is ingested in one go: the files of each lane, in order."""

    v: int = VERSION
    number: int
    partitions: int
    """How many partitions keys are spread over."""
    fields: LineFields
    lanes: tuple[tuple[AssignedFile, ...], ...]


class IngestBatchEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """How many records of each lane a round has brought into each partition."""

    v: int = VERSION
    number: int
    counts: tuple[dict[int, int], ...]


class IngestState:
    """What a journal says."""

    def __init__(self) -> None:
        self.open_batch: IngestBatch | None = None
        """The round that has begun and not ended."""
        self.rounds = 0
        self.files = 0
        self.by_path: dict[str, SourceFile] = {}
        """What was last ingested of each path."""
        self.digests: dict[str, str] = {}
        """Everything that was ingested, by its digest, and the path that it was found at."""
        self.bases: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """How many records of each lane are in each partition, by the rounds that have ended."""

    def add(self, entry: IngestBatch | IngestBatchEnd) -> None:
        """Take note of an entry; in their order."""
        if isinstance(entry, IngestBatchEnd):
            for lane, counts in enumerate(entry.counts):
                self.bases[lane].update(counts)
            self.open_batch = None
            return
        self.open_batch = entry
        self.rounds = entry.number + 1
        for placed in (placed for lane in entry.lanes for placed in lane):
            self.files += 1
            self.by_path[placed.file.path] = placed.file
            self.digests.setdefault(placed.file.digest, placed.file.path)


class IngestLedger:
    """The journal of one ingest, in the process that runs it."""

    def __init__(self, cluster: Cluster, writer: str) -> None:
        """Fence off whoever runs the ingest elsewhere, then read what was ingested."""
        self._writer = writer
        cluster.create_topic(TOPIC, partitions=1, retention=RetentionInfo(), exist_ok=True)
        self._producer: Producer = cluster.producer(TOPIC, name=f"{TOPIC}.journal.{producer_prefix(writer)}")
        self._producer.next_sequence(_PARTITION)  # after this nobody else's entry can be added
        self.state = read_state(cluster, writer)

    def begin(self, lanes: tuple[tuple[AssignedFile, ...], ...], *, partitions: int, fields: LineFields) -> IngestBatch:
        """Store durably what is ingested next, and how, before any of it is sent."""
        entry = IngestBatch(number=self.state.rounds, partitions=partitions, fields=fields, lanes=lanes)
        self._add(entry)
        return entry

    def end(self, counts: tuple[Mapping[int, int], ...]) -> None:
        """Store durably that the round is in the topic, whole."""
        assert self.state.open_batch is not None
        self._add(IngestBatchEnd(number=self.state.open_batch.number, counts=tuple(map(dict, counts))))

    def close(self) -> None:
        """Write no more; idempotent."""
        with suppress(QuiverError):
            self._producer.abort()

    def _add(self, entry: IngestBatch | IngestBatchEnd) -> None:
        self._producer.send(msgspec.json.encode(entry), key=self._writer, partition=_PARTITION).result()
        self.state.add(entry)


def read_state(cluster: Cluster, writer: str) -> IngestState:
    """Return what the journal says about an ingest; nothing if there is no journal yet."""
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
    """Return what the producers of an ingest are called by."""
    return hashlib.blake2b(writer.encode(), digest_size=8).hexdigest()


def _decode(encoded: bytes) -> IngestBatch | IngestBatchEnd:
    try:
        entry = msgspec.json.decode(encoded, type=IngestBatch | IngestBatchEnd)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"an entry of {TOPIC!r} cannot be read: {error}") from None
    if entry.v != VERSION:
        raise DecodeError(f"an entry of {TOPIC!r} is of version {entry.v}, not {VERSION}")
    return entry
