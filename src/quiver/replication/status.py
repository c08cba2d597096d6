"""Status of a node's groups, for people, metrics and the code that moves replicas. Pure values.

Being in sync decides nothing: commitment is counted entry by entry. It shows which voters could take over leadership
without catching up first.
"""

from __future__ import annotations

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
