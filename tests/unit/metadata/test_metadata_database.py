"""The database: what goes in comes out, position and all; schemas move on; nobody else's writes are overwritten."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_commands import commands
from metadata_world import (
    change_state,
    create_topic,
    do,
    formed_state,
    init_cluster,
    register_broker,
    register_consumer,
    register_producer,
)
from sqlalchemy import create_engine, inspect, text

from quiver.errors import ConfigError, StorageError
from quiver.metadata import tables
from quiver.metadata.apply import apply
from quiver.metadata.commands import (
    AnyCommand,
    BeginMove,
    DeleteTopicCommand,
    ForgetBroker,
    ForgetClientCommand,
    PlaceHoldCommand,
    PurgeTopic,
)
from quiver.metadata.database import Database, DatabaseOutdatedError, Transaction, open_database, sqlite_url
from quiver.metadata.migrations import MIGRATIONS, SCHEMA_VERSION
from quiver.metadata.rows import ALL_ROLES, BrokerState, EntityKind, HoldPosition
from quiver.metadata.state import Change, LogPosition, MetadataState
from quiver.model import Index, NodeId, PartitionId, Term, TopicId

SCHEMA_1 = Path(__file__).parent / "metadata_schema_1.sql"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with closing(open_database(sqlite_url(str(path)))) as opened:
        opened.prepare()
        yield opened


def at(index: int, term: int = 1) -> LogPosition:
    return LogPosition(Index(index), Term(term))


def transaction(state: MetadataState, changes: list[Change], *, before: LogPosition) -> Transaction:
    newest = {(change.table, change.key): change.row for change in changes}
    return Transaction(before=before, after=state.position, counters=state.counters, changes=newest)


def write_all(database: Database, state: MetadataState, *, before: LogPosition) -> None:
    database.write(
        Transaction(before=before, after=state.position, counters=state.counters, changes={}, base=state.view())
    )


def test_new_database_is_the_beginning(database: Database) -> None:
    assert database.load().view().encode() == MetadataState().view().encode()
    assert database.prepare() == SCHEMA_VERSION


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(commands(), max_size=8), max_size=6))
def test_database_holds_what_memory_does_after_every_transaction(parts: list[list[AnyCommand]]) -> None:
    state = MetadataState()
    with closing(open_database("sqlite://")) as database:
        database.prepare()
        beginning: list[AnyCommand] = [init_cluster(), *map(register_broker, (1, 2, 3)), create_topic()]
        for part in (beginning, *parts):
            before = state.position
            changes: list[Change] = []
            for command in part:
                changes += apply(state, command).changes
            state.advance_to(at(before.index + 1))
            database.write(transaction(state, changes, before=before))
            assert database.load().view().encode() == state.view().encode()
            assert database.position() == state.position


def test_dropped_rows_go_with_all_that_is_nested_in_them(database: Database, path: Path) -> None:
    state = formed_state()
    held = (HoldPosition(partition_id=PartitionId(0), first_offset=7),)
    hold = PlaceHoldCommand(now_ms=1, topic_id=TopicId(1), name="q", positions=held, lasting_ms=1_000)
    clients: list[AnyCommand] = [register_consumer(), register_producer(), register_broker(4), hold]
    for command in clients:
        do(state, command)
    state.advance_to(at(1))
    write_all(database, state, before=at(0, 0))
    dropping: list[AnyCommand] = [
        ForgetClientCommand(now_ms=1, kind=EntityKind.CONSUMER, id=1),
        BeginMove(now_ms=1, topic_id=TopicId(1), partition_id=PartitionId(0), target=NodeId(4)),
        DeleteTopicCommand(now_ms=1, topic="logs", purge_ms=1),
        PurgeTopic(now_ms=1, topic_id=TopicId(1)),
        change_state(3, BrokerState.DEAD),
        change_state(3, BrokerState.REMOVED),
        ForgetBroker(now_ms=1, broker_id=NodeId(3)),
    ]
    for command in dropping:
        before = state.position
        changes = list(apply(state, command).changes)
        assert changes
        state.advance_to(at(before.index + 1))
        database.write(transaction(state, changes, before=before))
        assert database.load().view().encode() == state.view().encode()
    with closing(sqlite3.connect(path)) as connection:
        counts = [connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables.METADATA.tables]
    assert dict(zip(tables.METADATA.tables, counts, strict=True)) == {
        "meta": 1,
        "brokers": 3,
        "topics": 0,
        "partitions": 0,
        "replicas": 0,
        "producers": 1,
        "consumers": 0,
        "registrations": 0,
        "heartbeats": 4,
        "moves": 0,
        "holds": 0,
        "held_positions": 0,
        "users": 0,
        "tokens": 0,
        "roles": 0,
        "memberships": 0,
        "grants": 0,
        "quotas": 0,
        "consumer_groups": 0,
        "group_members": 0,
        "group_partitions": 0,
    }


def test_meta_without_its_row_is_a_storage_error(path: Path, database: Database) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM meta")
        connection.commit()
    with pytest.raises(StorageError, match="0 rows in meta"):
        database.load()


def test_snapshot_takes_the_place_of_everything(database: Database) -> None:
    first, second = formed_state(), formed_state()
    do(first, create_topic("old"))
    do(first, register_consumer())
    first.advance_to(at(5))
    second.advance_to(at(9, 2))
    write_all(database, first, before=at(0, 0))
    changes = list(apply(second, create_topic("new")).changes)
    base = Transaction(
        before=first.position,
        after=at(10, 2),
        counters=second.counters,
        changes={(change.table, change.key): change.row for change in changes},
        base=formed_state().view(),
    )
    database.write(base)
    second.advance_to(at(10, 2))
    assert database.load().view().encode() == second.view().encode()


def test_transaction_that_was_committed_before_changes_nothing(database: Database) -> None:
    state = formed_state()
    state.advance_to(at(5))
    write_all(database, state, before=at(0, 0))
    write_all(database, state, before=at(0, 0))
    assert database.position() == at(5)


def test_database_that_somebody_else_writes_is_left_alone(database: Database) -> None:
    state = formed_state()
    state.advance_to(at(5))
    write_all(database, state, before=at(0, 0))
    state.advance_to(at(7))
    with pytest.raises(StorageError, match="another node uses the same database"):
        write_all(database, state, before=at(4))
    assert database.position() == at(5)


def test_database_that_lost_transactions_is_not_written_over(database: Database) -> None:
    state = formed_state()
    state.advance_to(at(5))
    write_all(database, state, before=at(0, 0))
    state.advance_to(at(7))
    with pytest.raises(DatabaseOutdatedError) as raised:
        write_all(database, state, before=at(6))
    assert raised.value.found == database.position() == at(5)


def test_failed_transaction_leaves_rows_and_position_as_they_were(database: Database, path: Path) -> None:
    state = formed_state()
    state.advance_to(at(5))
    write_all(database, state, before=at(0, 0))
    before = database.load().view().encode()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TRIGGER refuse BEFORE INSERT ON heartbeats BEGIN SELECT RAISE(ABORT, 'no'); END")
        connection.commit()
    changes = list(apply(state, register_broker(4)).changes)
    state.advance_to(at(6))
    with pytest.raises(StorageError, match="no"):
        database.write(transaction(state, changes, before=at(5)))
    assert database.load().view().encode() == before


def test_sqlite_writes_ahead_and_syncs_at_checkpoints(database: Database) -> None:
    with database._engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 1  # NORMAL


def test_migrations_make_the_tables_that_are_used(database: Database) -> None:
    engine = create_engine("sqlite://")
    tables.METADATA.create_all(engine)
    wanted, made = inspect(engine), inspect(database._engine)
    assert sorted(made.get_table_names()) == sorted(wanted.get_table_names())
    for name in wanted.get_table_names():
        shape = [
            [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(name)] for found in (wanted, made)
        ]
        assert shape[0] == shape[1]
        keys = [found.get_pk_constraint(name)["constrained_columns"] for found in (wanted, made)]
        assert keys[0] == keys[1]
        indexes = [sorted(str(i["name"]) for i in found.get_indexes(name)) for found in (wanted, made)]
        assert indexes[0] == indexes[1]
    engine.dispose()


def test_first_schema_is_migrated_with_what_it_holds(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_1.read_text())
    with closing(open_database(sqlite_url(str(path)))) as database:
        assert database.prepare() == 1
        view = database.load().view()
        assert (view.cluster_id, view.position) == ("c1", at(12, 3))
        assert [topic.name for topic in view.active_topics()] == ["logs"]
        assert {broker.roles for broker in view.brokers.values()} == {ALL_ROLES}
        assert view.partitions_of(view.topics_by_name["logs"])[0].replicas == (2, 1)
        assert [len(consumer.registrations) for consumer in view.consumers.values()] == [1]
        assert "replicas_by_broker" in {i["name"] for i in inspect(database._engine).get_indexes("replicas")}
        assert database.prepare() == SCHEMA_VERSION


def test_interrupted_migration_leaves_the_schema_as_it_was(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA_1.read_text())
        connection.execute("CREATE INDEX registrations_by_topic ON registrations (kind)")  # in the way of the last step
        connection.commit()
    with closing(open_database(sqlite_url(str(path)))) as database:
        with pytest.raises(StorageError):
            database.prepare()
        assert "replicas_by_broker" not in {i["name"] for i in inspect(database._engine).get_indexes("replicas")}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT schema_version FROM meta").fetchone() == (1,)


def test_newer_schema_is_refused_with_a_sentence(path: Path, database: Database) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET schema_version = 99")
        connection.commit()
    with pytest.raises(
        StorageError, match="schema version 99, but this program supports up to 11: start the newer program"
    ):
        database.prepare()


def test_there_is_a_migration_for_every_version() -> None:
    assert len(MIGRATIONS) == SCHEMA_VERSION == 11


def test_what_no_program_of_ours_wrote_is_a_storage_error(path: Path, database: Database) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO heartbeats VALUES ('ghost', 1, 1)")
        connection.commit()
    with pytest.raises(StorageError, match="holds an invalid row"):
        database.load()


def test_file_that_is_no_database_is_a_storage_error(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)
    with closing(open_database(sqlite_url(str(path)))) as database, pytest.raises(StorageError, match="not a database"):
        database.prepare()


@pytest.mark.parametrize(
    ("url", "schema", "says"),
    [
        ("no url", None, "URL"),
        ("mysql://host/db", None, "unsupported"),
        ("postgresql://host/db", None, "unsupported"),
        ("postgresql+psycopg://host/db", None, "schema"),
        ("postgresql+psycopg://host/db", 'x"; DROP', "schema"),
    ],
)
def test_urls_that_cannot_be_used_are_named(url: str, schema: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_database(url, schema=schema)
