"""The control plane of 20 brokers and 1,000 partitions keeps its bounds: see `docs/performance.md`.

A real manager on virtual time; brokers without partition data, which speak its protocol (`LightBroker`).
"""

from __future__ import annotations

import asyncio

from quiver.config import ManagerSettings
from quiver.testing.control_plane.world import ControlPlane, ControlPlaneCosts, run_simulated

BROKERS, PARTITIONS, REPLICAS, HOSTS = 20, 1_000, 3, 10
IDLE_S = 10


def make_world() -> ControlPlane:
    manager = ManagerSettings(rebuild_after_ms=20_000, replicas_per_broker_max=1_000_000, moves_max=32)
    return ControlPlane(brokers=BROKERS, per_host=BROKERS // HOSTS, copy_ms=500, manager=manager)


async def start(world: ControlPlane) -> ControlPlaneCosts:
    await world.start()
    before = world.costs()
    await world.create_partitions(PARTITIONS)
    return world.costs().since(before)


def commands(costs: ControlPlaneCosts, *names: str) -> list[int]:
    return [costs.commands.get(name, 0) for name in names]


async def create_and_idle(world: ControlPlane) -> tuple[ControlPlaneCosts, ControlPlaneCosts]:
    created = await start(world)
    before = world.costs()
    await asyncio.sleep(IDLE_S)
    return created, world.costs().since(before)


def test_new_partitions_are_even_on_different_hosts_and_reported_once_by_each_broker() -> None:
    world = make_world()
    created, idle = run_simulated(world, create_and_idle)
    view = world.view()
    assert world.imbalance() <= 1
    hosts = {node: view.brokers[node].wire_address.rpartition(":")[0] for node in world.brokers}
    assert all(len({hosts[node] for node in row.replicas}) == REPLICAS for row in view.partitions.values())
    reports, topics = commands(created, "report_leaders", "create_topic")
    assert (topics, reports <= 2 * BROKERS) == (1, True)
    assert not set(idle.commands) - {"record_heartbeats", "raft"}, "an idle cluster writes only last-seen times"
    assert idle.requests["heartbeat"] <= 1.2 * BROKERS * IDLE_S
    assert idle.sent_bytes <= 1_000 * BROKERS * IDLE_S, "at most 1 kB/s to each broker"


async def roll(world: ControlPlane) -> ControlPlaneCosts:
    await start(world)
    before = world.costs()
    for node in list(world.brokers)[:3]:
        world.kill(node)
        await asyncio.sleep(3)
        await world.wait(lambda: world.is_led)
        world.brokers[node].start()
        await asyncio.sleep(12)
    return world.costs().since(before)


def test_rolling_restarts_move_nothing_and_are_reported_in_batches() -> None:
    costs = run_simulated(make_world(), roll)
    begun, reports, registered = commands(costs, "begin_move", "report_leaders", "register_broker")
    led = PARTITIONS // BROKERS
    assert (begun, registered) == (0, 3)
    assert reports <= 3 * 2 * BROKERS, "at most one by each broker when a leader is lost, and one when it is back"
    assert costs.request_bytes["heartbeat"] <= 100 * costs.requests["heartbeat"] + 3 * 2 * led * 60


async def rebuild(world: ControlPlane) -> tuple[ControlPlaneCosts, int]:
    await start(world)
    before, victim = world.costs(), list(world.brokers)[-1]
    lost = world.replicas_on(victim)
    world.kill(victim)
    await world.wait(lambda: not world.replicas_on(victim) and not world.view().moves)
    return world.costs().since(before), lost


def test_lost_broker_is_rebuilt_with_the_fewest_moves() -> None:
    world = make_world()
    costs, lost = run_simulated(world, rebuild)
    begun, promoted, finished, aborted = commands(costs, "begin_move", "promote_move", "finish_move", "abort_move")
    assert (begun, promoted, finished, aborted) == (lost, lost, lost, 0)
    assert world.imbalance() <= 2
    log_bytes = sum(costs.command_bytes.values())
    entries = sum(costs.commands.values())
    heartbeats = 2_000 * BROKERS * costs.seconds
    assert costs.sent_bytes <= BROKERS * (log_bytes + 250 * entries) + heartbeats, "each broker gets each entry once"
