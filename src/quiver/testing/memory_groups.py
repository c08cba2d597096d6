"""The coordinator of consumer groups of a `MemoryCluster`: members, assignments, epochs; no failover.

It keeps what members rely on: a partition has one owner, is taken from it before it is given to the next, and gets a
higher epoch each time; a silent member expires; the share of members differs by at most one where their topics allow
it. Which partitions move is not what the real coordinator decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quiver.clock import Clock
from quiver.errors import ConflictError, FencedError, NotFoundError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId, Index, PartitionId
from quiver.tasks import timeout
from quiver.wire import group_messages as wire
from quiver.wire.messages import Consume, ConsumeMany, MoveCursor
from quiver.wire.requests import Done, Response

if TYPE_CHECKING:
    from quiver.testing.memory_cluster import MemoryCluster

EPOCH_BITS: Final = 20
"""Bits below the metadata index in an epoch, as sessions of named consumers have them."""
Place = tuple[str, PartitionId]


@dataclass(slots=True)
class MemoryMember:
    """A member and what it owns."""

    request: wire.JoinGroup
    seen_ms: int
    version: int = 1
    owned: dict[Place, wire.AssignedPartition] = field(default_factory=dict)
    revoking: set[Place] = field(default_factory=set)

    @property
    def expires_ms(self) -> int:
        """When it expires unless it shows a sign of life."""
        return self.seen_ms + self.request.session_timeout_ms

    def answer(self, index: int) -> wire.GroupAssignment:
        """Return its assignment."""
        return wire.GroupAssignment(
            version=self.version,
            owned=tuple(one for place, one in self.owned.items() if place not in self.revoking),
            revoking=tuple(one for place, one in self.owned.items() if place in self.revoking),
            index=Index(index),
        )


@dataclass(slots=True)
class MemoryGroup:
    """A group and its members."""

    group_id: ConsumerId
    kind: wire.GroupKind = "stream"
    settings: QueueSettings = field(default_factory=QueueSettings)
    members: dict[str, MemoryMember] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    """Members whose instance names others have now."""
    version: int = 1
    paused_until_ms: int = 0
    rebalances: int = 0
    last_rebalance_ms: int = 0
    reason: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryGroups:
    """All groups of a cluster in memory."""

    def __init__(self, cluster: MemoryCluster, clock: Clock, register: Callable[[str, tuple[str, ...]], Any]) -> None:
        """Create groups as consumers with `register`, by name and topics."""
        self.groups: dict[str, MemoryGroup] = {}
        self._cluster, self._clock, self._register = cluster, clock, register

    async def answer(self, request: wire.GroupRequest) -> Response:
        """Answer a request as the coordinator does."""
        self._expire()
        match request:
            case wire.JoinGroup():
                return self._join(request)
            case wire.GroupHeartbeat():
                return await self._heartbeat(request)
            case wire.LeaveGroup():
                return self._leave(request)
            case wire.DescribeGroups():
                return self._describe(request)
            case wire.ConfigureGroup():
                return self._configure(request)
            case wire.DeleteGroup():
                return self._delete(request)
            case wire.RestartGroup():
                return self._restart(request)

    def require_inactive(self, name: str) -> None:
        """Refuse a plain consumer of a name whose group has members."""
        self._expire()
        if name in self.groups and self.groups[name].members:
            raise ConflictError(
                f"not done: the group {name!r} has members; join it with group=...", code="group_active"
            )

    def check_plain(self, request: object) -> None:
        """Refuse to use a group with members without a session, or to move the cursor of a work queue."""
        self._expire()
        match request:
            case Consume(consumer_id=consumer_id):
                used, is_reset = {consumer_id}, False
            case ConsumeMany(consumer_ids=consumer_ids):
                used, is_reset = {*consumer_ids}, False
            case MoveCursor(cursors=cursors, session=0):
                used, is_reset = {consumer_id for consumer_id, _ in cursors}, not request.only_new
            case _:
                return
        for group in (one for one in self.groups.values() if one.group_id in used):
            if is_reset and group.kind == "queue":
                raise ConflictError(f"not done: {group.group_id} is a work queue", code="group_kind")
            if group.members:
                raise FencedError(f"not done: {group.group_id} is a group with members", code="group_active")

    def handle_topics_changed(self) -> None:
        """Give partitions of new topics, and take those of deleted ones."""
        for group in self.groups.values():
            self._rebalance(group, "the topics have changed")

    # -- membership ------------------------------------------------------------------------------

    def _join(self, request: wire.JoinGroup) -> wire.GroupJoined:
        topics = tuple(sorted({*request.topics, *self._matches(request.pattern)}))
        registered = self._register(request.group, topics)
        group = self.groups.setdefault(request.group, MemoryGroup(group_id=registered.consumer_id, kind=request.kind))
        if group.kind != request.kind:
            raise ConflictError(f"not done: {request.group!r} is a {group.kind}", code="group_kind")
        if request.kind == "queue":
            return wire.GroupJoined(group_id=group.group_id, index=registered.index, heartbeat_ms=0)
        known = group.members.get(request.member_id)
        before = next(
            (at for at, one in group.members.items() if request.instance and one.request.instance == request.instance),
            None,
        )
        if known is None:
            known = group.members[request.member_id] = MemoryMember(request, self._clock.monotonic_ms())
            if before is not None:
                group.replaced.add(before)
                for place in group.members.pop(before).owned:
                    self._grant(known, place)
        known.request, known.seen_ms = request, self._clock.monotonic_ms()
        self._rebalance(group, "a member has joined")
        return wire.GroupJoined(
            group_id=group.group_id,
            index=registered.index,
            heartbeat_ms=request.session_timeout_ms // wire.HEARTBEATS_PER_TIMEOUT,
        )

    async def _heartbeat(self, request: wire.GroupHeartbeat) -> wire.GroupAssignment:
        group = self._find_id(request.group_id)
        member = self._find_member(group, request)
        member.seen_ms = self._clock.monotonic_ms()
        released = {
            place
            for place, one in member.owned.items()
            if wire.PartitionEpoch(one.topic_id, one.partition_id, one.epoch) in request.released
        }
        if released:
            member.owned = {place: one for place, one in member.owned.items() if place not in released}
            member.revoking -= released
            self._changed(group, member)
            self._rebalance(group, "partitions were released")
        until_ms = self._clock.monotonic_ms() + min(request.wait_ms, wire.HEARTBEAT_WAIT_MS_MAX)
        while member.version == request.seen and (left_ms := until_ms - self._clock.monotonic_ms()) > 0:
            await self._wait_changed(group, left_ms)
            member = self._find_member(self._find_id(request.group_id), request)
        return member.answer(self._cluster.index)

    async def _wait_changed(self, group: MemoryGroup, left_ms: int) -> None:
        """Wait for a change, until a member may expire, at most so long."""
        now_ms = self._clock.monotonic_ms()
        expire_ms = min((one.expires_ms - now_ms for one in group.members.values()), default=left_ms)
        try:
            async with timeout(max(1, min(left_ms, expire_ms)) / 1000):
                await group.changed.wait()
        except TimeoutError:
            self._expire()

    def _leave(self, request: wire.LeaveGroup) -> Done:
        group = self._find_id(request.group_id)
        if group.members.pop(request.member_id, None) is not None:
            self._rebalance(group, "a member has left")
        return self._cluster.done()

    def _expire(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for group in self.groups.values():
            silent = [at for at, one in group.members.items() if one.expires_ms <= now_ms]
            for member_id in silent:
                del group.members[member_id]
            if silent or 0 < group.paused_until_ms <= now_ms:
                group.paused_until_ms = 0
                self._rebalance(group, "a member has expired" if silent else "the pause is over")

    # -- administration --------------------------------------------------------------------------

    def _describe(self, request: wire.DescribeGroups) -> wire.GroupsFound:
        names = sorted({name for name, _ in self._cluster.consumers.values() if name})
        wanted = [name for name in names if request.groups is None or name in request.groups]
        groups = tuple(self._info(name, with_members=request.with_members) for name in wanted)
        return wire.GroupsFound(groups=groups, index=Index(self._cluster.index))

    def _info(self, name: str, *, with_members: bool) -> wire.GroupInfo:
        group_id, topics = next(
            (id_, topics) for id_, (known, topics) in self._cluster.consumers.items() if known == name
        )
        group = self.groups.get(name, MemoryGroup(group_id=group_id))
        members = [self._member_info(at, one) for at, one in group.members.items()]
        places = {place for one in group.members.values() for place in self._places(one)}
        owned = {place for one in group.members.values() for place in one.owned}
        is_moving = places - owned or any(one.revoking for one in group.members.values())
        state: Any = "rebalancing" if is_moving else "stable" if members else "empty"
        return wire.GroupInfo(
            group=name,
            group_id=group_id,
            kind=group.kind,
            state="queue" if group.kind == "queue" else "paused" if group.paused_until_ms else state,
            topics=tuple(sorted(topics)),
            version=group.version,
            members=tuple(members) if with_members else (),
            partitions=len(places),
            unassigned=len(places - owned),
            rebalances=group.rebalances,
            last_rebalance_ms=group.last_rebalance_ms,
            last_rebalance_reason=group.reason,
            settings=group.settings if group.kind == "queue" else None,
        )

    def _member_info(self, member_id: str, member: MemoryMember) -> wire.GroupMemberInfo:
        answer, request = member.answer(0), member.request
        return wire.GroupMemberInfo(
            member_id=member_id,
            instance=request.instance,
            rack=request.rack,
            client=request.client,
            topics=request.topics,
            pattern=request.pattern,
            session_timeout_ms=request.session_timeout_ms,
            version=member.version,
            owned=answer.owned,
            revoking=answer.revoking,
        )

    def _configure(self, request: wire.ConfigureGroup) -> wire.GroupConfigured:
        if request.group not in self.groups:
            registered = self._register(request.group, request.topics)
            self.groups[request.group] = MemoryGroup(group_id=registered.consumer_id, kind=request.kind or "stream")
        elif request.topics:
            self._register(request.group, request.topics)
        group = self.groups[request.group]
        if request.kind not in (None, group.kind):
            raise ConflictError(f"not done: {request.group!r} is a {group.kind}", code="group_kind")
        given = {name: value for name, value in msgspec.structs.asdict(request.settings).items() if value is not None}
        group.settings = msgspec.structs.replace(group.settings, **given)
        return wire.GroupConfigured(group_id=group.group_id, index=self._cluster.done().index)

    def _delete(self, request: wire.DeleteGroup) -> Done:
        group_id = next((id_ for id_, (name, _) in self._cluster.consumers.items() if name == request.group), None)
        if group_id is None:
            raise NotFoundError(f"not done: unknown group {request.group!r}", code="unknown_group")
        if not request.is_forced and request.group in self.groups and self.groups[request.group].members:
            raise ConflictError(f"not done: the group {request.group!r} has members", code="group_active")
        del self._cluster.consumers[group_id]
        group = self.groups.pop(request.group, None)
        if group is not None:
            group.members.clear()
            group.changed.set()
        return self._cluster.done()

    def _restart(self, request: wire.RestartGroup) -> wire.GroupRestarted:
        group = self.groups.get(request.group)
        if group is None:
            registered = self._register(request.group, ())
            group = self.groups[request.group] = MemoryGroup(group_id=registered.consumer_id)
        for member in group.members.values():
            member.owned, member.revoking = {}, set()
            self._changed(group, member)
        session = self._cluster.done().index << EPOCH_BITS
        group.paused_until_ms = self._clock.monotonic_ms() + request.pause_ms if request.pause_ms else 0
        self._rebalance(group, "the group was restarted")
        return wire.GroupRestarted(group_id=group.group_id, session=session, index=Index(self._cluster.index))

    # -- assignment ------------------------------------------------------------------------------

    def _rebalance(self, group: MemoryGroup, reason: str) -> None:
        """Take partitions of deleted topics, give free ones to those who have least, ask for what is too much."""
        if group.paused_until_ms > self._clock.monotonic_ms():
            return
        before = group.version
        wanted = {at: self._places(member) for at, member in group.members.items()}
        for at, member in group.members.items():
            for place in [place for place in member.owned if place not in wanted[at]]:
                del member.owned[place]
                member.revoking.discard(place)
                self._changed(group, member)
        shares = Counter({at: len(one.owned) - len(one.revoking) for at, one in group.members.items()})
        owned = {place for member in group.members.values() for place in member.owned}
        for place in sorted({place for places in wanted.values() for place in places} - owned):
            at = min((one for one in group.members if place in wanted[one]), key=lambda one: (shares[one], one))
            self._grant(group.members[at], place)
            self._changed(group, group.members[at])
            shares[at] += 1
        while (move := self._find_move(group, wanted, shares)) is not None:
            giver, taker, place = move
            group.members[giver].revoking.add(place)
            self._changed(group, group.members[giver])
            shares[giver] -= 1
            shares[taker] += 1
        if group.version != before:
            group.rebalances += 1
            group.last_rebalance_ms, group.reason = self._clock.wall_ms(), reason

    def _find_move(
        self, group: MemoryGroup, wanted: dict[str, set[Place]], shares: Counter[str]
    ) -> tuple[str, str, Place] | None:
        for giver in sorted(group.members, key=lambda at: (-shares[at], at)):
            for taker in sorted(group.members, key=lambda at: (shares[at], at)):
                if shares[giver] - shares[taker] < 2:
                    continue
                member = group.members[giver]
                for place in sorted(member.owned.keys() - member.revoking):
                    if place in wanted[taker]:
                        return giver, taker, place
        return None

    def _grant(self, member: MemoryMember, place: Place) -> None:
        topic, partition_id = place
        member.owned[place] = wire.AssignedPartition(
            topic=topic,
            topic_id=self._cluster.topics[topic].topic_id,
            partition_id=partition_id,
            epoch=self._cluster.done().index << EPOCH_BITS,
            start=member.request.start,
        )

    def _changed(self, group: MemoryGroup, member: MemoryMember) -> None:
        group.version += 1
        member.version = group.version
        group.changed.set()
        group.changed = asyncio.Event()

    def _places(self, member: MemoryMember) -> set[Place]:
        topics = {*member.request.topics, *self._matches(member.request.pattern)}
        return {
            (name, PartitionId(number))
            for name in topics
            if name in self._cluster.topics and not self._cluster.topics[name].is_deleted
            for number in range(len(self._cluster.topics[name].partitions))
        }

    def _matches(self, pattern: str) -> list[str]:
        return [name for name in self._cluster.topics if pattern and fnmatchcase(name, pattern)]

    def _find_id(self, group_id: ConsumerId) -> MemoryGroup:
        group = next((one for one in self.groups.values() if one.group_id == group_id), None)
        if group is None:
            raise NotFoundError(f"not done: unknown group {group_id}", code="unknown_group")
        return group

    def _find_member(self, group: MemoryGroup, request: wire.GroupHeartbeat) -> MemoryMember:
        if request.member_id in group.replaced:
            raise FencedError(f"not done: {request.member_id!r} was replaced", code="member_replaced")
        if request.member_id not in group.members:
            raise NotFoundError(f"not done: unknown member {request.member_id!r}", code="unknown_member")
        return group.members[request.member_id]
