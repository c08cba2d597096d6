"""One node's own SQL database: the metadata, and the log position that it reflects.

SQLite or PostgreSQL, through SQLAlchemy's Core. All calls block; run them in an executor, one at a time. Every
transaction writes the changed rows *and* their log position (R17): after any crash the database is exactly the
metadata at its position.

A committed transaction is durable a little later, not immediately (SQLite's `synchronous=NORMAL` with a write-ahead
log, PostgreSQL's `synchronous_commit=off`). A power loss may drop the last transactions, whole and in order. The Raft
log, synced on a majority before anything is acknowledged, replays them. See docs/adr/0009-metadata.md.
"""

from __future__ import annotations

import os
import re
import socket
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, Table, bindparam, create_engine, delete, event, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.schema import CreateSchema
from sqlalchemy.sql.dml import Delete, Insert

from quiver.errors import ConfigError, StorageError
from quiver.metadata import rows, tables
from quiver.metadata.migrations import migrate, required_schema
from quiver.metadata.rows import AnyRow
from quiver.metadata.state import Counters, LogPosition, MetadataState, View
from quiver.metadata.tables import ROW_MAPPINGS, RowMapping, Values

BUSY_TIMEOUT_MS = 10_000
"""How long SQLite waits for a lock of another process: a person who reads the file, or a backup."""
CONNECT_TIMEOUT_S = 5
"""Timeout of a connection to PostgreSQL."""

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


class DatabaseLostError(StorageError):
    """Report that the database server is unreachable or has disconnected: the transaction may be retried."""

    code = "database_lost"


class DatabaseOutdatedError(StorageError):
    """Report that the database is older than this node left it: its server crashed and lost its last transactions."""

    code = "database_outdated"

    def __init__(self, message: str, found: LogPosition | None = None) -> None:
        super().__init__(message)
        self.found = found or LogPosition()
        """The position that the database reflects."""


class Transaction(msgspec.Struct, frozen=True):
    """The changes from one log position to a later one."""

    before: LogPosition
    after: LogPosition
    counters: Counters
    changes: Mapping[tuple[rows.Table, Any], AnyRow | None]
    """The newest row of each changed key; None if the row was deleted."""
    base: View | None = None
    """A restored snapshot; if given, it replaces all rows before the changes."""


