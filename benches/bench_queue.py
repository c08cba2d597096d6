"""Work queues of real nodes on loopback: records received and acknowledged per second, fsync on.

    python benches/bench_queue.py [--only batches|single] [--records N]

*batches*: one node; workers of one process receive 100 records at a time and acknowledge them together.
*single*: three replicas; 64 workers of one process each await a record, acknowledge it, and await that.

Wall-clock figures depend on what else runs; the processor time of the busiest node and of this process bounds what the
same programs reach on idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence

import quiver
from processes import VALUE, measure, running_nodes
from table import Row, show

BATCH = 100
BATCH_WORKERS = 16
SINGLE_WORKERS = 64
PARTITIONS = 1
TOPIC = "jobs"
SENT_AT_ONCE = 1_000


async def fill(cluster: quiver.AsyncCluster, records: int, *, replicas: int, topic: str = TOPIC) -> None:
    await cluster.create_topic(topic, partitions=PARTITIONS, replicas=replicas)
    async with await cluster.producer(topic) as producer:
        for first in range(0, records, SENT_AT_ONCE):
            await producer.send_many(
                [VALUE] * min(SENT_AT_ONCE, records - first), partition=first // SENT_AT_ONCE % PARTITIONS
            )


async def work(queue: quiver.AsyncQueue, left: list[int], records_max: int) -> None:
    """Receive and acknowledge until all records are done."""
    while left[0] > 0:
        jobs = await queue.receive(max=records_max, timeout=0.2)
        if jobs:
            await jobs.ack()
            left[0] -= len(jobs)


async def drain(addresses: Sequence[str], workers: int, records_max: int, records: int, *, topic: str = TOPIC) -> None:
    async with quiver.connect_async(*addresses) as cluster, await cluster.queue(topic, group="workers") as queue:
        left = [records]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(work(queue, left, records_max))


async def prepare(addresses: Sequence[str], records: int, *, replicas: int, topic: str = TOPIC) -> None:
    async with quiver.connect_async(*addresses) as cluster:
        await fill(cluster, records, replicas=replicas, topic=topic)


def run(nodes_count: int, workers: int, records_max: int, records: int, *, what: str, target: float) -> list[Row]:
    with running_nodes(nodes_count) as nodes:
        addresses = [node.wire for node in nodes.nodes]
        asyncio.run(prepare(addresses, records, replicas=nodes_count))
        effort = measure(
            lambda: asyncio.run(drain(addresses, workers, records_max, records)), [node.pid for node in nodes.nodes]
        )
    return [
        Row(what, records / effort.seconds, "records/s", target=target),
        Row("the same: per second of the busiest node's processor time", records / effort.node_s, "records/s"),
        Row("the same: per second of the workers' processor time", records / effort.own_s, "records/s"),
    ]


def batches(records: int) -> list[Row]:
    """One node, batches of 100."""
    what = f"one node: {BATCH_WORKERS} workers receive and acknowledge {BATCH} records at a time"
    return run(1, BATCH_WORKERS, BATCH, records, what=what, target=150_000)


def single(records: int) -> list[Row]:
    """Three replicas, one record at a time."""
    what = f"three replicas: {SINGLE_WORKERS} workers receive and acknowledge one record at a time"
    return run(3, SINGLE_WORKERS, 1, records, what=what, target=8_000)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure work queues.")
    parser.add_argument("--records", type=int, default=0, help="Records of each part; the default takes seconds.")
    parser.add_argument("--only", choices=["batches", "single"])
    options = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "batches": lambda: batches(options.records or 400_000),
        "single": lambda: single(options.records or 30_000),
    }
    rows = [row for name, part in parts.items() if options.only in (None, name) for row in part()]
    return show(rows, title="work queues of real nodes on loopback, fsync on")


if __name__ == "__main__":
    sys.exit(main())
