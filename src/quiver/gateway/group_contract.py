"""The HTTP contract of consumer groups, as structs; see `contract` for the rules."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.gateway.contract import NUMBER_MAX, Answer, Id, Name, Number, Parameters, Shared, TopicName
from quiver.groups.settings import (
    ATTEMPTS_MAX,
    DELAY_MS_MAX,
    IN_FLIGHT_MAX,
    LEASE_MS_MAX,
    MULTIPLIER_MAX,
    QueueOrder,
)

DelayMs = Annotated[int, Meta(ge=0, le=DELAY_MS_MAX)]
GroupName = Annotated[Name, Meta(description="The name of the group, which is that of its consumer.")]


class GroupQuery(Parameters, frozen=True):
    """A group, in the path."""

    group: GroupName


class GroupsQuery(Parameters, frozen=True):
    """All groups."""

    shared: Shared = False


class GroupDetailQuery(GroupQuery, frozen=True):
    """A group that is described."""

    shared: Shared = False


class GroupDeleteQuery(GroupQuery, frozen=True):
    """A group to delete."""

    force: Annotated[bool, Meta(description="Also while it has members, which then fail.")] = False


class GroupLagQuery(GroupQuery, frozen=True):
    """A group whose lag is shown."""

    topic: Annotated[TopicName | None, Meta(description="Default: all topics of the group.")] = None
    shared: Shared = False


class GroupResetBody(GroupQuery, frozen=True):
    """Where a group's cursors are moved to."""

    to: Annotated[Literal["earliest", "latest"] | None, Meta(description="The first record, or the end.")] = None
    offset: Annotated[Id | None, Meta(description="This offset, in each partition.")] = None
    timestamp: Annotated[Number | None, Meta(description="The first record since then, in milliseconds.")] = None
    shift: Annotated[
        Annotated[int, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)] | None,
        Meta(description="A number of records, negative to go back; cut off at the partition's bounds."),
    ] = None
    topic: Annotated[TopicName | None, Meta(description="Default: all topics of the group.")] = None
    partition_id: Annotated[Id | None, Meta(description="With `topic`: only this partition.")] = None
    dry_run: Annotated[bool, Meta(description="Answer what would be done, and do nothing.")] = False
    force: Annotated[bool, Meta(description="Also while members are active; they continue at the new cursors.")] = False


class GroupItem(msgspec.Struct, frozen=True, kw_only=True):
    """A group."""

    group: str
    group_id: Annotated[int, Meta(description="The id of its consumer.")]
    kind: Literal["stream", "queue"]
    state: Annotated[
        Literal["empty", "stable", "rebalancing", "paused", "queue"],
        Meta(description="`rebalancing`: partitions are free or being taken from a member."),
    ]
    topics: list[str]
    members: Annotated[int, Meta(description="Number of members.")]
    partitions: Annotated[int, Meta(description="Partitions that its members subscribe to.")]
    unassigned: Annotated[int, Meta(description="Those that no member has.")]
    rebalances: int
    last_rebalance_ms: Annotated[int | None, Meta(description="Time of the last rebalance.")]
    last_rebalance_reason: str
    dead_letter_topics: Annotated[
        dict[str, str], Meta(description="Of a work queue: where the dead letters of each of its topics go.")
    ]


class GroupsAnswer(Answer, frozen=True):
    """All groups, sorted by name; a named consumer is a group of one."""

    groups: list[GroupItem]


