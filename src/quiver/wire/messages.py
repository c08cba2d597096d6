"""What can be asked of a node, and what it answers: one frozen value per request and response. Pure.

Data requests (`Produce`, `Fetch`, …) go to the partition's leader; any other node refuses them with `not_leader` and
a hint. Everything else may be asked of any node, which hands on what it cannot do itself. `known_index` says up to
which index of the metadata the client has seen: the node answers no earlier than it knows as much, so that a client
that has just registered is not refused by a node that has not heard of it yet.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.model import ConsumerId, GroupId, Index, NodeId, Offset, PartitionId, ProducerId, TopicId
from quiver.wire.admin_messages import DescribeNode, ListHolds, PlaceHoldRequest, ReleaseHoldRequest
from quiver.wire.consume_many import ConsumeMany
from quiver.wire.requests import RESULTS_MAX, Count, Done, Name, Request, Response

# -- the cluster -------------------------------------------------------------------------------------


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node and where it is found."""

    node: NodeId
    wire_address: str
    http_address: str = ""
    roles: tuple[str, ...] = ()
    rack: str = ""
    state: str = ""
    is_draining: bool = False
    last_seen_ms: int | None = None


class PartitionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition, where its replicas are, and who was last said to lead it."""

    partition_id: PartitionId
    group: GroupId
    replicas: tuple[NodeId, ...]
    learners: tuple[NodeId, ...] = ()
    leader: NodeId | None = None
    epoch: int = 0


class RetentionInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When records may go: as soon as any of the bounds that are given allows it."""

    ms: Count | None = None
    bytes: Count | None = None
    until_consumed: bool = False


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic and its partitions, in order."""

    topic: str
    topic_id: TopicId
    replicas: int
    partitions: tuple[PartitionInfo, ...]
    retention: RetentionInfo = RetentionInfo()
    created_ms: int = 0


class MetadataFound(Response, frozen=True):
    """The metadata as the asked node knows it."""

    cluster_id: str
    index: Index
    primary: NodeId | None = None
    nodes: tuple[NodeInfo, ...] = ()
    topics: tuple[TopicInfo, ...] = ()
    purged_groups: tuple[GroupId, ...] = ()
    """Of the groups that were asked about those whose topic has been purged: nobody needs their files any more."""


class GetMetadata(Request[MetadataFound], frozen=True, tag="get_metadata"):
    """Ask where things are; topics by name (unknown ones are left out of the answer), or all of them with None."""

    response = MetadataFound
    is_read = True

    topics: tuple[Name, ...] | None = None
    is_linearizable: bool = False
    """Whether the answer must be no older than the request: the primary is asked."""
    groups: Annotated[tuple[GroupId, ...], Meta(max_length=RESULTS_MAX)] = ()
    """Groups of which a broker has files and wants to know whether their topic has been purged."""


class ClientInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A registered producer or consumer; a consumer's name is the `request_id` that it first registered with."""

    kind: Literal["producer", "consumer"]
    id: int
    name: str = ""
    epoch: int = 0
    registered_ms: int = 0
    last_seen_ms: int | None = None
    is_alive: bool = False
    topics: tuple[str, ...] = ()


class ClientsFound(Response, frozen=True):
    """The registered clients."""

    clients: tuple[ClientInfo, ...] = ()


class ListClients(Request[ClientsFound], frozen=True, tag="list_clients"):
    """Ask for producers, consumers, or both."""

    response = ClientsFound
    waits_for_index = True
    is_read = True

    kind: Literal["producer", "consumer", ""] = ""
    topic: Name | None = None


class MoveInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica on its way to another broker."""

    move_id: int
    topic: str
    partition_id: PartitionId
    target: NodeId
    source: NodeId | None = None
    state: str = ""
    begun_ms: int = 0


class MovesFound(Response, frozen=True):
    """The moves under way."""

    moves: tuple[MoveInfo, ...] = ()


class ListMoves(Request[MovesFound], frozen=True, tag="list_moves"):
    """Ask which replicas are on their way."""

    response = MovesFound
    is_read = True


# -- administration ----------------------------------------------------------------------------------


class TopicCreated(Response, frozen=True):
    """A topic, made now or by an earlier try of the same request."""

    topic_id: TopicId
    partitions: int
    index: Index


class CreateTopicRequest(Request[TopicCreated], frozen=True, tag="create_topic"):
    """Create a topic; a repeated request with the same `request_id` finds what it made."""

    response = TopicCreated

    topic: Name
    partitions: Count = 3
    replicas: Count | None = None
    """None: three, or as many as there are brokers if those are fewer."""
    retention: RetentionInfo = RetentionInfo()
    request_id: Name = ""

    @property
    def is_idempotent(self) -> bool:
        """See `Request`."""
        return bool(self.request_id)


class ConfigureTopicRequest(Request[Done], frozen=True, tag="configure_topic"):
    """Change when records of a topic may go."""

    response = Done
    _idempotent = True

    topic: Name
    retention: RetentionInfo


class AddPartitionsRequest(Request[Done], frozen=True, tag="add_partitions"):
    """Bring a topic to so many partitions."""

    response = Done

    topic: Name
    partitions: Count


class DeleteTopicRequest(Request[Done], frozen=True, tag="delete_topic"):
    """Take a topic out of use; it can be restored for a while."""

    response = Done
    _repeatable = False

    topic: Name


class RestoreTopicRequest(Request[Done], frozen=True, tag="restore_topic"):
    """Take the newest deleted topic of a name back into use."""

    response = Done
    _repeatable = False

    topic: Name


class DrainBroker(Request[Done], frozen=True, tag="drain_broker"):
    """Move everything off a broker, or, undone, let it hold replicas again."""

    response = Done
    _idempotent = True

    broker: NodeId
    is_undone: bool = False


class RemoveBroker(Request[Done], frozen=True, tag="remove_broker"):
    """Forget a broker that is drained, or dead and empty."""

    response = Done
    _repeatable = False

    broker: NodeId


class RebalanceBrokers(Request[Done], frozen=True, tag="rebalance_brokers"):
    """Move replicas until every eligible broker has its share."""

    response = Done
    _idempotent = True


# -- clients -----------------------------------------------------------------------------------------


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A topic by name, and those of its partitions that are meant: none named, all meant."""

    topic: Name
    partitions: tuple[PartitionId, ...] = ()


