"""The folders of a node's replicas: where each group's files are, which groups this node has joined, and the trash.

    <directory>/groups/<group>/    the files of one member
    <directory>/joined/<group>     an empty file: this node has, or had, a vote or a promise in the group
    <directory>/trash/<group>/     what is about to be removed for good

A group is *joined* before its member can say a word, and no longer when the group has let it go. So a member whose
files are gone although it is joined is known to have lost what it promised: it must not begin anew under its old
id (R22). All methods block; each says what is on disk when it returns.
"""

from __future__ import annotations

from quiver.model import GroupId
from quiver.storage.disk import Disk
from quiver.storage.hardstate import HARD_STATE_NAME

GROUPS_FOLDER = "groups"
JOINED_FOLDER = "joined"
TRASH_FOLDER = "trash"


class GroupFolders:
    """The folders of the replicas of one node."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._groups, self._joined, self._trash = (
            f"{directory}/{name}" for name in (GROUPS_FOLDER, JOINED_FOLDER, TRASH_FOLDER)
        )

    def prepare(self) -> None:
        """Make what is missing, and finish what a crash left in the trash. On disk after this returns: the folders."""
        for path in (self._groups, self._joined, self._trash):
            self._disk.make_directory(path)
        parent = self._directory.rpartition("/")[0] or ("/" if self._directory.startswith("/") else ".")
        self._disk.sync_directory(parent)
        self._disk.sync_directory(self._directory)
        for name in self._disk.names(self._trash):
            self._remove_tree(f"{self._trash}/{name}")

    def path(self, group: GroupId) -> str:
        """Return where a group's files are."""
        return f"{self._groups}/{group}"

    def present(self) -> frozenset[GroupId]:
        """Return the groups whose members' files are here: those with a hard state, which is made first of all."""
        found = _numbers(self._disk.names(self._groups))
        return frozenset(group for group in found if self._disk.exists(f"{self.path(group)}/{HARD_STATE_NAME}"))

    def joined(self) -> frozenset[GroupId]:
        """Return the groups that this node has joined and not left."""
        return frozenset(_numbers(self._disk.names(self._joined)))

    def join(self, group: GroupId) -> None:
        """Take note that this node belongs to a group. On disk after this returns: the note."""
        path = f"{self._joined}/{group}"
        if not self._disk.exists(path):
            self._disk.open(path, create=True).close()
        self._disk.sync_directory(self._joined)

    def leave(self, group: GroupId) -> None:
        """Forget that this node belonged to a group, and remove its files, which must be closed.

        On disk after this returns: neither. A crash on the way leaves files without the note, or some of them
        in the trash, and never the note without files.
        """
        note = f"{self._joined}/{group}"
        if self._disk.exists(note):
            self._disk.remove(note)
            self._disk.sync_directory(self._joined)
        if not self._disk.exists(self.path(group)):
            return
        rubbish = f"{self._trash}/{group}"
        self._remove_tree(rubbish)
        self._disk.rename(self.path(group), rubbish)
        self._disk.sync_directory(self._groups)
        self._disk.sync_directory(self._trash)  # on disk now: the member is gone as a whole
        self._remove_tree(rubbish)

    def _remove_tree(self, path: str) -> None:
        if not self._disk.exists(path):
            return
        for name in self._disk.names(path):
            self._disk.remove(f"{path}/{name}")  # a member's folder holds files alone
        self._disk.remove_directory(path)
        self._disk.sync_directory(self._trash)


def _numbers(names: list[str]) -> list[GroupId]:
    return [GroupId(int(name)) for name in names if name.isdecimal()]
