"""One replica of a partition, on top of its Raft group.

`PartitionState` is the replicated state machine; `Replica` appends, fences, reads and moves cursors.
"""

from quiver.partition.consume_handler import ConsumeResult, ConsumerStart, DefaultStart
from quiver.partition.cursors import KnownGroups
from quiver.partition.maintenance import RetentionPolicy
from quiver.partition.meters import Meters
from quiver.partition.replica import AppendResult, CursorsResult, FetchResult, Replica, ReplicaStatus
from quiver.partition.state import PartitionState

__all__ = [
    "AppendResult",
    "ConsumeResult",
    "ConsumerStart",
    "CursorsResult",
    "DefaultStart",
    "FetchResult",
    "KnownGroups",
    "Meters",
    "PartitionState",
    "Replica",
    "ReplicaStatus",
    "RetentionPolicy",
]
