"""How a database comes from any earlier schema to the present one, step by step.

Each step is written once and never changed afterwards, so it names its tables in plain SQL instead of using those of
`tables`, which move on. All steps that are missing are made in one transaction, so a crash leaves the schema as it
was or as it is to be. A schema that is newer than the program is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, inspect, text

from quiver.errors import StorageError

VERSION_1 = (
    """CREATE TABLE meta (
        singleton INTEGER NOT NULL PRIMARY KEY,
        schema_version INTEGER NOT NULL,
        applied_index BIGINT NOT NULL,
        applied_term BIGINT NOT NULL,
        cluster_id TEXT NOT NULL,
        formed_ms BIGINT NOT NULL,
        next_topic_id BIGINT NOT NULL,
        next_group_id BIGINT NOT NULL,
        next_producer_id BIGINT NOT NULL,
        next_consumer_id BIGINT NOT NULL,
        next_move_id BIGINT NOT NULL
    )""",
    "INSERT INTO meta VALUES (1, 0, 0, 0, '', 0, 1, 2, 1, 1, 1)",
    """CREATE TABLE brokers (
        broker_id BIGINT NOT NULL PRIMARY KEY,
        identity TEXT NOT NULL,
        wire_address TEXT NOT NULL,
        http_address TEXT NOT NULL,
        rack TEXT NOT NULL,
        state TEXT NOT NULL,
        is_draining BOOLEAN NOT NULL,
        registered_ms BIGINT NOT NULL,
        changed_ms BIGINT NOT NULL
    )""",
    """CREATE TABLE topics (
        topic_id BIGINT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        partitions BIGINT NOT NULL,
        replicas BIGINT NOT NULL,
        retention_ms BIGINT,
        retention_bytes BIGINT,
        until_consumed BOOLEAN NOT NULL,
        state TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        purge_ms BIGINT,
        request_id TEXT NOT NULL
    )""",
    """CREATE TABLE partitions (
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        group_id BIGINT NOT NULL,
        leader BIGINT,
        epoch BIGINT NOT NULL,
        PRIMARY KEY (topic_id, partition_id)
    )""",
    """CREATE TABLE replicas (
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        broker_id BIGINT NOT NULL,
        role TEXT NOT NULL,
        position BIGINT NOT NULL,
        PRIMARY KEY (topic_id, partition_id, broker_id)
    )""",
    """CREATE TABLE producers (
        producer_id BIGINT NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        registered_ms BIGINT NOT NULL
    )""",
    """CREATE TABLE consumers (
        consumer_id BIGINT NOT NULL PRIMARY KEY,
        registered_ms BIGINT NOT NULL,
        request_id TEXT NOT NULL
    )""",
    """CREATE TABLE registrations (
        kind TEXT NOT NULL,
        client_id BIGINT NOT NULL,
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        start TEXT,
        PRIMARY KEY (kind, client_id, topic_id, partition_id)
    )""",
    """CREATE TABLE heartbeats (
        kind TEXT NOT NULL,
        id BIGINT NOT NULL,
        last_seen_ms BIGINT NOT NULL,
        PRIMARY KEY (kind, id)
    )""",
    """CREATE TABLE moves (
        move_id BIGINT NOT NULL PRIMARY KEY,
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        source BIGINT,
        target BIGINT NOT NULL,
        state TEXT NOT NULL,
        begun_ms BIGINT NOT NULL,
        changed_ms BIGINT NOT NULL
    )""",
)

VERSION_2 = (
    # What people ask a manager's database most: a topic by its name, what a broker holds, who uses a topic.
    "CREATE INDEX topics_by_name ON topics (name)",
    "CREATE INDEX replicas_by_broker ON replicas (broker_id)",
    "CREATE INDEX registrations_by_topic ON registrations (topic_id)",
)

VERSION_3 = (
    # Nodes without the role of a broker are known, too. Those from before do everything.
    "ALTER TABLE brokers ADD COLUMN roles TEXT NOT NULL DEFAULT 'manager,broker,gateway'",
    "ALTER TABLE meta ADD COLUMN is_rebalancing BOOLEAN NOT NULL DEFAULT FALSE",
)

VERSION_4 = (
    """CREATE TABLE holds (
        topic_id BIGINT NOT NULL,
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        placed_ms BIGINT NOT NULL,
        expires_ms BIGINT NOT NULL,
        PRIMARY KEY (topic_id, name)
    )""",
    """CREATE TABLE held_positions (
        topic_id BIGINT NOT NULL,
        name TEXT NOT NULL,
        partition_id BIGINT NOT NULL,
        first_offset BIGINT NOT NULL,
        PRIMARY KEY (topic_id, name, partition_id)
    )""",
)


def _run(statements: tuple[str, ...]) -> Callable[[Connection], None]:
    def step(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))

    return step


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    _run(VERSION_1),
    _run(VERSION_2),
    _run(VERSION_3),
    _run(VERSION_4),
)
"""The step to version 1, to version 2, and so on; a step that was ever released stays as it is."""
SCHEMA_VERSION = len(MIGRATIONS)
"""The schema that this program writes."""


def migrate(connection: Connection, *, schema: str | None = None) -> int:
    """Bring the database to this program's schema, inside the caller's transaction; return the version it had.

    Raises:
        StorageError: a newer program has been here; nothing was changed.
    """
    version = _version(connection, schema)
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"the metadata's database has schema version {version}, and this program knows {SCHEMA_VERSION}: "
            "start the newer program that wrote it, or an even newer one"
        )
    for step in MIGRATIONS[version:]:
        step(connection)
    connection.execute(text("UPDATE meta SET schema_version = :version"), {"version": SCHEMA_VERSION})
    return version


def _version(connection: Connection, schema: str | None) -> int:
    if not inspect(connection).has_table("meta", schema=schema):
        return 0
    return int(connection.execute(text("SELECT schema_version FROM meta")).scalar_one())
