"""What happened to a group lately, and how often and how long on the whole node: for operators and metrics only.

`MemberHistory` keeps a member's last elections and membership changes, at most `EVENTS_MAX`, and since when it knows
its leader. `ReplicationCounters` are the counters and latencies of all members of a node. They decide nothing.
"""

from __future__ import annotations

from collections import deque

import msgspec

from quiver.clock import Clock
from quiver.metrics import Histogram, now_s
from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, Role, RoleChange

EVENTS_MAX = 16
"""Events that a member keeps; a group that hibernates or is well has few."""
APPENDS_MAX = 1024
"""Appends whose commitment is measured at the same time; a leader without a majority must not grow."""


class ReplicationCounters:
    """Counters and latencies of all members of a node."""

    __slots__ = ("campaigns", "commit", "elections_won", "leaderships_lost", "replicate", "transfers")

    def __init__(self) -> None:
        self.replicate = Histogram()
        """From an append on the leader until a majority has it on disk; one value per group of proposals."""
        self.commit = Histogram()
        """From a proposal until it is applied and answered; one value per group of proposals."""
        self.campaigns = 0
        self.elections_won = 0
        self.leaderships_lost = 0
        self.transfers = 0


class MemberEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a member."""

    at_ms: int
    """Wall clock."""
    kind: str
    """leader, follower, candidate, pre_candidate, members or transfer."""
    epoch: Term
    leader: NodeId | None = None
    members: tuple[NodeId, ...] = ()
    learners: tuple[NodeId, ...] = ()


class MemberHistory:
    """The last events of one member."""

    __slots__ = ("_appends", "_clock", "_counters", "_role", "events", "saved_index", "saved_ms", "since_ms")

    def __init__(self, counters: ReplicationCounters, clock: Clock, *, saved_index: Index) -> None:
        self.events: deque[MemberEvent] = deque(maxlen=EVENTS_MAX)
        self.since_ms = clock.wall_ms()
        """When the member's role or leader changed last, or it was opened."""
        self.saved_index = saved_index
        """Last index of the newest snapshot or checkpoint."""
        self.saved_ms = self.since_ms
        """When that was saved, or the member was opened."""
        self._counters = counters
        self._clock = clock
        self._role = Role.FOLLOWER
        self._appends: deque[tuple[Index, float]] = deque(maxlen=APPENDS_MAX)

    def note_role(self, change: RoleChange) -> None:
        """Record a new role, term or leader."""
        counters = self._counters
        if change.role is Role.CANDIDATE and self._role is not Role.CANDIDATE:
            counters.campaigns += 1
        elif change.role is Role.LEADER and self._role is not Role.LEADER:
            counters.elections_won += 1
        if change.role is not Role.LEADER:
            counters.leaderships_lost += self._role is Role.LEADER
            self._appends.clear()
        self._role = change.role
        now_ms, last = self._clock.wall_ms(), self.events[-1] if self.events else None
        event = MemberEvent(at_ms=now_ms, kind=change.role.value, epoch=change.term, leader=change.leader)
        if last is None or event != msgspec.structs.replace(last, at_ms=now_ms):  # a repeated attempt is no news
            self.events.append(event)
            self.since_ms = now_ms

    def note_members(self, configuration: Configuration, term: Term) -> None:
        """Record a change of the group's members that was appended to the log."""
        self.events.append(
            MemberEvent(
                at_ms=self._clock.wall_ms(),
                kind="members",
                epoch=term,
                members=configuration.voters,
                learners=configuration.learners,
            )
        )

    def note_transfer(self, to: NodeId, term: Term) -> None:
        """Record that this leader begins to transfer its leadership."""
        self._counters.transfers += 1
        self.events.append(MemberEvent(at_ms=self._clock.wall_ms(), kind="transfer", epoch=term, leader=to))

    def note_saved(self, index: Index) -> None:
        """Record that a snapshot or checkpoint of everything up to `index` is on disk."""
        self.saved_index, self.saved_ms = index, self._clock.wall_ms()

    def note_appended(self, end_index: Index) -> None:
        """Start to measure how long the entries below `end_index`, proposed together, take to be committed."""
        self._appends.append((end_index, now_s()))

    def note_committed(self, commit_index: Index) -> None:
        """Finish to measure the entries up to `commit_index`: one value, that of the oldest."""
        appends = self._appends
        if appends and appends[0][0] <= commit_index + 1:
            self._counters.replicate.observe(now_s() - appends.popleft()[1])
            while appends and appends[0][0] <= commit_index + 1:
                appends.popleft()
