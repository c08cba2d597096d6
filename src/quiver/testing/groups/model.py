"""The model of consensus groups: its load, its liveness checks after healing, its stable phase and final comparison.

In the stable phase a healthy cluster stays healthy and does what it is asked (F5; R9, R14, R15, R23). Chaos hides
rules about calm: a healthy leader must not be deposed by a member that returns or receives messages from half of the
others only, nor by forged messages of a node that nobody knows; a leader that reaches no other member must step down;
and leadership must move where it is transferred, also under load. In this phase the network is quick, clocks are right
and disks do not stall, so there is no reason for an election.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from quiver.clock import Rng
from quiver.errors import DamageError, RequestError, TrimmedError, UnavailableError
from quiver.model import NO_PRODUCER, GroupId, Index, NodeId, Offset, Term
from quiver.partition import AppendResult
from quiver.raft import Heartbeat, VoteRequest
from quiver.raft.leader import TRANSFER_PAUSE
from quiver.record import build_batch
from quiver.replication import Member
from quiver.replication.codec import GroupMessage, encode_envelope
from quiver.testing.checkers.committed import check_sends
from quiver.testing.groups import operations
from quiver.testing.groups.consumers import CursorConsumer
from quiver.testing.groups.history import RecordedBatch, check_client_history
from quiver.testing.groups.node import SimulatedNode
from quiver.testing.groups.operations import find_leader
from quiver.testing.groups.swarm import FAULT_KINDS, MIXED, GroupKnobs, Profile, draw_group_knobs
from quiver.testing.groups.world import GroupWorld
from quiver.testing.randomness import Latency
from quiver.testing.simulator.faults import SHARED_FAULTS, FaultInjection
from quiver.testing.simulator.report import SeedReport, require, violated
from quiver.testing.simulator.runner import Model
from quiver.testing.simulator.world import SimulationRun

COMMIT_WITHIN_MS = 10_000
"""F3: how long after healing a new write may take."""
CONVERGE_WITHIN_MS = 60_000
"""F3: how long after healing the replicas may differ."""
_READ_BYTES = 64 * 1024
_QUICK = Latency(0.1, 1.0)
_SETTLE_S = 5.0
_TRANSFERS_MAX = 2
_POUR_S = 0.001
_STRANGER: Final = NodeId(4242)
"""The id of a node that nobody knows."""

_FAULTS: Final[Mapping[str, Callable[[FaultInjection[Any]], Awaitable[None]]]] = {
    **SHARED_FAULTS,
    "add_member": operations.add_member,
    "remove_member": operations.remove_member,
    "swap_member": operations.swap_member,
    "demote_member": operations.demote_member,
    "transfer": operations.transfer,
    "snapshot": operations.snapshot,
    "burst": operations.burst,
}


@dataclass(frozen=True, slots=True)
class GroupModel(Model[GroupKnobs, GroupWorld]):
    """Consensus groups; `profile` biases the random draw of faults and settings."""

    profile: Profile = MIXED

    option: ClassVar = ""
    stream_prefix: ClassVar = ""
    events_max: ClassVar = 2_000_000
    time_max_s: ClassVar = 600.0
    faults: ClassVar = _FAULTS
    required_faults: ClassVar = tuple(FAULT_KINDS)

    def draw_knobs(self, rng: Rng) -> GroupKnobs:
        """Draw the knobs of one seed."""
        return draw_group_knobs(rng, self.profile)

    def make_world(self, run: SimulationRun, knobs: GroupKnobs) -> GroupWorld:
        """Return the world of one run."""
        return GroupWorld(run, knobs)

    async def begin(self, world: GroupWorld) -> None:
        """Start the clients."""
        world.begin_load()

    async def verify(self, world: GroupWorld) -> None:
        """Check that writes resume, that replicas converge, and that they hold what was acknowledged."""
        await _require_writes(world)
        await world.end_load()
        await _require_convergence(world)
        if world.knobs.has_stable_phase:
            await check_stability(world, world.streams.stream("quiet"))
        await _compare(world)

    def fill(self, report: SeedReport, world: GroupWorld) -> None:
        """Add the figures of clients, elections and membership changes."""
        observer = world.observer
        report.sends = Counter(send.outcome for send in world.history.sends)
        report.reads = world.history.reads_done
        report.consumed = world.history.consumed
        report.trimmed = sum(log.first_offset for log in observer.committed.values())
        report.elections = sum(checker.leader_count for checker in observer.elections.values())
        report.changes = world.changes


async def _require_writes(world: GroupWorld) -> None:
    """F3: every group commits a new write soon after healing."""
    started_ms = world.now_ms
    before = {group: log.end_offset for group, log in world.observer.committed.items()}
    for group in world.groups:
        send = await world.add_producer(group).send_one()
        world.check()
        took_ms = world.now_ms - started_ms
        is_done = send.outcome == "ok" and world.observer.committed[group].end_offset > before[group]
        require(is_done and took_ms <= COMMIT_WITHIN_MS, "F3", "no write after healing", group=group, took_ms=took_ms)


async def _require_convergence(world: GroupWorld) -> None:
    """F3: all replicas reach the same index, and every repair is done."""
    deadline_ms = world.now_ms + CONVERGE_WITHIN_MS
    while True:
        lagging = [text for group in world.groups for text in _lagging(world, group)]
        if not lagging and not world.repairing:
            return
        require(world.now_ms < deadline_ms, "F3", "replicas do not converge", lagging="; ".join(lagging))
        await asyncio.sleep(0.25)
        world.check()


def _lagging(world: GroupWorld, group: GroupId) -> list[str]:
    leader = find_leader(world, group)
    if leader is None:
        return [f"group {group} has no leader"]
    raft = leader[1].raft
    lagging = []
    for node_id in raft.configuration.members:
        replica = world.nodes[node_id].replicas.get(group)
        applied = replica.member.applied_index if replica is not None else None
        if applied != raft.last_index:
            lagging.append(f"node {node_id} of group {group} applied {applied} of {raft.last_index}")
    return lagging


async def _compare(world: GroupWorld) -> None:
    """F1, F2, F4: replicas are byte-equal, and clients' histories agree with them."""
    for group in world.groups:
        await _require_convergence(world)  # meanwhile a leader may have been lost: networks and disks are still slow
        committed = world.observer.committed[group]
        leader = find_leader(world, group)
        assert leader is not None, "the group has converged"
        for node_id in leader[1].configuration.members:
            await _read_all(world, world.nodes[node_id], group)
        for consumer in world.consumers:
            if isinstance(consumer, CursorConsumer) and consumer.group == group:
                await consumer.finish()
        sends = [send for send in world.history.sends if send.group == group]
        check_sends(sends, committed)
        check_client_history(sends, committed.data_batches())


