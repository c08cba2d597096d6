"""Descriptions of topics: their partitions with the state that each partition's leader reports."""

from __future__ import annotations

import msgspec

from quiver.client.presentation import html_rows
from quiver.errors import NotFoundError, UnavailableError
from quiver.model import NodeId, PartitionId, TopicId
from quiver.routing.router import Router
from quiver.wire.admin_messages import DescribeNode, ReplicaInfo
from quiver.wire.messages import RetentionInfo, TopicInfo


class PartitionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A partition as its leader reports it; fields that only a leader knows are None while no leader answers."""

    partition: PartitionId
    leader: NodeId | None
    replicas: tuple[NodeId, ...]
    in_sync: tuple[NodeId, ...] = ()
    first_offset: int | None = None
    end_offset: int | None = None
    bytes: int | None = None


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A topic with its partitions."""

    topic: str
    topic_id: TopicId
    replicas: int
    retention: RetentionInfo
    partitions: tuple[PartitionDescription, ...]
    is_encrypted: bool = False
    """Whether its replicas encrypt their files."""

    def _repr_html_(self) -> str:
        columns = PartitionDescription.__struct_fields__
        return html_rows(f"topic {self.topic}", columns, [msgspec.structs.astuple(one) for one in self.partitions])


async def describe_topic(router: Router, topic: str) -> TopicDescription:
    """Return a topic with the state of every partition, as reported by its leader."""
    info = await router.find_topic(topic, deadline=router.deadline(), age_ms_max=0)
    replicas = await _replicas_of(router, info)
    return TopicDescription(
        topic=info.topic,
        topic_id=info.topic_id,
        replicas=info.replicas,
        retention=info.retention,
        is_encrypted=info.is_encrypted,
        partitions=tuple(
            PartitionDescription(
                partition=partition.partition_id,
                leader=partition.leader if (found := replicas.get(partition.partition_id)) is None else found.leader,
                replicas=partition.replicas,
                in_sync=found.in_sync if found else (),
                first_offset=found.first_offset if found else None,
                end_offset=found.end_offset if found else None,
                bytes=found.bytes if found else None,
            )
            for partition in info.partitions
        ),
    )


async def _replicas_of(router: Router, topic: TopicInfo) -> dict[PartitionId, ReplicaInfo]:
    """Return the leaders' reports of a topic's partitions, without those whose leader does not answer."""
    found: dict[PartitionId, ReplicaInfo] = {}
    nodes = {node for partition in topic.partitions for node in partition.replicas}
    request = DescribeNode(with_replicas=True, topic=topic.topic)
    for node in sorted(nodes & router.cache.nodes.keys()):
        address = router.cache.nodes[node].wire_address
        try:
            described = await router.ask_at(address, request, deadline=router.deadline())
        except (UnavailableError, NotFoundError):
            continue
        leads = [replica for replica in described.replicas if replica.leader == node]
        found.update((replica.partition_id, replica) for replica in leads)
    return found
