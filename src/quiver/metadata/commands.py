"""What can be done to the metadata: one frozen value per command, and its bytes in the Raft log.

Pure. A command carries everything that `apply` needs to know of the world: times are the proposer's, placements
are the proposer's choice. Ids are not in it, where `apply` gives them.

Bytes: a control batch whose payload is `CONTROL_STATE`, one byte of version, and a msgpack map with the command's
name under "type". Reading is strict on purpose: a version, a command or a field that this program does not know was
written by a newer one, and skipping it would make this member's state another than the others'. `UnknownCommandError`
stops the member instead. A field that is added later must have a default that means what its absence meant.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError
from quiver.metadata.rows import (
    ALL_ROLES,
    NUMBER_MAX,
    BrokerState,
    EntityKind,
    HoldPosition,
    MoveId,
    NodeRole,
    Number,
    Retention,
    StartFrom,
    Text,
)
from quiver.model import Buffer, ConsumerId, NodeId, PartitionId, ProducerId, TopicId
from quiver.record import Batch, build_control_batch

CONTROL_STATE = 3
"""The driver's mark of a control batch that belongs to the layer above it."""
COMMANDS_VERSION = 1
"""How commands are encoded; a greater one cannot be read by this program."""

R = TypeVar("R")

_BOUNDS = Meta(ge=0, le=NUMBER_MAX)
Node = Annotated[NodeId, _BOUNDS]
TopicNumber = Annotated[TopicId, _BOUNDS]
PartitionNumber = Annotated[PartitionId, _BOUNDS]
MoveNumber = Annotated[MoveId, _BOUNDS]
ProducerNumber = Annotated[ProducerId, _BOUNDS]
ConsumerNumber = Annotated[ConsumerId, _BOUNDS]


class UnknownCommandError(DecodeError):
    """Report a command that only a newer program understands: this member must not go on without it."""

    code = "unknown_command"


# -- results -----------------------------------------------------------------------------------------


class CommandDone(msgspec.Struct, frozen=True, tag="done"):
    """The result of a command that has nothing to tell; `changed` says how many rows it changed."""

    changed: int


class CreateTopicResult(msgspec.Struct, frozen=True, tag="topic_created"):
    """A topic, now or by an earlier try of the same request."""

    topic_id: TopicId
    partitions: int


class BeginMoveResult(msgspec.Struct, frozen=True, tag="move_begun"):
    """A move that was begun."""

    move_id: MoveId


class RegisterProducerResult(msgspec.Struct, frozen=True, tag="producer_registered"):
    """A producer's id, and the epoch that it must send with from now on."""

    producer_id: ProducerId
    epoch: int


class RegisterConsumerResult(msgspec.Struct, frozen=True, tag="consumer_registered"):
    """A consumer's id."""

    consumer_id: ConsumerId


CommandResult = CommandDone | CreateTopicResult | BeginMoveResult | RegisterProducerResult | RegisterConsumerResult

# -- commands ----------------------------------------------------------------------------------------


class Command(
    msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True
):
    """What all commands share; `R` is what its proposer gets back."""

    now_ms: Number
    """The proposer's wall time."""


class InitCluster(Command[CommandDone], frozen=True, tag="init_cluster"):
    """Form the cluster, once; the same id again changes nothing."""

    cluster_id: Text


class RegisterBroker(Command[CommandDone], frozen=True, tag="register_broker"):
    """Make a broker known, or tell its present addresses; it is alive, or draining if that was wanted, from now on."""

    broker_id: Node
    identity: Text
    wire_address: Text
    http_address: Text = ""
    rack: Text = ""
    roles: tuple[NodeRole, ...] = ALL_ROLES


class ChangeBrokerState(Command[CommandDone], frozen=True, tag="change_broker_state"):
    """Say how a broker is, or what is wanted of it."""

    broker_id: Node
    state: BrokerState


class UndrainBroker(Command[CommandDone], frozen=True, tag="undrain_broker"):
    """Let a broker hold replicas again; whether it lives is not said."""

    broker_id: Node


