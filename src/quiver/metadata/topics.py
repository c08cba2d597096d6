"""What commands do to topics and partitions: creation, growth, deletion in two steps, and who leads.

Pure; called by `apply` alone. A deleted topic keeps its partitions, ids and registrations, and can be restored, until
it is purged; its name is free at once. Topic ids and group ids are never given twice, so that what a broker still has
of a purged topic can never be taken for another's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from quiver.metadata.commands import (
    AddPartitionsCommand,
    ConfigureTopicCommand,
    CreateTopicCommand,
    CreateTopicResult,
    DeleteTopicCommand,
    PreferLeader,
    PurgeTopic,
    ReportLeaders,
    RestoreTopicCommand,
)
from quiver.metadata.decision import CommandDecision, CommandRefusal, check_assignment, find_topic, refuse
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
from quiver.model import GroupId, NodeId, PartitionId, TopicId

PARTITIONS_MAX = 4096
"""How many partitions a topic may have."""
REPLICAS_MAX = 15
"""How many replicas a partition may have."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


def create(state: MetadataState, command: CreateTopicCommand) -> CommandDecision | CommandRefusal:
    """Create a topic with its partitions."""
    made = find_made_topic(state.tables[Table.TOPICS], request_id=command.request_id, name=command.topic)
    if made is not None:
        return CommandDecision(result=CreateTopicResult(made.topic_id, made.partitions))
    if isinstance(find_topic(state, command.topic), TopicRow):
        return refuse("topic_exists", f"not done: there is a topic {command.topic!r} already")
    refusal = _check_new(command) or _check_assignments(state, command.assignments, replicas=command.replicas)
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
    """Give a topic more partitions."""
    topic = find_topic(state, command.topic)
    if isinstance(topic, CommandRefusal):
        return topic
    added = command.partitions - topic.partitions
    if added < 1 or command.partitions > PARTITIONS_MAX or added != len(command.assignments):
        return refuse(
            "bad_partition_count",
            f"not done: topic {topic.name!r} has {topic.partitions} partitions; it can get more, up to "
            f"{PARTITIONS_MAX}, with one assignment for each",
        )
    refusal = _check_assignments(state, command.assignments, replicas=topic.replicas)
    if refusal is not None:
        return refusal
    partitions = _new_partitions(state, topic.topic_id, command.assignments, first_number=topic.partitions)
    grown = msgspec.structs.replace(topic, partitions=command.partitions)
    return CommandDecision([put(grown), *map(put, partitions)], _after(state, partitions))


def delete(state: MetadataState, command: DeleteTopicCommand) -> CommandDecision | CommandRefusal:
    """Take a topic out of use."""
    topic = find_topic(state, command.topic)
    if isinstance(topic, CommandRefusal):
        return topic
    return CommandDecision([put(msgspec.structs.replace(topic, state=TopicState.DELETED, purge_ms=command.purge_ms))])


def restore(state: MetadataState, command: RestoreTopicCommand) -> CommandDecision | CommandRefusal:
    """Take a deleted topic back into use, unless its name has been given away meanwhile."""
    topic = _find_deleted(state, command.topic_id)
    if isinstance(topic, CommandRefusal):
        return topic
    if topic.name in state.names[Table.TOPICS]:
        return refuse("topic_exists", f"not done: there is another topic {topic.name!r} by now")
    return CommandDecision([put(msgspec.structs.replace(topic, state=TopicState.ACTIVE, purge_ms=None))])


def purge(state: MetadataState, command: PurgeTopic) -> CommandDecision | CommandRefusal:
    """Forget a deleted topic and all that hangs on it."""
    topic = _find_deleted(state, command.topic_id)
    if isinstance(topic, CommandRefusal):
        return topic
    if topic.purge_ms is None or command.now_ms < topic.purge_ms:
        return refuse("too_early", f"not done: topic {topic.topic_id} can be restored until {topic.purge_ms}")
    changes = [drop(topic)]
    changes += [
        Change(Table.PARTITIONS, (topic.topic_id, PartitionId(number)), None) for number in range(topic.partitions)
    ]
    moves: dict[object, MoveRow] = state.tables[Table.MOVES]
    changes += [drop(move) for move in moves.values() if move.topic_id == topic.topic_id]
    holds: dict[object, HoldRow] = state.tables[Table.HOLDS]
    changes += [drop(hold) for hold in holds.values() if hold.topic_id == topic.topic_id]
    changes += _without_registrations(state, topic.topic_id)
    return CommandDecision(changes)


def report_leaders(state: MetadataState, command: ReportLeaders) -> CommandDecision:
    """Take note of leaders: of each partition the newest epoch wins, of unknown partitions nothing is kept."""
    newest: dict[tuple[TopicId, PartitionId], PartitionRow] = {}
    for report in command.reports:
        key = (report.topic_id, report.partition_id)
        known = newest.get(key) or state.tables[Table.PARTITIONS].get(key)
        if known is not None and report.epoch > known.epoch:
            newest[key] = msgspec.structs.replace(known, leader=report.leader, epoch=report.epoch)
    return CommandDecision([put(newest[key]) for key in sorted(newest)])


def prefer_leader(state: MetadataState, command: PreferLeader) -> CommandDecision | CommandRefusal:
    """Put one of a partition's replicas first."""
    partition: PartitionRow | None = state.tables[Table.PARTITIONS].get((command.topic_id, command.partition_id))
    if partition is None:
        return refuse("unknown_partition", f"not done: there is no partition {command.partition_id} of that topic")
    if command.leader not in partition.replicas:
        return refuse("not_replica", f"not done: broker {command.leader} has no replica of that partition")
    others = tuple(broker for broker in partition.replicas if broker != command.leader)
    preferred = msgspec.structs.replace(partition, replicas=(command.leader, *others))
    return CommandDecision([] if preferred == partition else [put(preferred)])


def _check_new(command: CreateTopicCommand) -> CommandRefusal | None:
    if not _NAME.fullmatch(command.topic) or command.topic in (".", ".."):
        return refuse("bad_topic_name", "not done: a topic's name is 1 to 200 letters, digits, dots, _ or -")
    if not 1 <= len(command.assignments) <= PARTITIONS_MAX:
        return refuse("bad_partition_count", f"not done: a topic has 1 to {PARTITIONS_MAX} partitions")
    if not 1 <= command.replicas <= REPLICAS_MAX:
        return refuse("bad_replica_count", f"not done: a partition has 1 to {REPLICAS_MAX} replicas")
    return _check_retention(command.retention)


def _check_retention(retention: Retention) -> CommandRefusal | None:
    if retention.ms == 0 or retention.bytes == 0:
        return refuse("bad_retention", "not done: a bound of retention is above 0; leave it out for none")
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
    """Return the counters after partitions, and perhaps a topic, have got their ids."""
    return msgspec.structs.replace(
        state.counters,
        next_group_id=GroupId(state.counters.next_group_id + len(partitions)),
        next_topic_id=next_topic_id or state.counters.next_topic_id,
    )


def _find_deleted(state: MetadataState, topic_id: TopicId) -> TopicRow | CommandRefusal:
    topic: TopicRow | None = state.tables[Table.TOPICS].get(topic_id)
    if topic is None:
        return refuse("unknown_topic", f"not done: there is no topic with id {topic_id}")
    if topic.state is not TopicState.DELETED:
        return refuse("topic_not_deleted", f"not done: topic {topic.name!r} is not deleted")
    return topic


def _without_registrations(state: MetadataState, topic_id: TopicId) -> list[Change]:
    """Return the changes that end every client's registrations for a topic; the clients stay."""
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
