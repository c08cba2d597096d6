"""What operators do to running groups: change members, transfer leadership, take snapshots, send bursts of load.

An operator finds the leader, asks it, and watches the result. Refusals are normal; only the end of the run requires
that the groups reach their goal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from quiver.clock import Rng
from quiver.errors import RequestError, UnavailableError
from quiver.model import GroupId, NodeId
from quiver.raft import Configuration
from quiver.replication import Member
from quiver.testing.simulator.faults import FaultInjection

if TYPE_CHECKING:
    from quiver.testing.groups.node import SimulatedNode
    from quiver.testing.groups.world import GroupWorld

Nodes = tuple[NodeId, ...]
Target = Callable[[Configuration], tuple[Nodes, Nodes] | None]
"""Voters and learners to move to from a configuration; None: it is there."""

_STEP_S = 0.1


async def add_member(fault: FaultInjection[GroupWorld]) -> None:
    """Add a spare node as a learner, and make it a voter when it has caught up."""
    world = fault.world
    group = world.pick_group(fault.rng)
    spare = _pick_spare(world, group, fault.rng)
    if spare is not None:
        await change(world, group, _with_learner(spare), wait_ms=3_000)
        if fault.chance(0.8):
            await change(world, group, _with_voter(spare), wait_ms=3_000)


async def remove_member(fault: FaultInjection[GroupWorld]) -> None:
    """Remove a voter, the leader perhaps, if enough remain."""
    world = fault.world
    group = world.pick_group(fault.rng)
    leader = find_leader(world, group)
    if leader is None or world.has_damaged_nodes():
        return
    voters = leader[1].configuration.voters
    if len(voters) > world.voters_min:
        leaver = voters[fault.rng.randrange(len(voters))]
        await change(world, group, _without(leaver), wait_ms=3_000)


async def demote_member(fault: FaultInjection[GroupWorld]) -> None:
    """Make a voter a learner, and a voter again a while later."""
    world = fault.world
    group = world.pick_group(fault.rng)
    leader = find_leader(world, group)
    if leader is None or world.has_damaged_nodes():
        return
    voters = leader[1].configuration.voters
    if len(voters) > world.voters_min:
        node = voters[fault.rng.randrange(len(voters))]
        await change(world, group, _demoted(node), wait_ms=3_000)
        await fault.wait_over()
        await change(world, group, _with_voter(node), wait_ms=3_000)


async def swap_member(fault: FaultInjection[GroupWorld]) -> None:
    """Replace a voter by a learner in one joint change, having added the learner first."""
    world = fault.world
    group = world.pick_group(fault.rng)
    spare = _pick_spare(world, group, fault.rng)
    if spare is None or world.has_damaged_nodes():
        return
    await change(world, group, _with_learner(spare), wait_ms=3_000)
    leader = find_leader(world, group)
    if leader is not None:
        voters = leader[1].configuration.voters
        await change(world, group, _swapped(voters[fault.rng.randrange(len(voters))], spare), wait_ms=3_000)


async def transfer(fault: FaultInjection[GroupWorld]) -> None:
    """Ask a leader to transfer leadership to another voter."""
    world = fault.world
    leader = find_leader(world, world.pick_group(fault.rng))
    if leader is None:
        return
    node, member = leader
    voters = [voter for voter in member.configuration.voters if voter != node.id]
    if voters:
        with world.loop.node_scope(node.id), suppress(UnavailableError, RequestError):
            member.transfer_leadership(voters[fault.rng.randrange(len(voters))])


async def snapshot(fault: FaultInjection[GroupWorld]) -> None:
    """Let a node take a snapshot of one group now."""
    world = fault.world
    node = world.pick_node(fault.rng)
    group = world.pick_group(fault.rng)
    if node is not None and node.is_running and group in node.replicas:
        with world.loop.node_scope(node.id):
            world.loop.create_task(node.take_snapshot(node.replicas[group]))


async def burst(fault: FaultInjection[GroupWorld]) -> None:
    """Let a producer send without pause for a while."""
    world = fault.world
    producer = world.producers[fault.rng.randrange(len(world.producers))]
    producer.burst = 5 + fault.rng.randrange(40)


async def repair(world: GroupWorld, lost: NodeId, successor: NodeId) -> None:
    """Put a new node in the place of a lost one in every group that the lost one belongs to."""
    for group in world.groups:
        await change(world, group, _replaced(lost, successor), wait_ms=None)
        await change(world, group, _promoted(successor), wait_ms=None)
    world.trace.record("repaired", world.now_ms, lost, successor)
    world.repairing.discard(lost)


async def change(world: GroupWorld, group: GroupId, target: Target, *, wait_ms: int | None) -> None:
    """Ask leaders for a change until it is committed, or until `wait_ms` have gone by."""
    deadline_ms = None if wait_ms is None else world.now_ms + wait_ms
    world.operating += 1
    try:
        await _change(world, group, target, deadline_ms)
    finally:
        world.operating -= 1


async def _change(world: GroupWorld, group: GroupId, target: Target, deadline_ms: int | None) -> None:
    while deadline_ms is None or world.now_ms < deadline_ms:
        leader = find_leader(world, group)
        if leader is not None and (_is_settled(leader[1]) or world.is_impatient()):
            node, member = leader
            wanted = target(member.configuration)
            if wanted is None:
                if _is_settled(member):
                    return
                wanted = member.configuration.voters, member.configuration.learners
            with world.loop.node_scope(node.id), suppress(UnavailableError, RequestError):
                member.change_membership(voters=wanted[0], learners=wanted[1])
                world.trace.record("change", world.now_ms, group, node.id, str(wanted))
                world.changes += 1
        await asyncio.sleep(_STEP_S)


def find_leader(world: GroupWorld, group: GroupId) -> tuple[SimulatedNode, Member] | None:
    """Return the node that leads a group, of several that think so the one with the highest term."""
    leading = [
        (node, node.replicas[group].member)
        for node in world.live_nodes()
        if node.is_running and group in node.replicas and node.replicas[group].member.is_leader
    ]
    return max(leading, key=lambda found: found[1].term, default=None)


def _is_settled(member: Member) -> bool:
    configurations = member.raft._state.log.configurations
    return not configurations.active.is_joint and configurations.active_index <= member.commit_index


def _pick_spare(world: GroupWorld, group: GroupId, rng: Rng) -> NodeId | None:
    leader = find_leader(world, group)
    if leader is None:
        return None
    configuration = leader[1].configuration
    spares = [node.id for node in world.live_nodes() if not configuration.is_voter(node.id) and not node.is_damaged]
    return spares[rng.randrange(len(spares))] if spares else None


def _with_learner(node: NodeId) -> Target:
    def target(now: Configuration) -> tuple[Nodes, Nodes] | None:
        return None if now.includes(node) else (now.voters, (*now.learners, node))

    return target


def _with_voter(node: NodeId) -> Target:
    def target(now: Configuration) -> tuple[Nodes, Nodes] | None:
        if now.is_voter(node) or not now.includes(node):
            return None
        return (*now.voters, node), _minus(now.learners, node)

    return target


def _without(node: NodeId) -> Target:
    def target(now: Configuration) -> tuple[Nodes, Nodes] | None:
        return (_minus(now.voters, node), _minus(now.learners, node)) if now.includes(node) else None

    return target


def _demoted(node: NodeId) -> Target:
    def target(now: Configuration) -> tuple[Nodes, Nodes] | None:
        return (_minus(now.voters, node), (*now.learners, node)) if now.is_voter(node) else None

    return target


def _swapped(leaver: NodeId, learner: NodeId) -> Target:
    def target(now: Configuration) -> tuple[Nodes, Nodes] | None:
        if learner not in now.learners or leaver not in now.voters:
            return None
        return (*_minus(now.voters, leaver), learner), _minus(now.learners, learner)

    return target


def _replaced(lost: NodeId, successor: NodeId) -> Target:
    """Remove a lost node; its successor becomes a learner first, unless it is a voter already."""

    def target(now: Configuration) -> tuple[Nodes, Nodes] | None:
        if not now.includes(lost):
            return None
        learners = _minus(_minus(now.learners, lost), successor)
        return _minus(now.voters, lost), learners if now.is_voter(successor) else (*learners, successor)

    return target


def _promoted(successor: NodeId) -> Target:
    return _with_voter(successor)


def _minus(nodes: Nodes, node: NodeId) -> Nodes:
    return tuple(other for other in nodes if other != node)
