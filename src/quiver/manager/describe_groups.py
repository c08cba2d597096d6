"""Convert the groups of a view of the metadata to the wire's replies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from quiver.manager.group_plan import count_unassigned
from quiver.metadata import (
    ALL_PARTITIONS,
    ConsumerRow,
    GroupKind,
    GroupMemberRow,
    GroupRow,
    OwnedPartition,
    StartFrom,
    TopicState,
    View,
)
from quiver.model import PartitionId, TopicId
from quiver.wire.group_messages import (
    AssignedPartition,
    DescribeGroups,
    GroupAssignment,
    GroupInfo,
    GroupMemberInfo,
    GroupsFound,
)

_Starts = Mapping[tuple[TopicId, PartitionId], StartFrom]
GroupState = Literal["empty", "stable", "rebalancing", "paused", "queue"]


def describe_assignment(view: View, member: GroupMemberRow) -> GroupAssignment:
    """Return a member's partitions."""
    starts = _starts(view.consumers.get(member.group_id))
    return GroupAssignment(
        version=member.version,
        owned=_partitions(view, member.owned, starts, is_revoking=False),
        revoking=_partitions(view, member.owned, starts, is_revoking=True),
        index=view.index,
    )


def describe_groups(view: View, asked: DescribeGroups) -> GroupsFound:
    """Return the requested groups that exist, or all, sorted by name; named consumers are groups, too."""
    if asked.groups is None:
        found: Iterable[ConsumerRow] = (row for row in view.consumers.values() if row.is_named)
    else:
        known = (view.consumer(name) for name in dict.fromkeys(asked.groups) if name)
        found = (row for row in known if row is not None)
    ordered = sorted(found, key=lambda row: row.request_id)
    groups = tuple(_group(view, row, with_members=asked.with_members) for row in ordered)
    return GroupsFound(groups=groups, index=view.index)


def find_topics(view: View, consumer: ConsumerRow) -> tuple[str, ...]:
    """Return the names of a group's topics; a deleted one keeps its registrations, but another may have its name."""
    topics = (view.topics.get(topic_id) for topic_id in {one.topic_id for one in consumer.registrations})
    return tuple(sorted(one.name for one in topics if one is not None and one.state is TopicState.ACTIVE))


def _group(view: View, consumer: ConsumerRow, *, with_members: bool) -> GroupInfo:
    names = find_topics(view, consumer)
    group = view.consumer_groups.get(consumer.consumer_id)
    if group is None:
        return GroupInfo(group=consumer.request_id, group_id=consumer.consumer_id, topics=names)
    members = view.members_of(consumer.consumer_id)
    partitions, unassigned = count_unassigned(view, members)
    starts = _starts(consumer)
    return GroupInfo(
        group=consumer.request_id,
        group_id=consumer.consumer_id,
        kind="queue" if group.kind is GroupKind.QUEUE else "stream",
        state=_state(group, members, unassigned),
        topics=names,
        version=group.version,
        members=tuple(_member(view, member, starts) for member in members) if with_members else (),
        member_count=len(members),
        partitions=partitions,
        unassigned=unassigned,
        rebalances=group.rebalances,
        last_rebalance_ms=group.last_rebalance_ms,
        last_rebalance_reason=group.reason,
        settings=group.settings if group.kind is GroupKind.QUEUE else None,
    )


def _state(group: GroupRow, members: tuple[GroupMemberRow, ...], unassigned: int) -> GroupState:
    if group.kind is GroupKind.QUEUE:
        return "queue"
    if not members:
        return "empty"
    if group.pause_ms:
        return "paused"
    is_moving = unassigned or any(one.is_revoking for member in members for one in member.owned)
    return "rebalancing" if is_moving else "stable"


def _member(view: View, member: GroupMemberRow, starts: _Starts) -> GroupMemberInfo:
    return GroupMemberInfo(
        member_id=member.member_id,
        instance=member.instance,
        rack=member.rack,
        client=member.client,
        principal=member.principal,
        topics=member.topics,
        pattern=member.pattern,
        session_timeout_ms=member.session_timeout_ms,
        joined_ms=member.joined_ms,
        version=member.version,
        owned=_partitions(view, member.owned, starts, is_revoking=False),
        revoking=_partitions(view, member.owned, starts, is_revoking=True),
    )


def _starts(consumer: ConsumerRow | None) -> _Starts:
    if consumer is None:
        return {}
    return {(one.topic_id, one.partition_id): one.start for one in consumer.registrations if one.start is not None}


def _partitions(
    view: View, owned: Iterable[OwnedPartition], starts: _Starts, *, is_revoking: bool
) -> tuple[AssignedPartition, ...]:
    return tuple(
        AssignedPartition(
            topic=view.topics[one.topic_id].name,
            topic_id=one.topic_id,
            partition_id=one.partition_id,
            epoch=one.epoch,
            start="latest" if _start(starts, one) is StartFrom.LATEST else "earliest",
        )
        for one in owned
        if one.is_revoking is is_revoking and one.topic_id in view.topics
    )


def _start(starts: _Starts, one: OwnedPartition) -> StartFrom | None:
    return starts.get(one.key, starts.get((one.topic_id, ALL_PARTITIONS)))
