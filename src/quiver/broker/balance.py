"""Let those replicas lead that should: the first of each partition's list, when it is alive and keeps up.

After a failover leadership is where it fell. Managers place the preferred leaders evenly, so handing leadership back
spreads the work again. It is done a quiet while after this node came to lead, a few partitions at a time, and never
while the partition moves. When the node stops, it hands on everything that it leads, so that clients wait for a
transfer instead of an election.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from quiver.broker.moves import find_move
from quiver.broker.table import Held, Key, PartitionTable
from quiver.clock import Clock
from quiver.config import BrokerSettings
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.metadata import BrokerState, MetadataStore
from quiver.model import NodeId
from quiver.partition import Replica

logger = logging.getLogger(__name__)

LOOK_INTERVAL_MS = 1_000
"""How often leaders are compared with those preferred."""
HAND_OVER_INTERVAL_MS = 20
"""How often a stopping node looks whether it still leads anything."""


class LeaderBalancer:
    """The one who hands leadership on. `run` is its life."""

    def __init__(
        self, node: NodeId, *, table: PartitionTable, store: MetadataStore, clock: Clock, settings: BrokerSettings
    ) -> None:
        self._node = node
        self._table = table
        self._store = store
        self._clock = clock
        self._settings = settings
        self._since_ms: dict[Key, int] = {}

    def note_leader(self, key: Key) -> None:
        """Take note that this node has come to lead a partition."""
        self._since_ms[key] = self._clock.monotonic_ms()

    def note_follower(self, key: Key) -> None:
        """Take note that this node no longer leads a partition."""
        self._since_ms.pop(key, None)

    async def run(self) -> None:
        """Hand leadership to preferred replicas, for ever."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_MS / 1000)
            self._look()

    async def hand_over_all(self) -> None:
        """Hand everything that this node leads to replicas in sync, for as long as a stopping node may take."""
        deadline_ms = self._clock.monotonic_ms() + self._settings.stop_timeout_ms
        while self._clock.monotonic_ms() < deadline_ms:
            led = [(replica, self._others(replica)) for _, replica in self._table.led()]
            led = [(replica, others) for replica, others in led if others]
            if not led:
                return
            for replica, others in led:
                _transfer(replica, others[0])
            await asyncio.sleep(HAND_OVER_INTERVAL_MS / 1000)

    def _look(self) -> None:
        room = self._settings.leader_transfers_max
        for held, replica in self._misplaced():
            if not room:
                return
            preferred = self._preferred(held)
            if preferred in self._table.in_sync(replica) and _transfer(replica, preferred):
                room -= 1
                logger.info("leadership handed back", extra=facts(group=held.group, to=preferred))

    def _misplaced(self) -> Iterable[tuple[Held, Replica]]:
        """Return what this node has led for long enough although another should."""
        view, now_ms = self._store.view(), self._clock.monotonic_ms()
        for held, replica in self._table.led():
            since_ms = self._since_ms.setdefault(held.key, now_ms)
            if now_ms - since_ms < self._settings.leader_balance_delay_ms:
                continue
            preferred = self._preferred(held)
            broker = None if preferred is None else view.brokers.get(preferred)
            is_fit = broker is not None and broker.state is BrokerState.ALIVE and preferred != self._node
            if is_fit and find_move(view, held.key) is None:
                yield held, replica

    def _others(self, replica: Replica) -> list[NodeId]:
        return [node for node in self._table.in_sync(replica) if node != self._node]

    def _preferred(self, held: Held) -> NodeId | None:
        row = self._store.view().partitions.get(held.key)
        return None if row is None else row.replicas[0]


def _transfer(replica: Replica, to: NodeId | None) -> bool:
    """Begin a transfer; tell whether it was begun. One that is not possible now is tried at the next look."""
    try:
        if to is not None:
            replica.member.transfer_leadership(to)
    except QuiverError:
        return False
    return to is not None
