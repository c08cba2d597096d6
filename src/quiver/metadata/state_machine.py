"""The metadata as the replication driver's state machine: committed batches in, state in memory, changes onward.

The state in memory and the database are the same thing at two moments: `apply` changes the first at once, and hands
the very same changes to the second. After a crash the state is what the database held. The driver then replays its
log from its newest snapshot on; what the database has already is skipped by its index, and the rest is applied: every
command exactly once, whatever the driver's snapshot and the database's position are.

It stops for good, telling `on_failure`, rather than skip what it cannot read, or go on with a database that belongs to
another log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quiver.errors import DecodeError, StorageError, invariant
from quiver.metadata.apply import ApplyOutcome, apply
from quiver.metadata.commands import decode_command
from quiver.metadata.state import Change, Counters, LogPosition, MetadataState, View
from quiver.model import Index
from quiver.record import Batch

OUTCOMES_MAX = 65_536
"""How many outcomes are kept for proposers, who fetch theirs in the turn of the loop after it was applied."""


class ChangeListener(Protocol):
    """Whoever is told what has changed: the database, and those who watch."""

    def add(self, changes: Sequence[Change], counters: Counters, position: LogPosition) -> None:
        """Take what was applied up to a position."""
        ...

    def replace(self, view: View) -> None:
        """Take a whole new state."""
        ...


class MetadataStateMachine:
    """The replicated state of the managers."""

    def __init__(self, state: MetadataState, *, on_failure: Callable[[StorageError], None]) -> None:
        self._state = state
        self._listeners: list[ChangeListener] = []
        self._on_failure = on_failure
        self._failure: StorageError | None = None
        self._outcomes: dict[Index, ApplyOutcome] = {}
        self.keeps_outcomes = False
        """Whether somebody waits for outcomes."""
        self.on_skipped: Callable[[], None] | None = None
        """Called when the driver replayed only what the state has already: its own applied index has moved."""
        self.applied_commands = 0
        """How many commands this life has applied, refused ones included."""
        self.skipped_entries = 0
        """How many entries the database had already."""

    @property
    def state(self) -> MetadataState:
        """Return the state; only the driver changes it."""
        return self._state

    @property
    def failure(self) -> StorageError | None:
        """Return what stopped it, if anything has."""
        return self._failure

    def add_listener(self, listener: ChangeListener) -> None:
        """Let somebody be told what changes from now on."""
        self._listeners.append(listener)

    def apply(self, batches: Sequence[Batch]) -> None:
        """Take committed batches in order."""
        changes: list[Change] = []
        before = self._state.position
        for batch in batches:
            if self._failure is not None:
                break
            changes += self._apply_one(batch)
        if self._state.position != before:
            for listener in self._listeners:
                listener.add(changes, self._state.counters, self._state.position)
        elif self.on_skipped is not None:
            self.on_skipped()

    def snapshot(self) -> bytes:
        """Return the state, with the position that it stands for.

        Raises:
            StorageError: it stopped; its state is not what the driver thinks it is.
        """
        if self._failure is not None:
            raise self._failure
        return self._state.view().encode()

    def restore(self, state: bytes) -> None:
        """Become the state in a snapshot, unless what is here is as new; empty bytes stand for the beginning."""
        try:
            restored = MetadataState.decode(state)
        except DecodeError as error:
            self._fail(StorageError(error.message))
            return
        ours, theirs = self._state.counters.cluster_id, restored.counters.cluster_id
        if ours and theirs and ours != theirs:
            self._fail(StorageError(f"the database belongs to cluster {ours}, the log to cluster {theirs}"))
        elif restored.position.index > self._state.position.index:
            self._state = restored
            for listener in self._listeners:
                listener.replace(restored.view())
        elif self.on_skipped is not None:
            self.on_skipped()

    def pop_outcome(self, index: Index) -> ApplyOutcome | None:
        """Return, once, what came of the command at an index; None if that is forgotten."""
        return self._outcomes.pop(index, None)

    def forget_outcomes(self) -> None:
        """Drop what nobody fetched."""
        self._outcomes.clear()

    def _apply_one(self, batch: Batch) -> Sequence[Change]:
        position, found = self._state.position, LogPosition(batch.header.index, batch.header.term)
        if found.index <= position.index:
            self._skip(found)
            return ()
        invariant(found.index == position.index + 1, "entries are applied one by one", at=position, found=found)
        try:
            command = decode_command(batch)
        except DecodeError as error:
            self._fail(StorageError(f"the metadata's log holds at index {found.index} {error.message}"))
            return ()
        changes: Sequence[Change] = ()
        if command is not None:
            outcome = apply(self._state, command)
            changes = outcome.changes
            self.applied_commands += 1
            self._keep(found.index, outcome)
        self._state.advance_to(found)
        return changes

    def _skip(self, found: LogPosition) -> None:
        """Pass over what the database has; its last entry must be the log's."""
        self.skipped_entries += 1
        position = self._state.position
        if found.index == position.index and found.term != position.term:
            self._fail(
                StorageError(
                    f"the metadata's database stands for entry {position.index} of term {position.term}, and the log "
                    f"has one of term {found.term} there: they do not belong together"
                )
            )

    def _keep(self, index: Index, outcome: ApplyOutcome) -> None:
        if self.keeps_outcomes:
            self._outcomes[index] = outcome
            if len(self._outcomes) > OUTCOMES_MAX:
                del self._outcomes[next(iter(self._outcomes))]

    def _fail(self, error: StorageError) -> None:
        self._failure = error
        self._on_failure(error)
