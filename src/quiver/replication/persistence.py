"""What a member keeps on disk beside its log: term and vote, configurations, snapshots.

Decides *what* is saved; `member` decides when and waits for it. The methods that block say so and run in
an executor, one at a time; the others belong to the event loop.

What is saved here never runs ahead of the log. An entry is *settled* if it is committed and durable in this member's
own log, too: before that, power may be lost, and what then lies in its place must not be taken for committed, nor
may the configuration be forgotten that was in force without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quiver.errors import StorageError
from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, Entry
from quiver.replication.entries import KnownConfiguration
from quiver.replication.opening import MemberFiles, Membership, encode_membership
from quiver.storage import HardState, Snapshot


class Persistence:
    """The hard state and the snapshots of one member."""

    def __init__(self, files: MemberFiles) -> None:
        self._hard_state_file = files.hard_state
        self._snapshots = files.snapshots
        self._configurations = files.membership.configurations
        self._recover_until = files.membership.recover_until
        self._is_suspect = False
        self._term, self._vote = files.initial.term, files.initial.vote

    def set_vote(self, term: Term, vote: NodeId | None) -> None:
        """Let the next save hold this term and vote."""
        self._term, self._vote = term, vote

    def add_configurations(self, entries: Sequence[Entry], *, first_index: Index, settled_index: Index) -> None:
        """Let the next save hold new configurations, and none that is cut off at `first_index` or long replaced."""
        known = [item for item in self._configurations if item.index < first_index]
        settled = sum(item.index <= settled_index for item in known)
        known = known[max(settled - 1, 0) :]
        for entry in entries:
            assert entry.configuration is not None, "only entries that bring one are given"
            known.append(KnownConfiguration(entry.index, entry.term, entry.configuration))
        self._configurations = tuple(known)

    def stand_on(self, index: Index, term: Term, configuration: Configuration) -> None:
        """Let the next save know one configuration only: a snapshot's."""
        self._configurations = (KnownConfiguration(index, term, configuration),)

    def clear_recovery(self) -> None:
        """Let the next save say that nothing is missing any more."""
        self._recover_until = None

    def suspect(self) -> None:
        """Let the next save say that stored bytes are bad, so that the next opening looks at all of them."""
        self._is_suspect = True

    def configuration_at(self, index: Index) -> Configuration | None:
        """Return the configuration that was in force at a committed index; None if a new member cannot know it yet."""
        return next((item.configuration for item in reversed(self._configurations) if item.index <= index), None)

    def configuration_from(self, index: Index, *, commit_index: Index) -> Configuration | None:
        """Return the configuration in force at a committed index or, if that is forgotten, the next one that is known.

        That one is committed, too: whoever starts with it is told of those between by their entries, as ever.
        """
        next_known = next((item for item in self._configurations if index < item.index <= commit_index), None)
        return self.configuration_at(index) or (next_known.configuration if next_known is not None else None)

    def plan_save(self, settled_index: Index) -> Callable[[], None]:
        """Return work that blocks: it makes term, vote and configurations, as they are now, durable."""
        membership = encode_membership(Membership(self._configurations, self._recover_until, self._is_suspect))
        state = HardState(term=self._term, vote=self._vote, commit_index=settled_index, membership=membership)
        return partial(self._hard_state_file.save, state)

    def save_snapshot(self, snapshot: Snapshot) -> Index:
        """Save a snapshot; blocks. Returns the last index of the oldest one that is kept."""
        self._snapshots.save(snapshot)
        return Index(int(self._snapshots.names()[0][-20:]))

    def save_checkpoint(self, checkpoint: Snapshot) -> None:
        """Replace the checkpoint; blocks."""
        self._snapshots.save_checkpoint(checkpoint)

    def load_snapshot(self, needed_index: Index) -> Snapshot | None:
        """Return the oldest snapshot that reaches `needed_index`; blocks."""
        return self._snapshots.load_from(needed_index)

    def close(self) -> None:
        """Close the files; idempotent."""
        self._hard_state_file.close()


def as_storage_error(error: BaseException) -> StorageError:
    """Return what a save failed with as what stops the node; anything but a failed disk is raised again."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"hard state or snapshot: {error}")
    raise error
