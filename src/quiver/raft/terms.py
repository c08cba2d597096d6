"""The shape of a log: which indexes it holds and the term of each, as a few runs.

Terms only grow along a log (§5.3), so `(first index, term)` of each run says everything that Raft asks
of entries it does not hold. The first run begins at the *base*: the entry just before the log's
start, whose term is kept because an append may refer to it. An empty new log has base 0 of term 0.

Invariants: `first_index == base_index + 1`; runs grow strictly in index and in term.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quiver.errors import invariant
from quiver.model import Index, Term


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
