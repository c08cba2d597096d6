"""Requests and responses: one frozen type each. Pure.

`admin_messages`, `security_messages`, `group_messages` and `queue_messages` have those of their areas.

A data request (`Produce`, `Fetch`, …) is sent to the partition's leader; any other node refuses it with `not_leader`
and names the leader. All other requests can be sent to any node, which forwards those that it cannot handle itself.
`requests` has the fields that all of them share.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.features import LEVEL_MIN
from quiver.model import ConsumerId, GroupId, Index, NodeId, Offset, PartitionId, ProducerId, TopicId
from quiver.wire.admin_messages import AdminRequest
from quiver.wire.group_messages import GroupRequest
from quiver.wire.queue_messages import QueueRequest
from quiver.wire.requests import (
    RESULTS_MAX,
    Count,
    DecodedRoom,
    Done,
    Epoch,
    FeatureLevelNumber,
    LargeBytes,
    Name,
    PartitionNumber,
    ProducerNumber,
    Request,
    Response,
    Session,
    TimeMs,
)
from quiver.wire.security_messages import SecurityRequest

CONSUMERS_MAX = 1_000
"""Most consumers of one `ConsumeMany`."""

# -- the cluster -------------------------------------------------------------------------------------


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node and its addresses."""

    node: NodeId
    wire_address: str
    http_address: str = ""
    roles: tuple[str, ...] = ()
    rack: str = ""
    state: str = ""
    is_draining: bool = False
    last_seen_ms: int | None = None


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition, the nodes of its replicas, and its leader as last reported to the primary."""

    partition_id: PartitionId
    group: GroupId
    replicas: tuple[NodeId, ...]
    learners: tuple[NodeId, ...] = ()
    leader: NodeId | None = None
    epoch: int = 0


class RetentionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When records may be removed: as soon as any of the given limits allows it."""

    ms: Count | None = None
    bytes: Count | None = None
    until_consumed: bool = False


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic and its partitions, in order; its owner, such as `user:alice`, only if it was asked for."""

    topic: str
    topic_id: TopicId
    replicas: int
    partitions: tuple[PartitionInfo, ...]
    retention: RetentionInfo = RetentionInfo()
    created_ms: int = 0
    is_encrypted: bool = False
    """Whether its replicas encrypt their files."""
    owner: str = ""


class MetadataFound(Response, frozen=True):
    """The metadata in the answering node's copy."""

    cluster_id: str
    index: Index
    primary: NodeId | None = None
    nodes: tuple[NodeInfo, ...] = ()
    topics: tuple[TopicInfo, ...] = ()
    purged_groups: tuple[GroupId, ...] = ()
    """Those of the requested groups whose topic has been purged: their files can be deleted."""
    feature_level: FeatureLevelNumber = LEVEL_MIN


class GetMetadata(Request[MetadataFound], frozen=True, tag="get_metadata"):
    """Return nodes and topics; topics by name (unknown ones are left out of the response), or all of them with None."""

    response = MetadataFound
    is_read = True

    topics: Annotated[tuple[Name, ...], Meta(max_length=RESULTS_MAX)] | None = None
    is_linearizable: bool = False
    """Whether the response must be no older than the request: the primary answers it."""
    is_stale_ok: bool = False
    """Whether a node without a primary answers, too, however old its metadata is: to find nodes, and in an outage."""
    groups: Annotated[tuple[GroupId, ...], Meta(max_length=RESULTS_MAX)] = ()
    """Groups of which a broker has files; the response says which of their topics have been purged."""
    with_owners: bool = False
    """Whether the owners of topics that the caller may read are of interest."""


# -- administration ----------------------------------------------------------------------------------


class TopicCreated(Response, frozen=True):
    """A topic, created now or by an earlier attempt of the same request."""

    topic_id: TopicId
    partitions: int
    index: Index
    is_encrypted: bool = False
    """Whoever asked for encryption checks it: a program that does not know the word creates a plain topic."""


