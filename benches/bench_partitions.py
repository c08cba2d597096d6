"""Measure many partitions: open them, hold them idle, fail over, stop and restart a node, and produce to all of them.

    python bench_partitions.py [--partitions 1000] [--only PART] [--records 2000000]

Three real nodes as processes on loopback, three replicas of every partition, fsync on, everything through the SDK. The
parts `open`, `idle`, `failover` and `restart` run one after the other on the same cluster; `throughput` alternates
between a topic of 30 partitions and one of 1,200 (or `--partitions`, if that is fewer) on another one.

Wait some minutes between two runs: ext4 avoids inodes of files that were removed lately, and searches long for others
when a run before has removed thousands. A topic then opens two to three times as slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

import quiver
from processes import (
    VALUE,
    NodeProcess,
    Nodes,
    connect,
    kernel_s,
    own_processor_s,
    processor_s,
    quantile,
    running_nodes,
    wait_until,
)
from quiver.errors import QuiverError
from table import Row, show

TOPIC = "many"
TOPIC_MAX = 4_096
"""Most partitions of a topic."""
FEW = 30
MANY = 1_200
CHUNK = 100_000
UNBOUNDED = ("--manager-replicas-per-broker-max", "100000")
"""By default half of the limit of open files is for replicas, two for each; here few are written to at once."""
IDLE_S = 5.0
SETTLE_S = 25.0
"""Long enough for groups to hibernate and for logs to be put away."""
DELIVERY_TIMEOUT_S = 300
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


Place = tuple[str, int]
"""A topic and one of its partitions."""


async def probe(producers: Mapping[str, quiver.AsyncProducer], places: Iterable[Place], begun_s: float) -> list[float]:
    """Send a record to each partition at once; return the seconds since `begun_s` at which each was acknowledged."""

    async def one(place: Place) -> float:
        topic, partition = place
        await producers[topic].send(VALUE, partition=partition)
        return time.perf_counter() - begun_s

    return list(await asyncio.gather(*map(one, places)))


class Many:
    """One cluster with many partitions, of one topic if it may have so many, and a client that has used all of them."""

    def __init__(self, nodes: Nodes, cluster: quiver.AsyncCluster, partitions: int) -> None:
        self._nodes = nodes
        self._cluster = cluster
        self._count = partitions
        of_topics = [range(first, min(first + TOPIC_MAX, partitions)) for first in range(0, partitions, TOPIC_MAX)]
        self._topics = {f"{TOPIC}-{number}": len(numbers) for number, numbers in enumerate(of_topics)}
        self._empty = [resources(node) for node in nodes.nodes]
        self._producers: dict[str, quiver.AsyncProducer] = {}

    async def open(self) -> list[Row]:
        count = self._count
        before, own_s = [spent(node) for node in self._nodes.nodes], own_processor_s()
        begun = time.perf_counter()
        create = self._cluster.create_topic
        await asyncio.gather(*(create(topic, partitions=size, replicas=3) for topic, size in self._topics.items()))
        created_s = time.perf_counter() - begun
        for topic in self._topics:
            self._producers[topic] = await self._cluster.producer(topic, delivery_timeout=DELIVERY_TIMEOUT_S)
        places = ((topic, partition) for topic, size in self._topics.items() for partition in range(size))
        serving_s = max(await probe(self._producers, places, begun))
        own_s = own_processor_s() - own_s
        after = [spent(node) for node in self._nodes.nodes]
        all_s, in_kernel_s = (sum(now[i] - then[i] for now, then in zip(after, before, strict=True)) for i in (0, 1))
        return [
            Row(f"create_topic of {count:,} partitions × 3", created_s, "s"),
            Row("the same, until each has acknowledged a record", serving_s, "s", None, target_s(count)),
            Row("the same: processor time of all nodes", 1000 * all_s / count, "ms/partition"),
            Row("the same: of it in the kernel", 1000 * in_kernel_s / count, "ms/partition"),
            Row("the same: processor time of the client", 1000 * own_s / count, "ms/partition"),
        ]

    async def idle(self) -> list[Row]:
        count = self._count
        await asyncio.sleep(SETTLE_S)
        before = [processor_s(node.pid) for node in self._nodes.nodes]
        await asyncio.sleep(IDLE_S)
        efforts = [processor_s(node.pid) - one for node, one in zip(self._nodes.nodes, before, strict=True)]
        grown = [
            [now - then for now, then in zip(resources(node), empty, strict=True)]
            for node, empty in zip(self._nodes.nodes, self._empty, strict=True)
        ]
        return [
            Row(f"{count:,} idle partitions: processor of the busiest node", 100 * max(efforts) / IDLE_S, "%", None, 5),
            Row("memory (RSS) per idle replica", max(one[0] for one in grown) / count, "KiB", None, 60),
            Row("descriptors per idle replica", max(one[1] for one in grown) / count, "", None, 0.2),
        ]

    async def failover(self) -> list[Row]:
        """Kill a node that is not the primary; probe the partitions that it led."""
        victim = self._nodes.nodes[-1]
        led = [(topic, one.partition) for topic, one in await self._describe() if one.leader == victim.id]
        victim.kill()
        times_s = await probe(self._producers, led, time.perf_counter())
        return [
            Row(f"kill -9 of a node that leads {len(led):,}: accepted again, p50", quantile(times_s, 0.5), "s"),
            Row("the same, p99", quantile(times_s, 0.99), "s", None, 2),
            Row("the same, slowest", max(times_s), "s"),
        ]

    async def restart(self) -> list[Row]:
        """Start the killed node, stop it as an operator does, and start it again."""
        victim = self._nodes.nodes[-1]
        rows = []
        if not victim.is_running:
            rows.append(Row("start after kill -9, until ready", start(victim), "s", None, 5))
        await self._wait_whole()
        begun = time.perf_counter()
        await asyncio.to_thread(victim.stop)
        rows.append(Row("stop of the node", time.perf_counter() - begun, "s", None, 5))
        rows.append(Row("start after a stop, until ready", start(victim), "s", None, 5))
        return rows

    async def _describe(self) -> list[tuple[str, quiver.PartitionDescription]]:
        return [
            (topic, one) for topic in self._topics for one in (await self._cluster.describe_topic(topic)).partitions
        ]

    async def _wait_whole(self) -> None:
        """Wait until every replica is in sync: the node takes part in all groups again."""
        end = time.monotonic() + DELIVERY_TIMEOUT_S
        while time.monotonic() < end:
            try:
                if all(len(one.in_sync) == 3 for _, one in await self._describe()):
                    return
            except QuiverError:
                pass  # the answer of a node that is busy may take longer than a request may
            await asyncio.sleep(0.2)
        raise TimeoutError("not all replicas are in sync")


def start(node: NodeProcess) -> float:
    """Start a node; return the seconds until it says that it is ready."""
    begun = time.perf_counter()
    node.start()
    node.wait_ready()
    return time.perf_counter() - begun


def target_s(partitions: int) -> float:
    """Return the time in which a new topic's partitions should serve: 3,000 in 6 s, 10,000 in 25 s."""
    return 6 * partitions / 3_000 if partitions <= 3_000 else 25 * partitions / 10_000


