"""The rows of the metadata: one frozen value per broker, topic, partition, client, heartbeat, move, hold, user, grant,
quota, consumer group and member of one.

Pure. Rows are replaced, never modified. Every row has a `key` that is unique in its table and contains only numbers,
strings, booleans and tuples of them, so that it is the same in memory, in a snapshot and in SQL.

Times are the proposers' wall clocks in milliseconds: for people and for delays of minutes, never for ordering.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, NewType

import msgspec
from msgspec import Meta

from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, GroupId, NodeId, PartitionId, ProducerId, TopicId
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import Grant, ResourceKind, Verb
from quiver.security.scram import ScramVerifier

MoveId = NewType("MoveId", int)
"""The id of a replica's move from one broker to another."""

METADATA_GROUP = GroupId(1)
"""The Raft group of the metadata."""
FIRST_PARTITION_GROUP = GroupId(2)
"""The Raft group of the first partition; every later partition gets the next number."""

NUMBER_MAX = 2**53
"""Greatest number in the metadata: exact in both SQL integers and JSON numbers."""
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
"""A number from an untrusted source."""
Text = Annotated[str, Meta(max_length=300, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""A string from an untrusted source: short, and without control characters, which PostgreSQL or a terminal rejects."""

ALL_PARTITIONS = PartitionId(-1)
"""In a registration: every partition of the topic, future ones included."""

NodeRole = Literal["manager", "broker", "gateway"]
"""The role of a node."""
ALL_ROLES: tuple[NodeRole, ...] = ("manager", "broker", "gateway")
"""The default roles of a node, in the order in which roles are stored."""


_GENERATED_NAME = re.compile(r"http-[0-9a-f]{16}")
"""The request ids that gateways make up for consumers that register over HTTP."""


class Table(StrEnum):
    """The tables of the state."""

    BROKERS = "brokers"
    TOPICS = "topics"
    PARTITIONS = "partitions"
    PRODUCERS = "producers"
    CONSUMERS = "consumers"
    HEARTBEATS = "heartbeats"
    MOVES = "moves"
    HOLDS = "holds"
    USERS = "users"
    TOKENS = "tokens"
    ROLES = "roles"
    MEMBERSHIPS = "memberships"
    GRANTS = "grants"
    QUOTAS = "quotas"
    CONSUMER_GROUPS = "consumer_groups"
    GROUP_MEMBERS = "group_members"


class OwnedKind(StrEnum):
    """What can belong to a user; a group belongs to the owner of its consumer."""

    TOPIC = "topic"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class BrokerState(StrEnum):
    """The state of a broker, set by its heartbeats and by operators."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"
    DRAINED = "drained"
    REMOVED = "removed"


class TopicState(StrEnum):
    """Whether a topic is active, or deleted and can still be restored."""

    ACTIVE = "active"
    DELETED = "deleted"


class EntityKind(StrEnum):
    """The kind of sender of a heartbeat, or of a registered client."""

    BROKER = "broker"
    PRODUCER = "producer"
    CONSUMER = "consumer"


class StartFrom(StrEnum):
    """Where a consumer starts in a partition without a cursor."""

    EARLIEST = "earliest"
    LATEST = "latest"


class MoveState(StrEnum):
    """The progress of a move: the target is a learner, or a voter in place of the source."""

    BEGUN = "begun"
    PROMOTED = "promoted"


class GroupKind(StrEnum):
    """How a group reads its topics: its members share the partitions, or its workers the records."""

    STREAM = "stream"
    QUEUE = "queue"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The base of all rows."""

    table: ClassVar[Table]


class BrokerRow(Row, frozen=True):
    """A node, whatever its roles; only nodes with the broker role may get replicas."""

    table: ClassVar[Table] = Table.BROKERS

    broker_id: NodeId
    identity: str
    """Distinguishes this broker from another one that was configured with the same id by mistake."""
    wire_address: str
    http_address: str
    rack: str
    state: BrokerState
    is_draining: bool
    """Whether a drain is requested; survives the states suspect and dead."""
    registered_ms: int
    changed_ms: int
    roles: tuple[NodeRole, ...] = ALL_ROLES
    """Rows that were written before roles existed have all of them."""

    @property
    def key(self) -> NodeId:
        """Return the key of the row."""
        return self.broker_id

    @property
    def is_eligible(self) -> bool:
        """Return whether the broker may get replicas."""
        return self.state in (BrokerState.ALIVE, BrokerState.SUSPECT) and not self.is_unwanted

    @property
    def is_unwanted(self) -> bool:
        """Return whether the broker's replicas must move away: it is draining or has no broker role."""
        return self.is_draining or "broker" not in self.roles


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A topic's retention: records may be deleted as soon as any of the given limits allows it."""

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
    """The desired number of replicas of each partition."""
    retention: Retention
    state: TopicState
    created_ms: int
    purge_ms: int | None
    """When a deleted topic may be purged permanently."""
    request_id: str
    """The creator's id of the request; a repeated request finds the topic by it."""
    owner: str = ""
    """The principal that created it; empty if it was anonymous, or the cluster itself."""
    is_encrypted: bool = False
    """Whether its replicas encrypt their files; never changes."""

    @property
    def key(self) -> TopicId:
        """Return the key of the row."""
        return self.topic_id


class PartitionRow(Row, frozen=True):
    """One partition: its desired replicas and the last reported leader."""

    table: ClassVar[Table] = Table.PARTITIONS

    topic_id: TopicId
    partition_id: PartitionId
    group_id: GroupId
    replicas: tuple[NodeId, ...]
    """The voters, the preferred leader first."""
    learners: tuple[NodeId, ...]
    """Replicas that are catching up to become voters."""
    leader: NodeId | None
    epoch: int
    """The epoch of the newest leader report; 0 before the first."""

    @property
    def key(self) -> tuple[TopicId, PartitionId]:
        """Return the key of the row."""
        return (self.topic_id, self.partition_id)

    def is_on(self, broker_id: NodeId) -> bool:
        """Return whether a broker is a voter or learner of the partition."""
        return broker_id in self.replicas or broker_id in self.learners


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A client's access to one partition of a topic, or to all of them."""

    topic_id: TopicId
    partition_id: PartitionId = ALL_PARTITIONS
    start: StartFrom | None = None
    """Where a consumer starts; None for producers."""

    def covers(self, topic_id: TopicId, partition_id: PartitionId) -> bool:
        """Return whether the registration includes a partition."""
        return self.topic_id == topic_id and self.partition_id in (ALL_PARTITIONS, partition_id)


class ProducerRow(Row, frozen=True):
    """A registered producer."""

    table: ClassVar[Table] = Table.PRODUCERS

    producer_id: ProducerId
    name: str
    """Empty, or unique among producers."""
    epoch: int
    """Incremented each time it registers again; sends of an earlier epoch are fenced."""
    registered_ms: int
    registrations: tuple[Registration, ...]
    owner: str = ""
    """The principal that registered it; empty if it was anonymous."""

    @property
    def key(self) -> ProducerId:
        """Return the key of the row."""
        return self.producer_id

    @property
    def is_named(self) -> bool:
        """Return whether someone chose a name for it, under which it may come back."""
        return bool(self.name)


class ConsumerRow(Row, frozen=True):
    """A registered consumer; its cursors live in the partitions' own logs."""

    table: ClassVar[Table] = Table.CONSUMERS

    consumer_id: ConsumerId
    registered_ms: int
    registrations: tuple[Registration, ...]
    request_id: str
    """The creator's id of the request; a repeated request finds the consumer by it."""
    owner: str = ""
    """The principal that registered it; empty if it was anonymous."""

    @property
    def key(self) -> ConsumerId:
        """Return the key of the row."""
        return self.consumer_id

    @property
    def is_named(self) -> bool:
        """Return whether someone chose a name for it, under which it may come back."""
        return bool(self.request_id) and _GENERATED_NAME.fullmatch(self.request_id) is None


class HeartbeatRow(Row, frozen=True):
    """The time of the last heartbeat of a broker, producer or consumer."""

    table: ClassVar[Table] = Table.HEARTBEATS

    kind: EntityKind
    id: int
    last_seen_ms: int

    @property
    def key(self) -> tuple[EntityKind, int]:
        """Return the key of the row."""
        return (self.kind, self.id)


class MoveRow(Row, frozen=True):
    """The move of a replica; the row is deleted when the move is finished or aborted."""

    table: ClassVar[Table] = Table.MOVES

    move_id: MoveId
    topic_id: TopicId
    partition_id: PartitionId
    source: NodeId | None
    """The broker that the target replaces; None if the partition gets an additional replica."""
    target: NodeId
    state: MoveState
    begun_ms: int
    changed_ms: int

    @property
    def key(self) -> MoveId:
        """Return the key of the row."""
        return self.move_id


class HoldPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first held offset of a partition."""

    partition_id: Annotated[PartitionId, Meta(ge=0, le=NUMBER_MAX)]
    first_offset: Number


class HoldRow(Row, frozen=True):
    """Records of a topic that retention must keep for a reader that has no cursor, such as a Spark query.

    The owner advances and renews the hold; otherwise the primary deletes it after it has expired.
    """

    table: ClassVar[Table] = Table.HOLDS

    topic_id: TopicId
    name: str
    """Chosen by the owner; holds on several topics may share a name."""
    owner: str
    """A description of the owner, for people."""
    placed_ms: int
    expires_ms: int
    """When the hold expires; renewing postpones it."""
    positions: tuple[HoldPosition, ...]
    """One position per held partition, sorted."""
    principal: str = ""
    """The principal that placed it, who alone may renew and release it; empty if it was anonymous."""

    @property
    def key(self) -> tuple[TopicId, str]:
        """Return the key of the row."""
        return (self.topic_id, self.name)


class UserRow(Row, frozen=True):
    """A user. The verifier of its password is four columns in SQL, all empty without a password."""

    table: ClassVar[Table] = Table.USERS

    name: str
    is_enabled: bool
    created_ms: int
    verifier: ScramVerifier | None = None

    @property
    def key(self) -> str:
        """Return the key of the row."""
        return self.name


class TokenRow(Row, frozen=True):
    """A token of a user; its secret is known only to its owner."""

    table: ClassVar[Table] = Table.TOKENS

    token_id: str
    user: str
    secret_hash: str
    created_ms: int
    expires_ms: int | None = None
    """None: it does not expire."""

    @property
    def key(self) -> str:
        """Return the key of the row."""
        return self.token_id


class RoleRow(Row, frozen=True):
    """A role: a subject of grants that users have by membership."""

    table: ClassVar[Table] = Table.ROLES

    name: str
    created_ms: int

    @property
    def key(self) -> str:
        """Return the key of the row."""
        return self.name


class MembershipRow(Row, frozen=True):
    """A user's membership in a role."""

    table: ClassVar[Table] = Table.MEMBERSHIPS

    role: str
    user: str
    added_ms: int

    @property
    def key(self) -> tuple[str, str]:
        """Return the key of the row."""
        return (self.role, self.user)


class GrantRow(Row, frozen=True):
    """A grant: see `quiver.security.permissions`."""

    table: ClassVar[Table] = Table.GRANTS

    subject: str
    verb: Verb
    kind: ResourceKind
    name: str
    is_prefix: bool
    granted_ms: int

    @property
    def key(self) -> tuple[str, str, str, str, bool]:
        """Return the key of the row."""
        return (self.subject, self.verb.value, self.kind.value, self.name, self.is_prefix)

    @property
    def grant(self) -> Grant:
        """Return it as a value."""
        return Grant(subject=self.subject, verb=self.verb, kind=self.kind, name=self.name, is_prefix=self.is_prefix)


class QuotaRow(Row, frozen=True):
    """The limits of a subject: see `quiver.security.limits`."""

    table: ClassVar[Table] = Table.QUOTAS

    subject: str
    limits: QuotaLimits
    changed_ms: int

    @property
    def key(self) -> str:
        """Return the key of the row."""
        return self.subject


class GroupRow(Row, frozen=True):
    """A consumer group; its name, owner, topics and cursors are those of the consumer with its id."""

    table: ClassVar[Table] = Table.CONSUMER_GROUPS

    group_id: ConsumerId
    kind: GroupKind
    created_ms: int
    settings: QueueSettings = QueueSettings()
    """Of a queue."""
    version: int = 0
    """Changes when members lose or get partitions, other than by releasing them; an assignment that was computed at
    another version is refused."""
    rebalances: int = 0
    last_rebalance_ms: int = 0
    reason: str = ""
    """What led to the last rebalance, or will lead to the next."""
    pause_ms: int = 0
    """Time for which the coordinator gives no partitions to members, from when it learns of it."""

    @property
    def key(self) -> ConsumerId:
        """Return the key of the row."""
        return self.group_id


class OwnedPartition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A partition that a member of a group owns."""

    topic_id: TopicId
    partition_id: PartitionId
    epoch: int
    """The session with which the member uses the partition."""
    is_revoking: bool = False
    """Whether the member was asked to release it."""

    @property
    def key(self) -> tuple[TopicId, PartitionId]:
        """Return the key of the partition."""
        return (self.topic_id, self.partition_id)


class GroupMemberRow(Row, frozen=True):
    """A member of a group and its partitions."""

    table: ClassVar[Table] = Table.GROUP_MEMBERS

    group_id: ConsumerId
    member_id: str
    joined_ms: int
    session_timeout_ms: int
    instance: str = ""
    rack: str = ""
    topics: tuple[str, ...] = ()
    """Names, since a topic that is deleted and created again has another id."""
    pattern: str = ""
    start: StartFrom = StartFrom.EARLIEST
    client: str = ""
    """Describes the process, for people."""
    principal: str = ""
    replaces: str = ""
    """The member with the same instance name that it took over from."""
    version: int = 0
    """The index of the last command that changed its partitions."""
    owned: tuple[OwnedPartition, ...] = ()
    """Sorted by partition."""

    @property
    def key(self) -> tuple[ConsumerId, str]:
        """Return the key of the row."""
        return (self.group_id, self.member_id)


AnyRow = (
    BrokerRow
    | TopicRow
    | PartitionRow
    | ProducerRow
    | ConsumerRow
    | HeartbeatRow
    | MoveRow
    | HoldRow
    | UserRow
    | TokenRow
    | RoleRow
    | MembershipRow
    | GrantRow
    | QuotaRow
    | GroupRow
    | GroupMemberRow
)

ROW_TYPES: tuple[type[AnyRow], ...] = (
    BrokerRow,
    TopicRow,
    PartitionRow,
    ProducerRow,
    ConsumerRow,
    HeartbeatRow,
    MoveRow,
    HoldRow,
    UserRow,
    TokenRow,
    RoleRow,
    MembershipRow,
    GrantRow,
    QuotaRow,
    GroupRow,
    GroupMemberRow,
)
"""Every row type, in the order in which tables are written."""
