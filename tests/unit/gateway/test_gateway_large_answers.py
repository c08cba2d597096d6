"""Large records over HTTP: their memory is reserved before a cursor moves, and who finds none loses nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_world import World

from quiver.record import Compression, build_batch
from quiver.security import ANONYMOUS
from quiver.wire.answer_room import AnswerRoom

MIB = 1024 * 1024
LARGE = b"a" * 8 * MIB
CONSUMES = [("consume", {}), ("consume", {"wait_ms": 100}), ("consume_batch", {})]


async def fill(world: World, *values: bytes, partitions: int = 1) -> int:
    """Append values as a batch each; return a consumer."""
    await world.post("/topics", topic_name="t", partitions=partitions)
    consumer_id = await world.register_consumer()
    for number, value in enumerate(values):
        built = build_batch([value], timestamp=1, compression=Compression.ZSTD)
        world.cluster.topics["t"].partitions[number % partitions].append(built, now_ms=1)
    return consumer_id


async def consume(world: World, consumer_id: int, path: str = "consume", **about: Any) -> tuple[int, list[str]]:
    status, answer = await world.get(f"/consumer/{path}", topic="t", consumer_id=consumer_id, **about)
    if status != 200:
        return status, [answer.get("outcome", "")]
    return status, [one["message"] for one in answer.get("messages", [answer])]


def occupy(world: World) -> AnswerRoom:
    """Take all the memory of answers, as one that is being read slowly does."""
    room = AnswerRoom(world.answers, ANONYMOUS)
    room.count(world.answers.limit_bytes)
    return room


@pytest.mark.parametrize(("path", "about"), CONSUMES)
def test_large_record_is_delivered_whole_and_its_memory_given_back(path: str, about: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        consumer_id = await fill(world, LARGE)
        assert await consume(world, consumer_id, path, **about) == (200, [LARGE.decode()])
        assert (await consume(world, consumer_id, path, **about))[0] == 204
        assert world.answers.bytes == world.decoded.reserved_bytes == 0

    World().run(scenario)


@pytest.mark.parametrize(("path", "about"), CONSUMES)
def test_consume_without_memory_is_not_done_and_loses_nothing(path: str, about: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        consumer_id = await fill(world, LARGE)
        other = occupy(world)
        assert await consume(world, consumer_id, path, **about) == (503, ["not_done"])
        assert not world.cluster.partition("t", 0).cursors
        other.release()
        assert await consume(world, consumer_id, path, **about) == (200, [LARGE.decode()])

    World().run(scenario)


@pytest.mark.parametrize(("path", "about"), CONSUMES)
def test_consume_waits_for_memory(path: str, about: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        consumer_id = await fill(world, LARGE)
        other = occupy(world)
        waiting = asyncio.ensure_future(consume(world, consumer_id, path, **about))
        await asyncio.sleep(2)
        assert not waiting.done()
        other.release()
        assert await waiting == (200, [LARGE.decode()])

    World().run(scenario)


def test_large_record_of_one_consumer_delays_no_other_of_its_partition() -> None:
    async def scenario(world: World) -> None:
        first = await fill(world, LARGE, b"small")
        second = await world.register_consumer()
        assert (await consume(world, second, partition_id=0, offset=0))[0] == 200
        other = AnswerRoom(world.answers, ANONYMOUS)
        other.count(world.answers.limit_bytes // 2)  # no room for large answers, and enough for small ones
        waiting = asyncio.ensure_future(consume(world, first))
        assert await consume(world, second) == (200, ["small"])
        assert not waiting.done()
        other.release()
        assert await waiting == (200, [LARGE.decode()])

    World().run(scenario)


def test_calls_of_one_consumer_get_each_large_record_once() -> None:
    async def scenario(world: World) -> None:
        values = [b"%d" % number + LARGE for number in range(6)]
        consumer_id = await fill(world, *values)
        answers = await asyncio.gather(*(consume(world, consumer_id) for _ in range(8)))
        assert sorted(one for status, found in answers if status == 200 for one in found) == sorted(
            value.decode() for value in values
        )
        assert [status for status, _ in answers].count(204) == 2

    World().run(scenario)


def test_call_whose_client_is_gone_takes_no_record_when_there_is_memory() -> None:
    async def scenario(world: World) -> None:
        consumer_id = await fill(world, LARGE)
        other = occupy(world)
        gone = asyncio.ensure_future(consume(world, consumer_id))
        await asyncio.sleep(1)
        gone.cancel()
        other.release()
        await asyncio.sleep(1)
        assert not world.cluster.partition("t", 0).cursors
        assert world.answers.bytes == 0

    World().run(scenario)


def test_batch_ends_before_a_record_that_would_be_large() -> None:
    async def scenario(world: World) -> None:
        consumer_id = await fill(world, b"small", LARGE, b"next", partitions=2)
        found: list[tuple[int, list[str]]] = []
        while len(found) < 2:
            found.append(await consume(world, consumer_id, "consume_batch", max=10))
        assert [status for status, _ in found] == [200, 200]
        assert sorted(one for _, each in found for one in each) == sorted(["small", "next", LARGE.decode()])

    World().run(scenario)


def test_jobs_wait_for_memory_before_they_are_leased() -> None:
    async def scenario(world: World) -> None:
        await fill(world, LARGE)
        other = occupy(world)
        status, answer = await world.post("/queue/receive", topic="t", group="workers")
        assert status in (204, 503), answer
        other.release()
        status, answer = await world.post("/queue/receive", topic="t", group="workers", wait_ms=5_000)
        assert status == 200
        assert [(job["message"], job["attempt"]) for job in answer["jobs"]] == [(LARGE.decode(), 1)]
        assert world.answers.bytes == 0

    World().run(scenario)


@pytest.mark.parametrize("file_format", ["json", "jsonl", "csv"])
def test_looking_at_large_records_does_not_wait(file_format: str) -> None:
    async def scenario(world: World) -> None:
        await fill(world, LARGE)
        other = occupy(world)
        refused = await world.ask_raw("GET", "/topics/t/records", query=b"format=" + file_format.encode())
        assert (refused.status, refused.error_code) == (503, "overloaded")
        other.release()
        found = await world.ask_raw("GET", "/topics/t/records", query=b"format=" + file_format.encode())
        assert found.status == 200
        assert LARGE in found.body
        assert world.answers.bytes == world.decoded.reserved_bytes == 0

    World().run(scenario)


def test_small_answers_are_reserved_only_when_memory_is_tight() -> None:
    async def scenario(world: World) -> None:
        consumer_id = await fill(world, *(b"small" for _ in range(4)))
        other = AnswerRoom(world.answers, ANONYMOUS)
        other.count(world.answers.limit_bytes // 2 + 1)
        for path, about in CONSUMES[:2]:
            assert (await consume(world, consumer_id, path, **about))[0] == 200
        other.count(world.answers.limit_bytes)
        for path, about in CONSUMES:
            assert await consume(world, consumer_id, path, **about) == (503, ["not_done"])
        other.release()
        assert (await consume(world, consumer_id, "consume_batch")) == (200, ["small", "small"])

    World().run(scenario)
