"""Load for benches of a cluster: topics filled with large records, and a producer whose latencies are recorded."""

from __future__ import annotations

import threading
import time

import pyarrow as pa

import quiver
from processes import VALUE, Nodes, connect, wait_until

GIB = 1 << 30
MIB = 1 << 20
LARGE_VALUE = bytes(16 << 10)
PAUSE_S = 0.005
"""Pause between two awaited records: the latency is measured, not the throughput."""


def fill(cluster: quiver.Cluster, topic: str, gib: float) -> None:
    """Write this much, spread over all partitions batch by batch."""
    chunk = pa.array([LARGE_VALUE] * (64 * MIB // len(LARGE_VALUE)), pa.binary())
    with cluster.producer(topic, delivery_timeout=600) as producer:
        for _ in range(max(1, round(gib * GIB / (64 * MIB)))):
            producer.send_many(chunk)


class Traffic:
    """A thread that sends one awaited record after the other and records the latency of each."""

    def __init__(self, nodes: Nodes, topic: str) -> None:
        self._nodes = nodes
        self._topic = topic
        self._times_ms: list[float] = []
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._thread.join()

    def wait(self, count: int) -> None:
        wait_until(lambda: len(self._times_ms) >= count, what=f"{count} records")

    def drain(self) -> list[float]:
        """Return and clear the latencies since the last call, in milliseconds."""
        taken, self._times_ms = self._times_ms, []
        return taken

    def _run(self) -> None:
        with connect(self._nodes) as cluster, cluster.producer(self._topic) as producer:
            while not self._is_ended.wait(PAUSE_S):
                begun = time.perf_counter()
                producer.send(VALUE).result()
                self._times_ms.append((time.perf_counter() - begun) * 1000)
