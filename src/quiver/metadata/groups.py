"""Commands on consumer groups: members come and go, partitions are given and taken.

Pure; called only by `apply`. A group is a named consumer with a `GroupRow`; it belongs to the consumer's owner. Its
members are rows that hold their partitions, so that a member that goes takes them with it.

Invariants, whatever is in the log: a partition of a group has at most one owner; an owner is a member; a grant has the
epoch of its own index in the log, which is above all epochs and sessions before it (`epoch_at`); nothing that a member
still has is given to another (`is_free`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from quiver.groups import machine
from quiver.groups.limits import (
    ASSIGNED_MAX,
    GROUPS_MAX,
    MEMBERS_MAX,
    MEMBERS_TOTAL_MAX,
    PAUSE_MS_MAX,
    SESSION_TIMEOUT_MS_MAX,
    SESSION_TIMEOUT_MS_MIN,
    STEPS_MAX,
    TOPICS_MAX,
)
from quiver.metadata.clients import REGISTRATIONS_MAX, drop_client, register_group
from quiver.metadata.commands import RegisterConsumerCommand, RegisterConsumerResult, RestartGroupResult
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
from quiver.metadata.group_commands import (
    AssignPartitions,
    ConfigureGroupCommand,
    DeleteGroupCommand,
    JoinGroupCommand,
    PartitionGrant,
    ReleasePartitions,
    RemoveMembers,
    RestartGroupCommand,
)
from quiver.metadata.rows import (
    ALL_PARTITIONS,
    ConsumerRow,
    EntityKind,
    GroupKind,
    GroupMemberRow,
    GroupRow,
    OwnedPartition,
    Registration,
    StartFrom,
    Table,
    TopicRow,
    TopicState,
)
from quiver.metadata.state import Change, MetadataState, drop, put
from quiver.model import ConsumerId, Index, PartitionId, TopicId

PartitionKey = tuple[TopicId, PartitionId]
_Owners = dict[PartitionKey, tuple[GroupMemberRow, OwnedPartition]]


# -- members -----------------------------------------------------------------------------------------


def join(state: MetadataState, command: JoinGroupCommand) -> CommandDecision | CommandRefusal:
    """Add a member, or change the subscription of one; a member with an instance name inherits its partitions."""
    refusal = _check_join(command)
    if refusal is not None:
        return refusal
    decision = _register(state, command)
    if isinstance(decision, CommandRefusal):
        return decision
    assert isinstance(decision.result, RegisterConsumerResult)
    group = _open_group(state, decision.result.consumer_id, command.group_kind, command)
    if isinstance(group, CommandRefusal):
        return group
    if group.kind is GroupKind.QUEUE:
        return _with_group(state, decision, group)
    return _add_member(state, decision, group, command)


def remove(state: MetadataState, command: RemoveMembers) -> CommandDecision:
    """Remove members; their partitions are free."""
    gone: dict[ConsumerId, list[GroupMemberRow]] = {}
    for key in sorted({(one.group_id, one.member_id) for one in command.members}):
        member: GroupMemberRow | None = state.tables[Table.GROUP_MEMBERS].get(key)
        if member is not None:
            gone.setdefault(member.group_id, []).append(member)
    changes: list[Change] = []
    for group_id, members in gone.items():
        changes += map(drop, members)
        group: GroupRow = state.tables[Table.CONSUMER_GROUPS][group_id]
        who = f"member {_label(members[0])}" if len(members) == 1 else f"{len(members)} members"
        changes.append(put(_advanced(group, reason=f"{who} {command.reason}")))
    return CommandDecision(changes)


def release(state: MetadataState, command: ReleasePartitions) -> CommandDecision:
    """Free partitions that members have released under the epochs that they have."""
    released: dict[tuple[ConsumerId, str], set[tuple[TopicId, PartitionId, int]]] = {}
    for one in command.releases:
        released.setdefault((one.group_id, one.member_id), set()).add((one.topic_id, one.partition_id, one.epoch))
    changes: list[Change] = []
    for key in sorted(released):
        member: GroupMemberRow | None = state.tables[Table.GROUP_MEMBERS].get(key)
        if member is None:
            continue
        kept = tuple(one for one in member.owned if (*one.key, one.epoch) not in released[key])
        if kept != member.owned:
            changes.append(put(_owning(state, member, kept)))
    return CommandDecision(changes)


# -- partitions --------------------------------------------------------------------------------------


def assign(state: MetadataState, command: AssignPartitions) -> CommandDecision | CommandRefusal:
    """Carry out the steps of a plan, all or none."""
    group: GroupRow | None = state.tables[Table.CONSUMER_GROUPS].get(command.group_id)
    if group is None or group.kind is GroupKind.QUEUE:
        return refuse("unknown_group", f"not done: no group with members has the id {command.group_id}")
    if group.version != command.version:
        message = f"not done: the group is at version {group.version}, not at {command.version}; plan again"
        return refuse("group_changed", message)
    owners = _owners(state, command.group_id)
    refusal = _check_steps(state, command, owners)
    if refusal is not None:
        return refusal
    members = _apply_steps(state, command, owners)
    registered = _register_topics(state, command.group_id, command.grants)
    if isinstance(registered, CommandRefusal):
        return registered
    if not members:
        return CommandDecision()
    group = msgspec.structs.replace(
        _advanced(group, reason=command.reason or group.reason),
        rebalances=group.rebalances + 1,
        last_rebalance_ms=command.now_ms,
    )
    return CommandDecision([put(group), *registered, *map(put, members)])


def restart(state: MetadataState, command: RestartGroupCommand) -> CommandDecision | CommandRefusal:
    """Take all partitions from the members of a group; return a session above all that was before."""
    consumer = _find(state, command.group)
    if isinstance(consumer, CommandRefusal):
        return consumer
    if command.pause_ms > PAUSE_MS_MAX:
        return refuse("bad_group", f"not done: a pause has at most {PAUSE_MS_MAX} ms, not {command.pause_ms} ms")
    result = RestartGroupResult(consumer.consumer_id, _epoch(state))
    group: GroupRow | None = state.tables[Table.CONSUMER_GROUPS].get(consumer.consumer_id)
    if group is None:  # a plain consumer: the session fences it
        return CommandDecision(result=result)
    group = _advanced(msgspec.structs.replace(group, pause_ms=command.pause_ms), reason="restarted")
    members = _members(state, consumer.consumer_id)
    changes = [put(group), *(put(_owning(state, member, ())) for member in members if member.owned)]
    return CommandDecision(changes, result=result)


def restart_all(state: MetadataState) -> Iterator[Change]:
    """Yield the changes that take all partitions from all members, after a recovery."""
    groups: Mapping[ConsumerId, GroupRow] = state.tables[Table.CONSUMER_GROUPS]
    for group_id in sorted(state.members):
        yield put(_advanced(groups[group_id], reason="restarted by a recovery"))
        yield from (put(_owning(state, member, ())) for member in _members(state, group_id) if member.owned)


def forget_topic(state: MetadataState, topic_id: TopicId) -> Iterator[Change]:
    """Yield the changes that take a topic's partitions from all members."""
    members: Mapping[tuple[ConsumerId, str], GroupMemberRow] = state.tables[Table.GROUP_MEMBERS]
    for _, member in sorted(members.items()):
        kept = tuple(one for one in member.owned if one.topic_id != topic_id)
        if kept != member.owned:
            yield put(_owning(state, member, kept))


