"""Who a producer is to the cluster: its id and the epoch that it sends with.

One identity serves all partitions of a producer. It changes when the producer must put a fence between what it sent
and what it will send (`renew`), and it ends when somebody else registers under the same name: then it is *fenced*.
"""

from __future__ import annotations

import asyncio

from quiver.model import PartitionId, ProducerId
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.wire.messages import RegisterProducerRequest, Selection


class Identity:
    """A producer's id and present epoch."""

    def __init__(self, router: Router, *, topic: str, partitions: tuple[PartitionId, ...], name: str) -> None:
        self.producer_id = ProducerId(-1)
        self.epoch = -1
        self.name = name
        self._router = router
        self._topics = (Selection(topic=topic, partitions=partitions),)
        self._renewing = asyncio.Lock()

    @property
    def is_new(self) -> bool:
        """Whether the cluster had never heard of this producer before: no partition knows it."""
        return self.epoch == 0

    async def register(self, *, deadline: Deadline) -> None:
        """Get an id, or the old one of this name with a new epoch."""
        known_id = self.producer_id if self.producer_id >= 0 else None
        request = RegisterProducerRequest(topics=self._topics, name=self.name, producer_id=known_id)
        registered, _ = await self._router.ask(request, deadline=deadline)
        self._router.cache.see(registered.index)
        self.producer_id, self.epoch = registered.producer_id, registered.epoch

    async def renew(self, *, after_epoch: int, deadline: Deadline) -> None:
        """Get an epoch later than `after_epoch`; one renewal serves all who ask for it at the same time."""
        async with self._renewing:
            if self.epoch <= after_epoch:
                await self.register(deadline=deadline)
