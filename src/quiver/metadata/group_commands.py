"""The commands on consumer groups; `commands` explains what a command is. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.groups.settings import QueueSettings
from quiver.metadata.command_types import (
    Command,
    CommandDone,
    PartitionNumber,
    RegisterConsumerResult,
    RestartGroupResult,
    TopicSelection,
)
from quiver.metadata.rows import GroupKind, Number, StartFrom, Text
from quiver.model import ConsumerId, TopicId


class JoinGroupCommand(Command[RegisterConsumerResult], frozen=True, tag="join_group"):
    """Make somebody a member of a group, which is created if it does not exist; a member may join again.

    A member with an instance name takes over from the one that had the same name before. A queue gets no member: its
    topics are registered.
    """

    group: Text
    member_id: Text = ""
    topics: tuple[TopicSelection, ...] = ()
    pattern: Text = ""
    instance: Text = ""
    rack: Text = ""
    session_timeout_ms: Number = 10_000
    start: StartFrom = StartFrom.EARLIEST
    group_kind: GroupKind = GroupKind.STREAM
    client: Text = ""
    takes_over: bool = False
    """Whether the principal may use a group that another one owns."""


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """A member of a group, by id."""

    group_id: ConsumerId
    member_id: Text


class RemoveMembers(Command[CommandDone], frozen=True, tag="remove_members"):
    """Remove members that left or expired; their partitions are free. Members that are gone are no error."""

    members: tuple[GroupMember, ...]
    reason: Text = "left"


class PartitionGrant(msgspec.Struct, frozen=True, array_like=True):
    """A partition that a member gets."""

    member_id: Text
    topic_id: TopicId
    partition_id: PartitionNumber


class GroupPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition of a group."""

    topic_id: TopicId
    partition_id: PartitionNumber


class AssignPartitions(Command[CommandDone], frozen=True, tag="assign_partitions"):
    """Give free partitions to members, ask members for partitions, drop those that do not exist any more.

    Refused as a whole if the group is at another version, or one of the items is not possible.
    """

    group_id: ConsumerId
    version: Number
    grants: tuple[PartitionGrant, ...] = ()
    revokes: tuple[GroupPartition, ...] = ()
    drops: tuple[GroupPartition, ...] = ()
    reason: Text = ""
    """Empty: what the metadata says already."""


class PartitionRelease(msgspec.Struct, frozen=True, array_like=True):
    """A partition that a member does not use any more, and the epoch of its use."""

    group_id: ConsumerId
    member_id: Text
    topic_id: TopicId
    partition_id: PartitionNumber
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class ReleasePartitions(Command[CommandDone], frozen=True, tag="release_partitions"):
    """Free partitions that members have released; what is not owned with that epoch is ignored."""

    releases: tuple[PartitionRelease, ...]


class ConfigureGroupCommand(Command[RegisterConsumerResult], frozen=True, tag="configure_group"):
    """Change the settings of a group; with topics, create it or register further topics."""

    group: Text
    topics: tuple[TopicSelection, ...] = ()
    start: StartFrom = StartFrom.EARLIEST
    group_kind: GroupKind | None = None
    settings: QueueSettings | None = None
    takes_over: bool = False


class DeleteGroupCommand(Command[CommandDone], frozen=True, tag="delete_group"):
    """Delete a group with its consumer; refused while it has members, unless it is forced."""

    group: Text
    is_forced: bool = False


class RestartGroupCommand(Command[RestartGroupResult], frozen=True, tag="restart_group"):
    """Take all partitions of a group from its members at once; none is given again for `pause_ms`."""

    group: Text
    pause_ms: Number = 0


GroupCommand = (
    JoinGroupCommand
    | RemoveMembers
    | AssignPartitions
    | ReleasePartitions
    | ConfigureGroupCommand
    | DeleteGroupCommand
    | RestartGroupCommand
)
"""Commands on consumer groups."""