def spent(node: NodeProcess) -> tuple[float, float]:
    """Return a node's processor time, and how much of it was in the kernel."""
    return processor_s(node.pid), kernel_s(node.pid)


def resources(node: NodeProcess) -> tuple[float, float]:
    """Return a node's resident memory in KiB and its open descriptors."""
    resident = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1]) * PAGE_KIB
    return resident, len(os.listdir(f"/proc/{node.pid}/fd"))


def on_one_cluster(partitions: int, only: str | None) -> list[Row]:
    """Run the parts that share a cluster; all of them need `open`."""

    async def run(nodes: Nodes) -> list[Row]:
        async with quiver.connect_async(*(node.wire for node in nodes.nodes)) as cluster:
            many = Many(nodes, cluster, partitions)
            rows = await many.open()
            for name, part in (("idle", many.idle), ("failover", many.failover), ("restart", many.restart)):
                if only in (None, name):
                    rows += await part()
            return rows

    with running_nodes(3, UNBOUNDED) as nodes:
        return asyncio.run(run(nodes))


def throughput(partitions: int, records: int) -> list[Row]:
    """Produce the same records to few partitions and to many, alternating."""
    counts = {"few": FEW, "many": min(partitions, MANY)}
    values = pa.array([VALUE] * CHUNK, pa.binary())
    rates: dict[str, list[float]] = {topic: [] for topic in counts}
    with running_nodes(3) as nodes, connect(nodes) as cluster:
        for topic, count in counts.items():
            cluster.create_topic(topic, partitions=count, replicas=3)
            wait_led(cluster, topic)
        for round_ in range(4):
            for topic in counts:
                with cluster.producer(topic, delivery_timeout=DELIVERY_TIMEOUT_S) as producer:
                    producer.send_many(values)
                    producer.flush()
                    begun = time.perf_counter()
                    for _ in range(records // CHUNK):
                        producer.send_many(values)
                    producer.flush()
                    if round_:  # the first round warms up
                        rates[topic].append(records / (time.perf_counter() - begun))
    few, many = statistics.median(rates["few"]), statistics.median(rates["many"])
    return [
        Row(f"produce to {FEW} partitions", few, "1/s"),
        Row(f"produce to {counts['many']:,} partitions", many, "1/s", few, 0.75 * few),
    ]


def wait_led(cluster: quiver.Cluster, topic: str) -> None:
    def is_led() -> bool:
        return all(one.leader is not None for one in cluster.describe_topic(topic).partitions)

    wait_until(is_led, what="leaders of all partitions", timeout_s=DELIVERY_TIMEOUT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure many partitions.")
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--only", choices=["open", "idle", "failover", "restart", "throughput"])
    options = parser.parse_args()
    rows = []
    if options.only != "throughput":
        rows += on_one_cluster(options.partitions, options.only)
    if options.only in (None, "throughput"):
        rows += throughput(options.partitions, options.records)
    return show(rows, title="many partitions on three real nodes on loopback, fsync on")


if __name__ == "__main__":
    sys.exit(main())