class ChangeRebalancing(Command[CommandDone], frozen=True, tag="change_rebalancing"):
    """Ask for every eligible broker to get its share of the replicas, or say that it has it."""

    is_rebalancing: bool


class ForgetBroker(Command[CommandDone], frozen=True, tag="forget_broker"):
    """Drop a removed broker that holds nothing."""

    broker_id: Node


class CreateTopicCommand(Command[CreateTopicResult], frozen=True, tag="create_topic"):
    """Create a topic with a partition per assignment: the brokers of its replicas, the preferred leader first."""

    topic: Text
    replicas: Number
    assignments: tuple[tuple[Node, ...], ...]
    retention: Retention = Retention()
    request_id: Text = ""


class ConfigureTopicCommand(Command[CommandDone], frozen=True, tag="configure_topic"):
    """Change when records of a topic may go."""

    topic: Text
    retention: Retention


class AddPartitionsCommand(Command[CommandDone], frozen=True, tag="add_partitions"):
    """Bring a topic to `partitions` partitions, with an assignment for each new one."""

    topic: Text
    partitions: Number
    assignments: tuple[tuple[Node, ...], ...]


class DeleteTopicCommand(Command[CommandDone], frozen=True, tag="delete_topic"):
    """Take a topic out of use; it can be restored until `purge_ms`."""

    topic: Text
    purge_ms: Number


class RestoreTopicCommand(Command[CommandDone], frozen=True, tag="restore_topic"):
    """Take a deleted topic back into use."""

    topic_id: TopicNumber


class PurgeTopic(Command[CommandDone], frozen=True, tag="purge_topic"):
    """Forget a deleted topic whose time has come, with its partitions, registrations and moves."""

    topic_id: TopicNumber


class LeaderReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who leads a partition in an epoch, as the leader itself says."""

    topic_id: TopicNumber
    partition_id: PartitionNumber
    leader: Node
    epoch: Number


class ReportLeaders(Command[CommandDone], frozen=True, tag="report_leaders"):
    """Take note of leaders; of each partition the newest epoch wins."""

    reports: tuple[LeaderReport, ...]


class PreferLeader(Command[CommandDone], frozen=True, tag="prefer_leader"):
    """Name one of a partition's replicas as the one that should lead when it can."""

    topic_id: TopicNumber
    partition_id: PartitionNumber
    leader: Node


class BeginMove(Command[BeginMoveResult], frozen=True, tag="begin_move"):
    """Let `target` learn a partition, in order to take the place of `source`, or to be one more."""

    topic_id: TopicNumber
    partition_id: PartitionNumber
    target: Node
    source: Node | None = None


class PromoteMove(Command[CommandDone], frozen=True, tag="promote_move"):
    """Say that the partition's own group has made the target a voter in the source's place."""

    move_id: MoveNumber


class FinishMove(Command[CommandDone], frozen=True, tag="finish_move"):
    """Say that the source has let go of its replica."""

    move_id: MoveNumber


class AbortMove(Command[CommandDone], frozen=True, tag="abort_move"):
    """Give up a move whose target has not been promoted."""

    move_id: MoveNumber


class TopicSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topic by name, and those of its partitions that are meant: none named, all meant."""

    topic: Text
    partitions: tuple[PartitionNumber, ...] = ()


class RegisterProducerCommand(Command[RegisterProducerResult], frozen=True, tag="register_producer"):
    """Make a producer known for topics; a known name or id keeps its id and gets a new epoch."""

    topics: tuple[TopicSelection, ...]
    name: Text = ""
    producer_id: ProducerNumber | None = None


class RegisterConsumerCommand(Command[RegisterConsumerResult], frozen=True, tag="register_consumer"):
    """Make a consumer known for topics; with an id, for more topics than before."""

    topics: tuple[TopicSelection, ...]
    consumer_id: ConsumerNumber | None = None
    start: StartFrom = StartFrom.EARLIEST
    request_id: Text = ""


class ForgetClientCommand(Command[CommandDone], frozen=True, tag="forget_client"):
    """Drop a producer or consumer: retention no longer waits for it."""

    kind: EntityKind
    id: Number


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """Who was heard of when."""

    kind: EntityKind
    id: Number
    last_seen_ms: Number


class RecordHeartbeats(Command[CommandDone], frozen=True, tag="record_heartbeats"):
    """Take note of many heartbeats at once; of each the newest time wins, of the unknown none is kept."""

    beats: tuple[Beat, ...]


class PlaceHoldCommand(Command[CommandDone], frozen=True, tag="place_hold"):
    """Keep a topic's records from these positions on for `lasting_ms`; one of that name gives way to it."""

    topic_id: TopicNumber
    name: Text
    positions: tuple[HoldPosition, ...]
    lasting_ms: Number
    owner: Text = ""


