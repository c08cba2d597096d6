"""The commands that change the metadata: one frozen value per command, and its encoding in the Raft log.

Pure. A command carries all external input of `apply`: the proposer's time and its placement decisions. It carries no
ids that `apply` assigns.

Encoding: a control batch whose payload is `CONTROL_STATE`, one version byte, and a msgpack map with the command's
name under "type". The version is the lowest feature level whose programs can read the command. Decoding is strict on
purpose: an unknown version, command or field was written by a newer program, and skipping it would make this member's
state differ from the others'. `UnknownCommandError` stops the member instead. A field that is added later needs a
default that means the same as its absence did; see `quiver.features` for when it may be written.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from quiver.errors import DecodeError, UnknownVersionError
from quiver.features import LEVEL_MAX, LEVEL_MIN, level_of, shrink
from quiver.metadata.command_types import BeginMoveResult as BeginMoveResult
from quiver.metadata.command_types import Command as Command
from quiver.metadata.command_types import CommandDone as CommandDone
from quiver.metadata.command_types import CommandResult as CommandResult
from quiver.metadata.command_types import CreateTopicResult as CreateTopicResult
from quiver.metadata.command_types import MoveNumber, PartitionNumber, ProducerNumber
from quiver.metadata.command_types import RegisterConsumerResult as RegisterConsumerResult
from quiver.metadata.command_types import RegisterProducerResult as RegisterProducerResult
from quiver.metadata.command_types import RestartGroupResult as RestartGroupResult
from quiver.metadata.command_types import TopicSelection as TopicSelection
from quiver.metadata.group_commands import GroupCommand
from quiver.metadata.rows import (
    ALL_ROLES,
    BrokerState,
    EntityKind,
    HoldPosition,
    NodeRole,
    Number,
    OwnedKind,
    Retention,
    StartFrom,
    Text,
)
from quiver.model import Buffer, ConsumerId, NodeId, PartitionId, TopicId
from quiver.record import Batch, build_control_batch
from quiver.security.limits import QuotaLimits
from quiver.security.permissions import Grant
from quiver.security.scram import ScramVerifier

CONTROL_STATE = 3
"""First payload byte of a control batch that belongs to the state machine, not to the replication driver."""

Level = Annotated[int, Meta(ge=LEVEL_MIN, le=255)]
"""A feature level; it is the version byte of commands and snapshots."""


class UnknownCommandError(UnknownVersionError):
    """Report a command of a newer program: this member must stop rather than skip it."""

    code = "unknown_command"


# -- commands ----------------------------------------------------------------------------------------


class InitCluster(Command[CommandDone], frozen=True, tag="init_cluster"):
    """Form the cluster, once; the same id again changes nothing."""

    cluster_id: Text
    feature_level: Level = LEVEL_MIN
    """The level that the cluster starts with."""


class NodeLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest feature level that a node knows, as it reported it to the primary."""

    node: NodeId
    level: Level


class RaiseLevel(Command[CommandDone], frozen=True, tag="raise_level"):
    """Raise the cluster's feature level; refused unless every node is listed as knowing it. Never lowers it."""

    feature_level: Level
    nodes: tuple[NodeLevel, ...]


class RegisterBroker(Command[CommandDone], frozen=True, tag="register_broker"):
    """Register a broker or update its addresses; it becomes alive, or draining if a drain was requested."""

    broker_id: NodeId
    identity: Text
    wire_address: Text
    http_address: Text = ""
    rack: Text = ""
    roles: tuple[NodeRole, ...] = ALL_ROLES


class ChangeBrokerState(Command[CommandDone], frozen=True, tag="change_broker_state"):
    """Change a broker's state, by its heartbeats or by an operator."""

    broker_id: NodeId
    state: BrokerState


class UndrainBroker(Command[CommandDone], frozen=True, tag="undrain_broker"):
    """Allow a broker to hold replicas again, whether or not it is alive."""

    broker_id: NodeId


class ChangeRebalancing(Command[CommandDone], frozen=True, tag="change_rebalancing"):
    """Request a rebalance over all eligible brokers, or record that it is complete."""

    is_rebalancing: bool


