"""Faults in the code itself: bad rows in the log, entries of a newer program, errors that escape a partition.

They exercise the fault policy (`quiver.faults`): none of them may end a node, whatever else happens to it. A partition
that stops although nothing here stopped it is a finding of `ClusterWorld.check`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from quiver.errors import QuiverError, UnknownVersionError
from quiver.metadata.commands import CONTROL_STATE
from quiver.partition import Replica
from quiver.record import Batch, build_batch, build_control_batch
from quiver.replication import Member, StateMachine
from quiver.testing.clusters.host import SimulatedHost
from quiver.testing.clusters.world import ClusterWorld
from quiver.testing.simulator.faults import FaultInjection
from quiver.testing.simulator.report import require

BAD_COMMANDS: Final = (
    build_batch([b"a record among commands"], timestamp=1),
    build_control_batch(bytes((CONTROL_STATE,)), timestamp=1),
    build_control_batch(bytes((CONTROL_STATE, 1)) + b"\xc1garbage", timestamp=1),
    build_control_batch(
        bytes((CONTROL_STATE, 1)) + msgspec.msgpack.encode({"type": "register_broker", "now_ms": -1}), timestamp=1
    ),
    build_control_batch(
        bytes((CONTROL_STATE, 1))
        + msgspec.msgpack.encode(
            {"type": "register_broker", "now_ms": 1, "broker_id": 77, "identity": "i", "wire_address": "[::1]"}
        ),
        timestamp=1,
    ),
)
"""What no correct node proposes, and what each must refuse nevertheless, as long as it is in the log."""
RESIGN_MS_MAX = 2_000
"""How long a member that needs an upgrade may go on leading."""


async def bad_command(fault: FaultInjection[ClusterWorld]) -> None:
    """Put a malformed command into the metadata's log, past every check."""
    host = fault.world.primary()
    if host is None or host.node is None:
        return
    batch = bytearray(BAD_COMMANDS[fault.rng.randrange(len(BAD_COMMANDS))])
    try:
        with fault.world.loop.node_scope(host.id):
            host.node._member.propose_nowait([batch])
    except QuiverError:
        return  # it does not lead any more


async def unknown_entry(fault: FaultInjection[ClusterWorld]) -> None:
    """Let one node run an older program, which does not know the next entry of a group; upgrade it at the end."""
    world, host = fault.world, fault.world.pick_node(fault.rng)
    if host is None or not host.is_running or host.node is None:
        return
    replicas = list(world.replicas(host).values())
    life = host.lives
    if fault.chance(0.3) or not replicas:
        _age(host.node._store.machine)
        member = host.node._member
    else:
        replica = replicas[fault.rng.randrange(len(replicas))]
        _age(replica.state)
        member = replica.member
    try:
        await _require_resigned(fault, host, member)
        await fault.wait_over()
    finally:
        if host.is_up and host.lives == life:  # else it was restarted, with the program of today
            host.kill(power_loss=False)
            host.start()


async def partition_fault(fault: FaultInjection[ClusterWorld]) -> None:
    """Let an unexpected error escape the code of one partition on one node."""
    host = fault.world.pick_node(fault.rng)
    replicas = [] if host is None or not host.is_running else list(fault.world.replicas(host).values())
    if host is not None and replicas:
        _break(host, replicas[fault.rng.randrange(len(replicas))])
        await asyncio.sleep(0)


def _age(machine: StateMachine) -> None:
    """Make a state machine one of an older program."""

    def apply(batches: Sequence[Batch]) -> None:
        raise UnknownVersionError(f"entry {batches[0].header.index} is of a newer program; upgrade this node")

    machine.apply = apply  # type: ignore[method-assign] # until the process is restarted


def _break(host: SimulatedHost, replica: Replica) -> None:
    def apply(batches: Sequence[Batch]) -> None:
        host.stops_injected += 1
        raise LookupError(f"injected at entry {batches[0].header.index}")

    replica.state.apply = apply  # type: ignore[method-assign] # until the replica is reopened


async def _require_resigned(fault: FaultInjection[ClusterWorld], host: SimulatedHost, member: Member) -> None:
    """Watch a member for a while: soon after it needs an upgrade, it no longer leads."""
    life, since_ms = host.lives, None
    for _ in range(fault.duration_ms // 100):
        await asyncio.sleep(0.1)
        if not host.is_running or host.lives != life:
            return
        if member.needs_upgrade:
            since_ms = fault.world.now_ms if since_ms is None else since_ms
            is_late = fault.world.now_ms - since_ms > RESIGN_MS_MAX
            require(not (is_late and member.is_leader), "F3", "a member that needs an upgrade leads", node=host.id)
