"""What the console resets: a consumer of its own, never a group or a work queue as if it were one."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_world import World, make_topic

from quiver.wire.group_messages import ConfigureGroup, JoinGroup


@pytest.mark.parametrize("dry_run", [True, False])
def test_group_is_not_reset_as_a_consumer(dry_run: bool) -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        joined: Any = await world.cluster.groups.answer(
            JoinGroup(group="billing", topics=("t",), member_id="m1", instance="one", client="host/1")
        )
        path = f"/consumers/{joined.group_id}"
        status, answer = await world.post(f"{path}/reset", topic="t", to="latest", dry_run=dry_run)
        assert (status, answer["code"]) == (409, "group_kind")
        assert answer["message"].startswith("not done: ")
        assert "POST /groups/billing/reset" in answer["message"]
        assert (await world.get("/groups/billing/lag"))[1]["lag"] == 6
        described = (await world.get(path))[1]
        assert (described["name"], described["group_kind"]) == ("billing", "stream")

    World().run(scenario)


def test_work_queue_is_not_reset_as_a_consumer() -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        await world.cluster.groups.answer(ConfigureGroup(group="maids", kind="queue", topics=("t",)))
        (consumer,) = (await world.get("/consumers"))[1]["consumers"]
        assert (consumer["name"], consumer["group_kind"]) == ("maids", "queue")
        status, answer = await world.post(f"/consumers/{consumer['id']}/reset", topic="t", to="latest")
        assert (status, answer["code"]) == (409, "group_kind")
        assert "GET /groups/maids/queue" in answer["message"]

    World().run(scenario)


def test_consumer_of_its_own_is_reset() -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        consumer_id = await world.register_consumer()
        status, answer = await world.post(f"/consumers/{consumer_id}/reset", topic="t", to="latest")
        assert (status, [one["target"] for one in answer["cursors"]]) == (200, [3, 3])
        described = (await world.get(f"/consumers/{consumer_id}"))[1]
        assert [one["cursor"] for one in described["cursors"]] == [3, 3]
        assert (described.get("name", ""), described.get("group_kind")) == ("", None)

    World().run(scenario)