class ForgetBroker(Command[CommandDone], frozen=True, tag="forget_broker"):
    """Delete a removed broker that has no replicas."""

    broker_id: NodeId


class CreateTopicCommand(Command[CreateTopicResult], frozen=True, tag="create_topic"):
    """Create a topic with a partition per assignment: the brokers of its replicas, the preferred leader first."""

    topic: Text
    replicas: Number
    assignments: tuple[tuple[NodeId, ...], ...]
    retention: Retention = Retention()
    request_id: Text = ""
    is_encrypted: bool = False


class ConfigureTopicCommand(Command[CommandDone], frozen=True, tag="configure_topic"):
    """Change a topic's retention."""

    topic: Text
    retention: Retention


class AddPartitionsCommand(Command[CommandDone], frozen=True, tag="add_partitions"):
    """Grow a topic to `partitions` partitions, with an assignment for each new one."""

    topic: Text
    partitions: Number
    assignments: tuple[tuple[NodeId, ...], ...]


class DeleteTopicCommand(Command[CommandDone], frozen=True, tag="delete_topic"):
    """Delete a topic; it can be restored until `purge_ms`."""

    topic: Text
    purge_ms: Number


class RestoreTopicCommand(Command[CommandDone], frozen=True, tag="restore_topic"):
    """Restore a deleted topic."""

    topic_id: TopicId


class PurgeTopic(Command[CommandDone], frozen=True, tag="purge_topic"):
    """Delete a topic permanently after its `purge_ms`, with its partitions, registrations, moves and holds."""

    topic_id: TopicId


class LeaderReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leader of a partition in an epoch, as the leader itself reports it."""

    topic_id: TopicId
    partition_id: PartitionNumber
    leader: NodeId
    epoch: Number


class ReportLeaders(Command[CommandDone], frozen=True, tag="report_leaders"):
    """Record leaders; the newest epoch of each partition wins."""

    reports: tuple[LeaderReport, ...]


class PreferLeader(Command[CommandDone], frozen=True, tag="prefer_leader"):
    """Make one of a partition's replicas its preferred leader."""

    topic_id: TopicId
    partition_id: PartitionNumber
    leader: NodeId


class BeginMove(Command[BeginMoveResult], frozen=True, tag="begin_move"):
    """Make `target` a learner of a partition, to replace `source` or, without one, to add a replica."""

    topic_id: TopicId
    partition_id: PartitionNumber
    target: NodeId
    source: NodeId | None = None


class PromoteMove(Command[CommandDone], frozen=True, tag="promote_move"):
    """Record that the partition's own group has made the target a voter in place of the source."""

    move_id: MoveNumber


class FinishMove(Command[CommandDone], frozen=True, tag="finish_move"):
    """Record that the source has deleted its replica."""

    move_id: MoveNumber


class AbortMove(Command[CommandDone], frozen=True, tag="abort_move"):
    """Abort a move whose target is not promoted."""

    move_id: MoveNumber


class RegisterProducerCommand(Command[RegisterProducerResult], frozen=True, tag="register_producer"):
    """Register a producer for topics; a known name or id keeps its id and gets a new epoch."""

    topics: tuple[TopicSelection, ...]
    name: Text = ""
    producer_id: ProducerNumber | None = None
    takes_over: bool = False
    """Whether the principal may use a producer that another one owns."""


class RegisterConsumerCommand(Command[RegisterConsumerResult], frozen=True, tag="register_consumer"):
    """Register a consumer for topics; with an id, add topics to a registered consumer."""

    topics: tuple[TopicSelection, ...]
    consumer_id: ConsumerId | None = None
    start: StartFrom = StartFrom.EARLIEST
    request_id: Text = ""
    takes_over: bool = False
    """Whether the principal may use a consumer that another one owns."""


class ForgetClientCommand(Command[CommandDone], frozen=True, tag="forget_client"):
    """Delete a producer or consumer: retention no longer waits for it."""

    kind: EntityKind
    id: Number


