"""Producers without a name, which come and go: nothing of them stays, and none is removed while it shows life."""

from __future__ import annotations

import asyncio

from quiver.client.producer import AsyncProducer
from quiver.errors import QuiverError
from quiver.metadata import BrokerState, View
from quiver.model import ProducerId
from quiver.testing.clusters.clients import ClientWorkload
from quiver.testing.clusters.silence import SignsOfLife
from quiver.testing.simulator.report import require

_P_SILENCE = 0.15
_P_FORGOTTEN = 0.3
_STEP_S = 0.2
_UNREPORTED_MS_MAX = 3_000
"""How long the signs of life may go back that a node takes with it when it dies: until it is suspected, and two steps
in which the primary measures, by a clock that runs a tenth too fast."""
_CALM_SHARE = 0.1
"""Share of the period by which clocks may be wrong in a cluster without faults."""


class VisitorWorkload(ClientWorkload):
    """Sends without a name; falls silent for long, vanishes, or is forgotten by an operator while it works."""

    producer: AsyncProducer
    _id = ProducerId(-1)
    _forgotten = ProducerId(-1)
    """The producer that an operator was last asked to forget, which may happen late."""
    _sends: SignsOfLife

    async def begin(self) -> None:
        """Register as someone new."""
        timeout_s, began_ms = self.world.knobs.delivery_timeout_ms / 1000, self.world.now_ms
        self.producer = await self.cluster.producer(self.topic.name, delivery_timeout=timeout_s)
        self._id, self._sends = self.producer.producer_id, SignsOfLife(began_ms)

    async def step(self) -> None:
        """Send something, and perhaps fall silent afterwards."""
        partition = self.rng.randrange(self.producer.core.accumulator.partition_count)
        value = f"{self.name}:{self.progress}:{self.world.now_ms}"
        call, began_ms = self.invoke("send", self.key(partition), [value]), self.world.now_ms
        try:
            delivered = await self.producer.send(value, partition=partition)
        except QuiverError as error:
            self.fail(call, error)
        else:
            self.succeed(call, int(delivered.offset))
            if self.producer.producer_id == self._id:
                self._sends.note(began_ms, self.world.now_ms)
        self._note_identity(began_ms)
        if self.rng.random() < _P_SILENCE:
            await self._fall_silent()

    async def restart(self) -> None:
        """Vanish, or be forgotten and work on, and come back as someone new."""
        if self.rng.random() < _P_FORGOTTEN:
            self.world.counts["forget"] += 1
            self._forgotten = self._id
            try:
                await self.cluster.forget("producer", self._id)
            except QuiverError as error:
                self.world.counts[f"forget {error.code}"] += 1
            await self.step()  # the SDK registers again
        await self.producer.abort()
        await self.insist(self.begin)

    def watch(self, view: View, before: View) -> None:
        """E1: a producer is only removed after a whole period without a send, as far as that can be known.

        A removal that was decided may come into force late, so the longest silence counts. A node that is dead for long
        may have seen the client all the time, and could tell nobody.
        """
        is_removed = self._id in before.producers and self._id not in view.producers
        if not is_removed or self._id == self._forgotten or _has_dead(view) or _has_dead(before):
            return
        period_ms = self._period_ms
        unsure_ms = period_ms * _CALM_SHARE if self.world.knobs.is_calm else _UNREPORTED_MS_MAX
        silent_ms = self._sends.longest_silence_ms(self.world.now_ms)
        facts = {"name": self.name, "id": self._id, "silent_ms": silent_ms, "period_ms": period_ms}
        require(silent_ms >= period_ms - unsure_ms, "E1", "a living client expired", **facts)

    @property
    def _period_ms(self) -> int:
        return self.world.knobs.settings.manager.client_expiry_ms

    def _note_identity(self, began_ms: int) -> None:
        """Follow the SDK, which registers again once its producer was removed."""
        new_id = self.producer.producer_id
        if new_id != self._id:
            self.world.counts["expired"] += self._id != self._forgotten
            self._id, self._sends = new_id, SignsOfLife(began_ms)

    async def _fall_silent(self) -> None:
        end_ms = self.world.now_ms + self.rng.randrange(2 * self._period_ms)
        while self.world.now_ms < end_ms and not self.world.is_over:  # noqa: ASYNC110 - it looks now and then
            await asyncio.sleep(_STEP_S)


def _has_dead(view: View) -> bool:
    return any(broker.state is BrokerState.DEAD for broker in view.brokers.values())
