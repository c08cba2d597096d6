"""The metadata on a real PostgreSQL server: the same as on SQLite, also when the server restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from metadata_manager import Manager, running_manager
from postgresql_server import Server, running_server
from sqlalchemy import create_engine, inspect, text

from quiver.errors import StorageError
from quiver.metadata import (
    Command,
    CreateTopicCommand,
    DeleteTopicCommand,
    EntityKind,
    ForgetClientCommand,
    InitCluster,
    MetadataState,
    PurgeTopic,
    RegisterBroker,
    RegisterConsumerCommand,
    TopicSelection,
    open_database,
    tables,
)
from quiver.metadata.apply import apply
from quiver.metadata.commands import AnyCommand
from quiver.metadata.database import Database, DatabaseLostError, Transaction
from quiver.metadata.migrations import SCHEMA_VERSION
from quiver.metadata.state import Change, LogPosition
from quiver.model import Index, NodeId, Term, TopicId

_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


@pytest.fixture
def database(server: Server) -> Iterator[Database]:
    with closing(open_database(server.url, schema=f"quiver_node_{next(_numbers)}")) as opened:
        opened.prepare()
        yield opened


def at(index: int) -> LogPosition:
    return LogPosition(Index(index), Term(1))


def beginning() -> list[AnyCommand]:
    brokers = [
        RegisterBroker(now_ms=1, broker_id=NodeId(n), identity=f"i{n}", wire_address=f"host{n}:1") for n in (1, 2, 3)
    ]
    topic = CreateTopicCommand(now_ms=1, topic="logs", replicas=2, assignments=((NodeId(1), NodeId(2)), (NodeId(3),)))
    return [InitCluster(now_ms=1, cluster_id="c1"), *brokers, topic]


def register(request: str = "") -> RegisterConsumerCommand:
    return RegisterConsumerCommand(now_ms=2, topics=(TopicSelection("logs"),), request_id=request)


def advance(database: Database, state: MetadataState, commands: list[AnyCommand], **fields: Any) -> None:
    changes: list[Change] = []
    before = state.position
    for command in commands:
        changes += apply(state, command).changes
    state.advance_to(at(before.index + len(commands)))
    newest = {(change.table, change.key): change.row for change in changes}
    database.write(Transaction(before=before, after=state.position, counters=state.counters, changes=newest, **fields))


def test_postgresql_holds_what_memory_does(database: Database) -> None:
    state = MetadataState()
    parts: list[list[AnyCommand]] = [
        beginning(),
        [register(), register()],
        [register()],
        [ForgetClientCommand(now_ms=3, kind=EntityKind.CONSUMER, id=2)],
        [DeleteTopicCommand(now_ms=3, topic="logs", purge_ms=3), PurgeTopic(now_ms=3, topic_id=TopicId(1))],
    ]
    for commands in parts:
        advance(database, state, commands)
        assert database.load().view().encode() == state.view().encode()
    assert database.position() == state.position


def test_every_node_has_a_schema_of_its_own(server: Server, database: Database) -> None:
    advance(database, MetadataState(), beginning())
    with closing(open_database(server.url, schema="quiver_another")) as other:
        assert other.prepare() == 0
        assert other.prepare() == SCHEMA_VERSION
        assert other.load().view().encode() == MetadataState().view().encode()


def test_migrations_make_the_tables_that_are_used(server: Server) -> None:
    engine = create_engine(server.url)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA wanted"))
        connection.execute(text("SET search_path TO wanted"))
        tables.METADATA.create_all(connection)
    with closing(open_database(server.url, schema="made")) as database:
        database.prepare()
    found = inspect(engine)
    for name in tables.METADATA.tables:
        shapes = [
            [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(name, schema=schema)]
            for schema in ("wanted", "made")
        ]
        assert shapes[0] == shapes[1]
        indexes = [{i["name"] for i in found.get_indexes(name, schema=schema)} for schema in ("wanted", "made")]
        assert indexes[0] == indexes[1]
    engine.dispose()


def test_newer_schema_is_refused(database: Database) -> None:
    with database._engine.begin() as connection:
        connection.execute(text("UPDATE meta SET schema_version = 99"))
    with pytest.raises(StorageError, match="schema version 99"):
        database.prepare()


def test_failed_transaction_leaves_everything_as_it_was(database: Database) -> None:
    state = MetadataState()
    advance(database, state, beginning())
    with database._engine.begin() as connection:
        connection.execute(text("ALTER TABLE registrations ADD CHECK (client_id < 1)"))
    before = database.load().view().encode()
    with pytest.raises(StorageError, match="check constraint"):
        advance(database, state, [register()])
    assert database.load().view().encode() == before


def test_lost_server_is_told_apart_from_a_failure(server: Server, database: Database) -> None:
    state = MetadataState()
    advance(database, state, beginning())
    server.stop()
    try:
        with pytest.raises(DatabaseLostError):
            database.load()
    finally:
        server.start()
    assert database.load().view().encode() == state.view().encode()


def test_manager_outlives_a_restart_of_its_server(server: Server, tmp_path: Path) -> None:
    async def load(manager: Manager, name: str) -> None:
        for number in range(100):
            await manager.store.submit(register(f"{name}-{number}"))

    async def main() -> None:
        async with running_manager(tmp_path, server.url, schema="restarted") as manager:
            everything: list[Command[Any]] = [*beginning()]
            for command in everything:
                await manager.store.submit(command)
            async with asyncio.TaskGroup() as tasks:
                for number in range(8):
                    tasks.create_task(load(manager, f"client-{number}"))
                await asyncio.sleep(0.2)
                await asyncio.to_thread(server.stop)
                await asyncio.sleep(0.5)
                await asyncio.to_thread(server.start)
            while manager.store.stored_index < manager.store.applied_index:  # noqa: ASYNC110 - a real server
                await asyncio.sleep(0.05)
            digest = manager.store.view().digest()
            assert len(manager.store.view().consumers) == 800
            assert manager.database.load().view().digest() == digest
        async with running_manager(tmp_path, server.url, schema="restarted") as manager:
            assert manager.store.machine.applied_commands == 0
            assert manager.store.view().digest() == digest

    asyncio.run(main())
