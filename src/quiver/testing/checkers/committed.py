"""The one committed log of a group as it becomes known: members and the answers of clients must agree with it.

The first member to call an entry committed fixes its term, the first to apply it fixes its bytes. From then on any
other claim about that index is a finding: nothing committed changes, vanishes or moves (I3, I5, I7, I8, I9), and a
producer's batches follow each other without gap or repetition (I11).

`check_ack` and `check_end_read` check an answer to a client when it arrives (I8, I9, I11, I12, I17, F2, F4, and reads);
`check_sends` checks the whole history against the committed log when the run is over, value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from quiver.model import NO_PRODUCER, GroupId, Index, NodeId, Offset, ProducerId, Term
from quiver.partition import ConsumeResult
from quiver.partition.entries import FenceEntry, StateSnapshotEntry, TrimEntry, decode_entry
from quiver.record import Batch, BatchHeader, Record
from quiver.testing.groups.history import EndRead, RecordedBatch
from quiver.testing.simulator.report import require, violated


class CommittedLog:
    """What is committed in one group."""

    def __init__(self, group: GroupId) -> None:
        self.group = group
        self.terms: list[Term] = [Term(0)]
        """The term of every committed entry, by index; the one at 0 stands for the beginning."""
        self.batches: list[Batch] = []
        """Every applied batch, from index 1 on."""
        self.first_offset = Offset(0)
        """The end of the newest trim that a member has applied."""
        self.end_offset = Offset(0)
        self._index_of_offset: dict[Offset, Index] = {}
        self._producers: dict[ProducerId, tuple[int, int]] = {}
        self._states: dict[Index, bytes] = {}

    @property
    def commit_index(self) -> Index:
        """Return the highest index that a member has called committed."""
        return Index(len(self.terms) - 1)

    @property
    def applied_index(self) -> Index:
        """Return the highest index that a member has applied."""
        return Index(len(self.batches))

    def commit(self, node: NodeId, index: Index, term_at: Callable[[Index], Term | None]) -> None:
        """Take a member's claim that everything up to `index` is committed."""
        while len(self.terms) <= index:
            at = Index(len(self.terms))
            term = term_at(at)
            if term is None:
                violated("I4", "a member commits what it does not have", group=self.group, node=node, index=at)
            self.terms.append(term)
        known = term_at(index)
        if known is not None and known != self.terms[index]:
            violated(
                "I3",
                "two entries are committed at one index",
                group=self.group,
                node=node,
                index=index,
                term=known,
                other_term=self.terms[index],
            )

    def apply(self, node: NodeId, batch: Batch) -> None:
        """Take a batch that a member applies."""
        header = batch.header
        at = header.index - 1
        if at < len(self.batches):
            if self.batches[at].data != batch.data:
                self._complain(node, header, self.batches[at].header)
            return
        facts = {"group": self.group, "node": node, "index": header.index}
        require(at == len(self.batches), "I5", "an entry is applied before the one in front of it", **facts)
        require(header.index <= self.commit_index, "I7", "an entry is applied that is not committed", **facts)
        require(header.term == self.terms[header.index], "I3", "the applied entry is not the committed one", **facts)
        require(header.base_offset == self.end_offset, "I8", "offsets are not dense", **facts)
        if header.is_control:
            self._follow_entry(batch)
        else:
            self._follow_producer(header)
        self.batches.append(Batch(bytes(batch.data), header))
        if header.record_count:
            self._index_of_offset[header.base_offset] = header.index
        self.end_offset = header.end_offset

    def snapshot(self, node: NodeId, index: Index, state: bytes) -> None:
        """Take the state that a member saved or restored for an index: it is the same for all."""
        known = self._states.setdefault(index, state)
        if known != state:
            violated("I14", "two members have different states at one index", group=self.group, node=node, index=index)

    def at_offset(self, base_offset: Offset) -> Batch | None:
        """Return the applied batch that begins at an offset."""
        index = self._index_of_offset.get(base_offset)
        return None if index is None else self.batches[index - 1]

    def value_at(self, offset: Offset) -> bytes | None:
        """Return the value of the record at an offset; None if none was applied."""
        base_offset = offset
        while base_offset > 0 and base_offset not in self._index_of_offset:
            base_offset = Offset(base_offset - 1)
        batch = self.at_offset(base_offset)
        values = [] if batch is None else batch.values(offset, Offset(offset + 1))
        return values[0] if values else None

    def check_read(self, node: NodeId, batch: Batch) -> None:
        """Take a batch that a reader was served."""
        at = batch.header.index - 1
        facts = {"group": self.group, "node": node, "index": batch.header.index}
        require(at < len(self.batches), "I7", "a reader was served what is not committed", **facts)
        require(
            self.batches[at].data == batch.data, "I9", "a reader was served other bytes than are committed", **facts
        )

    def data_batches(self) -> Iterator[Batch]:
        """Return the batches that hold records, in order."""
        return (batch for batch in self.batches if batch.header.record_count)

    def _follow_entry(self, batch: Batch) -> None:
        entry = decode_entry(batch)
        if isinstance(entry, FenceEntry):
            epoch, expected = self._producers.get(entry.producer_id, (0, 0))
            self._producers[entry.producer_id] = (max(epoch, entry.epoch), expected)
        elif isinstance(entry, TrimEntry):
            check_trim(entry, self.batches, index=batch.header.index)
            self.first_offset = max(self.first_offset, entry.offset)

    def _follow_producer(self, header: BatchHeader) -> None:
        if header.producer_id == NO_PRODUCER:
            return
        epoch, expected = self._producers.get(header.producer_id, (0, 0))
        facts = {"group": self.group, "producer": header.producer_id, "index": header.index}
        require(header.producer_epoch >= epoch, "I11", "a fenced producer's batch is in the log", **facts)
        if header.base_sequence < expected:
            violated("I11", "a batch is in the log twice", sequence=header.base_sequence, **facts)
        require(header.base_sequence == expected, "I11", "a producer's batch is missing", expected=expected, **facts)
        self._producers[header.producer_id] = (header.producer_epoch, header.base_sequence + header.record_count)

    def _complain(self, node: NodeId, header: BatchHeader, other: BatchHeader) -> None:
        violated(
            "I5" if header.term != other.term else "I9",
            "two members apply different bytes at one index",
            group=self.group,
            node=node,
            index=header.index,
            term=header.term,
            other_term=other.term,
        )


