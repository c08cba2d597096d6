"""What callers see of the groups that a handler found: groups, and the names of topics in them. Pure.

It is what `quiver.access.rules` shows on the wire. Owners see all of their groups; who may read a group by its name
sees it with the topics that it sees. Of lags and queues, everybody sees the topics that it may read.
"""

from __future__ import annotations

import msgspec

from quiver.gateway import group_contract
from quiver.metadata import ConsumerRow, View
from quiver.security.permissions import Permissions, ResourceKind, Verb

GroupsFound = (
    group_contract.GroupsAnswer
    | group_contract.GroupAnswer
    | group_contract.GroupLagAnswer
    | group_contract.QueueAnswer
)
"""Answers that name groups, or topics of a group."""


def is_owner(permissions: Permissions, row: ConsumerRow | None) -> bool:
    """Return whether a group is the caller's own."""
    return row is not None and bool(row.owner) and row.owner == permissions.owner


def filter_groups(permissions: Permissions, view: View, answer: GroupsFound) -> GroupsFound:
    """Return an answer without the groups and topics that the caller may not see."""
    match answer:
        case group_contract.GroupLagAnswer():
            lags = [one for one in answer.partitions if _may_read(permissions, one.topic)]
            return msgspec.structs.replace(answer, lag=sum(one.lag for one in lags), partitions=lags)
        case group_contract.QueueAnswer():
            parts = [one for one in answer.partitions if _may_read(permissions, one.topic)]
            return msgspec.structs.replace(answer, partitions=parts)
        case _ if permissions.allows(Verb.READ, ResourceKind.CLUSTER):
            return answer
        case group_contract.GroupAnswer():
            if is_owner(permissions, view.consumer(answer.group.group)):
                return answer
            members = [_filter_member(permissions, one) for one in answer.members]
            return msgspec.structs.replace(answer, group=_filter_group(permissions, answer.group), members=members)
        case group_contract.GroupsAnswer():
            seen = (_see_group(permissions, view, one) for one in answer.groups)
            return msgspec.structs.replace(answer, groups=[one for one in seen if one is not None])


def _see_group(
    permissions: Permissions, view: View, group: group_contract.GroupItem
) -> group_contract.GroupItem | None:
    if is_owner(permissions, view.consumer(group.group)):
        return group
    is_seen = permissions.allows(Verb.READ, ResourceKind.CONSUMER, group.group)
    return _filter_group(permissions, group) if is_seen else None


def _filter_group(permissions: Permissions, group: group_contract.GroupItem) -> group_contract.GroupItem:
    letters = group.dead_letter_topics.items()
    return msgspec.structs.replace(
        group,
        topics=[topic for topic in group.topics if permissions.sees_topic(topic)],
        dead_letter_topics={
            one: to for one, to in letters if permissions.sees_topic(one) and permissions.sees_topic(to)
        },
    )


def _filter_member(permissions: Permissions, member: group_contract.MemberItem) -> group_contract.MemberItem:
    return msgspec.structs.replace(
        member,
        topics=[topic for topic in member.topics if permissions.sees_topic(topic)],
        partitions=[one for one in member.partitions if permissions.sees_topic(one.topic)],
    )


def _may_read(permissions: Permissions, topic: str) -> bool:
    return permissions.allows(Verb.READ, ResourceKind.TOPIC, topic)
