"""Failure detection on the primary: heartbeats in, broker states and last-seen times out, as commands.

Silence is measured in memory by the monotonic clock: a new primary knows no times, so every broker gets a full grace
period. A silent broker becomes suspect, then dead; a suspect broker that sends a heartbeat is alive again, and not
before: under a new primary it stays suspect until it is heard. The heartbeat of a dead broker is answered with "not
known", so that it registers again. Last-seen times are recorded every few seconds, only the changed ones. The leaders
in a heartbeat are in the metadata before it is answered, because the sender reports each leader only once.

Only the primary runs it: `run` lasts for one term of leadership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice

from quiver.clock import Clock
from quiver.config import ManagerSettings
from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.logs import facts
from quiver.manager.client_expiry import ClientExpiry
from quiver.metadata import (
    Beat,
    BrokerRow,
    BrokerState,
    ChangeBrokerState,
    Command,
    CommandDone,
    EntityKind,
    LeaderReport,
    MetadataStore,
    PartitionRow,
    RecordHeartbeats,
    ReportLeaders,
    View,
)
from quiver.metadata.commands import command_name
from quiver.model import NodeId
from quiver.wire.messages import BrokerHeartbeatRequest, LeaderInfo

logger = logging.getLogger(__name__)

BEATS_MAX = 5_000
"""Maximum number of last-seen times in one command."""
CHECKS_PER_SUSPICION = 10
"""Number of checks during `suspect_after_ms`."""

_GONE = (BrokerState.DEAD, BrokerState.REMOVED)


class Liveness:
    """The primary's failure detector."""

    def __init__(self, store: MetadataStore, *, clock: Clock, settings: ManagerSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._heard_ms: dict[NodeId, int] = {}
        """Monotonic time of each living broker's last heartbeat, or of its first check."""
        self._has_beaten: set[NodeId] = set()
        """The brokers that have sent a heartbeat to this primary."""
        self._beats: dict[tuple[EntityKind, int], int] = {}
        """Last-seen wall times not recorded yet; bounded, since only registered senders are in it."""
        self.expiry = ClientExpiry(store, clock=clock, settings=settings)
        self._full: set[NodeId] = set()
        """The brokers whose last heartbeat said that their disk is nearly full."""
        self._emptied_ms: dict[NodeId, int | None] = {}
        """By broker, when the drain began after which it holds nothing; None: its program does not say."""
        self.on_emptied: Callable[[], object] = lambda: None
        """Called when a broker has changed what it says about that."""

    async def run(self) -> None:
        """Check for silent brokers and record last-seen times until cancelled."""
        interval_ms = max(1, self._settings.suspect_after_ms // CHECKS_PER_SUSPICION)
        next_record_ms = self._clock.monotonic_ms() + self._settings.record_interval_ms
        while True:
            await self._check()
            checked_ms = self._clock.monotonic_ms()
            if checked_ms >= next_record_ms:
                next_record_ms = checked_ms + self._settings.record_interval_ms
                await self._record()
            await asyncio.sleep(interval_ms / 1000)
            self._ignore_stall(self._clock.monotonic_ms() - checked_ms - interval_ms)

    # -- heartbeats ---------------------------------------------------------------------------

    async def handle_heartbeat(self, heartbeat: BrokerHeartbeatRequest) -> bool:
        """Handle a heartbeat; return whether its sender is registered with this identity and not dead.

        Raises:
            UnavailableError: not done; the reported leaders are not in the metadata.
            OutcomeUnknownError: the reported leaders may be in the metadata.
        """
        view = self._store.view()
        broker = view.brokers.get(heartbeat.node)
        if broker is None or broker.identity != heartbeat.identity or broker.state in _GONE:
            return False
        self._heard_ms[broker.broker_id] = self._clock.monotonic_ms()
        self._has_beaten.add(broker.broker_id)
        (self._full.add if heartbeat.is_full else self._full.discard)(broker.broker_id)
        if self._emptied_ms.get(broker.broker_id, 0) != heartbeat.emptied_ms:
            self._emptied_ms[broker.broker_id] = heartbeat.emptied_ms
            self.on_emptied()
        self._note(EntityKind.BROKER, broker.broker_id, self._clock.wall_ms())
        for client in heartbeat.clients:
            kind = EntityKind(client.kind)
            if client.id in (view.producers if kind is EntityKind.PRODUCER else view.consumers):
                self.expiry.note_alive(kind, client.id)
                if client.last_seen_ms - (view.last_seen_ms(kind, client.id) or 0) >= self._settings.client_report_ms:
                    self._note(kind, client.id, client.last_seen_ms)
        await self._report(view, heartbeat)
        return True

    def full_nodes(self) -> tuple[NodeId, ...]:
        """Return the living brokers whose disk is nearly full, as far as this primary knows."""
        brokers = self._store.view().brokers
        return tuple(sorted(node for node in self._full if node in brokers and brokers[node].state not in _GONE))

    def is_emptied(self, broker: BrokerRow) -> bool:
        """Return whether a draining broker has said that it holds nothing since this drain began.

        Programs that do not say it are believed to hold what the metadata says. Unheard, a broker may hold anything.
        """
        return self._emptied_ms.get(broker.broker_id, 0) in (None, broker.changed_ms)

    def _note(self, kind: EntityKind, id_: int, seen_ms: int) -> None:
        self._beats[kind, id_] = max(seen_ms, self._beats.get((kind, id_), 0))

    async def _report(self, view: View, heartbeat: BrokerHeartbeatRequest) -> None:
        news = tuple(
            LeaderReport(lead.topic_id, lead.partition_id, heartbeat.node, lead.epoch)
            for lead in heartbeat.leads
            if _is_news(view.partitions.get((lead.topic_id, lead.partition_id)), lead)
        )
        if news:
            await self._store.submit(ReportLeaders(now_ms=self._clock.wall_ms(), reports=news))

    # -- broker states --------------------------------------------------------------------

    async def _check(self) -> None:
        """Submit the state changes that follow from the brokers' silence."""
        now_ms = self._clock.monotonic_ms()
        for _, broker in sorted(self._store.view().brokers.items()):
            state = self._state_by_silence(broker, now_ms)
            if state is broker.state:
                continue
            command = ChangeBrokerState(now_ms=self._clock.wall_ms(), broker_id=broker.broker_id, state=state)
            if await self._submit(command):
                if state is BrokerState.DEAD:
                    del self._heard_ms[broker.broker_id]  # after it registers again, it gets a full grace period
                phrase = "broker alive again" if state is BrokerState.ALIVE else "broker silent"
                logger.info(phrase, extra=facts(broker=broker.broker_id, state=state.value))

    def _ignore_stall(self, stalled_ms: int) -> None:
        """Do not count time in which this process itself was stalled as silence of the brokers."""
        if stalled_ms >= self._settings.heartbeat_interval_ms:
            now_ms = self._clock.monotonic_ms()
            self._heard_ms = {node: min(now_ms, heard + stalled_ms) for node, heard in self._heard_ms.items()}

    def _state_by_silence(self, broker: BrokerRow, now_ms: int) -> BrokerState:
        """Return the state of a broker by the length of its silence."""
        if broker.state in _GONE:
            return broker.state
        silent_ms = now_ms - self._heard_ms.setdefault(broker.broker_id, now_ms)
        if silent_ms >= self._settings.dead_after_ms:
            return BrokerState.DEAD
        if silent_ms >= self._settings.suspect_after_ms:
            return BrokerState.SUSPECT
        has_returned = broker.state is BrokerState.SUSPECT and broker.broker_id in self._has_beaten
        return BrokerState.ALIVE if has_returned else broker.state

    async def _record(self) -> None:
        """Record last-seen times; those that could not be recorded stay for the next attempt."""
        while self._beats:
            taken = dict(islice(self._beats.items(), BEATS_MAX))
            beats = tuple(Beat(kind, id_, seen_ms) for (kind, id_), seen_ms in taken.items())
            if not await self._submit(RecordHeartbeats(now_ms=self._clock.wall_ms(), beats=beats)):
                return
            for key, seen_ms in taken.items():
                if self._beats.get(key) == seen_ms:
                    del self._beats[key]

    async def _submit(self, command: Command[CommandDone]) -> bool:
        """Submit a command; return whether it is done. A failed one is recomputed at the next check."""
        try:
            await self._store.submit(command)
        except (RequestError, UnavailableError, OutcomeUnknownError) as error:
            logger.debug("command not done", extra=facts(command=command_name(command), code=error.code))
            return False
        return True


def _is_news(partition: PartitionRow | None, lead: LeaderInfo) -> bool:
    return partition is not None and lead.epoch > partition.epoch
