"""Holds: placed at the given offsets, renewed under their name, removed by a release."""

from __future__ import annotations

import pytest
from client_world import World

from quiver.errors import ConflictError, NotFoundError, OutOfRangeError
from quiver.testing.memory_cluster import CallFaults


def test_hold_is_placed_renewed_and_released() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=2)
            await cluster.create_topic("audit", partitions=1)
            await cluster.hold("logs", "q", {0: 5, 1: 3}, lasting=30, owner="me")
            await cluster.hold("logs", "q", {0: 7, 1: 3}, lasting=30, owner="me")
            await cluster.hold("audit", "q", {0: 1})
            found = {(hold.topic, hold.name): dict(hold.offsets) for hold in await cluster.holds()}
            assert found == {("logs", "q"): {0: 7, 1: 3}, ("audit", "q"): {0: 1}}
            await cluster.release_hold("q", "audit")
            assert [hold.topic for hold in await cluster.holds()] == ["logs"]
            await cluster.release_hold("q")
            await cluster.release_hold("q")
            assert await cluster.holds() == []

    world.run(scenario())


def test_hold_is_for_one_incarnation_of_a_topic() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            topic_id = (await cluster.offsets("logs")).topic_id
            await cluster.delete_topic("logs")
            with pytest.raises(NotFoundError, match="unknown topic 'logs'"):
                await cluster.hold("logs", "q", {0: 0})
            await cluster.create_topic("logs", partitions=1)
            with pytest.raises(ConflictError, match="created again"):
                await cluster.hold("logs", "q", {0: 0}, topic_id=topic_id)

    world.run(scenario())


@pytest.mark.parametrize(
    ("offsets", "lasting", "error"),
    [({1: 0}, 60, NotFoundError), ({0: -1}, 60, OutOfRangeError), ({0: 0}, -1, OutOfRangeError)],
)
def test_invalid_hold_is_refused(offsets: dict[int, int], lasting: float, error: type[Exception]) -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            with pytest.raises(error):
                await cluster.hold("logs", "q", offsets, lasting=lasting)

    world.run(scenario())


def test_hold_is_placed_despite_faults() -> None:
    world = World(seed=5)
    world.cluster.faults = CallFaults(lost_request=0.3, lost_answer=0.3)

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            for offset in range(20):
                await cluster.hold("logs", "q", {0: offset})
            assert [dict(hold.offsets) for hold in await cluster.holds()] == [{0: 19}]

    world.run(scenario())
