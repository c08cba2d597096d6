"""Liveness: who is silent becomes suspect, then dead; who is heard lives; a new primary condemns nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from manager_world import QUICK, WorkingWorld, World, run
from metadata_world import NOW_MS, register_broker, register_consumer

from quiver.features import LEVEL_MAX
from quiver.manager.liveness import Liveness
from quiver.metadata import BrokerState, CreateTopicCommand, EntityKind
from quiver.model import NodeId, PartitionId, TopicId
from quiver.testing import SimulatedClock
from quiver.wire.messages import BeatInfo, BrokerHeartbeatRequest, DrainBroker, LeaderInfo

ALIVE, SUSPECT, DEAD = BrokerState.ALIVE, BrokerState.SUSPECT, BrokerState.DEAD


def work(test: Any, **settings: Any) -> None:
    run(test, make_world=WorkingWorld, **settings)


def state_of(world: World, number: int) -> BrokerState:
    return world.view.brokers[NodeId(number)].state


async def create_topic(world: World, *assignments: tuple[int, ...]) -> None:
    placed = tuple(tuple(NodeId(number) for number in assignment) for assignment in assignments)
    await world.submit(CreateTopicCommand(now_ms=1, topic="logs", replicas=len(placed[0]), assignments=placed))


def test_brokers_register_by_themselves_and_stay_alive() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        await asyncio.sleep(20)
        assert [state_of(world, number) for number in (1, 2, 3)] == [ALIVE] * 3
        seen_ms = world.view.last_seen_ms(EntityKind.BROKER, 1)
        assert seen_ms is not None
        assert seen_ms > NOW_MS + 15_000

    work(test)


def test_silent_broker_is_suspect_then_dead_and_alive_when_it_is_back() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        world.living.discard(3)
        await world.wait(lambda: state_of(world, 3) is SUSPECT)
        await world.wait(lambda: state_of(world, 3) is DEAD)
        await asyncio.sleep(5)
        await world.join(3)
        await world.wait(lambda: state_of(world, 3) is ALIVE)
        await asyncio.sleep(10)
        assert [state_of(world, number) for number in (1, 2, 3)] == [ALIVE] * 3

    work(test)


def test_suspect_that_is_heard_again_is_alive_without_registering() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        registered = world.view.brokers[NodeId(3)].registered_ms
        world.living.discard(3)
        await world.wait(lambda: state_of(world, 3) is SUSPECT)
        await world.join(3)
        await world.wait(lambda: state_of(world, 3) is ALIVE)
        assert world.view.brokers[NodeId(3)].registered_ms == registered

    work(test)


def test_draining_broker_that_was_silent_is_drained_on() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        await world.ask(DrainBroker(broker=NodeId(3)))
        await world.wait(lambda: state_of(world, 3) is BrokerState.DRAINED)
        world.living.discard(3)
        await world.wait(lambda: state_of(world, 3) is DEAD)
        await world.join(3)
        await world.wait(lambda: state_of(world, 3) is BrokerState.DRAINED)

    work(test)


def test_broker_is_drained_only_when_it_says_itself_that_it_holds_nothing_since_this_drain() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        world.emptied_ms[3] = 0
        await world.ask(DrainBroker(broker=NodeId(3)))
        await asyncio.sleep(2)
        assert state_of(world, 3) is BrokerState.DRAINING
        began_ms = world.view.brokers[NodeId(3)].changed_ms
        world.emptied_ms[3] = began_ms - 1  # an earlier drain, which was undone
        await asyncio.sleep(2)
        assert state_of(world, 3) is BrokerState.DRAINING
        (await world.primary()).kill()  # what the last one has heard does not count
        world.emptied_ms[3] = began_ms
        await world.wait(lambda: state_of(world, 3) is BrokerState.DRAINED)

    work(test)


def test_new_primary_gives_everybody_a_full_grace_period() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(4, 5)
        world.living.clear()
        await asyncio.sleep(0.8)
        (await world.primary()).kill()
        await world.wait(lambda: world._find_primary())
        became_s = world.loop.time()
        await world.wait(lambda: state_of(world, 4) is SUSPECT)
        assert world.loop.time() - became_s >= QUICK.suspect_after_ms / 1000 - 0.1

    work(test)


def test_suspect_broker_stays_suspect_under_a_new_primary_until_it_is_heard() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(4, 5)
        world.living.discard(4)
        await world.wait(lambda: state_of(world, 4) is SUSPECT)
        (await world.primary()).kill()
        await world.wait(lambda: world._find_primary())
        seen = [SUSPECT]
        while seen[-1] is not DEAD:
            await asyncio.sleep(0.05)
            seen.append(state_of(world, 4))
        assert set(seen) == {SUSPECT, DEAD}
        assert state_of(world, 5) is ALIVE

    work(test)


def test_another_node_under_a_known_id_is_not_known_and_keeps_nobody_alive() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        world.living.discard(3)
        beat = BrokerHeartbeatRequest(node=NodeId(3), identity="other", level_max=LEVEL_MAX)
        for _ in range(20):
            taken, _ = await world.wire.port(beat.node).call("host1:9002", beat, timeout_ms=1_000)
            assert not taken.is_known
            await asyncio.sleep(0.2)
        assert state_of(world, 3) is DEAD

    work(test)


def test_leaders_are_in_the_metadata_before_the_heartbeat_is_answered() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        await create_topic(world, (1, 2, 3), (2, 3, 1))
        leads = tuple(LeaderInfo(TopicId(1), PartitionId(number), 7) for number in (0, 1, 9))
        beat = BrokerHeartbeatRequest(node=NodeId(2), identity="identity-2", leads=leads, level_max=LEVEL_MAX)
        taken, _ = await world.wire.port(beat.node).call("host2:9002", beat, timeout_ms=1_000)
        assert taken.is_known
        assert [(row.leader, row.epoch) for row in world.view.partitions.values()] == [(2, 7), (2, 7)]
        commit = (await world.primary()).member.commit_index
        await world.wire.port(beat.node).call("host2:9002", beat, timeout_ms=1_000)
        assert world.view.partitions[TopicId(1), PartitionId(0)].epoch == 7
        assert (await world.primary()).member.commit_index - commit <= 1  # told again, it is no news

    work(test)


def test_times_of_clients_are_recorded_together_and_only_when_they_changed() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        await create_topic(world, (1, 2, 3))
        for _ in range(5):
            await world.submit(register_consumer(now_ms=1))
        world.clients[1] = tuple(BeatInfo("consumer", number, NOW_MS + 99) for number in (1, 2, 3, 4, 77))
        await world.wait(lambda: world.view.last_seen_ms(EntityKind.CONSUMER, 4) == NOW_MS + 99)
        assert world.view.last_seen_ms(EntityKind.CONSUMER, 5) == 1
        assert (EntityKind.CONSUMER, 77) not in world.view.heartbeats
        world.clients.clear()
        before = (await world.primary()).member.commit_index
        await asyncio.sleep(10)
        after = (await world.primary()).member.commit_index
        assert after - before <= 11  # one for all brokers in each interval

    work(test)


def test_primary_that_stood_still_itself_condemns_nobody() -> None:
    async def test(world: World) -> None:
        primary = await world.primary()
        await world.submit(register_broker(1))
        clock = SimulatedClock(world.loop)
        liveness = Liveness(primary.store, clock=clock, settings=QUICK)
        running = world.loop.create_task(liveness.run())
        await asyncio.sleep(0.05)
        assert await liveness.handle_heartbeat(BrokerHeartbeatRequest(node=NodeId(1), identity="identity-1"))
        clock.set_drift(999_000_000)  # a second passes in a millisecond: to itself the process stood still
        await asyncio.sleep(0.09)
        clock.set_drift(0)
        await asyncio.sleep(0.3)
        assert state_of(world, 1) is ALIVE
        await asyncio.sleep(2)
        assert state_of(world, 1) is SUSPECT
        running.cancel()

    run(test, managers=1)


def test_manager_that_is_not_primary_takes_no_heartbeats() -> None:
    async def test(world: WorkingWorld) -> None:
        replica = await world.replica()
        await world.wait(lambda: hasattr(world.working(replica.id), "manager") or None)
        heartbeat = BrokerHeartbeatRequest(node=NodeId(1), identity="x")
        with pytest.raises(Exception, match="not the primary"):
            await world.working(replica.id).manager.handle_heartbeat(heartbeat)
        assert not world.working(replica.id).manager.status().is_primary

    work(test)
