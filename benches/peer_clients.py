"""One class per system that `run_peers.py` compares: how its usual Python client sends and reads.

A class is used by `peer_load.py` in a process of its own. It imports its client library when it is made, so that the
Python of the peers needs no Quiver. All have the same methods:

* `create` makes an empty topic,
* `produce` sends all values and returns when all are acknowledged,
* `consume` reads that many records from the beginning, as objects of the client,
* `awaited` sends values one after the other, each when the one before is acknowledged, and returns the times,
* `pace` sends one stamped value at each time of a schedule, without waiting for acknowledgements as far as it can,
* `tail` calls a function with each value of a topic, from its beginning, until the function returns True.

A client of asyncio does each of them in one coroutine on the loop of its object.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PARTITIONS = 3
"""Of a topic, where a system has partitions."""
CREATE_TIMEOUT_S = 60
POLL_S = 1.0
LATE_S = 0.002
"""The loop of asyncio wakes up to a millisecond late; what is later than this is a stall."""

Stamp = Callable[[float], bytes]
"""Make a value that tells when it was sent."""


@dataclass(frozen=True)
class Target:
    """The servers that a client talks to."""

    addresses: tuple[str, ...]
    nodes: int
    is_synced: bool


class PeerClient(Protocol):
    """What `peer_load.py` needs of a system."""

    def create(self, topic: str) -> None: ...
    def produce(self, topic: str, values: Sequence[bytes]) -> None: ...
    def consume(self, topic: str, records: int) -> None: ...
    def awaited(self, topic: str, values: Sequence[bytes]) -> list[float]: ...
    def pace(self, topic: str, schedule: Sequence[float], stamp: Stamp) -> None: ...
    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None: ...


def sent_at(due: float) -> float:
    """Return when a record counts as sent: now, unless a stall of the client made it late."""
    now = time.perf_counter()
    return now if now - due < LATE_S else due


class InThreads(ABC):
    """The timed sends of a client whose calls block."""

    @abstractmethod
    def send_one(self, topic: str, value: bytes) -> None:
        """Send one value and return when it is acknowledged."""

    def start_sending(self, topic: str) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        """Return how to send without waiting, and how to wait at the end; a client that cannot waits each time."""
        return lambda value: self.send_one(topic, value), lambda: None

    def awaited(self, topic: str, values: Sequence[bytes]) -> list[float]:
        times_s = []
        for value in values:
            begun = time.perf_counter()
            self.send_one(topic, value)
            times_s.append(time.perf_counter() - begun)
        return times_s

    def pace(self, topic: str, schedule: Sequence[float], stamp: Stamp) -> None:
        send, flush = self.start_sending(topic)
        for due in schedule:
            time.sleep(max(0.0, due - time.perf_counter()))
            send(stamp(sent_at(due)))
        flush()


class OnLoop(ABC):
    """The loop of a client that is used with asyncio, and its timed sends."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    @abstractmethod
    async def _send_one(self, topic: str, value: bytes) -> None:
        """Send one value and return when it is acknowledged."""

    def awaited(self, topic: str, values: Sequence[bytes]) -> list[float]:
        async def send_all() -> list[float]:
            times_s = []
            for value in values:
                begun = time.perf_counter()
                await self._send_one(topic, value)
                times_s.append(time.perf_counter() - begun)
            return times_s

        times_s: list[float] = self._run(send_all())
        return times_s

    def pace(self, topic: str, schedule: Sequence[float], stamp: Stamp) -> None:
        async def send_all() -> None:
            async with asyncio.TaskGroup() as sending:
                for due in schedule:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    sending.create_task(self._send_one(topic, stamp(sent_at(due))))

        self._run(send_all())


# -- Quiver --------------------------------------------------------------------------------------------


class QuiverClient(InThreads):
    """The SDK with its defaults, in threads; `send_many` for many records."""

    def __init__(self, target: Target) -> None:
        self._cluster: Any = importlib.import_module("quiver").connect(*target.addresses)
        self._replicas = target.nodes
        self._producers: dict[str, Any] = {}

    def _producer(self, topic: str) -> Any:
        if topic not in self._producers:
            self._producers[topic] = self._cluster.producer(topic)
        return self._producers[topic]

    def create(self, topic: str) -> None:
        self._cluster.create_topic(topic, partitions=PARTITIONS, replicas=self._replicas)

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        with self._cluster.producer(topic) as producer:
            producer.send_many(values)

    def consume(self, topic: str, records: int) -> None:
        with self._cluster.consumer(topic) as consumer:
            for count, _ in enumerate(consumer, start=1):
                if count == records:
                    return

    def consume_arrow(self, topic: str, records: int) -> None:
        """Read the records as one table, which no other system of the comparison offers."""
        with self._cluster.consumer(topic) as consumer:
            found = consumer.fetch_arrow(records, timeout=60).num_rows
        if found != records:
            raise RuntimeError(f"read {found} of {records} records")

    def send_one(self, topic: str, value: bytes) -> None:
        self._producer(topic).send(value).result()

    def start_sending(self, topic: str) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        producer = self._producer(topic)
        return producer.send, producer.flush

    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        with self._cluster.consumer(topic) as consumer:
            ready()
            for record in consumer:
                if handle(record.value):
                    return


