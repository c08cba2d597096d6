"""Explain one partition: who leads since when, each replica's log, and why it does not accept or deliver just now.

Every node of the partition is asked at the same time with a short timeout; one that does not answer is listed with its
error. The metadata comes from any node, so an explanation needs neither the leader nor the primary; without a primary
it may be old, and holds and moves are not known.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quiver.client.overview import find_metadata
from quiver.errors import NotFoundError, QuiverError
from quiver.model import NodeId, Offset, PartitionId
from quiver.routing.router import Router, gather_outcomes
from quiver.wire.admin_messages import HoldInfo, MoveInfo
from quiver.wire.explain_messages import ExplainReplica, ObstacleInfo, ReplicaEventInfo, ReplicaExplained
from quiver.wire.messages import MetadataFound, NodeInfo, PartitionInfo, RetentionInfo, TopicInfo

ANSWER_MS_MAX = 2_000
"""Timeout of one node's answer."""


class ExplainedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica; `report` is None if its node did not answer, and `error` says why."""

    node: NodeId
    is_learner: bool
    node_state: str
    """The node's state in the metadata."""
    lag_records: int | None = None
    """Records of the leader that it lacks; None without a leader or an answer."""
    lag_entries: int | None = None
    """Entries that the leader does not know to be on its disk."""
    report: ReplicaExplained | None = None
    error: str = ""


class PartitionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An election or a change of members, as one node saw it."""

    node: NodeId
    event: ReplicaEventInfo


class PartitionExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that explains a partition's state; empty obstacles mean that the thing works."""

    topic: str
    partition: PartitionId
    offset: Offset | None
    leader: NodeId | None
    """The replica that says that it leads, by the latest epoch; None: no replica that answers does."""
    recorded_leader: NodeId | None
    """The leader according to the metadata, which may lag."""
    epoch: int
    since_ms: int | None
    high_watermark: Offset | None
    first_offset: Offset | None
    replicas: tuple[ExplainedReplica, ...]
    in_sync: tuple[NodeId, ...]
    produce_obstacles: tuple[ObstacleInfo, ...]
    consume_obstacles: tuple[ObstacleInfo, ...]
    """Why records, or the one at `offset`, are not delivered."""
    retention: RetentionInfo
    holds: tuple[HoldInfo, ...]
    moves: tuple[MoveInfo, ...]
    events: tuple[PartitionEvent, ...]
    """Of all nodes that answered, oldest first."""
    unanswered: tuple[str, ...]
    """What could not be found out."""


async def explain_partition(
    router: Router, topic: str, partition: int, offset: int | None = None
) -> PartitionExplanation:
    """Ask every replica of a partition and return the explanation.

    Raises:
        NotFoundError: there is no such topic or partition.
        UnavailableError: no node of the cluster answers.
    """
    found, moves, holds, is_stale = await find_metadata(router)
    info, row = _find_partition(found, topic, partition)
    nodes = {node.node: node for node in found.nodes}
    members = (*row.replicas, *row.learners)
    request = ExplainReplica(topic_id=info.topic_id, partition_id=row.partition_id)
    outcomes = await gather_outcomes(_ask_node(router, nodes.get(node), request) for node in members)
    answers = dict(zip(members, outcomes, strict=True))
    key = (info.topic, row.partition_id)
    return explain(
        info,
        row,
        nodes,
        answers,
        offset=None if offset is None else Offset(offset),
        holds=tuple(_holds_of(holds, key)),
        moves=tuple(one for one in moves if (one.topic, one.partition_id) == key),
        unanswered=("holds and moves: there is no primary",) if is_stale else (),
    )


def explain(
    info: TopicInfo,
    row: PartitionInfo,
    nodes: dict[NodeId, NodeInfo],
    answers: dict[NodeId, ReplicaExplained | QuiverError],
    *,
    offset: Offset | None,
    holds: tuple[HoldInfo, ...],
    moves: tuple[MoveInfo, ...],
    unanswered: tuple[str, ...],
) -> PartitionExplanation:
    """Return the explanation that follows from the metadata and the answers. Pure."""
    reports = {node: answer for node, answer in answers.items() if isinstance(answer, ReplicaExplained)}
    leader = _find_leader(reports)
    replicas = tuple(
        _describe_replica(node, nodes.get(node), answer, leader, is_learner=node in row.learners)
        for node, answer in answers.items()
    )
    events = [PartitionEvent(node=node, event=event) for node, one in reports.items() for event in one.events]
    events.sort(key=lambda item: (item.event.at_ms, item.event.epoch, item.node))
    return PartitionExplanation(
        topic=info.topic,
        partition=row.partition_id,
        offset=offset,
        leader=None if leader is None else leader.node,
        recorded_leader=row.leader,
        epoch=row.epoch if leader is None else leader.epoch,
        since_ms=None if leader is None else leader.since_ms,
        high_watermark=None if leader is None else leader.high_watermark,
        first_offset=None if leader is None else leader.first_offset,
        replicas=replicas,
        in_sync=() if leader is None else leader.in_sync,
        produce_obstacles=tuple(_no_leader(row, reports) if leader is None else leader.obstacles),
        consume_obstacles=tuple(_no_leader(row, reports) if leader is None else _find_unread(leader, offset)),
        retention=info.retention,
        holds=holds,
        moves=moves,
        events=tuple(events),
        unanswered=unanswered,
    )


