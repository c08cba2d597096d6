"""One member as others see it: questions only, which change nothing.

`Member` adds the events, and what it does about them.
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.model import GroupId, Index, NodeId, Term
from quiver.raft import Configuration, Raft, RaftStatus
from quiver.replication.applier import Applier
from quiver.replication.follower_room import FollowerRoom
from quiver.replication.interfaces import Host
from quiver.replication.pending import PendingProposals
from quiver.replication.status import MemberStatus
from quiver.storage import Log


class MemberState:
    """The readable part of a member."""

    group: GroupId
    _raft: Raft
    _log: Log
    _room: FollowerRoom
    _applier: Applier
    _pending: PendingProposals
    _host: Host
    _now_ms: Callable[[], int]

    @property
    def is_leader(self) -> bool:
        """Return whether this member leads; see `is_ready` for whether it may serve."""
        return self._raft.is_leader

    @property
    def is_ready(self) -> bool:
        """Return whether this member leads and, having committed in its own term, knows all that is committed."""
        return self._raft.is_ready

    @property
    def leader(self) -> NodeId | None:
        """Return the leader of the group, as far as known."""
        return self._raft.leader

    @property
    def term(self) -> Term:
        """Return the current term."""
        return self._raft.term

    def leads_in(self, term: Term | None) -> bool:
        """Return whether this member leads, and its term is this one."""
        raft = self._raft
        return raft.term == term and raft.is_leader

    @property
    def needs_upgrade(self) -> str:
        """Return why this member has stopped applying until a newer program is started; empty if it has not."""
        unknown = self._applier.unknown
        return "" if unknown is None else f"applied up to index {self._applier.index}: {unknown.message}"

    @property
    def commit_index(self) -> Index:
        """Return the highest index known here to be committed."""
        return self._raft.commit_index

    @property
    def applied_index(self) -> Index:
        """Return the highest index that the state machine has applied."""
        return self._applier.index

    @property
    def configuration(self) -> Configuration:
        """Return the configuration in force: the latest in the log, committed or not."""
        return self._raft.configuration

    @property
    def committed_configuration(self) -> Configuration:
        """Return the latest configuration known here to be committed."""
        return self._raft.committed_configuration

    @property
    def raft(self) -> Raft:
        """Return the core, for tests and checkers; they must not pass events to it."""
        return self._raft

    @property
    def log(self) -> Log:
        """Return the log, for reading; callers must not change it, nor read entries that are not applied."""
        return self._log

    def status(self) -> MemberStatus:
        """Return a snapshot for people and metrics."""
        return MemberStatus(
            group=self.group,
            raft=self._raft.status(),
            log=self._log.status(),
            applied_index=self._applier.index,
            waiting=len(self._pending),
        )

    @property
    def is_full(self) -> bool:
        """Return whether this member stores no entries of its leader for want of room."""
        return self._room.is_full

    def raft_status(self) -> RaftStatus:
        """Return the part of the status that the Raft core knows."""
        return self._raft.status()

    def has_member(self, node: NodeId) -> bool:
        """Return whether a node belongs to the group."""
        return self._raft.configuration.includes(node)

    def is_caught_up(self, node: NodeId) -> bool:
        """Return whether this leader knows that another member has almost everything and may become a voter."""
        return self._raft.is_caught_up(node)

    def leader_silence_ms(self) -> int:
        """Return how long ago this member last knew that there is a leader."""
        return self._raft.leader_silence_ms(self._now_ms())

    def silence_ms(self, node: NodeId) -> int:
        """Return how long ago this leader last heard from a member; 0 for itself, else since its start if never."""
        now_ms = self._now_ms()
        heard = [peer.heard_ms for peer in self._raft.status().peers if peer.node == node]
        return now_ms - max(heard, default=0) if node != self._host.id else 0
