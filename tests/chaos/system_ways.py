"""The three ways in which programs use a cluster: plain HTTP, the HTTP-only library, and the SDK.

Each way makes senders and readers that go on through outages, as careful users write them: a send returns when the line
is acknowledged, once; a reader is given every line of its topics, once, whatever happens to the nodes meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from chaos_cluster import Cluster
from chaos_http import Answer, HttpClient

import quiver
from quiver import classic

PATIENCE_S = 120
"""How long a call is repeated: longer than any outage here."""
RETRY_S = 0.05
IDLE_S = 0.02
BATCH_RECORDS = 50

Take = Callable[[str, str], bool]
"""Called with topic and line; returns whether the reader has enough."""


class Sender(Protocol):
    """Sends lines, one after the other."""

    def send(self, topic: str, line: str) -> None: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """Reads topics from their beginning."""

    def read(self, take: Take) -> None:
        """Read until `take` says that it is enough, or `stop` is called."""

    def stop(self) -> None:
        """End `read` soon; called from another thread when something has failed."""

    def sizes(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Way(Protocol):
    """How clients talk to the cluster."""

    name: str

    def sender(self, name: str, topics: Sequence[str]) -> Sender: ...

    def reader(self, name: str, topics: Sequence[str]) -> Reader: ...

    def close(self) -> None: ...


# -- plain HTTP --------------------------------------------------------------------------------------


class HttpWay:
    """Nothing but the contract's calls and the standard library."""

    name = "http"

    def __init__(self, cluster: Cluster) -> None:
        self._addresses = cluster.http_addresses

    def sender(self, name: str, topics: Sequence[str]) -> Sender:
        return HttpSender(HttpClient(self._addresses), name, topics)

    def reader(self, name: str, topics: Sequence[str]) -> Reader:
        return HttpReader(HttpClient(self._addresses), topics)

    def close(self) -> None:
        """Nothing is shared."""


def ask(client: HttpClient, method: str, path: str, **parameters: object) -> Answer:
    """Repeat a call that is safe to repeat, at one node after the other, until it is done."""
    call = client.post if method == "POST" else client.get
    end = time.monotonic() + PATIENCE_S
    while not (answer := call(path, **parameters)).is_ok:
        if 400 <= answer.status < 429 or time.monotonic() > end:
            raise AssertionError(f"{path} {parameters}: {answer}")
        time.sleep(RETRY_S)
    return answer


class HttpSender:
    """Numbers its lines per partition, so that a repeated call is known for what it is."""

    def __init__(self, client: HttpClient, name: str, topics: Sequence[str]) -> None:
        self._client = client
        self._registered: dict[str, dict[str, Any]] = {}
        self._partitions: dict[str, int] = {}
        self._sequences: Counter[tuple[str, int]] = Counter()
        self._turn = 0
        for topic in topics:
            answer = ask(client, "POST", "/producer/register", topic=topic, prod_name=f"{name}-{topic}")
            self._registered[topic] = answer.body
            self._partitions[topic] = len(ask(client, "GET", "/partitions", topic=topic).body["partitions"])

    def send(self, topic: str, line: str) -> None:
        self._turn += 1
        partition = self._turn % self._partitions[topic]
        ask(
            self._client,
            "POST",
            "/producer/produce",
            topic=topic,
            producer_id=self._registered[topic]["producer_id"],
            epoch=self._registered[topic]["epoch"],
            partition_id=partition,
            sequence=self._sequences[topic, partition],
            message=line,
        )
        self._sequences[topic, partition] += 1

    def close(self) -> None:
        self._client.close()


