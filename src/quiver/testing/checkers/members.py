"""Terms, roles and commit indexes of a group's members, as they move (I1, I2, I4).

One leader per term, ever. A member's term never goes back, not even over restarts as far as others have
heard of it; its commit index and log start never go back during a life. Whoever becomes leader holds all
that is committed.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Configuration, Raft
from quiver.replication import Member
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.simulator.report import require, violated


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
        """Record that a member leads."""
        known = self._leaders.setdefault(raft.term, node)
        require(known == node, "I1", "two leaders in one term", group=self.group, term=raft.term, a=known, b=node)
        self.leader_count += 1
        self._require_complete(node, raft)

    def count(self, node: NodeId, raft: Raft, index: Index) -> None:
        """Record what a leader commits by counting copies: an entry of its own term (§5.4.2, Figure 8)."""
        term = raft.term_at(index)
        facts = {"group": self.group, "node": node, "index": index, "entry_term": term, "leader_term": raft.term}
        require(term == raft.term, "I4", "a leader commits an entry of an earlier term by counting", **facts)

    def move(self, node: NodeId, what: str, before: int, after: int) -> None:
        """Record that a number moved that may only grow."""
        if after < before:
            violated("I2", f"a {what} went back", group=self.group, node=node, before=before, after=after)

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


class ConfigurationChecker:
    """Watch the configurations of one group."""

    def __init__(self, group: GroupId) -> None:
        self._group = group
        self._judged: dict[tuple[Configuration, Configuration], bool] = {}

    def lead(self, node: NodeId, unsettled: list[Configuration]) -> None:
        """Take the newest committed configuration in a leader's log and those after it, newest first."""
        names = " <- ".join(map(str, unsettled))
        facts = {"group": self._group, "node": node, "configurations": names}
        require(len(unsettled) <= 2, "I15", "two membership changes are pending at once", **facts)
        for newer, older in pairwise(unsettled):
            meet = self._judged.get((newer, older))
            if meet is None:
                meet = self._judged[newer, older] = quorums_meet(newer, older)
            require(meet, "I15", "two configurations have quorums that do not meet", **facts)


def quorums_meet(first: Configuration, second: Configuration) -> bool:
    """Tell whether every set of nodes that can decide for one shares a node with every one of the other."""
    return all(one & other for one in _quorums(first) for other in _quorums(second))


def _quorums(configuration: Configuration) -> list[frozenset[NodeId]]:
    """Return the smallest sets of voters that hold a majority of every electorate."""
    voters = sorted({*configuration.voters, *configuration.voters_outgoing})
    smallest: list[frozenset[NodeId]] = []
    for size in range(1, len(voters) + 1):
        for chosen in combinations(voters, size):
            picked = frozenset(chosen)
            if any(smaller <= picked for smaller in smallest):
                continue
            if all(2 * len(picked.intersection(each)) > len(each) for each in configuration.electorates):
                smallest.append(picked)
    return smallest


QUEUED_OUTPUTS_MAX = 2_000
"""Outputs that wait for one save or restore: a few seconds of messages at the most."""


def check_bounds(member: Member) -> None:
    """Fail if something that a member holds is larger than it may be."""
    settings = member._settings
    leadership = member.raft._state.leadership
    facts = {"group": member.group, "node": member.raft.id}
    if leadership is not None:
        # One proposal may be larger than the whole bound when nothing else waits.
        allowed = settings.uncommitted_bytes_max + settings.append_bytes_max
        require(leadership.uncommitted_bytes <= allowed, "I16", "too many uncommitted bytes", **facts)
        for progress in leadership.peers:
            require(
                len(progress.inflight) <= settings.inflight_messages_max,
                "I16",
                "too many messages in flight",
                **facts,
            )
    waiting = len(member._outputs)
    require(waiting <= QUEUED_OUTPUTS_MAX, "I16", "too many outputs wait", count=waiting, **facts)
