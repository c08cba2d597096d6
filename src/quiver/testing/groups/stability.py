"""The stable phase: a healthy cluster stays healthy and does what it is asked (F5; R9, R14, R15).

Chaos hides rules about calm: a healthy leader must not be deposed by a member that returns or receives messages from
half of the others only, a leader that reaches no other member must step down, and leadership must move where it is
transferred, also under load. In this phase the network is quick, clocks are right and disks do not stall, so that there
is no reason for an election.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from quiver.clock import Rng
from quiver.errors import RequestError, UnavailableError
from quiver.model import NO_PRODUCER, GroupId, NodeId, Offset
from quiver.partition import AppendResult
from quiver.record import build_batch
from quiver.replication import Member
from quiver.testing.groups.history import SentBatch
from quiver.testing.groups.operations import find_leader
from quiver.testing.randomness import Latency
from quiver.testing.simulator.report import require, violated

if TYPE_CHECKING:
    from quiver.testing.groups.node import SimulatedNode
    from quiver.testing.groups.world import GroupWorld

_QUICK = Latency(0.1, 1.0)
_SETTLE_S = 5.0
_TRANSFERS_MAX = 2
_POUR_S = 0.001


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
    pouring.cancel()
    require(not member.is_leader, "F5", "leadership was not handed over", group=group, node=leader.id, to=target)
    await asyncio.sleep(_timeouts(world, 6))


async def _pour(world: GroupWorld, group: GroupId, leader: SimulatedNode, member: Member) -> None:
    """Write without waiting for answers, so that there is never a moment with nothing under way."""
    number = 0
    while member.is_leader:
        number += 1
        value = b"poured/%d/%d" % (member.term, number)
        send = SentBatch(group, NO_PRODUCER, 0, number, (value,), world.loop.now_ns, Offset(0), outcome="info")
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
