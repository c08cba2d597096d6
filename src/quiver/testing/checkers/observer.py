"""The eyes of the checkers: what moved in the node whose callback has just run.

Runs after every event, so it is written for speed: a member whose term, role, commit index, log start and
configuration are the same objects as before costs a handful of comparisons. Whatever changed goes to the
checker that it concerns.
"""

from __future__ import annotations

from quiver.model import GroupId, Index, NodeId
from quiver.raft import Role
from quiver.raft.leadership import Transfer
from quiver.replication import Member
from quiver.testing.checkers.committed import CommittedLog
from quiver.testing.checkers.durability import Copy, check_majority
from quiver.testing.checkers.members import ConfigurationChecker, ElectionChecker, check_bounds
from quiver.testing.checkers.promises import PromiseChecker
from quiver.testing.simulator.report import require
from quiver.testing.trace import Trace

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
