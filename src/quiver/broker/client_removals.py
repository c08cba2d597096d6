"""Tells replicas which clients were removed from the metadata, so that their sequences and cursors go as well.

A partition may be without a leader when a client is removed, and a node may miss changes: each leader therefore also
compares its whole state with the metadata periodically (`quiver.partition.client_cleaner`). This only makes it soon.
"""

from __future__ import annotations

import asyncio

from quiver.broker.replica_table import ReplicaTable
from quiver.metadata import MetadataStore, Table, View
from quiver.model import ConsumerId, Index, ProducerId

FORGETTING_LEVEL = 2
"""The feature level at which every node knows *forget* entries."""


class ClientRemovals:
    """Follows the removals of clients for all replicas of this node."""

    def __init__(self, table: ReplicaTable, store: MetadataStore) -> None:
        self._table = table
        self._store = store

    async def run(self) -> None:
        """Follow the metadata until the store closes."""
        async for changed in self._store.watch(Index(0)):
            producers: set[ProducerId] = set()
            consumers: set[ConsumerId] = set()
            for change in changed.changes:
                if change.row is None and change.table is Table.PRODUCERS:
                    producers.add(change.key)
                elif change.row is None and change.table is Table.CONSUMERS:
                    consumers.add(change.key)
            if producers or consumers:
                for _, replica in self._table.led():
                    replica.note_removed(producers=producers, consumers=consumers)
                    await asyncio.sleep(0)  # a node may lead many partitions

    def find_clients(self) -> View | None:
        """Return the registered clients as this node knows them; None while some nodes do not know *forget* entries."""
        view = self._store.view()
        return view if view.feature_level >= FORGETTING_LEVEL else None
