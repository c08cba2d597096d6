"""A leader's view of one member: how much it has, and how much more may be sent to it.

States, after etcd's: PROBE sends one append per answer until the common entry is found; REPLICATE runs
ahead of the answers within a window of messages and bytes; SNAPSHOT waits for an install; LOST is a
member that no longer has what it acknowledged: nothing is sent to it and it counts for nothing.

Invariants: match < next; `ticket` is not 0 exactly while the driver holds a permission to send.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from msgspec import Struct

from quiver.model import Index, NodeId


class ProgressState(StrEnum):
    """How a member is being served."""

    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"
    LOST = "lost"


PROBE, REPLICATE, SNAPSHOT, LOST = ProgressState
"""The members by their short names: looking them up in the enum costs more than all that is done with them."""


class RaftPeerStatus(Struct, frozen=True):
    """One member as its leader sees it, for people and metrics."""

    node: NodeId
    state: ProgressState
    match_index: Index
    next_index: Index
    inflight_messages: int
    inflight_bytes: int
    heard_ms: int
    is_low: bool = False
    is_full: bool = False
    no_transfer_before_ms: int = 0


class PeerProgress:
    """One member's progress."""

    __slots__ = (
        "heard_ms",
        "inflight",
        "inflight_bytes",
        "is_full",
        "is_joining",
        "is_low",
        "match",
        "moved_ms",
        "next",
        "no_transfer_before_ms",
        "node",
        "probe_sent",
        "received",
        "round",
        "sending_from",
        "state",
        "ticket",
    )

    def __init__(self, node: NodeId, *, next_index: Index, now_ms: int) -> None:
        self.node = node
        self.state: ProgressState = PROBE
        self.match = Index(0)
        self.received = Index(0)
        self.next = next_index
        self.round = 0
        self.heard_ms = now_ms
        self.moved_ms = now_ms
        self.inflight: deque[tuple[Index, int]] = deque()
        self.inflight_bytes = 0
        self.ticket = 0
        self.sending_from = next_index
        self.probe_sent = False
        self.is_low = False
        """Whether the member says that its disk is nearly full: it should get no more records."""
        self.is_full = False
        """Whether the member says that its disk is full: it is sent no entries."""
        self.is_joining = False
        """Whether the member says that it has no vote yet (R24): it cannot be a voter."""
        self.no_transfer_before_ms = 0
        """Until when it gets no leadership, because it did not take over when it was asked to."""

    def note_room(self, *, is_low: bool, is_full: bool) -> None:
        """Record whether a member has room; once it has again, what it dropped is sent again."""
        has_room_again = self.is_full and not is_full
        self.is_low, self.is_full = is_low, is_full
        if has_room_again and self.state in (PROBE, REPLICATE):
            self.begin_probe(Index(self.received + 1), wait=False)

    def advance(self, match: Index, received: Index, *, now_ms: int) -> bool:
        """Record an acknowledgement; return whether the match moved."""
        if received > self.received:
            self.received = received
            self.moved_ms = now_ms
        if match <= self.match:
            return False
        self.match = match
        self.moved_ms = now_ms
        if match >= self.next:
            self.next = Index(match + 1)
        inflight = self.inflight
        while inflight and inflight[0][0] <= match + 1:
            self.inflight_bytes -= inflight.popleft()[1]
        return True

    def begin_sending(self, ticket: int) -> None:
        """Record a permission to send from `next` on."""
        self.ticket = ticket
        self.sending_from = self.next

    def record_sent(self, end_index: Index, size_bytes: int, *, now_ms: int) -> bool:
        """Record an append that left with entries up to `end_index`; return whether it had any."""
        self.ticket = 0
        if self.state is PROBE:
            self.probe_sent = True
        elif end_index > max(self.sending_from, self.match + 1):  # else nothing left, or the answer was faster
            if not self.inflight:
                self.moved_ms = now_ms
            self.inflight.append((end_index, size_bytes))
            self.inflight_bytes += size_bytes
            self.next = max(self.next, end_index)
        return end_index > self.sending_from

    def begin_probe(self, next_index: Index, *, wait: bool) -> None:
        """Go back to one append at a time; with `wait` not before the member is heard again."""
        self.state = PROBE
        self.next = max(next_index, Index(self.match + 1))
        self.probe_sent = wait
        self._forget_inflight()

    def begin_replicate(self) -> None:
        """Run ahead from the last entry known to be equal."""
        self.state = REPLICATE
        self.next = Index(max(self.match, self.received) + 1)
        self.inflight.clear()
        self.inflight_bytes = 0

    def begin_snapshot(self, ticket: int) -> None:
        """Wait for a snapshot to be installed."""
        self.state = SNAPSHOT
        self._forget_inflight()
        self.ticket = ticket

    def fall_back(self, match: Index, received: Index) -> None:
        """Count only what a restarted member still has, and send it the rest again."""
        self.match = match
        self.received = received
        self.begin_probe(Index(received + 1), wait=False)

    def note_snapshot_sent(self, *, now_ms: int) -> None:
        """Give the snapshot that left some time to arrive."""
        self.ticket = 0
        self.moved_ms = now_ms

    def mark_lost(self) -> None:
        """Stop counting and serving this member until the next term."""
        self.state = LOST
        self.match = Index(0)
        self._forget_inflight()

    def is_unverified(self) -> bool:
        """Return whether a restarted member has what it acknowledged but no longer knows that it matches.

        Such a member cannot follow the commit index; an append without entries carries it.
        """
        return self.state is PROBE and self.received < self.match

    def is_stalled(self, *, now_ms: int, timeout_ms: int) -> bool:
        """Return whether what was sent must have been lost: not even received for too long.

        Received but not durable is a slow disk, which sending again would not speed up.
        """
        if self.state is REPLICATE:
            is_waiting = bool(self.inflight) and self.received < self.next - 1
        else:
            is_waiting = self.state is SNAPSHOT and not self.ticket
        return is_waiting and now_ms - self.moved_ms >= timeout_ms

    def status(self) -> RaftPeerStatus:
        """Return a snapshot for people and metrics."""
        return RaftPeerStatus(
            node=self.node,
            state=self.state,
            match_index=self.match,
            next_index=self.next,
            inflight_messages=len(self.inflight),
            inflight_bytes=self.inflight_bytes,
            heard_ms=self.heard_ms,
            is_low=self.is_low,
            is_full=self.is_full,
            no_transfer_before_ms=self.no_transfer_before_ms,
        )

    def _forget_inflight(self) -> None:
        self.inflight.clear()
        self.inflight_bytes = 0
        self.ticket = 0
