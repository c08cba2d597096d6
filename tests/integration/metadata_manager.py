"""One manager on real files, with any database: what the metadata's integration tests share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from quiver.clock import SystemClock
from quiver.config import LogSettings, ReplicationSettings
from quiver.errors import UnavailableError
from quiver.metadata import METADATA_GROUP, Database, MetadataStore, open_database
from quiver.model import Buffer, NodeId
from quiver.raft import Configuration
from quiver.replication import Member, Replicator
from quiver.replication.interfaces import LostHandler, MessageHandler
from quiver.storage import SystemDisk, ThreadExecutor

NODE = NodeId(1)


class Nowhere:
    """The network of a node that is alone."""

    def start(self, handler: MessageHandler, on_lost: LostHandler) -> None:
        pass

    def send(self, to: NodeId, parts: Sequence[Buffer]) -> None:
        raise AssertionError("a node that is alone has nobody to send to")


@dataclass
class Manager:
    store: MetadataStore
    member: Member
    database: Database


@asynccontextmanager
async def running_manager(directory: Path, url: str, *, schema: str | None = None) -> AsyncIterator[Manager]:
    """Run the only manager of a cluster, and wait until it is primary."""
    executor, clock = ThreadExecutor(), SystemClock()
    database = open_database(url, schema=schema)
    replicator = Replicator(
        NODE,
        incarnation=time.time_ns(),
        network=Nowhere(),
        disk=SystemDisk(),
        executor=executor,
        clock=clock,
        rng=random.Random(),
        settings=ReplicationSettings(election_timeout_ms=50, heartbeat_interval_ms=10),
        log_settings=LogSettings(),
    )
    store = await MetadataStore.open(
        database,
        executor=executor,
        clock=clock,
        rng=random.Random(),
        on_failure=replicator.fail,
        has_log=(directory / "log").exists(),
    )
    async with replicator:
        member = await replicator.open_member(
            METADATA_GROUP, str(directory / "log"), store.machine, bootstrap=Configuration(voters=(NODE,))
        )
        store.attach(member)
        await _wait_primary(store)
        yield Manager(store, member, database)
    await store.close()
    executor.close()


async def _wait_primary(store: MetadataStore) -> None:
    while True:
        try:
            await store.read(linearizable=True)
        except UnavailableError:
            await asyncio.sleep(0.005)
        else:
            return
