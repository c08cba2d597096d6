"""Write applied changes to the database, in order, one transaction at a time.

While a transaction runs in the executor, later changes accumulate, the newest row of each key, and form the next
transaction: under load, more commands share one. Beyond `CHANGES_MAX` pending rows, those of removed clients would
grow without end in a long outage: the next transaction then writes all rows instead. The event loop never blocks.

The log is the durable copy of the metadata, so the loss of a database server loses nothing and stops nothing: the
writer retries it for as long as it takes, and meanwhile nothing waits for the database (`outage` says since when and
why). A server that comes back older than this node left it, because its crash dropped its last transactions, gets all
rows again. Any other failure is final, like a failed sync (R5): nothing more is written, `on_failure` is called once,
and the node must stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec

from quiver.backoff import Backoff
from quiver.clock import Clock, Rng
from quiver.errors import OutcomeUnknownError, StorageError
from quiver.logs import facts
from quiver.metadata import rows
from quiver.metadata.database import DatabaseLostError, DatabaseOutdatedError, Transaction
from quiver.metadata.rows import AnyRow
from quiver.metadata.state import Change, Counters, LogPosition, View
from quiver.model import Index
from quiver.storage import Executor, Lane

logger = logging.getLogger(__name__)

RETRY_MS_MIN, RETRY_MS_MAX = 100, 5_000
"""Shortest and longest wait before an unreachable database server is tried again."""
CHANGES_MAX = 100_000
"""Changed rows, removed ones included, that wait for a transaction; beyond it, all rows are written instead."""
STALL_MS = 2_000
"""How long a transaction runs before its server counts as unreachable: a stopped one accepts and never answers."""
INTERRUPT_MS = 10_000
"""How long a transaction runs before its connection is broken off, so that it is tried on a new one."""


class TransactionSink(Protocol):
    """The target of transactions: a database."""

    def attach(self) -> tuple[Counters, LogPosition]:
        """Create or migrate the tables; return what the database reflects; blocks. See `Database.attach`."""
        ...

    def write(self, transaction: Transaction) -> None:
        """Commit a transaction; blocks. See `Database.write`."""
        ...

    def interrupt(self) -> None:
        """Break off the running call. See `Database.interrupt`."""
        ...


class DatabaseOutage(msgspec.Struct, frozen=True):
    """The time since when, and the reason why, a database server has been unreachable."""

    since_ms: float
    reason: str


class DatabaseWriter:
    """Writes the changes of one node to its database. Used only in the event loop."""

    def __init__(
        self,
        database: TransactionSink,
        executor: Executor,
        *,
        stored: LogPosition | None,
        view: Callable[[], View],
        clock: Clock,
        rng: Rng,
        on_failure: Callable[[StorageError], None],
    ) -> None:
        """Write to `database`, which reflects the position `stored`; None: unknown, it was unreachable so far."""
        self.stored = stored or LogPosition()
        """The log position that the database reflects, as far as it is known."""
        self.transactions = 0
        """Transactions committed since the start of this process."""
        self.outage: DatabaseOutage | None = None
        """The outage of the database server, while it lasts."""
        self._database = database
        self._executor = executor
        self._view = view
        self._clock = clock
        self._backoff = Backoff(rng, first_ms=RETRY_MS_MIN, max_ms=RETRY_MS_MAX)
        self._on_failure = on_failure
        self._newest = self.stored
        self._counters = Counters()
        self._changes: dict[tuple[rows.Table, Any], AnyRow | None] = {}
        self._base: View | None = None
        self._is_writing = False
        self._is_closed = False
        self._failure: StorageError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[Index, asyncio.Future[None]]] = []
        if stored is None:
            self._is_writing = True  # the attachment comes first
            self._handle_lost(self._attach, "the database was unreachable when the node started")

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
        if len(self._changes) > CHANGES_MAX:
            self._base, self._changes = self._view(), {}
        self._counters, self._newest = counters, position
        self._write_next()

    def replace(self, view: View) -> None:
        """Replace all rows by a restored snapshot."""
        self._base = view
        self._changes.clear()
        self._counters, self._newest = view.counters, view.position
        self._write_next()

    async def wait_stored(self, index: Index) -> None:
        """Return once the database has everything up to `index`, or while it is unreachable: the log has it anyway.

        Raises:
            OutcomeUnknownError: the database failed, or the node closes, before that.
        """
        if self.stored.index >= index:
            return
        if self._failure is not None or self._is_closed:
            raise self._unknown()
        if self.outage is not None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((index, done))
        await done

    async def close(self) -> None:
        """Write pending changes, if the database works, and stop; idempotent."""
        if not self._is_closed:
            with suppress(OutcomeUnknownError):
                await self.wait_stored(self._newest.index)
            if self.stored != self._newest:
                logger.warning("database closed with unwritten changes", extra=facts(stored_index=self.stored.index))
            self._is_closed = True
            self._stop_timer()
            if self.outage is not None:
                self._database.interrupt()  # the executor's thread must not outlive the node
            self._release()

    # -- transactions ----------------------------------------------------------------------------

    def _write_next(self) -> None:
        if self._is_writing or self._is_closed or self._failure is not None or self.stored == self._newest:
            return
        transaction = Transaction(
            before=self.stored, after=self._newest, counters=self._counters, changes=self._changes, base=self._base
        )
        self._changes, self._base = {}, None
        self._is_writing = True
        self._write(transaction)

    def _write(self, transaction: Transaction) -> None:
        work = self._executor.submit(partial(self._database.write, transaction), Lane.SQL)
        self._start_timer(STALL_MS, self._handle_stall)
        work.add_done_callback(partial(self._handle_written, transaction))

    def _handle_written(self, transaction: Transaction, written: asyncio.Future[None]) -> None:
        self._stop_timer()
        if self._is_closed:
            return
        error = written.exception()
        if isinstance(error, DatabaseLostError):
            self._handle_lost(partial(self._write, transaction), error.message)  # its outcome is unknown: the same one
        elif isinstance(error, DatabaseOutdatedError):
            logger.warning(
                "database lost its newest transactions, writing all rows again",
                extra=facts(found_index=error.found.index, stored_index=self.stored.index),
            )
            self._rewrite(error.found)
        elif error is not None:
            self._fail(error)
        else:
            self.transactions += 1
            self._handle_stored(transaction.after)  # the database has these rows and this position, in one transaction

    def _attach(self) -> None:
        """Find out what a database reflects that was unreachable when the node started."""
        work = self._executor.submit(self._database.attach, Lane.SQL)
        self._start_timer(STALL_MS, self._handle_stall)
        work.add_done_callback(self._handle_attached)

    def _handle_attached(self, attached: asyncio.Future[tuple[Counters, LogPosition]]) -> None:
        self._stop_timer()
        if self._is_closed:
            return
        error = attached.exception()
        if isinstance(error, DatabaseLostError):
            self._handle_lost(self._attach, error.message)
        elif error is not None:
            self._fail(error)
        else:
            self._compare(*attached.result())

    def _compare(self, counters: Counters, found: LogPosition) -> None:
        """Continue from the position of a database that was unreachable when the node started."""
        ours = self._view().counters.cluster_id
        if found.index > self._newest.index:
            # The log is still being replayed: what the database has was committed.
            reason = f"the database is at index {found.index}, the replayed log only at {self._newest.index}"
            self._handle_lost(self._attach, reason)
        elif ours and counters.cluster_id and ours != counters.cluster_id:
            self._fail(StorageError(f"the database belongs to cluster {counters.cluster_id}, the log to {ours}"))
        elif found == self._newest:
            self._changes, self._base = {}, None
            self._handle_stored(found)
        else:
            self._rewrite(found)

    def _rewrite(self, found: LogPosition) -> None:
        """Replace all rows of a database that is at the position `found`."""
        view = self._view()
        self.stored, self._newest, self._counters = found, view.position, view.counters
        self._changes, self._base = {}, view
        self._is_writing = False
        self._write_next()

    def _handle_stored(self, position: LogPosition) -> None:
        if self.outage is not None:
            logger.warning("database reachable again", extra=facts(index=position.index))
            self.outage = None
        self._backoff.reset()
        self._is_writing = False
        self.stored = position
        self._release()
        self._write_next()

    # -- outages ---------------------------------------------------------------------------------

    def _handle_lost(self, retry: Callable[[], None], reason: str) -> None:
        self._begin_outage(reason)
        self._start_timer(self._backoff.next_ms(), retry)

    def _handle_stall(self) -> None:
        self._begin_outage(f"the database has not answered for {STALL_MS} ms")
        self._start_timer(INTERRUPT_MS - STALL_MS, self._database.interrupt)

    def _begin_outage(self, reason: str) -> None:
        """Let nothing wait for the database any longer."""
        if self.outage is None:
            logger.warning("database unreachable, serving from the log; retrying", extra=facts(reason=reason))
            self.outage = DatabaseOutage(self._clock.monotonic_ms(), reason)
        else:
            self.outage = DatabaseOutage(self.outage.since_ms, reason)
        self._release()

    def _start_timer(self, delay_ms: float, action: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, error: BaseException) -> None:
        self._failure = error if isinstance(error, StorageError) else StorageError(f"database: {error!r}")
        self._release()
        self._on_failure(self._failure)

    def _release(self) -> None:
        """Resolve the waiters whose index is stored, or all of them in an outage, after a failure or close."""
        waiting, self._waiting = self._waiting, []
        ended = self._failure is not None or self._is_closed
        for index, done in waiting:
            if done.done():
                continue
            if index <= self.stored.index:
                done.set_result(None)
            elif ended:
                done.set_exception(self._unknown())
            elif self.outage is not None:
                done.set_result(None)
            else:
                self._waiting.append((index, done))

    def _unknown(self) -> OutcomeUnknownError:
        reason = "this node is closing" if self._failure is None else self._failure.message
        return OutcomeUnknownError(f"may have been done: committed, but not in this node's database ({reason})")
