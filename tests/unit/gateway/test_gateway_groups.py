"""Consumer groups over HTTP: listed, described, reset and deleted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from gateway_world import World

from quiver.wire.group_messages import GroupHeartbeat, JoinGroup

Scenario = Callable[[World], Coroutine[Any, Any, None]]


async def prepare(world: World, *, messages: int = 6) -> int:
    """Make a topic with messages and a group with one member, which has seen its partitions; return the group's id."""
    await world.post("/topics", topic_name="t", partitions=2)
    producer_id = await world.register_producer()
    for number in range(messages):
        given = {"topic": "t", "producer_id": producer_id, "message": str(number), "partition_id": number % 2}
        assert (await world.post("/producer/produce", **given))[0] == 200
    joined: Any = await world.cluster.groups.answer(
        JoinGroup(group="billing", topics=("t",), member_id="m1", instance="one", client="host/1")
    )
    await world.cluster.groups.answer(GroupHeartbeat(group_id=joined.group_id, member_id="m1"))
    return int(joined.group_id)


def test_group_is_listed_and_described() -> None:
    async def scenario(world: World) -> None:
        assert await world.get("/groups") == (200, {"status": "success", "groups": []})
        group_id = await prepare(world)
        (group,) = (await world.get("/groups"))[1]["groups"]
        assert (group["group"], group["group_id"], group["state"]) == ("billing", group_id, "stable")
        assert (group["members"], group["partitions"], group["unassigned"]) == (1, 2, 0)
        status, answer = await world.get("/groups/billing")
        assert (status, answer["group"]) == (200, group)
        (member,) = answer["members"]
        assert (member["member_id"], member["instance"], member["client"]) == ("m1", "one", "host/1")
        assert [(one["topic"], one["partition_id"], one["state"]) for one in member["partitions"]] == [
            ("t", 0, "owned"),
            ("t", 1, "owned"),
        ]
        assert (await world.get("/groups/nobody"))[1]["code"] == "unknown_group"

    World().run(scenario)


def test_lag_of_a_group_is_counted_by_partition() -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        status, answer = await world.get("/groups/billing/lag")
        assert (status, answer["lag"]) == (200, 6)
        assert [(one["partition_id"], one["lag"], one["member_id"]) for one in answer["partitions"]] == [
            (0, 3, "m1"),
            (1, 3, "m1"),
        ]
        assert (await world.get("/groups/billing/lag", topic="other"))[0] == 404

    World().run(scenario)


def test_reset_is_refused_while_members_are_active_unless_it_is_forced() -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        status, answer = await world.post("/groups/billing/reset", to="latest")
        assert (status, answer["code"]) == (409, "group_active")
        status, answer = await world.post("/groups/billing/reset", to="latest", dry_run=True)
        assert (status, [one["after"] for one in answer["cursors"]]) == (200, [3, 3])
        assert (await world.get("/groups/billing/lag"))[1]["lag"] == 6
        given = {"offset": 2, "topic": "t", "partition_id": 1, "force": True}
        status, answer = await world.post("/groups/billing/reset", **given)
        assert (status, answer["cursors"]) == (
            200,
            [{"topic": "t", "partition_id": 1, "before": 0, "after": 2, "end_offset": 3, "lag": 1}],
        )
        assert (await world.get("/groups/billing/lag"))[1]["lag"] == 4

    World().run(scenario)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 422),
        ({"to": "latest", "offset": 1}, 400),
        ({"to": "latest", "shift": 1}, 422),
        ({"offset": 99}, 422),
        ({"to": "middle"}, 422),
        ({"offset": 1, "partition_id": 1}, 400),
        ({"offset": 1, "partition_id": 7, "topic": "t"}, 404),
        ({"offset": 1, "topic": "other"}, 404),
    ],
)
def test_wrong_reset_moves_nothing(given: dict[str, Any], status: int) -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        assert (await world.post("/groups/billing/reset", force=True, **given))[0] == status
        assert (await world.get("/groups/billing/lag"))[1]["lag"] == 6

    World().run(scenario)


def test_consumers_that_register_with_a_group_share_its_messages() -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        given = {"topic": "t", "group": "report"}
        first, second = [(await world.post("/consumer/register", **given))[1]["consumer_id"] for _ in range(2)]
        assert first == second
        seen = [(await world.get("/consumer/consume", topic="t", consumer_id=first))[1]["message"] for _ in range(6)]
        assert sorted(seen) == ["0", "1", "2", "3", "4", "5"]
        assert (await world.get("/groups/report/lag"))[1]["lag"] == 0
        status, answer = await world.post("/consumer/register", topic="t", group="billing")
        assert (status, answer["code"]) == (409, "group_active")
        assert (await world.post("/consumer/register", **given, consumer_id=first))[0] == 400

    World().run(scenario)


def test_group_is_deleted_with_its_cursors() -> None:
    async def scenario(world: World) -> None:
        await prepare(world)
        status, answer = await world.ask("DELETE", "/groups/billing")
        assert (status, answer["code"]) == (409, "group_active")
        assert (await world.ask("DELETE", "/groups/billing", force=True))[0] == 200
        assert (await world.get("/groups"))[1]["groups"] == []
        assert (await world.ask("DELETE", "/groups/billing"))[0] == 404

    World().run(scenario)
