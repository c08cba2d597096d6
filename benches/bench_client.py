"""Measure the SDK: send many records, one by one, awaited, and read them back.

    python bench_client.py [--records 1000000] [--only alone|one|three]

Three settings: *alone* is the client against an in-memory cluster that answers immediately, by CPU time; *one* is a
real node, one replica, fsync on; *three* is three nodes, three replicas, fsync on. Client and nodes share this
machine's cores. A wall-clock rate is the best of several rounds; the rows below it show the CPU time per record of the
client and of the busiest node, which is independent of other programs. The raw limit of sending is a loop of `write`
and `fdatasync` over the same values.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable

from processes import VALUE, Effort, Nodes, connect, disk_directory, measure, quantile, running_nodes
from quiver.client.cluster import AsyncCluster
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster
from table import Row, show

MIB = 1 << 20
ROUNDS = 5
AWAITED = 500
TOPIC = "logs"

Work = Callable[[Cluster, int], object]
"""Work with a cluster and a number of records."""


# -- what is measured --------------------------------------------------------------------------------


def send_one_by_one(cluster: Cluster, records: int) -> None:
    with cluster.producer(TOPIC) as producer:
        for _ in range(records):
            producer.send(VALUE)


def send_many(cluster: Cluster, records: int) -> None:
    with cluster.producer(TOPIC) as producer:
        producer.send_many([VALUE] * records)


def fetch_arrow(cluster: Cluster, records: int) -> None:
    with cluster.consumer(TOPIC) as consumer:
        assert consumer.fetch_arrow(records, timeout=60).num_rows == records


def iterate(cluster: Cluster, records: int) -> None:
    with cluster.consumer(TOPIC) as consumer:
        for count, _ in enumerate(consumer, start=1):
            if count == records:
                return


# -- alone -------------------------------------------------------------------------------------------


def alone(records: int) -> int:
    wanted = {send_many: 1.5, send_one_by_one: 0.4, fetch_arrow: 5.0, iterate: 1.0}
    rows = [
        Row(work.__name__.replace("_", " "), rate_alone(work, records) / 1e6, "M records/s", target=target)
        for work, target in wanted.items()
    ]
    return show(rows, title="The SDK alone: 100-byte values, one partition, a cluster in memory; by processor time")


def rate_alone(work: Work, records: int) -> float:
    """Return the best rate of several rounds, in records per second of CPU time of all threads."""
    rates = []
    for _ in range(ROUNDS):
        with connect_in_memory() as cluster:
            cluster.create_topic(TOPIC, partitions=1)
            if work not in (send_one_by_one, send_many):
                send_many(cluster, records)
            begun = time.process_time()
            work(cluster, records)
            rates.append(records / (time.process_time() - begun))
    return max(rates)


def connect_in_memory() -> Cluster:
    memory = MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())
    cluster = AsyncCluster(memory.addresses, transport=memory, clock=SystemClock(), rng=random.Random(2))
    return Cluster(cluster)


# -- against nodes -----------------------------------------------------------------------------------


def one_node(records: int) -> int:
    limit = raw_write(records)
    with running_nodes(1) as nodes:
        rows = [
            *rates(nodes, send_many, records, target=1.5, limit=limit),
            *rates(nodes, send_one_by_one, records // 2, target=0.4, limit=limit),
            *rates(nodes, fetch_arrow, records, target=5.0),
            *rates(nodes, iterate, records // 2, target=1.0),
            *awaited(nodes, 1),
        ]
    return show(rows, title="The SDK and one node: 100-byte values, three partitions, fsync on")


def three_nodes(records: int) -> int:
    limit = raw_write(records)
    with running_nodes(3) as nodes:
        rows = [
            *rates(nodes, send_many, records, target=0.5, limit=limit),
            *rates(nodes, send_one_by_one, records // 2, limit=limit),
            *rates(nodes, fetch_arrow, records),
            *awaited(nodes, 3),
        ]
    return show(rows, title="The SDK and three nodes: 100-byte values, three partitions, three replicas, fsync on")


def rates(
    nodes: Nodes, work: Work, records: int, *, target: float | None = None, limit: float | None = None
) -> list[Row]:
    """Do the work several times; return the best wall-clock rate and the least CPU time."""
    pids = [node.pid for node in nodes.nodes]
    with connect(nodes) as cluster:
        cluster.create_topic(TOPIC, partitions=3, exist_ok=True)
        work(cluster, records // 10)  # leaders are found, caches are warm
        efforts: list[Effort] = [measure(lambda: work(cluster, records), pids) for _ in range(ROUNDS)]
    name = work.__name__.replace("_", " ")
    rate = max(records / effort.seconds for effort in efforts) / 1e6
    own_ns, node_ns = (
        1e9 * min(times) / records for times in zip(*((e.own_s, e.node_s) for e in efforts), strict=True)
    )
    return [
        Row(name, rate, "M records/s", limit, target),
        Row(f"{name}: processor time of the client", own_ns, "ns/record"),
        Row(f"{name}: processor time of the busiest node", node_ns, "ns/record"),
    ]


def awaited(nodes: Nodes, replicas: int) -> list[Row]:
    """Send records, each awaited before the next."""
    times_ms = []
    with connect(nodes) as cluster, cluster.producer(TOPIC) as producer:
        for _ in range(AWAITED):
            begun = time.perf_counter()
            producer.send(VALUE).result()
            times_ms.append((time.perf_counter() - begun) * 1000)
    is_target = replicas == 3
    return [
        Row("awaited send, p50", quantile(times_ms, 0.5), "ms", target=3 if is_target else None),
        Row("awaited send, p99", quantile(times_ms, 0.99), "ms", target=15 if is_target else None),
    ]


def raw_write(records: int) -> float:
    """Return the rate, in million values per second, of bare writes and syncs, a MiB at a time."""
    block, blocks = bytes(MIB), max(1, records * len(VALUE) // MIB)
    with disk_directory() as directory:
        file = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT)
        begun = time.perf_counter()
        for _ in range(blocks):
            os.write(file, block)
            os.fdatasync(file)
        seconds = time.perf_counter() - begun
        os.close(file)
    return blocks * MIB / len(VALUE) / seconds / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the SDK.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["alone", "one", "three"])
    options = parser.parse_args()
    parts: dict[str, Callable[[int], int]] = {"alone": alone, "one": one_node, "three": three_nodes}
    return max(part(options.records) for name, part in parts.items() if options.only in (None, name))


if __name__ == "__main__":
    sys.exit(main())
