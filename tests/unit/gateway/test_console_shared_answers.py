"""Answers that many consoles ask for: how rarely the cluster is asked, and what happens to who waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_world import World, make_topic

from quiver.errors import NotFoundError, UnavailableError
from quiver.gateway.console import contract
from quiver.gateway.console.shared_answers import AGE_MS_MAX, ANSWERS_MAX, SharedAnswers
from quiver.gateway.contract import Answer
from quiver.wire.group_messages import ConfigureGroup

SHARED = ["/topics/t", "/consumers", "/consumers/1", "/groups", "/groups/c"]
SHARED += ["/groups/c/lag", "/groups/q/queue", "/pipelines"]


@pytest.mark.parametrize("path", SHARED)
def test_many_consoles_ask_the_cluster_as_often_as_one(path: str) -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        await world.register_consumer(group="c")
        await world.cluster.groups.answer(ConfigureGroup(group="q", kind="queue", topics=("t",)))
        await world.get(path, shared=True)  # the cluster is known from now on
        await asyncio.sleep(AGE_MS_MAX / 1000)
        costs: list[int] = []
        for consoles in (1, 50):
            before = len(world.cluster.calls)
            answers = await asyncio.gather(*(world.get(path, shared=True) for _ in range(consoles)))
            answers += [await world.get(path, shared=True) for _ in range(consoles)]
            costs.append(len(world.cluster.calls) - before)
            assert [status for status, _ in answers] == [200] * len(answers), answers[0]
            assert all(answer == answers[0] for answer in answers)
            await asyncio.sleep(AGE_MS_MAX / 1000)
        assert 0 < costs[1] <= costs[0]

    World().run(scenario)


def test_who_does_not_share_gets_an_answer_of_now() -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        await world.get("/topics/t", shared=True)
        await world.post("/topics/t", partitions=2, retention={"ms": 1000})
        producer_id = await world.register_producer()
        await world.post("/producer/produce", topic="t", producer_id=producer_id, message="x", partition_id=0)
        ends = [one["end_offset"] for one in (await world.get("/topics/t"))[1]["partitions"]]
        assert ends[0] == 4
        await asyncio.sleep(AGE_MS_MAX / 1000)
        assert (await world.get("/topics/t", shared=True))[1] == (await world.get("/topics/t"))[1]

    World().run(scenario)


class Route:
    """A handler that takes a second and counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    async def handle(self, given: contract.ConsumerQuery) -> Answer:
        self.calls += 1
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error
        return contract.ConsumerAnswer(name=f"{given.consumer_id}", cursors=[])


def test_failure_is_shared_by_those_who_wait_and_not_kept() -> None:
    async def scenario(world: World) -> None:
        route, shared = Route(), SharedAnswers(world.clock)
        handle: Any = shared.share({"describe_consumer": route.handle})["describe_consumer"]
        given = contract.ConsumerQuery(consumer_id=1, shared=True)
        route.error = UnavailableError("no leader")
        failed = await asyncio.gather(*(handle(given) for _ in range(5)), return_exceptions=True)
        assert [str(one) for one in failed] == ["no leader"] * 5
        assert (route.calls, shared.kept) == (1, 0)
        route.error = None
        assert (await handle(given)).name == "1"
        route.error = NotFoundError("gone")
        with pytest.raises(NotFoundError):
            await handle(contract.ConsumerQuery(consumer_id=2, shared=True))

    World().run(scenario)


def test_answer_is_computed_by_the_next_one_if_who_asked_first_is_gone() -> None:
    async def scenario(world: World) -> None:
        route, shared = Route(), SharedAnswers(world.clock)
        handle: Any = shared.share({"describe_consumer": route.handle})["describe_consumer"]
        given = contract.ConsumerQuery(consumer_id=1, shared=True)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(handle(given))
            await asyncio.sleep(0.1)
            others = [tasks.create_task(handle(given)) for _ in range(3)]
            await asyncio.sleep(0.5)
            first.cancel()
            assert route.calls == 1
        assert [one.result().name for one in others] == ["1"] * 3
        assert route.calls == 2

    World().run(scenario)


def test_memory_for_shared_answers_is_bounded_and_given_back() -> None:
    async def scenario(world: World) -> None:
        route, shared = Route(), SharedAnswers(world.clock)
        handle: Any = shared.share({"describe_consumer": route.handle})["describe_consumer"]
        asked = [contract.ConsumerQuery(consumer_id=at, shared=True) for at in range(2 * ANSWERS_MAX)]
        answers = await asyncio.gather(*map(handle, asked))
        assert [one.name for one in answers] == [str(at) for at in range(2 * ANSWERS_MAX)]
        assert shared.kept == ANSWERS_MAX
        await asyncio.sleep(AGE_MS_MAX / 1000)
        assert shared.kept == 0

    World().run(scenario)
