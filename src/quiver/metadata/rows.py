"""What the metadata consists of: one frozen value per broker, topic, partition, client, heartbeat, move and hold.

Pure. Rows are replaced, never changed. Every row has a `key` that is unique in its table, and nothing in it but
numbers, texts, claims and tuples of them, so that it looks the same in memory, in a snapshot and in SQL.

Times are the proposers' wall times in milliseconds: they are for people and for delays of minutes, never for order.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal, NewType

import msgspec
from msgspec import Meta

from quiver.model import ConsumerId, GroupId, NodeId, PartitionId, ProducerId, TopicId

MoveId = NewType("MoveId", int)
"""A replica's way from one broker to another."""

METADATA_GROUP = GroupId(1)
"""The managers' own Raft group."""
FIRST_PARTITION_GROUP = GroupId(2)
"""The Raft group of the first partition ever made; the next one gets the next number."""

NUMBER_MAX = 2**53
"""Greatest number in the metadata: what SQL's integers and JSON's numbers both carry exactly."""
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
"""A number that comes from outside."""
Text = Annotated[str, Meta(max_length=300, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""A text that comes from outside: short, and without what PostgreSQL cannot store or a terminal would act on."""

ALL_PARTITIONS = PartitionId(-1)
"""Stands in a registration for every partition of the topic, those to come included."""

NodeRole = Literal["manager", "broker", "gateway"]
"""What a node does for the cluster."""
ALL_ROLES: tuple[NodeRole, ...] = ("manager", "broker", "gateway")
"""What a node does unless it says something else, in the order in which roles are kept."""


class Table(StrEnum):
    """The tables that the state consists of."""

    BROKERS = "brokers"
    TOPICS = "topics"
    PARTITIONS = "partitions"
    PRODUCERS = "producers"
    CONSUMERS = "consumers"
    HEARTBEATS = "heartbeats"
    MOVES = "moves"
    HOLDS = "holds"


class BrokerState(StrEnum):
    """How a broker is, as far as its heartbeats and its operators say."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    DRAINED = "drained"
    REMOVED = "removed"


class TopicState(StrEnum):
    """Whether a topic is in use, or deleted and still to be had back."""

    ACTIVE = "active"
    DELETED = "deleted"


class EntityKind(StrEnum):
    """Whose heartbeat or registration it is."""

    BROKER = "broker"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class StartFrom(StrEnum):
    """Where a consumer begins in a partition that it has no cursor in."""

    EARLIEST = "earliest"
    LATEST = "latest"


class MoveState(StrEnum):
    """How far a move has come: the target learns, or has taken the source's place."""

    BEGUN = "begun"
    PROMOTED = "promoted"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all rows share."""

    table: ClassVar[Table]


class BrokerRow(Row, frozen=True):
    """A node, whatever its roles; only one with the role of a broker may be given replicas."""

    table: ClassVar[Table] = Table.BROKERS

    broker_id: NodeId
    identity: str
    """What tells this broker from another one that was given its id by mistake."""
    wire_address: str
    http_address: str
    rack: str
    state: BrokerState
    is_draining: bool
    """Whether operators want it empty; outlives that it is suspect or dead."""
    registered_ms: int
    changed_ms: int
    roles: tuple[NodeRole, ...] = ALL_ROLES
    """A row from before there were roles means all of them."""

    @property
    def key(self) -> NodeId:
        """Return what the row is found by."""
        return self.broker_id

    @property
    def is_eligible(self) -> bool:
        """Tell whether the broker may be given replicas."""
        return self.state in (BrokerState.ALIVE, BrokerState.SUSPECT) and not self.is_unwanted

    @property
    def is_unwanted(self) -> bool:
        """Tell whether the replicas that the broker has are to go elsewhere, as its operators want it."""
        return self.is_draining or "broker" not in self.roles


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When records of a topic may go: as soon as any of the bounds that are given allows it."""

    ms: Number | None = None
    bytes: Number | None = None
    until_consumed: bool = False


class TopicRow(Row, frozen=True):
    """A topic; a deleted one keeps its partitions until it is purged."""

    table: ClassVar[Table] = Table.TOPICS

    topic_id: TopicId
    name: str
    partitions: int
    replicas: int
    """How many replicas each partition is meant to have."""
    retention: Retention
    state: TopicState
    created_ms: int
    purge_ms: int | None
    """When a deleted topic's data may go for good."""
    request_id: str
    """What its creator called the request; a repeated request finds the topic by it."""

    @property
    def key(self) -> TopicId:
        """Return what the row is found by."""
        return self.topic_id


class PartitionRow(Row, frozen=True):
    """One partition: where its replicas are meant to be, and who was last said to lead."""

    table: ClassVar[Table] = Table.PARTITIONS

    topic_id: TopicId
    partition_id: PartitionId
    group_id: GroupId
    replicas: tuple[NodeId, ...]
    """The voters, the preferred leader first."""
    learners: tuple[NodeId, ...]
    """Those on their way to become voters."""
    leader: NodeId | None
    epoch: int
    """The epoch of the newest leader report; 0 before the first."""

    @property
    def key(self) -> tuple[TopicId, PartitionId]:
        """Return what the row is found by."""
        return (self.topic_id, self.partition_id)

    def is_on(self, broker_id: NodeId) -> bool:
        """Tell whether a broker holds, or is about to hold, a replica."""
        return broker_id in self.replicas or broker_id in self.learners


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client may use: one partition of a topic, or all of them."""

    topic_id: TopicId
    partition_id: PartitionId = ALL_PARTITIONS
    start: StartFrom | None = None
    """Where a consumer begins; None for producers."""

    def covers(self, topic_id: TopicId, partition_id: PartitionId) -> bool:
        """Tell whether a partition is one of those meant."""
        return self.topic_id == topic_id and self.partition_id in (ALL_PARTITIONS, partition_id)


class ProducerRow(Row, frozen=True):
    """A registered producer."""

    table: ClassVar[Table] = Table.PRODUCERS

    producer_id: ProducerId
    name: str
    """Empty, or unique among producers."""
    epoch: int
    """How often it has registered again; sends of an earlier epoch are fenced off."""
    registered_ms: int
    registrations: tuple[Registration, ...]

    @property
    def key(self) -> ProducerId:
        """Return what the row is found by."""
        return self.producer_id


class ConsumerRow(Row, frozen=True):
    """A registered consumer; its cursors live in the partitions' own logs."""

    table: ClassVar[Table] = Table.CONSUMERS

    consumer_id: ConsumerId
    registered_ms: int
    registrations: tuple[Registration, ...]
    request_id: str
    """What its creator called the request; a repeated request finds the consumer by it."""

    @property
    def key(self) -> ConsumerId:
        """Return what the row is found by."""
        return self.consumer_id


class HeartbeatRow(Row, frozen=True):
    """When a broker, producer or consumer was last heard of."""

    table: ClassVar[Table] = Table.HEARTBEATS

    kind: EntityKind
    id: int
    last_seen_ms: int

    @property
    def key(self) -> tuple[EntityKind, int]:
        """Return what the row is found by."""
        return (self.kind, self.id)


class MoveRow(Row, frozen=True):
    """A replica on its way; the row goes when the move is finished or aborted."""

    table: ClassVar[Table] = Table.MOVES

    move_id: MoveId
    topic_id: TopicId
    partition_id: PartitionId
    source: NodeId | None
    """Whom the target replaces; None if the partition gets one replica more."""
    target: NodeId
    state: MoveState
    begun_ms: int
    changed_ms: int

    @property
    def key(self) -> MoveId:
        """Return what the row is found by."""
        return self.move_id


class HoldPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From where on a partition's records are kept."""

    partition_id: Annotated[PartitionId, Meta(ge=0, le=NUMBER_MAX)]
    first_offset: Number


class HoldRow(Row, frozen=True):
    """Records of a topic that retention leaves alone for somebody who has not read them yet.

    Whoever placed it moves it on and makes it last longer; if he does not, the primary lets it go once it is over.
    """

    table: ClassVar[Table] = Table.HOLDS

    topic_id: TopicId
    name: str
    """What its owner calls it; the same name may hold several topics, each by a hold of its own."""
    owner: str
    """Who it is for, in words for people."""
    placed_ms: int
    expires_ms: int
    """When it is over; renewing moves it."""
    positions: tuple[HoldPosition, ...]
    """One for each partition that is held, in order."""

    @property
    def key(self) -> tuple[TopicId, str]:
        """Return what the row is found by."""
        return (self.topic_id, self.name)


AnyRow = BrokerRow | TopicRow | PartitionRow | ProducerRow | ConsumerRow | HeartbeatRow | MoveRow | HoldRow

ROW_TYPES: tuple[type[AnyRow], ...] = (
    BrokerRow,
    TopicRow,
    PartitionRow,
    ProducerRow,
    ConsumerRow,
    HeartbeatRow,
    MoveRow,
    HoldRow,
)
"""Every kind of row, in the order in which tables are written."""
