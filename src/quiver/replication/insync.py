"""Which voters keep up, as their leader sees it: for people, metrics and those who move replicas. Pure.

Being in sync decides nothing: what is committed is counted entry by entry. It says on which voters a new leader would
be found without anybody having to catch up first.
"""

from __future__ import annotations

from quiver.model import NodeId
from quiver.raft import Role, Status

LAG_ENTRIES_MAX = 1_000
"""How many committed entries a voter in sync may miss: what is on its way under load, not what takes long to send."""


def find_in_sync(status: Status, *, now_ms: int, silence_ms_max: int) -> tuple[NodeId, ...]:
    """Return the voters that have nearly everything committed and were heard of lately; none if this is no leader.

    In a sleeping group nobody is heard of, since everybody has everything.
    """
    if status.role is not Role.LEADER:
        return ()
    keeping_up = {status.id} if status.commit_index - status.durable_index <= LAG_ENTRIES_MAX else set()
    for peer in status.peers:
        is_heard = status.hibernating or now_ms - peer.heard_ms <= silence_ms_max
        if is_heard and status.commit_index - peer.match_index <= LAG_ENTRIES_MAX:
            keeping_up.add(peer.node)
    return tuple(node for node in status.configuration.voters if node in keeping_up)