class SilentClient(msgspec.Struct, frozen=True, array_like=True):
    """A client that the primary has not heard of, and what the metadata said about it when the primary decided."""

    kind: EntityKind
    id: Number
    last_seen_ms: Number
    epoch: Number = 0


class ExpireClients(Command[CommandDone], frozen=True, tag="expire_clients"):
    """Delete silent producers and consumers; those with a later sign of life or a later epoch stay."""

    clients: tuple[SilentClient, ...]


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """When a heartbeat of a sender was last received."""

    kind: EntityKind
    id: Number
    last_seen_ms: Number


class RecordHeartbeats(Command[CommandDone], frozen=True, tag="record_heartbeats"):
    """Record many heartbeats in one command; the newest time of each wins, unknown senders are ignored."""

    beats: tuple[Beat, ...]


class PlaceHoldCommand(Command[CommandDone], frozen=True, tag="place_hold"):
    """Keep a topic's records from these positions on for `lasting_ms`; replaces a hold of the same name."""

    topic_id: TopicId
    name: Text
    positions: tuple[HoldPosition, ...]
    lasting_ms: Number
    owner: Text = ""
    takes_over: bool = False
    """Whether the principal may change a hold that another one placed."""


class ReleaseHoldCommand(Command[CommandDone], frozen=True, tag="release_hold"):
    """Release a hold on one topic or on all its topics; a hold that no longer exists is no error."""

    name: Text
    topic_id: TopicId | None = None
    takes_over: bool = False


class ExpireHold(Command[CommandDone], frozen=True, tag="expire_hold"):
    """Delete an expired hold; refused if it was renewed in the meantime."""

    topic_id: TopicId
    name: Text


class CreateUserCommand(Command[CommandDone], frozen=True, tag="create_user"):
    """Create a user, without tokens, roles and grants."""

    user: Text
    verifier: ScramVerifier | None = None


class ChangeUserCommand(Command[CommandDone], frozen=True, tag="change_user"):
    """Enable or disable a user, or change its password; None leaves as it is."""

    user: Text
    is_enabled: bool | None = None
    verifier: ScramVerifier | None = None


class DeleteUserCommand(Command[CommandDone], frozen=True, tag="delete_user"):
    """Delete a user with its tokens, memberships and grants."""

    user: Text


class CreateTokenCommand(Command[CommandDone], frozen=True, tag="create_token"):
    """Give a user a token, of which the cluster knows the hash; expired ones make room."""

    user: Text
    token_id: Text
    secret_hash: Text
    expires_ms: Number | None = None


class RevokeTokenCommand(Command[CommandDone], frozen=True, tag="revoke_token"):
    """Delete a token."""

    token_id: Text


class CreateRoleCommand(Command[CommandDone], frozen=True, tag="create_role"):
    """Create a role, without members and grants."""

    role: Text


class DeleteRoleCommand(Command[CommandDone], frozen=True, tag="delete_role"):
    """Delete a role with its memberships and grants."""

    role: Text


class ChangeMemberCommand(Command[CommandDone], frozen=True, tag="change_member"):
    """Give a role to a user, or take it."""

    role: Text
    user: Text
    is_member: bool


class AddGrantCommand(Command[CommandDone], frozen=True, tag="add_grant"):
    """Add a grant; one that exists changes nothing."""

    grant: Grant


class RemoveGrantCommand(Command[CommandDone], frozen=True, tag="remove_grant"):
    """Remove a grant."""

    grant: Grant


class SetQuotaCommand(Command[CommandDone], frozen=True, tag="set_quota"):
    """Set limits of a subject; those that are None stay as they are."""

    subject: Text
    limits: QuotaLimits


class RemoveQuotaCommand(Command[CommandDone], frozen=True, tag="remove_quota"):
    """Remove all limits of a subject, which then has those of the next subject that applies."""

    subject: Text


class ChangeOwnerCommand(Command[CommandDone], frozen=True, tag="change_owner"):
    """Give a topic, producer or consumer to a user, whether it exists or not; an empty owner is nobody."""

    owned: OwnedKind
    id: Number
    owner: Text


