"""Apply committed entries to the state machine, in order, and track how far that has come.

Entries that are committed and durable here are applied in the event loop, from memory where the log still caches
them; the rest is read from disk first. A restored snapshot moves the applier ahead immediately.

An entry or a snapshot that only a newer program can read is never skipped: applying stops before it (`unknown`), and
the same files continue there with a newer program. Any other error of the state machine leaves the state in doubt
(`is_torn`): it is not saved any more, and the member is reopened from its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from quiver.errors import StorageError, TrimmedError, UnavailableError, UnknownVersionError
from quiver.model import GroupId, Index
from quiver.record import Batch
from quiver.replication.interfaces import Host, StateMachine
from quiver.storage import Log
from quiver.tasks import run_in_steps

APPLY_BYTES_MAX = 1024 * 1024
"""Most bytes passed to the state machine in one call, which bounds how long the event loop is held."""


DONE = object()
"""Stands for a step that does not exist."""


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
        self._is_stopped = False

    def advance(self, end_index: Index) -> None:
        """Apply all entries below `end_index`, now or as soon as they are read."""
        self._end_index = max(self._end_index, end_index)
        self._apply()

    async def prepare_restore(self, state: bytes) -> None:
        """Do most of the work of `restore` without holding the event loop."""
        await prepare_restore(self._machine, state)

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

    def snapshot(self) -> Iterator[bytes]:
        """Freeze the state after everything up to and including `index`; return its bytes in parts."""
        return self._machine.snapshot_steps()

    def stop(self) -> None:
        """Apply nothing more: the member is closing. Idempotent."""
        self._is_stopped = True

    def _apply(self) -> None:
        end_index = self._end_index
        while self.index + 1 < end_index and not self._is_reading and not self._is_stopped and self.unknown is None:
            first_index = Index(self.index + 1)
            batches = self._log.read_entries_nowait(first_index, end_index=end_index, bytes_max=APPLY_BYTES_MAX)
            if batches is None:
                self._is_reading = True
                self._host.spawn(self._group, self._read, first_index, end_index)
                return
            steps = self._machine.apply_steps(batches)
            try:
                needs_steps = next(steps, DONE) is not DONE
            except Exception:  # noqa: BLE001 - it only prepares: `apply` says what is wrong with a batch
                needs_steps = False
            if needs_steps:
                self._is_reading = True
                self._host.spawn(self._group, self._apply_later, batches, steps)
                return
            self._apply_batches(batches)

    async def _apply_later(self, batches: list[Batch], steps: Iterator[None]) -> None:
        """Apply batches that need much work, without holding the event loop."""
        with suppress(Exception):
            await run_in_steps(steps)
        self._is_reading = False
        if self._is_stopped:
            return
        if self.index + 1 == batches[0].header.index:  # else a snapshot was restored meanwhile
            self._apply_batches(batches)
        self._apply()

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
        except UnavailableError:
            return  # the log is closed, and with it this member
        except StorageError as error:
            self._on_unreadable(error)
            return
        await self._apply_later(batches, self._machine.apply_steps(batches))


async def prepare_restore(machine: StateMachine, state: bytes) -> None:
    """Do most of the work of `Applier.restore` without holding the event loop."""
    with suppress(UnknownVersionError):  # `restore` reports it
        await run_in_steps(machine.restore_steps(state))
