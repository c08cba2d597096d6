"""Handlers of the topic routes."""

from __future__ import annotations

from quiver.clock import Rng
from quiver.errors import NotFoundError, QuiverError, RequestError
from quiver.gateway import contract
from quiver.gateway.changes import submit_change
from quiver.gateway.registrations import catch_up
from quiver.model import PartitionId
from quiver.routing.created_topic import check_encrypted
from quiver.routing.retry import Deadline
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import DescribeNode, ReplicaInfo
from quiver.wire.messages import (
    CreateTopicRequest,
    DeleteTopicRequest,
    GetMetadata,
    MetadataFound,
    PartitionInfo,
    RetentionInfo,
    TopicInfo,
)

PARTITIONS_DEFAULT = 3


class TopicHandlers:
    """Handle the calls on topics."""

    def __init__(self, router: Router, rng: Rng, *, timeout_ms: int) -> None:
        self._router = router
        self._rng = rng
        self._timeout_ms = timeout_ms

    async def list_topics(self, _: contract.Parameters) -> contract.TopicsAnswer:
        """List the names of all topics."""
        found = await self._metadata(None, self._deadline())
        return contract.TopicsAnswer(topics=sorted(info.topic for info in found.topics))

    async def create_topic(self, given: contract.CreateTopicBody, on_behalf_of: str) -> contract.TopicCreatedAnswer:
        """Create a topic; the request id makes a retry after a lost answer return the topic that was created."""
        name = given.topic if given.topic_name is None else given.topic_name
        if name is None or given.topic not in (None, name):
            raise RequestError("not done: give topic_name or topic; if both, the same name")
        request = CreateTopicRequest(
            topic=name,
            partitions=given.partitions or PARTITIONS_DEFAULT,
            replicas=given.replicas,
            retention=_to_retention_info(given.retention),
            request_id=f"http-{self._rng.randrange(1 << 62):016x}",
            is_encrypted=given.encrypted,
            on_behalf_of=on_behalf_of,
        )
        created, _ = await self._router.ask(request, deadline=self._deadline())
        self._router.cache.record_index(created.index)
        check_encrypted(request, is_encrypted=created.is_encrypted)
        return contract.TopicCreatedAnswer(topic=name, partitions=created.partitions)

    async def delete_topic(self, given: contract.TopicQuery, on_behalf_of: str) -> contract.Answer:
        """Delete a topic."""
        request = DeleteTopicRequest(topic=given.topic, on_behalf_of=on_behalf_of)
        await submit_change(self._router, request, deadline=self._deadline())
        self._router.cache.forget_topic(given.topic)
        return contract.Answer()

    async def list_partitions(self, given: contract.TopicQuery) -> contract.PartitionsAnswer:
        """List a topic's partitions."""
        info, _ = await self._find(given.topic, self._deadline())
        items = [
            contract.PartitionItem(partition_id=one.partition_id, leader=one.leader, replicas=list(one.replicas))
            for one in info.partitions
        ]
        return contract.PartitionsAnswer(topic=info.topic, partitions=items)

    async def describe_topic(self, given: contract.TopicQuery) -> contract.TopicAnswer:
        """Describe a topic, with its partitions as their leaders report them."""
        deadline = self._deadline()
        info, found = await self._find(given.topic, deadline)
        leads = await self._ask_leaders(info, found, deadline)
        retention = info.retention
        return contract.TopicAnswer(
            topic=info.topic,
            configuration=contract.TopicConfigurationItem(
                partitions=len(info.partitions),
                replicas=info.replicas,
                retention=contract.RetentionBody(
                    ms=retention.ms, bytes=retention.bytes, until_consumed=retention.until_consumed
                ),
                encrypted=info.is_encrypted,
            ),
            partitions=[_detail_item(one, leads.get(one.partition_id)) for one in info.partitions],
        )

    async def _ask_leaders(
        self, info: TopicInfo, found: MetadataFound, deadline: Deadline
    ) -> dict[PartitionId, ReplicaInfo]:
        """Return the leaders' reports of their partitions, by the newest epoch; unreachable leaders are left out."""
        holders = {node for partition in info.partitions for node in partition.replicas}
        addresses = [node.wire_address for node in found.nodes if node.node in holders]
        request = DescribeNode(with_replicas=True, topic=info.topic)
        leads: dict[PartitionId, ReplicaInfo] = {}
        for described in await gather_outcomes(
            self._router.ask_at(one, request, deadline=deadline) for one in addresses
        ):
            if isinstance(described, QuiverError):
                continue
            for replica in described.replicas:
                known = leads.get(replica.partition_id)
                if replica.leader == described.node and (known is None or known.epoch < replica.epoch):
                    leads[replica.partition_id] = replica
        return leads

    async def _find(self, name: str, deadline: Deadline) -> tuple[TopicInfo, MetadataFound]:
        found = await self._metadata((name,), deadline)
        if not found.topics:
            await catch_up(self._router, deadline=deadline)
            found = await self._metadata((name,), deadline)
        if not found.topics:
            raise NotFoundError(f"not done: unknown topic {name!r}", code="unknown_topic")
        return found.topics[0], found

    async def _metadata(self, topics: tuple[str, ...] | None, deadline: Deadline) -> MetadataFound:
        request = GetMetadata(topics=topics)
        return (await self._router.ask(request, deadline=deadline))[0]

    def _deadline(self) -> Deadline:
        return self._router.deadline(self._timeout_ms)


def _detail_item(partition: PartitionInfo, lead: ReplicaInfo | None) -> contract.PartitionDetailItem:
    return contract.PartitionDetailItem(
        partition_id=partition.partition_id,
        leader=partition.leader if lead is None else lead.leader,
        replicas=list(partition.replicas),
        in_sync_replicas=None if lead is None else list(lead.in_sync),
        first_offset=None if lead is None else lead.first_offset,
        end_offset=None if lead is None else lead.end_offset,
        bytes=None if lead is None else lead.bytes,
    )


def _to_retention_info(given: contract.RetentionBody | None) -> RetentionInfo:
    if given is None:
        return RetentionInfo()
    return RetentionInfo(ms=given.ms, bytes=given.bytes, until_consumed=given.until_consumed)
