"""Apply a committed command to the state: the one function that every member computes with the same result.

Pure and deterministic: the result depends only on the state and the command, never on a clock, random numbers or hash
order. A command is first decided, as a list of changed rows that modifies nothing. Then the whole list is applied, or
the command is refused and nothing is. The same list is written to SQL.

`_decide` dispatches to the modules of decisions: `brokers` (with moves), `clients`, `groups`, `topics` (with holds),
`access`, `owners` and `quotas`.
"""

from __future__ import annotations

from typing import Any, assert_never

import msgspec

from quiver.errors import UnknownVersionError
from quiver.features import explain_level, level_of
from quiver.metadata import access, brokers, clients, groups, owners, quotas, recovery, topics
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
    Command,
    CommandDone,
    CommandResult,
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
    UndrainBroker,
    command_name,
)
from quiver.metadata.decision import CommandDecision, CommandRefusal, refuse
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
from quiver.metadata.state import Change, MetadataState

AccessCommand = (
    CreateUserCommand
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
)
"""Commands on users, tokens, roles, grants, quotas and owners."""


class ApplyOutcome(msgspec.Struct, frozen=True):
    """The outcome of a command: a result and the changed rows, or a refusal and no changes."""

    result: CommandResult | None = None
    refusal: CommandRefusal | None = None
    changes: tuple[Change, ...] = ()
    is_defect: bool = False
    """Whether the code failed on the command."""


def apply(state: MetadataState, command: AnyCommand, *, level_max: int | None = None) -> ApplyOutcome:
    """Apply a command to a state, or refuse it and leave the state unchanged.

    A command that makes this code fail is refused as `bad_command`: it is in the log of every member, and would end all
    of them, again after each restart.

    Raises:
        UnknownVersionError: the command sets a feature level above `level_max`, the highest that this program knows;
            the state is unchanged.
    """
    if not state.counters.cluster_id and not isinstance(command, InitCluster):
        return ApplyOutcome(refusal=refuse("not_formed", "not done: the cluster is not formed yet; retry"))
    try:
        decision = check_level(state, command) or _decide(state, command)
    except Exception as error:  # noqa: BLE001 - a decision changes nothing, so that nothing is half done
        reason = f"not done: this program has a defect and fails on the command: {error!r}"
        return ApplyOutcome(refusal=refuse("bad_command", reason), is_defect=True)
    if isinstance(decision, CommandRefusal):
        return ApplyOutcome(refusal=decision)
    changes, counters = tuple(decision.changes), decision.counters or state.counters
    if level_max is not None and counters.feature_level > level_max:
        message = explain_level(counters.feature_level, level_max=level_max)
        raise UnknownVersionError(f"a command of a newer program: {message}")
    state.apply_changes(changes, counters)
    return ApplyOutcome(result=decision.result or CommandDone(len(changes)), changes=changes)


def check_level(state: MetadataState, command: Command[Any]) -> CommandRefusal | None:
    """Return why a command is above the cluster's feature level; the proposer asks, too, before it is in the log."""
    level, needed = state.counters.feature_level, level_of(command)
    if needed <= level or isinstance(command, InitCluster | RaiseLevel):
        return None
    return refuse(
        "feature_level",
        f"not done: {command_name(command)} needs feature level {needed}, but the cluster is at level {level}; "
        "upgrade all nodes, then run quiver cluster upgrade",
    )


