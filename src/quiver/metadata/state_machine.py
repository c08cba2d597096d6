"""The metadata as a replicated state machine: committed batches in, state in memory, changes to listeners.

`apply` changes the state in memory immediately and passes the same changes to the database writer, so the database
lags but never differs. After a crash the state is loaded from the database. The driver then replays its log from its
newest snapshot; entries that the database already has are skipped by index and the rest are applied, so every command
is applied exactly once, whatever the positions of snapshot and database.

Nothing in the log ends a node. A command that is malformed, or that makes this program fail, is refused as
`bad_command` on every member and counted. One of a newer program, or one that raises the feature level above what this
program knows, is never skipped: `apply` stops before it.

It stops permanently and calls `on_failure` rather than continue with a database that belongs to another log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from quiver.errors import DecodeError, StorageError, UnknownVersionError, invariant
from quiver.features import LEVEL_MAX
from quiver.logs import facts
from quiver.metadata.apply import ApplyOutcome, apply
from quiver.metadata.commands import decode_command
from quiver.metadata.decision import refuse
from quiver.metadata.state import Change, Counters, LogPosition, MetadataState, View
from quiver.model import Index
from quiver.record import Batch

logger = logging.getLogger(__name__)

OUTCOMES_MAX = 65_536
"""Maximum number of kept outcomes; a proposer fetches its own one turn of the loop after it was applied."""


class ChangeListener(Protocol):
    """A receiver of changes: the database writer, the change log, the requests that created topics."""

    def add(self, changes: Sequence[Change], counters: Counters, position: LogPosition) -> None:
        """Receive the changes applied up to a position."""
        ...

    def replace(self, view: View) -> None:
        """Receive the whole state of a restored snapshot."""
        ...


class MetadataStateMachine:
    """The replicated state of the metadata group."""

    def __init__(
        self, state: MetadataState, *, on_failure: Callable[[StorageError], None], level_max: int = LEVEL_MAX
    ) -> None:
        self.level_max = level_max
        """The highest feature level that this program knows."""
        self.state = state
        """The state; only the replication driver changes it."""
        self._listeners: list[ChangeListener] = []
        self._on_failure = on_failure
        self._failure: StorageError | None = None
        self._outcomes: dict[Index, ApplyOutcome] = {}
        self._prepared: tuple[bytes, MetadataState] | None = None
        """A snapshot that `restore` will need, and what it says."""
        self.keeps_outcomes = False
        """Whether a proposer waits for an outcome."""
        self.on_skipped: Callable[[], None] | None = None
        """Called when the driver replayed only entries that the state has already: its own applied index has moved."""
        self.applied_commands = 0
        """Commands applied since the start of this process, refused ones included."""
        self.skipped_entries = 0
        """Replayed entries that the database had already."""
        self.bad_commands = 0
        """Commands refused since the start of this process because they are malformed or made this program fail."""
        self.defects = 0
        """How many of them made this program fail."""

    @property
    def applied_index(self) -> Index:
        """Return the index up to which the state reflects the log; after a restart it may be ahead of the driver's."""
        return self.state.position.index

    @property
    def failure(self) -> StorageError | None:
        """Return the error that stopped the state machine, if any."""
        return self._failure

    def add_listener(self, listener: ChangeListener) -> None:
        """Add a listener for all changes from now on."""
        self._listeners.append(listener)

    def apply(self, batches: Sequence[Batch]) -> None:
        """Apply committed batches in order; see `StateMachine.apply`."""
        changes: list[Change] = []
        before = self.state.position
        try:
            for batch in batches:
                if self._failure is not None:
                    break
                changes += self._apply_one(batch)
        finally:
            self._tell(changes, before)

    def _tell(self, changes: Sequence[Change], before: LogPosition) -> None:
        if self.state.position != before:
            for listener in self._listeners:
                listener.add(changes, self.state.counters, self.state.position)
        elif self.on_skipped is not None:
            self.on_skipped()

    def apply_steps(self, batches: Sequence[Batch]) -> Iterator[None]:  # noqa: ARG002 - commands are small
        """Return no steps: every command is applied at once."""
        return iter(())

    def restore_steps(self, state: bytes) -> Iterator[None]:
        """Decode a snapshot in small steps, so that `restore` of these bytes has little left to do; raises as it."""
        restored = MetadataState()
        try:
            yield from restored.decode_steps(state, level_max=self.level_max)
        except UnknownVersionError:
            raise
        except DecodeError as error:
            raise UnknownVersionError(error.message) from error
        self._prepared = (state, restored)

    def snapshot_steps(self) -> Iterator[bytes]:
        """Freeze the state; return the parts of `snapshot`, each made in a small step; raises as `snapshot`."""
        if self._failure is not None:
            raise self._failure
        return self.state.view().encode_steps()

    def snapshot(self) -> bytes:
        """Return the encoded state with its log position.

        Raises:
            StorageError: the state machine stopped; its state is older than the driver's applied index.
        """
        if self._failure is not None:
            raise self._failure
        return self.state.view().encode()

    def restore(self, state: bytes) -> None:
        """Replace the state by a snapshot, unless the state is as new; empty bytes mean the initial state.

        Raises:
            UnknownVersionError: this program cannot read the snapshot; the state is unchanged.
        """
        restored = self._take_restored(state)
        ours, theirs = self.state.counters.cluster_id, restored.counters.cluster_id
        if ours and theirs and ours != theirs:
            self._fail(StorageError(f"the database belongs to cluster {ours}, the log to cluster {theirs}"))
        elif restored.position.index > self.state.position.index:
            self.state = restored
            for listener in self._listeners:
                listener.replace(restored.view())
        elif self.on_skipped is not None:
            self.on_skipped()

    def _take_restored(self, state: bytes) -> MetadataState:
        """Return the decoded snapshot: that of `restore_steps`, or decoded now."""
        if self._prepared is None or self._prepared[0] is not state:
            for _ in self.restore_steps(state):
                pass
        assert self._prepared is not None, "the last step sets it"
        (_, restored), self._prepared = self._prepared, None
        return restored

    def pop_outcome(self, index: Index) -> ApplyOutcome | None:
        """Return and forget the outcome of the command at an index; None if it is not kept."""
        return self._outcomes.pop(index, None)

    def forget_outcomes(self) -> None:
        """Drop the outcomes that no proposer fetched."""
        self._outcomes.clear()

    def _apply_one(self, batch: Batch) -> Sequence[Change]:
        position, found = self.state.position, LogPosition(batch.header.index, batch.header.term)
        if found.index <= position.index:
            self._skip(found)
            return ()
        invariant(found.index == position.index + 1, "entries are applied one by one", at=position, found=found)
        try:
            command = decode_command(batch, level_max=self.level_max)
            outcome = ApplyOutcome() if command is None else apply(self.state, command, level_max=self.level_max)
            self.applied_commands += command is not None
        except UnknownVersionError as error:
            raise UnknownVersionError(f"the metadata log holds at index {found.index} {error.message}") from error
        except DecodeError as error:
            outcome = ApplyOutcome(refusal=refuse("bad_command", f"not done: {error.message}"))
        self._note(found.index, outcome)
        self.state.advance_to(found)
        return outcome.changes

    def _note(self, index: Index, outcome: ApplyOutcome) -> None:
        if outcome.refusal is not None and outcome.refusal.code == "bad_command":
            self.bad_commands += 1
            self.defects += outcome.is_defect
            logger.error("command refused", extra=facts(index=index, reason=outcome.refusal.message))
        if outcome.refusal is not None or outcome.result is not None:
            self._keep(index, outcome)

    def _skip(self, found: LogPosition) -> None:
        """Skip an entry that the database has; the last one must be the same entry, by its term."""
        self.skipped_entries += 1
        position = self.state.position
        if found.index == position.index and found.term != position.term:
            self._fail(
                StorageError(
                    f"the metadata database is at index {position.index} of term {position.term}, but the log has "
                    f"term {found.term} there: the database belongs to another log"
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
