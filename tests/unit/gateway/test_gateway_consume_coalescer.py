"""Calls for the next message, answered together: each gets its own, nobody is forgotten, whoever goes away."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.model import ConsumerId, NodeId
from quiver.testing.memory_cluster import CallFaults


async def fill(world: World, count: int, **about: Any) -> None:
    producer_id = await world.register_producer()
    for number in range(count):
        await world.post("/producer/produce", topic="t", producer_id=producer_id, message=f"m{number}", **about)


async def take(world: World, consumer_id: int, **about: Any) -> tuple[int, dict[str, Any]]:
    return await world.get("/consumer/consume", topic="t", consumer_id=consumer_id, **about)


def asked(world: World) -> int:
    """Return how many requests leaders got."""
    return sum(name in ("take_each", "consume") for _, name in world.cluster.calls)


def messages(answers: list[tuple[int, dict[str, Any]]]) -> list[str]:
    return sorted(answer["message"] for status, answer in answers if status == 200)


def test_calls_of_one_consumer_share_steps_and_no_message() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 60)
        consumer_id = await world.register_consumer()
        world.cluster.calls.clear()
        answers = await asyncio.gather(*(take(world, consumer_id) for _ in range(62)))
        assert messages(answers) == sorted(f"m{number}" for number in range(60))
        assert [status for status, _ in answers].count(204) == 2
        assert asked(world) < 12

    World().run(scenario)


def test_consumers_share_steps_and_each_gets_every_message() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 9)
        consumers = [await world.register_consumer() for _ in range(20)]
        world.cluster.calls.clear()
        for _ in range(9):
            answers = await asyncio.gather(*(take(world, consumer_id) for consumer_id in consumers))
            assert {status for status, _ in answers} == {200}
        assert {(await take(world, consumer_id))[0] for consumer_id in consumers} == {204}
        assert asked(world) < 9 * 3 * 2 + 20 * 3
        cursors = [world.cluster.partition("t", number).cursors for number in range(3)]
        assert {sum(own[ConsumerId(consumer_id)] for own in cursors) for consumer_id in consumers} == {9}

    World().run(scenario)


def test_partitions_take_turns() -> None:
    async def scenario(world: World) -> None:
        for partition_id in (0, 2):
            await fill(world, 2, partition_id=partition_id)
        consumer_id = await world.register_consumer()
        turns = [(await take(world, consumer_id))[1]["partition_id"] for _ in range(4)]
        assert turns == [0, 2, 0, 2]

    World().run(scenario)


def test_more_than_fits_into_an_answer_is_asked_for_again() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 10, partition_id=0)
        world.cluster.consumers_max = 3
        consumer_id = await world.register_consumer()
        answers = await asyncio.gather(*(take(world, consumer_id, partition_id=0) for _ in range(10)))
        assert messages(answers) == sorted(f"m{number}" for number in range(10))

    World().run(scenario)


def test_consumer_that_a_leader_refuses_is_refused_alone() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 5, partition_id=0)
        consumers = [await world.register_consumer() for _ in range(4)]
        world.cluster.unwelcome.add(ConsumerId(consumers[1]))
        answers = await asyncio.gather(*(take(world, consumer_id, partition_id=0) for consumer_id in consumers))
        assert [status for status, _ in answers] == [200, 403, 200, 200]
        assert answers[1][1]["code"] == "not_registered"

    World().run(scenario)


def test_partition_that_cannot_be_asked_is_passed_over_while_another_has_something() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1, partition_id=2)
        consumer_id = await world.register_consumer()
        world.cluster.move_leader("t", 0, 2)
        world.cluster.move_leader("t", 2, 3)
        world.cluster.stopped.add(NodeId(2))
        answers = [await take(world, consumer_id) for _ in range(2)]
        assert answers[0][1]["message"] == "m0"
        assert (answers[1][0], answers[1][1]["outcome"]) == (503, "not_done"), "there may be what it cannot see"

    World().run(scenario)


@given(
    seed=st.integers(0, 1000),
    leavers=st.sets(st.integers(0, 19)),
    lost=st.sampled_from([0.0, 0.3]),
    rounds=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_every_call_is_answered_whoever_goes_away(seed: int, leavers: set[int], lost: float, rounds: int) -> None:
    """No message is given twice, and none is missing that no unanswered call can have taken along."""

    async def scenario(world: World) -> None:
        await fill(world, 30)
        consumers = [await world.register_consumer() for _ in range(3)]
        seen: dict[int, list[str]] = {consumer_id: [] for consumer_id in consumers}
        lost_calls = dict.fromkeys(consumers, 0)
        world.cluster.faults = CallFaults(lost_answer=lost)

        async def call(number: int, consumer_id: int) -> None:
            work = asyncio.ensure_future(take(world, consumer_id))
            if number in leavers:
                await asyncio.sleep(0.0007 * number)
                work.cancel()
            await asyncio.wait([work])
            if work.cancelled() or (answer := work.result())[0] >= 500:
                lost_calls[consumer_id] += 1
            elif answer[0] == 200:
                seen[consumer_id].append(answer[1]["message"])

        for _ in range(rounds):
            await asyncio.gather(*(call(number, consumers[number % 3]) for number in range(20)))
        world.cluster.faults = CallFaults()
        for consumer_id in consumers:
            while (answer := await take(world, consumer_id))[0] == 200:
                seen[consumer_id].append(answer[1]["message"])
            assert len(set(seen[consumer_id])) == len(seen[consumer_id])
            assert 30 - len(seen[consumer_id]) <= lost_calls[consumer_id]

    World(seed).run(scenario)


def test_defect_is_told_to_all_who_wait() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        consumer_id = await world.register_consumer()

        async def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        world.gateway._router.ask_leader = fail  # type: ignore[method-assign, assignment] # a defect, for once
        answers = await asyncio.gather(*(take(world, consumer_id) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ZeroDivisionError] * 3

    World().run(scenario)
