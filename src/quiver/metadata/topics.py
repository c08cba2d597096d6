"""Commands on topics, partitions and holds: create, configure, grow, delete, restore, purge; leader reports.

Pure; called only by `apply`. A deleted topic keeps its partitions, ids and registrations and can be restored until it
is purged; its name is free immediately. Topic ids and group ids are never reused, so files of a purged topic that a
broker still has can never be mistaken for those of another topic.

A hold protects a topic's records from retention. It is renewed by placing it again. It expires only by the primary's
clock: `ExpireHold` carries the time, so that every member decides alike. Brokers honour a hold as long as it is in the
metadata.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from quiver.metadata.commands import (
    AddPartitionsCommand,
    ConfigureTopicCommand,
    CreateTopicCommand,
    CreateTopicResult,
    DeleteTopicCommand,
    ExpireHold,
    PlaceHoldCommand,
    PreferLeader,
    PurgeTopic,
    ReleaseHoldCommand,
    ReportLeaders,
    RestoreTopicCommand,
)
from quiver.metadata.decision import CommandDecision, CommandRefusal, check_assignment, find_topic, refuse
from quiver.metadata.groups import forget_topic, register_grown
from quiver.metadata.quotas import check_partitions, check_registrations, check_topics
from quiver.metadata.rows import (
    ConsumerRow,
    HoldRow,
    MoveRow,
    PartitionRow,
    ProducerRow,
    Retention,
    Table,
    TopicRow,
    TopicState,
)
from quiver.metadata.state import Change, Counters, MetadataState, drop, find_made_topic, put
from quiver.model import TOPIC_NAME_PATTERN, GroupId, NodeId, PartitionId, TopicId
from quiver.security.limits import is_share_used

PARTITIONS_MAX = 4096
"""Maximum number of partitions of a topic."""
REPLICAS_MAX = 15
"""Maximum number of replicas of a partition."""
HOLDS_MAX = 1_000
"""Maximum number of holds in the cluster: each of them is renewed several times before it expires."""
LASTING_MS_MIN = 1_000
LASTING_MS_MAX = 24 * 60 * 60 * 1000
"""Longest time that a hold lasts without renewal: a forgotten hold must not fill disks permanently."""

_NAME = re.compile(TOPIC_NAME_PATTERN)


def create(state: MetadataState, command: CreateTopicCommand) -> CommandDecision | CommandRefusal:
    """Create a topic with its partitions."""
    made = find_made_topic(state.tables[Table.TOPICS], request_id=command.request_id, name=command.topic)
    if made is not None:
        return CommandDecision(result=CreateTopicResult(made.topic_id, made.partitions))
    if isinstance(find_topic(state, command.topic), TopicRow):
        return refuse("topic_exists", f"not done: topic {command.topic!r} exists already")
    refusal = _check_new(command) or _check_assignments(state, command.assignments, replicas=command.replicas)
    if refusal is not None:
        return refusal
    refusal = check_topics(state, command.principal, partitions=len(command.assignments))
    if refusal is not None:
        return refusal
    topic = TopicRow(
        topic_id=state.counters.next_topic_id,
        name=command.topic,
        partitions=len(command.assignments),
        replicas=command.replicas,
        retention=command.retention,
        state=TopicState.ACTIVE,
        created_ms=command.now_ms,
        purge_ms=None,
        request_id=command.request_id,
        owner=command.principal,
        is_encrypted=command.is_encrypted,
    )
    partitions = _new_partitions(state, topic.topic_id, command.assignments, first_number=0)
    counters = _after(state, partitions, next_topic_id=TopicId(topic.topic_id + 1))
    result = CreateTopicResult(topic.topic_id, topic.partitions)
    return CommandDecision([put(topic), *map(put, partitions)], counters, result)


def configure(state: MetadataState, command: ConfigureTopicCommand) -> CommandDecision | CommandRefusal:
    """Change a topic's retention."""
    topic = find_topic(state, command.topic)
    if isinstance(topic, CommandRefusal):
        return topic
    refusal = _check_retention(command.retention)
    if refusal is not None:
        return refusal
    if topic.retention == command.retention:
        return CommandDecision()
    return CommandDecision([put(msgspec.structs.replace(topic, retention=command.retention))])


