"""Status of a node's groups, for people, metrics and the code that moves replicas. Pure values.

Being in sync decides nothing: commitment is counted entry by entry. It shows which voters could take over leadership
without catching up first; `find_successors` says which of them should.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from quiver.model import GroupId, Index, NodeId
from quiver.raft import RaftStatus, Role
from quiver.storage import LogStatus

LAG_ENTRIES_MAX = 1_000
"""Most committed entries that an in-sync voter may lack: what is in flight under load, and quick to send."""


class MemberStatus(msgspec.Struct, frozen=True):
    """A snapshot of one member."""

    group: GroupId
    raft: RaftStatus
    log: LogStatus
    applied_index: Index
    waiting: int
    """Number of proposals and reads without a result."""


class ReplicationPeerStatus(msgspec.Struct, frozen=True):
    """Another node as this one sees it."""

    node: NodeId
    is_alive: bool
    silent_ms: int


class Successor(msgspec.Struct, frozen=True):
    """A voter that leadership can be transferred to."""

    node: NodeId
    has_room: bool
    """Whether its disk has room for records, as far as is known."""


class ReplicatorStatus(msgspec.Struct, frozen=True):
    """A snapshot of a node's groups."""

    members: tuple[MemberStatus, ...]
    peers: tuple[ReplicationPeerStatus, ...]
    envelopes_sent: int
    envelopes_refused: int
    """Envelopes that could not be decoded."""
    messages_refused: int
    """Messages of strangers, or of terms that no election can have reached."""


def find_in_sync(status: RaftStatus, *, now_ms: int, silence_ms_max: int) -> tuple[NodeId, ...]:
    """Return the voters that have nearly all committed entries and answered lately; none unless `status` is a leader's.

    The members of a hibernating group send nothing, because all of them have everything: silence does not count there.
    """
    if status.role is not Role.LEADER:
        return ()
    keeping_up = {status.id} if status.commit_index - status.durable_index <= LAG_ENTRIES_MAX else set()
    for peer in status.peers:
        is_heard = status.hibernating or now_ms - peer.heard_ms <= silence_ms_max
        if is_heard and status.commit_index - peer.match_index <= LAG_ENTRIES_MAX:
            keeping_up.add(peer.node)
    return tuple(node for node in status.configuration.voters if node in keeping_up)


def find_successors(
    status: RaftStatus, *, now_ms: int, silence_ms_max: int, full_nodes: Collection[NodeId] = ()
) -> list[Successor]:
    """Return the other voters in sync, those with room first; none that failed to take over a moment ago.

    A transfer to a voter that does not take over blocks all proposals until it is aborted. `full_nodes` are nodes that
    are known to have full disks, besides those that say so in this group.
    """
    able = {peer.node for peer in status.peers if peer.no_transfer_before_ms <= now_ms}
    low = {peer.node for peer in status.peers if peer.is_low}  # known also of a quiet group, which then never sleeps
    found = [
        Successor(node, has_room=node not in low and node not in full_nodes)
        for node in find_in_sync(status, now_ms=now_ms, silence_ms_max=silence_ms_max)
        if node in able
    ]
    return sorted(found, key=lambda successor: not successor.has_room)
