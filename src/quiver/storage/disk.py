"""The interface between storage and the file system, its real implementation, and the check of free space.

Only this module opens, writes, syncs, renames or removes data files. Every call blocks and raises
`OSError` as the operating system does; callers run those that may take long in an executor.
`quiver.testing.SimulatedDisk` is the in-memory twin with crashes and faults.

Callers rely on these rules:
- bytes are durable only after `File.sync`, a file's name only after `sync_directory` of its directory;
- `write` may write fewer bytes than given, `read` returns fewer only at the end of the file;
- a failed `sync` is final: the bytes may be lost although a second `sync` would succeed.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Protocol

from quiver.config import LogSettings
from quiver.errors import DiskFullError, StorageError
from quiver.model import Buffer
from quiver.storage.descriptors import SpareDescriptors
from quiver.storage.executor import Executor

IOV_MAX = 1024
"""Most buffers that one `writev` takes on Linux and macOS."""
ROOM_FACTOR = 1.25
"""A full disk has room again once it has this multiple of `log.free_bytes_min`."""
FOLLOWER_SHARE = 2
"""A follower stores records while one such part of `log.free_bytes_min` stays free."""
CONTROL_SHARE = 4
"""Entries without records are taken and stored while one such part of `log.free_bytes_min` stays free."""
ROOM_RETRY_S = 0.5
"""Interval at which a write that has met the end of the disk is tried again."""
SYNCED_ONE_BY_ONE_MAX = 8
"""Up to so many directories are synced by themselves, more of them with the whole file system."""
READ_AHEAD_BYTES_MIN = 256 * 1024
"""Reads of at least this size are probably sequential: the kernel prefetches the bytes that follow."""


class File(Protocol):
    """One open data file."""

    def size(self) -> int:
        """Return the file's length in bytes."""
        ...

    def read(self, length: int, position: int) -> bytes:
        """Return `length` bytes from `position`, fewer only at the end of the file."""
        ...

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write at most `IOV_MAX` buffers in order at `position`; return the number of bytes written."""
        ...

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes."""
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
        """Open a file for reading and writing; with `create`, create an empty one, which must not exist."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        ...

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents; no error if it exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing the target, or a directory to an unused name, atomically."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def sync_folders(self, paths: Sequence[str]) -> None:
        """Make the names in these directories, all on one file system, and the bytes of their files durable."""
        ...

    def free_bytes(self, path: str) -> int:
        """Return the free bytes of the file system that contains a directory."""
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
            # Each read opens its file, so the kernel cannot detect sequential reads by itself.
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
        """Write buffers at `position` with one `pwritev`; return the number of bytes written."""
        return os.pwritev(self._descriptor, buffers, position)

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes."""
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
    """The operating system's file system; a lack of file descriptors is waited out, with a reserve if there is one."""

    def __init__(self, descriptors: SpareDescriptors | None = None) -> None:
        self._descriptors = descriptors or SpareDescriptors()

    def open(self, path: str, *, create: bool = False) -> SystemFile:
        """Open a file for reading and writing; with `create`, create an empty one, which must not exist."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        return SystemFile(self._descriptors.open(path, flags))

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        return os.path.exists(path)

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(directory))

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents."""
        os.makedirs(path, mode=0o700, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing the target, or a directory to an unused name, atomically."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable: on disk after this returns."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _sync(self, path: str, flags: int) -> None:
        descriptor = self._descriptors.open(path, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_folders(self, paths: Sequence[str]) -> None:
        """Make directories and their files durable: on disk after this returns.

        Many of them with one `syncfs`, on Linux: it commits the file system's journal once instead of for each file.
        Few of them one by one: `syncfs` also waits for what other programs have written.
        """
        if len(paths) > SYNCED_ONE_BY_ONE_MAX and sys.platform == "linux":
            self._sync_filesystem(paths[0])
            return
        for path in paths:
            for name in os.listdir(path):
                if not os.path.isdir(f"{path}/{name}"):
                    self._sync(f"{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            self.sync_directory(path)

    def _sync_filesystem(self, path: str) -> None:
        descriptor = self._descriptors.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc().syncfs(descriptor):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), path)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        """Return the bytes that this user can still write to the file system that contains a directory."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, for the system calls that Python does not offer."""
    return ctypes.CDLL(None, use_errno=True)


def is_out_of_space(error: BaseException | None) -> bool:
    """Return whether an operation failed because the disk, or this user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class DiskSpace:
    """Free space on the disk of a directory; one per node, updated by `run`.

    `log.free_bytes_min` is a reserve that is used up in steps, so that a log meets the end of the disk before anything
    that Raft depends on does:

    - a leader takes records while the whole reserve stays free (`admit`);
    - a follower stores records while half of it stays free (`take`): what leaders have taken still finds a place;
    - entries without records (cursors, trims, metadata) are taken and stored while a quarter stays free: with them the
      cluster removes records and moves replicas;
    - the last quarter is for votes, configurations, snapshots, checkpoints and the metadata's database.

    Between two checks the admitted bytes are subtracted. A full node also transfers leadership to replicas that have
    room (`LeaderBalancer`); it counts as full until there is clearly room again, so that leadership does not move back
    and forth. Where a write meets the end of the disk nevertheless, it waits for room (`begin_stall`), and nothing
    more is taken meanwhile.
    """

    def __init__(self, disk: Disk, directory: str, *, executor: Executor, settings: LogSettings) -> None:
        self._disk = disk
        self._directory = directory
        self._executor = executor
        self._settings = settings
        self._free_bytes: int | None = None
        self.is_full = False
        """Whether records were rejected, or would be, since there was last `ROOM_FACTOR` of the minimum; a value that
        changes with checks, refusals and stalls, because every message of a group asks for it."""
        self._lacks_room = False
        self._refused_bytes = 0
        self._stalled = 0
        self.stalls = 0
        """How often a write has met the end of the disk since the node started."""
        self.refused_appends = 0
        """How many appends of leaders this node has not stored for want of room."""

    @property
    def free_bytes(self) -> int | None:
        """Return the estimated free bytes; None before the first check."""
        return self._free_bytes

    @property
    def stalled(self) -> int:
        """Return how many writes wait for room."""
        return self._stalled

    async def run(self) -> None:
        """Check the disk every `free_check_interval_ms`, until cancelled.

        Raises:
            StorageError: the free space cannot be determined.
        """
        while True:
            await self.refresh()
            await asyncio.sleep(self._settings.free_check_interval_ms / 1000)

    async def refresh(self) -> None:
        """Check the disk now.

        Raises:
            StorageError: the free space cannot be determined.
        """
        try:
            self._free_bytes = await self._executor.submit(partial(self._disk.free_bytes, self._directory))
        except OSError as error:
            raise StorageError(f"{self._directory}: cannot determine the free space: {error}") from error
        free_bytes_min = self._settings.free_bytes_min
        if self._free_bytes < free_bytes_min:
            self._lacks_room = True
        elif self._free_bytes >= free_bytes_min * ROOM_FACTOR + self._refused_bytes:
            self._lacks_room = False
            self._refused_bytes = 0
        self._update_full()

    def admit(self, size_bytes: int) -> None:
        """Admit records of this size, or reject them.

        Raises:
            DiskFullError: not done; less than `free_bytes_min` would be left.
        """
        free_bytes = self._free_bytes
        if self._stalled or (free_bytes is not None and free_bytes - size_bytes < self._settings.free_bytes_min):
            self._note_full(size_bytes)
            raise self._full()
        if free_bytes is not None:
            self._free_bytes = free_bytes - size_bytes

    def check_control(self, size_bytes: int) -> None:
        """Reject entries of this size, whatever they are, while only votes and snapshots may be written.

        Raises:
            DiskFullError: not done; less than a quarter of `free_bytes_min` would be left.
        """
        free_bytes, kept_bytes = self._free_bytes, self._settings.free_bytes_min // CONTROL_SHARE
        if self._stalled or (free_bytes is not None and free_bytes - size_bytes < kept_bytes):
            self._note_full(size_bytes)
            raise self._full()

    def take(self, size_bytes: int, *, is_control: bool) -> bool:
        """Return whether a follower may store an append of this size, and subtract it if so."""
        if not self.has_room(size_bytes, is_control=is_control):
            self._note_full(size_bytes)
            self.refused_appends += 1
            return False
        if self._free_bytes is not None:
            self._free_bytes -= size_bytes
        return True

    def has_room(self, size_bytes: int, *, is_control: bool) -> bool:
        """Return whether a follower could store an append of this size now."""
        kept_bytes = self._settings.free_bytes_min // (CONTROL_SHARE if is_control else FOLLOWER_SHARE)
        return not self._stalled and (self._free_bytes is None or self._free_bytes - size_bytes >= kept_bytes)

    def begin_stall(self) -> None:
        """Count a write that has met the end of the disk and waits for room, until `end_stall`."""
        self._stalled += 1
        self.stalls += 1
        self._update_full()

    def end_stall(self) -> None:
        """Count the end of such a wait."""
        self._stalled -= 1
        self._update_full()

    def _note_full(self, size_bytes: int) -> None:
        """Count as full until this much would fit, also without a reserve."""
        self._lacks_room = self.is_full = True
        self._refused_bytes = max(size_bytes, self._refused_bytes)

    def _update_full(self) -> None:
        self.is_full = self._lacks_room or self._stalled > 0

    def _full(self) -> DiskFullError:
        found = "no free bytes" if self._stalled else f"{self._free_bytes} free bytes"
        return DiskFullError(
            f"not done: the disk of {self._directory} has {found}, log.free_bytes_min is "
            f"{self._settings.free_bytes_min}; free space on it or retry later; reads and deletes continue"
        )
