"""The overview of a cluster: every node's own report, and every partition as its leader reports it.

All nodes are asked concurrently with a short timeout. A node that does not answer is shown as not alive, with the
fields that the metadata has. Nothing is cached.
"""

from __future__ import annotations

import asyncio

import msgspec

from quiver.errors import QuiverError, UnavailableError
from quiver.features import LEVEL_MIN
from quiver.metrics import flatten
from quiver.model import Index, NodeId, PartitionId, TopicId
from quiver.routing.router import Router
from quiver.wire.admin_messages import (
    DescribeNode,
    HoldInfo,
    ListHolds,
    ListMoves,
    MoveInfo,
    NodeDescribed,
    ProblemInfo,
    ReplicaInfo,
)
from quiver.wire.messages import GetMetadata, MetadataFound, NodeInfo, PartitionInfo, RetentionInfo

ANSWER_MS_MAX = 2_000
"""Timeout of one node's report."""
CURRENT_MS_MAX = 3_000
"""How long current metadata is asked for, before old metadata is."""


class NodeOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its metadata, and its own report if it answers."""

    node: NodeId
    roles: tuple[str, ...]
    wire_address: str
    http_address: str
    rack: str
    state: str
    is_draining: bool
    last_seen_ms: int | None
    is_alive: bool
    """Whether it answered this request."""
    is_primary: bool = False
    is_ready: bool = False
    pid: int | None = None
    version: str = ""
    level_max: int | None = None
    """The highest feature level that its program knows."""
    started_ms: int | None = None
    applied_index: Index | None = None
    stored_index: Index | None = None
    """Index up to which the metadata is in its database."""
    security_mode: str = ""
    """How it is protected: `development`, `secure` or `insecure`."""
    provider_problem: str = ""
    """Why it cannot read the keys of the identity provider; those that it has stay in use."""
    certificate_problem: str = ""
    """Why other nodes and clients refuse its certificate, and what to do."""
    problems: tuple[ProblemInfo, ...] = ()
    """Its replicas that do not serve, and its copy of the metadata if that has stopped."""
    unready: str = ""
    """Why it is not ready, if it answered."""
    database_outage: str = ""
    """Why its metadata database is unreachable."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Its metrics by name and labels, as `/metrics` shows them; of histograms the count, the sum and the p99."""


class PartitionOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A partition; fields that only a leader knows are None while no leader answers."""

    partition: PartitionId
    group: int
    leader: NodeId | None
    epoch: int
    replicas: tuple[NodeId, ...]
    learners: tuple[NodeId, ...]
    in_sync: tuple[NodeId, ...] = ()
    first_offset: int | None = None
    end_offset: int | None = None
    bytes: int | None = None


class TopicOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A topic with its partitions."""

    topic: str
    topic_id: TopicId
    replicas: int
    retention: RetentionInfo
    partitions: tuple[PartitionOverview, ...]


class ClusterOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the cluster at one moment."""

    cluster_id: str
    primary: NodeId | None
    index: Index
    feature_level: int = LEVEL_MIN
    """What every node of the cluster can read; see `quiver cluster upgrade`."""
    nodes: tuple[NodeOverview, ...]
    topics: tuple[TopicOverview, ...]
    moves: tuple[MoveInfo, ...]
    holds: tuple[HoldInfo, ...] = ()
    is_stale: bool = False
    """Whether no node has a primary: what one node last knew, without moves and holds."""


async def find_overview(router: Router) -> ClusterOverview:
    """Ask every node and return the overview; without a primary, what the nodes that answer last knew.

    Raises:
        UnavailableError: no node answers.
    """
    found, moves, holds, is_stale = await find_metadata(router)
    answers = await asyncio.gather(*(_describe(router, node) for node in found.nodes))
    described = {answer.node: answer for answer in answers if answer is not None}
    leaders = _find_leaders(described)
    return ClusterOverview(
        cluster_id=found.cluster_id,
        primary=found.primary,
        index=found.index,
        feature_level=found.feature_level,
        nodes=tuple(_show_node(node, described.get(node.node), found.primary) for node in found.nodes),
        topics=tuple(
            TopicOverview(
                topic=topic.topic,
                topic_id=topic.topic_id,
                replicas=topic.replicas,
                retention=topic.retention,
                partitions=tuple(
                    _show_partition(partition, leaders.get((topic.topic_id, partition.partition_id)))
                    for partition in topic.partitions
                ),
            )
            for topic in found.topics
        ),
        moves=moves,
        holds=holds,
        is_stale=is_stale,
    )


async def find_metadata(
    router: Router,
) -> tuple[MetadataFound, tuple[MoveInfo, ...], tuple[HoldInfo, ...], bool]:
    """Return the metadata, moves and holds, and whether they may be old because there is no primary."""
    whole = router.deadline()
    deadline = router.deadline(min(router.options.timeout_ms // 2, CURRENT_MS_MAX))
    try:
        found, _ = await router.ask(GetMetadata(), deadline=deadline)
        moves, _ = await router.ask(ListMoves(), deadline=deadline)
        holds, _ = await router.ask(ListHolds(), deadline=deadline)
    except UnavailableError:
        found, _ = await router.ask(GetMetadata(is_stale_ok=True), deadline=whole)
        return found, (), (), True
    return found, moves.moves, holds.holds, False


async def _describe(router: Router, node: NodeInfo) -> NodeDescribed | None:
    try:
        request = DescribeNode(with_replicas=True, with_metrics=True)
        timeout_ms = min(router.options.timeout_ms, ANSWER_MS_MAX)
        return await router.ask_at(node.wire_address, request, deadline=router.deadline(timeout_ms))
    except QuiverError:
        return None


def _find_leaders(described: dict[NodeId, NodeDescribed]) -> dict[tuple[TopicId, PartitionId], ReplicaInfo]:
    """Return the leaders' reports; if two nodes claim to lead a partition, the later epoch wins."""
    leaders: dict[tuple[TopicId, PartitionId], ReplicaInfo] = {}
    for node, answer in described.items():
        for replica in answer.replicas:
            key = (replica.topic_id, replica.partition_id)
            known = leaders.get(key)
            if replica.leader == node and (known is None or known.epoch < replica.epoch):
                leaders[key] = replica
    return leaders


def _show_node(node: NodeInfo, answer: NodeDescribed | None, primary: NodeId | None) -> NodeOverview:
    shown = NodeOverview(
        node=node.node,
        roles=node.roles,
        wire_address=node.wire_address,
        http_address=node.http_address,
        rack=node.rack,
        state=node.state,
        is_draining=node.is_draining,
        last_seen_ms=node.last_seen_ms,
        is_alive=answer is not None,
        is_primary=node.node == primary,
    )
    if answer is None:
        return shown
    return msgspec.structs.replace(
        shown,
        is_ready=answer.is_ready,
        unready=answer.unready,
        database_outage=answer.database_outage,
        security_mode=answer.security_mode,
        provider_problem=answer.provider_problem,
        certificate_problem=answer.certificate_problem,
        pid=answer.pid,
        version=answer.version,
        level_max=answer.level_max,
        started_ms=answer.started_ms,
        applied_index=answer.applied_index,
        stored_index=answer.stored_index,
        problems=answer.problems,
        metrics=flatten(answer.metrics),
    )


def _show_partition(partition: PartitionInfo, leader: ReplicaInfo | None) -> PartitionOverview:
    shown = PartitionOverview(
        partition=partition.partition_id,
        group=partition.group,
        leader=partition.leader,
        epoch=partition.epoch,
        replicas=partition.replicas,
        learners=partition.learners,
    )
    if leader is None:
        return shown
    return msgspec.structs.replace(
        shown,
        leader=leader.leader,
        epoch=leader.epoch,
        in_sync=leader.in_sync,
        first_offset=leader.first_offset,
        end_offset=leader.end_offset,
        bytes=leader.bytes,
    )