class ProducerRegistered(Response, frozen=True):
    """A producer's id and the epoch that it must send with from now on."""

    producer_id: ProducerId
    epoch: int
    index: Index


class RegisterProducerRequest(Request[ProducerRegistered], frozen=True, tag="register_producer"):
    """Make a producer known for topics; a known name or id keeps its id and gets a new epoch."""

    response = ProducerRegistered

    topics: tuple[Selection, ...]
    name: Name = ""
    producer_id: ProducerId | None = None

    @property
    def is_idempotent(self) -> bool:
        """See `Request`."""
        # A repeat begins one more epoch, and the caller only ever learns of the last one.
        return bool(self.name) or self.producer_id is not None


class ConsumerRegistered(Response, frozen=True):
    """A consumer's id."""

    consumer_id: ConsumerId
    index: Index


class RegisterConsumerRequest(Request[ConsumerRegistered], frozen=True, tag="register_consumer"):
    """Make a consumer known for topics; with an id, for more topics than before.

    A repeated request with the same `request_id` finds the consumer that it made.
    """

    response = ConsumerRegistered

    topics: tuple[Selection, ...]
    consumer_id: ConsumerId | None = None
    start: Literal["earliest", "latest"] = "earliest"
    request_id: Name = ""

    @property
    def is_idempotent(self) -> bool:
        """See `Request`."""
        return bool(self.request_id) or self.consumer_id is not None


class ForgetClientRequest(Request[Done], frozen=True, tag="forget_client"):
    """Drop a producer or consumer: retention no longer waits for it."""

    response = Done
    _repeatable = False

    kind: Literal["producer", "consumer"]
    id: int


# -- data, asked of the partition's leader -----------------------------------------------------------


class Produced(Response, frozen=True):
    """Where a batch is; `is_duplicate` if an earlier send of it put it there."""

    base_offset: Offset
    is_duplicate: bool = False


class Produce(Request[Produced], frozen=True, tag="produce"):
    """Append the one batch that is the payload, once; answered when it is committed."""

    response = Produced
    waits_for_index = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionId


class Fetched(Response, frozen=True):
    """Batches, in the payload one behind the other; the first may begin before the offset that was asked for."""

    first_offset: Offset
    """Where the partition's records begin."""
    end_offset: Offset
    """The high watermark."""


class Fetch(Request[Fetched], frozen=True, tag="fetch"):
    """Read committed batches from an offset on; wait for one at most `wait_ms` if there is none.

    At least one batch is returned if there is one, however large it is.
    """

    response = Fetched
    waits_for_index = True
    is_read = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionId
    offset: Offset
    bytes_max: Count = 1024 * 1024
    wait_ms: Count = 0


class ReplicaRead(Response, frozen=True):
    """Batches as one replica stores them, in the payload one behind the other, and where it begins and ends."""

    first_offset: Offset
    end_offset: Offset
    """The first offset that is not committed as far as this replica knows."""


class ReadReplica(Request[ReplicaRead], frozen=True, tag="read_replica"):
    """Read what the asked node itself stores of a partition, whether it leads or not, as far as it is committed.

    For who compares replicas. Never handed on, and no proof of anything newer than the answer says.
    """

    response = ReplicaRead
    waits_for_index = True
    is_read = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionId
    offset: Offset
    bytes_max: Count = 1024 * 1024


class OffsetFound(Response, frozen=True):
    """An offset."""

    offset: Offset


class FindOffset(Request[OffsetFound], frozen=True, tag="find_offset"):
    """Ask for the first offset, the high watermark, or the first record not older than a timestamp (ms)."""

    response = OffsetFound
    waits_for_index = True
    is_read = True

    topic_id: TopicId
    partition_id: PartitionId
    at: Literal["earliest", "latest"] | int


