"""Producers of a simulated cluster: idempotent sends through the real SDK, and restarts under the same name."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from quiver.client.producer import AsyncProducer
from quiver.errors import FencedError, QuiverError
from quiver.testing.clusters.clients import Client
from quiver.testing.clusters.swarm import TopicPlan
from quiver.testing.finding import found, require

if TYPE_CHECKING:
    from quiver.testing.clusters.world import ClusterWorld


class Sender(Client):
    """Sends idempotently under a name, several batches at once, and comes back under it after a restart."""

    producer: AsyncProducer

    def __init__(self, world: ClusterWorld, name: str, topic: TopicPlan) -> None:
        super().__init__(world, name, topic)
        self._count = 0
        self._acknowledged: Counter[int] = Counter()
        """By partition, how many records are there."""
        self._unknown: Counter[int] = Counter()
        """By partition, how many records are perhaps there."""

    async def begin(self) -> None:
        """Register under the name, which fences off whoever has it."""
        call = self.invoke("register", self.name)
        try:
            timeout_s = self.world.knobs.delivery_timeout_ms / 1000
            self.producer = await self.cluster.producer(self.topic.name, self.name, delivery_timeout=timeout_s)
        except QuiverError as error:
            self.fail(call, error)
            raise
        identity = self.producer.core.identity
        self.succeed(call, {"id": int(identity.producer_id), "epoch": identity.epoch})

    async def step(self) -> None:
        """Send some batches side by side."""
        lanes = range(1 + self.rng.randrange(self.world.knobs.lanes))
        sends = [self._send(self.producer, f"/{lane}") for lane in lanes]
        if not all(await asyncio.gather(*sends)):
            await self.insist(self.begin)  # fenced: another one has the name

    async def _send(self, producer: AsyncProducer, lane: str) -> bool:
        """Send a batch; tell whether the producer may go on."""
        partition = self.rng.randrange(producer.core.accumulator.partition_count)
        values = [
            f"{self.name}:{self._count + at}" for at in range(1 + self.rng.randrange(self.world.knobs.values_max))
        ]
        self._count += len(values)
        call = self.invoke("send", self.key(partition), values, lane=lane)
        try:
            spans = await (await producer.send_many(values, partition=partition))
        except QuiverError as error:
            if error.outcome == "unknown":
                self._unknown[partition] += len(values)
            self.fail(call, error, lane=lane)
            return not isinstance(error, FencedError)
        if len(spans) != 1:
            found("C", "a small send is in several batches", name=self.name, batches=len(spans))
        self.succeed(call, int(spans[0].first_offset))
        self._acknowledged[partition] += len(values)
        return True

    async def restart(self) -> None:
        """Crash, or be replaced while still at work, and come back under the same name."""
        old = self.producer
        if self.rng.random() < 0.5:
            await old.abort()
        await self.insist(self.begin)
        if self.rng.random() < 0.5:
            await self._send(old, "/old")  # it does not know yet that it was replaced
        await old.abort()
        await self._check_sequence()

    async def _check_sequence(self) -> None:
        """Demand that a partition tells a restarted producer how many of its records it has."""
        partition = self.rng.randrange(self.producer.core.accumulator.partition_count)
        try:
            count = await self.producer.next_sequence(partition)
        except QuiverError as error:
            self.check(error, "next_sequence")
            return
        known, unknown = self._acknowledged[partition], self._unknown[partition]
        facts = {"name": self.name, "partition": partition, "next_sequence": count, "acknowledged": known}
        require(known <= count <= known + unknown, "C", "a producer is told a wrong sequence", unknown=unknown, **facts)