def register_grown(state: MetadataState, topic: TopicRow, partitions: int) -> Iterator[Change]:
    """Yield the changes of groups that start at the end, for a topic that grows to so many partitions.

    They read new partitions from the beginning: what is written there before the first member has them is not skipped.
    """
    for group_id in sorted(state.tables[Table.CONSUMER_GROUPS]):
        consumer: ConsumerRow = state.tables[Table.CONSUMERS][group_id]
        added = [
            Registration(topic_id=topic.topic_id, partition_id=PartitionId(number), start=StartFrom.EARLIEST)
            for one in consumer.registrations
            if (one.topic_id, one.partition_id, one.start) == (topic.topic_id, ALL_PARTITIONS, StartFrom.LATEST)
            for number in range(topic.partitions, partitions)
        ]
        if added and len(consumer.registrations) + len(added) <= REGISTRATIONS_MAX:
            ordered = sorted((*consumer.registrations, *added), key=lambda one: (one.topic_id, one.partition_id))
            yield put(msgspec.structs.replace(consumer, registrations=tuple(ordered)))


# -- groups ------------------------------------------------------------------------------------------


def configure(state: MetadataState, command: ConfigureGroupCommand) -> CommandDecision | CommandRefusal:
    """Change a group's settings; create it, or register topics, if topics are given."""
    refusal = _check_group(command.group, command.topics)
    known = _find(state, command.group)
    if refusal is None and isinstance(known, CommandRefusal) and not command.topics:
        refusal = known
    if refusal is not None:
        return refusal
    decision = _register(state, command)
    if isinstance(decision, CommandRefusal):
        return decision
    assert isinstance(decision.result, RegisterConsumerResult)
    group = _open_group(state, decision.result.consumer_id, command.group_kind, command)
    if isinstance(group, CommandRefusal):
        return group
    if command.settings is not None:
        if group.kind is not GroupKind.QUEUE:
            message = f"not done: group {command.group!r} is no work queue; only those have settings"
            return refuse("group_kind", message)
        group = msgspec.structs.replace(group, settings=command.settings)
    return _with_group(state, decision, group)


