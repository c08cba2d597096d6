"""The system tests that users of the API already have, over the HTTP-only library and the SDK, with real processes.

Five producers send their own log files line by line, three consumers read meanwhile; a broker, then the primary
manager, then everything is killed and started again in the middle. At the end every consumer of a topic has exactly
what was produced, per partition in the same order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest
from chaos_cluster import Cluster as Processes
from chaos_cluster import running_cluster

import quiver
from quiver import classic
from quiver.wire.messages import GetMetadata

PRODUCERS = {"T1": ("P1", "P2", "P3"), "T2": ("P1", "P4", "P5"), "T3": ("P1", "P2")}
CONSUMERS = {"T1": ("C1", "C2", "C3"), "T2": ("C1",), "T3": ("C1", "C2", "C3")}
LINES = 120
PAUSE_S = 0.01


class Way(Protocol):
    """How the clients of a test talk to the cluster."""

    def send(self, producer: str, topic: str, line: str) -> None: ...

    def read(self, consumer: str, topic: str, count: int, heard: Callable[[str], object]) -> None: ...

    def close(self) -> None: ...


class ClassicWay:
    """Over HTTP, with the small library."""

    def __init__(self, processes: Processes) -> None:
        self._addresses = [f"http://{node.http}" for node in processes.nodes]
        self._producers: dict[tuple[str, str], classic.Producer] = {}

    def send(self, producer: str, topic: str, line: str) -> None:
        client = self._producers.get((producer, topic))
        if client is None:
            client = classic.Producer(self._addresses, name=f"classic-{producer}-{topic}")
            client.RegisterProducer(topic)
            self._producers[producer, topic] = client
        client.Enqueue(topic, line)

    def read(self, consumer: str, topic: str, count: int, heard: Callable[[str], object]) -> None:
        client = classic.Consumer(self._addresses)
        client.RegisterConsumer(topic)
        found = 0

        def take(_: str, message: str) -> None:
            nonlocal found
            heard(message)
            found += 1
            if found == count:
                client.stop()

        client.run(take, poll_time=0.05, poll_time_after_error=0.2)
        assert client.Size(topic) == 0

    def close(self) -> None:
        self._producers.clear()


class SdkWay:
    """Over the wire, with the SDK."""

    def __init__(self, processes: Processes) -> None:
        self._cluster = quiver.connect(*(node.wire for node in processes.nodes), timeout=60)
        self._producers: dict[tuple[str, str], quiver.Producer] = {}

    def send(self, producer: str, topic: str, line: str) -> None:
        client = self._producers.get((producer, topic))
        if client is None:
            client = self._cluster.producer(topic, name=f"sdk-{producer}-{topic}")
            self._producers[producer, topic] = client
        client.send(line).result()

    def read(self, consumer: str, topic: str, count: int, heard: Callable[[str], object]) -> None:
        client = self._cluster.consumer(topic, name=f"sdk-{consumer}", auto_commit=0.5)
        for number, record in enumerate(client, start=1):
            heard(record.text or "")
            if number == count:
                break
        assert client.size() == 0

    def close(self) -> None:
        self._cluster.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with running_cluster(tmp_path) as processes:
        yield processes


def create_topics(processes: Processes, names: dict[str, str]) -> None:
    with quiver.connect(*(node.wire for node in processes.nodes)) as cluster:
        while sum(node.state == "alive" for node in cluster.brokers()) < len(processes.nodes):
            time.sleep(0.1)
        for name in names.values():
            cluster.create_topic(name, partitions=3, replicas=3)


def strike(processes: Processes, share_sent: Callable[[], float]) -> int:
    """Kill a broker, then the primary manager, then all: one whenever a further quarter is sent. Return how often."""
    choices: tuple[Callable[[], list[int]], ...] = (lambda: [3], lambda: [primary(processes)], lambda: [1, 2, 3])
    for number, choose in enumerate(choices, start=1):
        while share_sent() < number / 4:
            time.sleep(0.02)
        for victim in choose():
            processes.node(victim).kill()
        time.sleep(0.3)
        processes.start()
    return number


def primary(processes: Processes) -> int:
    async def ask() -> int:
        async with quiver.connect_async(*(node.wire for node in processes.nodes)) as cluster:
            found, _ = await cluster.router.ask(GetMetadata(topics=()), deadline=cluster.router.deadline())
            return int(found.primary or 1)

    return asyncio.run(ask())


@pytest.mark.parametrize("make_way", [ClassicWay, SdkWay])
def test_every_consumer_gets_exactly_what_was_produced(
    processes: Processes, make_way: Callable[[Processes], Way]
) -> None:
    topics = {name: f"{make_way.__name__}-{name}" for name in PRODUCERS}
    create_topics(processes, topics)
    way = make_way(processes)
    sent: dict[str, list[str]] = {name: [] for name in topics}
    heard: dict[tuple[str, str], list[str]] = {
        (consumer, topic): [] for topic, consumers in CONSUMERS.items() for consumer in consumers
    }

    def produce(producer: str) -> None:
        own = [topic for topic, producers in PRODUCERS.items() if producer in producers]
        for number in range(LINES):
            topic = own[number % len(own)]
            line = f"{producer} {topic} {number}"
            way.send(producer, topics[topic], line)
            sent[topic].append(line)
            time.sleep(PAUSE_S)

    def consume(consumer: str, topic: str) -> None:
        count = sum(
            len(range(at, LINES, len(own)))
            for producer in PRODUCERS[topic]
            for own in [[name for name, producers in PRODUCERS.items() if producer in producers]]
            for at in [own.index(topic)]
        )
        way.read(consumer, topics[topic], count, heard[consumer, topic].append)

    def share_sent() -> float:
        return sum(map(len, sent.values())) / (5 * LINES)

    with ThreadPoolExecutor(32) as pool:
        reading = [pool.submit(consume, *key) for key in heard]
        striking = pool.submit(strike, processes, share_sent)
        for done in [pool.submit(produce, producer) for producer in ("P1", "P2", "P3", "P4", "P5")]:
            done.result()
        assert striking.result() == 3
        for done in reading:
            done.result()
    way.close()
    for (_, topic), lines in heard.items():
        assert sorted(lines) == sorted(sent[topic])
        for producer in PRODUCERS[topic]:
            assert_in_order_per_partition(lines, producer)


def assert_in_order_per_partition(lines: list[str], producer: str) -> None:
    """A producer's lines are spread over three partitions: their order is three ascending sequences, interleaved."""
    ends: list[int] = []
    for number in (int(line.split()[2]) for line in lines if line.startswith(producer)):
        below = [at for at, end in enumerate(ends) if end < number]
        if below:
            ends[max(below, key=ends.__getitem__)] = number
        else:
            ends.append(number)
    assert len(ends) <= 3


@pytest.mark.parametrize("make_way", [ClassicWay, SdkWay])
def test_one_producer_one_consumer_what_goes_in_comes_out(
    processes: Processes, make_way: Callable[[Processes], Way]
) -> None:
    create_topics(processes, {"one": "one"})
    way = make_way(processes)
    for number in range(30):
        way.send("P1", "one", f"line {number}")
    heard: list[str] = []
    way.read("C1", "one", 30, heard.append)
    way.close()
    assert sorted(heard) == sorted(f"line {number}" for number in range(30))
