"""The ledger of an exactly-once sink: a topic in the cluster that stores what each writer decided to publish.

Partition 0 is the *journal*: one small record per decision, durable before anything of it is published. The other
partitions hold *staged* records: the output of all task attempts, failed ones included; only the publisher reads them.
A decision lists, for each partition of a target topic, the staged records that go there and the producer sequence of
the first one. That sequence equals the number of records that the writer decided to put there before.

A writer is a streaming query (its id survives restarts) or one transaction. Only one process writes for it: opening
the journal fences the previous process, and the journal is read after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from quiver.client.sync import Cluster, Producer
from quiver.errors import ConflictError, DecodeError, QuiverError
from quiver.wire.messages import RetentionInfo

PREFIX: Final = "quiver.sink."
TRANSACTIONS: Final = PREFIX + "transactions"
"""The ledger shared by all transactions of batch writes; each streaming query has its own."""
TRANSACTION_MS: Final = 7 * 24 * 3_600_000
"""Minimum time for which a transaction id is remembered."""
JOURNAL: Final = 0
STAGING_PARTITIONS: Final = 2
VERSION: Final = 1

StagedSpans = tuple[tuple[int, int, int], ...]
"""Staged records in order: ledger partition, first offset, end offset."""


class StagedPart(msgspec.Struct, frozen=True):
    """Records that a task staged for one partition of a target topic."""

    topic: str
    partition: int
    spans: StagedSpans


class PublishPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a decision that goes to one partition of a target topic."""

    topic: str
    topic_id: int
    partition: int
    first_sequence: int
    spans: StagedSpans

    @property
    def count(self) -> int:
        """The number of records."""
        return sum(end - first for _, first, end in self.spans)

    @property
    def key(self) -> str:
        """The key of this partition in `PublishDecision.totals`."""
        return f"{self.topic_id}/{self.partition}"


class PublishDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of a writer, as stored in the journal; it is published exactly once."""

    v: int = VERSION
    writer: str
    batch: int
    parts: tuple[PublishPart, ...]
    totals: dict[str, int]
    """Records per target partition over all decisions of the writer, this one included."""


def ledger_of_query(query: str) -> str:
    """Return the ledger topic of a streaming query."""
    return PREFIX + query


def open_ledger(cluster: Cluster, ledger: str) -> None:
    """Create a ledger if it does not exist; a query's ledger drops published records, the shared one expires by age."""
    is_shared = ledger == TRANSACTIONS
    retention = RetentionInfo(ms=TRANSACTION_MS) if is_shared else RetentionInfo(until_consumed=True)
    cluster.create_topic(ledger, partitions=1 + STAGING_PARTITIONS, retention=retention, exist_ok=True)
    if not is_shared:
        release_before(cluster, ledger, {})  # until-consumed topics reject records without a registered consumer


def release_before(cluster: Cluster, ledger: str, ends: Mapping[int, int]) -> None:
    """Allow retention to remove everything before these offsets of a query's ledger, by partition."""
    cluster.move_cursors(ledger, ledger, ends)


class Journal:
    """Append and read the decisions of one writer; only the last decision is ever needed."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        """Fence the previous process of the writer, then read its last decision.

        Raises:
            ConflictError: the writer made decisions, and retention removed them (`ledger_expired`).
        """
        self._ledger = ledger
        self._writer = writer
        self._producer: Producer = cluster.producer(ledger, name=f"{PREFIX}journal.{writer}")
        # This registers the producer and fences others: no other process can append, so the read below is final.
        decisions = self._producer.next_sequence(JOURNAL)
        self.last_offset = 0
        self.last = self._read_last(cluster)
        if decisions and self.last is None:
            message = (
                f"ledger {ledger!r} no longer has the decisions of writer {writer!r}: unknown whether this batch was "
                "published. Check the target topic, then write with a new txnId or a new checkpoint"
            )
            raise ConflictError(message, code="ledger_expired")

    def decide(self, batch: int, staged: Iterable[StagedPart], topic_ids: Mapping[str, int]) -> PublishDecision:
        """Store durably what a batch publishes, and return the decision."""
        totals = self.last.totals if self.last is not None else {}
        decision = make_decision(self._writer, batch, staged, topic_ids=topic_ids, totals=totals)
        encoded = msgspec.json.encode(decision)
        # Durable after this returns: the batch is fixed, whichever process publishes it.
        place = self._producer.send(encoded, key=self._writer, partition=JOURNAL).result()
        self.last, self.last_offset = decision, place.offset
        return decision

    def close(self) -> None:
        """Stop the journal's producer; idempotent."""
        with suppress(QuiverError):
            self._producer.abort()

    def _read_last(self, cluster: Cluster) -> PublishDecision | None:
        first = cluster.offsets(self._ledger, {JOURNAL: "earliest"}).offsets[JOURNAL]
        end = cluster.offsets(self._ledger, {JOURNAL: "latest"}).offsets[JOURNAL]
        last: bytes | None = None
        for batch in cluster.read_range(self._ledger, JOURNAL, first, end):
            for record in batch.records():
                if record.key == self._writer.encode():
                    last, self.last_offset = record.value, record.offset
        return None if last is None else _decode(last)


def make_decision(
    writer: str,
    batch: int,
    staged: Iterable[StagedPart],
    *,
    topic_ids: Mapping[str, int],
    totals: Mapping[str, int],
) -> PublishDecision:
    """Return the decision that publishes staged records after everything decided before (`totals`)."""
    after = dict(totals)
    parts: list[PublishPart] = []
    for (topic, partition), spans in _gather(staged).items():
        topic_id = topic_ids[topic]
        before = after.get(f"{topic_id}/{partition}", 0)
        part = PublishPart(topic=topic, topic_id=topic_id, partition=partition, first_sequence=before, spans=spans)
        after[part.key] = before + part.count
        parts.append(part)
    return PublishDecision(writer=writer, batch=batch, parts=tuple(parts), totals=after)


def _gather(staged: Iterable[StagedPart]) -> dict[tuple[str, int], StagedSpans]:
    """Group spans by target partition, ordered by task, then by row; merge adjacent spans."""
    found: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for part in staged:
        own = found.setdefault((part.topic, part.partition), [])
        for place, first, end in part.spans:
            if own and own[-1][0] == place and own[-1][2] == first:
                own[-1] = (place, own[-1][1], end)
            else:
                own.append((place, first, end))
    return {target: tuple(spans) for target, spans in found.items()}


def _decode(encoded: bytes) -> PublishDecision:
    try:
        decision = msgspec.json.decode(encoded, type=PublishDecision)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"a decision in the sink's journal cannot be decoded: {error}") from None
    if decision.v != VERSION:
        raise DecodeError(
            f"a decision in the sink's journal has version {decision.v}; this release reads version {VERSION}"
        )
    return decision
