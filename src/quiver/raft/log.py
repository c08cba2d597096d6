"""The core's view of its log: terms, durability, commitment and configurations; never bytes.

`RaftLog` owns the rules that no caller may break: committed entries are never truncated (R6), commitment never goes
back, and a report of durability counts only for the write that it is about (R7).
Invariants: base <= commit <= last; durable <= last.

`TermMap` holds the index range and the term of each index, as a few runs. Terms only grow along a log (§5.3), so
`(first index, term)` of each run answers every question that Raft asks about entries it does not hold. The first run
begins at the *base*: the entry just before the log's start, whose term is kept because an append may refer to it. An
empty new log has base 0 of term 0.
Invariants: `first_index == base_index + 1`; runs grow strictly in index and in term.

`InitialState` is what the driver reads from storage. The core trusts it, except that a term older than the log's is
raised.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

from quiver.errors import invariant
from quiver.model import Index, NodeId, Term
from quiver.raft.configuration import Configuration, ConfigurationHistory
from quiver.raft.messages import Entry, SnapshotMetadata


class InitialState(Struct, frozen=True, kw_only=True):
    """The content of the disk when a member starts; all of it is durable.

    A new group is bootstrapped by giving each first member the same configuration at index 0, once in
    the member's life: a node whose disk was lost must come back under a new id (R22). A member without
    any configuration that names it is *blank*: it accepts entries but neither votes nor campaigns.

    `term` may be older than the last entry's if the crash fell between the two writes: it is then raised,
    with no vote, which is right because a vote or answer of that term cannot have been sent (R4).
    """

    term: Term = Term(0)
    vote: NodeId | None = None
    first_index: Index = Index(1)
    """Where the log starts."""
    last_index: Index = Index(0)
    base_term: Term = Term(0)
    """Term of the entry before `first_index`; 0 if there never was one."""
    terms: tuple[tuple[Index, Term], ...] = ()
    """`(first index, term)` of each run of entries from `first_index` on."""
    commit: Index = Index(0)
    """A lower bound of the commit index, if known, such as the applied index."""
    configurations: tuple[tuple[Index, Configuration], ...] = ()
    snapshot: SnapshotMetadata | None = None
    recover_until: Index | None = None
    """Set when the log lost entries that this member may have acknowledged: the last such index (R18)."""
    is_joining: bool = False
    """This member started without a log, to join a group that exists, and has not caught up with a leader yet (R24)."""


class TermMap:
    """The index range of a log and the term at each index."""

    __slots__ = ("_firsts", "_terms", "last_index")

    def __init__(
        self,
        runs: Sequence[tuple[Index, Term]],
        *,
        base_index: Index,
        base_term: Term,
        last_index: Index,
    ) -> None:
        self._firsts: list[Index] = [base_index]
        self._terms: list[Term] = [base_term]
        self.last_index = base_index
        for first_index, term in runs:
            self.last_index = Index(first_index - 1)
            self.append(term, count=1)
        self.last_index = last_index

    @property
    def base_index(self) -> Index:
        """Return the index before the first entry held."""
        return self._firsts[0]

    @property
    def first_index(self) -> Index:
        """Return the index of the first entry held; one past the last for an empty log."""
        return Index(self._firsts[0] + 1)

    @property
    def last_term(self) -> Term:
        """Return the term of the last entry."""
        return self._terms[-1]

    def runs(self) -> tuple[tuple[Index, Term], ...]:
        """Return `(first index, term)` of each run; the first one begins at the base."""
        return tuple(zip(self._firsts, self._terms, strict=True))

    def term_at(self, index: Index) -> Term | None:
        """Return the term of an entry or of the base; None outside the log."""
        if index > self.last_index or index < self._firsts[0]:
            return None
        if index >= self._firsts[-1]:
            return self._terms[-1]
        return self._terms[bisect_right(self._firsts, index) - 1]

    def append(self, term: Term, *, count: int) -> None:
        """Add `count` entries of one term at the end."""
        if term != self._terms[-1]:
            invariant(term > self._terms[-1], "terms never go back along a log", term=term, last=self._terms[-1])
            self._firsts.append(Index(self.last_index + 1))
            self._terms.append(term)
        self.last_index = Index(self.last_index + count)

    def truncate(self, first_index: Index) -> None:
        """Remove the entries from `first_index` on."""
        invariant(first_index > self._firsts[0], "a log is never truncated before its start", first_index=first_index)
        while self._firsts[-1] >= first_index:
            self._firsts.pop()
            self._terms.pop()
        self.last_index = Index(first_index - 1)

    def compact(self, first_index: Index) -> None:
        """Move the log's start up to `first_index`; the term just before it stays known."""
        base_index = Index(first_index - 1)
        base_term = self.term_at(base_index)
        invariant(base_term is not None, "a log is compacted within its range", first_index=first_index)
        run = bisect_right(self._firsts, base_index) - 1
        del self._firsts[:run], self._terms[:run]
        self._firsts[0] = base_index

    def reset(self, base_index: Index, base_term: Term) -> None:
        """Become an empty log that starts after `base_index`."""
        self._firsts = [base_index]
        self._terms = [base_term]
        self.last_index = base_index

    def highest_at_most(self, index: Index, term: Term) -> tuple[Index, Term]:
        """Return the highest entry at or below `index` whose term is at most `term`, else the base.

        Both sides of a conflict use it to skip whole terms (§5.3, the last paragraphs but one): an entry
        of a later term, or beyond the other's end, cannot be the common one.
        """
        index = min(index, self.last_index)
        if index <= self._firsts[0]:
            return self._firsts[0], self._terms[0]
        run = bisect_right(self._firsts, index) - 1
        if self._terms[run] <= term:
            return index, self._terms[run]
        run = bisect_right(self._terms, term) - 1
        if run < 0:
            return self._firsts[0], self._terms[0]
        return Index(self._firsts[run + 1] - 1), self._terms[run]


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
