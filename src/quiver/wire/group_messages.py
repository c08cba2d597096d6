"""Requests of consumer groups: membership, assignment, administration. Pure.

A group is a named consumer: its name is the consumer's name, its id is the consumer's id, and its cursors are that
consumer's cursors. Members share the partitions of the topics that they subscribe to. The primary is the coordinator of
every group; any node forwards these requests to it.

The life of a member: `JoinGroup` with an id of its own making, then `GroupHeartbeat` again and again. Each answer says
which partitions the member has (`owned`) and which of them it must give up (`revoking`). The *epoch* of an owned
partition is the session under which the member moves the group's cursor and fetches there (`MoveCursor.session`,
`Fetch.reader`); a later owner has a higher epoch, and once that one has begun, every earlier one is refused as `fenced`
by the partition itself. A member that has stopped to use a partition, and has committed its position, names it in
`released`. `LeaveGroup` releases all.

A group of kind `queue` has no members: any worker may receive from any of its partitions. Joining one only registers
its topics.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.groups.limits import PAUSE_MS_MAX, SESSION_TIMEOUT_MS, TOPICS_MAX
from quiver.groups.settings import QueueOrder, QueueSettings
from quiver.model import ConsumerId, Index, TopicId
from quiver.wire.requests import RESULTS_MAX, Count, Done, Name, PartitionNumber, Request, Response, Session

HEARTBEATS_PER_TIMEOUT = 3
"""Heartbeats that a member sends, at least, in the time after which it counts as dead."""
HEARTBEAT_WAIT_MS_MAX = 10_000
"""Longest time that a heartbeat waits for a new assignment, whatever it asks for."""
GROUPS_DESCRIBED_MAX = 1_000
"""Most groups that one `DescribeGroups` names."""

GroupKind = Literal["stream", "queue"]
MemberId = Annotated[str, Meta(max_length=64)]
"""A member's id, chosen by the member, such as a random number in hexadecimal; a new one for every process."""
Start = Literal["earliest", "latest"]


class PartitionEpoch(msgspec.Struct, frozen=True, array_like=True):
    """A partition, and the epoch under which a member has or had it."""

    topic_id: TopicId
    partition_id: PartitionNumber
    epoch: Session


class AssignedPartition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partition that a member owns, and the session with which it uses it."""

    topic: str
    topic_id: TopicId
    partition_id: PartitionNumber
    epoch: Session
    start: Start = "earliest"
    """Where the group begins if it has no cursor in the partition yet."""


class GroupJoined(Response, frozen=True):
    """The group that was joined; the first assignment comes with a heartbeat."""

    group_id: ConsumerId
    index: Index
    heartbeat_ms: int
    """Time after which the member sends a heartbeat at the latest; 0 for a queue, which has no members."""


class JoinGroup(Request[GroupJoined], frozen=True, tag="join_group"):
    """Become a member of a group, which is created if it does not exist; repeat it to change the subscription.

    A member that is told `unknown_member` joins again, under the same id or a new one.
    """

    response = GroupJoined
    _idempotent = True

    group: Name
    topics: Annotated[tuple[Name, ...], Meta(max_length=TOPICS_MAX)] = ()
    pattern: Name = ""
    """Subscribe to the topics whose names match it, also those that are created later: `*` stands for any text, `?` for
    one character. Topics that the member may not read are left out."""
    member_id: MemberId = ""
    """Required unless the group is a queue."""
    instance: Name = ""
    """A name that outlives the process (static membership): the member takes over the partitions of the one that had
    the same instance name before, and no other partition moves."""
    rack: Name = ""
    """Partitions whose leader is in this rack are preferred, as far as balance allows."""
    session_timeout_ms: Count = SESSION_TIMEOUT_MS
    """Time without a heartbeat after which the member loses its partitions."""
    start: Start = "earliest"
    """Where the group begins in partitions in which it has no cursor yet."""
    kind: GroupKind = "stream"
    client: Name = ""
    """Describes the process for people, such as its host and process id."""


class GroupAssignment(Response, frozen=True):
    """A member's partitions. `version` changes whenever they do."""

    version: Count
    owned: tuple[AssignedPartition, ...] = ()
    """Partitions that the member may use; those that are in `revoking` are not repeated here."""
    revoking: tuple[AssignedPartition, ...] = ()
    """Partitions that it still owns and must release: finish, commit, stop, and name them in the next heartbeat."""
    index: Index = Index(0)
    """The metadata index of the assignment."""


class GroupHeartbeat(Request[GroupAssignment], frozen=True, tag="group_heartbeat"):
    """Show that a member lives; answered with its assignment, at once if that is newer than the one it has `seen`.

    Otherwise the node that received it waits for a new one for up to `wait_ms`. Refused as `unknown_member` if the
    member expired or left: it has no partitions any more and joins again. Refused as `member_replaced` if another
    process joined with its instance name.
    """

    response = GroupAssignment
    _idempotent = True

    group_id: ConsumerId
    member_id: MemberId
    seen: Count = 0
    """The version of the last answer; 0 before the first."""
    released: Annotated[tuple[PartitionEpoch, ...], Meta(max_length=RESULTS_MAX)] = ()
    """Partitions that the member does not use any more; one with another epoch than the current one is ignored."""
    wait_ms: Count = 0


