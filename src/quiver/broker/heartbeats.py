"""Sends heartbeats to the primary: this node is alive, which partitions it leads, which clients it has seen.

A heartbeat also says whether this node's disk is nearly full; the answer names all such nodes. And it says whether a
node that is draining holds nothing any more, which the metadata alone cannot know.

One heartbeat per interval, plus one within `broker.report_delay_ms` after this node becomes a leader, so that clients
find the new leader soon. A node registers at its start, since its addresses may have changed, and whenever the
primary does not know it. It retries forever: an unreachable primary is tried again with the next heartbeat, which also
repeats everything that was not delivered. Only a program that is too old for the cluster's feature level ends.

Every node sends heartbeats, whatever its roles.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Literal

import msgspec

from quiver.clock import Clock, Rng
from quiver.errors import QuiverError, StorageError
from quiver.features import LEVEL_MAX
from quiver.logs import facts
from quiver.manager.node_router import NodeRouter
from quiver.metadata import NodeRole, RegisterBroker
from quiver.model import NodeId, PartitionId, TopicId
from quiver.tasks import timeout
from quiver.wire.messages import BeatInfo, BrokerHeartbeatRequest, LeaderInfo
from quiver.wire.requests import RESULTS_MAX

logger = logging.getLogger(__name__)

JITTER_SHARE = 0.1
"""Share of the interval by which heartbeats are spread, so that nodes started together do not send together."""

REASONS_MAX = 32
"""Most different reasons that are logged while the primary gets no heartbeat."""

ClientKind = Literal["producer", "consumer"]


class BrokerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """The data under which a node registers with the primary."""

    node: NodeId
    identity: str
    wire_address: str
    http_address: str = ""
    roles: tuple[NodeRole, ...] = ()
    rack: str = ""
    level_max: int = LEVEL_MAX
    program: str = ""


class ClientActivity:
    """The producers and consumers that this node has seen and not yet reported to the primary.

    Each is reported at most once per report interval, however many requests it sends. Bounded by the number of
    registered clients, since callers record registered clients only; none is ever skipped, because the primary removes
    those that it does not hear of.
    """

    def __init__(self, clock: Clock, *, report_ms: int) -> None:
        self._clock = clock
        self._report_ms = report_ms
        self._seen: dict[tuple[ClientKind, int], int] = {}
        self._reported: set[tuple[ClientKind, int]] = set()
        """Clients reported in this interval."""
        self._interval_end_ms = 0

    def record(self, kind: ClientKind, id_: int) -> None:
        """Record a request of a registered client."""
        if (kind, id_) not in self._reported:
            self._seen[kind, id_] = self._clock.wall_ms()

    def drain(self) -> tuple[BeatInfo, ...]:
        """Return clients that are not reported yet, at most `RESULTS_MAX`; the others follow with the next call."""
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._interval_end_ms:
            self._reported.clear()
            self._interval_end_ms = now_ms + self._report_ms
        taken = list(islice(self._seen, RESULTS_MAX))
        self._reported.update(taken)
        return tuple(BeatInfo(kind, id_, self._seen.pop((kind, id_))) for kind, id_ in taken)

    def restore(self, beats: Iterable[BeatInfo]) -> None:
        """Put back clients whose heartbeat was not delivered."""
        for beat in beats:
            self._reported.discard((beat.kind, beat.id))
            self._seen.setdefault((beat.kind, beat.id), beat.last_seen_ms)


class HeartbeatSender:
    """Registers this node with the primary and sends its heartbeats."""

    def __init__(
        self,
        registration: BrokerRegistration,
        *,
        router: NodeRouter,
        clock: Clock,
        rng: Rng,
        interval_ms: int,
        delay_ms: int,
        client_report_ms: int = 0,
        leads: Callable[[], Iterable[LeaderInfo]] = tuple,
        is_full: Callable[[], bool] = lambda: False,
        emptied_ms: Callable[[], int] = lambda: 0,
        on_failure: Callable[[StorageError], None],
    ) -> None:
        self.clients = ClientActivity(clock, report_ms=client_report_ms)
        self.full_nodes: frozenset[NodeId] = frozenset()
        """The nodes whose disk is nearly full, by the primary's last answer."""
        self._introduction = registration
        self._router = router
        self._clock = clock
        self._rng = rng
        self._interval_ms = interval_ms
        self._delay_ms = delay_ms
        self._leads = leads
        self._is_full = is_full
        self._emptied_ms = emptied_ms
        self._on_failure = on_failure
        self._reported: dict[tuple[TopicId, PartitionId], int] = {}
        """Per partition, the newest epoch of this node's leadership that the primary has acknowledged."""
        self._send_now = asyncio.Event()
        self._registered = asyncio.Event()
        self._is_registered = False
        self.problem = ""
        """Why the primary did not get the last heartbeat; empty if it did."""
        self._logged: set[tuple[str, str]] = set()
        """What was logged since the primary got a heartbeat."""

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await self._send()
            try:
                async with timeout(self._interval_ms / 1000 * (1 - self._rng.random() * JITTER_SHARE)):
                    await self._send_now.wait()
            except TimeoutError:
                continue
            # After a failover many partitions change leaders together: report them in one heartbeat.
            await asyncio.sleep(self._delay_ms / 1000)
            self._send_now.clear()

    def send_soon(self) -> None:
        """Send the next heartbeat early: this node became the leader of a partition."""
        self._send_now.set()

    async def wait_registered(self) -> None:
        """Wait until the primary has acknowledged a heartbeat of this node."""
        await self._registered.wait()

    async def _send(self) -> None:
        leads = tuple(lead for lead in self._leads() if self._reported.get(_key_of(lead), 0) < lead.epoch)[:RESULTS_MAX]
        beats = self.clients.drain()
        me = self._introduction
        request = BrokerHeartbeatRequest(
            node=me.node,
            identity=me.identity,
            leads=leads,
            clients=beats,
            is_full=self._is_full(),
            emptied_ms=self._emptied_ms(),
            level_max=me.level_max,
            program=me.program,
        )
        try:
            if not self._is_registered:
                self._is_registered = await self._register()  # its addresses may have changed since its last run
            taken = await self._router.ask_primary(request)
            self.full_nodes = frozenset(taken.full_nodes)
            self.problem = ""
            self._logged.clear()
            if taken.is_known:
                self._reported.update({_key_of(lead): lead.epoch for lead in leads})
                self._registered.set()
                return
            await self._register()
        except QuiverError as error:
            self._check_program(error)
            self.problem = error.message
            if error.code == "not_reached":
                # A primary that is known and not reached may stay so, as with a certificate that does not name it.
                self._log_once("heartbeat not delivered", error)
        self.clients.restore(beats)

    async def _register(self) -> bool:
        """Register this node with the primary; return whether that succeeded."""
        me = self._introduction
        self._reported.clear()  # a primary that does not know this node does not know what it leads either
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
            self._check_program(error)
            self._log_once("node not registered", error)
            return False
        logger.info("node registered", extra=facts(node=me.node, wire_address=me.wire_address))
        self._send_now.set()
        return True

    def _log_once(self, event: str, error: QuiverError) -> None:
        """Log a reason at its first occurrence: a node that is cut off tries one address after the other, for hours."""
        is_new = (event, error.message) not in self._logged and len(self._logged) < REASONS_MAX
        self._logged |= {(event, error.message)} if is_new else set()
        about = facts(node=self._introduction.node, code=error.code, reason=error.message)
        logger.log(logging.WARNING if is_new else logging.DEBUG, event, extra=about)

    def _check_program(self, error: QuiverError) -> None:
        """End this node if the cluster has moved to a feature level that its program does not know."""
        if error.code == "program_too_old":
            self._on_failure(StorageError(error.message, code=error.code))


def _key_of(lead: LeaderInfo) -> tuple[TopicId, PartitionId]:
    return (lead.topic_id, lead.partition_id)
