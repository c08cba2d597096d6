"""Quiver: a distributed, partitioned, Raft-replicated queue for log messages.

    import quiver

    with quiver.connect("127.0.0.1:8002") as cluster:
        cluster.create_topic("logs", partitions=3, exist_ok=True)
        producer = cluster.producer("logs", name="web-1")
        print(producer.send("hello").result())
        for record in cluster.consumer("logs", name="report", idle_timeout=1):
            print(record.partition, record.offset, record.text)

Each name is imported when it is first used, so that `import quiver` itself is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quiver.client.cluster import AsyncCluster
    from quiver.client.connection import connect, connect_async
    from quiver.client.consumer import AsyncConsumer
    from quiver.client.delivery import Deliveries, Delivery, Position, Span
    from quiver.client.group_admin import CursorReset
    from quiver.client.producer import AsyncProducer
    from quiver.client.queue import AsyncJob, AsyncJobs, AsyncQueue
    from quiver.client.queue_groups import QueueDescription, QueuePartition
    from quiver.client.ranges import ReadProgress
    from quiver.client.scan import AsyncScan, Scan
    from quiver.client.sync import Cluster, Consumer, Producer
    from quiver.client.sync_queue import Job, Jobs, Queue
    from quiver.client.topics import PartitionDescription, TopicDescription
    from quiver.errors import (
        ConflictError,
        FencedError,
        NotAllowedError,
        NotFoundError,
        OutcomeUnknownError,
        OutOfRangeError,
        OutOfSequenceError,
        OverloadedError,
        QuiverError,
        RequestError,
        TooLargeError,
        TrimmedError,
        UnavailableError,
    )
    from quiver.record import Record
    from quiver.wire.admin_messages import ClientInfo, HoldInfo
    from quiver.wire.group_messages import GroupInfo, GroupMemberInfo
    from quiver.wire.messages import NodeInfo, RetentionInfo

__version__ = "0.2.0"

_HOMES = {
    "quiver.client.cluster": ("AsyncCluster",),
    "quiver.client.connection": ("connect", "connect_async"),
    "quiver.client.consumer": ("AsyncConsumer",),
    "quiver.client.delivery": ("Deliveries", "Delivery", "Position", "Span"),
    "quiver.client.group_admin": ("CursorReset",),
    "quiver.client.producer": ("AsyncProducer",),
    "quiver.client.queue": ("AsyncJob", "AsyncJobs", "AsyncQueue"),
    "quiver.client.queue_groups": ("QueueDescription", "QueuePartition"),
    "quiver.client.ranges": ("ReadProgress",),
    "quiver.client.scan": ("AsyncScan", "Scan"),
    "quiver.client.sync": ("Cluster", "Consumer", "Producer"),
    "quiver.client.sync_queue": ("Job", "Jobs", "Queue"),
    "quiver.client.topics": ("PartitionDescription", "TopicDescription"),
    "quiver.errors": (
        "ConflictError",
        "FencedError",
        "NotAllowedError",
        "NotFoundError",
        "OutOfRangeError",
        "OutOfSequenceError",
        "OutcomeUnknownError",
        "OverloadedError",
        "QuiverError",
        "RequestError",
        "TooLargeError",
        "TrimmedError",
        "UnavailableError",
    ),
    "quiver.record": ("Record",),
    "quiver.wire.admin_messages": ("ClientInfo", "HoldInfo"),
    "quiver.wire.group_messages": ("GroupInfo", "GroupMemberInfo"),
    "quiver.wire.messages": ("NodeInfo", "RetentionInfo"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncCluster",
    "AsyncConsumer",
    "AsyncJob",
    "AsyncJobs",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncScan",
    "ClientInfo",
    "Cluster",
    "ConflictError",
    "Consumer",
    "CursorReset",
    "Deliveries",
    "Delivery",
    "FencedError",
    "GroupInfo",
    "GroupMemberInfo",
    "HoldInfo",
    "Job",
    "Jobs",
    "NodeInfo",
    "NotAllowedError",
    "NotFoundError",
    "OutOfRangeError",
    "OutOfSequenceError",
    "OutcomeUnknownError",
    "OverloadedError",
    "PartitionDescription",
    "Position",
    "Producer",
    "Queue",
    "QueueDescription",
    "QueuePartition",
    "QuiverError",
    "ReadProgress",
    "Record",
    "RequestError",
    "RetentionInfo",
    "Scan",
    "Span",
    "TooLargeError",
    "TopicDescription",
    "TrimmedError",
    "UnavailableError",
    "__version__",
    "connect",
    "connect_async",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