class CreateTopicRequest(Request[TopicCreated], frozen=True, tag="create_topic"):
    """Create a topic; a repeated request with the same `request_id` returns the same topic."""

    response = TopicCreated

    topic: Name
    partitions: Count = 3
    replicas: Count | None = None
    """None: three, or one per broker if there are fewer brokers."""
    retention: RetentionInfo = RetentionInfo()
    request_id: Name = ""
    is_encrypted: bool | None = None
    """Whether its replicas encrypt their files; None: as `encryption.encrypt_new_topics` says on the primary."""
    owner: Name = ""
    """Whom a node creates it for, as its owner; empty: for the sender."""

    @property
    def is_idempotent(self) -> bool:
        """See `Request`."""
        return bool(self.request_id)


class ConfigureTopicRequest(Request[Done], frozen=True, tag="configure_topic"):
    """Change the retention of a topic."""

    response = Done
    _idempotent = True

    topic: Name
    retention: RetentionInfo


class AddPartitionsRequest(Request[Done], frozen=True, tag="add_partitions"):
    """Increase the number of a topic's partitions to `partitions`."""

    response = Done

    topic: Name
    partitions: Count


class DeleteTopicRequest(Request[Done], frozen=True, tag="delete_topic"):
    """Delete a topic; it can be restored until it is purged."""

    response = Done
    _repeatable = False

    topic: Name


class RestoreTopicRequest(Request[Done], frozen=True, tag="restore_topic"):
    """Restore the topic of this name that was deleted last."""

    response = Done
    _repeatable = False

    topic: Name


class DrainBroker(Request[Done], frozen=True, tag="drain_broker"):
    """Move all replicas off a broker; with `is_undone`, let it hold replicas again."""

    response = Done
    _idempotent = True

    broker: NodeId
    is_undone: bool = False


class RemoveBroker(Request[Done], frozen=True, tag="remove_broker"):
    """Remove a broker that is drained, or dead and without replicas."""

    response = Done
    _repeatable = False

    broker: NodeId


class RebalanceBrokers(Request[Done], frozen=True, tag="rebalance_brokers"):
    """Move replicas until they are spread evenly over the eligible brokers."""

    response = Done
    _idempotent = True


# -- clients -----------------------------------------------------------------------------------------


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A topic by name and the selected partitions; an empty tuple selects all partitions."""

    topic: Name
    partitions: Annotated[tuple[PartitionNumber, ...], Meta(max_length=RESULTS_MAX)] = ()


class ProducerRegistered(Response, frozen=True):
    """A producer's id and the epoch that its batches must carry from now on."""

    producer_id: ProducerId
    epoch: int
    index: Index


class RegisterProducerRequest(Request[ProducerRegistered], frozen=True, tag="register_producer"):
    """Register a producer for topics; a known name or id keeps its id and gets a new epoch."""

    response = ProducerRegistered

    topics: Annotated[tuple[Selection, ...], Meta(max_length=RESULTS_MAX)]
    name: Name = ""
    producer_id: ProducerNumber | None = None
    creates_topics: bool = True
    """Whether topics that do not exist are created, if the cluster's settings allow it."""

    @property
    def is_idempotent(self) -> bool:
        """See `Request`."""
        # A repeat begins one more epoch; the caller receives only the last one.
        return bool(self.name) or self.producer_id is not None


class ConsumerRegistered(Response, frozen=True):
    """A consumer's id."""

    consumer_id: ConsumerId
    index: Index
    session_index: Index = Index(0)
    """What sessions of the consumer begin with (`SESSION_BITS`): higher than `index` after a recovery; 0: `index`."""


class RegisterConsumerRequest(Request[ConsumerRegistered], frozen=True, tag="register_consumer"):
    """Register a consumer for topics; with an id, add topics to a registered consumer.

    A repeated request with the same `request_id` returns the same consumer.
    """

    response = ConsumerRegistered

    topics: Annotated[tuple[Selection, ...], Meta(max_length=RESULTS_MAX)]
    consumer_id: ConsumerId | None = None
    start: Literal["earliest", "latest"] = "earliest"
    request_id: Name = ""

    @property
    def is_idempotent(self) -> bool:
        """See `Request`."""
        return bool(self.request_id) or self.consumer_id is not None


class ForgetClientRequest(Request[Done], frozen=True, tag="forget_client"):
    """Remove a producer or consumer; retention no longer waits for it."""

    response = Done
    _repeatable = False

    kind: Literal["producer", "consumer"]
    id: Count


# -- data, handled by the partition's leader ---------------------------------------------------------


