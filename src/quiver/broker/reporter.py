"""Tell the primary that this node lives, what it has come to lead, and which clients it has heard of.

One heartbeat each interval, and one at once (gathered for a moment) when this node has come to lead something, so that
clients find the new leader soon. A node registers at its start, since its addresses may have changed, and whenever the
primary says that it does not know it. It never gives up: an unreachable primary is tried again with the next
heartbeat. What was not delivered is told again.

Every node has a reporter, whatever its roles.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from quiver.clock import Clock, Rng
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.manager.node_router import NodeRouter
from quiver.metadata import NodeRole, RegisterBroker
from quiver.model import NodeId, PartitionId, TopicId
from quiver.tasks import timeout
from quiver.wire.messages import BeatInfo, BrokerHeartbeatRequest, LeaderInfo
from quiver.wire.requests import RESULTS_MAX

logger = logging.getLogger(__name__)

JITTER_SHARE = 0.1
"""By how much of the interval heartbeats are spread, so that nodes started together do not beat together."""

ClientKind = Literal["producer", "consumer"]


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself."""

    node: NodeId
    identity: str
    wire_address: str
    http_address: str = ""
    roles: tuple[NodeRole, ...] = ()
    rack: str = ""


class ClientsHeard:
    """The producers and consumers that this node has heard of since the last heartbeat that was delivered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[tuple[ClientKind, int], int] = {}

    def hear(self, kind: ClientKind, id_: int) -> None:
        """Take note of a request of a client; beyond `RESULTS_MAX` clients in one interval of those known alone."""
        if (kind, id_) in self._heard or len(self._heard) < RESULTS_MAX:
            self._heard[kind, id_] = self._clock.wall_ms()

    def take(self) -> tuple[BeatInfo, ...]:
        """Return who was heard of and begin anew."""
        heard, self._heard = self._heard, {}
        return tuple(BeatInfo(kind, id_, seen_ms) for (kind, id_), seen_ms in heard.items())

    def give_back(self, beats: Iterable[BeatInfo]) -> None:
        """Take back what could not be delivered; what was heard since is newer."""
        for beat in beats:
            self._heard.setdefault((beat.kind, beat.id), beat.last_seen_ms)


class Reporter:
    """The one who tells the primary about this node. `run` is its life."""

    def __init__(
        self,
        introduction: Introduction,
        *,
        router: NodeRouter,
        clock: Clock,
        rng: Rng,
        interval_ms: int,
        delay_ms: int,
        leads: Callable[[], Iterable[LeaderInfo]] = tuple,
    ) -> None:
        self.clients = ClientsHeard(clock)
        self._introduction = introduction
        self._router = router
        self._clock = clock
        self._rng = rng
        self._interval_ms = interval_ms
        self._delay_ms = delay_ms
        self._leads = leads
        self._told: dict[tuple[TopicId, PartitionId], int] = {}
        """The epochs in which the primary was told that this node leads."""
        self._hurry = asyncio.Event()
        self._registered = asyncio.Event()
        self._is_introduced = False

    async def run(self) -> None:
        """Report for ever."""
        while True:
            await self._beat()
            try:
                async with timeout(self._interval_ms / 1000 * (1 - self._rng.random() * JITTER_SHARE)):
                    await self._hurry.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(self._delay_ms / 1000)  # leaders change together: tell of all of them at once
            self._hurry.clear()

    def hurry(self) -> None:
        """Report soon: this node has come to lead something."""
        self._hurry.set()

    async def wait_registered(self) -> None:
        """Return once the primary knows this node."""
        await self._registered.wait()

    async def _beat(self) -> None:
        leads = tuple(lead for lead in self._leads() if self._told.get(_key_of(lead), 0) < lead.epoch)[:RESULTS_MAX]
        beats = self.clients.take()
        me = self._introduction
        request = BrokerHeartbeatRequest(node=me.node, identity=me.identity, leads=leads, clients=beats)
        try:
            if not self._is_introduced:
                self._is_introduced = await self._register()  # its addresses may be others than in its last life
            taken = await self._router.ask_primary(request)
            if taken.is_known:
                self._told.update({_key_of(lead): lead.epoch for lead in leads})
                self._registered.set()
                return
            await self._register()
        except QuiverError as error:
            logger.debug("primary not reached", extra=facts(node=me.node, code=error.code, reason=error.message))
        self.clients.give_back(beats)

    async def _register(self) -> bool:
        """Make this node known; tell whether it is."""
        me = self._introduction
        self._told.clear()  # whoever does not know this node does not know what it leads
        command = RegisterBroker(
            now_ms=self._clock.wall_ms(),
            broker_id=me.node,
            identity=me.identity,
            wire_address=me.wire_address,
            http_address=me.http_address,
            rack=me.rack,
            roles=me.roles,
        )
        try:
            await self._router.submit(command)
        except QuiverError as error:
            logger.warning("node not registered", extra=facts(node=me.node, code=error.code, reason=error.message))
            return False
        logger.info("node registered", extra=facts(node=me.node, wire_address=me.wire_address))
        self._hurry.set()
        return True


def _key_of(lead: LeaderInfo) -> tuple[TopicId, PartitionId]:
    return (lead.topic_id, lead.partition_id)