def _decide(state: MetadataState, command: AnyCommand) -> CommandDecision | CommandRefusal:
    if isinstance(command, AccessCommand):
        return _decide_access(state, command)
    if isinstance(command, GroupCommand):
        return _decide_group(state, command)
    match command:
        case InitCluster():
            return _init_cluster(state, command)
        case RaiseLevel():
            return brokers.raise_level(state, command)
        case RegisterBroker():
            return brokers.register(state, command)
        case ChangeBrokerState():
            return brokers.change_state(state, command)
        case UndrainBroker():
            return brokers.undrain(state, command)
        case ChangeRebalancing():
            return brokers.change_rebalancing(state, command)
        case ForgetBroker():
            return brokers.forget(state, command)
        case CreateTopicCommand():
            return topics.create(state, command)
        case ConfigureTopicCommand():
            return topics.configure(state, command)
        case AddPartitionsCommand():
            return topics.add_partitions(state, command)
        case DeleteTopicCommand():
            return topics.delete(state, command)
        case RestoreTopicCommand():
            return topics.restore(state, command)
        case PurgeTopic():
            return topics.purge(state, command)
        case ReportLeaders():
            return topics.report_leaders(state, command)
        case PreferLeader():
            return topics.prefer_leader(state, command)
        case BeginMove():
            return brokers.begin_move(state, command)
        case PromoteMove():
            return brokers.promote_move(state, command)
        case FinishMove():
            return brokers.finish_move(state, command)
        case AbortMove():
            return brokers.abort_move(state, command)
        case RegisterProducerCommand():
            return clients.register_producer(state, command)
        case RegisterConsumerCommand():
            return clients.register_consumer(state, command)
        case ForgetClientCommand():
            return clients.forget(state, command)
        case ExpireClients():
            return clients.expire(state, command)
        case RecordHeartbeats():
            return clients.record_heartbeats(state, command)
        case PlaceHoldCommand():
            return topics.place_hold(state, command)
        case ReleaseHoldCommand():
            return topics.release_hold(state, command)
        case ExpireHold():
            return topics.expire_hold(state, command)
        case RecoverCluster():
            return recovery.recover(state, command)
        case _:
            assert_never(command)


def _decide_access(state: MetadataState, command: AccessCommand) -> CommandDecision | CommandRefusal:
    match command:
        case CreateUserCommand():
            return access.create_user(state, command)
        case ChangeUserCommand():
            return access.change_user(state, command)
        case DeleteUserCommand():
            return access.delete_user(state, command)
        case CreateTokenCommand():
            return access.create_token(state, command)
        case RevokeTokenCommand():
            return access.revoke_token(state, command)
        case CreateRoleCommand():
            return access.create_role(state, command)
        case DeleteRoleCommand():
            return access.delete_role(state, command)
        case ChangeMemberCommand():
            return access.change_member(state, command)
        case AddGrantCommand():
            return access.add_grant(state, command)
        case RemoveGrantCommand():
            return access.remove_grant(state, command)
        case SetQuotaCommand():
            return quotas.set_quota(state, command)
        case RemoveQuotaCommand():
            return quotas.remove_quota(state, command)
        case ChangeOwnerCommand():
            return owners.change_owner(state, command)
        case _:
            assert_never(command)


def _decide_group(state: MetadataState, command: GroupCommand) -> CommandDecision | CommandRefusal:
    match command:
        case JoinGroupCommand():
            return groups.join(state, command)
        case RemoveMembers():
            return groups.remove(state, command)
        case AssignPartitions():
            return groups.assign(state, command)
        case ReleasePartitions():
            return groups.release(state, command)
        case ConfigureGroupCommand():
            return groups.configure(state, command)
        case DeleteGroupCommand():
            return groups.delete(state, command)
        case RestartGroupCommand():
            return groups.restart(state, command)
        case _:
            assert_never(command)


def _init_cluster(state: MetadataState, command: InitCluster) -> CommandDecision | CommandRefusal:
    known = state.counters.cluster_id
    if not command.cluster_id:
        return refuse("bad_cluster_id", "not done: the cluster id is empty; give a non-empty id")
    if known and known != command.cluster_id:
        return refuse(
            "cluster_exists",
            f"not done: these managers belong to cluster {known!r}, not to {command.cluster_id!r}; use that id",
        )
    if known:
        return CommandDecision()
    counters = msgspec.structs.replace(
        state.counters,
        cluster_id=command.cluster_id,
        formed_ms=command.now_ms,
        feature_level=command.feature_level,
    )
    return CommandDecision(counters=counters)