class Produced(Response, frozen=True):
    """The offset of a batch; `is_duplicate` if an earlier request had already appended it."""

    base_offset: Offset
    is_duplicate: bool = False


class Produce(Request[Produced], frozen=True, tag="produce"):
    """Append the one batch that is the payload, exactly once; answered when it is committed."""

    response = Produced
    waits_for_index = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionNumber


class Fetched(Response, frozen=True):
    """The payload is a sequence of batches; the first may begin before the requested offset."""

    first_offset: Offset
    """Offset of the partition's first record."""
    end_offset: Offset
    """The high watermark."""


class Fetch(Request[Fetched], frozen=True, tag="fetch"):
    """Read committed batches from an offset on; if there is none, wait for one for up to `wait_ms`.

    If there is a batch, at least one is returned, even if it exceeds `bytes_max`.
    """

    response = Fetched
    waits_for_index = True
    is_read = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionNumber
    offset: Offset
    bytes_max: Count = 1024 * 1024
    wait_ms: Count = 0
    reader: tuple[ConsumerId, Session] | None = None
    """A consumer and its session: the fetch is refused (`fenced`) once a later session of it has moved the cursor."""


class ReplicaRead(Response, frozen=True):
    """The bounds of one replica; the payload is a sequence of batches as it stores them."""

    first_offset: Offset
    end_offset: Offset
    """The high watermark that this replica knows."""


class ReadReplica(Request[ReplicaRead], frozen=True, tag="read_replica"):
    """Read the committed batches of the receiving node's own replica, whether or not it leads.

    For comparing replicas. Never forwarded; the response may lag behind the partition's high watermark.
    """

    response = ReplicaRead
    waits_for_index = True
    is_read = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionNumber
    offset: Offset
    bytes_max: Count = 1024 * 1024


class OffsetFound(Response, frozen=True):
    """An offset."""

    offset: Offset


class FindOffset(Request[OffsetFound], frozen=True, tag="find_offset"):
    """Return the first offset, the high watermark, or that of the first record not older than a timestamp (ms)."""

    response = OffsetFound
    waits_for_index = True
    is_read = True

    topic_id: TopicId
    partition_id: PartitionNumber
    at: Literal["earliest", "latest"] | TimeMs


class Consumed(Response, frozen=True):
    """The payload is batches; the consumed records are those from `first_offset` up to, not including, `cursor`."""

    first_offset: Offset
    cursor: Offset
    """The consumer's cursor now: one past the last consumed record; equal to `first_offset` if there was none."""
    end_offset: Offset
    large_bytes: LargeBytes = 0


class Consume(Request[Consumed], frozen=True, tag="consume"):
    """Read records at a consumer's cursor and move it past them in the same replicated step.

    With `offset`, the records from there are returned and the cursor is set past them: safe to repeat.
    """

    response = Consumed
    waits_for_index = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionNumber
    consumer_id: ConsumerId
    offset: Offset | None = None
    records_max: Count = 1
    bytes_max: Count = 1024 * 1024
    wait_ms: Count = 0
    decoded_bytes_max: DecodedRoom = 0

    @property
    def is_repeatable(self) -> bool:
        """See `Request`."""
        return self.offset is not None


class ManyConsumed(Response, frozen=True):
    """The payload has a record or nil for each requested consumer, in order; not their batches, which are large.

    It may end early, but not before the first consumer; nothing was consumed for the others.
    """

    large_bytes: LargeBytes = 0


class ConsumeMany(Request[ManyConsumed], frozen=True, tag="take_each"):
    """Consume a record for each consumer at its cursor, in one replicated step; a consumer listed twice gets two."""

    response = ManyConsumed
    _repeatable = False
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionNumber
    consumer_ids: Annotated[tuple[ConsumerId, ...], Meta(min_length=1, max_length=CONSUMERS_MAX)]
    decoded_bytes_max: DecodedRoom = 0


class MoveCursor(Request[Done], frozen=True, tag="move_cursor"):
    """Set consumers' cursors; with `only_new`, leave existing cursors unchanged.

    A `session` other than 0 becomes the session of the consumers; the move is refused (`fenced`) if a later one exists.
    """

    response = Done
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionNumber
    cursors: Annotated[tuple[tuple[ConsumerId, Offset | Literal["latest"]], ...], Meta(max_length=RESULTS_MAX)]
    only_new: bool = False
    session: Session = 0


