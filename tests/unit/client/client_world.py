"""Shared by the client's tests: a simulated loop with an in-memory cluster and SDK clients."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions
from quiver.errors import UnavailableError
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

    def connect(self, addresses: Sequence[str] = ("node-1:9002",), **options: int) -> AsyncCluster:
        return AsyncCluster(
            addresses,
            transport=self.cluster,
            clock=self.clock,
            rng=self.rng,
            options=ClusterOptions(**options),  # type: ignore[arg-type] # all of them numbers here
            http_get=self.http_get,
        )

    async def http_get(self, host: str, port: int, path: str) -> bytes:
        """Answer as the gateways of the cluster do, at `gateway:8002`."""
        if (host, port, path) != ("gateway", 8002, "/metadata"):
            raise UnavailableError(f"{host}:{port} was not reached")
        nodes = [{"node": node, "wire_address": address} for node, address in self.cluster.nodes.items()]
        return msgspec.json.encode({"status": "success", "cluster_id": "memory", "nodes": nodes})

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return self.cluster.partition(topic, partition).values()
