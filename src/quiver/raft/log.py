"""The core's view of its log: terms, durability, commitment and configurations; never bytes.

Owns the rules that no caller may break: committed entries are never truncated (R6), commitment never goes
back, and a report of durability counts only for the write that it is about (R7).

Invariants: base <= commit <= last; durable <= last.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.errors import invariant
from quiver.model import Index, Term
from quiver.raft.config import InitialState
from quiver.raft.configuration import ConfigurationHistory
from quiver.raft.messages import Entry, SnapshotMetadata
from quiver.raft.terms import TermMap

NOTHING = range(0)


class RaftLog:
    """The knowledge about one member's log."""

    __slots__ = ("applied", "commit", "configurations", "durable", "terms", "truncated_in")

    def __init__(self, initial: InitialState) -> None:
        base_index = Index(initial.first_index - 1)
        self.terms = TermMap(
            initial.terms, base_index=base_index, base_term=initial.base_term, last_index=initial.last_index
        )
        history = list(initial.configurations)
        if not history and initial.snapshot is not None:
            history = [(initial.snapshot.last_index, initial.snapshot.configuration)]
        self.configurations = ConfigurationHistory(history)
        self.durable = initial.last_index
        self.commit = min(max(initial.commit, base_index), initial.last_index)
        self.applied = self.commit
        self.truncated_in = Term(0)

    def append(self, entries: Sequence[Entry]) -> bool:
        """Record entries that follow the last one; return whether they include a configuration."""
        first, last = entries[0], entries[-1]
        terms = self.terms
        invariant(first.index == terms.last_index + 1, "entries follow the log's end")
        if first.term == last.term:  # terms never go back, so the ones between are the same
            terms.append(first.term, count=len(entries))
        else:
            for entry in entries:
                terms.append(entry.term, count=1)
        bringing = [entry for entry in entries if entry.configuration is not None]
        for entry in bringing:
            assert entry.configuration is not None
            self.configurations.append(entry.index, entry.configuration)
        return bool(bringing)

    def truncate(self, first_index: Index, *, term: Term) -> None:
        """Forget the entries from `first_index` on, in `term`."""
        invariant(
            first_index > self.commit, "committed entries are never truncated", index=first_index, commit=self.commit
        )
        self.terms.truncate(first_index)
        self.configurations.truncate(first_index)
        self.durable = min(self.durable, Index(first_index - 1))
        self.truncated_in = term

    def mark_durable(self, index: Index, written_in: Term) -> bool:
        """Handle a report of durability; return whether it advanced the durable index."""
        if self._may_be_overwritten(written_in) or index <= self.durable:
            return False
        self.durable = min(index, self.terms.last_index)
        return True

    def _may_be_overwritten(self, written_in: Term) -> bool:
        """Return whether the log was truncated after a write of this term began.

        A log is truncated at most once per term, before anything is written in that term. So a write begun in an
        earlier term than that of the last truncation may be overwritten: its report is dropped, even if an equal entry
        has come back since (ABA). Nothing is lost: the truncation came with a write whose own report covers everything
        below it.
        """
        return written_in < self.truncated_in

    def advance_commit(self, index: Index) -> range:
        """Raise the commit index; return the newly committed indexes."""
        if index <= self.commit:
            return NOTHING
        invariant(index <= self.terms.last_index, "only entries of the log are committed")
        newly = range(self.commit + 1, index + 1)
        self.commit = index
        return newly

    def restore(self, snapshot: SnapshotMetadata, *, term: Term, matched: Index) -> None:
        """Become the empty log after a snapshot.

        Until the driver reports the restore, only what was acknowledged in this term counts as durable:
        the disk holds that before and after the replacement.
        """
        self.terms.reset(snapshot.last_index, snapshot.last_term)
        self.configurations = ConfigurationHistory([(snapshot.last_index, snapshot.configuration)])
        self.durable = min(self.durable, matched)
        self.commit = self.applied = snapshot.last_index
        self.truncated_in = term

    def compact(self, first_index: Index) -> None:
        """Move the log's start up; what was removed is committed."""
        if first_index <= self.terms.first_index:
            return
        invariant(first_index <= self.commit + 1, "only committed entries are removed", first_index=first_index)
        self.terms.compact(first_index)
        self.configurations.compact(first_index)
