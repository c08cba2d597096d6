"""Which replicas of a node are behind, by what the leaders say."""

from __future__ import annotations

from typing import Any

import pytest

from quiver.gateway.sync_probe import find_behind
from quiver.model import GroupId, NodeId, PartitionId, TopicId
from quiver.wire.admin_messages import NodeDescribed, ReplicaInfo


def replica(partition: int, *, in_sync: tuple[int, ...] = (), epoch: int = 1, **known: Any) -> ReplicaInfo:
    voters = (1, 2, 3) if in_sync else ()
    fields = {"voters": voters, "in_sync": in_sync, "role": "leader" if in_sync else "follower", **known}
    return ReplicaInfo(
        topic_id=TopicId(1), partition_id=PartitionId(partition), group=GroupId(1), epoch=epoch, **fields
    )


def node(number: int, *replicas: ReplicaInfo) -> NodeDescribed:
    return NodeDescribed(
        node=NodeId(number), version="1", pid=1, roles=("broker",), started_ms=0, is_ready=True, replicas=replicas
    )


@pytest.mark.parametrize(
    ("own", "others", "behind"),
    [
        (node(1), [], 0),
        (node(1, replica(0)), [node(2, replica(0, in_sync=(1, 2, 3)))], 0),
        (node(1, replica(0)), [node(2, replica(0, in_sync=(2, 3)))], 1),
        (node(1, replica(0)), [node(2, replica(0))], 1),  # nobody leads it
        (node(1, replica(0)), [], 1),
        (node(1, replica(0, in_sync=(1,))), [], 0),  # the node leads it itself
        (node(1, replica(0)), [node(2, replica(0, in_sync=(2, 3), voters=(2, 3)))], 0),  # it is being moved
        # Of two that say that they lead, the newer one counts.
        (node(1, replica(0)), [node(2, replica(0, in_sync=(1, 2))), node(3, replica(0, in_sync=(3,), epoch=2))], 1),
        (node(1, replica(0), replica(1)), [node(2, replica(0, in_sync=(2,)), replica(1, in_sync=(1, 2)))], 1),
    ],
)
def test_replicas_that_are_behind_are_counted(own: NodeDescribed, others: list[NodeDescribed], behind: int) -> None:
    assert find_behind(own, others) == behind
