"""The asyncio driver of the Raft core: many groups per node, over the partition logs and one network.

`Replicator` runs all groups of a node; `Member` is the node's part in one group. The layer above provides a
`StateMachine` per group.
"""

from quiver.replication.entries import CONTROL_STATE
from quiver.replication.interfaces import Network, StateMachine
from quiver.replication.member import Member
from quiver.replication.replicator import Replicator
from quiver.replication.status import MemberStatus, ReplicatorStatus, Successor, find_in_sync, find_successors
from quiver.replication.steps import SLICE_ROWS, array_header, encode_rows, encode_sorted, map_header

__all__ = [
    "CONTROL_STATE",
    "SLICE_ROWS",
    "Member",
    "MemberStatus",
    "Network",
    "Replicator",
    "ReplicatorStatus",
    "StateMachine",
    "Successor",
    "array_header",
    "encode_rows",
    "encode_sorted",
    "find_in_sync",
    "find_successors",
    "map_header",
]
