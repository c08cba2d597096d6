"""The asyncio driver of the Raft core: many groups per node, over the partition logs and one network.

`Replicator` is a node's way in; `Member` is its part in one group. The layer above brings a `StateMachine`.
"""

from quiver.replication.entries import CONTROL_STATE
from quiver.replication.insync import find_in_sync
from quiver.replication.machine import StateMachine
from quiver.replication.member import Member
from quiver.replication.network import Network
from quiver.replication.replicator import Replicator, ReplicatorStatus
from quiver.replication.status import MemberStatus

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
