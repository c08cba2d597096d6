"""Disks that change nothing: what lets an inspection run the same code as a restart.

`ReadOnlyDisk` opens the operating system's files for reading alone, so that a mistake above it cannot
change a byte, and a log on a read-only mount or of another user can be inspected.
`Rehearsal` stands in front of any disk, takes every cut, removal and sync as if it were carried out, and
carries none of them out: run `recover` on it and it tells what a restart would do to the files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NoReturn

from quiver.model import Buffer
from quiver.storage.disk import Disk, File, SystemDisk, SystemFile


class ReadOnlyDisk(SystemDisk):
    """The operating system's file system, for reading; whatever would change it raises `OSError` (EROFS)."""

    def open(self, path: str, *, create: bool = False) -> SystemFile:
        """Open a file for reading; the system itself refuses writes to it."""
        if create:
            _refuse(path)
        return SystemFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def make_directory(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def rename(self, source: str, target: str) -> None:
        """Refuse."""
        _refuse(source, target)

    def remove(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def remove_directory(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def sync_directory(self, path: str) -> None:
        """Refuse: there is nothing that could have to be made durable."""
        _refuse(path)


class Rehearsal:
    """A `Disk` that notes the cuts and removals asked of it and shows files as if they had been made.

    `cut_to` has the size to which a path was cut, `removed` the paths that were removed. Bytes cannot be
    written, nor names made or moved: recovery never does that.
    """

    def __init__(self, disk: Disk) -> None:
        self.cut_to: dict[str, int] = {}
        self.removed: set[str] = set()
        self._disk = disk

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file, which must be there, for reading and for cuts that are only noted."""
        if create:
            _refuse(path)
        if path in self.removed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return _RehearsedFile(self, path, self._disk.open(path))

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there and was not removed."""
        return path not in self.removed and self._disk.exists(path)

    def names(self, directory: str) -> list[str]:
        """Return the names in a folder without those removed, sorted."""
        return [name for name in self._disk.names(directory) if f"{directory}/{name}" not in self.removed]

    def make_directory(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def rename(self, source: str, target: str) -> None:
        """Refuse."""
        _refuse(source, target)

    def remove(self, path: str) -> None:
        """Note that a file would be removed."""
        self.removed.add(path)

    def remove_directory(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def free_bytes(self, path: str) -> int:
        """Return how much room there is."""
        return self._disk.free_bytes(path)

    def sync_directory(self, path: str) -> None:
        """Do nothing: no name was changed."""


class _RehearsedFile:
    """A `File` that reads through and notes its cut."""

    def __init__(self, rehearsal: Rehearsal, path: str, file: File) -> None:
        self._rehearsal = rehearsal
        self._path = path
        self._file = file

    def size(self) -> int:
        return self._rehearsal.cut_to.get(self._path, self._file.size())

    def read(self, length: int, position: int) -> bytes:
        return self._file.read(max(0, min(length, self.size() - position)), position)

    def write(self, buffers: Sequence[Buffer], position: int) -> int:  # noqa: ARG002 - the seam's signature
        _refuse(self._path)

    def truncate(self, size: int) -> None:
        self._rehearsal.cut_to[self._path] = size

    def sync(self) -> None:
        """Do nothing: no byte was changed."""

    def close(self) -> None:
        self._file.close()


def _refuse(path: str, target: str | None = None) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path, None, target)
