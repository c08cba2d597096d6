"""Quotas of a node over HTTP and over the wire: what is refused, when a retry succeeds, and what is exempt."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quiver.config import QuotaSettings
from quiver.errors import OverloadedError, QuiverError
from quiver.model import PartitionId, TopicId
from quiver.security.quotas import NO_QUOTAS, QUOTA_EXCEEDED
from quiver.security.secrets import Secret, TokenSource
from quiver.testing import LocalCluster
from quiver.wire import RequestPool
from quiver.wire.messages import FindOffset
from quiver.wire.requests import Request


def ask(
    cluster: LocalCluster, method: str, path: str, body: Any = None, token: str = "", spaces: int = 1
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(cluster.urls[0].removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer{' ' * spaces}{token}"} if token else {}
    text = body if body is None or isinstance(body, str) else json.dumps(body)
    try:
        connection.request(method, path, text, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def limited() -> Iterator[LocalCluster]:
    """A node on which a principal may create ten things a minute, and a topic gets a thousand bytes a second."""
    settings = {"quotas.creations_per_minute": "10", "quotas.topic_bytes_in_per_second": "1000"}
    with LocalCluster(nodes=1, settings=settings) as cluster:
        yield cluster


def test_without_limits_there_are_no_quotas() -> None:
    assert not QuotaSettings().make(lambda: NO_QUOTAS).is_active
    assert QuotaSettings(connections_max=1).make(lambda: NO_QUOTAS).is_active


def test_topic_over_its_quota_is_answered_429_and_others_are_served(limited: LocalCluster) -> None:
    bodies = {}
    for topic, size in (("noisy", 60_000), ("quiet", 200)):  # a minute's worth, and less than a second's
        answer = ask(limited, "POST", "/producer/register", {"topic": topic})[2]
        bodies[topic] = {"topic": topic, "producer_id": json.loads(answer)["producer_id"], "message": "x" * size}
    while ask(limited, "POST", "/producer/produce", bodies["noisy"])[0] == 429:  # registering took a little, too
        time.sleep(0.05)
    status, headers, body = ask(limited, "POST", "/producer/produce", bodies["noisy"])
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert json.loads(body)["code"] == QUOTA_EXCEEDED
    assert json.loads(body)["outcome"] == "not_done"
    escaped = json.dumps(bodies["noisy"]).replace('"topic"', '"t\\u006fpic"')
    assert ask(limited, "POST", "/producer/produce", escaped)[0] == 429, "however the topic is written"
    assert ask(limited, "POST", "/producer/produce", bodies["quiet"])[0] == 200


def test_creations_are_bounded_over_http_and_the_wire_together(limited: LocalCluster) -> None:
    statuses = [ask(limited, "POST", "/consumer/register", {"topic": "noisy"})[0] for _ in range(20)]
    assert statuses.count(429) >= 2
    with limited.connect(timeout=5) as cluster:

        def create_all() -> None:
            for number in range(5):  # one may have become possible meanwhile
                cluster.create_topic(f"another-{number}")

        with pytest.raises(OverloadedError) as caught:
            create_all()
    assert caught.value.code == QUOTA_EXCEEDED
    assert caught.value.retry_after_ms


def test_health_checks_and_reads_are_served_to_whoever_is_over_a_quota(limited: LocalCluster) -> None:
    while ask(limited, "POST", "/consumer/register", {"topic": "noisy"})[0] != 429:
        pass
    for path in ("/healthz", "/livez", "/readyz", "/metrics", "/topics"):
        assert ask(limited, "GET", path)[0] == 200


def test_strangers_who_use_up_their_quota_lock_nobody_out() -> None:
    with LocalCluster(nodes=1, settings={"quotas.requests_per_second": "4"}) as limited:

        def insist(path: str, body: Any) -> Any:
            while (answer := ask(limited, "POST", path, body))[0] == 429:
                pass
            return json.loads(answer[2])

        insist("/users", {"user": "alice"})
        tokens = [insist("/tokens", {"user": "alice"})["token"] for _ in range(2)]
        while ask(limited, "GET", "/topics")[0] != 429:
            pass
        assert ask(limited, "GET", "/topics", token=tokens[0])[0] == 200, "a token that this node has not seen before"
        while ask(limited, "GET", "/topics")[0] != 429:
            pass
        with limited.connect(token=tokens[1]) as cluster:
            assert cluster.list_topics() == []


def add_user(cluster: LocalCluster, user: str) -> str:
    """Return the token of a new user without grants."""
    assert ask(cluster, "POST", "/users", {"user": user})[0] < 300
    return str(json.loads(ask(cluster, "POST", "/tokens", {"user": user})[2])["token"])


def test_credentials_that_are_spelled_differently_are_no_way_around_a_quota() -> None:
    with LocalCluster(nodes=1) as limited:
        token = add_user(limited, "alice")
        assert ask(limited, "POST", "/quotas", {"subject": "user:alice", "requests_per_second": 2})[0] < 300
        statuses = [ask(limited, "GET", "/topics", token=token, spaces=number)[0] for number in range(1, 31)]
        assert set(statuses) == {200, 429}
        assert ask(limited, "GET", "/topics", token=token[:-1] + "x")[0] == 401


def test_strangers_do_not_use_up_the_quota_of_a_topic_that_they_may_not_use() -> None:
    with LocalCluster(nodes=1) as limited:
        token = add_user(limited, "mallory")
        assert ask(limited, "POST", "/topics", {"topic": "logs"})[0] < 300
        limits = {"subject": "topic:logs", "requests_per_second": 20, "bytes_out_per_second": 1_000}
        assert ask(limited, "POST", "/quotas", limits)[0] < 300
        path = "/consumer/consume?topic=logs&offset=0&consumer_id=1"
        assert {ask(limited, "GET", path, token=token)[0] for _ in range(40)} == {403}
        assert call_often(
            limited, FindOffset(topic_id=TopicId(1), partition_id=PartitionId(0), at="latest"), token
        ) == {"not_allowed"}
        assert ask(limited, "GET", "/topics/logs")[0] == 200, "who may use it"


def call_often(cluster: LocalCluster, request: Request[Any], token: str) -> set[str]:
    """Return the codes of the failures of many calls over the wire."""

    async def call() -> set[str]:
        codes = set()
        async with RequestPool(name="test", credentials=TokenSource(Secret(token))) as pool:
            for _ in range(40):
                with pytest.raises(QuiverError) as caught:
                    await pool.call(cluster.addresses[0], request, timeout_ms=20_000)
                codes.add(caught.value.code)
        return codes

    return asyncio.run(call())


def test_bodies_in_chunks_count_against_the_quota_of_bytes() -> None:
    with LocalCluster(nodes=1, settings={"quotas.bytes_in_per_second": "2000"}) as limited:
        producer_id = json.loads(ask(limited, "POST", "/producer/register", {"topic": "logs"})[2])["producer_id"]
        body = json.dumps({"topic": "logs", "producer_id": producer_id, "message": "x" * 100_000}).encode()
        connection = http.client.HTTPConnection(limited.urls[0].removeprefix("http://"), timeout=60)
        connection.request("POST", "/producer/produce", iter([body]), encode_chunked=True)
        assert connection.getresponse().status == 200, "what was not announced is paid for afterwards"
        connection.close()
        assert ask(limited, "POST", "/producer/produce", {"topic": "logs"})[0] == 429


def test_sdk_retries_when_it_is_told_to() -> None:
    with LocalCluster(nodes=1, settings={"quotas.mutations_per_second": "8"}) as limited, limited.connect() as cluster:
        cluster.create_topic("logs")
        with cluster.producer("logs") as producer:
            for number in range(16):
                producer.send(b"%d" % number).result()


def test_waiting_requests_of_a_principal_are_bounded() -> None:
    with LocalCluster(nodes=1, settings={"quotas.long_polls_max": "1"}) as limited:
        ask(limited, "POST", "/producer/register", {"topic": "logs"})
        consumer_id = json.loads(ask(limited, "POST", "/consumer/register", {"topic": "logs"})[2])["consumer_id"]
        path = f"/consumer/consume?topic=logs&consumer_id={consumer_id}&wait_ms=30000"
        first = http.client.HTTPConnection(limited.urls[0].removeprefix("http://"), timeout=60)
        first.request("GET", path)
        while ask(limited, "GET", path.replace("30000", "1"))[0] == 204:
            pass  # the first has not arrived yet
        assert ask(limited, "GET", path)[0] == 429
        assert ask(limited, "GET", path.replace("wait_ms", "%77ait_ms"))[0] == 429, "however the parameter is written"
        first.close()
        while ask(limited, "GET", path.replace("30000", "1"))[0] == 429:
            pass
