"""Write applied changes to the database, in order, one transaction at a time.

While a transaction runs in the executor, later changes accumulate, the newest row of each key, and form the next
transaction: under load, more commands share one. The pending rows are bounded by the size of the metadata itself. The
event loop never blocks.

An unreachable database server is retried for `RETRY_MS_MAX`. Any other failure is final, like a failed sync (R5):
nothing more is written, `on_failure` is called once, and the node must stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from quiver.errors import OutcomeUnknownError, StorageError
from quiver.logs import facts
from quiver.metadata import rows
from quiver.metadata.database import DatabaseLostError, Transaction
from quiver.metadata.rows import AnyRow
from quiver.metadata.state import Change, Counters, LogPosition, View
from quiver.model import Index
from quiver.storage import Executor, Lane

logger = logging.getLogger(__name__)

RETRY_INTERVAL_MS = 200
"""Delay before an unreachable database server is retried."""
RETRY_MS_MAX = 30_000
"""How long a database server is retried: its restart takes seconds."""


class TransactionSink(Protocol):
    """The target of transactions: a database."""

    def write(self, transaction: Transaction) -> None:
        """Commit a transaction; blocks. See `Database.write`."""
        ...


class DatabaseWriter:
    """Writes the changes of one node to its database. Used only in the event loop."""

    def __init__(
        self,
        database: TransactionSink,
        executor: Executor,
        *,
        stored: LogPosition,
        on_failure: Callable[[StorageError], None],
    ) -> None:
        self.stored = stored
        """The log position that the database reflects."""
        self.transactions = 0
        """Transactions committed since the start of this process."""
        self._database = database
        self._executor = executor
        self._on_failure = on_failure
        self._newest = stored
        self._counters = Counters()
        self._changes: dict[tuple[rows.Table, Any], AnyRow | None] = {}
        self._base: View | None = None
        self._is_writing = False
        self._is_closed = False
        self._tries = 0
        self._failure: StorageError | None = None
        self._waiting: list[tuple[Index, asyncio.Future[None]]] = []

    @property
    def failure(self) -> StorageError | None:
        """Return the error that ended the writing, if any."""
        return self._failure

    @property
    def pending_rows(self) -> int:
        """Return the number of rows that wait for the next transaction."""
        return len(self._changes)

    def add(self, changes: Sequence[Change], counters: Counters, position: LogPosition) -> None:
        """Add the changes applied up to a position."""
        for change in changes:
            self._changes[change.table, change.key] = change.row
        self._counters, self._newest = counters, position
        self._write_next()

    def replace(self, view: View) -> None:
        """Replace all rows by a restored snapshot."""
        self._base = view
        self._changes.clear()
        self._counters, self._newest = view.counters, view.position
        self._write_next()

    async def wait_stored(self, index: Index) -> None:
        """Return once the database has everything up to `index`.

        Raises:
            OutcomeUnknownError: the database failed, or the node closes, before that.
        """
        if self.stored.index >= index:
            return
        if self._failure is not None or self._is_closed:
            raise self._unknown()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((index, done))
        await done

    async def close(self) -> None:
        """Write pending changes, if the database works, and stop; idempotent."""
        if not self._is_closed:
            try:
                await self.wait_stored(self._newest.index)
            except OutcomeUnknownError:
                logger.warning("database closed with unwritten changes", extra=facts(stored_index=self.stored.index))
            self._is_closed = True
            self._release()

    def _write_next(self) -> None:
        if self._is_writing or self._is_closed or self._failure is not None or self.stored == self._newest:
            return
        transaction = Transaction(
            before=self.stored, after=self._newest, counters=self._counters, changes=self._changes, base=self._base
        )
        self._changes, self._base = {}, None
        self._is_writing = True
        self._begin(transaction)

    def _begin(self, transaction: Transaction) -> None:
        work = partial(self._database.write, transaction)
        self._executor.submit(work, Lane.SQL).add_done_callback(partial(self._handle_written, transaction))

    def _handle_written(self, transaction: Transaction, written: asyncio.Future[None]) -> None:
        error = written.exception()
        if isinstance(error, DatabaseLostError) and self._tries * RETRY_INTERVAL_MS < RETRY_MS_MAX:
            self._tries += 1
            if self._tries == 1:
                logger.warning("database unreachable, retrying", extra=facts(reason=str(error)))
            asyncio.get_running_loop().call_later(RETRY_INTERVAL_MS / 1000, self._begin, transaction)
        elif error is not None:
            self._fail(error)
        else:
            self._tries = 0
            self._is_writing = False
            self.transactions += 1
            self.stored = transaction.after  # the database now has these rows and this position, in one transaction
            self._release()
            self._write_next()

    def _fail(self, error: BaseException) -> None:
        self._failure = error if isinstance(error, StorageError) else StorageError(f"database: {error!r}")
        self._release()
        self._on_failure(self._failure)

    def _release(self) -> None:
        """Resolve the waiters whose index is stored, or all of them after a failure or close."""
        waiting, self._waiting = self._waiting, []
        ended = self._failure is not None or self._is_closed
        for index, done in waiting:
            if done.done():
                continue
            if index <= self.stored.index:
                done.set_result(None)
            elif ended:
                done.set_exception(self._unknown())
            else:
                self._waiting.append((index, done))

    def _unknown(self) -> OutcomeUnknownError:
        reason = "this node is closing" if self._failure is None else self._failure.message
        return OutcomeUnknownError(f"may have been done: committed, but not in this node's database ({reason})")