class CursorsFound(Response, frozen=True):
    """Cursors in the requested order, and the partition's bounds, no older than the request."""

    cursors: tuple[Offset, ...]
    first_offset: Offset
    end_offset: Offset


class GetCursors(Request[CursorsFound], frozen=True, tag="get_cursors"):
    """Return consumers' cursors; a consumer's lag is `end_offset` minus its cursor."""

    response = CursorsFound
    waits_for_index = True
    is_read = True

    topic_id: TopicId
    partition_id: PartitionNumber
    consumer_ids: Annotated[tuple[ConsumerId, ...], Meta(max_length=RESULTS_MAX)]


class EpochBegun(Response, frozen=True):
    """The sequence that the partition expects next from the producer."""

    next_sequence: int


class BeginEpoch(Request[EpochBegun], frozen=True, tag="begin_epoch"):
    """Fence a producer's earlier epochs in a partition, durably, and return its next sequence there."""

    response = EpochBegun
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionNumber
    producer_id: ProducerNumber
    epoch: Count


# -- between nodes -----------------------------------------------------------------------------------


class CommandSubmitted(Response, frozen=True):
    """A command was applied; the payload is its result."""

    index: Index


class SubmitCommand(Request[CommandSubmitted], frozen=True, tag="submit_command"):
    """Submit a metadata command, which is the payload. For nodes only."""

    response = CommandSubmitted
    is_for_nodes = True

    level_max: FeatureLevelNumber = LEVEL_MIN
    """The highest feature level that the sender's program knows."""
    program: Name = ""
    """The version of the sender's program."""


class LeaderInfo(msgspec.Struct, frozen=True, array_like=True):
    """A partition that the sender leads, and its epoch."""

    topic_id: TopicId
    partition_id: PartitionNumber
    epoch: Epoch


class BeatInfo(msgspec.Struct, frozen=True, array_like=True):
    """A client that the sender has received requests from."""

    kind: Literal["producer", "consumer"]
    id: Count
    last_seen_ms: TimeMs


class HeartbeatReceived(Response, frozen=True):
    """`is_known`: the sender is registered with this identity; `full_nodes`: living nodes with a nearly full disk."""

    is_known: bool
    full_nodes: tuple[NodeId, ...] = ()


class BrokerHeartbeatRequest(Request[HeartbeatReceived], frozen=True, tag="heartbeat"):
    """Report to the primary that a broker is alive, what it leads, its active clients, and whether its disk is full."""

    response = HeartbeatReceived
    _idempotent = True
    is_for_nodes = True

    node: NodeId
    identity: Name
    leads: Annotated[tuple[LeaderInfo, ...], Meta(max_length=RESULTS_MAX)] = ()
    clients: Annotated[tuple[BeatInfo, ...], Meta(max_length=RESULTS_MAX)] = ()
    level_max: FeatureLevelNumber = LEVEL_MIN
    program: Name = ""
    is_full: bool = False
    emptied_ms: TimeMs | None = None
    """When the drain began after which the sender holds nothing; 0: it does; None: its program does not say."""


class MembersFound(Response, frozen=True):
    """A group's members by its last committed configuration."""

    voters: tuple[NodeId, ...]
    learners: tuple[NodeId, ...]


class GetMembers(Request[MembersFound], frozen=True, tag="get_members"):
    """Return a group's members, from the leader that proves to lead; a broker asks before it deletes a replica."""

    response = MembersFound
    is_read = True
    is_for_nodes = True

    group: GroupId


DataRequest = Produce | Fetch | ReadReplica | FindOffset | Consume | ConsumeMany | MoveCursor | GetCursors | BeginEpoch
AnyRequest = (
    AdminRequest
    | SecurityRequest
    | QueueRequest
    | GroupRequest
    | GetMetadata
    | CreateTopicRequest
    | ConfigureTopicRequest
    | AddPartitionsRequest
    | DeleteTopicRequest
    | RestoreTopicRequest
    | DrainBroker
    | RemoveBroker
    | RebalanceBrokers
    | RegisterProducerRequest
    | RegisterConsumerRequest
    | ForgetClientRequest
    | DataRequest
    | SubmitCommand
    | BrokerHeartbeatRequest
    | GetMembers
)
