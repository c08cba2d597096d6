"""From the metadata to the next steps of a group: who subscribes to what, and which partitions there are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from quiver.errors import FencedError, NotFoundError
from quiver.groups.assignment import AssignablePartition, PartitionKey, Subscription
from quiver.groups.limits import STEPS_MAX
from quiver.groups.machine import GroupSteps, PartitionOwner, plan_steps
from quiver.groups.patterns import compile_pattern
from quiver.metadata import (
    AssignPartitions,
    GroupMemberRow,
    GroupPartition,
    GroupRow,
    PartitionGrant,
    View,
)
from quiver.model import ConsumerId, TopicId
from quiver.security.permissions import INTERNAL_PREFIX

MayRead = Callable[[GroupMemberRow, TopicId], bool]
"""Whether a member may get partitions of a topic that its pattern matches."""


def everything(_: GroupMemberRow, __: TopicId) -> bool:
    """Allow every topic."""
    return True


class Subscriptions:
    """The topics of members at one moment; members that subscribe to the same share one set."""

    def __init__(self, view: View, may_read: MayRead = everything) -> None:
        self._view = view
        self._may_read = may_read
        self._named: dict[tuple[str, ...], frozenset[TopicId]] = {}
        self._matching: dict[str, tuple[TopicId, ...]] = {}
        self._sets: dict[frozenset[TopicId], frozenset[TopicId]] = {}

    def topics_of(self, member: GroupMemberRow) -> frozenset[TopicId]:
        """Return the existing topics that a member subscribes to."""
        if member.topics not in self._named:
            names = self._view.topics_by_name
            self._named[member.topics] = frozenset(names[name] for name in member.topics if name in names)
        found = self._named[member.topics]
        if member.pattern:
            matching = (id_ for id_ in self._match(member.pattern) if self._may_read(member, id_))
            found = found.union(matching)
        return self._sets.setdefault(found, found)

    def _match(self, pattern: str) -> tuple[TopicId, ...]:
        if pattern not in self._matching:
            compiled, is_internal = compile_pattern(pattern), pattern.startswith(INTERNAL_PREFIX)
            self._matching[pattern] = tuple(
                topic_id
                for name, topic_id in sorted(self._view.topics_by_name.items())
                if (is_internal or not name.startswith(INTERNAL_PREFIX)) and compiled.matches(name)
            )
        return self._matching[pattern]


def find_member(view: View, key: tuple[ConsumerId, str]) -> tuple[View, GroupMemberRow]:
    """Return a member, and the view that it is from.

    Raises:
        NotFoundError: not done; it is no member (`unknown_member`), or the group was deleted (`unknown_group`).
        FencedError: not done; another process has joined with its instance name (`member_replaced`).
    """
    member = view.group_members.get(key)
    if member is not None:
        return view, member
    if any(one.replaces == key[1] for one in view.members_of(key[0])):
        raise FencedError(
            f"not done: another process has joined as the instance of member {key[1]!r}", code="member_replaced"
        )
    if key[0] not in view.consumers:
        raise NotFoundError(f"not done: group {key[0]} was deleted, with its cursors", code="unknown_group")
    raise NotFoundError(
        f"not done: {key[1]!r} is no member of group {key[0]}: it left, or was silent for longer than its session "
        "timeout; join again",
        code="unknown_member",
    )


def is_member_planned(before: GroupMemberRow | None, after: GroupMemberRow | None) -> bool:
    """Return whether the change of a member leads to a plan of its group.

    It does if the member comes or goes, subscribes to something else, or does not have a partition any more. What it
    was given, or asked for, is what a plan led to: the same plan would come out again.
    """
    if before is None or after is None:
        return True
    if (before.topics, before.pattern, before.rack) != (after.topics, after.pattern, after.rack):
        return True
    return not {one.key for one in before.owned} <= {one.key for one in after.owned}


def is_group_planned(before: GroupRow | None, after: GroupRow | None) -> bool:
    """Return whether the change of a group leads to a plan: it comes or goes, or its pause begins or ends."""
    return before is None or after is None or (before.kind, before.pause_ms) != (after.kind, after.pause_ms)


def plan_group(
    view: View, members: Sequence[GroupMemberRow], may_read: MayRead = everything
) -> tuple[GroupSteps, tuple[tuple[TopicId, int], ...]]:
    """Return the next steps of a group with these members, and the topics that they subscribe to, with their sizes."""
    subscriptions = Subscriptions(view, may_read)
    subscribed = {one.member_id: Subscription(subscriptions.topics_of(one), one.rack) for one in members}
    owners = {
        owned.key: PartitionOwner(member.member_id, owned.is_revoking) for member in members for owned in member.owned
    }
    topics = {topic_id for one in subscribed.values() for topic_id in one.topics}
    steps = plan_steps(subscribed, list(_partitions(view, topics | {key[0] for key in owners})), owners)
    return steps, tuple((topic_id, view.topics[topic_id].partitions) for topic_id in sorted(topics))


def count_unassigned(view: View, members: Sequence[GroupMemberRow]) -> tuple[int, int]:
    """Return how many partitions members subscribe to, and how many of them nobody owns."""
    subscriptions = Subscriptions(view)
    topics = {topic_id for member in members for topic_id in subscriptions.topics_of(member)}
    total = sum(view.topics[topic_id].partitions for topic_id in topics)
    owned = {one.key for member in members for one in member.owned if one.topic_id in topics}
    return total, max(0, total - len(owned))


def _partitions(view: View, topics: Iterable[TopicId]) -> Iterator[AssignablePartition]:
    """Yield the partitions of those topics that are active, with the racks that they are in."""
    racks = {node: broker.rack for node, broker in view.brokers.items()}
    for topic_id in sorted(topics):
        topic = view.topics.get(topic_id)
        if topic is None or view.topics_by_name.get(topic.name) != topic_id:
            continue
        for partition in view.partitions_of(topic_id):
            places = tuple(sorted({racks.get(node, "") for node in partition.replicas} - {""}))
            leader = racks.get(partition.leader, "") if partition.leader is not None else ""
            yield AssignablePartition(partition.key, leader, places)


def plan_commands(group: GroupRow, steps: GroupSteps, *, now_ms: int, reason: str) -> Iterator[AssignPartitions]:
    """Yield the commands that carry out steps, each for the version that the one before it leads to."""
    taken: list[tuple[str, PartitionKey]] = [("drops", key) for key in steps.drops]
    taken += [("revokes", key) for key in steps.revokes]
    version = group.version
    for first in range(0, len(taken), STEPS_MAX):
        part = taken[first : first + STEPS_MAX]
        yield AssignPartitions(
            now_ms=now_ms,
            group_id=group.group_id,
            version=version,
            revokes=tuple(GroupPartition(*key) for kind, key in part if kind == "revokes"),
            drops=tuple(GroupPartition(*key) for kind, key in part if kind == "drops"),
            reason=reason,
        )
        version += 1
    for first in range(0, len(steps.grants), STEPS_MAX):
        grants = tuple(PartitionGrant(name, *key) for key, name in steps.grants[first : first + STEPS_MAX])
        yield AssignPartitions(now_ms=now_ms, group_id=group.group_id, version=version, grants=grants, reason=reason)
        version += 1
