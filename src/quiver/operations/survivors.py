"""What stopped nodes have: for each Raft group on their disks, how far its log goes and who its members are.

Opens the files with the same code as a restart of the node, which also cuts a torn tail as a restart does; it changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

import msgspec

from quiver.clock import Clock, SystemClock
from quiver.config import Settings
from quiver.errors import ConfigError, DecodeError, StorageError
from quiver.metadata import METADATA_GROUP
from quiver.metadata.apply import apply
from quiver.metadata.commands import decode_command
from quiver.metadata.state import LogPosition, MetadataState, View
from quiver.model import GroupId, Index, NodeId, Offset, Term
from quiver.raft import Configuration
from quiver.replication.member_files import MemberFiles, MemberStorage, open_files
from quiver.storage import Disk, LogTimings, NodeIdentity, SystemDisk, TailBudget
from quiver.storage.data_directory import load_identity, metadata_log, replicas
from quiver.storage.executor import Executor, ThreadExecutor
from quiver.storage.groups import GROUPS_FOLDER, GroupFolders
from quiver.storage.hardstate import HARD_STATE_NAME

if TYPE_CHECKING:
    from quiver.security.key_ring import KeyRing

READ_BYTES = 1 << 20


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One node's copy of a group's log."""

    node: NodeId
    group: GroupId
    directory: str
    term: Term
    last_term: Term
    last_index: Index
    commit_index: Index
    """A lower bound of what was committed."""
    first_offset: Offset
    end_offset: Offset
    committed_offset: Offset
    """The end offset at `commit_index`."""
    configuration: Configuration
    """The configuration in force by this log."""
    is_damaged: bool = False
    """Whether acknowledged entries were lost on this disk before."""

    @property
    def rank(self) -> tuple[Term, Index]:
        """Return by what copies are compared: the best one has everything that any survivor knows to be committed."""
        return self.last_term, self.last_index


class Survivor(msgspec.Struct, frozen=True, kw_only=True):
    """A stopped node with its data."""

    data: str
    identity: NodeIdentity
    copies: dict[GroupId, Copy]

    @property
    def node(self) -> NodeId:
        """Return the node's id."""
        return self.identity.node


class StoppedNodes:
    """Access to the files of stopped nodes, which the caller has locked. Use as ``async with``."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        disk: Disk | None = None,
        executor: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Take the keys of the nodes, if any of their replicas are encrypted; use this machine, or a simulation."""
        self._keys = keys
        self.disk: Disk = disk or SystemDisk()
        self._executor = executor or ThreadExecutor()
        self._clock = clock or SystemClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if isinstance(self._executor, ThreadExecutor):
            self._executor.close()

    @property
    def storage(self) -> MemberStorage:
        """Return the seams for opening a member's files."""
        settings = Settings().log
        tails = TailBudget(READ_BYTES)
        return MemberStorage(self.disk, self._executor, self._clock, settings, tails, LogTimings(), self._keys)

    async def inspect(self, directories: Sequence[str]) -> list[Survivor]:
        """Return what each data directory has, by node id.

        Raises:
            ConfigError: a directory is no node's, or two belong to the same node or to different clusters.
            StorageError: files cannot be read.
        """
        found = [await self._inspect(data) for data in dict.fromkeys(directories)]
        nodes = [one.node for one in found]
        if len(set(nodes)) != len(nodes):
            raise ConfigError(f"two of the directories belong to the same node: {sorted(nodes)}")
        clusters = {one.identity.cluster for one in found}
        if len(clusters) != 1:
            raise ConfigError(f"the directories belong to different clusters: {', '.join(sorted(clusters))}")
        return sorted(found, key=lambda one: one.node)

    async def _inspect(self, data: str) -> Survivor:
        identity = load_identity(self.disk, data)
        if identity is None or not identity.is_member:
            raise ConfigError(f"{data} is not the data directory of a node that was in a cluster")
        if not self.disk.exists(f"{metadata_log(data)}/{HARD_STATE_NAME}"):
            raise StorageError(f"{metadata_log(data)} is missing: this node's copy of the metadata is lost")
        folders = GroupFolders(self.disk, replicas(data))
        has_replicas = self.disk.exists(f"{replicas(data)}/{GROUPS_FOLDER}")
        logs = {group: folders.path(group) for group in sorted(folders.present())} if has_replicas else {}
        logs[METADATA_GROUP] = metadata_log(data)
        copies = {group: await inspect_copy(self.storage, identity.node, group, path) for group, path in logs.items()}
        return Survivor(data=data, identity=identity, copies=copies)

    async def read_metadata(self, copy: Copy) -> View:
        """Return the metadata as it is after the last entry of a copy, committed or not: all of it will be."""
        async with AsyncExitStack() as opened:
            files = await open_files(self.storage, copy.directory, bootstrap=None)
            opened.push_async_callback(files.log.close)
            return await _replay(files)


async def inspect_copy(storage: MemberStorage, node: NodeId, group: GroupId, directory: str) -> Copy:
    """Return how far one stopped member's log goes, and who the members are by it; raises `StorageError`."""
    files = await open_files(storage, directory, bootstrap=None)
    try:
        log, initial = files.log, files.initial
        committed = log.offset_after(initial.commit)
        return Copy(
            node=node,
            group=group,
            directory=directory,
            term=initial.term,
            last_term=log.last_term,
            last_index=initial.last_index,
            commit_index=initial.commit,
            first_offset=log.first_offset,
            end_offset=log.end_offset,
            committed_offset=log.first_offset if committed is None else committed,
            configuration=initial.configurations[-1][1] if initial.configurations else Configuration(voters=()),
            is_damaged=initial.recover_until is not None,
        )
    finally:
        await log.close()


def best_copy(copies: Sequence[Copy]) -> Copy:
    """Return the copy with the highest last term, of these the longest, of these one of a voter."""
    return max(copies, key=lambda copy: (copy.rank, copy.configuration.is_voter(copy.node), -copy.node))


async def _replay(files: MemberFiles) -> View:
    state = MetadataState.decode(files.machine_state) if files.machine_state else MetadataState()
    index = Index(files.applied_index + 1)
    while index < files.log.end_index:
        for batch in await files.log.read_entries(index, end_index=files.log.end_index, bytes_max=READ_BYTES):
            try:
                command = decode_command(batch)
            except DecodeError as error:
                raise StorageError(f"the metadata log holds at index {batch.header.index} {error.message}") from None
            if command is not None:
                apply(state, command)
            state.advance_to(LogPosition(batch.header.index, batch.header.term))
            index = Index(batch.header.index + 1)
    return state.view()