async def _ask_node(router: Router, node: NodeInfo | None, request: ExplainReplica) -> ReplicaExplained:
    if node is None:
        raise NotFoundError("not done: the node is not in the metadata any more", code="unknown_broker")
    return await router.ask_at(node.wire_address, request, deadline=router.deadline(ANSWER_MS_MAX))


def _find_partition(found: MetadataFound, topic: str, partition: int) -> tuple[TopicInfo, PartitionInfo]:
    info = next((one for one in found.topics if one.topic == topic), None)
    if info is None:
        raise NotFoundError(
            f"not done: unknown topic {topic!r}; `quiver topic list` lists all topics", code="unknown_topic"
        )
    row = next((one for one in info.partitions if one.partition_id == partition), None)
    if row is None:
        last = len(info.partitions) - 1
        raise NotFoundError(
            f"not done: topic {topic!r} has partitions 0 to {last}, not {partition}", code="unknown_partition"
        )
    return info, row


def _holds_of(holds: tuple[HoldInfo, ...], key: tuple[str, PartitionId]) -> Iterator[HoldInfo]:
    """Yield the holds on a partition, the one that keeps the most records first."""
    found = [
        msgspec.structs.replace(hold, offsets=kept)
        for hold in holds
        if hold.topic == key[0] and (kept := tuple(item for item in hold.offsets if item[0] == key[1]))
    ]
    yield from sorted(found, key=lambda hold: hold.offsets[0][1])


def _find_leader(reports: dict[NodeId, ReplicaExplained]) -> ReplicaExplained | None:
    leading = [one for one in reports.values() if one.role == "leader"]
    return max(leading, key=lambda one: one.epoch, default=None)


def _describe_replica(
    node: NodeId,
    info: NodeInfo | None,
    answer: ReplicaExplained | QuiverError,
    leader: ReplicaExplained | None,
    *,
    is_learner: bool,
) -> ExplainedReplica:
    follower = None if leader is None else next((one for one in leader.followers if one.node == node), None)
    shown = ExplainedReplica(
        node=node,
        is_learner=is_learner,
        node_state="removed" if info is None else info.state,
        lag_entries=None if leader is None or follower is None else max(0, leader.end_index - 1 - follower.match_index),
    )
    if isinstance(answer, QuiverError):
        return msgspec.structs.replace(shown, error=f"{answer.code}: {answer.message}")
    lag = None if leader is None or not answer.role else max(0, leader.log_end_offset - answer.log_end_offset)
    return msgspec.structs.replace(shown, report=answer, lag_records=lag)


def _no_leader(row: PartitionInfo, reports: dict[NodeId, ReplicaExplained]) -> Iterator[ObstacleInfo]:
    """Yield why a partition has no leader."""
    voters, majority = row.replicas, len(row.replicas) // 2 + 1
    usable = [node for node in voters if node in reports and reports[node].state == "open"]
    missing = ", ".join(f"node {node}" for node in voters if node not in reports)
    if len(usable) < majority:
        sentence = f"no leader: {len(usable)} of {len(voters)} replicas are usable, {majority} are needed to elect one"
        yield ObstacleInfo(code="no_majority", sentence=sentence + (f"; no answer from {missing}" if missing else ""))
    else:
        yield ObstacleInfo(code="no_leader", sentence="no leader: an election is in progress; it takes a second or so")
    for node in voters:
        report = reports.get(node)
        if report is not None and report.state != "open":
            detail = f": {report.problem}" if report.problem else ""
            yield ObstacleInfo(code=f"replica_{report.state}", sentence=f"node {node}: {report.state}{detail}")


def _find_unread(leader: ReplicaExplained, offset: Offset | None) -> Iterator[ObstacleInfo]:
    """Yield why a leader does not deliver records, or the record at `offset`."""
    if not leader.is_ready:
        yield ObstacleInfo(code="not_ready", sentence="the leader has not committed an entry in its own epoch yet")
    if offset is None:
        return
    if offset < leader.first_offset:
        sentence = f"offset {offset} was removed by retention: the first record is at {leader.first_offset}"
        yield ObstacleInfo(code="trimmed", sentence=sentence)
    elif offset < leader.high_watermark:
        return
    elif offset < leader.log_end_offset:
        sentence = f"offset {offset} is on the leader but not committed: the high watermark is {leader.high_watermark}"
        yield ObstacleInfo(code="not_committed", sentence=f"{sentence}; a majority of replicas must have it on disk")
    elif offset == leader.high_watermark:
        sentence = f"offset {offset} is the next record, which has not been produced yet"
        yield ObstacleInfo(code="not_produced", sentence=sentence)
    else:
        sentence = f"offset {offset} is beyond the high watermark {leader.high_watermark}"
        yield ObstacleInfo(code="offset_out_of_range", sentence=sentence)
