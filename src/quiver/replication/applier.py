"""Apply committed entries to the state machine, in order, and track how far that has come.

Entries that are committed and durable here are applied in the event loop, from memory where the log still caches
them; the rest is read from disk first. A restored snapshot moves the applier ahead immediately.

An entry or a snapshot that only a newer program can read is never skipped: applying stops before it (`unknown`), and
the same files continue there with a newer program. Any other error of the state machine leaves the state in doubt
(`is_torn`): it is not saved any more, and the member is reopened from its files.
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.errors import StorageError, TrimmedError, UnknownVersionError
from quiver.model import GroupId, Index
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
        group: GroupId,
        host: Host,
        applied_index: Index,
        on_applied: Callable[[Index], None],
        on_unknown: Callable[[UnknownVersionError], None],
        on_unreadable: Callable[[StorageError], None],
    ) -> None:
        self.index = applied_index
        self.unknown: UnknownVersionError | None = None
        """Why applying has stopped: a newer program wrote what comes next."""
        self.is_torn = False
        """Whether the state machine failed in the middle of its work."""
        self._group = group
        self._machine = machine
        self._log = log
        self._host = host
        self._on_applied = on_applied
        self._on_unknown = on_unknown
        self._on_unreadable = on_unreadable
        self._end_index = Index(applied_index + 1)
        self._is_reading = False

    def advance(self, end_index: Index) -> None:
        """Apply all entries below `end_index`, now or as soon as they are read."""
        self._end_index = max(self._end_index, end_index)
        self._apply()

    def restore(self, state: bytes, index: Index) -> None:
        """Replace the state by a snapshot of everything up to and including `index`."""
        try:
            self._machine.restore(state)
        except UnknownVersionError as error:
            self._stop(error)
            return
        self.unknown = None
        self.index = index
        self._end_index = max(self._end_index, Index(index + 1))

    def snapshot(self) -> bytes:
        """Return the state after everything up to and including `index`."""
        return self._machine.snapshot()

    def _apply(self) -> None:
        end_index = self._end_index
        while self.index + 1 < end_index and not self._is_reading and self.unknown is None:
            first_index = Index(self.index + 1)
            batches = self._log.read_entries_nowait(first_index, end_index=end_index, bytes_max=APPLY_BYTES_MAX)
            if batches is None:
                self._is_reading = True
                self._host.spawn(self._group, self._read(first_index, end_index))
                return
            self._apply_batches(batches)

    def _apply_batches(self, batches: list[Batch]) -> None:
        try:
            self._machine.apply(batches)
        except UnknownVersionError as error:
            if self._machine.applied_index > self.index:
                self.index = self._machine.applied_index
                self._on_applied(self.index)
            self._stop(error)
        except Exception:
            self.is_torn = True
            raise
        else:
            self.index = batches[-1].header.index
            self._on_applied(self.index)

    def _stop(self, error: UnknownVersionError) -> None:
        self.unknown = error
        self._on_unknown(error)

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
