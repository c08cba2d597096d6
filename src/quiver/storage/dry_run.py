"""Disks that change nothing, so that an inspection can run the same code as a restart.

`ReadOnlyDisk` opens the operating system's files for reading only: a bug above it cannot change a byte, and a log on a
read-only mount or of another user can be inspected. `DryRunDisk` wraps any disk and records truncations and removals
without executing them: run `recover` on it to learn what a restart would do to the files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import NoReturn

from quiver.model import Buffer
from quiver.storage.disk import Disk, File, SystemDisk, SystemFile


class ReadOnlyDisk(SystemDisk):
    """The operating system's file system, read-only; every change raises `OSError` (EROFS)."""

    def open(self, path: str, *, create: bool = False) -> SystemFile:
        """Open a file for reading; the operating system rejects writes to it."""
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
        """Refuse: there is nothing to make durable."""
        _refuse(path)

    def sync_folders(self, paths: Sequence[str]) -> None:
        """Refuse: there is nothing to make durable."""
        _refuse(*paths)


class DryRunDisk:
    """A `Disk` that records truncations and removals and shows files as if they had happened.

    `truncated_to` maps a path to its size after truncation; `removed` holds the removed paths. Writing bytes and
    creating or renaming files is refused: recovery never does that.
    """

    def __init__(self, disk: Disk) -> None:
        self.truncated_to: dict[str, int] = {}
        self.removed: set[str] = set()
        self._disk = disk

    def open(self, path: str, *, create: bool = False) -> File:
        """Open an existing file for reading, and for truncations that are only recorded."""
        if create:
            _refuse(path)
        if path in self.removed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return _DryRunFile(self, path, self._disk.open(path))

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists and was not removed."""
        return path not in self.removed and self._disk.exists(path)

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory without the removed ones, sorted."""
        return [name for name in self._disk.names(directory) if f"{directory}/{name}" not in self.removed]

    def make_directory(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def rename(self, source: str, target: str) -> None:
        """Refuse."""
        _refuse(source, target)

    def remove(self, path: str) -> None:
        """Record that a file would be removed."""
        self.removed.add(path)

    def remove_directory(self, path: str) -> None:
        """Refuse."""
        _refuse(path)

    def free_bytes(self, path: str) -> int:
        """Return the free space of the wrapped disk in bytes."""
        return self._disk.free_bytes(path)

    def sync_directory(self, path: str) -> None:
        """Do nothing: no name was changed."""

    def sync_folders(self, paths: Sequence[str]) -> None:
        """Do nothing: no name was changed."""


class _DryRunFile:
    """A `File` that reads from the wrapped file and records its truncation."""

    def __init__(self, dry_run: DryRunDisk, path: str, file: File) -> None:
        self._dry_run = dry_run
        self._path = path
        self._file = file

    def size(self) -> int:
        return self._dry_run.truncated_to.get(self._path, self._file.size())

    def read(self, length: int, position: int) -> bytes:
        return self._file.read(max(0, min(length, self.size() - position)), position)

    def write(self, buffers: Sequence[Buffer], position: int) -> int:  # noqa: ARG002 - the seam's signature
        _refuse(self._path)

    def truncate(self, size: int) -> None:
        self._dry_run.truncated_to[self._path] = size

    def sync(self) -> None:
        """Do nothing: no byte was changed."""

    def close(self) -> None:
        self._file.close()


def _refuse(path: str, target: str | None = None) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path, None, target)
