"""A file system in memory that loses power, fills up, lies and rots: the twin of `SystemDisk`.

It implements the `Disk` and `File` seams of `quiver.storage.disk` with their durability rules: bytes
are durable after `File.sync`, names after `sync_directory`, and neither implies the other. Errors
are real `OSError`s with the `errno` that Linux gives.

Every mutating operation is counted in `operation_count`, so that a test can enumerate all crash
points: run once to learn the count, then once per n with `crash_after(n)`, then `crash(rng)` and
recover. `restart()` is a killed process (the cache survives), `crash()` a power loss (it does not).

It never touches the real file system, and nothing in it depends on the host or on hash order.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from quiver.clock import Rng
from quiver.model import Buffer
from quiver.storage.disk import IOV_MAX
from quiver.testing.disk_faults import DiskFaultPlan, DiskFaults, DiskOperation, Moment, PowerLoss
from quiver.testing.filesystem import Content, Entry, Folder, NameTable

ENDLESS_BYTES = 1 << 40


class SimulatedDisk:
    """Hold files in memory, with crashes and faults; `faults` counts by kind what went wrong.

    `rates` gives probabilities to seeded faults, drawn from `rng`. With `keep_journal` every mutating
    operation is listed in `journal` as (kind, path), for messages. `on_power_loss` is called at the moment
    a planned power loss happens, before `PowerLoss` is raised: a simulation kills the node there.
    """

    def __init__(
        self,
        *,
        rng: Rng | None = None,
        rates: DiskFaults | None = None,
        keep_journal: bool = False,
        on_power_loss: Callable[[], object] | None = None,
    ) -> None:
        self._names = NameTable()
        self._on_power_loss = on_power_loss
        self._plan = DiskFaultPlan(rates or DiskFaults(), rng)
        self.journal: list[tuple[DiskOperation, str]] | None = [] if keep_journal else None
        self.operation_count = 0
        self.bytes_written = 0
        self.bytes_read = 0
        self.bytes_synced = 0
        self.used_bytes = 0
        self._capacity_bytes: int | None = None
        self._life = 0
        self._has_power = True
        self._crash_at: int | None = None
        self._crash_moment: Moment = "before"
        self._written_share = 0.5

    # The seam.

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        """Open a file for reading and writing; with `create` make an empty one, which must not exist."""
        folder, name = self._parent(path)
        entry = folder.current.get(name)
        if not create:
            return SimulatedFile(self, path, _as_content(entry, path))
        if entry is not None:
            raise _error(errno.EEXIST, path)
        self._begin("create", path)
        content = Content()
        self._names.change((folder, name, content))
        self._end()
        return SimulatedFile(self, path, content)

    def exists(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        self._require_power()
        return self._find(path) is not None

    def names(self, directory: str) -> list[str]:
        """Return the names in a folder, sorted."""
        self._require_power()
        return sorted(self._folder(directory).current)

    def make_directory(self, path: str) -> None:
        """Make a folder and the missing ones above it, each one a mutating operation of its own."""
        self._require_power()
        folder = self._names.root
        for name in _split(path):
            entry = folder.current.get(name)
            if entry is None:
                self._begin("create", path)
                entry = Folder()
                self._names.change((folder, name, entry))
                self._end()
            elif isinstance(entry, Content):
                raise _error(errno.EEXIST, path)
            folder = entry

    def rename(self, source: str, target: str) -> None:
        """Move a file over another name, or a folder to a free one, atomically, also across a power loss."""
        source_folder, source_name = self._parent(source)
        target_folder, target_name = self._parent(target)
        moved = source_folder.current.get(source_name)
        if moved is None:
            raise _error(errno.ENOENT, source)
        replaced = target_folder.current.get(target_name)
        if replaced is moved:
            return
        if isinstance(replaced, Folder) or (replaced is not None and isinstance(moved, Folder)):
            raise _error(errno.EISDIR if isinstance(replaced, Folder) else errno.ENOTDIR, target)
        self._begin("rename", source)
        self._names.change((source_folder, source_name, None), (target_folder, target_name, moved))
        if replaced is not None:
            self.used_bytes -= len(replaced.current)
        self._end()

    def remove(self, path: str) -> None:
        """Remove a file; handles that are open keep working on its bytes."""
        folder, name = self._parent(path)
        content = _as_content(folder.current.get(name), path)
        self._begin("remove", path)
        self._names.change((folder, name, None))
        self.used_bytes -= len(content.current)
        self._end()

    def remove_directory(self, path: str) -> None:
        """Remove a folder, which must be empty."""
        folder, name = self._parent(path)
        if self._folder(path).current:
            raise _error(errno.ENOTEMPTY, path)
        self._begin("remove", path)
        self._names.change((folder, name, None))
        self._end()

    def sync_directory(self, path: str) -> None:
        """Make the names in a folder durable, but not the bytes of the files they name."""
        self._require_power()
        folder = self._folder(path)
        self._begin("sync_directory", path)
        self._names.sync(folder)
        self._end()

    def sync_folders(self, paths: Sequence[str]) -> None:
        """Make the names in folders and the bytes of their files durable, as one operation."""
        folders = [self._folder(path) for path in paths]
        files = [entry for folder in folders for entry in folder.current.values() if isinstance(entry, Content)]
        try:
            self._begin("sync_directory", paths[0])
        except OSError:
            for content in files:
                content.fail_sync()
            raise
        for content in files:
            self.bytes_synced += content.sync()
        for folder in folders:
            self._names.sync(folder)
        self._end()

    def free_bytes(self, path: str) -> int:
        """Return how much more can be written before the disk is full; an endless one says 1 TiB."""
        self._require_power()
        self._folder(path)
        return ENDLESS_BYTES if self._capacity_bytes is None else max(self._capacity_bytes - self.used_bytes, 0)

    # Power.

    def crash_after(self, operations: int, *, moment: Moment = "before", written_share: float = 0.5) -> None:
        """Let the `operations`-th mutating operation from now on raise `PowerLoss`.

        It happens before, during or after the effect. During a write means that `written_share` of its
        bytes are pending; during a sync, that `crash` chooses what it has reached; for the rest it is
        after. From there on every operation raises, until `crash` or `restart`.
        """
        if operations < 1:
            raise ValueError(f"operations count from 1, got {operations}")
        self._crash_at = self.operation_count + operations
        self._crash_moment = moment
        self._written_share = written_share

    def crash(self, rng: Rng | None = None) -> None:
        """Become the disk after a power loss: a seeded part of what was not synced is gone.

        Without `rng` all of it is gone. Open handles are dead; the power is back.
        """
        self._names.lose_power(rng)
        self.used_bytes = 0
        for _, content in _walk(self._names.root, "", durable=True):
            if content.pending:
                self.faults[f"crash_keeps_{content.lose_power(rng)}"] += 1
            else:
                content.lose_power(None)
            self.used_bytes += len(content.current)
        self.faults["power_loss"] += 1
        self.restart()

    def restart(self) -> None:
        """End the life of the program but not of the machine: handles die, unsynced state stays pending."""
        self._life += 1
        self._has_power = True
        self._crash_at = None

    @property
    def has_power(self) -> bool:
        """Return whether operations are possible: false from a planned power loss until `crash` or `restart`."""
        return self._has_power

    # Faults.

    @property
    def faults(self) -> Counter[str]:
        """Return how often each kind of fault has happened so far."""
        return self._plan.counts

    @property
    def rates(self) -> DiskFaults:
        """Return the probabilities of seeded faults, which may be changed at any time."""
        return self._plan.faults

    def fail(self, operation: DiskOperation, *, nth: int = 1, path: str | None = None, error: int = errno.EIO) -> None:
        """Let the `nth` such operation from now on (on `path` alone, if given) raise `OSError`.

        A failed sync drops the file's pending bytes permanently, although reads still see them until the cache
        is dropped and the next sync succeeds: what Linux does. Other failures change nothing.
        """
        self._plan.plan(operation, kind="error", nth=nth, path=path, value=error)

    def lie(self, *, nth: int = 1, path: str | None = None) -> None:
        """Let the `nth` sync from now on report success but leave everything pending."""
        self._plan.plan("sync", kind="lying_sync", nth=nth, path=path, value=0)

    def shorten(self, length: int, *, nth: int = 1, path: str | None = None) -> None:
        """Let the `nth` write from now on take only `length` bytes (at least one)."""
        self._plan.plan("write", kind="short_write", nth=nth, path=path, value=length)

    def misdirect(self, landing: int, *, nth: int = 1, path: str | None = None) -> None:
        """Let the `nth` write from now on reach the platter at position `landing` of the same file.

        The cache shows it in its right place until the next power loss or `drop_caches`.
        """
        self._plan.plan("write", kind="misdirect", nth=nth, path=path, value=landing)

    def heal(self) -> None:
        """Plan no more faults, and lift every limit; what has happened stays."""
        self._plan.forget()
        self._capacity_bytes = None
        self._crash_at = None

    def limit_space(self, more_bytes: int | None) -> None:
        """Let files grow by `more_bytes` in all before `ENOSPC`; None lifts the limit."""
        self._capacity_bytes = None if more_bytes is None else self.used_bytes + more_bytes

    def flip_bit(self, path: str, position: int, *, bit: int = 0) -> None:
        """Flip one bit of a file's durable content."""
        content = _as_content(self._find(path), path)
        if not 0 <= position < len(content.durable):
            raise ValueError(f"{path} has {len(content.durable)} durable bytes, none at {position}")
        content.flip_bit(position, bit)
        self.faults["bit_flip"] += 1

    def drop_caches(self) -> None:
        """Let reads see the platter, with what is still pending on top."""
        for _, content in _walk(self._names.root, "", durable=False):
            content.drop_cache()

    # For tests: none of these counts as an operation.

    def clone(self) -> SimulatedDisk:
        """Return an independent copy of all files, with nothing planned, no faults and the power on."""
        copy = SimulatedDisk()
        copy._names = self._names.clone(Content.clone)
        copy.used_bytes = self.used_bytes
        copy.operation_count = self.operation_count
        return copy

    def paths(self) -> list[str]:
        """Return the path of every file, sorted."""
        return [path for path, _ in _walk(self._names.root, "", durable=False)]

    def read_file(self, path: str) -> bytes:
        """Return a file's bytes as programs see them."""
        return bytes(_as_content(self._find(path), path).current)

    def read_durable(self, path: str) -> bytes:
        """Return the bytes of a file that are on the platter; its name may not be."""
        return bytes(_as_content(self._find(path), path).durable)

    def read_platter(self, path: str, position: int, length: int) -> bytes | None:
        """Return bytes of a file as a power loss at this moment would leave them; None if its name would be gone."""
        entry: Entry | None = self._names.root
        for name in _split(path):
            entry = entry.durable.get(name) if isinstance(entry, Folder) else None
        return bytes(entry.durable[position : position + length]) if isinstance(entry, Content) else None

    def write_file(self, path: str, data: bytes) -> None:
        """Put a whole file in place, durable with its name and its folders."""
        *folders, name = _split(path)
        folder = self._names.root
        for part in folders:
            entry = folder.current.get(part)
            if entry is None:
                entry = Folder()
                self._names.change((folder, part, entry))
            elif isinstance(entry, Content):
                raise _error(errno.ENOTDIR, path)
            self._names.sync(folder)
            folder = entry
        replaced = folder.current.get(name)
        if replaced is not None:
            self.used_bytes -= len(_as_content(replaced, path).current)
        self._names.change((folder, name, Content(data)))
        self._names.sync(folder)
        self.used_bytes += len(data)

    def sync_all(self) -> None:
        """Make everything durable."""
        self._names.sync_all()
        for _, content in _walk(self._names.root, "", durable=False):
            content.sync()

    # Shared with SimulatedFile.

    def _begin(self, operation: DiskOperation, path: str) -> None:
        """Count a mutating operation; raise if the power goes before it, or if it must fail."""
        if not self._has_power:
            raise PowerLoss(f"no power for {operation} of {path}")
        self.operation_count += 1
        if self.journal is not None:
            self.journal.append((operation, path))
        if self._crash_at == self.operation_count and self._loses_power_first(operation):
            self._lose_power()
        error = self._plan.error(operation, path)
        if error is not None:
            raise error

    def _end(self) -> None:
        """Raise if the power goes after the operation that ends here."""
        if self._crash_at == self.operation_count:
            self._lose_power()

    def _loses_power_first(self, operation: DiskOperation) -> bool:
        # A sync that is interrupted has kept a part of what was pending: `crash` chooses which.
        interrupted = self._crash_moment == "during" and operation in ("sync", "sync_directory")
        return interrupted or self._crash_moment == "before"

    def _lose_power(self) -> None:
        self._has_power = False
        self._life += 1
        if self._on_power_loss is not None:
            self._on_power_loss()
        raise PowerLoss(f"power lost {self._crash_moment} operation {self.operation_count}")

    def _require_power(self) -> None:
        if not self._has_power:
            raise PowerLoss("no power")

    def _torn_length(self, length: int) -> int:
        """Return how much of a write happens before the power goes during it."""
        if self._crash_at == self.operation_count and self._crash_moment == "during":
            return int(length * self._written_share)
        return length

    def _fitting_length(self, content: Content, position: int, length: int) -> int:
        """Return how many bytes of a write fit; raise `ENOSPC` if none does."""
        growth = position + length - len(content.current)
        if self._capacity_bytes is None or growth <= 0:
            return length
        missing = self.used_bytes + growth - self._capacity_bytes
        if missing <= 0:
            return length
        self.faults["enospc"] += 1
        if missing >= length:
            raise _error(errno.ENOSPC, "")
        return length - missing

    # Paths.

    def _parent(self, path: str) -> tuple[Folder, str]:
        self._require_power()
        parts = _split(path)
        if not parts:
            raise _error(errno.EISDIR, path)
        return self._folder("/".join(parts[:-1])), parts[-1]

    def _folder(self, path: str) -> Folder:
        entry = self._find(path)
        if entry is None:
            raise _error(errno.ENOENT, path)
        if isinstance(entry, Content):
            raise _error(errno.ENOTDIR, path)
        return entry

    def _find(self, path: str) -> Entry | None:
        entry: Entry | None = self._names.root
        for name in _split(path):
            if not isinstance(entry, Folder):
                return None
            entry = entry.current.get(name)
        return entry


