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


# -- Redis Streams: XREADGROUP, XACK -------------------------------------------------------------------


class RedisLoad:
    """A stream and a consumer group; `appendfsync always` is set after the fill."""

    def __init__(self, port: int) -> None:
        self._redis: Any = importlib.import_module("redis.asyncio")
        self._port = port

    def _connect(self) -> Any:
        return self._redis.Redis(port=self._port)

    async def fill(self, records: int) -> None:
        client = self._connect()
        await client.config_set("appendfsync", "no")
        for first in range(0, records, SENT_AT_ONCE):
            pipe = client.pipeline(transaction=False)
            for _ in range(min(SENT_AT_ONCE, records - first)):
                pipe.xadd("jobs", {"v": VALUE})
            await pipe.execute()
        await client.xgroup_create("jobs", "workers", "0")
        await client.config_set("appendfsync", "always")
        await client.aclose()

    async def drain(self, records: int, workers: int, batch: int) -> None:
        left = Left(records)

        async def work(number: int) -> None:
            client = self._connect()
            while left.count > 0:
                answer = await client.xreadgroup("workers", f"w{number}", {"jobs": ">"}, count=batch, block=200)
                if answer:
                    ids = [id_ for id_, _ in answer[0][1]]
                    await client.xack("jobs", "workers", *ids)
                    left.settle(len(ids))

        await run_workers(workers, work, left)


# -- RabbitMQ: quorum queue ----------------------------------------------------------------------------


class RabbitLoad:
    """A quorum queue; consumers with a prefetch. The protocol does not confirm acknowledgements."""

    def __init__(self, port: int) -> None:
        self._pika: Any = importlib.import_module("aio_pika")
        self._url = f"amqp://guest:guest@127.0.0.1:{port}/"

    async def _declare(self, channel: Any) -> Any:
        return await channel.declare_queue("jobs", durable=True, arguments={"x-queue-type": "quorum"})

    async def fill(self, records: int) -> None:
        connection = await self._pika.connect(self._url)
        channel = await connection.channel(publisher_confirms=True)
        await self._declare(channel)
        message = self._pika.Message(VALUE, delivery_mode=self._pika.DeliveryMode.PERSISTENT)
        for first in range(0, records, SENT_AT_ONCE):
            count = min(SENT_AT_ONCE, records - first)
            sending = (channel.default_exchange.publish(message, routing_key="jobs") for _ in range(count))
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


class NatsLoad:
    """A stream with work-queue retention and one durable pull consumer; the server is restarted after the fill."""

    def __init__(self, port: int) -> None:
        self._nats: Any = importlib.import_module("nats")
        self._api: Any = importlib.import_module("nats.js.api")
        self._url = f"nats://127.0.0.1:{port}"

    async def fill(self, records: int) -> None:
        client = await self._nats.connect(self._url)
        stream = client.jetstream()
        await stream.add_stream(
            name="jobs", subjects=["jobs"], retention=self._api.RetentionPolicy.WORK_QUEUE, num_replicas=1
        )
        config = self._api.ConsumerConfig(
            durable_name="workers", ack_policy=self._api.AckPolicy.EXPLICIT, max_ack_pending=100_000
        )
        await stream.add_consumer("jobs", config)
        for first in range(0, records, SENT_AT_ONCE):
            await asyncio.gather(*(stream.publish("jobs", VALUE) for _ in range(min(SENT_AT_ONCE, records - first))))
        await client.close()

    async def drain(self, records: int, workers: int, batch: int) -> None:
        left = Left(records)
        client = await self._nats.connect(self._url)
        stream = client.jetstream()

        async def work(_: int) -> None:
            pulled = await stream.pull_subscribe_bind("workers", stream="jobs")
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


LOADS: dict[str, type[RedisLoad] | type[RabbitLoad] | type[NatsLoad]] = {
    "redis": RedisLoad,
    "rabbitmq": RabbitLoad,
    "nats": NatsLoad,
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
