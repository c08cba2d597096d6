"""What a writer has decided to publish: the memory of an exactly-once sink, kept in the cluster itself.

A *ledger* is a topic. Its partition 0 is the journal: one small record for each decision, written before anything of
it is published. The others hold *staged* records: what tasks have written, winners and losers alike, which nobody reads
but who publishes. A decision names, for each partition of a target topic, the staged records that belong there and the
sequence that the first of them has for the writer's producer: how many records the writer decided to put there before.

A writer is a query (its id stays the same over restarts) or one transaction. Only one process writes for it at a time:
whoever opens the journal last fences the others off, and reads it after that.
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
"""The ledger that all transactions of batch writes share; those of a streaming query have their own."""
TRANSACTION_MS: Final = 7 * 24 * 3_600_000
"""How long a transaction is remembered, at least."""
JOURNAL: Final = 0
STAGING_PARTITIONS: Final = 2
VERSION: Final = 1

StagedSpans = tuple[tuple[int, int, int], ...]
"""Staged records in order: partition of the ledger, first offset, end offset."""


class StagedPart(msgspec.Struct, frozen=True):
    """What a task has staged for one partition of a topic."""

    topic: str
    partition: int
    spans: StagedSpans


class PublishPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision puts into one partition of a topic."""

    topic: str
    topic_id: int
    partition: int
    first_sequence: int
    spans: StagedSpans

    @property
    def count(self) -> int:
        """How many records there are."""
        return sum(end - first for _, first, end in self.spans)

    @property
    def key(self) -> str:
        """What the totals of a writer are kept by."""
        return f"{self.topic_id}/{self.partition}"


class PublishDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer publishes as one batch, once."""

    v: int = VERSION
    writer: str
    batch: int
    parts: tuple[PublishPart, ...]
    totals: dict[str, int]
    """How many records the writer has decided to put where, ever, this decision included."""


def ledger_of_query(query: str) -> str:
    """Return the ledger of a streaming query."""
    return PREFIX + query


def open_ledger(cluster: Cluster, ledger: str) -> None:
    """Make a ledger unless it is there. What a query has published may go; transactions stay for a while."""
    is_shared = ledger == TRANSACTIONS
    retention = RetentionInfo(ms=TRANSACTION_MS) if is_shared else RetentionInfo(until_consumed=True)
    cluster.create_topic(ledger, partitions=1 + STAGING_PARTITIONS, retention=retention, exist_ok=True)
    if not is_shared:
        release(cluster, ledger, {})  # such a topic takes records only when somebody is registered for them


def release(cluster: Cluster, ledger: str, ends: Mapping[int, int]) -> None:
    """Let retention take what lies before these offsets of a query's ledger, by partition."""
    cluster.move_cursors(ledger, ledger, ends)


class Journal:
    """A writer's decisions; the last one is all that is ever needed."""

    def __init__(self, cluster: Cluster, ledger: str, writer: str) -> None:
        """Fence off whoever wrote for the writer before, then read what was decided.

        Raises:
            ConflictError: there were decisions, and they are gone (`ledger_expired`).
        """
        self._ledger = ledger
        self._writer = writer
        self._producer: Producer = cluster.producer(ledger, name=f"{PREFIX}journal.{writer}")
        # After this nobody else's decision can be added, so that what is read below is the last word.
        decisions = self._producer.next_sequence(JOURNAL)
        self.last_offset = 0
        self.last = self._read_last(cluster)
        if decisions and self.last is None:
            message = (
                f"{writer!r} has written before, and what it decided is gone from {ledger!r}: "
                "whether this batch was published cannot be told"
            )
            raise ConflictError(message, code="ledger_expired")

    def decide(self, batch: int, staged: Iterable[StagedPart], topic_ids: Mapping[str, int]) -> PublishDecision:
        """Store durably what is to be published as a batch, and return it."""
        totals = self.last.totals if self.last is not None else {}
        decision = make_decision(self._writer, batch, staged, topic_ids=topic_ids, totals=totals)
        encoded = msgspec.json.encode(decision)
        # From here on, if this returns, the batch is what the decision says, whoever publishes it.
        place = self._producer.send(encoded, key=self._writer, partition=JOURNAL).result()
        self.last, self.last_offset = decision, place.offset
        return decision

    def close(self) -> None:
        """Decide nothing more; idempotent."""
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
    """Return the decision that publishes what tasks have staged, behind all that was decided before."""
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
    """Return what goes to each partition, in the order of tasks and, within a task, of its rows; neighbours joined."""
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
        raise DecodeError(f"a decision in the journal cannot be read: {error}") from None
    if decision.v != VERSION:
        raise DecodeError(f"a decision in the journal is of version {decision.v}, not {VERSION}")
    return decision
