"""A partition as its broker sees it: one replica over its Raft group, with the state that its log leads to.

`PartitionState` is the replicated state machine; `Replica` appends, fences, reads and moves cursors.
"""

from quiver.partition.appending import Appended
from quiver.partition.consume_handler import Consumed, Start, Taker
from quiver.partition.replica import CursorsRead, Fetched, Replica, ReplicaStatus
from quiver.partition.retention import Retention
from quiver.partition.state import PartitionState

__all__ = [
    "Appended",
    "Consumed",
    "CursorsRead",
    "Fetched",
    "PartitionState",
    "Replica",
    "ReplicaStatus",
    "Retention",
    "Start",
    "Taker",
]
