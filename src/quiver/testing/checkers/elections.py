"""Terms, roles and commit indexes of a group's members, as they move (I1, I2, I4).

One leader per term, ever. A member's term never goes back, not even over restarts as far as others have
heard of it; its commit index and log start never go back during a life. Whoever becomes leader holds all
that is committed.
"""

from __future__ import annotations

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Raft
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.finding import found, require


class ElectionChecker:
    """Watch the elections of one group."""

    def __init__(self, committed: CommittedLog) -> None:
        self._committed = committed
        self._leaders: dict[Term, NodeId] = {}
        self.leader_count = 0

    @property
    def group(self) -> GroupId:
        """Return the group."""
        return self._committed.group

    def lead(self, node: NodeId, raft: Raft) -> None:
        """Take note that a member leads."""
        known = self._leaders.setdefault(raft.term, node)
        require(known == node, "I1", "two leaders in one term", group=self.group, term=raft.term, a=known, b=node)
        self.leader_count += 1
        self._require_complete(node, raft)

    def count(self, node: NodeId, raft: Raft, index: Index) -> None:
        """Take note of what a leader commits by counting copies: an entry of its own term (§5.4.2, Figure 8)."""
        term = raft.term_at(index)
        facts = {"group": self.group, "node": node, "index": index, "entry_term": term, "leader_term": raft.term}
        require(term == raft.term, "I4", "a leader commits an entry of an earlier term by counting", **facts)

    def move(self, node: NodeId, what: str, before: int, after: int) -> None:
        """Take note that a number moved that may only grow."""
        if after < before:
            found("I2", f"a {what} went back", group=self.group, node=node, before=before, after=after)

    def _require_complete(self, node: NodeId, raft: Raft) -> None:
        """Leader completeness: by log matching it is enough to look at the last committed entry."""
        last = self._committed.commit_index
        if last < raft.first_index - 1:
            return  # it stands on a snapshot of more than was known to be committed
        if raft.term < self._committed.terms[last]:
            return  # its votes came late: a leader of a later term has committed since, and it will hear of it
        term = raft.term_at(Index(last))
        require(
            term == self._committed.terms[last],
            "I4",
            "a leader lacks a committed entry",
            group=self.group,
            node=node,
            leader_term=raft.term,
            index=last,
            its_term=term,
            committed_term=self._committed.terms[last],
        )
