"""Expiry of clients on the primary: producers and consumers without a sign of life are removed from the metadata.

A sign of life is a registration, or a request of the client that a node reports with its heartbeat. The primary
measures silence by the time that it has *observed* itself, in steps, and not by any wall clock:
- a new primary has observed nothing, so everyone gets a whole period;
- a step counts for at most twice its length, so a clock that jumps and a process that stalls expire nobody;
- no time passes while a node is suspected dead, because its reports are missing; when a dead node is back, everyone
  gets a whole period again.

The decision is a replicated command (`ExpireClients`), which leaves a client alone that registered again, or whose
last-seen time changed, in the meantime. Partitions drop the state of removed clients by themselves.

Only the primary runs it: `run` lasts for one term of leadership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from quiver.clock import Clock
from quiver.config import ManagerSettings
from quiver.errors import OutcomeUnknownError, RequestError, UnavailableError
from quiver.logs import facts
from quiver.metadata import (
    BrokerState,
    ConsumerRow,
    EntityKind,
    ExpireClients,
    MetadataStore,
    ProducerRow,
    SilentClient,
    View,
)
from quiver.model import NodeId

logger = logging.getLogger(__name__)

CHECKS_PER_PERIOD = 8
"""Checks during the shorter expiry period: a client expires at most an eighth of it late."""
CHECK_MS_MAX = 60_000
CLIENTS_PER_COMMAND = 1_000
"""Clients that one command removes: applying it must not hold the event loop."""
CLIENTS_PER_STEP = 2_000
"""Clients checked before others get a turn of the event loop."""
EXPIRY_LEVEL = 2
"""The feature level at which every node knows `ExpireClients`."""

ClientKey = tuple[EntityKind, int]
ClientRow = ProducerRow | ConsumerRow


class ClientExpiry:
    """Removes the clients that have been silent for their expiry period."""

    def __init__(self, store: MetadataStore, *, clock: Clock, settings: ManagerSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._observed_ms = 0
        """The time that this primary has observed: its steps, each limited."""
        self._grace_ms = 0
        """Observed time before which everyone counts as heard of."""
        self._heard_ms: dict[ClientKey, int] = {}
        """Observed time of each client's last sign of life, or of the check that first found it."""
        self._fresh: set[ClientKey] = set()
        """Clients heard of since the last step: their silence begins with the next one, never earlier."""
        self._dead: set[NodeId] = set()

    @property
    def interval_ms(self) -> int:
        """Return the time between two checks."""
        periods = [ms for ms in (self._settings.client_expiry_ms, self._settings.named_client_expiry_ms) if ms]
        return max(1, min([CHECK_MS_MAX, *(ms // CHECKS_PER_PERIOD for ms in periods)]))

    def note_alive(self, kind: EntityKind, id_: int) -> None:
        """Record a sign of life of a registered client."""
        self._fresh.add((kind, id_))

    async def run(self) -> None:
        """Check for silent clients until cancelled."""
        checked_ms = self._clock.monotonic_ms()
        while True:
            await asyncio.sleep(self.interval_ms / 1000)
            now_ms = self._clock.monotonic_ms()
            self._observe(now_ms - checked_ms)
            checked_ms = now_ms
            await self._check()

    def _observe(self, passed_ms: int) -> None:
        """Advance the observed time, unless the reports of a node are missing."""
        brokers = self._store.view().brokers.values()
        dead = {broker.broker_id for broker in brokers if broker.state is BrokerState.DEAD}
        if self._dead - dead:
            self._grace_ms = self._observed_ms
        self._dead = dead
        if all(broker.state is not BrokerState.SUSPECT for broker in brokers):
            self._observed_ms += max(0, min(passed_ms, 2 * self.interval_ms))
        self._heard_ms.update(dict.fromkeys(self._fresh, self._observed_ms))
        self._fresh.clear()

    async def _check(self) -> None:
        """Submit the removal of all clients that are silent for too long."""
        view = self._store.view()
        if view.feature_level < EXPIRY_LEVEL:
            return
        await self._drop_removed(view)
        left = _clients(view)
        silent: list[SilentClient] = []
        while step := list(islice(left, CLIENTS_PER_STEP)):
            silent += [
                _describe(view, key, client) for key, client in step if self._is_silent(key, self._period_ms(client))
            ]
            await asyncio.sleep(0)
        for first in range(0, len(silent), CLIENTS_PER_COMMAND):
            if not await self._expire(tuple(silent[first : first + CLIENTS_PER_COMMAND])):
                return

    async def _drop_removed(self, view: View) -> None:
        """Drop what is known about clients that are no longer registered."""
        known = iter(tuple(self._heard_ms))
        while step := list(islice(known, CLIENTS_PER_STEP)):
            for key in step:
                if _find(view, key) is None:
                    self._heard_ms.pop(key, None)
            await asyncio.sleep(0)

    def _period_ms(self, client: ClientRow) -> int:
        return self._settings.named_client_expiry_ms if client.is_named else self._settings.client_expiry_ms

    def _is_silent(self, key: ClientKey, period_ms: int) -> bool:
        if key in self._fresh:
            return False
        heard_ms = self._heard_ms.setdefault(key, self._observed_ms)
        return bool(period_ms) and self._observed_ms - max(heard_ms, self._grace_ms) >= period_ms

    async def _expire(self, silent: tuple[SilentClient, ...]) -> bool:
        """Submit one command; return whether it is done. What is left is found again by the next check."""
        # Reports may have arrived while other commands were submitted.
        still = tuple(item for item in silent if self._is_silent((item.kind, item.id), 1))
        try:
            await self._store.submit(ExpireClients(now_ms=self._clock.wall_ms(), clients=still))
        except (RequestError, UnavailableError, OutcomeUnknownError) as error:
            logger.debug("clients not expired yet", extra=facts(clients=len(still), code=error.code))
            return False
        logger.info("clients expired", extra=facts(clients=len(still)))
        return True


def _clients(view: View) -> Iterator[tuple[ClientKey, ClientRow]]:
    producers: Iterator[tuple[ClientKey, ClientRow]] = (
        ((EntityKind.PRODUCER, id_), producer) for id_, producer in view.producers.items()
    )
    consumers: Iterator[tuple[ClientKey, ClientRow]] = (
        ((EntityKind.CONSUMER, id_), consumer) for id_, consumer in view.consumers.items()
    )
    return chain(producers, consumers)


def _find(view: View, key: ClientKey) -> ClientRow | None:
    table: Mapping[int, ClientRow] = view.producers if key[0] is EntityKind.PRODUCER else view.consumers  # type: ignore[assignment] # ids are ints
    return table.get(key[1])


def _describe(view: View, key: ClientKey, client: ClientRow) -> SilentClient:
    epoch = client.epoch if isinstance(client, ProducerRow) else 0
    return SilentClient(*key, view.last_seen_ms(*key) or 0, epoch)
