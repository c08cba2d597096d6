"""Snapshots, trims and checkpoints of one member: they bound its log and its replay after a restart.

There are three ways to save state, for two kinds of groups:
- a *snapshot* replaces everything up to its index, so that the log before it can be removed. It is for groups whose log
  only exists to build their state (the metadata);
- a *trim* removes the start of a log that *is* the group's content (a partition's records). The state it saves belongs
  exactly to the log's new start, so that a member that installs it receives every kept entry by ordinary appends. This
  state may be blank, because the caller guarantees that an entry after the new start replaces the whole state;
- a *checkpoint* only shortens replay after a restart. Nothing depends on it: see `member_files`.

Only one of them runs at a time. The saved state is always applied, hence committed, and durable in this member's own
log. On a full disk they are not done (`DiskFullError`) and leave nothing: the log keeps what they would have replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from quiver.errors import invariant
from quiver.model import Index, Offset, Term
from quiver.raft import Configuration, Raft
from quiver.replication.applier import Applier
from quiver.replication.member_files import (
    SnapshotState,
    decode_snapshot_state,
    encode_snapshot_state,
    join_snapshot_state,
)
from quiver.replication.persistence import Persistence
from quiver.storage import Log, StoredSnapshot
from quiver.tasks import gather_in_steps

MakeState = Callable[[Index, Offset], bytes]
"""Returns the state of a machine that has applied nothing up to this index, with records up to this offset removed."""


class AppliedState(msgspec.Struct, frozen=True, kw_only=True):
    """The state to save, in the parts in which it was encoded."""

    last_index: Index
    last_term: Term
    end_offset: Offset
    configuration: Configuration
    parts: list[bytes]

    def join(self) -> StoredSnapshot:
        """Return it as it is saved. To be called where it is saved: joining many MB would hold the event loop."""
        state = join_snapshot_state(self.configuration, self.parts)
        return StoredSnapshot(
            last_index=self.last_index, last_term=self.last_term, end_offset=self.end_offset, state=state
        )


class LogCompactor:
    """Save the state of one member and remove old entries from its log."""

    def __init__(
        self,
        *,
        raft: Raft,
        log: Log,
        applier: Applier,
        persistence: Persistence,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        run_with_room: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_saved: Callable[[Index], None],
    ) -> None:
        self._raft = raft
        self._log = log
        self._applier = applier
        self._persistence = persistence
        self._run = run
        self._run_with_room = run_with_room
        self._on_saved = on_saved
        self._turn = asyncio.Lock()
        self.checkpoint_index = Index(0)
        """Last index of the newest checkpoint since the process started."""

    async def take_snapshot(self) -> None:
        """Save the state, and remove from the log what the previous snapshot covers."""
        async with self._turn:
            applied = await self._describe_now()
            if applied is None:
                return
            oldest = await self._run(lambda: self._persistence.save_snapshot(applied.join()))
            self._on_saved(applied.last_index)
            await self._log.truncate_prefix(Index(oldest + 1))
            self._raft.compacted(self._log.first_index)

    async def checkpoint(self) -> None:
        """Save the current state, so that a restart replays only the entries after it."""
        async with self._turn:
            await self._checkpoint()

    async def trim(self, first_index: Index, make_state: MakeState) -> bool:
        """Remove the whole segments below `first_index`. On disk before that: a snapshot at the new start.

        A checkpoint comes first, so that the state survives damage to either of the two. Return whether it was done: a
        new member that has not received its group's configuration yet cannot make a snapshot.
        """
        async with self._turn:
            await self._log.roll_if_old()
            start = self._log.start_below(first_index)
            last_index = Index(start.first_index - 1)
            if start.first_index == self._log.first_index:
                return True
            invariant(first_index <= self._applier.index + 1, "only applied entries are removed", index=first_index)
            commit_index = self._raft.commit_index
            configuration = self._persistence.configuration_from(last_index, commit_index=commit_index)
            if configuration is None:
                return False
            machine = make_state(last_index, start.first_offset)
            snapshot = StoredSnapshot(
                last_index=last_index,
                last_term=start.previous_term,
                end_offset=start.first_offset,
                state=encode_snapshot_state(SnapshotState(configuration, machine)),
            )
            await self._checkpoint()
            await self._run(partial(self._persistence.save_snapshot, snapshot))
            await self._log.truncate_prefix(start.first_index)
            self._raft.compacted(self._log.first_index)
            return True

    async def replace_log(self, snapshot: StoredSnapshot) -> None:
        """Replace the log by a received snapshot. On disk first: its file, so that `member_files` finishes the work.

        Waits for room if the disk is full.

        Raises:
            StorageError: the disk failed.
        """
        configuration = decode_snapshot_state(snapshot.state).configuration
        self._persistence.reset_configurations(snapshot.last_index, snapshot.last_term, configuration)
        await self._run_with_room(partial(self._persistence.save_snapshot, snapshot))
        await self._run_with_room(self._persistence.plan_save(self._raft.applicable_index))
        await self._log.reset(
            first_index=Index(snapshot.last_index + 1),
            first_offset=snapshot.end_offset,
            previous_term=snapshot.last_term,
        )

    async def _checkpoint(self) -> None:
        if self._applier.index <= self.checkpoint_index:
            return
        applied = await self._describe_now()
        if applied is not None:
            await self._run(lambda: self._persistence.save_checkpoint(applied.join()))
            self.checkpoint_index = applied.last_index
            self._on_saved(applied.last_index)

    async def _describe_now(self) -> AppliedState | None:
        """Return the applied state; None if there is none, or it is in doubt, or a new member has no configuration."""
        if self._applier.is_torn:
            return None
        last_index = self._applier.index
        last_term = self._raft.term_at(last_index)
        end_offset = self._log.offset_after(last_index)
        configuration = self._persistence.configuration_at(last_index)
        if last_term is None or end_offset is None or configuration is None or not last_index:
            return None
        parts = await gather_in_steps(self._applier.snapshot())  # frozen here: entries are applied meanwhile
        return AppliedState(
            last_index=last_index, last_term=last_term, end_offset=end_offset, configuration=configuration, parts=parts
        )
