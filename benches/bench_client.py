"""What the SDK costs by itself: the client's side alone, against a cluster in memory that answers at once.

Rates are by processor time: both threads share one interpreter, so that this is what a quiet machine's clock shows.

Run with `python benches/bench_client.py`; `make bench BENCH=client`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from quiver.client.cluster import AsyncCluster
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster
from table import Row, show

RECORDS = 400_000
ROUNDS = 3
VALUE = b"x" * 100


def connect() -> Cluster:
    memory = MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())
    cluster = AsyncCluster(memory.addresses, transport=memory, clock=SystemClock(), rng=random.Random(2))
    return Cluster(cluster)


def measure(work: Callable[[Cluster], None]) -> float:
    """Return the best rate of some rounds, in records per second of processor time, all threads together."""
    rates = []
    for _ in range(ROUNDS):
        with connect() as cluster:
            cluster.create_topic("logs", partitions=1)
            if work not in (send_one_by_one, send_many):
                send_many(cluster)
            begun = time.process_time()
            work(cluster)
            rates.append(RECORDS / (time.process_time() - begun))
    return max(rates)


def send_one_by_one(cluster: Cluster) -> None:
    producer = cluster.producer("logs")
    for _ in range(RECORDS):
        producer.send(VALUE)
    producer.flush()


def send_many(cluster: Cluster) -> None:
    producer = cluster.producer("logs")
    producer.send_many([VALUE] * RECORDS)
    producer.flush()


def iterate(cluster: Cluster) -> None:
    for count, _ in enumerate(cluster.consumer("logs"), start=1):
        if count == RECORDS:
            return


def fetch_arrow(cluster: Cluster) -> None:
    assert cluster.consumer("logs").fetch_arrow(RECORDS).num_rows == RECORDS


def main() -> int:
    wanted = {send_one_by_one: 0.4, send_many: 1.5, iterate: 1.0, fetch_arrow: 5.0}
    rows = [
        Row(work.__name__.replace("_", " "), measure(work) / 1e6, "M records/s", target=target)
        for work, target in wanted.items()
    ]
    return show(rows, title="The SDK alone: 100-byte values, one partition, a cluster in memory; by processor time")


if __name__ == "__main__":
    sys.exit(main())
