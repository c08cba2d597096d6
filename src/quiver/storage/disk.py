"""The seam between the log and the file system, and its real side.

Only this module opens, writes, syncs, renames or removes data files. Every call blocks and raises
`OSError` as the operating system does; callers run those that may take long in an executor.
`quiver.testing.SimulatedDisk` is the in-memory twin with crashes and faults.

Rules that users of the seam rely on:
- bytes are durable only after `File.sync`, a file's name only after `sync_directory` of its folder;
- `write` may write less than it was given, `read` returns less only at the end of the file;
- a failed `sync` is final: the bytes may be lost although a second `sync` would succeed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Protocol

from quiver.model import Buffer

IOV_MAX = 1024
"""Most buffers that one `writev` takes on Linux and macOS."""
READ_AHEAD_BYTES_MIN = 256 * 1024
"""Who reads so much will read on: what follows is fetched while these bytes are checked and used."""


class File(Protocol):
    """One open data file."""

    def size(self) -> int:
        """Return the file's length in bytes."""
        ...

    def read(self, length: int, position: int) -> bytes:
        """Return `length` bytes from `position`, fewer only at the end of the file."""
        ...

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write at most `IOV_MAX` buffers one after the other at `position`; return how many bytes were written."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        ...

    def sync(self) -> None:
        """Make the file's bytes and length durable."""
        ...

    def close(self) -> None:
        """Close the file; idempotent."""
        ...


class Disk(Protocol):
    """A file system that holds data directories. Paths are plain strings with `/`."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open a file for reading and writing; with `create` make an empty one, which must not exist."""
        ...

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        ...

    def names(self, directory: str) -> list[str]:
        """Return the names in a folder, sorted."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a folder (and the missing ones above it); fine if it is there."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Move a file over another name, or a folder to a name that is free, atomically."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove a folder, which must be empty."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a folder durable."""
        ...

    def free_bytes(self, path: str) -> int:
        """Return how much more can be written to the file system that holds a folder."""
        ...


class SystemFile:
    """A file of the operating system, by descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size(self) -> int:
        """Return the file's length in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, length: int, position: int) -> bytes:
        """Return `length` bytes from `position`, fewer only at the end of the file."""
        if sys.platform == "linux" and length >= READ_AHEAD_BYTES_MIN:
            # Files are opened for each read, so the system does not notice by itself that somebody reads on.
            os.posix_fadvise(self._descriptor, position + length, length, os.POSIX_FADV_WILLNEED)
        chunk = os.pread(self._descriptor, length, position)
        if len(chunk) == length or not chunk:
            return chunk
        parts = [chunk]
        missing = length - len(chunk)
        while missing and (chunk := os.pread(self._descriptor, missing, position + length - missing)):
            parts.append(chunk)
            missing -= len(chunk)
        return b"".join(parts)

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write buffers at `position` with one `pwritev`; return how many bytes were written."""
        return os.pwritev(self._descriptor, buffers, position)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Make the bytes and the length durable: on disk after this returns."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SystemDisk:
    """The operating system's file system."""

    def open(self, path: str, *, create: bool = False) -> SystemFile:
        """Open a file for reading and writing; with `create` make an empty one, which must not exist."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return SystemFile(os.open(path, flags, 0o644))

    def exists(self, path: str) -> bool:
        """Tell whether a file or folder is there."""
        return os.path.exists(path)

    def names(self, directory: str) -> list[str]:
        """Return the names in a folder, sorted."""
        return sorted(os.listdir(directory))

    def make_directory(self, path: str) -> None:
        """Make a folder and the missing ones above it."""
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        """Move a file over another name, or a folder to a name that is free, atomically."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Remove a folder, which must be empty."""
        os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        """Make the names in a folder durable: on disk after this returns."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        """Return how much more this user can write to the file system that holds a folder."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