def add_partitions(state: MetadataState, command: AddPartitionsCommand) -> CommandDecision | CommandRefusal:
    """Add partitions to a topic."""
    topic = find_topic(state, command.topic)
    if isinstance(topic, CommandRefusal):
        return topic
    added = command.partitions - topic.partitions
    if added < 1 or command.partitions > PARTITIONS_MAX or added != len(command.assignments):
        return refuse(
            "bad_partition_count",
            f"not done: topic {topic.name!r} has {topic.partitions} partitions and cannot change to "
            f"{command.partitions}; "
            f"the number can only grow, to at most {PARTITIONS_MAX}, with one assignment for each new partition",
        )
    refusal = _check_assignments(state, command.assignments, replicas=topic.replicas)
    refusal = refusal or check_partitions(state, topic.owner, added=added)
    if refusal is not None:
        return refusal
    partitions = _new_partitions(state, topic.topic_id, command.assignments, first_number=topic.partitions)
    grown = msgspec.structs.replace(topic, partitions=command.partitions)
    registered = register_grown(state, topic, command.partitions)
    return CommandDecision([put(grown), *map(put, partitions), *registered], _after(state, partitions))


def delete(state: MetadataState, command: DeleteTopicCommand) -> CommandDecision | CommandRefusal:
    """Mark a topic as deleted; it can be restored until it is purged."""
    topic = find_topic(state, command.topic)
    if isinstance(topic, CommandRefusal):
        return topic
    return CommandDecision([put(msgspec.structs.replace(topic, state=TopicState.DELETED, purge_ms=command.purge_ms))])


def restore(state: MetadataState, command: RestoreTopicCommand) -> CommandDecision | CommandRefusal:
    """Restore a deleted topic, unless another topic has its name by now."""
    topic = _find_deleted(state, command.topic_id)
    if isinstance(topic, CommandRefusal):
        return topic
    if topic.name in state.names[Table.TOPICS]:
        return refuse("topic_exists", f"not done: another topic {topic.name!r} was created since; delete it first")
    return CommandDecision([put(msgspec.structs.replace(topic, state=TopicState.ACTIVE, purge_ms=None))])


def purge(state: MetadataState, command: PurgeTopic) -> CommandDecision | CommandRefusal:
    """Delete a deleted topic permanently, with its partitions, moves, holds, registrations and assignments."""
    topic = _find_deleted(state, command.topic_id)
    if isinstance(topic, CommandRefusal):
        return topic
    if topic.purge_ms is None or command.now_ms < topic.purge_ms:
        return refuse("too_early", f"not done: topic id {topic.topic_id} can be restored until {topic.purge_ms} ms")
    changes = [drop(topic)]
    changes += [
        Change(Table.PARTITIONS, (topic.topic_id, PartitionId(number)), None) for number in range(topic.partitions)
    ]
    moves: Mapping[object, MoveRow] = state.tables[Table.MOVES]
    changes += [drop(move) for move in moves.values() if move.topic_id == topic.topic_id]
    holds: Mapping[object, HoldRow] = state.tables[Table.HOLDS]
    changes += [drop(hold) for hold in holds.values() if hold.topic_id == topic.topic_id]
    changes += _without_registrations(state, topic.topic_id)
    changes += forget_topic(state, topic.topic_id)
    return CommandDecision(changes)


def report_leaders(state: MetadataState, command: ReportLeaders) -> CommandDecision:
    """Record leaders: the newest epoch of each partition wins, unknown partitions are ignored."""
    newest: dict[tuple[TopicId, PartitionId], PartitionRow] = {}
    for report in command.reports:
        key = (report.topic_id, report.partition_id)
        known = newest.get(key) or state.tables[Table.PARTITIONS].get(key)
        if known is not None and report.epoch > known.epoch:
            newest[key] = msgspec.structs.replace(known, leader=report.leader, epoch=report.epoch)
    return CommandDecision([put(newest[key]) for key in sorted(newest)])