class Database:
    """The tables of one node. Made by `open_database`."""

    def __init__(self, engine: Engine, *, schema: str | None) -> None:
        self._engine = engine
        self._schema = schema
        self._running: Any = None
        """The driver's connection of the running transaction."""
        self._writers = [_TableWriter(mapped, engine.dialect.name) for mapped in ROW_MAPPINGS]

    @property
    def name(self) -> str:
        """Return the kind of database: `sqlite` or `postgresql`."""
        return self._engine.dialect.name

    def prepare(self) -> int:
        """Create or migrate the tables; return the schema version found, 0 for none.

        Raises:
            StorageError: the database cannot be used, or a newer program wrote it.
            DatabaseLostError: the server is unreachable.
        """
        with self._transaction() as connection:
            if self._schema is not None:
                connection.execute(CreateSchema(self._schema, if_not_exists=True))
            return migrate(connection, schema=self._schema)

    def load(self) -> MetadataState:
        """Return the metadata with its log position.

        Raises:
            StorageError: the database cannot be read, or holds invalid rows.
        """
        with self._transaction() as connection:
            counters, position = _load_meta(connection)
            found = [row for mapped in ROW_MAPPINGS for row in _load_rows(connection, mapped)]
        return MetadataState(found, counters=counters, position=position)

    def attach(self) -> tuple[Counters, LogPosition]:
        """Create or migrate the tables; return the counters and the log position that the database reflects.

        Raises:
            StorageError: the database cannot be used, or a newer program wrote it.
            DatabaseLostError: the server is unreachable.
        """
        self.prepare()
        with self._transaction() as connection:
            return _load_meta(connection)

    def position(self) -> LogPosition:
        """Return the log position that the database reflects.

        Raises:
            StorageError: the database cannot be read.
        """
        with self._transaction() as connection:
            return _load_meta(connection)[1]

    def write(self, transaction: Transaction) -> None:
        """Commit a transaction; one that an earlier attempt committed changes nothing.

        Raises:
            DatabaseLostError: the outcome is unknown; retry the same transaction.
            DatabaseOutdatedError: not done; the database lacks earlier transactions: write all rows again.
            StorageError: not done, or another process has written to the database: this node must stop.
        """
        with self._transaction() as connection:
            if not _advance(connection, transaction):
                return
            if transaction.base is not None:
                self._replace_all(connection, transaction.base)
            for writer in self._writers:
                mine = [(key[1], row) for key, row in transaction.changes.items() if key[0] is writer.row_table]
                if mine:
                    writer.write(connection, mine)

    def interrupt(self) -> None:
        """Break off the running call, which then raises `DatabaseLostError`; only a database server can need it."""
        driver = self._running
        if self.name == "postgresql" and driver is not None and not driver.closed:
            with suppress(OSError), socket.socket(fileno=os.dup(driver.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._engine.dispose()

    def _replace_all(self, connection: Connection, view: View) -> None:
        for table in tables.METADATA.sorted_tables:
            if table is not tables.meta:
                connection.execute(delete(table))
        for writer in self._writers:
            table = getattr(view, writer.row_table.value)
            writer.insert(connection, table.values())

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                self._running = connection.connection.driver_connection
                yield connection
        except (OperationalError, InterfaceError, InternalError) as error:
            # A server that is stopped, restarts, is full, or is a read-only standby for a while.
            if self.name == "postgresql" or _is_full(error):
                raise DatabaseLostError(f"the metadata database is unreachable: {_one_line(error)}") from error
            raise StorageError(f"the metadata database failed: {_one_line(error)}") from error
        except SQLAlchemyError as error:
            raise StorageError(f"the metadata database failed: {_one_line(error)}") from error
        except msgspec.ValidationError as error:
            raise StorageError(f"the metadata database holds an invalid row: {error}") from error
        finally:
            self._running = None


class _TableWriter:
    """The prepared statements of one kind of row."""

    def __init__(self, mapped: RowMapping, dialect: str) -> None:
        self._mapped = mapped
        self.row_table = mapped.row_type.table
        self._upsert = _upsert(mapped.table, dialect)
        self._delete = _delete(mapped.table, mapped.key_columns)
        self._insert_children: Insert | None = None
        if mapped.children is not None:
            self._insert_children = _upsert(mapped.children, dialect)
            self._delete_children = _delete(mapped.children, mapped.child_columns)

    def write(self, connection: Connection, changes: Sequence[tuple[Any, AnyRow | None]]) -> None:
        """Upsert the changed rows and delete the dropped ones."""
        mapped = self._mapped
        keys = [mapped.key_values(key) for key, _ in changes]
        if self._insert_children is not None:
            parents = [mapped.child_key(key) for key in keys]
            connection.execute(self._delete_children, [_marked(parent) for parent in parents])
        dropped = [_marked(key) for key, (_, row) in zip(keys, changes, strict=True) if row is None]
        if dropped:
            connection.execute(self._delete, dropped)
        self.insert(connection, [row for _, row in changes if row is not None])

    def insert(self, connection: Connection, found: Iterable[AnyRow]) -> None:
        """Insert rows whose child rows do not exist."""
        split = [self._mapped.to_sql(row) for row in found]
        if split:
            connection.execute(self._upsert, [values for values, _ in split])
        children = [child for _, nested in split for child in nested]
        if children and self._insert_children is not None:
            connection.execute(self._insert_children, children)


def open_database(url: str, *, schema: str | None = None) -> Database:
    """Return the database at a URL, without connecting to it; `schema` is PostgreSQL's, one for each node.

    Raises:
        ConfigError: the URL or the schema name is not valid.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError("the database URL cannot be parsed; give one such as sqlite:////path/to/file") from None
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return Database(_sqlite_engine(parsed), schema=None)
    if parsed.drivername == "postgresql+psycopg":
        if schema is None or not _SCHEMA_NAME.fullmatch(schema):
            raise ConfigError(f"{schema!r} is not a valid schema name: use at most 63 lower-case letters, digits and _")
        return Database(_postgresql_engine(parsed, schema), schema=schema)
    raise ConfigError(f"database driver {parsed.drivername!r} is unsupported; use sqlite or postgresql+psycopg")


def sqlite_url(path: str) -> str:
    """Return the URL of an SQLite file."""
    return URL.create("sqlite", database=path).render_as_string()


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url)

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _: object) -> None:
        connection.isolation_level = None  # explicit BEGIN only, so that DDL is transactional, too
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgresql_engine(url: URL, schema: str) -> Engine:
    try:
        engine = create_engine(url, connect_args={"connect_timeout": CONNECT_TIMEOUT_S})
    except ModuleNotFoundError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'quivermq[postgres]'") from None

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f'SET search_path TO "{schema}"')
            cursor.execute("SET synchronous_commit TO off")
        connection.commit()

    return engine


def _load_meta(connection: Connection) -> tuple[Counters, LogPosition]:
    found = _select(connection, tables.meta)
    if len(found) != 1:
        raise StorageError(f"the metadata database has {len(found)} rows in meta, not 1: it was changed from outside")
    values = found[0]
    position = LogPosition(values.pop("applied_index"), values.pop("applied_term"))
    del values["singleton"], values["schema_version"], values["migrated_version"]
    return msgspec.convert(values, Counters), position


def _load_rows(connection: Connection, mapped: RowMapping) -> Iterator[AnyRow]:
    children = [] if mapped.children is None else _select(connection, mapped.children, mapped.children_all)
    return mapped.from_sql(_select(connection, mapped.table), children)


def _select(connection: Connection, table: Table, equal: Mapping[str, str] | None = None) -> list[Values]:
    statement = select(table)
    for name, value in (equal or {}).items():
        statement = statement.where(table.c[name] == value)
    names = [str(column.name) for column in table.columns]  # msgspec does not accept SQLAlchemy's str subclass
    return [dict(zip(names, row, strict=False)) for row in connection.execute(statement).all()]


_ADVANCE = (
    update(tables.meta)
    .where(tables.meta.c.applied_index == bindparam("before_index"))
    .where(tables.meta.c.applied_term == bindparam("before_term"))
)


def _advance(connection: Connection, transaction: Transaction) -> bool:
    """Advance the position; return False if an earlier attempt has committed the transaction already."""
    before, after = transaction.before, transaction.after
    values = msgspec.to_builtins(transaction.counters) | {
        "applied_index": after.index,
        "applied_term": after.term,
        "schema_version": required_schema(transaction.counters.feature_level),
    }
    moved = connection.execute(
        _ADVANCE.values(values), {"before_index": before.index, "before_term": before.term}
    ).rowcount
    if moved:
        return True
    found = _load_meta(connection)[1]
    if found == after:
        return False  # an earlier attempt was committed and its reply was lost
    if found.index < before.index:
        raise DatabaseOutdatedError(f"the metadata database is at index {found.index}, not {before.index}", found)
    raise StorageError(
        f"the metadata database is at index {found.index}, not at {before.index} where this node left it: "
        "check whether another node uses the same database"
    )


def _upsert(table: Table, dialect: str) -> Insert:
    make: Callable[[Table], Any] = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = make(table)
    keys = [column.name for column in table.primary_key]
    others = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in keys}
    upsert: Insert = statement.on_conflict_do_update(index_elements=keys, set_=others)
    return upsert


def _delete(table: Table, columns: Sequence[str]) -> Delete:
    statement = delete(table)
    for name in columns:
        statement = statement.where(table.c[name] == bindparam(f"the_{name}"))
    return statement


def _marked(values: Values) -> Values:
    """Return values under the names that `_delete` binds; SQLAlchemy reserves the column names themselves."""
    return {f"the_{name}": value for name, value in values.items()}


def _is_full(error: SQLAlchemyError) -> bool:
    """Return whether the disk of an SQLite database is full: the transaction is not done, and is retried."""
    code: object = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_FULL


def _one_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().split("\n")[0]
