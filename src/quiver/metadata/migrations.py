"""Migrate a database from any earlier schema version to the current one.

A released migration never changes, so it is plain SQL and does not use the definitions in `tables`, which evolve. All
missing migrations run in one transaction: after a crash the schema is either the old or the new one. A schema that is
newer than the program is not touched.

From version 5 on, a migration only adds: tables, indexes, and columns with a default. So an older program can use the
database of a newer one as long as the cluster's feature level allows the older program. `meta.migrated_version` is the
version of the tables, `meta.schema_version` the lowest version that a program must know to use them.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, inspect, text

from quiver.errors import StorageError
from quiver.features import LEVEL_MIN

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
    # For frequent queries by people: a topic by name, the replicas of a broker, the clients of a topic.
    "CREATE INDEX topics_by_name ON topics (name)",
    "CREATE INDEX replicas_by_broker ON replicas (broker_id)",
    "CREATE INDEX registrations_by_topic ON registrations (topic_id)",
)

VERSION_3 = (
    # Nodes without the broker role are registered, too. Existing rows get all roles.
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


VERSION_5 = (
    "ALTER TABLE meta ADD COLUMN feature_level BIGINT NOT NULL DEFAULT 1",
    "ALTER TABLE meta ADD COLUMN migrated_version INTEGER NOT NULL DEFAULT 5",
)

VERSION_6 = (
    "ALTER TABLE producers ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE consumers ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
    """CREATE TABLE users (
        name TEXT NOT NULL PRIMARY KEY,
        is_enabled BOOLEAN NOT NULL,
        created_ms BIGINT NOT NULL,
        salt TEXT NOT NULL,
        iterations BIGINT NOT NULL,
        stored_key TEXT NOT NULL,
        server_key TEXT NOT NULL
    )""",
    """CREATE TABLE tokens (
        token_id TEXT NOT NULL PRIMARY KEY,
        user_name TEXT NOT NULL,
        secret_hash TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        expires_ms BIGINT
    )""",
    """CREATE TABLE roles (
        name TEXT NOT NULL PRIMARY KEY,
        created_ms BIGINT NOT NULL
    )""",
    """CREATE TABLE memberships (
        role TEXT NOT NULL,
        user_name TEXT NOT NULL,
        added_ms BIGINT NOT NULL,
        PRIMARY KEY (role, user_name)
    )""",
    """CREATE TABLE grants (
        subject TEXT NOT NULL,
        verb TEXT NOT NULL,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        is_prefix BOOLEAN NOT NULL,
        granted_ms BIGINT NOT NULL,
        PRIMARY KEY (subject, verb, kind, name, is_prefix)
    )""",
)

VERSION_7 = (
    "ALTER TABLE topics ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
    """CREATE TABLE quotas (
        subject TEXT NOT NULL PRIMARY KEY,
        requests_per_second BIGINT,
        mutations_per_second BIGINT,
        bytes_in_per_second BIGINT,
        bytes_out_per_second BIGINT,
        creations_per_minute BIGINT,
        long_polls_max BIGINT,
        connections_max BIGINT,
        topics_max BIGINT,
        partitions_max BIGINT,
        registrations_max BIGINT,
        changed_ms BIGINT NOT NULL
    )""",
)

VERSION_8 = ("ALTER TABLE topics ADD COLUMN is_encrypted BOOLEAN NOT NULL DEFAULT FALSE",)

VERSION_9 = (
    "ALTER TABLE meta ADD COLUMN session_base BIGINT NOT NULL DEFAULT 0",
    """CREATE TABLE consumer_groups (
        group_id BIGINT NOT NULL PRIMARY KEY,
        kind TEXT NOT NULL,
        created_ms BIGINT NOT NULL,
        settings TEXT NOT NULL,
        version BIGINT NOT NULL,
        rebalances BIGINT NOT NULL,
        last_rebalance_ms BIGINT NOT NULL,
        reason TEXT NOT NULL,
        pause_ms BIGINT NOT NULL
    )""",
    """CREATE TABLE group_members (
        group_id BIGINT NOT NULL,
        member_id TEXT NOT NULL,
        joined_ms BIGINT NOT NULL,
        session_timeout_ms BIGINT NOT NULL,
        instance TEXT NOT NULL,
        rack TEXT NOT NULL,
        topics TEXT NOT NULL,
        pattern TEXT NOT NULL,
        start TEXT NOT NULL,
        client TEXT NOT NULL,
        principal TEXT NOT NULL,
        replaces TEXT NOT NULL,
        version BIGINT NOT NULL,
        PRIMARY KEY (group_id, member_id)
    )""",
    """CREATE TABLE group_partitions (
        group_id BIGINT NOT NULL,
        member_id TEXT NOT NULL,
        topic_id BIGINT NOT NULL,
        partition_id BIGINT NOT NULL,
        epoch BIGINT NOT NULL,
        is_revoking BOOLEAN NOT NULL,
        PRIMARY KEY (group_id, member_id, topic_id, partition_id)
    )""",
)

VERSION_10 = ("ALTER TABLE quotas ADD COLUMN weight BIGINT",)

VERSION_11 = ("ALTER TABLE holds ADD COLUMN principal TEXT NOT NULL DEFAULT ''",)


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
    _run(VERSION_5),
    _run(VERSION_6),
    _run(VERSION_7),
    _run(VERSION_8),
    _run(VERSION_9),
    _run(VERSION_10),
    _run(VERSION_11),
)
"""The migrations to version 1, version 2 and so on; a released one never changes."""
SCHEMA_VERSION = len(MIGRATIONS)
"""The schema version of this program."""
SCHEMA_AT_LEVEL_1 = 4
"""The schema version of programs of feature level 1."""


def required_schema(feature_level: int) -> int:
    """Return the lowest schema version that a program must know to use the database of a cluster at a level."""
    return SCHEMA_AT_LEVEL_1 if feature_level == LEVEL_MIN else SCHEMA_VERSION


def migrate(connection: Connection, *, schema: str | None = None) -> int:
    """Migrate to this program's schema in the caller's transaction; return the version found.

    Raises:
        StorageError: a newer program wrote the schema; nothing was changed.
    """
    required, version = _versions(connection, schema)
    if required > SCHEMA_VERSION:
        raise StorageError(
            f"the metadata database has schema version {required}, but this program supports up to {SCHEMA_VERSION}: "
            "start the newer program that wrote it"
        )
    for step in MIGRATIONS[version:]:
        step(connection)
    if version < SCHEMA_VERSION:
        connection.execute(
            text("UPDATE meta SET schema_version = :required, migrated_version = :version"),
            {"required": max(required, SCHEMA_AT_LEVEL_1), "version": SCHEMA_VERSION},
        )
    return version


def _versions(connection: Connection, schema: str | None) -> tuple[int, int]:
    """Return the version that a program must know, and the version of the tables; 0 without tables."""
    found = inspect(connection)
    if not found.has_table("meta", schema=schema):
        return 0, 0
    required = int(connection.execute(text("SELECT schema_version FROM meta")).scalar_one())
    if "migrated_version" not in {column["name"] for column in found.get_columns("meta", schema=schema)}:
        return required, required
    return required, int(connection.execute(text("SELECT migrated_version FROM meta")).scalar_one())
