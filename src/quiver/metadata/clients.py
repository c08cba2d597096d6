"""Commands on producers and consumers: registration, epochs, heartbeats, expiry and removal.

`groups` has the commands on groups, which are consumers with members.

Pure; called only by `apply`. An id is assigned once and never reused. A producer gets a new epoch each time it
registers, which fences all sends of its earlier sessions. A consumer may register for more topics under the same id.

A client belongs to the principal that registered it: nobody else may register under its name or id, except who may
configure it (`takes_over`). One without an owner belongs to the first principal that registers under its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from quiver.metadata.commands import (
    ExpireClients,
    ForgetClientCommand,
    RecordHeartbeats,
    RegisterConsumerCommand,
    RegisterConsumerResult,
    RegisterProducerCommand,
    RegisterProducerResult,
    SilentClient,
    TopicSelection,
)
from quiver.metadata.decision import CommandDecision, CommandRefusal, beat, drop_beat, find_topic, refuse
from quiver.metadata.quotas import check_registrations
from quiver.metadata.rows import (
    ALL_PARTITIONS,
    ConsumerRow,
    EntityKind,
    GroupKind,
    GroupRow,
    HeartbeatRow,
    ProducerRow,
    Registration,
    StartFrom,
    Table,
)
from quiver.metadata.state import Change, MetadataState, put
from quiver.model import ConsumerId, ProducerId

OWNERS_LEVEL = 2
"""The feature level from which clients have owners and limits."""
CLIENTS_MAX = 500_000
"""Most producers, and most consumers, of a cluster from feature level 2 on."""
REGISTRATIONS_MAX = 10_000
"""Most registrations of one client, from feature level 2 on."""

_TABLES = {EntityKind.BROKER: Table.BROKERS, EntityKind.PRODUCER: Table.PRODUCERS, EntityKind.CONSUMER: Table.CONSUMERS}


_Client = TypeVar("_Client", ProducerRow, ConsumerRow)


def register_producer(state: MetadataState, command: RegisterProducerCommand) -> CommandDecision | CommandRefusal:
    """Assign an id to a new producer, or a new epoch to a known one."""
    known = _find_producer(state, command)
    if isinstance(known, CommandRefusal):
        return known
    wanted = _resolve(state, command.topics, start=None)
    if isinstance(wanted, CommandRefusal):
        return wanted
    joined = _join(() if known is None else known.registrations, wanted)
    refusal = _check_room(state, Table.PRODUCERS, known, joined) or _check_quota(state, known, command.principal)
    if refusal is not None:
        return refusal
    if known is not None:
        producer = msgspec.structs.replace(
            known, epoch=known.epoch + 1, registrations=joined, owner=known.owner or command.principal
        )
        counters = None
    else:
        producer = ProducerRow(
            producer_id=state.counters.next_producer_id,
            name=command.name,
            epoch=0,
            registered_ms=command.now_ms,
            registrations=joined,
            owner=command.principal,
        )
        counters = msgspec.structs.replace(state.counters, next_producer_id=ProducerId(producer.producer_id + 1))
    changes = [put(producer), *beat(state, EntityKind.PRODUCER, producer.producer_id, command.now_ms)]
    return CommandDecision(changes, counters, RegisterProducerResult(producer.producer_id, producer.epoch))


def register_consumer(state: MetadataState, command: RegisterConsumerCommand) -> CommandDecision | CommandRefusal:
    """Assign an id to a new consumer, or add registrations to a known one; refused if that is a group in use."""
    known = _find_consumer(state, command)
    if isinstance(known, CommandRefusal):
        return known
    refusal = None if known is None else _check_unused(state, known)
    return refusal or _register(state, command, known)


def register_group(state: MetadataState, command: RegisterConsumerCommand) -> CommandDecision | CommandRefusal:
    """Register the consumer of a group, with or without topics."""
    known = _find_consumer(state, command)
    return known if isinstance(known, CommandRefusal) else _register(state, command, known, may_be_empty=True)


def _check_unused(state: MetadataState, consumer: ConsumerRow) -> CommandRefusal | None:
    """Return why a name cannot be used by a plain consumer."""
    name = consumer.request_id or consumer.consumer_id
    if consumer.consumer_id in state.members:
        count = len(state.members[consumer.consumer_id])
        return refuse(
            "group_active",
            f"not done: group {name!r} has {count} member{'s' * (count > 1)}; join it with group={name!r}, wait until "
            "it has none, or choose another name",
        )
    group: GroupRow | None = state.tables[Table.CONSUMER_GROUPS].get(consumer.consumer_id)
    if group is not None and group.kind is GroupKind.QUEUE:
        return refuse("group_kind", f"not done: {name!r} is a work queue; receive from it, or choose another name")
    return None


def _register(
    state: MetadataState, command: RegisterConsumerCommand, known: ConsumerRow | None, *, may_be_empty: bool = False
) -> CommandDecision | CommandRefusal:
    wanted = _resolve(state, command.topics, start=command.start) if command.topics or not may_be_empty else []
    if isinstance(wanted, CommandRefusal):
        return wanted
    joined = _join(() if known is None else known.registrations, wanted)
    refusal = _check_room(state, Table.CONSUMERS, known, joined) or _check_quota(state, known, command.principal)
    if refusal is not None:
        return refusal
    counters = None
    if known is not None:
        consumer = msgspec.structs.replace(known, registrations=joined, owner=known.owner or command.principal)
    else:
        consumer = ConsumerRow(
            consumer_id=state.counters.next_consumer_id,
            registered_ms=command.now_ms,
            registrations=joined,
            request_id=command.request_id,
            owner=command.principal,
        )
        counters = msgspec.structs.replace(state.counters, next_consumer_id=ConsumerId(consumer.consumer_id + 1))
    changes = [] if consumer == known else [put(consumer)]
    changes += beat(state, EntityKind.CONSUMER, consumer.consumer_id, command.now_ms)
    return CommandDecision(changes, counters, RegisterConsumerResult(consumer.consumer_id))


def forget(state: MetadataState, command: ForgetClientCommand) -> CommandDecision | CommandRefusal:
    """Delete a producer or consumer."""
    found = None
    if command.kind is not EntityKind.BROKER:
        found = state.tables[_TABLES[command.kind]].get(command.id)
    if found is None:
        code = "unknown_consumer" if command.kind is EntityKind.CONSUMER else "unknown_producer"
        return refuse(code, f"not done: unknown {command.kind.value} {command.id}")
    if command.kind is EntityKind.CONSUMER and command.id in state.members:
        return refuse(
            "group_active",
            f"not done: consumer {command.id} is the group {found.request_id!r}, which has members; delete the group",
        )
    return CommandDecision(drop_client(state, command.kind, command.id))


def expire(state: MetadataState, command: ExpireClients) -> CommandDecision:
    """Delete silent clients, except those that showed life, or registered again, after the primary decided."""
    changes: list[Change] = []
    for kind, id_ in sorted({(silent.kind, silent.id) for silent in command.clients if _is_silent(state, silent)}):
        changes += drop_client(state, kind, id_)
    return CommandDecision(changes)


def drop_client(state: MetadataState, kind: EntityKind, id_: int) -> list[Change]:
    """Return the changes that delete a client, with the group that it is."""
    changes = [Change(_TABLES[kind], id_, None), drop_beat(kind, id_)]
    if kind is EntityKind.CONSUMER and id_ in state.tables[Table.CONSUMER_GROUPS]:
        changes.append(Change(Table.CONSUMER_GROUPS, id_, None))
    return changes


def _is_silent(state: MetadataState, silent: SilentClient) -> bool:
    if silent.kind is EntityKind.BROKER or (silent.kind is EntityKind.CONSUMER and silent.id in state.members):
        return False
    known = state.tables[_TABLES[silent.kind]].get(silent.id)
    seen: HeartbeatRow | None = state.tables[Table.HEARTBEATS].get((silent.kind, silent.id))
    if known is None or seen is None or seen.last_seen_ms != silent.last_seen_ms:
        return False
    return not isinstance(known, ProducerRow) or known.epoch == silent.epoch


def record_heartbeats(state: MetadataState, command: RecordHeartbeats) -> CommandDecision:
    """Record the heartbeats of registered senders; ignore unknown senders and older times."""
    newest: dict[tuple[EntityKind, int], int] = {}
    for item in command.beats:
        if item.id in state.tables[_TABLES[item.kind]]:
            key = (item.kind, item.id)
            newest[key] = max(item.last_seen_ms, newest.get(key, 0))
    changes: list[Change] = []
    for kind, id_ in sorted(newest):
        changes += beat(state, kind, id_, newest[kind, id_])
    return CommandDecision(changes)


def _find_producer(state: MetadataState, command: RegisterProducerCommand) -> ProducerRow | CommandRefusal | None:
    """Return the producer that registers again; None for a new one."""
    producers: Mapping[ProducerId, ProducerRow] = state.tables[Table.PRODUCERS]
    named = state.names[Table.PRODUCERS].get(command.name)
    if command.producer_id is None:
        return None if named is None else _owned(producers[named], command)
    known = producers.get(command.producer_id)
    if known is None:
        return refuse(
            "unknown_producer",
            f"not done: unknown producer {command.producer_id}; register without an id to get a new one",
        )
    if command.name and known.name != command.name:
        return refuse(
            "bad_name", f"not done: producer {command.producer_id} has the name {known.name!r}, not {command.name!r}"
        )
    return _owned(known, command)


def _find_consumer(state: MetadataState, command: RegisterConsumerCommand) -> ConsumerRow | CommandRefusal | None:
    """Return the consumer that registers again or whose request is repeated; None for a new one."""
    consumers: Mapping[ConsumerId, ConsumerRow] = state.tables[Table.CONSUMERS]
    if command.consumer_id is None:
        repeated = state.names[Table.CONSUMERS].get(command.request_id)
        return None if repeated is None else _owned(consumers[repeated], command)
    known = consumers.get(command.consumer_id)
    if known is None:
        return refuse(
            "unknown_consumer",
            f"not done: unknown consumer {command.consumer_id}; register without an id to get a new one",
        )
    return _owned(known, command)


def _owned(known: _Client, command: RegisterProducerCommand | RegisterConsumerCommand) -> _Client | CommandRefusal:
    """Return a client if the principal of a command may use it, else the refusal, which does not name the owner."""
    if known.owner in ("", command.principal) or command.takes_over:
        return known
    kind = known.table.value.removesuffix("s")
    message = f"not done: {kind} {known.key} belongs to another user; choose another name"
    return refuse("not_owner", message)


def _check_room(
    state: MetadataState, table: Table, known: object | None, joined: Sequence[Registration]
) -> CommandRefusal | None:
    if state.counters.feature_level < OWNERS_LEVEL:
        return None
    if known is None and len(state.tables[table]) >= CLIENTS_MAX:
        message = f"not done: the cluster has {CLIENTS_MAX} {table.value}, the maximum; forget some"
        return refuse("too_many_clients", message)
    if len(joined) > REGISTRATIONS_MAX:
        message = f"not done: a client has at most {REGISTRATIONS_MAX} registrations, not {len(joined)}"
        return refuse("too_many_clients", message)
    return None


def _check_quota(
    state: MetadataState, known: ProducerRow | ConsumerRow | None, principal: str
) -> CommandRefusal | None:
    """Return why a principal may not own one client more; None if it may, or if the client has an owner already."""
    return check_registrations(state, principal) if known is None or not known.owner else None


def _resolve(
    state: MetadataState, selections: Sequence[TopicSelection], *, start: StartFrom | None
) -> list[Registration] | CommandRefusal:
    """Return the registrations for topics selected by name, or why they are refused."""
    if not selections:
        return refuse("no_topics", "not done: the registration has no topic; name at least one")
    found: list[Registration] = []
    for selection in selections:
        topic = find_topic(state, selection.topic)
        if isinstance(topic, CommandRefusal):
            return topic
        for partition_id in selection.partitions or (ALL_PARTITIONS,):
            if partition_id >= topic.partitions:
                message = (
                    f"not done: topic {topic.name!r} has {topic.partitions} partitions and no partition {partition_id}"
                )
                return refuse("unknown_partition", message)
            found.append(Registration(topic_id=topic.topic_id, partition_id=partition_id, start=start))
    return found


def _join(known: Sequence[Registration], wanted: Sequence[Registration]) -> tuple[Registration, ...]:
    """Return the union, sorted; a known registration keeps its start."""
    joined = {(item.topic_id, item.partition_id): item for item in (*reversed(wanted), *known)}
    return tuple(joined[key] for key in sorted(joined))
