"""Members of a consumer group in a simulated cluster, and what must be so at the end.

Members read and commit, leave and come back, under a name of their own or none; their processes are killed and stopped.
`quiver.testing.history.members` and `cursors` judge what they saw. Here are the checks of the metadata: M1, never do
two members own a partition; M2, soon after healing every partition has an owner that lives, and the owners' shares
differ by one at most; M3, in the end the group has consumed everything; M4, no member is removed that was heard within
its session timeout, whoever coordinates; M5, no partition is given away while a member that was not removed uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quiver.client.cluster import AsyncCluster
from quiver.client.consumer import AsyncConsumer
from quiver.client.group_consumer import GroupConsumerCore
from quiver.errors import OutcomeUnknownError, QuiverError, UnavailableError
from quiver.metadata import PartitionRow, View
from quiver.model import ConsumerId, Index, NodeId, PartitionId, Term
from quiver.record import Record
from quiver.testing.clusters.consumers import FETCH_BYTES
from quiver.testing.clusters.processes import LEVEL, ProcessWorkload, are_others_done
from quiver.testing.clusters.silence import SignsOfLife
from quiver.testing.clusters.swarm import MembersPlan, TopicPlan
from quiver.testing.simulator.report import require

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld

ASSIGNED_WITHIN_MS = 15_000
"""M2: how long after healing, and after the session timeout, a partition may have no owner that lives."""
PLANNED_WITHIN_MS = 5_000
"""M2: and how long after the last change of the primary, and the session timeout."""
_RETRY_S = 0.2
_DRIFT_MAX = 0.1
"""By which share the primary's clock may run too fast."""

Place = tuple[str, int]