class ReleaseHoldCommand(Command[CommandDone], frozen=True, tag="release_hold"):
    """Let a hold go, of one topic or of all that it is on; one that is gone already is no error."""

    name: Text
    topic_id: TopicNumber | None = None


class ExpireHold(Command[CommandDone], frozen=True, tag="expire_hold"):
    """Let a hold go because it is over; refused if it was renewed meanwhile."""

    topic_id: TopicNumber
    name: Text


AnyCommand = (
    InitCluster
    | RegisterBroker
    | ChangeBrokerState
    | UndrainBroker
    | ChangeRebalancing
    | ForgetBroker
    | CreateTopicCommand
    | ConfigureTopicCommand
    | AddPartitionsCommand
    | DeleteTopicCommand
    | RestoreTopicCommand
    | PurgeTopic
    | ReportLeaders
    | PreferLeader
    | BeginMove
    | PromoteMove
    | FinishMove
    | AbortMove
    | RegisterProducerCommand
    | RegisterConsumerCommand
    | ForgetClientCommand
    | RecordHeartbeats
    | PlaceHoldCommand
    | ReleaseHoldCommand
    | ExpireHold
)

# -- bytes -------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_MARK = bytes((CONTROL_STATE,))
_VERSION = bytes((COMMANDS_VERSION,))


def encode_command(command: Command[Any]) -> bytes:
    """Return the unstamped batch that brings a command into the Raft log."""
    return build_control_batch(_MARK + encode_payload(command), timestamp=command.now_ms)


def encode_payload(command: Command[Any]) -> bytes:
    """Return a command as it stands in its batch behind the driver's mark, and as nodes hand it on."""
    return _VERSION + _encoder.encode(command)


def encode_result(result: CommandResult) -> bytes:
    """Return what a command brought about, for the node that handed it on."""
    return _encoder.encode(result)


def decode_command(batch: Batch) -> AnyCommand | None:
    """Return the command in a batch, or None if it is one of the driver's own entries.

    Raises:
        UnknownCommandError: a newer program wrote it.
        DecodeError: it is no command at all.
    """
    if not batch.header.is_control:
        raise DecodeError("a batch of records in the metadata's log")
    payload = batch.payload()
    if not len(payload) or payload[0] != CONTROL_STATE:
        return None
    return decode_payload(memoryview(payload)[1:])


def decode_payload(data: Buffer) -> AnyCommand:
    """Return the command in a payload, behind the driver's mark; raises as `decode_command` does."""
    if not len(data):
        raise DecodeError("a command without a version")
    if data[0] != COMMANDS_VERSION:
        raise UnknownCommandError(
            f"a command of version {data[0]}, and this program knows {COMMANDS_VERSION}: upgrade this node"
        )
    body = memoryview(data)[1:]
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise _judge(body, error) from None


def command_name(command: Command[Any]) -> str:
    """Return what a command is called in the log."""
    return str(type(command).__struct_config__.tag)


def _judge(body: memoryview, error: Exception) -> DecodeError:
    """Tell what a newer program wrote from what nobody did: its map is whole and names a type."""
    try:
        found = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return DecodeError(f"a command that cannot be read: {error}")
    if isinstance(found, dict) and isinstance(found.get("type"), str):
        return UnknownCommandError(
            f"a command {found['type']!r} that this program cannot read ({error}): upgrade this node"
        )
    return DecodeError(f"a command that cannot be read: {error}")