class OwnedPartitionItem(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of a member."""

    topic: str
    partition_id: int
    epoch: Annotated[str, Meta(description="Grows with each owner; as text, since it has up to 63 bits.")]
    state: Annotated[Literal["owned", "revoking"], Meta(description="`revoking`: another member gets it next.")]


class MemberItem(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a group."""

    member_id: str
    instance: Annotated[str | None, Meta(description="Its name, if it is a static member.")]
    rack: str | None
    client: Annotated[str, Meta(description="Its host and process id.")]
    principal: str | None
    topics: list[str]
    pattern: str | None
    session_timeout_ms: int
    joined_ms: int
    partitions: list[OwnedPartitionItem]


class GroupAnswer(Answer, frozen=True):
    """A group with its members and what each has."""

    group: GroupItem
    members: list[MemberItem]


class GroupLagItem(msgspec.Struct, frozen=True, kw_only=True):
    """A group's cursor and lag in a partition."""

    topic: str
    partition_id: int
    cursor: int
    first_offset: int
    end_offset: int
    lag: Annotated[int, Meta(description="Records that the group has not consumed yet.")]
    member_id: Annotated[str | None, Meta(description="The member that has the partition.")]


class GroupLagAnswer(Answer, frozen=True):
    """A group's lag, in total and in each partition."""

    lag: int
    partitions: list[GroupLagItem]


class QueueSettingsItem(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a work queue, the same for all its workers."""

    lease_ms: int
    max_attempts: Annotated[int, Meta(description="Deliveries after which a job is a dead letter; 0: no limit.")]
    backoff_ms: Annotated[int, Meta(description="Delay before the first retry.")]
    backoff_multiplier: float
    backoff_max_ms: int
    in_flight_max: Annotated[int, Meta(description="Most jobs under way in a partition.")]
    order: Literal["offset", "key"]


class QueueSettingsBody(GroupQuery, frozen=True):
    """New settings of a work queue; jobs that are leased keep their leases."""

    lease_ms: Annotated[
        Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)] | None, Meta(description="How long a job belongs to its worker.")
    ] = None
    max_attempts: Annotated[
        Annotated[int, Meta(ge=0, le=ATTEMPTS_MAX)] | None,
        Meta(description="Deliveries after which a job is a dead letter; 0: no limit."),
    ] = None
    backoff_ms: Annotated[DelayMs | None, Meta(description="Delay before the first retry.")] = None
    backoff_max_ms: Annotated[DelayMs | None, Meta(description="Longest delay before a retry.")] = None
    backoff_multiplier: Annotated[
        Annotated[float, Meta(ge=1.0, le=MULTIPLIER_MAX)] | None, Meta(description="Factor by which the delay grows.")
    ] = None
    in_flight_max: Annotated[
        Annotated[int, Meta(ge=1, le=IN_FLIGHT_MAX)] | None, Meta(description="Most jobs under way in a partition.")
    ] = None
    order: Annotated[QueueOrder | None, Meta(description="`key`: one job of a key at a time.")] = None
    dead_letter_topic: Annotated[
        TopicName | Literal[""] | None, Meta(description="Topic of dead letters; empty: TOPIC.GROUP.dead.")
    ] = None


class QueuePartitionItem(msgspec.Struct, frozen=True, kw_only=True):
    """What a work queue has in a partition, as its leader reports it."""

    topic: str
    partition_id: int
    ready: Annotated[int, Meta(description="Jobs that the next worker gets.")]
    leased: Annotated[int, Meta(description="Jobs that workers have.")]
    waiting: Annotated[int, Meta(description="Jobs that are delayed or wait for a retry.")]
    dying: Annotated[int, Meta(description="Jobs on their way to the dead letters.")]
    cursor: Annotated[int, Meta(description="The first offset that is not settled.")]
    next_offset: Annotated[int, Meta(description="The first offset that was never delivered.")]
    end_offset: int
    stall: Annotated[
        str,
        Meta(
            description="Why nothing can be received now: empty, in_flight_max, waiting or key_order; or it is empty."
        ),
    ]


class QueueAnswer(Answer, frozen=True):
    """A work queue: its settings, and what it has in each partition."""

    settings: QueueSettingsItem
    partitions: list[QueuePartitionItem]


class CursorItem(msgspec.Struct, frozen=True, kw_only=True):
    """A cursor that was moved, or would be."""

    topic: str
    partition_id: int
    before: int
    after: int
    end_offset: int
    lag: int


class GroupResetAnswer(Answer, frozen=True):
    """The cursors before and after."""

    cursors: list[CursorItem]