# -- Kafka ---------------------------------------------------------------------------------------------


class KafkaClient(InThreads):
    """confluent-kafka with `acks=all`; no linger where single records are timed."""

    def __init__(self, target: Target) -> None:
        self._kafka: Any = importlib.import_module("confluent_kafka")
        self._admin: Any = importlib.import_module("confluent_kafka.admin")
        self._servers = {"bootstrap.servers": ",".join(target.addresses)}
        self._replicas = target.nodes
        self._prompt: Any = None

    def _producer(self, **settings: Any) -> Any:
        return self._kafka.Producer({**self._servers, "acks": "all", **settings})

    def create(self, topic: str) -> None:
        admin = self._admin.AdminClient(self._servers)
        config = {"min.insync.replicas": str(self._replicas // 2 + 1)}
        wanted = self._admin.NewTopic(topic, PARTITIONS, self._replicas, config=config)
        admin.create_topics([wanted], operation_timeout=CREATE_TIMEOUT_S)[topic].result(CREATE_TIMEOUT_S)

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        failures: list[Any] = []

        def answered(error: Any, _: Any) -> None:
            if error is not None:
                failures.append(error)

        producer = self._producer(**{"queue.buffering.max.messages": 1_000_000, "linger.ms": 5})
        for value in values:
            while True:
                try:
                    producer.produce(topic, value, on_delivery=answered)
                except BufferError:
                    producer.poll(0.1)
                else:
                    break
            producer.poll(0)
        if producer.flush() or failures:
            raise RuntimeError(f"not every record was acknowledged: {failures[:1]}")

    def _consumer(self, topic: str) -> Any:
        settings = {"group.id": f"bench-{time.time_ns()}", "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = self._kafka.Consumer({**self._servers, **settings})
        consumer.assign([self._kafka.TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        return consumer

    def consume(self, topic: str, records: int) -> None:
        consumer, count = self._consumer(topic), 0
        while count < records:
            messages = consumer.consume(10_000, POLL_S)
            for message in messages:
                if message.error():
                    raise RuntimeError(str(message.error()))
                message.value()
            count += len(messages)
        consumer.close()

    def _prompt_producer(self) -> Any:
        if self._prompt is None:
            # At most as many requests as Kafka's own clients have in flight: without a bound and a linger each record
            # would be a request, and three nodes fell seconds behind 1,000 records a second.
            self._prompt = self._producer(**{"linger.ms": 0, "max.in.flight.requests.per.connection": 5})
        return self._prompt

    def send_one(self, topic: str, value: bytes) -> None:
        answers: list[Any] = []
        producer = self._prompt_producer()
        producer.produce(topic, value, on_delivery=lambda error, _: answers.append(error))
        while not answers:
            producer.poll(POLL_S)
        if answers[0] is not None:
            raise RuntimeError(str(answers[0]))

    def start_sending(self, topic: str) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        producer = self._prompt_producer()

        def send(value: bytes) -> None:
            producer.produce(topic, value)
            producer.poll(0)

        return send, producer.flush

    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        consumer = self._consumer(topic)
        ready()
        while True:
            message = consumer.poll(POLL_S)
            if message is not None and message.error() is None and handle(message.value()):
                break
        consumer.close()


# -- Redis Streams -------------------------------------------------------------------------------------


class RedisClient(InThreads):
    """redis-py with hiredis; pipelines of 10,000 commands for many records, and WAIT where there are replicas."""

    PIPELINE = 10_000
    READ = 1_000

    def __init__(self, target: Target) -> None:
        redis: Any = importlib.import_module("redis")
        host, _, port = target.addresses[0].rpartition(":")
        self._redis: Any = redis.Redis(host=host, port=int(port))
        self._awaited = target.nodes // 2
        """Replicas that have a record before it counts as acknowledged: with the master, a majority."""

    def create(self, topic: str) -> None:  # noqa: ARG002 - as in all clients
        """Wait for the replicas: a stream is there with its first record."""
        end = time.monotonic() + CREATE_TIMEOUT_S
        while self._redis.info("replication")["connected_slaves"] < 2 * self._awaited:
            if time.monotonic() > end:
                raise TimeoutError("the replicas of Redis did not connect")
            time.sleep(0.05)

    def _send(self, topic: str, values: Sequence[bytes]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for value in values:
            pipe.xadd(topic, {"v": value})
        if self._awaited:
            pipe.execute_command("WAIT", self._awaited, 10_000)
        answers = pipe.execute()
        if self._awaited and answers[-1] < self._awaited:
            raise RuntimeError("too few replicas of Redis have the records")

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        for first in range(0, len(values), self.PIPELINE):
            self._send(topic, values[first : first + self.PIPELINE])

    def consume(self, topic: str, records: int) -> None:
        last, count = b"0", 0
        while count < records:
            ((_, found),) = self._redis.xread({topic: last}, count=self.READ)
            count += len(found)
            last = found[-1][0]

    def send_one(self, topic: str, value: bytes) -> None:
        if self._awaited:
            self._send(topic, [value])
        else:
            self._redis.xadd(topic, {"v": value})

    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        last = b"0"
        ready()
        while True:
            for _, found in self._redis.xread({topic: last}, count=self.READ, block=1_000):
                last = found[-1][0]
                if any(handle(fields[b"v"]) for _, fields in found):
                    return


# -- NATS JetStream ------------------------------------------------------------------------------------


class NatsClient(OnLoop):
    """nats-py: asynchronous publishing with 1,000 messages in flight, pull consumers without acknowledgements."""

    IN_FLIGHT = 1_000
    READ = 1_000

    def __init__(self, target: Target) -> None:
        super().__init__()
        nats: Any = importlib.import_module("nats")
        self._api: Any = importlib.import_module("nats.js.api")
        self._error: type[Exception] = importlib.import_module("nats.errors").Error
        self._nats: Any = self._run(nats.connect([f"nats://{address}" for address in target.addresses]))
        self._stream: Any = self._nats.jetstream(timeout=20, publish_async_max_pending=2 * self.IN_FLIGHT)
        self._replicas = target.nodes

    def create(self, topic: str) -> None:
        self._run(self._create(topic))

    async def _create(self, topic: str) -> None:
        end = time.monotonic() + CREATE_TIMEOUT_S
        while True:  # a new cluster elects the leader of its metadata first
            try:
                await self._stream.add_stream(name=topic, subjects=[topic], num_replicas=self._replicas)
            except self._error:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)
            else:
                return

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        self._run(self._produce(topic, values))

    async def _produce(self, topic: str, values: Sequence[bytes]) -> None:
        for first in range(0, len(values), self.IN_FLIGHT):
            sent = [await self._stream.publish_async(topic, value) for value in values[first : first + self.IN_FLIGHT]]
            await asyncio.gather(*sent)

    async def _pull(self, topic: str) -> Any:
        config = self._api.ConsumerConfig(ack_policy=self._api.AckPolicy.NONE)
        return await self._stream.pull_subscribe(topic, stream=topic, config=config)

    def consume(self, topic: str, records: int) -> None:
        self._run(self._consume(topic, records))

    async def _consume(self, topic: str, records: int) -> None:
        pulled, count = await self._pull(topic), 0
        while count < records:
            count += len(await pulled.fetch(min(self.READ, records - count), timeout=10))
        await pulled.unsubscribe()

    async def _send_one(self, topic: str, value: bytes) -> None:
        await self._stream.publish(topic, value)

    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        self._run(self._tail(topic, handle, ready))

    async def _tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        subscription = await self._stream.subscribe(topic, stream=topic, ordered_consumer=True)
        ready()
        async for message in subscription.messages:
            if handle(message.data):
                break
        await subscription.unsubscribe()


# -- RabbitMQ ------------------------------------------------------------------------------------------


class RabbitClient(OnLoop):
    """aio-pika with publisher confirms, 1,000 messages in flight: a quorum queue if it is synced, else a stream."""

    IN_FLIGHT = 1_000
    PREFETCH = 1_000

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._pika: Any = importlib.import_module("aio_pika")
        self._is_stream = not target.is_synced
        self._run(self._connect(target.addresses[0]))

    async def _connect(self, address: str) -> None:
        self._connection: Any = await self._pika.connect(f"amqp://guest:guest@{address}/")
        self._channel: Any = await self._connection.channel(publisher_confirms=True)

    async def _declare(self, topic: str) -> Any:
        kind = "stream" if self._is_stream else "quorum"
        return await self._channel.declare_queue(topic, durable=True, arguments={"x-queue-type": kind})

    def create(self, topic: str) -> None:
        self._run(self._declare(topic))

    async def _send_one(self, topic: str, value: bytes) -> None:
        message = self._pika.Message(value, delivery_mode=self._pika.DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, routing_key=topic)

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        self._run(self._produce(topic, values))

    async def _produce(self, topic: str, values: Sequence[bytes]) -> None:
        for first in range(0, len(values), self.IN_FLIGHT):
            await asyncio.gather(*(self._send_one(topic, value) for value in values[first : first + self.IN_FLIGHT]))

    def consume(self, topic: str, records: int) -> None:
        left = [records]

        def handle(_: bytes) -> bool:
            left[0] -= 1
            return left[0] == 0

        self.tail(topic, handle, lambda: None)

    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        self._run(self._tail(topic, handle, ready))

    async def _tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        channel = await self._connection.channel()
        await channel.set_qos(prefetch_count=self.PREFETCH)
        queue = await channel.get_queue(topic)
        done, count = asyncio.Event(), 0

        async def received(message: Any) -> None:
            nonlocal count
            count += 1
            is_last = not done.is_set() and handle(message.body)
            if is_last or count % (self.PREFETCH // 4) == 0:
                await message.ack(multiple=True)
            if is_last:
                done.set()

        arguments = {"x-stream-offset": "first"} if self._is_stream else {}
        await queue.consume(received, arguments=arguments)
        ready()
        await done.wait()
        await channel.close()


# -- PostgreSQL ----------------------------------------------------------------------------------------


class PostgresqlClient(InThreads):
    """psycopg: a table with a serial key; COPY for many records, LISTEN and NOTIFY to wake a reader."""

    COPIED = 10_000
    READ = 10_000

    def __init__(self, target: Target) -> None:
        self._psycopg: Any = importlib.import_module("psycopg")
        self._url = target.addresses[0]
        self._connection: Any = self._psycopg.connect(self._url, autocommit=True)

    def create(self, topic: str) -> None:
        self._connection.execute(f"CREATE TABLE {topic} (id bigserial PRIMARY KEY, value bytea NOT NULL)")

    def produce(self, topic: str, values: Sequence[bytes]) -> None:
        for first in range(0, len(values), self.COPIED):
            with self._connection.cursor().copy(f"COPY {topic} (value) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["bytea"])
                for value in values[first : first + self.COPIED]:
                    copy.write_row((value,))

    def _read(self, topic: str, after: int) -> Any:
        query = f"SELECT id, value FROM {topic} WHERE id > %s ORDER BY id LIMIT {self.READ}"
        return self._connection.cursor(binary=True).execute(query, (after,)).fetchall()

    def consume(self, topic: str, records: int) -> None:
        last = count = 0
        while count < records:
            found = self._read(topic, last)
            count += len(found)
            last = found[-1][0]

    def send_one(self, topic: str, value: bytes) -> None:
        self._connection.execute(f"INSERT INTO {topic} (value) VALUES (%s)", (value,))

    def start_sending(self, topic: str) -> tuple[Callable[[bytes], object], Callable[[], object]]:
        def send(value: bytes) -> None:
            query = f"WITH added AS (INSERT INTO {topic} (value) VALUES (%s)) SELECT pg_notify('{topic}', '')"
            self._connection.execute(query, (value,))

        return send, lambda: None

    def tail(self, topic: str, handle: Callable[[bytes], bool], ready: Callable[[], None]) -> None:
        last = 0
        with self._psycopg.connect(self._url, autocommit=True) as listening:
            listening.execute(f"LISTEN {topic}")
            ready()
            while True:
                found = self._read(topic, last)
                if any(handle(value) for _, value in found):
                    return
                last = found[-1][0] if found else last
                with contextlib.suppress(StopIteration):
                    next(listening.notifies(timeout=POLL_S, stop_after=1))


CLIENTS: dict[str, Callable[[Target], PeerClient]] = {
    "quiver": QuiverClient,
    "kafka": KafkaClient,
    "redis": RedisClient,
    "nats": NatsClient,
    "rabbitmq": RabbitClient,
    "postgresql": PostgresqlClient,
}