class LeaveGroup(Request[Done], frozen=True, tag="leave_group"):
    """Leave a group; all partitions of the member are free at once. A member that is gone is no error."""

    response = Done
    _idempotent = True

    group_id: ConsumerId
    member_id: MemberId


class GroupMemberInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member of a group."""

    member_id: str
    instance: str = ""
    rack: str = ""
    client: str = ""
    principal: str = ""
    topics: tuple[str, ...] = ()
    pattern: str = ""
    session_timeout_ms: int = SESSION_TIMEOUT_MS
    joined_ms: int = 0
    version: int = 0
    owned: tuple[AssignedPartition, ...] = ()
    revoking: tuple[AssignedPartition, ...] = ()


class QueueSettingsChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New settings of a queue, as in `QueueSettings`; None leaves a setting as it is."""

    lease_ms: Count | None = None
    max_attempts: Count | None = None
    backoff_ms: Count | None = None
    backoff_max_ms: Count | None = None
    backoff_multiplier: float | None = None
    in_flight_max: Count | None = None
    order: QueueOrder | None = None
    dead_letter_topic: Name | None = None


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group; a named consumer that never had members is one, too."""

    group: str
    group_id: ConsumerId
    kind: GroupKind = "stream"
    state: Literal["empty", "stable", "rebalancing", "paused", "queue"] = "empty"
    """`rebalancing`: partitions are free or being taken from a member; `paused`: by `RestartGroup`."""
    topics: tuple[str, ...] = ()
    """The topics that the group is registered for."""
    version: int = 0
    """Changes when members lose or get partitions."""
    member_count: int = 0
    members: tuple[GroupMemberInfo, ...] = ()
    """Empty if they were not asked for."""
    partitions: int = 0
    """Partitions that its members subscribe to."""
    unassigned: int = 0
    """Those of them that no member owns."""
    rebalances: int = 0
    """How often partitions were given or taken."""
    last_rebalance_ms: int = 0
    last_rebalance_reason: str = ""
    settings: QueueSettings | None = None
    """Of a queue."""


class GroupsFound(Response, frozen=True):
    """Groups, sorted by name."""

    groups: tuple[GroupInfo, ...] = ()
    index: Index = Index(0)
    """The metadata index that they are of: a leader that has not applied it may not know them yet."""


class DescribeGroups(Request[GroupsFound], frozen=True, tag="describe_groups"):
    """Return groups by name, or all; names that do not exist are left out."""

    response = GroupsFound
    is_read = True
    waits_for_index = True

    groups: Annotated[tuple[Name, ...], Meta(max_length=GROUPS_DESCRIBED_MAX)] | None = None
    with_members: bool = True


class GroupConfigured(Response, frozen=True):
    """The group that was created or changed."""

    group_id: ConsumerId
    index: Index


class ConfigureGroup(Request[GroupConfigured], frozen=True, tag="configure_group"):
    """Change a group's settings; with `topics`, create it if it does not exist, or register further topics for it."""

    response = GroupConfigured
    waits_for_index = True  # the owner of a group decides, and a node that does not know the group knows none
    _idempotent = True

    group: Name
    kind: GroupKind | None = None
    """The kind of a new group; refused as `group_kind` if the group is of another kind and was used as that."""
    topics: Annotated[tuple[Name, ...], Meta(max_length=TOPICS_MAX)] = ()
    start: Start = "earliest"
    settings: QueueSettingsChange = QueueSettingsChange()


class DeleteGroup(Request[Done], frozen=True, tag="delete_group"):
    """Delete a group with its cursors; refused as `group_active` while it has members, unless it is forced."""

    response = Done
    waits_for_index = True
    _repeatable = False

    group: Name
    is_forced: bool = False


class GroupRestarted(Response, frozen=True):
    """The group has lost all its partitions; members get them again with higher epochs than `session`."""

    group_id: ConsumerId
    session: Session
    """Higher than all epochs and sessions before it: who moves the group's cursors with it fences them."""
    index: Index


class RestartGroup(Request[GroupRestarted], frozen=True, tag="restart_group"):
    """Take all partitions of a group from its members without waiting for them; they stay members.

    To reset cursors while members are active: restart with a pause, move the cursors with the answer's session, and
    restart without a pause, which ends the first one.
    """

    response = GroupRestarted
    waits_for_index = True

    group: Name
    pause_ms: Annotated[int, Meta(ge=0, le=PAUSE_MS_MAX)] = 0
    """Time for which no partition is given to a member."""


GroupRequest = JoinGroup | GroupHeartbeat | LeaveGroup | DescribeGroups | ConfigureGroup | DeleteGroup | RestartGroup