class Consumed(Response, frozen=True):
    """Records for a consumer, as batches in the payload: those from `first_offset` up to `cursor` are meant."""

    first_offset: Offset
    cursor: Offset
    """Where the consumer's cursor is now: one past the last record that is meant; equal to `first_offset` if none."""
    end_offset: Offset


class Consume(Request[Consumed], frozen=True, tag="consume"):
    """Read records at a consumer's cursor and move it past them in the same replicated step.

    With `offset` the records from there are returned and the cursor is set behind them: safe to repeat.
    """

    response = Consumed
    waits_for_index = True
    carries_batches = True

    topic_id: TopicId
    partition_id: PartitionId
    consumer_id: ConsumerId
    offset: Offset | None = None
    records_max: Count = 1
    bytes_max: Count = 1024 * 1024
    wait_ms: Count = 0

    @property
    def is_repeatable(self) -> bool:
        """See `Request`."""
        return self.offset is not None


class MoveCursor(Request[Done], frozen=True, tag="move_cursor"):
    """Set consumers' cursors; with `only_new` leave those alone that have one."""

    response = Done
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionId
    cursors: tuple[tuple[ConsumerId, Offset | Literal["latest"]], ...]
    only_new: bool = False


class CursorsFound(Response, frozen=True):
    """Cursors in the order in which they were asked for, and the partition's bounds, no older than the request."""

    cursors: tuple[Offset, ...]
    first_offset: Offset
    end_offset: Offset


class GetCursors(Request[CursorsFound], frozen=True, tag="get_cursors"):
    """Ask where consumers are; how much they have left is the difference to `end_offset`."""

    response = CursorsFound
    waits_for_index = True
    is_read = True

    topic_id: TopicId
    partition_id: PartitionId
    consumer_ids: tuple[ConsumerId, ...]


class EpochBegun(Response, frozen=True):
    """The sequence that the partition expects next of the producer."""

    next_sequence: int


class BeginEpoch(Request[EpochBegun], frozen=True, tag="begin_epoch"):
    """Fence off a producer's earlier epochs in a partition, durably, and learn how far they have come."""

    response = EpochBegun
    waits_for_index = True

    topic_id: TopicId
    partition_id: PartitionId
    producer_id: ProducerId
    epoch: Count


# -- between nodes -----------------------------------------------------------------------------------


class CommandSubmitted(Response, frozen=True):
    """What became of a command: its result is the payload."""

    index: Index


class SubmitCommand(Request[CommandSubmitted], frozen=True, tag="submit_command"):
    """Carry out a command on the metadata; the payload is the command. For nodes only."""

    response = CommandSubmitted
    is_for_nodes = True


class LeaderInfo(msgspec.Struct, frozen=True, array_like=True):
    """A partition that the sender leads, and since which epoch."""

    topic_id: TopicId
    partition_id: PartitionId
    epoch: int


class BeatInfo(msgspec.Struct, frozen=True, array_like=True):
    """A client that the sender has heard of."""

    kind: Literal["producer", "consumer"]
    id: int
    last_seen_ms: int


class HeartbeatTaken(Response, frozen=True):
    """The primary has heard it; `is_known` tells whether the sender is registered as what it says it is."""

    is_known: bool


class BrokerHeartbeatRequest(Request[HeartbeatTaken], frozen=True, tag="heartbeat"):
    """Tell the primary that a broker lives, what it has come to lead, and which clients it has heard of."""

    response = HeartbeatTaken
    _idempotent = True
    is_for_nodes = True

    node: NodeId
    identity: Name
    leads: Annotated[tuple[LeaderInfo, ...], Meta(max_length=RESULTS_MAX)] = ()
    """Those that the primary may not know yet."""
    clients: Annotated[tuple[BeatInfo, ...], Meta(max_length=RESULTS_MAX)] = ()


class MembersFound(Response, frozen=True):
    """A group's members by its last committed configuration; asked of its leader, who proves that it leads."""

    voters: tuple[NodeId, ...]
    learners: tuple[NodeId, ...]


class GetMembers(Request[MembersFound], frozen=True, tag="get_members"):
    """Ask a group's leader who belongs to it: what a broker must know before it deletes a replica."""

    response = MembersFound
    is_read = True
    is_for_nodes = True

    group: GroupId


AnyRequest = (
    GetMetadata
    | DescribeNode
    | ListClients
    | ListMoves
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
    | ListHolds
    | PlaceHoldRequest
    | ReleaseHoldRequest
    | Produce
    | Fetch
    | ReadReplica
    | FindOffset
    | Consume
    | ConsumeMany
    | MoveCursor
    | GetCursors
    | BeginEpoch
    | SubmitCommand
    | BrokerHeartbeatRequest
    | GetMembers
)

PartitionRequest = Produce | Fetch | FindOffset | Consume | ConsumeMany | MoveCursor | GetCursors | BeginEpoch
"""What only a partition's leader can answer."""