async def _read_all(world: GroupWorld, node: SimulatedNode, group: GroupId) -> None:
    """Read a replica's whole log from its disk and compare it with what is committed."""
    replica = node.replicas[group]
    log, committed = replica.member.log, world.observer.committed[group]
    committed.snapshot(node.id, replica.member.applied_index, replica.state.snapshot())
    facts = {"node": node.id, "group": group, "start": log.first_offset, "trimmed_to": replica.first_offset}
    is_complete = world.knobs.retention is None or log.first_offset <= replica.first_offset
    require(is_complete, "F1", "a replica does not have every record that is kept", **facts)
    index = log.first_index
    while index < committed.applied_index + 1:
        try:
            batches = await log.read_entries(index, end_index=Index(committed.applied_index + 1), bytes_max=_READ_BYTES)
        except TrimmedError:
            index = log.first_index  # a snapshot was taken meanwhile
            continue
        except DamageError:
            require(node.is_damaged, "F1", "a disk is damaged although no fault damaged it", node=node.id, group=group)
            return  # it says so, and serves nothing wrong
        if not batches:
            violated("F1", "a replica ends early", node=node.id, group=group, index=index)
        for batch in batches:
            committed.check_read(node.id, batch)
        index = Index(batches[-1].header.index + 1)


async def check_stability(world: GroupWorld, rng: Rng) -> None:
    """Check leadership rules on a healthy cluster."""
    world.network.rates.latency = _QUICK
    for node in world.live_nodes():
        node.clock.set_drift(0)
        node.set_disk_latency(0.2, spikes=False)
    await asyncio.sleep(_SETTLE_S)
    group = world.pick_group(rng)
    await _hand_over_under_load(world, group, rng)
    await _cut_follower_off(world, group, rng)
    await _cut_half_off(world, group, rng)
    await _isolate_leader(world, group)
    await _restart_follower(world, group, rng)
    await _forge(world, group, rng)


async def _cut_follower_off(world: GroupWorld, group: GroupId, rng: Rng) -> None:
    """A follower that was isolated and returns does not depose the leader."""
    leader, member = _leader(world, group)
    followers = _other_voters(leader, member)
    if len(followers) < 2:
        return
    follower = followers[rng.randrange(len(followers))]
    world.network.isolate(follower)
    await asyncio.sleep(_timeouts(world, 6))
    world.network.rejoin(follower)
    await asyncio.sleep(_timeouts(world, 4))
    _require_same(world, group, leader, member, "a follower that came back unseated a healthy leader")


async def _cut_half_off(world: GroupWorld, group: GroupId, rng: Rng) -> None:
    """A follower that is cut off from the leader only does not depose it."""
    leader, member = _leader(world, group)
    followers = _other_voters(leader, member)
    if len(followers) < 2:
        return
    follower = followers[rng.randrange(len(followers))]
    world.network.cut(leader.id, follower)
    await asyncio.sleep(_timeouts(world, 8))
    _require_same(world, group, leader, member, "a half-connected follower unseated a healthy leader")
    world.network.mend(leader.id, follower)
    await asyncio.sleep(_timeouts(world, 4))