class SimulatedFile:
    """One open file of a `SimulatedDisk`; dead after the disk's next crash or restart."""

    __slots__ = ("_content", "_disk", "_is_open", "_life", "_path")

    def __init__(self, disk: SimulatedDisk, path: str, content: Content) -> None:
        self._disk = disk
        self._path = path
        self._content = content
        self._life = disk._life
        self._is_open = True

    def size(self) -> int:
        """Return the file's length in bytes."""
        self._require_usable()
        return len(self._content.current)

    def read(self, length: int, position: int) -> bytes:
        """Return `length` bytes from `position`, fewer only at the end of the file."""
        self._require_usable()
        if length < 0 or position < 0:
            raise _error(errno.EINVAL, self._path)
        error = self._disk._plan.error("read", self._path)
        if error is not None:
            raise error
        data = bytes(memoryview(self._content.current)[position : position + length])
        self._disk.bytes_read += len(data)
        return data

    def write(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write buffers one after the other at `position`; return how many bytes were written."""
        self._require_usable()
        disk, content, path = self._disk, self._content, self._path
        if len(buffers) > IOV_MAX or position < 0:
            raise _error(errno.EINVAL, path)
        disk._begin("write", path)
        data = b"".join(buffers)
        length = disk._plan.short_length(path, len(data))
        length = disk._torn_length(disk._fitting_length(content, position, length))
        if length:
            size = len(content.current)
            landing = disk._plan.landing(path, position=position, size=size)
            if landing == position:
                content.write(position, data[:length])
            else:
                content.write_misdirected(position, landing, data[:length])
            disk.used_bytes += len(content.current) - size
            disk.bytes_written += length
        disk._end()
        return length

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, or extend it with zeros."""
        self._require_usable()
        if size < 0:
            raise _error(errno.EINVAL, self._path)
        self._disk._begin("truncate", self._path)
        self._disk.used_bytes += size - len(self._content.current)
        self._content.truncate(size)
        self._disk._end()

    def sync(self) -> None:
        """Make the file's bytes and length durable, but not its name."""
        self._require_usable()
        disk = self._disk
        try:
            disk._begin("sync", self._path)
        except OSError:
            self._content.fail_sync()
            raise
        if not disk._plan.is_lying(self._path):
            disk.bytes_synced += self._content.sync()
        disk._end()

    def close(self) -> None:
        """Close the file; idempotent, and harmless on a dead handle."""
        self._is_open = False

    def _require_usable(self) -> None:
        if self._life == self._disk._life and self._is_open:
            return
        if not self._disk.has_power:
            raise PowerLoss(f"no power for {self._path}")
        raise _error(errno.EBADF, self._path)


def _walk(folder: Folder, prefix: str, *, durable: bool) -> Iterator[tuple[str, Content]]:
    """Yield every file below a folder, by path, in the order of their names."""
    entries = folder.durable if durable else folder.current
    for name in sorted(entries):
        entry = entries[name]
        if isinstance(entry, Content):
            yield f"{prefix}/{name}", entry
        else:
            yield from _walk(entry, f"{prefix}/{name}", durable=durable)


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _as_content(entry: Entry | None, path: str) -> Content:
    if entry is None:
        raise _error(errno.ENOENT, path)
    if isinstance(entry, Folder):
        raise _error(errno.EISDIR, path)
    return entry


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
