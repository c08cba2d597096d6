"""The folders of a node's replicas: the files of each group, the groups that this node has joined, and the trash.

    <directory>/groups/<group>/    the files of one member
    <directory>/groups/<group>.new/    files of a new member that are being made; after a crash they are removed
    <directory>/joined/<group>     an empty marker file: this node may have voted or acknowledged in the group
    <directory>/trash/<group>/     files that are about to be removed permanently

The marker exists from before the member sends its first message until the group has removed the member. A marker
without files therefore means that the member has lost its vote and its acknowledged entries: it must not restart from
scratch under its old id (R22). All methods block; each states what is on disk when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quiver.model import GroupId
from quiver.storage.disk import Disk
from quiver.storage.hardstate import HARD_STATE_NAME

GROUPS_FOLDER = "groups"
JOINED_FOLDER = "joined"
TRASH_FOLDER = "trash"
NEW_SUFFIX = ".new"
"""Ends the names of folders that are being filled."""
ASIDE_SUFFIX = ".unknown"
"""Ends the names of folders whose group the metadata lost; only operators remove them."""


class GroupFolders:
    """The folders of the replicas of one node."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._groups, self._joined, self._trash = (
            f"{directory}/{name}" for name in (GROUPS_FOLDER, JOINED_FOLDER, TRASH_FOLDER)
        )

    def prepare(self) -> None:
        """Create missing folders and empty the trash. On disk after this returns: the folders."""
        for path in (self._groups, self._joined, self._trash):
            self._disk.make_directory(path)
        parent = self._directory.rpartition("/")[0] or ("/" if self._directory.startswith("/") else ".")
        self._disk.sync_directory(parent)
        self._disk.sync_directory(self._directory)
        for name in self._disk.names(self._trash):
            self._remove_tree(f"{self._trash}/{name}")
        for name in self._disk.names(self._groups):
            if name.endswith(NEW_SUFFIX):
                self._remove_tree(f"{self._groups}/{name}")

    def path(self, group: GroupId) -> str:
        """Return the folder of a group's files."""
        return f"{self._groups}/{group}"

    def present(self) -> frozenset[GroupId]:
        """Return the groups whose files exist on this node: those with a hard state, which is created first."""
        found = _numbers(self._disk.names(self._groups))
        return frozenset(group for group in found if self._disk.exists(f"{self.path(group)}/{HARD_STATE_NAME}"))

    def joined(self) -> frozenset[GroupId]:
        """Return the groups that this node has joined and not left."""
        return frozenset(_numbers(self._disk.names(self._joined)))

    def join(self, group: GroupId) -> None:
        """Record that this node belongs to a group. On disk after this returns: the marker."""
        path = f"{self._joined}/{group}"
        if not self._disk.exists(path):
            self._disk.open(path, create=True).close()
        self._disk.sync_directory(self._joined)

    def make(self, wanted: Mapping[GroupId, Callable[[str], None]]) -> frozenset[GroupId]:
        """Make the folders of new members and join their groups, many at the cost of one; return these groups.

        Each function fills the given folder and syncs nothing. A group that has a folder, of an attempt that was
        interrupted, is left out. On disk after this returns: all folders and markers. A crash in between leaves some
        folders with all their files, and markers for some of those; or neither.
        """
        filled = {group: self.path(group) + NEW_SUFFIX for group in wanted if not self._disk.exists(self.path(group))}
        if not filled:
            return frozenset()
        for group, path in filled.items():
            self._remove_tree(path)  # left by an attempt that failed
            self._disk.make_directory(path)
            wanted[group](path)
        self._disk.sync_folders([*filled.values(), self._groups])  # on disk now: all files, under names of no group
        for group, path in filled.items():
            self._disk.rename(path, self.path(group))
        self._disk.sync_directory(self._groups)  # on disk now: the members; a marker is never without files
        for group in filled:
            self._disk.open(f"{self._joined}/{group}", create=True).close()
        self._disk.sync_directory(self._joined)
        return frozenset(filled)

    def leave(self, group: GroupId) -> None:
        """Remove the marker and the files of a group; the files must be closed.

        On disk after this returns: neither. A crash in between leaves files without the marker, or some of them in
        the trash, but never the marker without files.
        """
        marker = f"{self._joined}/{group}"
        if self._disk.exists(marker):
            self._disk.remove(marker)
            self._disk.sync_directory(self._joined)  # on disk now: no marker, so the files may go
        if not self._disk.exists(self.path(group)):
            return
        discarded = f"{self._trash}/{group}"
        self._remove_tree(discarded)
        self._disk.rename(self.path(group), discarded)
        self._disk.sync_directory(self._groups)
        self._disk.sync_directory(self._trash)  # on disk now: all files of the member are in the trash
        self._remove_tree(discarded)

    def set_aside(self, group: GroupId) -> None:
        """Keep the files of a group that the metadata does not know under a name that no group has.

        On disk after this returns: the new name, and no marker. After a crash, call it again.
        """
        marker = f"{self._joined}/{group}"
        if self._disk.exists(marker):
            self._disk.remove(marker)
            self._disk.sync_directory(self._joined)  # never the marker without files: they would count as lost
        if self._disk.exists(self.path(group)):
            self._disk.rename(self.path(group), self.path(group) + ASIDE_SUFFIX)
            self._disk.sync_directory(self._groups)

    def _remove_tree(self, path: str) -> None:
        if not self._disk.exists(path):
            return
        for name in self._disk.names(path):
            self._disk.remove(f"{path}/{name}")  # a member's folder holds only files
        self._disk.remove_directory(path)
        self._disk.sync_directory(path.rpartition("/")[0])


def _numbers(names: list[str]) -> list[GroupId]:
    return [GroupId(int(name)) for name in names if name.isdecimal()]
