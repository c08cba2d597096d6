"""Managers at work: the cluster comes to what is meant to be, whoever is lost on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest
from manager_world import QUICK, WorkingWorld, run

from quiver.errors import OutcomeUnknownError, QuiverError
from quiver.metadata import BrokerState
from quiver.model import NodeId
from quiver.wire.admin_messages import AddManager
from quiver.wire.messages import (
    CreateTopicRequest,
    DeleteTopicRequest,
    DrainBroker,
    RebalanceBrokers,
    RegisterConsumerRequest,
    RemoveBroker,
    RestoreTopicRequest,
    Selection,
)


def work(test: Any, **settings: Any) -> None:
    run(test, make_world=WorkingWorld, **settings)


def state_of(world: WorkingWorld, number: int) -> BrokerState:
    return world.view.brokers[NodeId(number)].state


def held(world: WorkingWorld, number: int) -> int:
    return len(world.view.partitions_on(NodeId(number)))


def leaders(world: WorkingWorld) -> Counter[NodeId]:
    found = Counter(partition.replicas[0] for partition in world.view.partitions.values())
    return Counter({broker: found[broker] for broker in world.view.brokers})


async def start(world: WorkingWorld, *brokers: int, partitions: int) -> None:
    await world.join(*brokers)
    world.loop.create_task(world.carry_out_moves())
    await world.ask(CreateTopicRequest(topic="logs", partitions=partitions, replicas=3))


def assert_placed_well(world: WorkingWorld) -> None:
    for partition in world.view.partitions.values():
        assert len(set(partition.replicas)) == len(partition.replicas) == 3
        assert partition.learners == ()


def test_first_primary_forms_the_cluster() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.primary()
        assert await world.wait(lambda: world.view.cluster_id) == "c1"
        status = world.working((await world.primary()).id).manager.status()
        assert (status.is_primary, status.terms, status.brokers, status.members) == (True, 1, 0, (1, 2, 3))

    work(test, formed=False)


def test_drained_broker_holds_nothing_and_can_be_removed() -> None:
    async def test(world: WorkingWorld) -> None:
        await start(world, 1, 2, 3, 4, partitions=12)
        await world.ask(DrainBroker(broker=NodeId(4)))
        await world.wait(lambda: state_of(world, 4) is BrokerState.DRAINED)
        assert held(world, 4) == 0
        assert_placed_well(world)
        assert max(counts[NodeId(0)] for counts in world.moves_at_once) <= QUICK.moves_max
        assert max(counts[NodeId(4)] for counts in world.moves_at_once) <= QUICK.broker_moves_max
        await world.ask(RemoveBroker(broker=NodeId(4)))
        assert state_of(world, 4) is BrokerState.REMOVED
        await asyncio.sleep(5)  # it still beats, and asks to be registered
        assert state_of(world, 4) is BrokerState.REMOVED

    work(test)


@pytest.mark.parametrize("seed", range(4))
def test_drain_is_finished_by_whoever_is_primary(seed: int) -> None:
    async def test(world: WorkingWorld) -> None:
        rng = Random(seed)
        await start(world, 11, 12, 13, 14, partitions=20)
        await world.ask(DrainBroker(broker=NodeId(11)))
        for _ in range(3):
            await asyncio.sleep(0.2 + rng.random() / 2)
            primary = await world.primary()
            primary.kill(loses_power=rng.random() < 0.5)
            await asyncio.sleep(rng.random())
            primary.start()
        await world.wait(lambda: state_of(world, 11) is BrokerState.DRAINED)
        assert held(world, 11) == 0
        assert_placed_well(world)
        world.living.clear()
        await world.wait_equal()

    work(test, seed=seed)


def test_dead_brokers_replicas_are_built_anew_and_stay_when_it_is_back() -> None:
    async def test(world: WorkingWorld) -> None:
        await start(world, 1, 2, 3, 4, partitions=8)
        before = held(world, 3)
        world.living.discard(3)
        await world.wait(lambda: state_of(world, 3) is BrokerState.DEAD)
        assert held(world, 3) == before
        await asyncio.sleep(QUICK.rebuild_after_ms / 1000 - 1)
        assert held(world, 3) == before
        await world.wait(lambda: held(world, 3) == 0)
        await world.wait(lambda: not world.view.moves)
        assert_placed_well(world)
        await world.join(3)
        await world.wait(lambda: state_of(world, 3) is BrokerState.ALIVE)
        await asyncio.sleep(3)
        assert held(world, 3) == 0
        await world.ask(RebalanceBrokers())
        await world.wait(lambda: not world.view.counters.is_rebalancing)
        assert [held(world, number) for number in (1, 2, 3, 4)] == [6, 6, 6, 6]

    work(test)


def test_broker_that_is_back_soon_keeps_its_replicas() -> None:
    async def test(world: WorkingWorld) -> None:
        await start(world, 1, 2, 3, 4, partitions=8)
        before = held(world, 3)
        world.living.discard(3)
        await world.wait(lambda: state_of(world, 3) is BrokerState.DEAD)
        await world.join(3)
        await asyncio.sleep(QUICK.rebuild_after_ms / 1000 + 5)
        assert held(world, 3) == before

    work(test)


def test_move_whose_target_died_goes_elsewhere() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3, 4, 5)
        await world.ask(CreateTopicRequest(topic="logs", partitions=2, replicas=3))
        victim = max((1, 2, 3, 4, 5), key=lambda number: held(world, number))
        await world.ask(DrainBroker(broker=NodeId(victim)))
        await world.wait(lambda: world.view.moves or None)
        target = next(iter(world.view.moves.values())).target
        world.living.discard(target)
        await world.wait(lambda: state_of(world, target) is BrokerState.DEAD)
        world.loop.create_task(world.carry_out_moves())
        await world.wait(lambda: state_of(world, victim) is BrokerState.DRAINED)
        await world.wait(lambda: held(world, target) == 0)
        assert_placed_well(world)

    work(test)


def test_partition_gets_its_missing_replica_when_a_broker_is_back() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        world.living.discard(3)
        await world.wait(lambda: state_of(world, 3) is BrokerState.DEAD)
        await start(world, partitions=3)
        assert {len(partition.replicas) for partition in world.view.partitions.values()} == {2}
        await world.join(3)
        await world.wait(lambda: held(world, 3) == 3 and not world.view.moves)
        assert_placed_well(world)

    work(test)


def test_new_broker_gets_its_share_by_itself_if_that_is_set() -> None:
    async def test(world: WorkingWorld) -> None:
        await start(world, 1, 2, 3, partitions=8)
        await world.join(4)
        await world.wait(lambda: held(world, 4) == 6 and not world.view.moves)
        assert [held(world, number) for number in (1, 2, 3, 4)] == [6, 6, 6, 6]
        await world.wait(lambda: max(leaders(world).values()) - min(leaders(world).values()) <= 1)
        assert leaders(world).total() == 8

    work(test, manager_settings=msgspec.structs.replace(QUICK, rebalance="always"))


def test_deleted_topic_is_purged_after_its_time_unless_it_was_restored() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        for name in ("a", "b"):
            await world.ask(CreateTopicRequest(topic=name, partitions=1))
            await world.ask(DeleteTopicRequest(topic=name))
        await world.ask(RestoreTopicRequest(topic="b"))
        await asyncio.sleep(QUICK.purge_delay_ms / 1000 - 1)
        assert len(world.view.topics) == 2
        await world.wait(lambda: len(world.view.topics) == 1)
        assert [topic.name for topic in world.view.active_topics()] == ["b"]

    work(test)


def test_repeated_request_does_not_bring_a_purged_topic_back() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        request = CreateTopicRequest(topic="a", partitions=1, request_id="first")
        created = await world.ask(request)
        await world.ask(DeleteTopicRequest(topic="a"))
        await world.wait(lambda: not world.view.topics)
        repeated = await world.ask(request)
        assert repeated.topic_id == created.topic_id
        assert not world.view.topics
        (await world.primary()).kill()
        primary = (await world.primary()).id  # it remembers, too
        assert (await world.ask(request, of=primary)).topic_id == created.topic_id
        other = CreateTopicRequest(topic="a", partitions=1, request_id="second")
        assert (await world.ask(other, of=primary)).topic_id > created.topic_id
        assert (await world.ask(request, of=primary)).topic_id == created.topic_id, "its own, whoever has the name now"

    work(test, manager_settings=msgspec.structs.replace(QUICK, purge_delay_ms=0))


def test_nodes_that_join_follow_the_metadata_and_vote_once_they_are_added() -> None:
    async def test(world: WorkingWorld) -> None:
        await world.join(1, 2, 3)
        joining = world.add_node()
        joining.start()
        await world.join(joining.id)
        await world.wait(lambda: joining.id in (world._find_primary() or joining).store.members.learners)
        await world.ask(AddManager(node=joining.id))
        assert (await world.primary()).store.members.voters == (1, 2, 3, 4)
        await world.wait(lambda: joining.store.view().cluster_id)
        world.living.discard(joining.id)
        joining.kill()
        await world.wait(lambda: state_of(world, joining.id) is BrokerState.DEAD)
        await world.ask(RemoveBroker(broker=joining.id))
        primary = await world.primary()
        await world.wait(lambda: primary.store.members.members == (1, 2, 3))

    work(test)


@pytest.mark.parametrize("seed", range(3))
def test_registrations_survive_the_loss_of_the_primary_and_are_made_once(seed: int) -> None:
    async def test(world: WorkingWorld) -> None:
        rng = Random(seed)
        await world.join(11, 12, 13)
        await world.ask(CreateTopicRequest(topic="logs"))
        made: dict[str, int] = {}

        async def register(name: str) -> None:
            for number in range(15):
                request = RegisterConsumerRequest(topics=(Selection(topic="logs"),), request_id=f"{name}-{number}")
                while request.request_id not in made:
                    of = rng.randrange(3) + 1
                    if not world.working(of).is_serving:
                        await asyncio.sleep(0.05)
                        continue
                    with suppress(QuiverError, OutcomeUnknownError):
                        made[request.request_id] = (await world.ask(request, of=of)).consumer_id

        async def kill() -> None:
            for _ in range(3):
                await asyncio.sleep(rng.random() / 2)
                primary = await world.primary()
                primary.kill()
                await asyncio.sleep(rng.random())
                primary.start()

        await asyncio.gather(kill(), *(register(f"client-{number}") for number in range(3)))
        assert len(set(made.values())) == 45
        assert len(world.view.consumers) == 45

    work(test, seed=seed)
