"""Work queues over HTTP: receipts are good for one lease of one queue, and nothing else."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import pytest
from gateway_world import World

from quiver.gateway.queue_handlers import IDLE_MS_MAX, ReceiptToken, decode_receipt, encode_receipt
from quiver.model import POSITION_MAX, ConsumerId, PartitionId, TopicId
from quiver.record.delay import find_deliver_at
from quiver.record.queue_headers import DEAD_REASON_HEADER

UNKNOWN = ReceiptToken(TopicId(1), PartitionId(0), ConsumerId(1), 0, 1)


async def fill(world: World, count: int, **parameters: Any) -> None:
    await world.post("/topics", topic="jobs", partitions=1)
    producer_id = await world.register_producer("jobs")
    for number in range(count):
        status, answer = await world.post(
            "/producer/produce", topic="jobs", producer_id=producer_id, message=f"job {number}", **parameters
        )
        assert status == 200, answer


async def receive(world: World, **parameters: Any) -> list[dict[str, Any]]:
    status, answer = await world.post("/queue/receive", topic="jobs", group="workers", **parameters)
    assert status in (200, 204), answer
    return answer["jobs"] if status == 200 else []


async def settle(world: World, what: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
    return await world.post(f"/queue/{what}", topic="jobs", group="workers", **parameters)


def test_jobs_are_received_and_acknowledged_in_batches() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 3)
        jobs = await receive(world, max=10)
        assert [(job["message"], job["attempt"], job["partition_id"], job["offset"]) for job in jobs] == [
            (f"job {number}", 1, 0, number) for number in range(3)
        ]
        assert jobs[0]["lease_ms"] == 30_000
        assert await receive(world) == []
        receipts = [job["receipt"] for job in jobs]
        done = {"status": "success", "count": 3}
        assert await settle(world, "ack", receipts=receipts) == (200, done)
        assert await settle(world, "ack", receipts=receipts) == (200, done | {"settled_before": receipts})
        await asyncio.sleep(60)
        assert await receive(world) == []

    World().run(scenario)


def test_long_poll_returns_when_a_message_is_produced() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 0)
        waiting = asyncio.create_task(receive(world, wait_ms=20_000))
        await asyncio.sleep(3)
        await fill(world, 1)
        assert [job["message"] for job in await waiting] == ["job 0"]

    World().run(scenario)


def test_receipt_of_an_earlier_lease_is_refused() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 2)
        (first,) = await receive(world)
        await asyncio.sleep(31)
        (again, second) = await receive(world, max=2)
        assert (again["offset"], again["attempt"]) == (first["offset"], 2)
        for what in ("ack", "nack", "extend", "reject"):
            status, answer = await settle(world, what, receipt=first["receipt"])
            assert (status, answer["code"]) == (409, "stale_receipt")
        status, answer = await settle(world, "ack", receipts=[first["receipt"], second["receipt"]])
        assert (status, answer["count"], answer["stale"]) == (200, 1, [first["receipt"]])
        assert (await settle(world, "ack", receipt=again["receipt"]))[0] == 200

    World().run(scenario)


def test_answer_names_receipts_of_jobs_that_were_settled_before() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 2)
        late = [job["receipt"] for job in await receive(world, max=2)]
        await asyncio.sleep(31)
        again = [job["receipt"] for job in await receive(world, max=2)]
        status, answer = await settle(world, "ack", receipt=again[0])
        assert (status, answer.get("settled_before")) == (200, None)
        status, answer = await settle(world, "ack", receipt=again[0])  # a caller that lost the answer repeats the call
        assert (status, answer["count"], answer["settled_before"]) == (200, 1, [again[0]])
        status, answer = await settle(world, "ack", receipts=[late[0], again[1]])
        assert (status, answer["count"], answer["settled_before"]) == (200, 2, [late[0]])

    World().run(scenario)


@pytest.mark.parametrize("what", ["ack", "nack", "extend", "reject"])
def test_two_receipts_of_one_job_are_told_apart(what: str) -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        (first,) = await receive(world)
        await asyncio.sleep(31)
        (again,) = await receive(world)
        status, answer = await settle(world, what, receipts=[again["receipt"], first["receipt"]])
        assert (status, answer["count"], answer["stale"]) == (200, 1, [first["receipt"]])

    World().run(scenario)


def test_job_is_returned_extended_and_rejected() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        (job,) = await receive(world)
        assert (await settle(world, "nack", receipt=job["receipt"], delay_ms=5_000))[0] == 200
        assert await receive(world, wait_ms=3_000) == []
        (job,) = await receive(world, wait_ms=3_000)
        assert job["attempt"] == 2
        assert (await settle(world, "extend", receipt=job["receipt"], lease_ms=90_000))[0] == 200
        await asyncio.sleep(80)
        assert await receive(world) == []
        assert (await settle(world, "extend", receipt=job["receipt"]))[0] == 200
        assert (await settle(world, "reject", receipt=job["receipt"], reason="no such user"))[0] == 200
        (dead,) = world.cluster.partition("jobs.workers.dead", 0).batches[0].records()
        assert dict(dead.headers)[DEAD_REASON_HEADER] == b"no such user"

    World().run(scenario)


@pytest.mark.parametrize(
    "receipt",
    ["", "x", "not base64!", "AAAA", base64.urlsafe_b64encode(msgspec.msgpack.encode([1, 2, "x", 4, 5])).decode()],
)
def test_what_is_no_receipt_is_refused(receipt: str) -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        await receive(world)
        status, answer = await settle(world, "ack", receipt=receipt)
        assert (status, answer["code"]) == (400, "bad_receipt")

    World().run(scenario)


def test_receipt_with_numbers_that_cannot_be_is_refused_before_it_reaches_a_partition() -> None:
    """A receipt is no secret: its holder can change it, and a request within a node is not decoded again."""
    high, low = (1 << 64) - 1, -(1 << 63)
    changes = [("offset", one) for one in (-1, low, POSITION_MAX + 1, high)]
    changes += [("grant", one) for one in (0, low, POSITION_MAX + 1, high)]
    changes += [("partition_id", one) for one in (-1, low, high)]

    async def scenario(world: World) -> None:
        await fill(world, 1)
        (job,) = await receive(world)
        for name, value in changes:
            forged = encode_receipt(msgspec.structs.replace(decode_receipt(job["receipt"]), **{name: value}))
            for what in ("ack", "nack", "extend", "reject"):
                status, answer = await settle(world, what, receipt=forged)
                assert (status, answer.get("code")) == (400, "bad_receipt"), (what, name, value)
        assert (await settle(world, "ack", receipt=job["receipt"]))[0] == 200

    World().run(scenario)


def test_receipt_of_another_queue_is_refused() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        (job,) = await receive(world)
        status, answer = await world.post("/queue/receive", topic="jobs", group="others")
        assert status == 200
        status, answer = await settle(world, "ack", receipt=answer["jobs"][0]["receipt"])
        assert (status, answer["code"]) == (400, "bad_receipt")
        forged = msgspec.structs.replace(decode_receipt(job["receipt"]), partition_id=7)
        assert (await settle(world, "ack", receipt=encode_receipt(forged)))[0] == 404
        guessed = msgspec.structs.replace(decode_receipt(job["receipt"]), grant=99)
        assert (await settle(world, "ack", receipt=encode_receipt(guessed)))[0] == 409

    World().run(scenario)


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        ("/queue/receive", {"topic": "missing", "group": "workers"}, 404),
        ("/queue/receive", {"topic": "jobs"}, 400),
        ("/queue/receive", {"topic": "jobs", "group": ""}, 422),
        ("/queue/receive", {"topic": "jobs", "group": "workers", "max": 0}, 422),
        ("/queue/ack", {"topic": "jobs", "group": "workers"}, 400),
        ("/queue/ack", {"topic": "jobs", "group": "workers", "receipt": "a", "receipts": ["a"]}, 400),
        (
            "/queue/ack",
            {"topic": "jobs", "group": "missing", "receipt": encode_receipt(UNKNOWN)},
            404,
        ),
        ("/queue/nack", {"topic": "jobs", "group": "workers", "receipt": "a", "delay_ms": -1}, 422),
        ("/queue/extend", {"topic": "jobs", "group": "workers", "receipt": "a", "lease_ms": 0}, 422),
    ],
)
def test_wrong_calls_are_refused(path: str, parameters: dict[str, Any], status: int) -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        assert (await world.post(path, **parameters))[0] == status

    World().run(scenario)


def test_deleted_group_is_made_again_and_its_receipts_are_not_good_any_more() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 1)
        (job,) = await receive(world)
        del world.cluster.groups.groups["workers"]
        world.cluster.consumers.clear()
        for _ in range(2):
            status, answer = await settle(world, "ack", receipt=job["receipt"])
            assert (status, answer["code"]) == (404, "unknown_group")

    World().run(scenario)


def test_unused_dispatchers_are_closed_and_opened_again() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 2)
        await receive(world)
        handlers = world.gateway._queues
        assert len(handlers._queues) == 1
        await asyncio.sleep(3 * IDLE_MS_MAX / 1000)
        assert len(handlers._queues) == 0
        assert len(await receive(world, max=2)) == 2

    World().run(scenario)


def test_produced_message_says_when_it_is_due() -> None:
    async def scenario(world: World) -> None:
        now_ms = world.clock.wall_ms()
        await fill(world, 1, delay_ms=5_000)
        producer_id = await world.register_producer("jobs")
        produce = {"topic": "jobs", "producer_id": producer_id}
        for parameters in ({"deliver_at": 77}, {"deliver_at": 78, "sequence": 0, "partition_id": 0}):
            assert (await world.post("/producer/produce", **produce, message="x", **parameters))[0] == 200
        records = [{"message": "own", "delay_ms": 1}, {"message": "batch", "headers": {"a": "b"}}]
        assert (await world.post("/producer/produce_batch", **produce, records=records, deliver_at=79))[0] == 200
        assert (await world.post("/producer/produce_batch", **produce, messages=["x"], deliver_at=80))[0] == 200
        for wrong in ({"deliver_at": 1, "delay_ms": 1}, {"delay_ms": -1}, {"deliver_at": 10**16}):
            assert (await world.post("/producer/produce", **produce, message="x", **wrong))[0] in (400, 422)
        found = [record for batch in world.cluster.partition("jobs", 0).batches for record in batch.records()]
        due = [find_deliver_at(record.headers) or 0 for record in found]
        assert now_ms + 5_000 <= due[0] <= world.clock.wall_ms() + 5_000
        assert due[1:3] + due[4:] == [77, 78, 79, 80]
        assert now_ms <= due[3] <= world.clock.wall_ms() + 1
        assert ("a", b"b") in found[4].headers

    World().run(scenario)


def test_queue_is_described_by_partition() -> None:
    async def scenario(world: World) -> None:
        await fill(world, 3)
        jobs = await receive(world, max=2)
        await settle(world, "nack", receipt=jobs[0]["receipt"], delay_ms=60_000)
        status, answer = await world.get("/groups/workers/queue")
        assert status == 200
        assert answer["settings"]["lease_ms"] == 30_000
        (partition,) = answer["partitions"]
        assert {name: partition[name] for name in ("topic", "partition_id", "ready", "leased", "waiting", "dying")} == {
            "topic": "jobs", "partition_id": 0, "ready": 1, "leased": 1, "waiting": 1, "dying": 0
        }  # fmt: skip
        assert (partition["cursor"], partition["end_offset"]) == (0, 3)
        await receive(world)
        _, answer = await world.get("/groups/workers/queue")
        assert answer["partitions"][0]["stall"] == "waiting"
        assert (await world.get("/groups/nobody/queue"))[0] == 404

    World().run(scenario)
