"""The one committed log of a group as it becomes known: all that a member commits or applies must agree with it.

The first member to call an entry committed fixes its term, the first to apply it fixes its bytes. From then
on any other claim about that index is a finding: nothing committed changes, vanishes or moves (I3, I5, I7,
I8, I9), and a producer's batches follow each other without gap or repetition (I11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quiver.model import NO_PRODUCER, GroupId, Index, NodeId, Offset, ProducerId, Term
from quiver.partition.entries import FenceEntry, StateSnapshotEntry, TrimEntry, decode_entry
from quiver.record import Batch, BatchHeader
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
        require(header.index <= self.commit_index, "I7", "an entry is applied that nobody committed", **facts)
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
