"""Convert a view of the metadata to the wire's replies. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from quiver.metadata import (
    BrokerRow,
    BrokerState,
    ConsumerRow,
    EntityKind,
    PartitionRow,
    ProducerRow,
    Retention,
    TopicRow,
    View,
)
from quiver.metadata.rows import FIRST_PARTITION_GROUP
from quiver.model import GroupId, NodeId, Offset
from quiver.wire.admin_messages import (
    ClientInfo,
    HoldInfo,
    HoldsFound,
    ListClients,
    ManagerInfo,
    ManagersFound,
    MoveInfo,
    MovesFound,
)
from quiver.wire.messages import GetMetadata, MetadataFound, NodeInfo, PartitionInfo, RetentionInfo, TopicInfo

CLIENTS_PER_STEP = 500
"""Clients in one part of `describe_clients`: one or two milliseconds."""


def describe_metadata(view: View, asked: GetMetadata, *, primary: NodeId | None) -> MetadataFound:
    """Return all nodes, and the requested topics that exist, or all topics."""
    if asked.topics is None:
        found = view.active_topics()
    else:
        known = (view.topic(name) for name in dict.fromkeys(asked.topics))
        found = [topic for topic in known if topic is not None]
    return MetadataFound(
        cluster_id=view.cluster_id,
        index=view.index,
        primary=primary,
        nodes=tuple(
            _node(view, broker) for _, broker in sorted(view.brokers.items()) if broker.state is not BrokerState.REMOVED
        ),
        topics=tuple(_topic(view, topic, with_owner=asked.with_owners) for topic in found),
        purged_groups=tuple(_purged_groups(view, asked.groups)) if asked.groups else (),
        feature_level=view.feature_level,
    )


def _purged_groups(view: View, groups: Iterable[GroupId]) -> Iterator[GroupId]:
    """Yield the groups whose partition was purged; groups of deleted, not yet purged topics are not among them."""
    used = {partition.group_id for partition in view.partitions.values()}
    for group in groups:
        if FIRST_PARTITION_GROUP <= group < view.counters.next_group_id and group not in used:
            yield group


def describe_clients(view: View, asked: ListClients, *, now_ms: int, alive_ms: int) -> Iterator[list[ClientInfo]]:
    """Yield the requested producers and consumers, producers first, by id; in parts, each made in a small step.

    A client is alive if its last heartbeat is at most `alive_ms` before `now_ms`, by the wall clock.
    """
    left = _clients(view, asked.kind)
    while step := list(islice(left, CLIENTS_PER_STEP)):
        found = (_client(view, kind, client, now_ms=now_ms, alive_ms=alive_ms) for kind, client in step)
        yield [info for info in found if asked.topic is None or asked.topic in info.topics]


def describe_moves(view: View) -> MovesFound:
    """Return the moves under way, by id."""
    return MovesFound(
        moves=tuple(
            MoveInfo(
                move_id=move.move_id,
                topic=view.topics[move.topic_id].name,
                partition_id=move.partition_id,
                target=move.target,
                source=move.source,
                state=move.state.value,
                begun_ms=move.begun_ms,
            )
            for _, move in sorted(view.moves.items())
        )
    )


def describe_managers(
    view: View, voters: Collection[NodeId], *, primary: NodeId | None, is_changing: bool
) -> ManagersFound:
    """Return the managers, which vote, and the standbys, which have the role only, by id."""
    brokers = {id_: one for id_, one in view.brokers.items() if one.state is not BrokerState.REMOVED}
    standbys = {id_ for id_, one in brokers.items() if "manager" in one.roles}
    return ManagersFound(
        primary=primary,
        is_changing=is_changing,
        managers=tuple(
            _manager(node, brokers.get(node), is_voter=node in voters) for node in sorted({*voters, *standbys})
        ),
    )


def _manager(node: NodeId, broker: BrokerRow | None, *, is_voter: bool) -> ManagerInfo:
    if broker is None:
        return ManagerInfo(node=node, is_voter=is_voter)
    return ManagerInfo(
        node=node,
        is_voter=is_voter,
        state=broker.state.value,
        wire_address=broker.wire_address,
        http_address=broker.http_address,
    )


def describe_holds(view: View) -> HoldsFound:
    """Return the holds, by topic and name."""
    return HoldsFound(
        holds=tuple(
            HoldInfo(
                name=hold.name,
                topic=view.topics[hold.topic_id].name,
                topic_id=hold.topic_id,
                offsets=tuple((item.partition_id, Offset(item.first_offset)) for item in hold.positions),
                owner=hold.owner,
                placed_ms=hold.placed_ms,
                expires_ms=hold.expires_ms,
            )
            for _, hold in sorted(view.holds.items())
        )
    )


def read_retention(info: RetentionInfo) -> Retention:
    """Return the metadata's retention for the wire's."""
    return Retention(ms=info.ms, bytes=info.bytes, until_consumed=info.until_consumed)


def _node(view: View, broker: BrokerRow) -> NodeInfo:
    return NodeInfo(
        node=broker.broker_id,
        wire_address=broker.wire_address,
        http_address=broker.http_address,
        roles=broker.roles,
        rack=broker.rack,
        state=broker.state.value,
        is_draining=broker.is_draining,
        last_seen_ms=view.last_seen_ms(EntityKind.BROKER, broker.broker_id),
    )


def _topic(view: View, topic: TopicRow, *, with_owner: bool) -> TopicInfo:
    retention = topic.retention
    return TopicInfo(
        topic=topic.name,
        topic_id=topic.topic_id,
        replicas=topic.replicas,
        partitions=tuple(map(_partition, view.partitions_of(topic.topic_id))),
        retention=RetentionInfo(ms=retention.ms, bytes=retention.bytes, until_consumed=retention.until_consumed),
        created_ms=topic.created_ms,
        is_encrypted=topic.is_encrypted,
        owner=topic.owner if with_owner else "",
    )


def _partition(partition: PartitionRow) -> PartitionInfo:
    return PartitionInfo(
        partition_id=partition.partition_id,
        group=partition.group_id,
        replicas=partition.replicas,
        learners=partition.learners,
        leader=partition.leader,
        epoch=partition.epoch,
    )


def _clients(view: View, asked_kind: str) -> Iterator[tuple[EntityKind, ProducerRow | ConsumerRow]]:
    """Yield the clients of a kind, or all; the tables of a view are in the order of the ids."""
    if asked_kind in ("", EntityKind.PRODUCER.value):
        yield from ((EntityKind.PRODUCER, producer) for producer in view.producers.values())
    if asked_kind in ("", EntityKind.CONSUMER.value):
        yield from ((EntityKind.CONSUMER, consumer) for consumer in view.consumers.values())


def _client(
    view: View, kind: EntityKind, client: ProducerRow | ConsumerRow, *, now_ms: int, alive_ms: int
) -> ClientInfo:
    last_seen_ms = view.last_seen_ms(kind, client.key)
    topics = {view.topics[item.topic_id].name for item in client.registrations}
    name, epoch = (client.name, client.epoch) if isinstance(client, ProducerRow) else (client.request_id, 0)
    return ClientInfo(
        kind="producer" if kind is EntityKind.PRODUCER else "consumer",
        id=client.key,
        name=name,
        epoch=epoch,
        registered_ms=client.registered_ms,
        last_seen_ms=last_seen_ms,
        is_alive=last_seen_ms is not None and now_ms - last_seen_ms <= alive_ms,
        topics=tuple(sorted(topics)),
        owner=client.owner,
    )
