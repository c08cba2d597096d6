"""The coordinator of all consumer groups, on the primary: heartbeats in, membership and assignment out, as commands.

Members, their partitions and epochs are metadata: a new primary continues where the last one stopped, without a
rebalance. In memory are only signs of life (`group_liveness`), and which groups are to be looked at again. Heartbeats
that wait for a new assignment do so on the nodes that received them (`assignment_waiters`).

A group is planned again when its members or its topics change, or a partition becomes free, after a short time in which
further changes are gathered: a thousand members that join together lead to a few plans. What the coordinator's own
commands give and ask back leads to none (`group_plan.is_member_planned`). The plan's commands name the version of the
group that they were computed for; one that is refused was planned from stale metadata and is planned again.

Only the primary runs it: `run` lasts for one term of leadership.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from quiver.clock import Clock
from quiver.errors import OutcomeUnknownError, QuiverError, RequestError, UnavailableError
from quiver.logs import facts
from quiver.manager.group_liveness import GroupLiveness, MemberKey
from quiver.manager.group_plan import (
    count_unassigned,
    find_member,
    is_group_planned,
    is_member_planned,
    plan_commands,
    plan_group,
)
from quiver.metadata import (
    Command,
    CommandDone,
    GroupKind,
    GroupMember,
    GroupMemberRow,
    GroupRow,
    MetadataStore,
    NotPrimaryError,
    PartitionRelease,
    ReleasePartitions,
    RemoveMembers,
    RestartGroupCommand,
    Table,
    View,
    WatchEvent,
)
from quiver.model import ConsumerId, Index, TopicId
from quiver.security.identity import ConnectionIdentity
from quiver.security.permissions import ResourceKind, Verb
from quiver.tasks import SharedOutcome, timeout
from quiver.wire.group_messages import GroupHeartbeat

logger = logging.getLogger(__name__)

CHECK_MS = 100
"""Interval at which silent members are looked for."""
STALL_MS = 250
"""Delay of a check from which on this process itself counts as stalled."""
GATHER_MS = 30
"""How long no further change must come before groups are planned."""
GATHER_MS_MAX = 300
"""How long changes are gathered at most."""
RETRY_MS = 200
"""Delay before groups are planned again whose commands could not be submitted."""
PATTERNS_MS = 5_000
"""Interval at which groups with patterns are planned again: members may read other topics by then."""
BATCH_MAX = 5_000
"""Most releases, or removed members, in one command."""
GROUPS_MAX = 200
"""Most groups that have metrics of their own."""

T = TypeVar("T")
_STALE = ("group_changed", "bad_assignment")
"""Refusals of a plan that was made from stale metadata."""
_REASONS = ("joined", "left", "expired", "came back", "restarted", "topics")
"""The kinds of reasons that are counted; each is a label of a metric."""


class CommandBatcher(Generic[T]):
    """Puts what many requests want into few commands: while one is submitted, the next is gathered."""

    def __init__(self, store: MetadataStore, build: Callable[[tuple[T, ...]], Command[CommandDone]]) -> None:
        self._store = store
        self._build = build
        self._items: list[T] = []
        self._outcome: SharedOutcome[None] = SharedOutcome()
        self._added = asyncio.Event()

    async def submit(self, items: Iterable[T]) -> None:
        """Add items; return when they are in the metadata; raises as `MetadataStore.submit`."""
        self._items += items
        self._added.set()
        await self._outcome

    async def run(self) -> None:
        """Submit what is added, until cancelled."""
        while True:
            await self._added.wait()
            items, self._items = self._items, []
            outcome, self._outcome = self._outcome, SharedOutcome()
            self._added.clear()
            try:
                await self._submit_parts(items)
            except QuiverError as error:
                outcome.reject(error)
            except BaseException:
                outcome.reject(OutcomeUnknownError("may have been done: this manager is not the primary any more"))
                raise
            else:
                outcome.resolve(None)

    async def _submit_parts(self, items: Sequence[T]) -> None:
        for first in range(0, len(items), BATCH_MAX):
            try:
                await self._store.submit(self._build(tuple(items[first : first + BATCH_MAX])))
            except QuiverError as error:
                if first and not isinstance(error, OutcomeUnknownError):
                    raise OutcomeUnknownError(f"may have been done, in part: {error.message}") from error
                raise

    def close(self) -> None:
        """Refuse what was not submitted."""
        self._outcome.reject(NotPrimaryError("not done: this manager is not the primary any more"))


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One group with members, for metrics."""

    group: str
    members: int
    unassigned: int
    """Partitions that members subscribe to and nobody owns."""
    version: int
    """The version of its assignment."""
    rebalances: int
    last_rebalance_ms: int


class GroupsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the groups of a cluster; only the primary knows all of it."""

    groups: int = 0
    members: int = 0
    assigned: int = 0
    """Partitions that members own."""
    unassigned: int = 0
    """Partitions that members subscribe to and nobody owns."""
    revoking: int = 0
    """Partitions that members were asked to release."""
    rebalances: tuple[tuple[str, int], ...] = ()
    """How often this primary gave or took partitions, by reason."""
    largest: tuple[GroupStatus, ...] = ()
    """The groups with members, those with the most of them only."""


class GroupCoordinator:
    """The primary's work for groups, for one term."""

    def __init__(self, store: MetadataStore, *, clock: Clock, note_alive: Callable[[ConsumerId], None]) -> None:
        """`note_alive` is called with a group when one of its members shows life: it does not expire."""
        self._store = store
        self._clock = clock
        self._note_alive = note_alive
        self._liveness = GroupLiveness(clock)
        self._identities: dict[MemberKey, ConnectionIdentity] = {}
        """Who sent the last heartbeat of each member with a pattern: it decides which topics match."""
        self._members: dict[MemberKey, GroupMemberRow] = {}
        """The members as the last change had them; what is different in the next one decides whether to plan."""
        self._groups: dict[ConsumerId, GroupRow] = {}
        """The groups, likewise."""
        self._planned: dict[ConsumerId, tuple[frozenset[str], tuple[tuple[TopicId, int], ...]]] = {}
        """The members, topics and numbers of partitions that this primary last planned each group for."""
        self._pauses: dict[ConsumerId, tuple[int, int]] = {}
        """Paused groups: the version that the pause began with, and when it ends by the monotonic clock."""
        self._stale: set[ConsumerId] = set()
        self._changed = asyncio.Event()
        self._is_over = False
        self._releases = CommandBatcher[PartitionRelease](store, self._release_command)
        self._removals: dict[str, CommandBatcher[GroupMember]] = {
            reason: CommandBatcher(store, partial(self._remove_command, reason)) for reason in ("left", "expired")
        }
        self._rebalances: Counter[str] = Counter()

    async def run(self) -> None:
        """Coordinate until cancelled."""
        view = self._store.view()
        self._restart(view)
        batchers: tuple[CommandBatcher[Any], ...] = (self._releases, *self._removals.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(view.index))
                tasks.create_task(self._expire())
                tasks.create_task(self._plan())
                tasks.create_task(self._plan_patterns())
                for batcher in batchers:
                    tasks.create_task(batcher.run())
        finally:
            self._is_over = True
            for batcher in batchers:
                batcher.close()

    def status(self) -> GroupsStatus:
        """Return a snapshot for people and metrics."""
        view = self._store.view()
        members, sizes = view.group_members.values(), Counter(group_id for group_id, _ in view.group_members)
        unassigned = {group_id: count_unassigned(view, view.members_of(group_id))[1] for group_id in sizes}
        return GroupsStatus(
            groups=len(view.consumer_groups),
            members=len(members),
            assigned=sum(len(member.owned) for member in members),
            unassigned=sum(unassigned.values()),
            revoking=sum(one.is_revoking for member in members for one in member.owned),
            rebalances=tuple((reason, self._rebalances[reason]) for reason in _REASONS),
            largest=tuple(
                _describe(view, group_id, size, unassigned[group_id])
                for group_id, size in sizes.most_common(GROUPS_MAX)
            ),
        )

    # -- requests --------------------------------------------------------------------------------

    def handle_joined(self, key: MemberKey, identity: ConnectionIdentity) -> None:
        """Count a join as a sign of life."""
        self._liveness.hear(key)
        self._note_alive(key[0])
        self._note_identity(key, identity)

    async def handle_heartbeat(
        self, request: GroupHeartbeat, identity: ConnectionIdentity
    ) -> tuple[View, GroupMemberRow]:
        """Record a sign of life and what was released; return the member, and the view it is from.

        Raises:
            NotFoundError: not done; it is no member (`unknown_member`).
            FencedError: not done; another process has joined with its instance name (`member_replaced`).
            NotPrimaryError: not done; this manager is not the primary any more.
            QuiverError: as `MetadataStore.submit`; the released partitions may not be free.
        """
        key = (request.group_id, request.member_id)
        self._find(key)
        self.handle_joined(key, identity)
        if request.released:
            await self._releases.submit(
                PartitionRelease(*key, one.topic_id, one.partition_id, one.epoch) for one in request.released
            )
        return self._find(key)

    async def handle_leave(self, key: MemberKey) -> None:
        """Remove a member, if it is one; raises as `MetadataStore.submit`."""
        if key in self._store.view().group_members:
            await self._removals["left"].submit((GroupMember(*key),))

    def _find(self, key: MemberKey) -> tuple[View, GroupMemberRow]:
        if self._is_over or not self._store.is_primary:
            raise NotPrimaryError("not done: this manager is not the primary", leader=self._store.primary)
        return find_member(self._store.view(), key)

    def _note_identity(self, key: MemberKey, identity: ConnectionIdentity) -> None:
        member = self._store.view().group_members.get(key)
        if member is not None and member.pattern:
            is_new = key not in self._identities
            self._identities[key] = identity
            if is_new:
                self._mark((key[0],))

    # -- changes of the metadata ------------------------------------------------------------------

    async def _watch(self, after_index: Index) -> None:
        async for changed in self._store.watch(after_index):
            self._handle_changes(changed)

    def _handle_changes(self, changed: WatchEvent) -> None:
        if changed.view is not None:
            self._restart(changed.view)
            return
        for change in changed.changes:
            if change.table is Table.GROUP_MEMBERS:
                row = change.row
                assert row is None or isinstance(row, GroupMemberRow)
                self._handle_member(change.key, row)
            elif change.table is Table.CONSUMER_GROUPS:
                assert change.row is None or isinstance(change.row, GroupRow)
                self._handle_group(change.key, change.row)
            elif change.table is Table.TOPICS:
                self._mark(self._store.view().consumer_groups)

    def _handle_member(self, key: MemberKey, row: GroupMemberRow | None) -> None:
        self._liveness.keep(key, row)
        if is_member_planned(self._members.get(key), row):
            self._mark((key[0],))
        if row is None:
            self._members.pop(key, None)
            self._identities.pop(key, None)
        else:
            self._members[key] = row

    def _handle_group(self, group_id: ConsumerId, row: GroupRow | None) -> None:
        self._note_pause(group_id, row)
        if is_group_planned(self._groups.get(group_id), row):
            self._mark((group_id,))
        if row is None:
            self._groups.pop(group_id, None)
        else:
            self._groups[group_id] = row

    def _restart(self, view: View) -> None:
        """Begin with a whole view."""
        self._members, self._groups = dict(view.group_members), dict(view.consumer_groups)
        self._liveness.keep_all(view.group_members)
        for group_id, group in sorted(view.consumer_groups.items()):
            self._note_pause(group_id, group)
        self._mark(view.consumer_groups)

    def _note_pause(self, group_id: ConsumerId, group: GroupRow | None) -> None:
        if group is None or not group.pause_ms:
            self._pauses.pop(group_id, None)
        elif self._pauses.get(group_id, (None,))[0] != group.version:
            self._pauses[group_id] = (group.version, self._clock.monotonic_ms() + group.pause_ms)

    def _mark(self, groups: Iterable[ConsumerId]) -> None:
        """Plan these groups again, soon."""
        self._stale.update(groups)
        self._changed.set()

    # -- silence ---------------------------------------------------------------------------------

    async def _expire(self) -> None:
        """Remove silent members, and end pauses, until cancelled."""
        while True:
            checked_ms = self._clock.monotonic_ms()
            await asyncio.sleep(CHECK_MS / 1000)
            stalled_ms = self._clock.monotonic_ms() - checked_ms - CHECK_MS
            if stalled_ms >= STALL_MS:
                self._liveness.ignore_stall(stalled_ms)
            silent = self._liveness.find_silent()
            if silent:
                await self._remove_silent(silent)
            await self._end_pauses()

    async def _remove_silent(self, silent: Sequence[MemberKey]) -> None:
        logger.info("members of groups expired", extra=facts(members=len(silent), first=silent[0][1]))
        try:
            await self._removals["expired"].submit(GroupMember(*key) for key in silent)
        except QuiverError as error:
            logger.debug("members not removed yet", extra=facts(code=error.code))

    async def _end_pauses(self) -> None:
        now_ms, view = self._clock.monotonic_ms(), self._store.view()
        for group_id in [group_id for group_id, (_, end_ms) in sorted(self._pauses.items()) if end_ms <= now_ms]:
            consumer = view.consumers.get(group_id)
            if consumer is None:
                self._pauses.pop(group_id)
                continue
            command = RestartGroupCommand(now_ms=self._clock.wall_ms(), group=consumer.request_id)
            try:
                await self._store.submit(command)
            except QuiverError as error:
                logger.debug("pause not ended yet", extra=facts(group=consumer.request_id, code=error.code))

    # -- assignment ------------------------------------------------------------------------------

    async def _plan(self) -> None:
        """Plan the groups that changed, until cancelled."""
        while True:
            await self._changed.wait()
            await self._gather()
            self._changed.clear()
            groups, self._stale = sorted(self._stale), set()
            for group_id in groups:
                if not await self._plan_group(group_id):
                    self._stale.add(group_id)
                await asyncio.sleep(0)  # most groups need nothing, and there may be thousands
            if self._stale:
                await asyncio.sleep(RETRY_MS / 1000)
                self._changed.set()

    async def _plan_patterns(self) -> None:
        while True:
            await asyncio.sleep(PATTERNS_MS / 1000)
            self._mark(sorted({group_id for group_id, _ in self._identities}))

    async def _gather(self) -> None:
        """Wait until no further change comes, but not for long."""
        end_ms = self._clock.monotonic_ms() + GATHER_MS_MAX
        while True:
            self._changed.clear()
            try:
                async with timeout(GATHER_MS / 1000):
                    await self._changed.wait()
            except TimeoutError:
                return
            if self._clock.monotonic_ms() >= end_ms:
                return

    async def _plan_group(self, group_id: ConsumerId) -> bool:
        """Submit the next steps of a group; return whether that is done, or there are none."""
        view = self._store.view()
        group, members = view.consumer_groups.get(group_id), view.members_of(group_id)
        if group is None or not members:
            self._planned.pop(group_id, None)
            return True
        if group.kind is not GroupKind.STREAM or group.pause_ms:
            return True
        steps, topics = plan_group(view, members, partial(self._may_read, view))
        names = frozenset(member.member_id for member in members)
        before, self._planned[group_id] = self._planned.get(group_id), (names, topics)
        is_topical = before is not None and before[0] == names and before[1] != topics
        reason = "topics changed" if is_topical else ""  # else the metadata has the reason
        for command in plan_commands(group, steps, now_ms=self._clock.wall_ms(), reason=reason):
            if not await self._submit(command):
                return False
            self._count(reason or group.reason)
            given, taken = len(command.grants), len(command.revokes) + len(command.drops)
            known = facts(group=group_id, given=given, taken=taken, reason=reason or group.reason)
            logger.info("group rebalanced", extra=known)
        return True

    def _may_read(self, view: View, member: GroupMemberRow, topic_id: TopicId) -> bool:
        """Return whether a member may read a topic that its pattern matches.

        Of a member that this primary has not heard yet, only that it may read what it has.
        """
        identity = self._identities.get(member.key)
        if identity is None:
            return any(one.topic_id == topic_id for one in member.owned)
        return identity.allows(Verb.READ, ResourceKind.TOPIC, view.topics[topic_id].name)

    def _count(self, reason: str) -> None:
        self._rebalances[next((known for known in _REASONS if known in reason), "topics")] += 1

    async def _submit(self, command: Command[CommandDone]) -> bool:
        try:
            await self._store.submit(command)
        except (RequestError, UnavailableError, OutcomeUnknownError) as error:
            level = logging.DEBUG if error.code in _STALE or not isinstance(error, RequestError) else logging.WARNING
            logger.log(level, "assignment not done", extra=facts(code=error.code, reason=error.message))
            return False
        return True

    # -- commands --------------------------------------------------------------------------------

    def _release_command(self, releases: tuple[PartitionRelease, ...]) -> Command[CommandDone]:
        return ReleasePartitions(now_ms=self._clock.wall_ms(), releases=releases)

    def _remove_command(self, reason: str, members: tuple[GroupMember, ...]) -> Command[CommandDone]:
        return RemoveMembers(now_ms=self._clock.wall_ms(), members=members, reason=reason)


def _describe(view: View, group_id: ConsumerId, members: int, unassigned: int) -> GroupStatus:
    row = view.consumer_groups[group_id]
    return GroupStatus(
        group=view.consumers[group_id].request_id,
        members=members,
        unassigned=unassigned,
        version=row.version,
        rebalances=row.rebalances,
        last_rebalance_ms=row.last_rebalance_ms,
    )
