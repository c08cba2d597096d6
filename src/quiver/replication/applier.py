"""Apply committed entries to the state machine, in order, and track how far that has come.

Entries that are committed and durable here are applied in the event loop, from memory where the log still caches
them; the rest is read from disk first. A restored snapshot moves the applier ahead immediately.
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.errors import StorageError, TrimmedError
from quiver.model import Index
from quiver.record import Batch
from quiver.replication.interfaces import Host, StateMachine
from quiver.storage import Log

APPLY_BYTES_MAX = 1024 * 1024
"""Most bytes passed to the state machine in one call, which bounds how long the event loop is held."""


class Applier:
    """Apply the log of one member to its state machine."""

    def __init__(
        self,
        machine: StateMachine,
        log: Log,
        *,
        host: Host,
        applied_index: Index,
        on_applied: Callable[[Index], None],
        on_unreadable: Callable[[StorageError], None],
    ) -> None:
        self.index = applied_index
        self._machine = machine
        self._log = log
        self._host = host
        self._on_applied = on_applied
        self._on_unreadable = on_unreadable
        self._end_index = Index(applied_index + 1)
        self._is_reading = False

    def advance(self, end_index: Index) -> None:
        """Apply all entries below `end_index`, now or as soon as they are read."""
        self._end_index = max(self._end_index, end_index)
        self._apply()

    def restore(self, state: bytes, index: Index) -> None:
        """Replace the state by a snapshot of everything up to and including `index`."""
        self._machine.restore(state)
        self.index = index
        self._end_index = max(self._end_index, Index(index + 1))

    def snapshot(self) -> bytes:
        """Return the state after everything up to and including `index`."""
        return self._machine.snapshot()

    def _apply(self) -> None:
        end_index = self._end_index
        while self.index + 1 < end_index and not self._is_reading:
            first_index = Index(self.index + 1)
            batches = self._log.read_entries_nowait(first_index, end_index=end_index, bytes_max=APPLY_BYTES_MAX)
            if batches is None:
                self._is_reading = True
                self._host.spawn(self._read(first_index, end_index))
                return
            self._apply_batches(batches)

    def _apply_batches(self, batches: list[Batch]) -> None:
        self._machine.apply(batches)
        self.index = batches[-1].header.index
        self._on_applied(self.index)

    async def _read(self, first_index: Index, end_index: Index) -> None:
        try:
            batches = await self._log.read_entries(first_index, end_index=end_index, bytes_max=APPLY_BYTES_MAX)
        except TrimmedError:
            self._is_reading = False  # a snapshot has replaced the log; it is restored here next
            return
        except StorageError as error:
            self._on_unreadable(error)
            return
        self._is_reading = False
        if self.index + 1 == first_index:  # else a snapshot was restored during the read
            self._apply_batches(batches)
        self._apply()
