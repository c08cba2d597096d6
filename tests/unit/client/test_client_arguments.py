"""Wrong arguments of the SDK get a sentence: no call fails with an error of Python from somewhere inside."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from client_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

import quiver
from quiver.client.access import Access
from quiver.client.arguments import _find_check
from quiver.client.cluster import AsyncCluster
from quiver.client.consumer import AsyncConsumer
from quiver.client.producer import AsyncProducer
from quiver.client.queue import AsyncJob, AsyncQueue
from quiver.client.sync import Cluster, Consumer, Producer
from quiver.client.sync_queue import Job, Queue
from quiver.errors import QuiverError, RequestError

RIGHT: dict[str, Any] = {
    "topic": "logs",
    "partition": 0,
    "partitions": 4,
    "broker": 1,
    "node": 1,
    "name": "someone",
    "kind": "consumer",
    "id": 1,
    "consumer_id": 1,
    "offset": 0,
    "first_offset": 0,
    "end_offset": 0,
    "offsets": {0: 0},
    "retention": quiver.RetentionInfo(ms=1000),
    "group": "billing",
    "timeout": 0.1,
    "value": "x",
    "values": ["x"],
    "jobs": [],
}
"""Arguments that are right, by name; what is not listed is left to its default."""
UNCHECKED = {
    "Any",
    "Value",
    "RecordHeaders | None",
    "bool",
    "bool | None",
    "dict[str, object]",
    "SettleKind",
    "SettleKind | None",
}
"""Annotations without a check: records have their own, and every object is true or false."""
NOT_CALLED = {
    "close",
    "stop",
    "abort",
    "open",
    "facts",
    "wait_batch",
    "result",
    "next_job",
    "check_settled",
}


def public_methods(owner: type) -> dict[str, Callable[..., Any]]:
    found = {name: method for kind in reversed(owner.__mro__[:-1]) for name, method in vars(kind).items()}
    return {
        name: method
        for name, method in found.items()
        if inspect.isfunction(method) and not name.startswith("_") and name not in NOT_CALLED
    }


CALLS = [
    (owner, name, parameter)
    for owner in (AsyncCluster, AsyncConsumer, AsyncProducer, AsyncQueue)
    for name, method in public_methods(owner).items()
    for parameter in list(inspect.signature(method).parameters)[1:]
]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.binary(max_size=8),
    st.text(max_size=8),
    st.sampled_from([-(1 << 70), -(1 << 63), -1, 0, 1, 5, 1 << 63, 1 << 70]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 0.5]),
    st.lists(st.one_of(st.integers(-2, 2), st.text(max_size=2), st.binary(max_size=2)), max_size=3),
    st.dictionaries(
        st.one_of(st.integers(-2, 2), st.text(max_size=2)), st.one_of(st.integers(-2, 2), st.none()), max_size=2
    ),
    st.builds(object),
    st.just(re.compile("x")),
    st.just(re.compile(b"x")),
)


async def call(target: object, name: str, arguments: dict[str, Any]) -> None:
    found = getattr(target, name)(**arguments)
    if inspect.isasyncgen(found):
        async for _ in found:
            break
    elif isinstance(found, Awaitable):
        await found


@settings(max_examples=15)
@given(st.lists(JUNK, min_size=1, max_size=4), st.integers(0, 10))
def test_wrong_argument_is_refused_with_a_sentence(junk: list[Any], skipped: int) -> None:
    world = World()
    refused: list[QuiverError] = []

    async def scenario() -> None:
        async with world.connect(timeout_ms=500) as cluster:
            await cluster.create_topic("logs", partitions=1)
            targets = {
                AsyncCluster: cluster,
                AsyncConsumer: await cluster.consumer("logs", name="report"),
                AsyncProducer: await cluster.producer("logs"),
                AsyncQueue: await cluster.queue("logs", group="workers"),
            }
            for number, (owner, name, parameter) in enumerate(CALLS[skipped:]):
                parameters = list(inspect.signature(public_methods(owner)[name]).parameters.values())[1:]
                arguments = {each.name: RIGHT[each.name] for each in parameters if each.default is each.empty}
                arguments[parameter] = junk[number % len(junk)]
                try:
                    await call(targets[owner], name, arguments)
                except QuiverError as error:
                    refused.append(error)

    world.run(scenario())
    assert all(len(error.message) > 10 and error.code for error in refused), refused


@pytest.mark.parametrize(
    "owner",
    [AsyncCluster, AsyncConsumer, AsyncProducer, AsyncQueue, AsyncJob, Cluster, Consumer, Producer, Queue, Job, Access],
)
def test_every_annotation_of_a_public_call_is_checked(owner: type) -> None:
    for name, method in public_methods(owner).items():
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            where = f"{owner.__name__}.{name}({parameter.name}: {parameter.annotation})"
            assert parameter.annotation in UNCHECKED or _find_check(parameter.annotation), where


@pytest.mark.parametrize("face", [quiver.connect, quiver.connect_async])
@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        ((9002,), "'127.0.0.1:9002'"),
        ((None,), "nothing at all means QUIVER_URL"),
        ((b"127.0.0.1:9002",), "pass an address of a node"),
        (({"host": 1},), "pass an address of a node"),
        ((["127.0.0.1:9002", 9003],), "pass a text"),
        (("127.0.0.1:9002", 9003), "9003 (int)"),
        (([],), "no address given"),
        (("",), "no address given"),
    ],
)
def test_address_of_a_wrong_type_is_refused_with_what_to_pass(
    face: Callable[..., Any], addresses: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        face(*addresses)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": "5"}, "pass a number of seconds"),
        ({"timeout": None}, "pass a number of seconds"),
        ({"timeout": True}, "pass a number of seconds"),
        ({"context": 5}, "context=5 (int); pass a text (str)"),
        ({"ca_file": b"ca.pem"}, "decode bytes first"),
        ({"client_name": None}, "client_name=None"),
    ],
)
def test_option_of_a_wrong_type_is_refused_with_what_to_pass(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as refused:
        quiver.connect("127.0.0.1:9002", **options)
    assert refused.value.code == "bad_argument"
    assert refused.value.message.startswith("not done: connect")


def test_wrong_arguments_name_the_call_and_what_to_pass() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=1)
            producer = await cluster.producer("logs")
            delivery = producer.send("x")
            for refused, says in (
                (lambda: cluster.create_topic(b"logs"), "create_topic() was given topic=b'logs' (bytes); pass a text"),  # type: ignore[arg-type]
                (lambda: cluster.add_partitions("logs", -1), "partitions=-1 (int); pass a whole number from 0 on"),
                (lambda: cluster.consumer("logs", partitions=3), "partitions=3 (int); pass a list of whole numbers"),  # type: ignore[arg-type]
                (lambda: cluster.consumer("logs", idle_timeout="5"), "pass a number of seconds"),  # type: ignore[arg-type]
                (lambda: producer.flush("5"), "pass a number of seconds"),  # type: ignore[arg-type]
                (lambda: delivery.result("5"), "pass a number of seconds"),  # type: ignore[arg-type]
            ):
                with pytest.raises(RequestError, match=re.escape(says)):
                    await refused()  # type: ignore[misc] # `result` blocks, and must refuse before it does
            await delivery

    world.run(scenario())


def test_iterators_are_read_once() -> None:
    world = World()

    async def scenario() -> None:
        async with world.connect() as cluster:
            await cluster.create_topic("logs", partitions=3)
            consumer = await cluster.consumer(iter(["logs"]), name="report")
            assert consumer.partitions == (0, 1, 2)
            part = await cluster.consumer("logs", partitions=iter([2, 0]))
            assert set(part.partitions) == {0, 2}

    world.run(scenario())


@pytest.mark.parametrize("token", [b"qv_12_secret", ["qv_12_secret"], {"qv_12_secret": 1}])
def test_wrong_token_is_not_repeated(token: Any) -> None:
    for connect in (quiver.connect, quiver.connect_async):
        with pytest.raises(RequestError, match="token=<hidden>") as refused:
            connect("127.0.0.1:1", token=token)
        assert "qv_" not in str(refused.value)