def check_trim(trim: TrimEntry, batches: Sequence[Batch], *, index: Index) -> None:
    """Check a trim: it ends at an earlier summary, at that summary's index and offset."""
    facts = {"index": index, "trimmed_to": trim.index, "offset": trim.offset}
    require(0 < trim.index < index, "I18", "a trim does not end before itself", **facts)
    summary = batches[trim.index - 1]
    is_summary = summary.header.is_control and isinstance(decode_entry(summary), StateSnapshotEntry)
    require(is_summary, "I18", "a trim does not end at a summary", **facts)
    require(summary.header.base_offset == trim.offset, "I18", "a trim ends at another offset than its summary", **facts)


def check_ack(send: RecordedBatch, base_offset: Offset, committed: CommittedLog) -> None:
    """Check an acknowledgement: the batch is committed at that offset, after all that was acknowledged before."""
    facts = {"group": send.group, "producer": send.producer_id, "sequence": send.base_sequence, "offset": base_offset}
    batch = committed.at_offset(base_offset)
    if batch is None:
        violated("I7", "a send is acknowledged at an offset where nothing is committed", **facts)
    header = batch.header
    is_same = (header.producer_id, header.producer_epoch, header.base_sequence, header.record_count) == (
        send.producer_id,
        send.epoch,
        send.base_sequence,
        len(send.values),
    )
    require(is_same, "I8", "a send is acknowledged at an offset that holds another batch", **facts)
    require(
        base_offset >= send.acked_before,
        "I8",
        "a send was put before what was acknowledged when it began",
        acked_before=send.acked_before,
        **facts,
    )


