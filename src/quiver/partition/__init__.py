"""One replica of a partition as its broker sees it: idempotent appends, current reads, and the state behind them.

`Replica` is the way in. `PartitionState` is what every replica computes from the same committed batches;
`ProducerTable` is the part of it that makes sends land exactly once.
"""

from quiver.partition.producers import (
    ProducerTable,
    Verdict,
)
from quiver.partition.replica import Appended, Replica
from quiver.partition.state import PartitionState

__all__ = [
    "Appended",
    "PartitionState",
    "ProducerTable",
    "Replica",
    "Verdict",
]