def delete(state: MetadataState, command: DeleteGroupCommand) -> CommandDecision | CommandRefusal:
    """Delete a group with its consumer; members learn from their next heartbeat that they are none."""
    consumer = _find(state, command.group)
    if isinstance(consumer, CommandRefusal):
        return consumer
    members = _members(state, consumer.consumer_id)
    if members and not command.is_forced:
        count = f"{len(members)} member{'s' if len(members) > 1 else ''}"
        return refuse(
            "group_active", f"not done: group {command.group!r} has {count}; stop them first, or force the deletion"
        )
    changes = [drop(member) for member in members]
    return CommandDecision(changes + drop_client(state, EntityKind.CONSUMER, consumer.consumer_id))


# -- checks ------------------------------------------------------------------------------------------


def _check_group(name: str, topics: Sequence[object]) -> CommandRefusal | None:
    if not name:
        return refuse("bad_group", "not done: the group has no name; give one")
    if len(topics) > TOPICS_MAX:
        return refuse(
            "bad_group", f"not done: {len(topics)} topics, and at most {TOPICS_MAX} are allowed; use a pattern"
        )
    return None


def _check_join(command: JoinGroupCommand) -> CommandRefusal | None:
    refusal = _check_group(command.group, command.topics)
    if refusal is not None:
        return refusal
    if any(selection.partitions for selection in command.topics):
        return refuse("bad_group", "not done: a member of a group cannot choose partitions; name topics only")
    if not command.topics and not command.pattern:
        return refuse("no_topics", "not done: the member subscribes to nothing; name topics or a pattern")
    if command.group_kind is GroupKind.QUEUE:
        return None
    if not command.member_id:
        return refuse("bad_group", "not done: the member has no id; choose one")
    if not SESSION_TIMEOUT_MS_MIN <= command.session_timeout_ms <= SESSION_TIMEOUT_MS_MAX:
        return refuse(
            "bad_group",
            f"not done: a session timeout is {SESSION_TIMEOUT_MS_MIN} to {SESSION_TIMEOUT_MS_MAX} ms, not "
            f"{command.session_timeout_ms} ms",
        )
    return None


def _check_room(state: MetadataState, group: GroupRow) -> CommandRefusal | None:
    if len(state.members.get(group.group_id, ())) >= MEMBERS_MAX:
        return refuse("too_many_members", f"not done: the group has {MEMBERS_MAX} members, the maximum")
    if len(state.tables[Table.GROUP_MEMBERS]) >= MEMBERS_TOTAL_MAX:
        return refuse(
            "too_many_members", f"not done: the cluster has {MEMBERS_TOTAL_MAX} members of groups, the maximum"
        )
    return None


def _check_steps(state: MetadataState, command: AssignPartitions, owners: _Owners) -> CommandRefusal | None:
    """Return why the steps are not possible; every partition is named once."""
    granted = [(one.topic_id, one.partition_id) for one in command.grants]
    revoked = [(one.topic_id, one.partition_id) for one in command.revokes]
    dropped = [(one.topic_id, one.partition_id) for one in command.drops]
    named = [*granted, *revoked, *dropped]
    if len(named) > STEPS_MAX or len(set(named)) != len(named):
        return refuse("bad_assignment", f"not done: an assignment names at most {STEPS_MAX} partitions, each once")
    if state.assigned + len(granted) > ASSIGNED_MAX:
        return refuse("too_many_assignments", f"not done: members of groups own {ASSIGNED_MAX} partitions, the maximum")
    members: Collection[str] = state.members.get(command.group_id, ())
    for key, grant in zip(granted, command.grants, strict=True):
        if grant.member_id not in members or not _exists(state, key):
            return refuse("bad_assignment", f"not done: member {grant.member_id} or partition {key} does not exist")
        if not machine.is_free(_owner_of(owners, key)):
            return refuse("bad_assignment", f"not done: partition {key} belongs to a member")
    for key in revoked:
        if key not in owners:
            return refuse("bad_assignment", f"not done: partition {key} belongs to no member")
    for key in dropped:
        if key not in owners or _exists(state, key):
            return refuse("bad_assignment", f"not done: partition {key} exists, or belongs to no member")
    return None


