"""Records that are looked at without a consumer: what is asked of leaders, and where reading goes on."""

from __future__ import annotations

from typing import Any

from gateway_world import World, make_topic


async def browse(world: World, **parameters: Any) -> dict[str, Any]:
    status, answer = await world.get("/topics/t/records", **parameters)
    assert status == 200, answer
    return answer


def test_who_follows_a_partition_asks_its_leader_once_a_turn() -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        asked = len(world.cluster.calls)
        for offset, found in ((1, ["2", "4"]), (3, [])):
            answer = await browse(world, partition_id=0, offset=offset)
            assert [one["message"] for one in answer["records"]] == found
            assert answer["partitions"] == [
                {"partition_id": 0, "first_offset": 0, "end_offset": 3, "start": offset, "next_offset": 3}
            ]
        names = [name for _, name in world.cluster.calls[asked:] if name in ("fetch", "find_offset")]
        assert names == ["fetch", "fetch"]

    World().run(scenario)


def test_offset_beyond_the_end_is_the_end() -> None:
    async def scenario(world: World) -> None:
        await make_topic(world)
        answer = await browse(world, partition_id=0, offset=99)
        assert answer["records"] == []
        assert (answer["partitions"][0]["next_offset"], answer["scanned"]) == (3, 0)

    World().run(scenario)


def test_records_that_had_no_room_are_read_next() -> None:
    async def scenario(world: World) -> None:
        await make_topic(world, messages=7)
        answer = await browse(world, max=3, **{"from": "earliest"})
        seen = [one["message"] for one in answer["records"]]
        assert answer["scanned"] == len(seen) == 3
        for one in answer["partitions"]:
            more = await browse(world, partition_id=one["partition_id"], offset=one["next_offset"])
            seen += [record["message"] for record in more["records"]]
        assert sorted(seen) == [str(number) for number in range(7)]

    World().run(scenario)