class MemberWorkload(ProcessWorkload):
    """Reads what it is assigned, and commits now and then."""

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        super().__init__(world, name, topic)
        self.plan = _plan_of(world)
        self.p_crash = self.plan.p_crash
        number = int(name.rpartition("-")[2])
        self._instance = f"instance-{number}" if number < self.plan.instances else ""
        self._epochs: dict[Place, int] = {}
        self._heard: dict[str, SignsOfLife] = {}
        """The heartbeats that were answered, by the id of the member."""
        self._left: set[str] = set()
        self._leaving: AsyncConsumer | None = None
        """The last consumer that left: one that had expired may join once more meanwhile, under another id."""
        self.consumer: AsyncConsumer | None = None

    @property
    def member_id(self) -> str | None:
        """Return its id in the group, if it is a member now."""
        return None if self.consumer is None else self.consumer.member_id

    def begun_epoch(self, place: Place) -> int:
        """Return the epoch that it has begun in a partition; 0: none."""
        return self._epochs.get(place, 0)

    async def work(self, cluster: AsyncCluster) -> bool:
        """Read until the group has consumed everything, or until the program is restarted."""
        self._epochs.clear()
        self.consumer = None
        self.consumer = consumer = await self._join(cluster)
        while not (self.world.is_over and is_consumed(self.world)):
            await self._step(consumer)
            if not self.world.is_over:  # one member may have much left of what many sent
                await asyncio.sleep(self.world.knobs.step_gap_ms * 2 * self.rng.random() / 1000)
            if not self.world.is_healed and self.rng.random() < self.plan.p_leave:
                self.world.counts["member left"] += 1
                await self._leave(consumer)
                return False
        await self._leave(consumer)
        return True

    def watch(self, view: View, before: View) -> None:
        """M1: partitions have one owner. M4: this member is not removed while it lives. M5: it owns what it uses.

        M5 is not judged by metadata that is older than the member's assignment: who knows more may be down.
        """
        group_id = _group_id(self.world, view)
        members = view.members_of(group_id)
        owned = [one.key for member in members for one in member.owned]
        require(len(owned) == len(set(owned)), "M1", "a partition has two owners", owned=sorted(owned))
        for member in members:
            if member.member_id == self.member_id:
                self._check_used({(one.key, one.epoch) for one in member.owned}, view.index)
        if self._instance:
            return  # another process may have taken over
        if self._leaving is not None:
            self._left.add(self._leaving.member_id or "")
        known = {member.member_id for member in members}
        for member_id in self._heard.keys() & {row.member_id for row in before.members_of(group_id)} - known:
            silent_ms = self._heard[member_id].longest_silence_ms(self.world.now_ms)
            facts = {"name": self.name, "member": member_id, "silent_ms": silent_ms}
            is_silent = silent_ms >= self.plan.session_timeout_ms * (1 - _DRIFT_MAX)
            require(is_silent or member_id in self._left, "M4", "a living member was removed", **facts)

    def _check_used(self, owned: set[tuple[tuple[int, int], int]], index: Index) -> None:
        assert self.consumer is not None, "it is a member"
        core = self.consumer.core
        assert isinstance(core, GroupConsumerCore)
        if index < core.view.index:
            return
        assigned = (*core.view.owned, *core.view.revoking)
        for one in core._held.values():
            is_owned = ((one.topic_id, one.partition_id), one.epoch) in owned
            facts = {"name": self.name, "partition": one.partition_id, "epoch": one.epoch}
            require(is_owned or one not in assigned, "M5", "a partition was given away while it is used", **facts)

    # -- the member ------------------------------------------------------------------------------

    async def _join(self, cluster: AsyncCluster) -> AsyncConsumer:
        def handle_assigned(places: Sequence[Place]) -> None:
            self._handle_assigned(opened[0], places)

        opened: list[AsyncConsumer] = []
        while not opened:
            began_ms = self.world.now_ms
            try:
                consumer = await cluster.consumer(
                    [topic.name for topic in self.world.knobs.topics],
                    group=self.plan.group,
                    instance=self._instance,
                    session_timeout=self.plan.session_timeout_ms / 1000,
                    on_trimmed="earliest",
                    fetch_bytes=FETCH_BYTES,
                    prefetch_bytes=FETCH_BYTES,
                    on_assign=handle_assigned,
                    on_revoke=self._handle_revoked if self.plan.is_told else None,
                )
            except (UnavailableError, OutcomeUnknownError) as error:
                self.world.counts[f"join {error.code}"] += 1
                await asyncio.sleep(_RETRY_S)
            else:
                opened.append(consumer)
                self._note_heartbeats(consumer, began_ms)
        return opened[0]

    def _note_heartbeats(self, consumer: AsyncConsumer, joined_ms: int) -> None:
        """Note when heartbeats are answered; a member is silent from the request on with which it joined."""
        assert isinstance(consumer.core, GroupConsumerCore)
        membership = consumer.core._membership
        assert membership is not None, "it has joined"
        ask_heartbeat, before_ms = membership._ask_heartbeat, joined_ms

        async def ask(*, wait_ms: int) -> None:
            nonlocal before_ms
            member_id, began_ms = membership.view.member_id, self.world.now_ms
            await ask_heartbeat(wait_ms=wait_ms)
            self._heard.setdefault(member_id, SignsOfLife(before_ms)).note(began_ms, self.world.now_ms)
            before_ms = began_ms

        membership._ask_heartbeat = ask  # type: ignore[method-assign] # of this one only

    def _handle_assigned(self, consumer: AsyncConsumer, places: Sequence[Place]) -> None:
        core = consumer.core
        assert isinstance(core, GroupConsumerCore)
        for place in places:
            epoch = core._held[place[0], PartitionId(place[1])].epoch
            position = int(consumer.position(place[1], place[0]))
            self._epochs[place] = epoch
            note = {"consumer": self.plan.group, "member": self._member(), "epoch": epoch, "offset": position}
            self.world.recorder.note(self.proc(), "grant", _key(place), note)
            cursor = self.invoke("cursor", _key(place), {"consumer": self.plan.group}, lane="/cursor")
            self.succeed(cursor, position)
            self.world.counts["grant"] += 1

    def _handle_revoked(self, places: Sequence[Place]) -> None:
        for place in places:
            self._epochs.pop(place, None)
            self.world.counts["revoke"] += 1

    def _member(self) -> str:
        """Return the process, which has one membership at a time."""
        return f"{self.name}.{self._lives}"

    async def _step(self, consumer: AsyncConsumer) -> None:
        """Read what is there, and perhaps commit."""
        try:
            records = await consumer.poll(1_000 if self.world.is_over else 20, timeout=0.3)
        except QuiverError as error:
            self.check(error, "poll")
            await asyncio.sleep(_RETRY_S)
            return
        self.progress += 1
        for place, part in _by_place(records).items():
            value = {"consumer": self.plan.group, "max": len(part), "offset": part[0][0]}
            value |= {"epoch": self._epochs[place], "member": self._member()}
            self.succeed(self.invoke("consume", _key(place), value), part)
        if records and self.rng.random() < self.plan.p_pause and not self.world.is_healed:
            self.stop_for(self.rng.randrange(3 * self.plan.session_timeout_ms))
            await asyncio.sleep(0.001)
        if self.world.is_over or self.rng.random() < 0.4:
            await self._commit(consumer)

    async def _commit(self, consumer: AsyncConsumer) -> None:
        calls = {}
        for (topic, partition), reader in sorted(consumer.core.readers.items()):
            place = (topic, int(partition))
            if reader.position != reader.committed and place in self._epochs:
                value = {"consumer": self.plan.group, "offset": int(reader.position), "epoch": self._epochs[place]}
                calls[f"/{_key(place)}"] = self.invoke("commit", _key(place), value, lane=f"/{_key(place)}")
        try:
            await consumer.commit()
        except QuiverError as error:
            for lane, call in calls.items():  # some partitions' may be done, others' not
                call.info(error.code)
                self._generations[lane] += 1
            self.world.counts[f"commit {error.code}"] += 1
            self.check(error, "commit")
        else:
            for call in calls.values():
                self.succeed(call)

    async def _leave(self, consumer: AsyncConsumer) -> None:
        self.consumer = None
        self._left.add(consumer.member_id or "")
        self._leaving = consumer
        try:
            await consumer.close()
        except QuiverError as error:
            self.world.counts[f"leave {error.code}"] += 1
            self.check(error, "leave")


