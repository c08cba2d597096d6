"""Transfers leadership to preferred replicas: the first of each partition's replicas, if it is alive and in sync.

After a failover, leadership is distributed by chance. Managers place preferred leaders evenly, so transferring
leadership back balances the load again. That happens some time after this node became the leader, for a few partitions
at a time, and never while the partition moves. A node that stops transfers everything that it leads, so that clients
wait for a transfer instead of an election.

A node whose disk is full transfers everything that it leads to replicas in sync that have room: within a second, and
again if it is elected. Producers then wait for a transfer instead of for an operator. Without such a replica it keeps
leading, so that consumers are served, and rejects records. No leadership is balanced to a full node. A primary makes
way in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from quiver.broker.membership import find_move
from quiver.broker.replica_table import HostedReplica, PartitionKey, ReplicaTable
from quiver.clock import Clock
from quiver.config import BrokerSettings
from quiver.errors import QuiverError
from quiver.logs import facts
from quiver.metadata import BrokerState, MetadataStore
from quiver.model import NodeId
from quiver.partition import Replica
from quiver.replication import Successor

logger = logging.getLogger(__name__)

BALANCE_INTERVAL_MS = 1_000
"""Interval between two comparisons of the leaders with the preferred ones."""
TRANSFER_INTERVAL_MS = 20
"""Interval at which a stopping node checks whether it still leads a partition."""


class LeaderBalancer:
    """Balances the leadership of the partitions that this node leads."""

    def __init__(
        self,
        node: NodeId,
        *,
        table: ReplicaTable,
        store: MetadataStore,
        clock: Clock,
        settings: BrokerSettings,
        is_full: Callable[[], bool],
        full_nodes: Callable[[], Collection[NodeId]],
    ) -> None:
        self._node = node
        self._table = table
        self._store = store
        self._clock = clock
        self._settings = settings
        self._is_full = is_full
        self._full_nodes = full_nodes
        self._since_ms: dict[PartitionKey, int] = {}

    def note_leader(self, key: PartitionKey) -> None:
        """Record that this node became the leader of a partition."""
        self._since_ms[key] = self._clock.monotonic_ms()

    def note_follower(self, key: PartitionKey) -> None:
        """Record that this node no longer leads a partition."""
        self._since_ms.pop(key, None)

    async def run(self) -> None:
        """Transfer leadership to preferred replicas periodically, until cancelled."""
        while True:
            await asyncio.sleep(BALANCE_INTERVAL_MS / 1000)
            if self._is_full():
                self._make_way()
            else:
                self._balance()

    async def transfer_all(self) -> None:
        """Transfer every partition that this node leads to a replica in sync, within `broker.stop_timeout_ms`."""
        deadline_ms = self._clock.monotonic_ms() + self._settings.stop_timeout_ms
        while self._clock.monotonic_ms() < deadline_ms:
            led = [(replica, self._others(replica)) for _, replica in self._table.led()]
            led = [(replica, others) for replica, others in led if others]
            if not led:
                return
            for replica, others in led:
                _transfer(replica, others[0].node)
            await asyncio.sleep(TRANSFER_INTERVAL_MS / 1000)

    def _make_way(self) -> None:
        """Transfer every partition that this full node leads to a replica in sync that has room, if there is one."""
        primary = self._store.make_way()
        if primary is not None:
            logger.info("disk full, primary transferred", extra=facts(to=primary))
        for hosted, replica in self._table.led():
            with_room = self._with_room(replica)
            if with_room and _transfer(replica, with_room[0]):
                logger.info("disk full, leadership transferred", extra=facts(group=hosted.group, to=with_room[0]))

    def _balance(self) -> None:
        room = self._settings.leader_transfers_max
        for hosted, replica in self._misplaced():
            if not room:
                return
            preferred = self._preferred(hosted)
            if preferred in self._with_room(replica) and _transfer(replica, preferred):
                room -= 1
                logger.info(
                    "leadership transferred to preferred replica", extra=facts(group=hosted.group, to=preferred)
                )

    def _misplaced(self) -> Iterable[tuple[HostedReplica, Replica]]:
        """Yield partitions that this node has led past the delay although another replica is preferred and alive."""
        view, now_ms = self._store.view(), self._clock.monotonic_ms()
        for hosted, replica in self._table.led():
            since_ms = self._since_ms.setdefault(hosted.key, now_ms)
            if now_ms - since_ms < self._settings.leader_balance_delay_ms:
                continue
            preferred = self._preferred(hosted)
            broker = None if preferred is None else view.brokers.get(preferred)
            is_eligible = broker is not None and broker.state is BrokerState.ALIVE and preferred != self._node
            if is_eligible and find_move(view, hosted.key) is None:
                yield hosted, replica

    def _with_room(self, replica: Replica) -> list[NodeId]:
        return [other.node for other in self._others(replica) if other.has_room]

    def _others(self, replica: Replica) -> list[Successor]:
        return self._table.successors(replica, self._full_nodes())

    def _preferred(self, hosted: HostedReplica) -> NodeId | None:
        row = self._store.view().partitions.get(hosted.key)
        return None if row is None else row.replicas[0]


def _transfer(replica: Replica, to: NodeId | None) -> bool:
    """Start a transfer; return whether it started. A transfer that is not possible now is retried at the next check."""
    try:
        if to is not None:
            replica.member.transfer_leadership(to)
    except QuiverError:
        return False
    return to is not None
