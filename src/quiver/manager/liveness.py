"""Who lives, as the primary hears of it: heartbeats in, states of brokers and times of clients out, as commands.

Silence is measured by the monotonic clock, in memory: a new primary knows nothing, so it gives everybody a full grace
period. A broker that is silent becomes suspect, then dead; one that is suspect and heard again is alive. A dead one is
told that it is not known, so that it registers again. When somebody was last heard of is recorded every few seconds,
and only what changed. The leaders that a heartbeat tells of are in the metadata before it is answered: its sender
tells of each only once.

Only the primary's liveness runs; `run` is its life, for one term of leadership.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice

from quiver.clock import Clock
from quiver.config import ManagerSettings
from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.logs import facts
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
"""How many times of clients and brokers one command records."""
CHECKS_PER_SUSPICION = 10
"""How often silence is measured in the time that makes a broker suspect."""

_GONE = (BrokerState.DEAD, BrokerState.REMOVED)


class Liveness:
    """What the primary knows of who lives."""

    def __init__(self, store: MetadataStore, *, clock: Clock, settings: ManagerSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._heard_ms: dict[NodeId, int] = {}
        """When each living broker was last heard of, by the monotonic clock, or first looked at."""
        self._beats: dict[tuple[EntityKind, int], int] = {}
        """Wall times that are not recorded yet; only of those who are registered, hence as many as they at most."""

    async def run(self) -> None:
        """Watch for silence and record who was heard of, for ever."""
        interval_ms = max(1, self._settings.suspect_after_ms // CHECKS_PER_SUSPICION)
        next_record_ms = self._clock.monotonic_ms() + self._settings.record_interval_ms
        while True:
            await self._check()
            checked_ms = self._clock.monotonic_ms()
            if checked_ms >= next_record_ms:
                next_record_ms = checked_ms + self._settings.record_interval_ms
                await self._record()
            await asyncio.sleep(interval_ms / 1000)
            self._forgive(self._clock.monotonic_ms() - checked_ms - interval_ms)

    # -- what is heard ---------------------------------------------------------------------------

    async def handle_heartbeat(self, heartbeat: BrokerHeartbeatRequest) -> bool:
        """Take a heartbeat; return whether its sender is registered as what it says it is, and not counted dead.

        Raises:
            UnavailableError: not done; the leaders that it tells of are not in the metadata.
            OutcomeUnknownError: they are there perhaps.
        """
        view = self._store.view()
        broker = view.brokers.get(heartbeat.node)
        if broker is None or broker.identity != heartbeat.identity or broker.state in _GONE:
            return False
        self._heard_ms[broker.broker_id] = self._clock.monotonic_ms()
        self._note(EntityKind.BROKER, broker.broker_id, self._clock.wall_ms())
        for client in heartbeat.clients:
            kind = EntityKind(client.kind)
            if client.id in (view.producers if kind is EntityKind.PRODUCER else view.consumers):
                self._note(kind, client.id, client.last_seen_ms)
        await self._report(view, heartbeat)
        return True

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

    # -- what follows from it --------------------------------------------------------------------

    async def _check(self) -> None:
        """Say of each broker how it is, if that has changed."""
        now_ms = self._clock.monotonic_ms()
        for _, broker in sorted(self._store.view().brokers.items()):
            state = self._judge(broker, now_ms)
            if state is broker.state:
                continue
            command = ChangeBrokerState(now_ms=self._clock.wall_ms(), broker_id=broker.broker_id, state=state)
            if await self._submit(command):
                if state is BrokerState.DEAD:
                    del self._heard_ms[broker.broker_id]  # when it has registered again, its time begins anew
                phrase = "broker heard again" if state is BrokerState.ALIVE else "broker silent"
                logger.info(phrase, extra=facts(broker=broker.broker_id, state=state.value))

    def _forgive(self, stalled_ms: int) -> None:
        """Count the time in which this process itself stood still as nobody's silence."""
        if stalled_ms >= self._settings.heartbeat_interval_ms:
            now_ms = self._clock.monotonic_ms()
            self._heard_ms = {node: min(now_ms, heard + stalled_ms) for node, heard in self._heard_ms.items()}

    def _judge(self, broker: BrokerRow, now_ms: int) -> BrokerState:
        """Return the state that a broker's silence brings it to."""
        if broker.state in _GONE:
            return broker.state
        silent_ms = now_ms - self._heard_ms.setdefault(broker.broker_id, now_ms)
        if silent_ms >= self._settings.dead_after_ms:
            return BrokerState.DEAD
        if silent_ms >= self._settings.suspect_after_ms:
            return BrokerState.SUSPECT
        return BrokerState.ALIVE if broker.state is BrokerState.SUSPECT else broker.state

    async def _record(self) -> None:
        """Bring times into the metadata; those that did not get there wait for the next time."""
        while self._beats:
            taken = dict(islice(self._beats.items(), BEATS_MAX))
            beats = tuple(Beat(kind, id_, seen_ms) for (kind, id_), seen_ms in taken.items())
            if not await self._submit(RecordHeartbeats(now_ms=self._clock.wall_ms(), beats=beats)):
                return
            for key, seen_ms in taken.items():
                if self._beats.get(key) == seen_ms:
                    del self._beats[key]

    async def _submit(self, command: Command[CommandDone]) -> bool:
        """Submit a command that will be made again from what is true then; tell whether it is done."""
        try:
            await self._store.submit(command)
        except (RequestError, UnavailableError, OutcomeUnknownError) as error:
            logger.debug("command not done", extra=facts(command=command_name(command), code=error.code))
            return False
        return True


def _is_news(partition: PartitionRow | None, lead: LeaderInfo) -> bool:
    return partition is not None and lead.epoch > partition.epoch