def prefer_leader(state: MetadataState, command: PreferLeader) -> CommandDecision | CommandRefusal:
    """Make one of a partition's replicas its preferred leader, the first in the list."""
    partition: PartitionRow | None = state.tables[Table.PARTITIONS].get((command.topic_id, command.partition_id))
    if partition is None:
        return refuse(
            "unknown_partition", f"not done: topic id {command.topic_id} has no partition {command.partition_id}"
        )
    if command.leader not in partition.replicas:
        return refuse("not_replica", f"not done: broker {command.leader} has no replica of this partition")
    others = tuple(broker for broker in partition.replicas if broker != command.leader)
    preferred = msgspec.structs.replace(partition, replicas=(command.leader, *others))
    return CommandDecision([] if preferred == partition else [put(preferred)])


def _check_new(command: CreateTopicCommand) -> CommandRefusal | None:
    if not _NAME.fullmatch(command.topic):
        return refuse(
            "bad_topic_name",
            f"not done: {command.topic!r} is not a valid topic name; use 1 to 200 letters, digits, dots, _ or -",
        )
    if not 1 <= len(command.assignments) <= PARTITIONS_MAX:
        return refuse(
            "bad_partition_count",
            f"not done: a topic has 1 to {PARTITIONS_MAX} partitions, not {len(command.assignments)}",
        )
    if not 1 <= command.replicas <= REPLICAS_MAX:
        return refuse(
            "bad_replica_count", f"not done: a partition has 1 to {REPLICAS_MAX} replicas, not {command.replicas}"
        )
    return _check_retention(command.retention)


def _check_retention(retention: Retention) -> CommandRefusal | None:
    if retention.ms == 0 or retention.bytes == 0:
        return refuse(
            "bad_retention", "not done: a retention limit of 0 is not valid; give one above 0, or none for no limit"
        )
    return None


def _check_assignments(
    state: MetadataState, assignments: Sequence[Sequence[NodeId]], *, replicas: int
) -> CommandRefusal | None:
    checks = (check_assignment(state, assignment, replicas_max=replicas) for assignment in assignments)
    return next((refusal for refusal in checks if refusal is not None), None)


def _new_partitions(
    state: MetadataState, topic_id: TopicId, assignments: Sequence[tuple[NodeId, ...]], *, first_number: int
) -> list[PartitionRow]:
    first_group = state.counters.next_group_id
    return [
        PartitionRow(
            topic_id=topic_id,
            partition_id=PartitionId(first_number + position),
            group_id=GroupId(first_group + position),
            replicas=assignment,
            learners=(),
            leader=None,
            epoch=0,
        )
        for position, assignment in enumerate(assignments)
    ]


def _after(
    state: MetadataState, partitions: Sequence[PartitionRow], *, next_topic_id: TopicId | None = None
) -> Counters:
    """Return the counters after ids were assigned to partitions and, if given, a topic."""
    return msgspec.structs.replace(
        state.counters,
        next_group_id=GroupId(state.counters.next_group_id + len(partitions)),
        next_topic_id=next_topic_id or state.counters.next_topic_id,
    )


def _find_deleted(state: MetadataState, topic_id: TopicId) -> TopicRow | CommandRefusal:
    topic: TopicRow | None = state.tables[Table.TOPICS].get(topic_id)
    if topic is None:
        return refuse("unknown_topic", f"not done: unknown topic id {topic_id}")
    if topic.state is not TopicState.DELETED:
        return refuse("topic_not_deleted", f"not done: topic {topic.name!r} is not deleted")
    return topic


def _without_registrations(state: MetadataState, topic_id: TopicId) -> list[Change]:
    """Return the changes that remove every registration for a topic; the clients stay registered."""
    clients: list[ProducerRow | ConsumerRow] = [
        *state.tables[Table.PRODUCERS].values(),
        *state.tables[Table.CONSUMERS].values(),
    ]
    changes = []
    for client in clients:
        kept = tuple(item for item in client.registrations if item.topic_id != topic_id)
        if kept != client.registrations:
            changes.append(put(msgspec.structs.replace(client, registrations=kept)))
    return changes


