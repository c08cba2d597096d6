"""The asyncio driver of the Raft core: many groups per node, over the partition logs and one network.

`Replicator` runs all groups of a node; `Member` is the node's part in one group. The layer above provides a
`StateMachine` per group.
"""

from quiver.replication.entries import CONTROL_STATE
from quiver.replication.interfaces import Network, StateMachine
from quiver.replication.member import Member
from quiver.replication.replicator import Replicator
from quiver.replication.status import MemberStatus, ReplicatorStatus, find_in_sync

__all__ = [
    "CONTROL_STATE",
    "Member",
    "MemberStatus",
    "Network",
    "Replicator",
    "ReplicatorStatus",
    "StateMachine",
    "find_in_sync",
]