class RecoveredPartition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition that had lost the majority of its replicas."""

    topic_id: TopicId
    partition_id: PartitionId
    replicas: tuple[NodeId, ...]
    """What is left; the first one has the best log."""
    is_recreated: bool = False
    """Whether nothing is left: the partition begins again, empty, with these replicas."""


class RecoverCluster(Command[CommandDone], frozen=True, tag="recover_cluster"):
    """Remove nodes that are lost for good, majority or not. Only `quiver recover` writes it, into a stopped log."""

    lost: tuple[NodeId, ...]
    recovered: tuple[RecoveredPartition, ...] = ()


AnyCommand = (
    InitCluster
    | RaiseLevel
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
    | ExpireClients
    | RecordHeartbeats
    | PlaceHoldCommand
    | ReleaseHoldCommand
    | ExpireHold
    | RecoverCluster
    | CreateUserCommand
    | ChangeUserCommand
    | DeleteUserCommand
    | CreateTokenCommand
    | RevokeTokenCommand
    | CreateRoleCommand
    | DeleteRoleCommand
    | ChangeMemberCommand
    | AddGrantCommand
    | RemoveGrantCommand
    | SetQuotaCommand
    | RemoveQuotaCommand
    | ChangeOwnerCommand
    | GroupCommand
)

# -- encoding -------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_MARK = bytes((CONTROL_STATE,))
_NAMES = frozenset(kind.__struct_config__.tag for kind in get_args(AnyCommand))


def encode_command(command: Command[Any]) -> bytes:
    """Return a command as an unstamped batch for the Raft log."""
    return build_control_batch(_MARK + encode_payload(command), timestamp=command.now_ms)


def encode_payload(command: Command[Any]) -> bytes:
    """Return a command as it is encoded in its batch after `CONTROL_STATE`, and as nodes forward it."""
    level = level_of(command)
    return bytes((level,)) + _encoder.encode(shrink(command, level))


def encode_result(result: CommandResult) -> bytes:
    """Return a command's result as bytes, for the node that forwarded the command."""
    return _encoder.encode(result)


def decode_command(batch: Batch, *, level_max: int = LEVEL_MAX) -> AnyCommand | None:
    """Return the command in a batch, or None for an entry of the replication driver; `level_max` is this program's.

    Raises:
        UnknownCommandError: a newer program wrote the command.
        DecodeError: the batch holds no valid command.
    """
    if not batch.header.is_control:
        raise DecodeError("a batch of records, which does not belong into the metadata log")
    payload = batch.payload()
    if not len(payload) or payload[0] != CONTROL_STATE:
        return None
    return decode_payload(memoryview(payload)[1:], level_max=level_max)


def decode_payload(data: Buffer, *, level_max: int = LEVEL_MAX) -> AnyCommand:
    """Return the command in a payload without its `CONTROL_STATE` byte; raises as `decode_command` does."""
    if not len(data):
        raise DecodeError("a command without a version")
    if not LEVEL_MIN <= data[0] <= level_max:
        raise UnknownCommandError(
            f"a command of version {data[0]}, but this program reads versions {LEVEL_MIN} to {level_max}: "
            "upgrade this node"
        )
    body = memoryview(data)[1:]
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise _undecodable(body, error) from None


def command_name(command: Command[Any]) -> str:
    """Return a command's name in the log."""
    return str(type(command).__struct_config__.tag)


def _undecodable(body: memoryview, error: Exception) -> DecodeError:
    """Return the error for an undecodable command: a newer program wrote an unknown name, field or enumeration value.

    Anything else is malformed: the version says which programs can read it, and this one is among them.
    """
    try:
        found = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        return DecodeError(f"a command that cannot be read: {error}")
    name = found.get("type") if isinstance(found, dict) else None
    is_new = name not in _NAMES or any(text in str(error) for text in ("unknown field", "Invalid enum value"))
    if isinstance(name, str) and is_new:
        return UnknownCommandError(f"a command {name!r} that this program cannot read ({error}): upgrade this node")
    return DecodeError(f"a command that cannot be read: {error}")
