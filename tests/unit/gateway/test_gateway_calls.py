"""Every call of the contract, against a cluster in memory that loses nothing: what goes in, what comes out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from gateway_world import World

from quiver.config import GatewaySettings
from quiver.errors import DiskFullError, OutcomeUnknownError, RequestError
from quiver.gateway.codec import check_keys
from quiver.model import NodeId
from quiver.testing.memory_cluster import CallFaults

Scenario = Callable[[World], Coroutine[Any, Any, None]]


def in_world(scenario: Scenario) -> Callable[[], None]:
    @wraps(scenario)
    def run() -> None:
        World().run(scenario)

    del run.__wrapped__  # pytest would look for a fixture called world
    return run


# -- topics ------------------------------------------------------------------------------------------


@in_world
async def test_topic_is_made_listed_and_deleted(world: World) -> None:
    assert await world.get("/topics") == (200, {"status": "success", "topics": []})
    made = await world.post("/topics", topic_name="b", partitions="2")
    assert made == (201, {"status": "success", "topic": "b", "partitions": 2})
    assert (await world.post("/topics", topic="a"))[1]["partitions"] == 3
    assert (await world.get("/topics"))[1]["topics"] == ["a", "b"]
    status, answer = await world.post("/topics", topic_name="b")
    assert (status, answer["code"]) == (409, "topic_exists")
    assert await world.ask("DELETE", "/topics/b") == (200, {"status": "success"})
    assert (await world.get("/topics"))[1]["topics"] == ["a"]
    assert (await world.ask("DELETE", "/topics/b"))[0] == 404


@pytest.mark.parametrize(("delay_s", "status"), [(8.0, 200), (12.0, 504)])
def test_deletion_that_is_never_repeated_may_take_the_whole_timeout(delay_s: float, status: int) -> None:
    async def scenario(world: World) -> None:
        await world.post("/topics", topic_name="b")
        world.cluster.delays_s["delete_topic"] = delay_s
        assert (await world.ask("DELETE", "/topics/b"))[0] == status
        assert len([name for _, name in world.cluster.calls if name == "delete_topic"]) == 1

    World(settings=GatewaySettings(request_timeout_ms=10_000)).run(scenario)


@pytest.mark.parametrize("parameters", [{}, {"topic": "a", "topic_name": "b"}, {"topic": 7}])
def test_topic_without_one_name_is_refused(parameters: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        assert (await world.post("/topics", **parameters))[0] == 400

    World().run(scenario)


@in_world
async def test_topic_is_described_as_its_leaders_see_it(world: World) -> None:
    await world.post("/topics", topic_name="t", partitions=2, retention={"ms": 5})
    producer_id = await world.register_producer()
    for _ in range(3):
        await world.post("/producer/produce", topic="t", producer_id=producer_id, message="x", partition_id=0)
    status, answer = await world.get("/topics/t")
    assert status == 200
    assert answer["configuration"] == {
        "partitions": 2,
        "replicas": 3,
        "retention": {"ms": 5},
    }
    first = answer["partitions"][0]
    assert (first["partition_id"], first["first_offset"], first["end_offset"]) == (0, 0, 3)
    assert first["leader"] in first["replicas"]
    assert (await world.get("/topics/unknown"))[0] == 404


@in_world
async def test_partitions_are_listed(world: World) -> None:
    await world.post("/topics", topic_name="t", partitions=2)
    status, answer = await world.get("/partitions", topic="t")
    assert status == 200
    assert [partition["partition_id"] for partition in answer["partitions"]] == [0, 1]
    assert answer["partitions"][0]["replicas"] == [1, 2, 3]
    assert (await world.get("/partitions", topic="u"))[1]["code"] == "unknown_topic"
    assert (await world.get("/partitions"))[0] == 400


# -- producers ---------------------------------------------------------------------------------------


@in_world
async def test_registering_a_producer_makes_the_topic(world: World) -> None:
    status, answer = await world.post("/producer/register", topic="t")
    assert status == 200
    assert answer == {"status": "success", "producer_id": answer["producer_id"], "epoch": 0, "sequences": {}}
    assert (await world.get("/topics"))[1]["topics"] == ["t"]


@in_world
async def test_messages_without_partition_take_turns_and_arrive(world: World) -> None:
    producer_id = await world.register_producer()
    places = []
    for number in range(6):
        status, answer = await world.post("/producer/produce", topic="t", producer_id=producer_id, message=f"m{number}")
        assert status == 200
        places.append((answer["partition_id"], answer["offset"]))
    assert sorted(places) == [(partition, offset) for partition in range(3) for offset in range(2)]
    assert ("producer", producer_id) in world.cluster.heard


@in_world
async def test_messages_that_come_together_share_batches(world: World) -> None:
    producer_id = await world.register_producer()
    await world.post("/producer/produce", topic="t", producer_id=producer_id, message="first", partition_id=0)
    requests = [
        world.post("/producer/produce", topic="t", producer_id=producer_id, message=f"m{number}", partition_id=0)
        for number in range(200)
    ]
    answers = await asyncio.gather(*requests)
    assert all(status == 200 for status, _ in answers)
    assert sorted(answer["offset"] for _, answer in answers) == list(range(1, 201))
    partition = world.cluster.partition("t", 0)
    values = partition.values()
    assert [values[answer["offset"]] for _, answer in answers] == [f"m{number}".encode() for number in range(200)]
    assert len(partition.batches) < 20


@in_world
async def test_equal_keys_go_to_one_partition(world: World) -> None:
    producer_id = await world.register_producer()
    answers = [
        await world.post("/producer/produce", topic="t", producer_id=producer_id, message="m", key="k")
        for _ in range(4)
    ]
    assert len({answer["partition_id"] for _, answer in answers}) == 1


@pytest.mark.parametrize("sequence", [None, 0])
def test_message_has_the_headers_and_the_timestamp_that_were_given(sequence: int | None) -> None:
    async def scenario(world: World) -> None:
        producer_id, consumer_id = await world.register_producer(), await world.register_consumer()
        given = {"topic": "t", "producer_id": producer_id, "partition_id": 0, "message": "m", "sequence": sequence}
        texts, encoded = {"host": "web-1", "empty": ""}, {"raw": "/w=="}
        more = {"headers": texts, "headers_b64": encoded, "timestamp": 5}
        status, answer = await world.post("/producer/produce", **given, **more)
        assert status == 200, answer
        status, answer = await world.get("/consumer/consume", topic="t", consumer_id=consumer_id)
        assert (answer["timestamp"], answer["headers"], answer["headers_b64"]) == (5, texts, encoded)
        for bad in ({"headers_b64": {"raw": "?"}}, {"headers": texts, "headers_b64": {"host": ""}}, {"headers": ["a"]}):
            status, answer = await world.post("/producer/produce", **given, **bad)
            assert status == 400, bad

    World().run(scenario)


@in_world
async def test_binary_messages_go_in_and_come_out(world: World) -> None:
    producer_id, consumer_id = await world.register_producer(), await world.register_consumer()
    encoded = base64.b64encode(b"\xff\x00").decode()
    await world.post("/producer/produce", topic="t", producer_id=producer_id, message_b64=encoded, key="k")
    status, answer = await world.get("/consumer/consume", topic="t", consumer_id=consumer_id)
    assert status == 200
    assert answer["message_b64"] == encoded
    assert answer["key"] == "k"
    assert "message" not in answer


@pytest.mark.parametrize(
    "message",
    [{}, {"message": "a", "message_b64": "YQ=="}, {"message_b64": "%"}, {"message": None}, {"message": 7}],
)
def test_message_that_cannot_be_read_is_refused(message: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        producer_id = await world.register_producer()
        assert (await world.post("/producer/produce", topic="t", producer_id=producer_id, **message))[0] == 400

    World().run(scenario)


@in_world
async def test_producer_may_use_only_what_it_is_registered_for(world: World) -> None:
    producer_id = await world.register_producer("t")
    await world.post("/topics", topic_name="u")
    status, answer = await world.post("/producer/produce", topic="u", producer_id=producer_id, message="m")
    assert (status, answer["code"]) == (403, "not_registered")
    status, answer = await world.post("/producer/produce", topic="t", producer_id=999, message="m")
    assert (status, answer["code"]) == (404, "unknown_producer")
    status, answer = await world.post("/producer/produce", topic="v", producer_id=producer_id, message="m")
    assert (status, answer["code"]) == (404, "unknown_topic")
    status, answer = await world.post(
        "/producer/produce", topic="t", producer_id=producer_id, message="m", partition_id=3
    )
    assert (status, answer["code"]) == (404, "unknown_partition")


@in_world
async def test_producer_of_one_partition_keeps_to_it(world: World) -> None:
    producer_id = await world.register_producer("t", partition_id=1)
    for _ in range(3):
        answer = (await world.post("/producer/produce", topic="t", producer_id=producer_id, message="m"))[1]
        assert answer["partition_id"] == 1
    status, _ = await world.post("/producer/produce", topic="t", producer_id=producer_id, message="m", partition_id=0)
    assert status == 403


@in_world
async def test_client_that_registered_elsewhere_a_moment_ago_is_found(world: World) -> None:
    producer_id = await world.register_producer()
    await world.post("/producer/produce", topic="t", producer_id=producer_id, message="m")
    world.cluster.linearizable_reads = 0
    world.cluster.hidden.add(("producer", producer_id))
    assert (await world.post("/producer/produce", topic="t", producer_id=producer_id, message="m"))[0] == 200
    assert world.cluster.linearizable_reads == 1
    assert (await world.post("/producer/produce", topic="t", producer_id=producer_id, message="m"))[0] == 200
    assert world.cluster.linearizable_reads == 1, "who is known costs nothing"


@in_world
async def test_batch_is_appended_together(world: World) -> None:
    producer_id = await world.register_producer()
    status, answer = await world.post(
        "/producer/produce_batch", topic="t", producer_id=producer_id, messages=["a", "b", "c"], partition_id=2
    )
    assert (status, answer) == (200, {"status": "success", "partition_id": 2, "offset": 0, "count": 3})
    assert world.cluster.partition("t", 2).values() == [b"a", b"b", b"c"]
    assert len(world.cluster.partition("t", 2).batches) == 1
    status, answer = await world.post(
        "/producer/produce_batch", topic="t", producer_id=producer_id, messages_b64=["/w=="], partition_id=2
    )
    assert (status, answer["offset"]) == (200, 3)
    assert (await world.post("/producer/produce_batch", topic="t", producer_id=producer_id, messages=[]))[0] == 422
    assert (await world.post("/producer/produce_batch", topic="t", producer_id=producer_id))[0] == 400


@in_world
async def test_batch_carries_what_the_sdk_can_send(world: World) -> None:
    producer_id = await world.register_producer()
    about: dict[str, Any] = {"topic": "t", "producer_id": producer_id}
    records: list[dict[str, Any]] = [
        {"message": "a", "key": "k", "timestamp": 5, "headers": {"text": "x", "empty": None}},
        {"message_b64": "/w==", "key_b64": "/w==", "headers_b64": {"bytes": "/w=="}},
        {"message": None},
    ]
    for partition, sequence in ((0, {}), (1, {"sequence": 0})):
        status, answer = await world.post(
            "/producer/produce_batch",
            **about,
            records=records,
            partition_id=partition,
            timestamp=9,
            key="all",
            headers={"of": "all"},
            **sequence,
        )
        assert (status, answer["offset"], answer["count"]) == (200, 0, 3)
        (batch,) = world.cluster.partition("t", partition).batches
        assert [(one.value, one.key, one.timestamp, dict(one.headers)) for one in batch.records()] == [
            (b"a", b"k", 5, {"text": b"x", "empty": None}),
            (b"\xff", b"\xff", 9, {"bytes": b"\xff"}),
            (None, b"all", 9, {"of": b"all"}),
        ]


@in_world
async def test_key_of_bytes_chooses_the_partition_as_a_text_does(world: World) -> None:
    producer_id = await world.register_producer()
    about: dict[str, Any] = {"topic": "t", "producer_id": producer_id}
    encoded = base64.b64encode(b"user 7").decode()
    found = [
        await world.post("/producer/produce", **about, message="m", key="user 7"),
        await world.post("/producer/produce", **about, message="m", key_b64=encoded),
        await world.post("/producer/produce_batch", **about, messages=["m"], key_b64=encoded),
        await world.post("/producer/produce_batch", **about, records=[{"message": "m", "key": "user 7"}] * 2),
        await world.post("/producer/produce_batch", **about, messages=["m"], key="user 7", timestamp=5),
    ]
    assert {status for status, _ in found} == {200}
    assert len({answer["partition_id"] for _, answer in found}) == 1


@in_world
async def test_batch_that_says_two_things_is_refused(world: World) -> None:
    producer_id = await world.register_producer()
    for wrong, code in (
        ({"messages": ["a"], "records": [{"message": "a"}]}, "bad_request"),
        ({"records": []}, "out_of_range"),
        ({"records": [{}]}, "bad_request"),
        ({"records": [{"message": "a", "message_b64": "YQ=="}]}, "bad_request"),
        ({"records": [{"message": "a", "key": "a", "key_b64": "YQ=="}]}, "given_twice"),
        ({"records": [{"message": "a", "mesage": "a"}]}, "unknown_field"),
        ({"records": [{"message": "a", "key": "1"}, {"message": "a", "key": "2"}]}, "several_keys"),
        ({"messages": ["a"], "key": "a", "key_b64": "YQ=="}, "given_twice"),
    ):
        status, answer = await world.post("/producer/produce_batch", topic="t", producer_id=producer_id, **wrong)
        assert (status in (400, 422), answer["code"]) == (True, code), wrong
    assert all(not world.cluster.partition("t", number).batches for number in range(3))


def test_field_that_is_given_twice_is_found_in_a_long_list_of_records() -> None:
    records = b'{"message":"m"},' * 1_000 + b'{"message":"a","message":"b"}'
    with pytest.raises(RequestError, match="'message' is given twice"):
        check_keys(b'{"topic":"t","records":[' + records + b"]}")
    check_keys(b'{"topic":"t","messages":[' + b'"{",' * 2_000 + b'"x"]}')


# -- sequences ---------------------------------------------------------------------------------------


@in_world
async def test_repeated_call_with_a_sequence_returns_the_first_offset(world: World) -> None:
    producer_id = await world.register_producer()
    about: dict[str, Any] = {"topic": "t", "producer_id": producer_id, "partition_id": 0}
    first = await world.post("/producer/produce", **about, message="a", sequence=0)
    assert first == (200, {"status": "success", "partition_id": 0, "offset": 0})
    assert await world.post("/producer/produce", **about, message="a", sequence="0") == first
    status, answer = await world.post("/producer/produce", **about, message="c", sequence=2)
    assert (status, answer["code"]) == (409, "out_of_sequence")
    batch = await world.post("/producer/produce_batch", **about, messages=["b", "c"], sequence=1)
    assert batch == (200, {"status": "success", "partition_id": 0, "offset": 1, "count": 2})
    assert await world.post("/producer/produce_batch", **about, messages=["b", "c"], sequence=1) == batch
    assert world.cluster.partition("t", 0).values() == [b"a", b"b", b"c"]


@in_world
async def test_sequence_needs_its_partition(world: World) -> None:
    producer_id = await world.register_producer()
    status, _ = await world.post("/producer/produce", topic="t", producer_id=producer_id, message="a", sequence=0)
    assert status == 400


@in_world
async def test_restarted_producer_gets_its_id_and_sequences_back_and_fences_its_former_self(world: World) -> None:
    status, first = await world.post("/producer/register", topic="t", prod_name="web-1")
    assert (status, first["epoch"], first["sequences"]) == (200, 0, {})
    about: dict[str, Any] = {"topic": "t", "producer_id": first["producer_id"], "partition_id": 1}
    for number in range(2):
        await world.post("/producer/produce", **about, message="m", sequence=number, epoch=0)
    status, again = await world.post("/producer/register", topic="t", prod_name="web-1")
    assert (again["producer_id"], again["epoch"]) == (first["producer_id"], 1)
    assert again["sequences"] == {"0": 0, "1": 2, "2": 0}
    status, answer = await world.post("/producer/produce", **about, message="m", sequence=2, epoch=0)
    assert (status, answer["code"]) == (409, "fenced")
    status, answer = await world.post("/producer/produce", **about, message="m", epoch=0)
    assert (status, answer["code"]) == (409, "fenced")
    status, answer = await world.post("/producer/produce", **about, message="m", sequence=2, epoch=1)
    assert (status, answer["offset"]) == (200, 2)


@in_world
async def test_client_that_registered_elsewhere_is_served_although_the_leader_lags_behind(world: World) -> None:
    own: dict[str, Any] = {"topic": "t", "producer_id": await world.register_producer(), "partition_id": 0}
    assert (await world.post("/producer/produce", **own, message="m", sequence=0))[0] == 200
    about: dict[str, Any] = {"topic": "t", "producer_id": world.cluster.register_elsewhere("w", "t"), "partition_id": 1}
    world.cluster.are_leaders_behind = True
    before = world.cluster.linearizable_reads
    for number in range(3):
        status, answer = await world.post("/producer/produce", **about, message="m", sequence=number, epoch=0)
        assert (status, answer.get("offset")) == (200, number)
    assert world.cluster.linearizable_reads == before + 1


@in_world
async def test_names_of_gateways_are_not_for_clients(world: World) -> None:
    assert (await world.post("/producer/register", topic="t", prod_name="_gateway/1/1"))[0] == 403


# -- consumers ---------------------------------------------------------------------------------------


async def produce(world: World, count: int, **about: Any) -> None:
    producer_id = await world.register_producer()
    for number in range(count):
        status, _ = await world.post(
            "/producer/produce", topic="t", producer_id=producer_id, message=f"m{number}", **about
        )
        assert status == 200


@in_world
async def test_consumer_needs_a_topic_that_exists(world: World) -> None:
    status, answer = await world.post("/consumer/register", topic="t")
    assert (status, answer["code"]) == (404, "unknown_topic")


@in_world
async def test_every_message_is_consumed_once_and_then_nothing(world: World) -> None:
    await produce(world, 7)
    consumer_id = await world.register_consumer()
    assert (await world.get("/size", topic="t", consumer_id=consumer_id))[1]["size"] == 7
    seen, partitions = [], []
    for _ in range(7):
        status, answer = await world.get("/consumer/consume", topic="t", consumer_id=str(consumer_id))
        assert status == 200
        seen.append(answer["message"])
        partitions.append(answer["partition_id"])
        assert answer["timestamp"] > 0
    assert sorted(seen) == [f"m{number}" for number in range(7)]
    assert len(set(partitions[:3])) == 3, "partitions take turns"
    assert await world.get("/consumer/consume", topic="t", consumer_id=consumer_id) == (204, {})
    assert (await world.get("/size", topic="t", consumer_id=consumer_id))[1]["size"] == 0
    assert ("consumer", consumer_id) in world.cluster.heard


@in_world
async def test_every_consumer_gets_every_message(world: World) -> None:
    await produce(world, 3)
    for _ in range(2):
        consumer_id = await world.register_consumer()
        status, answer = await world.get("/consumer/consume_batch", topic="t", consumer_id=consumer_id)
        assert status == 200
        assert sorted(message["message"] for message in answer["messages"]) == ["m0", "m1", "m2"]
        assert (await world.get("/consumer/consume_batch", topic="t", consumer_id=consumer_id))[0] == 204


@in_world
async def test_batch_is_no_larger_than_asked_for(world: World) -> None:
    await produce(world, 5, partition_id=0)
    consumer_id = await world.register_consumer()
    about: dict[str, Any] = {"topic": "t", "consumer_id": consumer_id, "max": 2}
    sizes = [len((await world.get("/consumer/consume_batch", **about))[1]["messages"]) for _ in range(3)]
    assert sizes == [2, 2, 1]


@in_world
async def test_consume_waits_for_memory_and_is_refused_without_it(world: World) -> None:
    await produce(world, 3, partition_id=0)
    consumer_id = await world.register_consumer()
    about: dict[str, Any] = {"topic": "t", "consumer_id": consumer_id, "max": 2}
    with world.decoded.reserve(world.decoded.bytes_max):
        status, answer = await world.get("/consumer/consume_batch", **about)
        assert (status, answer["code"], answer["outcome"]) == (503, "overloaded", "not_done")
        waiting = asyncio.ensure_future(world.get("/consumer/consume_batch", **about))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    status, answer = await waiting
    assert [message["message"] for message in answer["messages"]] == ["m0", "m1"], "the refused call moved no cursor"
    assert world.decoded.reserved_bytes == 0


@in_world
async def test_long_poll_holds_no_memory_for_batches_while_it_waits(world: World) -> None:
    await world.post("/topics", topic_name="t", partitions=1)
    consumer_id = await world.register_consumer()
    about: dict[str, Any] = {"topic": "t", "consumer_id": consumer_id, "partition_id": 0, "wait_ms": 5_000}
    waiting = asyncio.ensure_future(world.get("/consumer/consume", **about))
    await asyncio.sleep(1)
    assert not waiting.done()
    assert world.decoded.reserved_bytes == 0
    await produce(world, 1, partition_id=0)
    status, answer = await waiting
    assert (status, answer["message"]) == (200, "m0")


@pytest.mark.parametrize("about", [{}, {"partition_id": 0}, {"partition_id": 0, "offset": 0}])
def test_batch_is_as_large_as_asked_for_although_its_messages_are(about: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        producer_id, consumer_id = await world.register_producer(), await world.register_consumer()
        sent = [f"{number}" * 3000 for number in range(6)]
        for message in sent:
            body = {"topic": "t", "producer_id": producer_id, "message": message, "partition_id": 0}
            await world.post("/producer/produce", **body)
        asked = {"topic": "t", "consumer_id": consumer_id, "max": 5, **about}
        _, answer = await world.get("/consumer/consume_batch", **asked)
        assert [message["message"] for message in answer["messages"]] == sent[:5]

    World().run(scenario)


@in_world
async def test_consuming_at_an_offset_is_safe_to_repeat(world: World) -> None:
    await produce(world, 4, partition_id=0)
    consumer_id = await world.register_consumer()
    about: dict[str, Any] = {"topic": "t", "consumer_id": consumer_id, "partition_id": 0}
    first = await world.get("/consumer/consume", **about, offset=2)
    assert first[1]["message"] == "m2"
    assert await world.get("/consumer/consume", **about, offset=2) == first
    assert (await world.get("/size", **about))[1]["size"] == 1
    assert (await world.get("/consumer/consume", **about))[1]["message"] == "m3"
    assert (await world.get("/consumer/consume", **about, offset=4))[0] == 204, "nothing there yet"
    assert (await world.get("/consumer/consume", **about, offset=5))[0] == 422
    assert (await world.get("/consumer/consume", topic="t", consumer_id=consumer_id, offset=0))[0] == 400


@in_world
async def test_consumer_from_the_end_gets_only_what_comes_later(world: World) -> None:
    await produce(world, 4)
    consumer_id = await world.register_consumer(**{"from": "latest"})
    assert (await world.get("/size", topic="t", consumer_id=consumer_id))[1]["size"] == 0
    await produce(world, 1)
    assert (await world.get("/consumer/consume", topic="t", consumer_id=consumer_id))[0] == 200
    assert (await world.get("/consumer/consume", topic="t", consumer_id=consumer_id))[0] == 204


@in_world
async def test_one_consumer_reads_many_topics(world: World) -> None:
    await world.post("/topics", topic_name="t")
    await world.post("/topics", topic_name="u")
    consumer_id = await world.register_consumer("t")
    status, answer = await world.get("/consumer/consume", topic="u", consumer_id=consumer_id)
    assert (status, answer["code"]) == (403, "not_registered")
    assert await world.register_consumer("u", consumer_id=consumer_id) == consumer_id
    assert (await world.get("/consumer/consume", topic="u", consumer_id=consumer_id))[0] == 204
    assert (await world.get("/consumer/consume", topic="t", consumer_id=99))[0] == 404


@in_world
async def test_consumer_of_one_partition_sees_no_other(world: World) -> None:
    await produce(world, 6)
    consumer_id = await world.register_consumer(partition_id=1)
    assert (await world.get("/size", topic="t", consumer_id=consumer_id))[1]["size"] == 2
    _, answer = await world.get("/consumer/consume_batch", topic="t", consumer_id=consumer_id)
    assert {message["partition_id"] for message in answer["messages"]} == {1}
    assert (await world.get("/consumer/consume", topic="t", consumer_id=consumer_id, partition_id=0))[0] == 403


@pytest.mark.parametrize("about", [{}, {"partition_id": 2}])
def test_long_poll_waits_for_what_comes_and_does_not_spin(about: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        await world.post("/topics", topic_name="t")
        consumer_id = await world.register_consumer()
        began_ms = world.clock.monotonic_ms()
        world.cluster.calls.clear()
        waiting = asyncio.ensure_future(
            world.get("/consumer/consume", topic="t", consumer_id=consumer_id, wait_ms=20_000, **about)
        )
        await asyncio.sleep(5)
        assert not waiting.done()
        assert len(world.cluster.calls) < 20
        await produce(world, 1, partition_id=2)
        status, answer = await waiting
        assert (status, answer["message"]) == (200, "m0")
        assert world.clock.monotonic_ms() - began_ms < 6_000

    World().run(scenario)


@in_world
async def test_long_poll_ends_with_nothing_when_its_time_is_over(world: World) -> None:
    await world.post("/topics", topic_name="t")
    consumer_id = await world.register_consumer()
    began_ms = world.clock.monotonic_ms()
    assert (await world.get("/consumer/consume", topic="t", consumer_id=consumer_id, wait_ms=3000))[0] == 204
    assert 3000 <= world.clock.monotonic_ms() - began_ms < 4000


# -- failures ----------------------------------------------------------------------------------------


@in_world
async def test_leader_that_moves_is_found_again(world: World) -> None:
    await produce(world, 3)
    consumer_id = await world.register_consumer()
    world.cluster.stop(2)
    await produce(world, 3)
    assert (await world.get("/size", topic="t", consumer_id=consumer_id))[1]["size"] == 6
    for _ in range(6):
        assert (await world.get("/consumer/consume", topic="t", consumer_id=consumer_id))[0] == 200


@in_world
async def test_what_nobody_can_take_is_not_done_and_says_so(world: World) -> None:
    producer_id = await world.register_producer()
    for node in (2, 3):
        world.cluster.stop(node)
    for partition in world.cluster.topics["t"].partitions:
        partition.leader = NodeId(2)
    status, answer = await world.post(
        "/producer/produce", topic="t", producer_id=producer_id, message="m", partition_id=0, sequence=0
    )
    assert (status, answer["outcome"]) == (503, "not_done")
    assert world.cluster.partition("t", 0).values() == []


@in_world
async def test_lost_answer_to_a_consumer_without_offset_is_unknown(world: World) -> None:
    await produce(world, 1, partition_id=1)
    consumer_id = await world.register_consumer()
    world.cluster.faults = CallFaults(lost_answer=1.0)
    status, answer = await world.get("/consumer/consume", topic="t", consumer_id=consumer_id, partition_id=1)
    assert (status, answer["outcome"]) == (504, "unknown")
    world.cluster.faults = CallFaults()
    about: dict[str, Any] = {"topic": "t", "consumer_id": consumer_id, "partition_id": 1}
    assert (await world.get("/consumer/consume", **about))[0] == 204, "that record is gone for this consumer"
    assert (await world.get("/consumer/consume", **about, offset=0))[0] == 200, "unless it asks for it"


@in_world
async def test_lost_answers_double_nothing(world: World) -> None:
    world.cluster.faults = CallFaults(lost_answer=0.3)
    producer_id = await world.register_producer()
    requests = [
        world.post("/producer/produce", topic="t", producer_id=producer_id, message=f"m{number}")
        for number in range(60)
    ]
    answers = await asyncio.gather(*requests)
    world.cluster.faults = CallFaults()
    assert {status for status, _ in answers} == {200}
    values = [value for number in range(3) for value in world.cluster.partition("t", number).values()]
    assert sorted(value or b"" for value in values) == sorted(f"m{number}".encode() for number in range(60))


@in_world
async def test_refusal_of_a_batch_reaches_its_client_in_its_own_class(world: World) -> None:
    producer_id = await world.register_producer()
    world.cluster.refusals = {b"full": DiskFullError("nearly full"), b"lost": OutcomeUnknownError("perhaps")}
    status, answer = await world.post("/producer/produce", topic="t", producer_id=producer_id, message="full")
    assert (status, answer["code"], answer["outcome"]) == (507, "disk_full", "not_done")
    status, answer = await world.post("/producer/produce", topic="t", producer_id=producer_id, message="lost")
    assert (status, answer["outcome"]) == (504, "unknown")


@in_world
async def test_gateway_whose_producer_was_replaced_begins_anew(world: World) -> None:
    producer_id = await world.register_producer()
    await world.post("/producer/produce", topic="t", producer_id=producer_id, message="a", partition_id=0)
    (own,) = [id_ for id_, (name, _, _) in world.cluster.producers.items() if name.startswith("_gateway/")]
    world.cluster.partition("t", 0).begin_epoch(own, 7)
    name, _, topics = world.cluster.producers[own]
    world.cluster.producers[own] = (name, 7, topics)
    status, answer = await world.post(
        "/producer/produce", topic="t", producer_id=producer_id, message="b", partition_id=0
    )
    assert status in (200, 503), answer
    if status == 503:
        assert answer["outcome"] == "not_done"
        again = await world.post("/producer/produce", topic="t", producer_id=producer_id, message="b", partition_id=0)
        assert again[0] == 200
    assert world.cluster.partition("t", 0).values() == [b"a", b"b"]


# -- the cluster -------------------------------------------------------------------------------------


@in_world
async def test_cluster_is_shown(world: World) -> None:
    await produce(world, 1)
    consumer_id = await world.register_consumer()
    status, answer = await world.get("/status")
    assert (status, answer["node"]) == (200, 1)
    assert answer["message"].endswith(("running", "(primary)", "(replica)"))
    status, answer = await world.get("/metadata")
    assert status == 200
    assert [node["wire_address"] for node in answer["nodes"]] == world.cluster.addresses
    assert (await world.get("/brokers"))[0] == 200
    status, answer = await world.get("/health")
    assert status == 200
    assert [client["id"] for client in answer["consumers"]] == [consumer_id]
    assert not [client for client in answer["producers"] if client["name"].startswith("_gateway/")]
    assert (await world.get("/managers"))[0] == 200
    assert (await world.get("/healthz")) == (200, {"status": "success"})
    assert (await world.get("/readyz"))[0] in (200, 503)
    assert (await world.get("/"))[1]["message"].startswith("Quiver")


@in_world
async def test_brokers_are_drained_and_removed(world: World) -> None:
    assert await world.post("/brokers/2/drain") == (200, {"status": "success"})
    assert await world.ask("DELETE", "/brokers/2") == (200, {"status": "success"})
    assert (await world.post("/brokers/9/drain"))[0] == 404
    assert (await world.post("/brokers/x/drain"))[0] == 400


@in_world
async def test_documents_and_figures_are_served(world: World) -> None:
    await produce(world, 2)
    page = await world.ask_raw("GET", "/metrics")
    assert page.content_type.startswith("text/plain")
    assert b"quiver_http_produced_records_total 2\n" in page.body
    docs = await world.ask_raw("GET", "/docs")
    assert docs.content_type.startswith("text/html")
    assert any(name == "Content-Security-Policy" for name, _ in docs.headers)
    assert (await world.get("/openapi.json"))[1]["openapi"] == "3.1.0"
