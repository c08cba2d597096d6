"""A simulated loop with a cluster in memory and SDK clients on it: what the client's tests share."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions
from quiver.testing import Latency, RandomStreams, SimulatedClock, SimulatedLoop
from quiver.testing.memory_cluster import MemoryCluster

T = TypeVar("T")


class World:
    """One seeded run."""

    def __init__(self, seed: int = 1, *, latency: Latency | None = None) -> None:
        self.streams = RandomStreams(seed)
        self.loop = SimulatedLoop(self.streams.schedule, time_max_s=3600.0)
        self.clock = SimulatedClock(self.loop)
        self.rng = self.streams.workload
        self.cluster = MemoryCluster(clock=self.clock, rng=self.streams.network, latency=latency)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self.loop.run_until_complete(coroutine)
        finally:
            self.loop.close()

    def connect(self, **options: int) -> AsyncCluster:
        return AsyncCluster(
            self.cluster.addresses[:1],
            transport=self.cluster,
            clock=self.clock,
            rng=self.rng,
            options=ClusterOptions(**options),  # type: ignore[arg-type] # all of them numbers here
        )

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return self.cluster.partition(topic, partition).values()
