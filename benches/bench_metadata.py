"""Measure registrations per second on one manager: real disk, real database, 64 concurrent callers.

Every registration goes through the Raft log (one fdatasync for all that wait together), is applied, and is in the
database before it is acknowledged. The raw limit is plain SQL for the same rows, 64 registrations per transaction.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from table import Row, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

from metadata_manager import Manager, running_manager
from postgresql_server import ServerMissingError, running_server

from quiver.clock import SystemClock
from quiver.config import ManagerSettings
from quiver.manager.change_handler import ChangeHandler
from quiver.metadata import (
    Beat,
    CreateTopicCommand,
    EntityKind,
    InitCluster,
    RecordHeartbeats,
    RegisterBroker,
    RegisterConsumerCommand,
    RegisterProducerCommand,
    TopicSelection,
    sqlite_url,
)
from quiver.model import NodeId
from quiver.security.identity import ConnectionIdentity
from quiver.wire import messages

CALLERS = 64
SECONDS = 3.0
TOPICS = (TopicSelection("logs"),)
NO_PAYLOAD = memoryview(b"")
SQLITE_TARGET, POSTGRESQL_TARGET = 2_000, 1_000


@asynccontextmanager
async def formed(directory: Path, url: str, schema: str | None) -> AsyncIterator[Manager]:
    async with running_manager(directory, url, schema=schema) as manager:
        submit = manager.store.submit
        await submit(InitCluster(now_ms=1, cluster_id="bench"))
        await submit(RegisterBroker(now_ms=1, broker_id=NodeId(1), identity="i", wire_address="host:1"))
        await submit(CreateTopicCommand(now_ms=1, topic="logs", replicas=1, assignments=((NodeId(1),),) * 3))
        yield manager


async def rate(call: Callable[[int], Coroutine[Any, Any, object]]) -> float:
    """Return the calls per second of `CALLERS` concurrent callers."""
    done = 0
    start = perf_counter()

    async def caller() -> None:
        nonlocal done
        while perf_counter() - start < SECONDS:
            done += 1
            await call(done)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(caller())
    return done / (perf_counter() - start)


async def measure(url: str, schema: str | None, *, name: str, target: float, raw: float | None) -> list[Row]:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        async with formed(Path(directory), url, schema) as manager:
            submit = manager.store.submit
            producers = await rate(lambda _: submit(RegisterProducerCommand(now_ms=2, topics=TOPICS)))
            named = await rate(lambda n: submit(RegisterProducerCommand(now_ms=2, topics=TOPICS, name=f"p{n % 1000}")))
            consumers = await rate(
                lambda n: submit(RegisterConsumerCommand(now_ms=2, topics=TOPICS, request_id=f"r{n}"))
            )
            beats = await rate(
                lambda n: submit(
                    RecordHeartbeats(now_ms=n, beats=tuple(Beat(EntityKind.PRODUCER, k, n) for k in range(100)))
                )
            )
            changes = ChangeHandler(manager.store, clock=SystemClock(), settings=ManagerSettings(), heartbeats=None)
            caller = ConnectionIdentity()
            topics = await rate(
                lambda n: changes.carry_out(messages.CreateTopicRequest(topic=f"t{n}"), NO_PAYLOAD, caller)
            )
            status = manager.store.status()
            start = perf_counter()
            await asyncio.to_thread(manager.database.load)
            load_s = perf_counter() - start
            clients = len(manager.store.view().producers) + len(manager.store.view().consumers)
    return [
        Row(f"{name}: producer registrations", producers, "1/s", raw, target),
        Row(f"{name}: named producers again, a new epoch each", named, "1/s", raw, target),
        Row(f"{name}: consumer registrations", consumers, "1/s", raw, target),
        Row(f"{name}: topics of three partitions, placed and created one by one", topics, "1/s"),
        Row(f"{name}: heartbeats, 100 in a command", beats * 100, "1/s"),
        Row(f"{name}: commands in a transaction", status.applied_index / status.transactions, "commands"),
        Row(f"{name}: load {clients:,} clients at start", load_s, "s"),
    ]


def raw_sqlite() -> float:
    """Return registrations per second as bare rows, 64 per transaction."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        connection = sqlite3.connect(Path(directory) / "raw.db", isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        for table in ("producers", "registrations", "heartbeats"):
            connection.execute(f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, a BIGINT, b TEXT)")
        done, start = 0, perf_counter()
        while perf_counter() - start < 1:
            connection.execute("BEGIN IMMEDIATE")
            for table in ("producers", "registrations", "heartbeats"):
                values = [(done + n, n, "value") for n in range(CALLERS)]
                connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", values)
            connection.execute("COMMIT")
            done += CALLERS
        seconds = perf_counter() - start
        connection.close()
        return done / seconds


def main() -> int:
    with tempfile.TemporaryDirectory(dir=".") as directory:
        url = sqlite_url(str(Path(directory) / "metadata.db"))
        rows = asyncio.run(measure(url, None, name="SQLite", target=SQLITE_TARGET, raw=raw_sqlite()))
    try:
        with running_server() as server:
            rows += asyncio.run(
                measure(server.url, "quiver_bench", name="PostgreSQL", target=POSTGRESQL_TARGET, raw=None)
            )
    except ServerMissingError as error:
        print(f"PostgreSQL was not measured: {error}")
    return show(rows, title=f"metadata: one manager, {CALLERS} callers")


if __name__ == "__main__":
    sys.exit(main())