async def _isolate_leader(world: GroupWorld, group: GroupId) -> None:
    """A leader that reaches no other member steps down."""
    leader, member = _leader(world, group)
    if not _other_voters(leader, member):
        return
    world.network.isolate(leader.id)
    await asyncio.sleep(_timeouts(world, 6))
    require(
        not member.is_leader, "F5", "a leader that reaches no other member stays leader", group=group, node=leader.id
    )
    world.network.rejoin(leader.id)
    await asyncio.sleep(_timeouts(world, 6))


async def _hand_over_under_load(world: GroupWorld, group: GroupId, rng: Rng) -> None:
    """A transfer ends in another leader, however much is being written."""
    leader, member = _leader(world, group)
    others = _other_voters(leader, member)
    if not others:
        return
    target = others[rng.randrange(len(others))]
    pouring = asyncio.ensure_future(_pour(world, group, leader, member))
    await asyncio.sleep(0.1)
    for _ in range(_TRANSFERS_MAX):
        with world.loop.node_scope(leader.id), suppress(UnavailableError, RequestError):
            member.transfer_leadership(target)
        await asyncio.sleep(_timeouts(world, 2))
        if not member.is_leader:
            break
        await asyncio.sleep(_timeouts(world, TRANSFER_PAUSE))  # the target is not asked again before that
    pouring.cancel()
    require(not member.is_leader, "F5", "leadership was not transferred", group=group, node=leader.id, to=target)
    await asyncio.sleep(_timeouts(world, 6))


async def _pour(world: GroupWorld, group: GroupId, leader: SimulatedNode, member: Member) -> None:
    """Write without waiting for answers, so that there is never a moment with nothing under way."""
    number = 0
    while member.is_leader:
        number += 1
        value = b"poured/%d/%d" % (member.term, number)
        send = RecordedBatch(group, NO_PRODUCER, 0, number, (value,), world.loop.now_ns, Offset(0), outcome="info")
        world.history.sends.append(send)
        append = leader.serve(group).append(bytearray(build_batch([value], timestamp=1)))
        with world.loop.node_scope(leader.id):
            world.loop.create_task(append).add_done_callback(_ignore_outcome)
        await asyncio.sleep(_POUR_S)


def _ignore_outcome(done: asyncio.Future[AppendResult]) -> None:
    """Retrieve an outcome, so that asyncio does not report it."""
    if not done.cancelled():
        done.exception()


async def _restart_follower(world: GroupWorld, group: GroupId, rng: Rng) -> None:
    """A follower that restarts while nothing is written catches up all the same."""
    leader, member = _leader(world, group)
    followers = _other_voters(leader, member)
    if len(followers) >= 2:
        node = world.nodes[followers[rng.randrange(len(followers))]]
        node.kill(power_loss=rng.random() < 0.5)
        await asyncio.sleep(0.05)
        node.start()
        await asyncio.sleep(_timeouts(world, 2))


async def _forge(world: GroupWorld, group: GroupId, rng: Rng) -> None:
    """A stranger's messages of a later term do not depose the leader, although they claim everything (R23)."""
    leader, member = _leader(world, group)
    term = member.term
    later = Term(term + 1 + rng.randrange(5))
    forged = (
        Heartbeat(later, Index(0), 1),
        VoteRequest(later, Index(1 << 40), later, transfer=True),
    )[rng.randrange(2)]
    envelope = b"".join(encode_envelope(1, [GroupMessage(group, plain=forged)], ()))
    port = world.network.port(_STRANGER)
    for node in member.configuration.members:
        port.send(node, [envelope])
    await asyncio.sleep(_timeouts(world, 4))
    world.network.disconnect(_STRANGER)
    _require_same(world, group, leader, member, "a stranger unseated a healthy leader")
    require(member.term == term, "F5", "a stranger brought a term", group=group, before=term, after=member.term)


def _leader(world: GroupWorld, group: GroupId) -> tuple[SimulatedNode, Member]:
    leader = find_leader(world, group)
    if leader is None:
        violated("F5", "a healthy group has no leader", group=group)
    return leader


def _other_voters(leader: SimulatedNode, member: Member) -> list[NodeId]:
    return [node for node in member.configuration.voters if node != leader.id]


def _require_same(world: GroupWorld, group: GroupId, leader: SimulatedNode, member: Member, message: str) -> None:
    now, now_member = _leader(world, group)
    require(
        now is leader and now_member is member,
        "F5",
        message,
        group=group,
        before=leader.id,
        after=now.id,
        term=now_member.raft.term,
    )


def _timeouts(world: GroupWorld, count: int) -> float:
    return count * world.knobs.replication.election_timeout_ms / 1000
