"""Expiry: silent clients go, those that show life stay; no clock, failover or lost node takes anyone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from manager_world import QUICK, WorkingWorld, run
from metadata_world import NOW_MS, register_consumer, register_producer

from quiver.manager.client_expiry import ClientExpiry
from quiver.metadata import BrokerState, CreateTopicCommand
from quiver.model import NodeId
from quiver.wire.messages import BeatInfo, RegisterProducerRequest, Selection

PERIOD_S = 4
EXPIRING = msgspec.structs.replace(QUICK, client_alive_ms=400, client_expiry_ms=PERIOD_S * 1000)


def work(test: Any, **changes: Any) -> None:
    settings = msgspec.structs.replace(EXPIRING, **changes)
    run(test, make_world=WorkingWorld, manager_settings=settings)


async def prepare(world: WorkingWorld, *, producers: int = 0, consumers: int = 0) -> None:
    await world.join(1, 2, 3)
    assignment = (NodeId(1), NodeId(2), NodeId(3))
    await world.submit(CreateTopicCommand(now_ms=1, topic="logs", replicas=3, assignments=(assignment,)))
    for _ in range(producers):
        await world.submit(register_producer(now_ms=NOW_MS))
    for _ in range(consumers):
        await world.submit(register_consumer(now_ms=NOW_MS))


def clients(world: WorkingWorld) -> tuple[list[int], list[int]]:
    return sorted(world.view.producers), sorted(world.view.consumers)


def test_silent_clients_expire_and_those_that_are_reported_stay() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world, producers=3, consumers=3)
        for number in range(40):
            world.clients[2] = (BeatInfo("producer", 2, NOW_MS), BeatInfo("consumer", 3, NOW_MS + number))
            await asyncio.sleep(PERIOD_S / 20)
            if number < 15:
                assert clients(world) == ([1, 2, 3], [1, 2, 3])
        # The times of producer 2 never change, as with a broker whose clock stands still: it is alive all the same.
        assert clients(world) == ([2], [3])
        world.clients[2] = ()
        await asyncio.sleep(1.5 * PERIOD_S)
        assert clients(world) == ([], [])

    work(test)


def test_clients_with_a_name_expire_after_their_own_period_or_never() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world)
        await world.submit(register_producer(now_ms=NOW_MS, name="p"))
        await world.submit(register_consumer(now_ms=NOW_MS, request_id="report"))
        await asyncio.sleep(1.5 * PERIOD_S)
        assert clients(world) == ([1], [1])
        await asyncio.sleep(1.5 * PERIOD_S)
        expires = bool(world.manager_settings.named_client_expiry_ms)
        assert clients(world) == (([], []) if expires else ([1], [1]))

    work(test)
    work(test, named_client_expiry_ms=2 * PERIOD_S * 1000)


def test_nobody_expires_if_expiry_is_off() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world, producers=1)
        await asyncio.sleep(2 * PERIOD_S)
        assert clients(world) == ([1], [])

    work(test, client_expiry_ms=0)


def test_new_primary_gives_every_client_a_whole_period() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world, producers=2)
        await asyncio.sleep(0.8 * PERIOD_S)
        (await world.primary()).kill()
        await world.wait(lambda: world._find_primary())
        await asyncio.sleep(0.8 * PERIOD_S)
        assert clients(world) == ([1, 2], [])
        await asyncio.sleep(PERIOD_S)
        assert clients(world) == ([], [])

    work(test)


def test_no_time_passes_while_a_node_is_silent_and_a_dead_node_that_is_back_is_grace() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world, producers=1)
        world.living.discard(3)
        await world.wait(lambda: world.view.brokers[NodeId(3)].state is BrokerState.SUSPECT)
        await asyncio.sleep(1.2 * PERIOD_S)
        assert clients(world) == ([1], [])
        await world.wait(lambda: world.view.brokers[NodeId(3)].state is BrokerState.DEAD)
        await world.join(3)
        await asyncio.sleep(0.8 * PERIOD_S)
        assert clients(world) == ([1], [])
        await asyncio.sleep(0.8 * PERIOD_S)
        assert clients(world) == ([], [])

    work(test, dead_after_ms=6_500)


def test_registering_again_is_a_sign_of_life_whatever_the_clocks_say() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world)
        request = RegisterProducerRequest(topics=(Selection(topic="logs"),))
        registered = await world.ask(request)
        again = msgspec.structs.replace(request, producer_id=registered.producer_id)
        for _ in range(3):
            await asyncio.sleep(0.8 * PERIOD_S)
            assert (await world.ask(again)).producer_id == registered.producer_id
        await asyncio.sleep(1.5 * PERIOD_S)
        assert clients(world) == ([], [])

    work(test)


@dataclass
class JumpingClock:
    """A clock whose monotonic time a test sets."""

    now_ms: int = 0

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return NOW_MS


def test_jump_of_the_clock_counts_for_two_steps_at_most() -> None:
    async def test(world: WorkingWorld) -> None:
        await prepare(world, producers=1)
        store = (await world.primary()).store
        expiry = ClientExpiry(store, clock=JumpingClock(), settings=EXPIRING)
        await expiry._check()
        expiry._observe(365 * 24 * 3_600_000)
        assert expiry._observed_ms == 2 * expiry.interval_ms < PERIOD_S * 1000
        expiry._observe(-5_000)
        assert expiry._observed_ms == 2 * expiry.interval_ms
        await expiry._check()
        assert clients(world) == ([1], [])

    work(test)
