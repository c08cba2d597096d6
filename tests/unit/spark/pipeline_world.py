"""What tests of pipelines share: a cluster in memory, and as much of Spark as jobs use, in this very process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from quiver.client.cluster import AsyncCluster
from quiver.client.options import ClusterOptions
from quiver.client.sync import Cluster
from quiver.clock import SystemClock
from quiver.errors import RequestError
from quiver.model import Buffer
from quiver.spark import connections
from quiver.spark.pipelines import Job, JobProgress, JobResult, JobRun
from quiver.testing import Latency
from quiver.testing.memory_cluster import MemoryCluster
from quiver.wire.requests import Request


class World:
    """A cluster, and jobs that run on it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.memory = MemoryCluster(clock=SystemClock(), rng=random.Random(1), latency=Latency())
        self.cluster = self.connect(self.memory)
        self.spark: Any = FakeSpark()
        self.told: list[JobProgress] = []
        patch.setattr(connections, "_connect", lambda *_: self.cluster)

    def connect(self, transport: Any) -> Cluster:
        """Return a connection by a way to the cluster."""
        options = ClusterOptions(timeout_ms=10_000)
        clock, rng = SystemClock(), random.Random(2)
        return Cluster(AsyncCluster(self.memory.addresses, transport=transport, clock=clock, rng=rng, options=options))

    def run(self, job: Job, *, stop_after: int | None = None) -> JobResult:
        """Run a job; told to stop after it has told so often how far it is."""
        run = JobRun(lambda: self.spark, report_progress=self.told.append)

        def report_progress(progress: JobProgress) -> None:
            self.told.append(progress)
            if len(self.told) == stop_after:
                run.stop_signal = 15

        run.report_progress = report_progress
        return job.run(run)

    def fill(self, topic: str, *counts: int, timestamp: Callable[[int], int] | None = None) -> None:
        """Add so many records to each partition of a topic; each says where it is."""
        self.cluster.create_topic(topic, partitions=len(counts), exist_ok=True)
        ends = self.cluster.offsets(topic).offsets
        with self.cluster.producer(topic, batch_bytes=400) as producer:
            for partition, count in enumerate(counts):
                for offset in range(ends[partition], ends[partition] + count):
                    time_ms = timestamp(offset) if timestamp else 1_700_000_000_000 + offset
                    producer.send(
                        f"{partition}-{offset}",
                        key=f"k{offset % 3}" if offset % 3 else None,
                        partition=partition,
                        timestamp=time_ms,
                        headers=[("n", b"%d" % offset)] if offset % 2 else None,
                    )

    def records(self, topic: str, partition: int) -> list[tuple[Any, ...]]:
        """Return all that the records of a partition are, in order, without their offsets."""
        bounds = [self.cluster.offsets(topic, at).offsets[partition] for at in ("earliest", "latest")]
        return [
            (record.timestamp, record.key, record.value, tuple(record.headers or ()))
            for batch in self.cluster.read_range(topic, partition, *bounds)
            for record in batch.records()
        ]


class Guillotine:
    """A way to the cluster that ends at a request: before it is carried out, or before its answer."""

    def __init__(self, world: World, requests: int, *, is_last_done: bool) -> None:
        self._memory, self._left, self._is_last_done = world.memory, requests, is_last_done

    async def call(
        self, address: str, request: Request[Any], payload: Sequence[Buffer] = (), *, timeout_ms: int
    ) -> tuple[Any, memoryview]:
        self._left -= 1
        if self._left <= 0:
            if self._is_last_done and not self._left:
                await self._memory.call(address, request, payload, timeout_ms=timeout_ms)
            raise RequestError("the process was killed")
        return await self._memory.call(address, request, payload, timeout_ms=timeout_ms)


class FakeSpark:
    """A session whose tasks run in order, here and now."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.defaultParallelism = 2
        self.tasks = 0

    def parallelize(self, items: Sequence[Any], parts: int) -> FakeRdd:
        assert 1 <= parts <= len(items)
        self.tasks += parts
        return FakeRdd(items)


class FakeRdd:
    def __init__(self, items: Iterable[Any]) -> None:
        self._items = list(items)

    def map(self, function: Callable[[Any], Any]) -> FakeRdd:
        return FakeRdd(map(function, self._items))

    def collect(self) -> list[Any]:
        return self._items
