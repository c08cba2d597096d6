"""The workers of `bench_queue_peers.py` for other queues, run by a Python that has their clients: one load, one result.

    python queue_peer_load.py PEER PORT fill|batches|single RECORDS

It imports nothing of Quiver. `fill` puts records of 100 bytes into an empty queue; `batches` and `single` receive and
acknowledge them, and print the seconds and this process's processor time as JSON. Each peer is used as its client
library means it to be used; where an acknowledgement can be awaited, it is.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

VALUE = b"x" * 100
BATCH = 100
BATCH_WORKERS = 16
SINGLE_WORKERS = 64
SENT_AT_ONCE = 1_000


class Left:
    """Records that are not acknowledged yet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = asyncio.Event()

    def settle(self, count: int) -> None:
        self.count -= count
        if self.count <= 0:
            self.done.set()


async def run_workers(workers: int, work: Callable[[int], Awaitable[None]], left: Left) -> None:
    """Run workers until everything is acknowledged."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work(number)) for number in range(workers)]
    waiting: asyncio.Future[Any] = asyncio.ensure_future(left.done.wait())
    ended, _ = await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()  # a worker that failed


class QueueLoad(ABC):
    """One queue of a system: filled first, then drained by workers.

    Without `is_synced` an acknowledgement does not wait for the disk, in the way that the system's manual recommends.
    """

    def __init__(self, port: int, *, queue: str = "jobs", replicas: int = 1, is_synced: bool = True) -> None:
        self._port = port
        self._queue = queue
        self._replicas = replicas
        self._is_synced = is_synced

    @abstractmethod
    async def fill(self, records: int) -> None:
        """Create the queue and put records into it."""

    @abstractmethod
    async def drain(self, records: int, workers: int, batch: int) -> None:
        """Receive and acknowledge all records."""


# -- Redis Streams: XREADGROUP, XACK -------------------------------------------------------------------


class RedisLoad(QueueLoad):
    """A stream and a consumer group; `appendfsync always` is set after the fill.

    With replicas, an acknowledgement waits until a majority has it, which Redis does not make durable there.
    """

    def _connect(self) -> Any:
        redis: Any = importlib.import_module("redis.asyncio")
        return redis.Redis(port=self._port)

    async def fill(self, records: int) -> None:
        client = self._connect()
        await client.config_set("appendfsync", "no")
        for first in range(0, records, SENT_AT_ONCE):
            pipe = client.pipeline(transaction=False)
            for _ in range(min(SENT_AT_ONCE, records - first)):
                pipe.xadd(self._queue, {"v": VALUE})
            await pipe.execute()
        await client.xgroup_create(self._queue, "workers", "0")
        await client.config_set("appendfsync", "always" if self._is_synced else "everysec")
        await client.aclose()

    async def drain(self, records: int, workers: int, batch: int) -> None:
        left = Left(records)

        async def work(number: int) -> None:
            client = self._connect()
            while left.count > 0:
                answer = await client.xreadgroup("workers", f"w{number}", {self._queue: ">"}, count=batch, block=200)
                if answer:
                    ids = [id_ for id_, _ in answer[0][1]]
                    if self._replicas == 1:
                        await client.xack(self._queue, "workers", *ids)
                    else:
                        pipe = client.pipeline(transaction=False)
                        pipe.xack(self._queue, "workers", *ids).execute_command("WAIT", self._replicas // 2, 10_000)
                        await pipe.execute()
                    left.settle(len(ids))

        await run_workers(workers, work, left)


# -- RabbitMQ: quorum queue ----------------------------------------------------------------------------


class RabbitLoad(QueueLoad):
    """A quorum queue, or a classic one with transient messages; consumers with a prefetch.

    The protocol does not confirm acknowledgements.
    """

    def __init__(self, port: int, *, queue: str = "jobs", replicas: int = 1, is_synced: bool = True) -> None:
        super().__init__(port, queue=queue, replicas=replicas, is_synced=is_synced)
        self._pika: Any = importlib.import_module("aio_pika")
        self._url = f"amqp://guest:guest@127.0.0.1:{port}/"

    async def _declare(self, channel: Any) -> Any:
        kind = "quorum" if self._is_synced else "classic"
        return await channel.declare_queue(self._queue, durable=True, arguments={"x-queue-type": kind})

    async def fill(self, records: int) -> None:
        connection = await self._pika.connect(self._url)
        channel = await connection.channel(publisher_confirms=True)
        await self._declare(channel)
        modes = self._pika.DeliveryMode
        message = self._pika.Message(VALUE, delivery_mode=modes.PERSISTENT if self._is_synced else modes.NOT_PERSISTENT)
        for first in range(0, records, SENT_AT_ONCE):
            count = min(SENT_AT_ONCE, records - first)
            sending = (channel.default_exchange.publish(message, routing_key=self._queue) for _ in range(count))
            await asyncio.gather(*sending)
        await connection.close()

    async def drain(self, records: int, workers: int, batch: int) -> None:
        left = Left(records)
        connection = await self._pika.connect(self._url)

        async def work(_: int) -> None:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=2 * batch)
            queue = await self._declare(channel)
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            await queue.consume(inbox.put)
            received: list[Any] = []
            while True:
                try:
                    received.append(inbox.get_nowait() if inbox.qsize() else await asyncio.wait_for(inbox.get(), 0.2))
                except TimeoutError:
                    if not received or left.count > workers * batch:
                        continue  # nothing, or more will come
                    # the rest, which is no whole batch
                else:
                    if len(received) < batch:
                        continue
                await received[-1].ack(multiple=True)
                left.settle(len(received))
                received.clear()

        await run_workers(workers, work, left)
        await connection.close()


# -- NATS JetStream: work queue ------------------------------------------------------------------------


class NatsLoad(QueueLoad):
    """A stream with work-queue retention and one durable pull consumer."""

    def __init__(self, port: int, *, queue: str = "jobs", replicas: int = 1, is_synced: bool = True) -> None:
        super().__init__(port, queue=queue, replicas=replicas, is_synced=is_synced)
        self._nats: Any = importlib.import_module("nats")
        self._api: Any = importlib.import_module("nats.js.api")
        self._url = f"nats://127.0.0.1:{port}"

    async def fill(self, records: int) -> None:
        client = await self._nats.connect(self._url)
        stream = client.jetstream()
        await stream.add_stream(
            name=self._queue,
            subjects=[self._queue],
            retention=self._api.RetentionPolicy.WORK_QUEUE,
            num_replicas=self._replicas,
        )
        config = self._api.ConsumerConfig(
            durable_name="workers", ack_policy=self._api.AckPolicy.EXPLICIT, max_ack_pending=100_000
        )
        await stream.add_consumer(self._queue, config)
        for first in range(0, records, SENT_AT_ONCE):
            count = min(SENT_AT_ONCE, records - first)
            await asyncio.gather(*(stream.publish(self._queue, VALUE) for _ in range(count)))
        await client.close()

    async def drain(self, records: int, workers: int, batch: int) -> None:
        left = Left(records)
        client = await self._nats.connect(self._url)
        stream = client.jetstream()

        async def work(_: int) -> None:
            pulled = await stream.pull_subscribe_bind("workers", stream=self._queue)
            while left.count > 0:
                try:
                    messages = await pulled.fetch(batch, timeout=1)
                except TimeoutError:
                    continue
                for message in messages[:-1]:
                    await message.ack()
                await messages[-1].ack_sync(timeout=60)
                left.settle(len(messages))

        await run_workers(workers, work, left)
        await client.close()


# -- PostgreSQL: a table, SKIP LOCKED ------------------------------------------------------------------


class PostgresqlLoad(QueueLoad):
    """A table whose rows workers lock, skip if they are locked, and delete; one connection for each worker."""

    async def _connect(self) -> Any:
        psycopg: Any = importlib.import_module("psycopg")
        return await psycopg.AsyncConnection.connect(f"postgresql://quiver@127.0.0.1:{self._port}/postgres")

    async def fill(self, records: int) -> None:
        connection = await self._connect()
        await connection.execute(f"CREATE TABLE {self._queue} (id bigserial PRIMARY KEY, value bytea NOT NULL)")
        async with connection.cursor().copy(f"COPY {self._queue} (value) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["bytea"])
            for _ in range(records):
                await copy.write_row((VALUE,))
        await connection.execute(f"ANALYZE {self._queue}")
        await connection.commit()
        await connection.close()

    async def drain(self, records: int, workers: int, batch: int) -> None:
        left = Left(records)
        receive = f"SELECT id, value FROM {self._queue} ORDER BY id LIMIT {batch} FOR UPDATE SKIP LOCKED"
        acknowledge = f"DELETE FROM {self._queue} WHERE id = ANY(%s)"

        async def work(_: int) -> None:
            connection = await self._connect()
            while left.count > 0:
                found = await (await connection.execute(receive)).fetchall()
                if found:
                    await connection.execute(acknowledge, ([id_ for id_, _ in found],))
                await connection.commit()
                if found:
                    left.settle(len(found))
                else:
                    await asyncio.sleep(0.001)

        await run_workers(workers, work, left)


LOADS: dict[str, type[QueueLoad]] = {
    "redis": RedisLoad,
    "rabbitmq": RabbitLoad,
    "nats": NatsLoad,
    "postgresql": PostgresqlLoad,
}


async def main(peer: str, port: int, part: str, records: int) -> None:
    load = LOADS[peer](port)
    if part == "fill":
        await load.fill(records)
        return
    workers, batch = (BATCH_WORKERS, BATCH) if part == "batches" else (SINGLE_WORKERS, 1)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    await load.drain(records, workers, batch)
    print(json.dumps({"seconds": time.perf_counter() - begun, "own_s": time.process_time() - begun_cpu}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
