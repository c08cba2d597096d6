"""The state of a member on disk beside its log: term and vote, configurations, snapshots.

Decides *what* is saved; `member` decides when, and waits for it. Methods that block say so and run in an executor, one
at a time; the others belong to the event loop.

The saved state never runs ahead of the log. An entry is *settled* when it is committed and also durable in this
member's own log. Before that, a power loss may remove it: another entry at its index must not count as committed, and
the configuration that was in force without it must not be forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from quiver.errors import StorageError
from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, Entry
from quiver.replication.entries import KnownConfiguration
from quiver.replication.member_files import MemberFiles, Membership, encode_membership
from quiver.storage import StoredHardState, StoredSnapshot


class FileJobs:
    """Counts the jobs that are using a member's files, which must not be closed or removed before they end."""

    def __init__(self) -> None:
        self.are_over = False
        """Whether the files are being closed."""
        self._running = 0
        self._ended: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Count a job."""
        self._running += 1

    def end(self) -> None:
        """Count the end of a job."""
        self._running -= 1
        if not self._running and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def wait_ended(self) -> None:
        """Wait until no job is running; after that none may begin that only reads or saves a snapshot."""
        while self._running:
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended
        self.are_over = True


class Persistence:
    """The hard state and the snapshots of one member."""

    def __init__(self, files: MemberFiles) -> None:
        self._hard_state_file = files.hard_state
        self._snapshots = files.snapshots
        self._configurations = files.membership.configurations
        self._recover_until = files.membership.recover_until
        self._is_damaged = False
        self._is_joining = files.membership.is_joining
        self._term, self._vote = files.initial.term, files.initial.vote

    def set_vote(self, term: Term, vote: NodeId | None) -> None:
        """Set the term and vote of the next save."""
        self._term, self._vote = term, vote

    def add_configurations(self, entries: Sequence[Entry], *, first_index: Index, settled_index: Index) -> bool:
        """Add configurations to the next save, and return whether that must come before their entries reach the log.

        Those from `first_index` on are dropped, and those older than the last settled one, which stays: it is in force
        again if the later ones are truncated.
        """
        is_known = self._began_with(entries)
        known = [item for item in self._configurations if item.index < first_index]
        settled = sum(item.index <= settled_index for item in known)
        known = known[max(settled - 1, 0) :]
        for entry in entries:
            assert entry.configuration is not None, "only configuration entries are given"
            known.append(KnownConfiguration(entry.index, entry.term, entry.configuration))
        self._configurations = tuple(known)
        return not is_known

    def _began_with(self, entries: Sequence[Entry]) -> bool:
        """Return whether these entries only repeat the configuration with which the group began, as its first one does.

        If they are not saved, the next start finds the same members in force.
        """
        first, *others = self._configurations or (None,)
        if first is None or first.index or others:
            return False
        return all(entry.configuration == first.configuration for entry in entries)

    def reset_configurations(self, index: Index, term: Term, configuration: Configuration) -> None:
        """Replace all configurations of the next save by that of a snapshot."""
        self._configurations = (KnownConfiguration(index, term, configuration),)

    def clear_recovery(self) -> None:
        """Clear the recovery mark in the next save: no acknowledged entry is missing any more."""
        self._recover_until = None

    def clear_joining(self) -> None:
        """Clear the mark of a joining member in the next save: it has caught up."""
        self._is_joining = False

    def mark_damaged(self) -> None:
        """Mark the stored bytes as damaged in the next save, so that the next start verifies all of them."""
        self._is_damaged = True

    def configuration_at(self, index: Index) -> Configuration | None:
        """Return the configuration in force at a committed index; None if this new member has not received one yet."""
        return next((item.configuration for item in reversed(self._configurations) if item.index <= index), None)

    def configuration_from(self, index: Index, *, commit_index: Index) -> Configuration | None:
        """Return the configuration in force at a committed index or, if that is forgotten, the next one that is known.

        The next one is committed, too. A member that starts with it receives those in between with their entries.
        """
        next_known = next((item for item in self._configurations if index < item.index <= commit_index), None)
        return self.configuration_at(index) or (next_known.configuration if next_known is not None else None)

    def plan_save(self, settled_index: Index) -> Callable[[], None]:
        """Return blocking work that makes the current term, vote and configurations durable."""
        membership = Membership(self._configurations, self._recover_until, self._is_damaged, self._is_joining)
        state = StoredHardState(
            term=self._term, vote=self._vote, commit_index=settled_index, membership=encode_membership(membership)
        )
        return partial(self._hard_state_file.save, state)

    def save_snapshot(self, snapshot: StoredSnapshot) -> Index:
        """Save a snapshot; blocks. Return the last index of the oldest one that is kept."""
        self._snapshots.save(snapshot)
        return Index(int(self._snapshots.names()[0][-20:]))

    def save_checkpoint(self, checkpoint: StoredSnapshot) -> None:
        """Replace the checkpoint; blocks."""
        self._snapshots.save_checkpoint(checkpoint)

    def load_snapshot(self, needed_index: Index) -> StoredSnapshot | None:
        """Return the oldest snapshot that covers `needed_index`; blocks."""
        return self._snapshots.load_from(needed_index)


def as_storage_error(error: BaseException) -> StorageError:
    """Return the failure of a save as the `StorageError` that stops the node; raise any other error again."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"hard state or snapshot cannot be saved: {error}")
    raise error
