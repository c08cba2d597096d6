"""Observe members after every event, and check their terms, roles, commit indexes and configurations (I1, I2, I4).

`Observer` runs after every event, so it is written for speed: a member whose term, role, commit index, log start and
configuration are the same objects as before costs a handful of comparisons. Every change goes to the checker that it
concerns.

A term has one leader, ever. A member's term never goes back, not even over restarts as far as others have heard of it;
its commit index and log start never go back during a life. A new leader holds every committed entry.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Configuration, Raft, Role
from quiver.raft.leadership import Transfer
from quiver.replication import Member
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.checkers.durability import Copy, PromiseChecker, check_majority
from quiver.testing.simulator.report import require, violated
from quiver.testing.trace import Trace


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
    """Return whether every set of nodes that can decide for one shares a node with every one of the other."""
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


PLATTER_EVERY = 10
"""How many commits pass between two checks of the platters."""


class Observer:
    """All checkers of one run, and the members they watch."""

    def __init__(self, groups: tuple[GroupId, ...], trace: Trace) -> None:
        self.committed = {group: CommittedLog(group) for group in groups}
        self.elections = {group: ElectionChecker(self.committed[group]) for group in groups}
        self.configurations = {group: ConfigurationChecker(group) for group in groups}
        self.copies: dict[GroupId, dict[NodeId, Copy]] = {group: {} for group in groups}
        self._promises: dict[tuple[NodeId, GroupId], PromiseChecker] = {}
        self._watches: dict[NodeId, tuple[MemberWatch, ...]] = {}
        self._trace = trace
        self._commits = 0

    def promises(self, node: NodeId, group: GroupId) -> PromiseChecker:
        """Return the checker of a member's messages, the same one over all its lives."""
        checker = self._promises.get((node, group))
        if checker is None:
            checker = self._promises[node, group] = PromiseChecker(node, self.committed[group])
        return checker

    def watch(self, node: NodeId, member: Member) -> None:
        """Check a member after each event of its node, from now until `forget`."""
        self._watches[node] = (*self._watches.get(node, ()), MemberWatch(self, node, member))

    def forget(self, node: NodeId) -> None:
        """Look no more: the node died."""
        self._watches.pop(node, None)

    def look(self, node: NodeId) -> None:
        """Check what an event of a node has changed."""
        for watch in self._watches.get(node, ()):
            watch.look()

    def role_changed(self, watch: MemberWatch) -> None:
        """Hand a new role on."""
        raft = watch.raft
        leader = -1 if raft.leader is None else raft.leader
        self._trace.record("role", watch.node, watch.group, raft.role.value, raft.term, leader)
        if raft.role is Role.LEADER:
            self.elections[watch.group].lead(watch.node, raft)

    def commit_moved(self, watch: MemberWatch, index: Index) -> None:
        """Hand a new commit index on; a leader's is its own count and must be true."""
        raft, group = watch.raft, watch.group
        committed = self.committed[group]
        is_news = index > committed.commit_index
        committed.commit(watch.node, index, raft.term_at)
        if raft.role is not Role.LEADER or not is_news:
            return
        self._commits += 1
        self.elections[group].count(watch.node, raft, index)
        check_majority(
            raft._state.log.configurations.active,  # the latest in its log, whatever it goes by (§6)
            self.copies[group],
            group=group,
            index=index,
            term=committed.terms[index],
            on_platter=self._commits % PLATTER_EVERY == 0,
        )

    def configuration_changed(self, watch: MemberWatch) -> None:
        """Hand a new configuration on."""
        raft = watch.raft
        self._trace.record("configuration", watch.node, watch.group, str(raft.configuration))
        if raft.role is Role.LEADER:
            unsettled = list(raft._state.log.configurations.since(raft.commit_index))
            self.configurations[watch.group].lead(watch.node, unsettled)


class MemberWatch:
    """One member in one life, as it was when it was last checked."""

    __slots__ = (
        "_commit",
        "_configuration",
        "_elections",
        "_first_index",
        "_last_index",
        "_observer",
        "_role",
        "_state",
        "_term",
        "_transfer",
        "group",
        "member",
        "node",
        "raft",
    )

    def __init__(self, observer: Observer, node: NodeId, member: Member) -> None:
        self.node = node
        self.group = member.group
        self.member = member
        self.raft = raft = member.raft
        self._observer = observer
        self._elections = observer.elections[member.group]
        self._state = raft._state  # properties would double the price of a look
        self._term = raft.term
        self._role = raft.role
        self._commit = raft.commit_index
        self._first_index = raft.first_index
        self._configuration = raft.configuration
        self._last_index = raft.last_index
        self._transfer: Transfer | None = None

    def look(self) -> None:
        """Compare, and report what has changed."""
        state = self._state
        log = state.log
        if state.leadership is not None and (state.leadership.transfer or self._transfer) is not None:
            self._look_at_transfer(state.leadership.transfer)
        if log.commit != self._commit:
            self._elections.move(self.node, "commit index", self._commit, log.commit)
            self._commit = log.commit
            self._observer.commit_moved(self, log.commit)
            check_bounds(self.member)
        if state.term != self._term:
            self._elections.move(self.node, "term", self._term, state.term)
            self._term = state.term
            self._role = Role.FOLLOWER
        if state.role is not self._role:
            self._role = state.role
            self._observer.role_changed(self)
        if state.configuration is not self._configuration:
            self._configuration = state.configuration
            self._observer.configuration_changed(self)
        if log.terms.first_index != self._first_index:
            self._elections.move(self.node, "log start", self._first_index, log.terms.first_index)
            self._first_index = log.terms.first_index

    def _look_at_transfer(self, transfer: Transfer | None) -> None:
        """A leader that hands over takes no more proposals (R15); what the core adds itself are configurations."""
        last_index = self._state.log.terms.last_index
        if transfer is not None and transfer is self._transfer and self._state.configuration is self._configuration:
            is_still = last_index <= self._last_index
            require(is_still, "R15", "a leader that hands over took a proposal", group=self.group, node=self.node)
        self._transfer, self._last_index = transfer, last_index