def _exists(state: MetadataState, key: PartitionKey) -> bool:
    topic: TopicRow | None = state.tables[Table.TOPICS].get(key[0])
    return topic is not None and topic.state is TopicState.ACTIVE and 0 <= key[1] < topic.partitions


# -- what the decisions share ------------------------------------------------------------------------


def _find(state: MetadataState, name: str) -> ConsumerRow | CommandRefusal:
    consumer_id = state.names[Table.CONSUMERS].get(name)
    if consumer_id is None:
        return refuse("unknown_group", f"not done: unknown group {name!r}")
    found: ConsumerRow = state.tables[Table.CONSUMERS][consumer_id]
    return found


def _register(
    state: MetadataState, command: JoinGroupCommand | ConfigureGroupCommand
) -> CommandDecision | CommandRefusal:
    """Register the consumer that the group is, for the topics that are named."""
    registration = RegisterConsumerCommand(
        now_ms=command.now_ms,
        principal=command.principal,
        topics=command.topics,
        start=command.start,
        request_id=command.group,
        takes_over=command.takes_over,
    )
    return register_group(state, registration)


def _open_group(
    state: MetadataState,
    group_id: ConsumerId,
    kind: GroupKind | None,
    command: JoinGroupCommand | ConfigureGroupCommand,
) -> GroupRow | CommandRefusal:
    """Return the group of a consumer, a new one if it has none."""
    groups: Mapping[ConsumerId, GroupRow] = state.tables[Table.CONSUMER_GROUPS]
    known = groups.get(group_id)
    if known is None and len(groups) >= GROUPS_MAX:
        return refuse("too_many_groups", f"not done: the cluster has {GROUPS_MAX} groups, the maximum; delete some")
    if known is None:
        return GroupRow(group_id=group_id, kind=kind or GroupKind.STREAM, created_ms=command.now_ms)
    if kind is not None and kind is not known.kind:
        return refuse(
            "group_kind",
            f"not done: group {command.group!r} is of kind {known.kind.value}, not {kind.value}; choose another name, "
            "or delete the group",
        )
    return known


def _with_group(state: MetadataState, decision: CommandDecision, group: GroupRow) -> CommandDecision:
    if state.tables[Table.CONSUMER_GROUPS].get(group.group_id) != group:
        decision.changes.append(put(group))
    return decision


def _add_member(
    state: MetadataState, decision: CommandDecision, group: GroupRow, command: JoinGroupCommand
) -> CommandDecision | CommandRefusal:
    known: GroupMemberRow | None = state.tables[Table.GROUP_MEMBERS].get((group.group_id, command.member_id))
    before = None
    if command.instance:
        others = (one for one in _members(state, group.group_id) if one is not known)
        before = next((one for one in others if one.instance == command.instance), None)
    refusal = _check_room(state, group) if known is None and before is None else None
    if refusal is not None:
        return refusal
    member = GroupMemberRow(
        group_id=group.group_id,
        member_id=command.member_id,
        joined_ms=command.now_ms if known is None else known.joined_ms,
        session_timeout_ms=command.session_timeout_ms,
        instance=command.instance,
        rack=command.rack,
        topics=tuple(sorted({selection.topic for selection in command.topics})),
        pattern=command.pattern,
        start=command.start,
        client=command.client,
        principal=command.principal,
        replaces="" if known is None else known.replaces,
        version=_index(state) if known is None else known.version,
        owned=() if known is None else known.owned,
    )
    if before is not None:
        member, group = _inherit(state, member, before), _advanced(group, reason=f"member {_label(member)} came back")
        decision.changes.append(drop(before))
    elif known is None:
        group = msgspec.structs.replace(group, reason=f"member {_label(member)} joined")
    if member != known:
        decision.changes.append(put(member))
    return _with_group(state, decision, group)


def _inherit(state: MetadataState, member: GroupMemberRow, before: GroupMemberRow) -> GroupMemberRow:
    """Return a member with the partitions of the one that it replaces, under a new epoch that fences that one.

    What that one was asked to release is free: it will never release it.
    """
    epoch = _epoch(state)
    taken = [
        msgspec.structs.replace(one, epoch=epoch)
        for one in before.owned
        if not one.is_revoking and all(one.key != own.key for own in member.owned)
    ]
    return msgspec.structs.replace(_owning(state, member, (*member.owned, *taken)), replaces=before.member_id)