# -- the end -----------------------------------------------------------------------------------------


async def require_assigned(world: ClusterWorld) -> None:
    """M2: soon after healing every partition has an owner that lives, and shares are even.

    Each new primary gives members a whole session timeout. Some networks delay messages for longer than an election
    timeout, also when they are healed, so the time counts for which the primary has been the same.
    """
    plan = world.knobs.members
    if plan is None:
        return
    healed_ms, primary, primary_ms = world.now_ms, _primary_term(world), world.now_ms
    while problem := _unassigned(world):
        if primary != (primary := _primary_term(world)):
            primary_ms = world.now_ms
        within_ms = world.now_ms - plan.session_timeout_ms
        is_late = within_ms - healed_ms > ASSIGNED_WITHIN_MS and within_ms - primary_ms > PLANNED_WITHIN_MS
        require(not is_late, "M2", "partitions of a group are not assigned", problem=problem)
        await world.wait_checked()


def _primary_term(world: ClusterWorld) -> tuple[NodeId, Term] | None:
    primary = world.primary()
    member = None if primary is None or primary.node is None else primary.node._store._member
    return None if primary is None or member is None else (primary.id, member.term)


def _unassigned(world: ClusterWorld) -> str:
    """Return what is wrong with the assignment; empty: nothing."""
    view = world.view()
    if view is None:
        return "no node knows the metadata"
    if view.feature_level < LEVEL:
        return ""
    living = [client.member_id for client in world.clients if isinstance(client, MemberWorkload)]
    members = {row.member_id: row for row in view.members_of(_group_id(world, view))}
    if set(living) != set(members):
        return f"the group has {sorted(members)}, and {living} live"
    owned = {one.key: one for row in members.values() for one in row.owned}
    missing = [one.key for one in _partitions(world, view) if one.key not in owned or owned[one.key].is_revoking]
    if missing:
        return f"partitions {missing} have no owner that stays"
    shares = [len(row.owned) for row in members.values()]
    return "" if max(shares) - min(shares) <= 1 else f"the shares are {shares}"


def is_consumed(world: ClusterWorld) -> bool:
    """Return whether nobody sends any more, and the group's cursors are at the ends of all partitions."""
    view = world.view()
    if view is None or not are_others_done(world):
        return False
    for partition in _partitions(world, view):
        leader = world.leader(partition.group_id)
        if leader is None:
            return False
        state = leader[1].state
        cursor = state.cursor(_group_id(world, view)) or 0
        if max(cursor, state.first_offset) < state.end_offset:
            return False
    return True


def require_consumed(world: ClusterWorld) -> None:
    """M3: in the end the group has consumed everything."""
    view = world.view()
    if world.knobs.members is not None and view is not None and view.feature_level >= LEVEL:
        require(is_consumed(world), "M3", "a group has not consumed everything at the end")


def _plan_of(world: ClusterWorld) -> MembersPlan:
    assert world.knobs.members is not None, "this world has a group"
    return world.knobs.members


def _group_id(world: ClusterWorld, view: View) -> ConsumerId:
    name = _plan_of(world).group
    found = (row.consumer_id for row in view.consumers.values() if row.request_id == name)
    return next(found, ConsumerId(-1))


def _partitions(world: ClusterWorld, view: View) -> list[PartitionRow]:
    topics = {found.topic_id for topic in world.knobs.topics if (found := view.topic(topic.name)) is not None}
    return [one for one in view.partitions.values() if one.topic_id in topics]


def _key(place: Place) -> str:
    return f"{place[0]}-{place[1]}"


def _by_place(records: list[Record]) -> dict[Place, list[tuple[int, str]]]:
    found: dict[Place, list[tuple[int, str]]] = {}
    for record in records:
        assert record.topic is not None
        assert record.partition is not None
        place = (record.topic, int(record.partition))
        found.setdefault(place, []).append((record.offset, (record.value or b"").decode()))
    return found
