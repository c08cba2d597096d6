"""Records that are looked at without a consumer: what is asked of leaders, and where reading goes on."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from gateway_world import World, make_topic

from quiver.gateway.console.record_scan import ANSWER_BYTES_MAX
from quiver.record import Compression, build_batch


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


# -- large records and small batches with large payloads --------------------------------------------------------------

MIB = 1024 * 1024


def append(world: World, *values: bytes, partition_id: int = 0, time_ms: int = 1) -> None:
    """Append records that compress to next to nothing as one batch."""
    built = build_batch(list(values), timestamp=time_ms, compression=Compression.ZSTD)
    world.cluster.topics["t"].partitions[partition_id].append(built, now_ms=time_ms)


def offsets(answer: dict[str, Any], partition_id: int = 0) -> list[int]:
    return [one["offset"] for one in answer["records"] if one["partition_id"] == partition_id]


async def make_partitions(world: World, count: int) -> None:
    await world.post("/topics", topic_name="t", partitions=count)


@pytest.mark.parametrize("begins", ["earliest", "latest"])
def test_search_decodes_one_batch_at_a_time_and_a_bounded_number(begins: str) -> None:
    """80 batches, each stored in a few hundred bytes, have 320 MiB together."""

    async def scenario(world: World) -> None:
        await make_partitions(world, 1)
        for _ in range(80):
            append(world, bytes(4 * MIB))
        tracemalloc.start()
        try:
            answer = await browse(world, search="not there", scan=1000, **{"from": begins})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 32 * MIB
        (shown,) = answer["partitions"]
        assert 1 <= answer["scanned"] < 10
        if begins == "earliest":
            assert (shown["start"], shown["next_offset"]) == (0, answer["scanned"])
        else:
            assert (shown["start"], shown["next_offset"]) == (80 - answer["scanned"], 80)
        assert world.decoded.reserved_bytes == 0

    World().run(scenario)


def test_search_goes_on_where_it_ended_and_finds_what_is_there() -> None:
    async def scenario(world: World) -> None:
        await make_partitions(world, 1)
        for number in range(30):
            append(world, b"needle" if number == 25 else bytes(4 * MIB))
        position, found = 0, list[int]()
        while position < 30:
            answer = await browse(world, search="needle", partition_id=0, offset=position)
            found += offsets(answer)
            assert answer["partitions"][0]["next_offset"] > position
            position = answer["partitions"][0]["next_offset"]
        assert found == [25]

    World().run(scenario)


@pytest.mark.parametrize("file_format", ["json", "csv", "jsonl"])
def test_newest_that_fit_are_the_newest(file_format: str) -> None:
    """The newest 100 of 120 records of 1 MiB were those from 20 on, as many as fitted."""

    async def scenario(world: World) -> None:
        await make_partitions(world, 1)
        for _ in range(120):
            append(world, b"a" * MIB)
        if file_format == "json":
            answer = await browse(world, max=100)
            assert offsets(answer) == list(range(104, 120))
            assert answer["partitions"][0] | {"first_offset": 0} == {
                "partition_id": 0,
                "first_offset": 0,
                "end_offset": 120,
                "start": 104,
                "next_offset": 120,
            }
            return
        response = await world.ask_raw("GET", "/topics/t/records", query=f"max=100&format={file_format}".encode())
        assert response.body.count(b"a" * MIB) == 16

    World().run(scenario)


def test_record_larger_than_the_answer_is_returned_alone() -> None:
    async def scenario(world: World) -> None:
        await make_partitions(world, 1)
        append(world, b"a" * (20 * MIB))
        append(world, b"a" * (40 * MIB))
        assert offsets(await browse(world)) == [1]
        assert offsets(await browse(world, **{"from": "earliest"})) == [0]
        answer = await browse(world, partition_id=0, offset=0)
        assert (offsets(answer), answer["partitions"][0]["next_offset"]) == ([0], 1)

    World().run(scenario)


@pytest.mark.parametrize("begins", ["earliest", "latest"])
def test_one_answer_has_one_bound_for_all_partitions(begins: str) -> None:
    async def scenario(world: World) -> None:
        await make_partitions(world, 6)
        for number in range(10):
            for partition_id in range(6):
                append(world, b"a" * MIB, partition_id=partition_id, time_ms=1 + number)
        tracemalloc.start()
        try:
            answer = await browse(world, **{"from": begins})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(answer["records"]) == 16
        assert peak < 120 * MIB, "the records as read, as text, as JSON, and decoded again by the test"
        for one in answer["partitions"]:
            found = offsets(answer, one["partition_id"])
            assert found == list(range(one["start"], one["next_offset"])), "none is left out"
            assert (one["start"] == 0) if begins == "earliest" else (one["next_offset"] == 10)

    World().run(scenario)


def test_browsing_is_refused_while_decoded_batches_are_in_use() -> None:
    async def scenario(world: World) -> None:
        await make_partitions(world, 1)
        append(world, b"a" * (4 * MIB))
        with world.decoded.reserve(world.decoded.bytes_max - 2 * MIB):
            status, answer = await world.get("/topics/t/records", partition_id=0)
            assert (status, answer["code"]) == (503, "overloaded")
        assert offsets(await browse(world)) == [0]

    World().run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_newest_are_the_last_ones_whatever_the_sizes(seed: int) -> None:
    async def scenario(world: World) -> None:
        rng = random.Random(seed)
        await make_partitions(world, 1)
        values: list[bytes] = []
        while len(values) < 400:
            size = rng.choice((1, 100, 10_000, 400_000))
            batch = [b"%d " % (len(values) + at) + b"a" * size for at in range(rng.choice((1, 1, 3, 50)))]
            if size * len(batch) < 8 * MIB:
                append(world, *batch)
                values += batch
        wanted = rng.choice((1, 7, 100, 1_000))
        answer = await browse(world, max=wanted)
        expected, size_bytes = 0, 0
        for value in reversed(values[-wanted:]):
            size_bytes += len(value)
            if size_bytes > ANSWER_BYTES_MAX:
                break
            expected += 1
        end = len(values)
        assert offsets(answer) == list(range(end - len(answer["records"]), end))
        assert [one["message"].encode() for one in answer["records"]] == values[end - len(answer["records"]) :]
        assert answer["partitions"][0]["start"] == end - len(answer["records"])
        assert len(answer["records"]) == expected

    World().run(scenario)
