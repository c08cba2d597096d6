"""The metadata log in readable form: each entry's time, command, subject, and whether it is applied.

Pure: it reads batches of the Raft log from any source and never raises on their content. The index of an entry is the
id of its transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

import msgspec

from quiver.errors import DecodeError
from quiver.metadata.apply import AccessCommand
from quiver.metadata.commands import (
    AbortMove,
    AddGrantCommand,
    AddPartitionsCommand,
    AnyCommand,
    BeginMove,
    ChangeBrokerState,
    ChangeMemberCommand,
    ChangeOwnerCommand,
    ChangeRebalancing,
    ChangeUserCommand,
    ConfigureTopicCommand,
    CreateRoleCommand,
    CreateTokenCommand,
    CreateTopicCommand,
    CreateUserCommand,
    DeleteRoleCommand,
    DeleteTopicCommand,
    DeleteUserCommand,
    ExpireClients,
    ExpireHold,
    FinishMove,
    ForgetBroker,
    ForgetClientCommand,
    InitCluster,
    PlaceHoldCommand,
    PreferLeader,
    PromoteMove,
    PurgeTopic,
    RaiseLevel,
    RecordHeartbeats,
    RecoverCluster,
    RegisterBroker,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    ReleaseHoldCommand,
    RemoveGrantCommand,
    RemoveQuotaCommand,
    ReportLeaders,
    RestoreTopicCommand,
    RevokeTokenCommand,
    SetQuotaCommand,
    TopicSelection,
    UndrainBroker,
    command_name,
    decode_command,
)
from quiver.metadata.group_commands import (
    AssignPartitions,
    ConfigureGroupCommand,
    DeleteGroupCommand,
    GroupCommand,
    JoinGroupCommand,
    ReleasePartitions,
    RemoveMembers,
    RestartGroupCommand,
)
from quiver.model import Index, NodeId, Term
from quiver.record import Batch

NO_REQUEST = "-"
"""The request of an entry that Raft itself wrote: a new leader's first entry, or a membership change."""
UNREADABLE = "unreadable"


class JournalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the metadata log."""

    index: Index
    term: Term
    time_ms: int
    request: str
    subject: str
    broker: NodeId | None
    """The broker that the command concerns, if any."""
    is_applied: bool
    principal: str = ""
    """Who asked for it; empty for the cluster itself and for anonymous clients."""


def read_journal(batches: Iterable[Batch], *, applied_index: Index, only_pending: bool = False) -> Iterator[JournalRow]:
    """Yield a row for each batch; entries after `applied_index` are pending."""
    for batch in batches:
        if not only_pending or batch.header.index > applied_index:
            yield _row(batch, is_applied=batch.header.index <= applied_index)


def _row(batch: Batch, *, is_applied: bool) -> JournalRow:
    request, subject, broker, principal = NO_REQUEST, "", None, ""
    try:
        command = decode_command(batch)
    except DecodeError as error:
        request, subject = UNREADABLE, error.message
    else:
        if command is not None:
            request, principal = command_name(command), command.principal
            subject, broker = describe(command)
    header = batch.header
    return JournalRow(
        index=header.index,
        term=header.term,
        time_ms=header.append_timestamp,
        request=request,
        subject=subject,
        broker=broker,
        is_applied=is_applied,
        principal=principal,
    )


def describe(command: AnyCommand) -> tuple[str, NodeId | None]:
    """Return the subject of a command in a few words, and the broker that it concerns, if any."""
    if isinstance(command, GroupCommand):
        return _describe_group(command), None
    if isinstance(command, AccessCommand):
        return _describe_access(command), None
    match command:
        case RecoverCluster():
            return f"without nodes {list(command.lost)}, {len(command.recovered)} partitions", None
        case InitCluster():
            return f"cluster {command.cluster_id}", None
        case RaiseLevel():
            return f"feature level {command.feature_level}", None
        case RegisterBroker():
            return f"at {command.wire_address}", command.broker_id
        case ChangeBrokerState():
            return command.state.value, command.broker_id
        case ForgetBroker() | UndrainBroker():
            return "", command.broker_id
        case ChangeRebalancing():
            return "wanted" if command.is_rebalancing else "done", None
        case CreateTopicCommand():
            encrypted = ", encrypted" if command.is_encrypted else ""
            return f"topic {command.topic}, {len(command.assignments)} partitions{encrypted}", None
        case AddPartitionsCommand():
            return f"topic {command.topic}, {command.partitions} partitions", None
        case ConfigureTopicCommand() | DeleteTopicCommand():
            return f"topic {command.topic}", None
        case RestoreTopicCommand() | PurgeTopic():
            return f"topic id {command.topic_id}", None
        case ReportLeaders():
            return f"{len(command.reports)} partitions", None
        case PreferLeader():
            return f"partition {command.partition_id} of topic id {command.topic_id}", command.leader
        case BeginMove():
            source = "nowhere" if command.source is None else f"broker {command.source}"
            return f"partition {command.partition_id} of topic id {command.topic_id} from {source}", command.target
        case PromoteMove() | FinishMove() | AbortMove():
            return f"move {command.move_id}", None
        case RegisterProducerCommand():
            return _client("producer", command.producer_id, command.name, command.topics), None
        case RegisterConsumerCommand():
            return _client("consumer", command.consumer_id, "", command.topics), None
        case ForgetClientCommand():
            return f"{command.kind.value} {command.id}", None
        case ExpireClients():
            return f"{len(command.clients)} clients", None
        case RecordHeartbeats():
            return f"{len(command.beats)} heartbeats", None
        case PlaceHoldCommand() | ExpireHold():
            return f"hold {command.name} on topic id {command.topic_id}", None
        case ReleaseHoldCommand():
            return f"hold {command.name}", None
        case _:
            assert_never(command)


def _describe_access(command: AccessCommand) -> str:
    match command:
        case CreateUserCommand() | DeleteUserCommand():
            return f"user {command.user}"
        case ChangeUserCommand():
            return f"user {command.user}{_user_changes(command)}"
        case CreateTokenCommand():
            return f"token {command.token_id} of user {command.user}"
        case RevokeTokenCommand():
            return f"token {command.token_id}"
        case CreateRoleCommand() | DeleteRoleCommand():
            return f"role {command.role}"
        case ChangeMemberCommand():
            return f"user {command.user} {'gets' if command.is_member else 'loses'} role {command.role}"
        case AddGrantCommand() | RemoveGrantCommand():
            return str(command.grant)
        case SetQuotaCommand() | RemoveQuotaCommand():
            limits = f": {command.limits}" if isinstance(command, SetQuotaCommand) else ""
            return f"quota of {command.subject}{limits}"
        case ChangeOwnerCommand():
            return f"{command.owned.value} {command.id} to {command.owner or 'nobody'}"
        case _:
            assert_never(command)


def _describe_group(command: GroupCommand) -> str:
    match command:
        case JoinGroupCommand():
            return f"member {command.instance or command.member_id} of group {command.group}"
        case RemoveMembers():
            return f"{len(command.members)} members {command.reason}"
        case AssignPartitions():
            given, taken = len(command.grants), len(command.revokes) + len(command.drops)
            return f"group id {command.group_id}, {given} partitions given, {taken} taken"
        case ReleasePartitions():
            return f"{len(command.releases)} partitions"
        case ConfigureGroupCommand() | DeleteGroupCommand() | RestartGroupCommand():
            return f"group {command.group}"
        case _:
            assert_never(command)


def _user_changes(command: ChangeUserCommand) -> str:
    state = "" if command.is_enabled is None else f", {'enabled' if command.is_enabled else 'disabled'}"
    return state + ("" if command.verifier is None else ", new password")


def _client(kind: str, id_: int | None, name: str, topics: Iterable[TopicSelection]) -> str:
    who = kind if id_ is None else f"{kind} {id_}"
    called = f" {name}" if name else ""
    return f"{who}{called} of {', '.join(selection.topic for selection in topics)}"
