"""The contract over plain HTTP, against three real nodes: any node answers any call, also when one is killed."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_cluster import NodeProcess, running_cluster
from gateway_nodes import ask

_names = (f"topic-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NodeProcess]]:
    with running_cluster(tmp_path_factory.mktemp("gateway")) as cluster:
        yield cluster.nodes


@pytest.fixture
def topic() -> str:
    return next(_names)


def produce_all(address: str, topic: str, producer_id: int, messages: list[str]) -> None:
    for message in messages:
        body = {"topic": topic, "producer_id": producer_id, "message": message}
        status, answer = ask(address, "POST", "/producer/produce", body)
        assert status == 200, answer


def consume_all(addresses: list[str], topic: str, consumer_id: int) -> list[dict[str, Any]]:
    """Consume until nothing is left, of one node after the other."""
    found: list[dict[str, Any]] = []
    for address in itertools.cycle(addresses):
        status, answer = ask(address, "GET", "/consumer/consume", {"topic": topic, "consumer_id": str(consumer_id)})
        if status == 204:
            return found
        assert status == 200, answer
        found.append(answer)
    raise AssertionError("unreachable")


def per_partition(messages: list[dict[str, Any]]) -> dict[int, list[tuple[int, str]]]:
    grouped: dict[int, list[tuple[int, str]]] = {}
    for message in messages:
        grouped.setdefault(message["partition_id"], []).append((message["offset"], message["message"]))
    return grouped


def test_what_goes_in_at_one_node_comes_out_at_the_others(nodes: list[NodeProcess], topic: str) -> None:
    first, second, third = (node.http for node in nodes)
    status, registered = ask(first, "POST", "/producer/register", {"topic": topic})
    assert status == 200
    sent = [f"m{number}" for number in range(20)]
    produce_all(second, topic, registered["producer_id"], sent[:10])
    produce_all(third, topic, registered["producer_id"], sent[10:])
    consumers = [ask(address, "POST", "/consumer/register", {"topic": topic})[1] for address in (second, third)]
    sizes = [ask(first, "GET", f"/size?topic={topic}&consumer_id={one['consumer_id']}")[1]["size"] for one in consumers]
    assert sizes == [20, 20]
    seen = [consume_all([first, second, third], topic, one["consumer_id"]) for one in consumers]
    for messages in seen:
        assert sorted(message["message"] for message in messages) == sorted(sent)
    assert per_partition(seen[0]) == per_partition(seen[1]), "all consumers see the same order"
    for placed in per_partition(seen[0]).values():
        assert [offset for offset, _ in placed] == list(range(len(placed)))


def test_repeated_call_is_found_by_another_node(nodes: list[NodeProcess], topic: str) -> None:
    first, second, _ = (node.http for node in nodes)
    producer_id = ask(first, "POST", "/producer/register", {"topic": topic, "prod_name": topic})[1]["producer_id"]
    body = {"topic": topic, "producer_id": producer_id, "partition_id": 1, "message": "a", "sequence": 0}
    answers = [ask(address, "POST", "/producer/produce", body) for address in (first, second, first)]
    assert answers == [(200, {"status": "success", "partition_id": 1, "offset": 0})] * 3
    assert ask(second, "POST", "/producer/produce", body | {"sequence": 5})[1]["code"] == "out_of_sequence"
    status, again = ask(second, "POST", "/producer/register", {"topic": topic, "prod_name": topic})
    assert status == 200
    assert (again["producer_id"], again["epoch"], again["sequences"]["1"]) == (producer_id, 1, 1)
    assert ask(first, "POST", "/producer/produce", body | {"sequence": 1, "epoch": 0})[1]["code"] == "fenced"
    assert ask(first, "POST", "/producer/produce", body | {"sequence": 1, "epoch": 1})[1]["offset"] == 1


def test_long_poll_at_one_node_gets_what_another_takes(nodes: list[NodeProcess], topic: str) -> None:
    first, second, third = (node.http for node in nodes)
    producer_id = ask(first, "POST", "/producer/register", {"topic": topic})[1]["producer_id"]
    consumer_id = ask(second, "POST", "/consumer/register", {"topic": topic, "from": "latest"})[1]["consumer_id"]
    timer = threading.Timer(0.5, produce_all, (third, topic, producer_id, ["late"]))
    timer.start()
    status, answer = ask(second, "GET", f"/consumer/consume?topic={topic}&consumer_id={consumer_id}&wait_ms=20000")
    timer.join()
    assert (status, answer["message"]) == (200, "late")


def test_batches_go_in_and_come_out(nodes: list[NodeProcess], topic: str) -> None:
    first, second, _ = (node.http for node in nodes)
    producer_id = ask(first, "POST", "/producer/register", {"topic": topic})[1]["producer_id"]
    consumer_id = ask(first, "POST", "/consumer/register", {"topic": topic})[1]["consumer_id"]
    messages = [f"é{number}" for number in range(1000)]
    body = {"topic": topic, "producer_id": producer_id, "messages": messages, "partition_id": 2, "key": "k"}
    assert ask(second, "POST", "/producer/produce_batch", body)[1]["count"] == 1000
    body = {"topic": topic, "consumer_id": consumer_id, "max": 600}
    taken = [ask(second, "GET", "/consumer/consume_batch", body)[1]["messages"] for _ in range(2)]
    assert [message["message"] for some in taken for message in some] == messages
    assert taken[0][0]["key"] == "k"
    assert ask(first, "GET", "/consumer/consume_batch", body)[0] == 204
    repeated = {**body, "partition_id": 2, "offset": 10, "max": 1}
    assert ask(first, "GET", "/consumer/consume_batch", repeated)[1]["messages"][0]["message"] == "é10"


def test_failures_have_the_contracts_form(nodes: list[NodeProcess], topic: str) -> None:
    address = nodes[1].http
    ask(address, "POST", "/topics", {"topic_name": topic, "partitions": 1})
    for expected, method, path, body in (
        (409, "POST", "/topics", {"topic_name": topic}),
        (422, "POST", "/topics", {"topic_name": "no spaces"}),
        (422, "POST", "/topics", {"topic_name": "x", "partitions": 0}),
        (404, "POST", "/consumer/register", {"topic": "nothing-here"}),
        (404, "POST", "/producer/produce", {"topic": topic, "producer_id": 99999, "message": "m"}),
        (404, "GET", "/consumer/consume", {"topic": topic, "consumer_id": 99999}),
        (404, "GET", "/nothing", None),
        (405, "PUT", "/topics", None),
        (400, "POST", "/producer/produce", {"topic": topic}),
    ):
        status, answer = ask(address, method, path, body)
        assert status == expected, (path, body, answer)
        assert answer["status"] == "failure"
        assert answer["code"]
        assert answer["message"]


def test_cluster_is_shown_by_every_node(nodes: list[NodeProcess]) -> None:
    shown = [ask(node.http, "GET", "/metadata")[1] for node in nodes]
    assert [sorted(one["http_address"] for one in answer["nodes"]) for answer in shown] == [
        sorted(node.http for node in nodes)
    ] * 3
    managers = ask(nodes[0].http, "GET", "/managers")[1]
    assert managers["primary"] in (1, 2, 3)
    assert len(managers["replicas"]) == 2
    assert all(one["applied_index"] > 0 for one in managers["managers"])
    messages = Counter(ask(node.http, "GET", "/status")[1]["message"] for node in nodes)
    assert messages == {"manager running (primary)": 1, "manager running (replica)": 2}
    assert [broker["broker_id"] for broker in ask(nodes[2].http, "GET", "/brokers")[1]["brokers"]] == [1, 2, 3]


def test_nothing_is_lost_or_doubled_when_a_node_is_killed(tmp_path: Path) -> None:
    """A client that repeats a call with its sequence, at another node if need be, until it is answered well."""
    with running_cluster(tmp_path) as cluster:
        nodes = cluster.nodes
        addresses = [node.http for node in nodes]
        _, registered = ask(addresses[0], "POST", "/producer/register", {"topic": "t", "prod_name": "p"})
        offsets: list[int] = []
        for number in range(60):
            if number == 20:
                nodes[1].kill()
            if number == 40:
                nodes[1].start()
            body = {
                "topic": "t",
                "producer_id": registered["producer_id"],
                "partition_id": number % 3,
                "sequence": number // 3,
                "message": f"m{number}",
            }
            offsets.append(insist(addresses, "POST", "/producer/produce", body)["offset"])
        assert offsets == [number // 3 for number in range(60)]
        nodes[1].wait_ready()
        consumer_id = insist(addresses, "POST", "/consumer/register", {"topic": "t"})["consumer_id"]
        for partition in range(3):
            for offset in range(20):
                body = {"topic": "t", "consumer_id": consumer_id, "partition_id": partition, "offset": offset}
                assert insist(addresses, "GET", "/consumer/consume", body)["message"] == f"m{offset * 3 + partition}"
        assert insist(addresses, "GET", "/size", {"topic": "t", "consumer_id": consumer_id})["size"] == 0
        assert [node.stop() for node in nodes] == [0, 0, 0]


def insist(addresses: list[str], method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask one node after the other until one does it."""
    for address in itertools.chain.from_iterable(itertools.repeat(addresses, 50)):
        try:
            status, answer = ask(address, method, path, body)
        except OSError:
            continue
        if status == 200:
            return answer
        assert status in (503, 504), answer
    raise AssertionError(f"{path} was never done")
