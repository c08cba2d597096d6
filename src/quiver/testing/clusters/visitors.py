"""Producers without a name, which come and go: nothing of them stays, and none is removed while it shows life."""

from __future__ import annotations

import asyncio

from quiver.client.producer import AsyncProducer
from quiver.errors import QuiverError
from quiver.model import ProducerId
from quiver.testing.clusters.clients import ClientWorkload
from quiver.testing.simulator.report import require

_P_SILENCE = 0.15
_P_FORGOTTEN = 0.3
_STEP_S = 0.2
_REPORTED_WITHIN_MS = 1_000
"""Time in which a sign of life has reached the primary, by heartbeat, in a cluster without faults."""


class VisitorWorkload(ClientWorkload):
    """Sends without a name; falls silent for long, vanishes, or is forgotten by an operator while it works."""

    producer: AsyncProducer
    _id: ProducerId
    _lived_ms: int
    _silence_ms: int
    """How long it had been silent before a send of the last second: the longest such silence."""
    _silence_ended_ms: int

    async def begin(self) -> None:
        """Register as someone new."""
        timeout_s = self.world.knobs.delivery_timeout_ms / 1000
        self.producer = await self.cluster.producer(self.topic.name, delivery_timeout=timeout_s)
        self._id, self._lived_ms = self.producer.producer_id, self.world.now_ms
        self._silence_ms, self._silence_ended_ms = 0, self.world.now_ms

    async def step(self) -> None:
        """Send something, and perhaps fall silent afterwards."""
        partition = self.rng.randrange(self.producer.core.accumulator.partition_count)
        value = f"{self.name}:{self.progress}:{self.world.now_ms}"
        call = self.invoke("send", self.key(partition), [value])
        try:
            delivered = await self.producer.send(value, partition=partition)
        except QuiverError as error:
            self.fail(call, error)
        else:
            self.succeed(call, int(delivered.offset))
        self._check_alive()
        self._note_silence()
        if self.rng.random() < _P_SILENCE:
            await self._fall_silent()

    async def restart(self) -> None:
        """Vanish, or be forgotten and work on, and come back as someone new."""
        if self.rng.random() < _P_FORGOTTEN:
            self.world.counts["forget"] += 1
            try:
                await self.cluster.forget("producer", self._id)
            except QuiverError as error:
                self.world.counts[f"forget {error.code}"] += 1
            await self.step_forgotten()
        await self.producer.abort()
        await self.insist(self.begin)

    async def step_forgotten(self) -> None:
        """Send as a producer that was forgotten: the SDK registers again."""
        self._id = ProducerId(-1)
        await self.step()

    def _check_alive(self) -> None:
        """E1: a producer is only replaced, because the cluster removed it, after a whole period without a send.

        The sends that end such a silence may come too late: the primary expires the producer before it is told of them.
        """
        new_id, period_ms = self.producer.producer_id, self.world.knobs.settings.manager.client_expiry_ms
        if new_id != self._id and self._id >= 0:
            self.world.counts["expired"] += 1
            silent_ms = self.world.now_ms - self._lived_ms
            if self.world.now_ms - self._silence_ended_ms <= _REPORTED_WITHIN_MS:
                silent_ms = max(silent_ms, self._silence_ms)
            facts = {"name": self.name, "id": self._id, "silent_ms": silent_ms, "period_ms": period_ms}
            # With faults, a cut-off node may have been unable to report it for a whole period.
            require(not self.world.knobs.is_calm or silent_ms >= period_ms, "E1", "a living client expired", **facts)
        self._id = new_id

    def _note_silence(self) -> None:
        now_ms = self.world.now_ms
        silence_ms, self._lived_ms = now_ms - self._lived_ms, now_ms
        if silence_ms >= self._silence_ms or now_ms - self._silence_ended_ms > _REPORTED_WITHIN_MS:
            self._silence_ms, self._silence_ended_ms = silence_ms, now_ms

    async def _fall_silent(self) -> None:
        end_ms = self.world.now_ms + self.rng.randrange(2 * self.world.knobs.settings.manager.client_expiry_ms)
        while self.world.now_ms < end_ms and not self.world.is_over:  # noqa: ASYNC110 - it looks now and then
            await asyncio.sleep(_STEP_S)