def check_end_read(read: EndRead, end_offset: Offset, committed: CommittedLog, *, node: NodeId) -> None:
    """Check a linearizable read of the end: no older than its call, no newer than what is committed."""
    facts = {"group": read.group, "node": node, "read": end_offset}
    require(end_offset >= read.at_least, "I7", "a read is stale", known_before=read.at_least, **facts)
    require(end_offset <= committed.end_offset, "I7", "a read shows what is not committed", **facts)


def check_sends(sends: Iterable[RecordedBatch], committed: CommittedLog) -> None:
    """Check a group's whole history against its committed log."""
    places = _find_values(committed.data_batches())
    known: set[bytes] = set()
    for send in sends:
        known.update(send.values)
        offsets = [places.get(value) for value in send.values]
        facts = {"group": send.group, "producer": send.producer_id, "epoch": send.epoch, "value": send.values[0]}
        require(send.outcome != "pending", "F4", "a send has no outcome", **facts)
        is_there = offsets[0] is not None
        require(all((offset is not None) == is_there for offset in offsets), "I9", "a batch is there in part", **facts)
        if send.outcome == "ok":
            require(is_there, "F2", "an acknowledged send is lost", **facts)
            expected = list(range(send.base_offset or 0, (send.base_offset or 0) + len(send.values)))
            require(offsets == expected, "I8", "an acknowledged send has moved", at=offsets, **facts)
        elif send.outcome == "fail":
            require(not is_there, "I12", "a send that was not done is there", **facts)
    unknown = places.keys() - known
    require(not unknown, "I9", "the log has a value that no client sent", value=min(unknown, default=b""))


def _find_values(batches: Iterable[Batch]) -> dict[bytes, Offset]:
    places: dict[bytes, Offset] = {}
    for batch in batches:
        batch.verify()
        for at, value in enumerate(batch.values()):
            if value is None or value in places:
                violated("I11", "a value is there twice, or is null", value=value, offset=batch.header.base_offset + at)
            places[value] = Offset(batch.header.base_offset + at)
    return places


def check_consumed(consumed: ConsumeResult, committed: CommittedLog, *, node: NodeId) -> None:
    """Check the records that a consumer was given: committed ones, without a gap, up to the cursor."""
    facts = {"group": committed.group, "node": node, "first": consumed.first_offset, "cursor": consumed.cursor}
    for batch in consumed.batches:
        committed.check_read(node, batch)
    at = consumed.first_offset
    for batch in consumed.batches:
        require(batch.header.base_offset <= at < batch.header.end_offset, "I17", "records are left out", **facts)
        at = batch.header.end_offset
    require(consumed.first_offset <= consumed.cursor <= at, "I17", "a cursor is where no record was read", **facts)
    is_cut_too_short = bool(consumed.batches) and consumed.cursor <= consumed.batches[-1].header.base_offset
    require(not is_cut_too_short, "I17", "a batch was returned of which no record is meant", **facts)


def check_taken(records: list[Record], committed: CommittedLog, *, node: NodeId) -> None:
    """Check records that a consumer was given one by one: they are those that are committed at their offsets."""
    for record in records:
        facts = {"group": committed.group, "node": node, "offset": record.offset}
        require(record.value == committed.value_at(record.offset), "I7", "a record is not what is committed", **facts)


def check_nothing_skipped(
    seen: set[Offset], committed: CommittedLog, *, first_offset: Offset, lost_max: int, consumer: int
) -> None:
    """Check a consumer that has read to the end: it misses no more than unanswered calls may have consumed."""
    missing = [offset for offset in range(first_offset, committed.end_offset) if offset not in seen]
    require(
        len(missing) <= lost_max,
        "I17",
        "a consumer never got records that no call can have taken along",
        group=committed.group,
        consumer=consumer,
        missing=missing[:5],
        count=len(missing),
        lost_max=lost_max,
    )
