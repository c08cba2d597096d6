"""A node's metadata database in memory, which behaves as SQLite's file does when the machine dies.

The real `Database` over a real SQLite that lives in memory, so that every statement is the product's own. A killed
process leaves all that it had committed. A power loss takes the newest transactions, in order and whole, as many as
the seed likes: what was committed is durable some time later, not at once. A lost file is an empty database.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from quiver.clock import Rng
from quiver.errors import StorageError
from quiver.metadata import Database, open_database
from quiver.metadata.database import Transaction

UNSYNCED_MAX = 20
"""How many transactions a power loss may take: SQLite syncs its write-ahead log from time to time."""


class SimulatedDatabase(Database):
    """One node's database through many lives; `faults` counts what it suffered by kind."""

    def __init__(self) -> None:
        super().__init__(open_database("sqlite://")._engine, schema=None)
        self.faults: Counter[str] = Counter()
        self._durable = b""
        """The file as the platter has it; empty: there is none."""
        self._unsynced: list[Transaction] = []
        self._is_failing = False

    # -- what the node does ----------------------------------------------------------------------

    def prepare(self) -> int:
        """Make or migrate the tables, which is durable at once."""
        version = super().prepare()
        self._sync()
        return version

    def write(self, transaction: Transaction) -> None:
        """Commit a transaction, unless it is to fail."""
        if self._is_failing:
            self._is_failing = False
            self.faults["error"] += 1
            raise StorageError("not done: the metadata's database failed: disk I/O error")
        super().write(transaction)
        self._unsynced.append(transaction)
        if len(self._unsynced) > UNSYNCED_MAX:
            self._sync()

    def close(self) -> None:
        """Do nothing: the file outlives the process."""

    def dispose(self) -> None:
        """Free the memory, at the end of the simulation."""
        super().close()

    # -- what happens to it ----------------------------------------------------------------------

    def fail_next(self) -> None:
        """Let the next transaction fail."""
        self._is_failing = True

    def crash(self, rng: Rng) -> None:
        """Become the database after a power loss: a seeded number of the newest transactions are gone."""
        kept = self._unsynced[: rng.randrange(len(self._unsynced) + 1)]
        if len(kept) == len(self._unsynced):
            return
        self.faults["transactions_lost"] += len(self._unsynced) - len(kept)
        self._replace(self._durable)
        for transaction in kept:
            super().write(transaction)
        self._unsynced = kept

    def lose(self) -> None:
        """Become an empty database: the file is gone."""
        self.faults["lost"] += 1
        self._durable, self._unsynced = b"", []
        self._replace(b"")

    def _sync(self) -> None:
        self._durable, self._unsynced = bytes(self._driver().serialize()), []

    def _replace(self, content: bytes) -> None:
        self._engine.dispose()  # what was in memory goes with its connection
        if content:
            self._driver().deserialize(content)

    def _driver(self) -> Any:
        """Return sqlite3's own connection, the only one there is."""
        return self._engine.raw_connection().driver_connection