class HttpReader:
    """Names the offset that it wants, so that a repeated call returns the same."""

    def __init__(self, client: HttpClient, topics: Sequence[str]) -> None:
        self._client = client
        self._id: int | None = None
        self._is_stopped = False
        self._places: dict[tuple[str, int], int] = {}
        for topic in topics:
            known: dict[str, object] = {} if self._id is None else {"consumer_id": self._id}
            self._id = ask(client, "POST", "/consumer/register", topic=topic, **known).body["consumer_id"]
            for partition in ask(client, "GET", "/partitions", topic=topic).body["partitions"]:
                self._places[topic, partition["partition_id"]] = 0

    def read(self, take: Take) -> None:
        while not self._is_stopped:
            is_idle = True
            for (topic, partition), offset in list(self._places.items()):
                for message in self._take_batch(topic, partition, offset):
                    is_idle = False
                    self._places[topic, partition] = message["offset"] + 1
                    if take(topic, message["message"]):
                        return
            if is_idle:
                time.sleep(IDLE_S)

    def stop(self) -> None:
        self._is_stopped = True

    def _take_batch(self, topic: str, partition: int, offset: int) -> list[dict[str, Any]]:
        place = {"topic": topic, "partition_id": partition, "offset": offset, "consumer_id": self._id}
        answer = ask(self._client, "GET", "/consumer/consume_batch", max=BATCH_RECORDS, **place)
        messages: list[dict[str, Any]] = answer.body.get("messages", [])
        return messages

    def sizes(self) -> dict[str, int]:
        topics = {topic for topic, _ in self._places}
        return {
            topic: ask(self._client, "GET", "/size", topic=topic, consumer_id=self._id).body["size"] for topic in topics
        }

    def close(self) -> None:
        self._client.close()


# -- the HTTP-only library ---------------------------------------------------------------------------


class ClassicWay:
    """Over `quiver.classic`."""

    name = "classic"

    def __init__(self, cluster: Cluster) -> None:
        self._addresses = [f"http://{address}" for address in cluster.http_addresses]

    def sender(self, name: str, topics: Sequence[str]) -> Sender:
        producer = classic.Producer(self._addresses, name=f"classic-{name}", max_timeout=PATIENCE_S)
        for topic in topics:
            producer.RegisterProducer(topic)
        return ClassicSender(producer)

    def reader(self, name: str, topics: Sequence[str]) -> Reader:
        consumer = classic.Consumer(self._addresses, max_timeout=PATIENCE_S)
        for topic in topics:
            consumer.RegisterConsumer(topic)
        return ClassicReader(consumer, topics)

    def close(self) -> None:
        """Nothing is shared."""


class ClassicSender:
    def __init__(self, producer: classic.Producer) -> None:
        self._producer = producer

    def send(self, topic: str, line: str) -> None:
        assert self._producer.Enqueue(topic, line) == 0

    def close(self) -> None:
        self._producer.close()


class ClassicReader:
    def __init__(self, consumer: classic.Consumer, topics: Sequence[str]) -> None:
        self._consumer = consumer
        self._topics = topics

    def read(self, take: Take) -> None:
        def hear(topic: str, line: str) -> None:
            if take(topic, line):
                self._consumer.stop()

        self._consumer.run(hear, poll_time=IDLE_S, poll_time_after_error=RETRY_S)

    def stop(self) -> None:
        self._consumer.stop()

    def sizes(self) -> dict[str, int]:
        return {topic: self._consumer.Size(topic) for topic in self._topics}

    def close(self) -> None:
        self._consumer.close()


# -- the SDK -----------------------------------------------------------------------------------------


class SdkWay:
    """Over `quiver.connect`; one connection for all of its clients."""

    name = "sdk"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = quiver.connect(*(node.wire for node in cluster.nodes), timeout=PATIENCE_S)

    def sender(self, name: str, topics: Sequence[str]) -> Sender:
        return SdkSender(
            {
                topic: self._cluster.producer(topic, f"sdk-{name}-{topic}", delivery_timeout=PATIENCE_S)
                for topic in topics
            }
        )

    def reader(self, name: str, topics: Sequence[str]) -> Reader:
        return SdkReader({topic: self._cluster.consumer(topic, f"sdk-{name}") for topic in topics})

    def close(self) -> None:
        self._cluster.close()


class SdkSender:
    def __init__(self, producers: dict[str, quiver.Producer]) -> None:
        self._producers = producers

    def send(self, topic: str, line: str) -> None:
        self._producers[topic].send(line).result()

    def close(self) -> None:
        for producer in self._producers.values():
            producer.close()


class SdkReader:
    def __init__(self, consumers: dict[str, quiver.Consumer]) -> None:
        self._consumers = consumers
        self._is_stopped = False

    def read(self, take: Take) -> None:
        while not self._is_stopped:
            for topic, consumer in self._consumers.items():
                for record in consumer.poll(timeout=IDLE_S):
                    if take(topic, record.text or ""):
                        return
                consumer.commit()

    def stop(self) -> None:
        self._is_stopped = True

    def sizes(self) -> dict[str, int]:
        return {topic: consumer.size() for topic, consumer in self._consumers.items()}

    def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()


WAYS: tuple[Callable[[Cluster], Way], ...] = (HttpWay, ClassicWay, SdkWay)
