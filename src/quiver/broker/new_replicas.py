"""Makes the files of new replicas, many in one durable step.

A new topic has many replicas on a node, and each would cost a dozen syncs by itself. The replicas that are requested
while a step is under way share the next one (`GroupFolders.make`): its syncs are the same however many they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from quiver.errors import DiskFullError, StorageError, UnavailableError
from quiver.model import GroupId
from quiver.raft import Configuration
from quiver.replication import Replicator
from quiver.storage import Executor, GroupFolders, Lane, is_out_of_space


class NewReplicas:
    """The new replicas of one node whose files are being made."""

    def __init__(self, folders: GroupFolders, replicator: Replicator, executor: Executor) -> None:
        self._folders = folders
        self._replicator = replicator
        self._executor = executor
        self._turn = asyncio.Lock()
        self._waiting: dict[GroupId, Callable[[str], None]] = {}
        self._outcomes: dict[GroupId, bool | StorageError | DiskFullError] = {}

    async def make(self, group: GroupId, first_members: Configuration | None) -> bool:
        """Make a member's files, not encrypted, and join its group; return False if it has a folder already.

        On disk after this returns True: its files and its marker. After an error the next attempt finds a folder, or
        starts from scratch: nothing was sent.

        Raises:
            StorageError: the files cannot be created.
            DiskFullError: there is no room for them.
            UnavailableError: not done; the step was cancelled.
        """
        self._waiting[group] = self._replicator.plan_files(first_members)
        async with self._turn:
            if group in self._waiting:
                wanted, self._waiting = self._waiting, {}
                self._outcomes.update(await self._make_all(wanted))
        outcome = self._outcomes.pop(group, None)
        if outcome is None:
            raise UnavailableError(f"not done: the files of group {group} were not made")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _make_all(
        self, wanted: dict[GroupId, Callable[[str], None]]
    ) -> dict[GroupId, bool | StorageError | DiskFullError]:
        try:
            made = await self._executor.submit(partial(self._folders.make, wanted), Lane.RECOVERY)
        except OSError as error:
            kind = DiskFullError if is_out_of_space(error) else StorageError
            failure = kind(f"not done: the files of new replicas cannot be made: {error}")
            return dict.fromkeys(wanted, failure)
        return {group: group in made for group in wanted}