def place_hold(state: MetadataState, command: PlaceHoldCommand) -> CommandDecision | CommandRefusal:
    """Place a hold, or renew or advance the one of that name."""
    holds: Mapping[tuple[TopicId, str], HoldRow] = state.tables[Table.HOLDS]
    known = holds.get((command.topic_id, command.name))
    topic: TopicRow | None = state.tables[Table.TOPICS].get(command.topic_id)
    if topic is None:
        return refuse("unknown_topic", f"not done: unknown topic id {command.topic_id}")
    refusal = _check_hold(command, topic)
    if refusal is not None:
        return refusal
    refusal = _check_new_hold(state, command.principal) if known is None else _check_owner([known], command)
    if refusal is not None:
        return refusal
    hold = HoldRow(
        topic_id=command.topic_id,
        name=command.name,
        owner=command.owner,
        placed_ms=command.now_ms if known is None else known.placed_ms,
        expires_ms=command.now_ms + command.lasting_ms,
        positions=command.positions,
        principal=(known.principal if known is not None else "") or command.principal,
    )
    return CommandDecision([] if hold == known else [put(hold)])


def release_hold(state: MetadataState, command: ReleaseHoldCommand) -> CommandDecision | CommandRefusal:
    """Delete the holds of a name, on one topic or on all; those of other principals stay."""
    holds: Mapping[tuple[TopicId, str], HoldRow] = state.tables[Table.HOLDS]
    named = [holds[key] for key in sorted(holds) if key[1] == command.name and command.topic_id in (None, key[0])]
    refusal = _check_owner(named, command)
    if refusal is not None:
        return refusal
    return CommandDecision([drop(hold) for hold in named if _may_change(hold, command)])


def expire_hold(state: MetadataState, command: ExpireHold) -> CommandDecision | CommandRefusal:
    """Delete an expired hold; one that was renewed in the meantime stays."""
    hold: HoldRow | None = state.tables[Table.HOLDS].get((command.topic_id, command.name))
    if hold is None:
        return CommandDecision()
    if command.now_ms < hold.expires_ms:
        return refuse(
            "too_early", f"not done: hold {hold.name!r} expires at {hold.expires_ms} ms, not yet at {command.now_ms} ms"
        )
    return CommandDecision([drop(hold)])


def _check_new_hold(state: MetadataState, principal: str) -> CommandRefusal | None:
    """Return why a principal may not place one hold more; holds that nobody placed are nobody's share."""
    holds: Mapping[object, HoldRow] = state.tables[Table.HOLDS]
    own = sum(hold.principal == principal for hold in holds.values()) if principal else 0
    if is_share_used(own=own, used=len(holds), most=HOLDS_MAX):
        return refuse(
            "too_many_holds",
            f"not done: the cluster has {len(holds)} holds of at most {HOLDS_MAX}, {own} of them yours; release some",
        )
    return check_registrations(state, principal)


def _check_owner(holds: Sequence[HoldRow], command: PlaceHoldCommand | ReleaseHoldCommand) -> CommandRefusal | None:
    """Return why a principal may change none of these holds; None if there are none."""
    if not holds or any(_may_change(hold, command) for hold in holds):
        return None
    message = f"not done: hold {command.name!r} belongs to another user, who or an administrator may change it"
    return refuse("not_owner", message)


def _may_change(hold: HoldRow, command: PlaceHoldCommand | ReleaseHoldCommand) -> bool:
    return hold.principal in ("", command.principal) or command.takes_over


def _check_hold(command: PlaceHoldCommand, topic: TopicRow) -> CommandRefusal | None:
    if not command.name:
        return refuse("bad_hold", "not done: the hold has no name; give one")
    if not LASTING_MS_MIN <= command.lasting_ms <= LASTING_MS_MAX:
        return refuse(
            "bad_hold",
            f"not done: a hold lasts {LASTING_MS_MIN} to {LASTING_MS_MAX} ms, not {command.lasting_ms} ms; renew it "
            "to hold for longer",
        )
    numbers = [position.partition_id for position in command.positions]
    if not numbers or any(first >= second for first, second in pairwise(numbers)):
        return refuse(
            "bad_hold", "not done: the positions of a hold name at least one partition, each once, in ascending order"
        )
    if numbers[-1] >= topic.partitions:
        message = f"not done: topic {topic.name!r} has {topic.partitions} partitions and no partition {numbers[-1]}"
        return refuse("unknown_partition", message)
    return None