def _members(state: MetadataState, group_id: ConsumerId) -> list[GroupMemberRow]:
    """Return the members of a group, sorted by id."""
    table: Mapping[tuple[ConsumerId, str], GroupMemberRow] = state.tables[Table.GROUP_MEMBERS]
    return [table[group_id, member_id] for member_id in sorted(state.members.get(group_id, ()))]


def _owners(state: MetadataState, group_id: ConsumerId) -> _Owners:
    return {one.key: (member, one) for member in _members(state, group_id) for one in member.owned}


def _owner_of(owners: _Owners, key: PartitionKey) -> machine.PartitionOwner | None:
    found = owners.get(key)
    return None if found is None else machine.PartitionOwner(found[0].member_id, found[1].is_revoking)


def _apply_steps(state: MetadataState, command: AssignPartitions, owners: _Owners) -> list[GroupMemberRow]:
    """Return the members whose partitions change."""
    owned: dict[str, dict[PartitionKey, OwnedPartition]] = {}

    def partitions_of(member_id: str) -> dict[PartitionKey, OwnedPartition]:
        if member_id not in owned:
            row: GroupMemberRow = state.tables[Table.GROUP_MEMBERS][command.group_id, member_id]
            owned[member_id] = {one.key: one for one in row.owned}
        return owned[member_id]

    for key in [(one.topic_id, one.partition_id) for one in command.drops]:
        del partitions_of(owners[key][0].member_id)[key]
    for key in [(one.topic_id, one.partition_id) for one in command.revokes]:
        member, one = owners[key]
        partitions_of(member.member_id)[key] = msgspec.structs.replace(one, is_revoking=True)
    epoch = _epoch(state)
    for grant in command.grants:
        granted = OwnedPartition(topic_id=grant.topic_id, partition_id=grant.partition_id, epoch=epoch)
        partitions_of(grant.member_id)[granted.key] = granted
    table: Mapping[tuple[ConsumerId, str], GroupMemberRow] = state.tables[Table.GROUP_MEMBERS]
    return [
        _owning(state, table[command.group_id, member_id], owned[member_id].values()) for member_id in sorted(owned)
    ]


def _register_topics(
    state: MetadataState, group_id: ConsumerId, grants: Sequence[PartitionGrant]
) -> list[Change] | CommandRefusal:
    """Return the change that registers the group for topics that it meets for the first time, through a pattern.

    A topic that was created after the group is read from its beginning, wherever members want to start.
    """
    consumer: ConsumerRow = state.tables[Table.CONSUMERS][group_id]
    known = {one.topic_id for one in consumer.registrations}
    added: dict[TopicId, Registration] = {}
    for grant in grants:
        if grant.topic_id not in known and grant.topic_id not in added:
            topic: TopicRow = state.tables[Table.TOPICS][grant.topic_id]
            member: GroupMemberRow = state.tables[Table.GROUP_MEMBERS][group_id, grant.member_id]
            start = StartFrom.EARLIEST if topic.created_ms >= consumer.registered_ms else member.start
            added[grant.topic_id] = Registration(topic_id=grant.topic_id, partition_id=ALL_PARTITIONS, start=start)
    if not added:
        return []
    joined = sorted((*consumer.registrations, *added.values()), key=lambda one: (one.topic_id, one.partition_id))
    if len(joined) > REGISTRATIONS_MAX:
        message = f"not done: a group has at most {REGISTRATIONS_MAX} registrations, not {len(joined)}"
        return refuse("too_many_clients", message)
    return [put(msgspec.structs.replace(consumer, registrations=tuple(joined)))]


def _owning(state: MetadataState, member: GroupMemberRow, owned: Iterable[OwnedPartition]) -> GroupMemberRow:
    """Return a member with other partitions."""
    ordered = tuple(sorted(owned, key=lambda one: one.key))
    return msgspec.structs.replace(member, owned=ordered, version=_index(state))


def _advanced(group: GroupRow, *, reason: str) -> GroupRow:
    """Return a group at its next version."""
    return msgspec.structs.replace(group, version=group.version + 1, reason=reason)


def _index(state: MetadataState) -> Index:
    """Return the index of the command that is being applied."""
    return Index(state.position.index + 1)


def _epoch(state: MetadataState) -> int:
    """Return the epoch of what the command that is being applied grants."""
    return machine.epoch_at(Index(_index(state) + state.counters.session_base))


def _label(member: GroupMemberRow) -> str:
    """Return what people call a member."""
    return member.instance or member.client or member.member_id
