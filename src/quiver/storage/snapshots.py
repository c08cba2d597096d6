"""Store snapshots of small state (deduplication, cursors, membership) beside the log, each at an index.

A snapshot is one file, written under a temporary name, synced, then renamed: it exists completely or not at all. The
newest two are kept. If one is damaged, a restart replays more entries from the older one, provided that the log still
contains them.

A checkpoint is a snapshot under its own file name that only makes a restart faster. The log does not depend on it, and
a restart ignores a checkpoint that is missing, damaged or inconsistent with the log. All methods block.

Beside an encrypted log the state of each is encrypted, too: version 2. Only this store reads that version; a snapshot
that is sent to another member is always plain.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from quiver.errors import DamageError, DecodeError
from quiver.model import Buffer, Index, Offset, Term
from quiver.record.checksum import crc32c
from quiver.storage.disk import Disk, is_out_of_space
from quiver.storage.flush import write_all
from quiver.storage.recovery import TEMPORARY_SUFFIX
from quiver.storage.truncation import remove_durably

if TYPE_CHECKING:
    from quiver.storage.sealing import LogCipher

SNAPSHOTS_KEPT = 2
CHECKPOINT_NAME = "checkpoint"
_PREFIX = "snapshot-"
_MAGIC = b"QVSN"
_VERSION = 1
_VERSION_SEALED = 2
_HEADER = struct.Struct("<4sIB3xQQqQ")
_NUMBERS = struct.Struct("<B3xQQq")
"""The part of the header that is authenticated with an encrypted state."""
_CHECKSUM_END = 8


class StoredSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state after every entry up to and including `last_index` is applied."""

    last_index: Index
    last_term: Term
    end_offset: Offset
    """The offset of the first record after `last_index`."""
    state: bytes

    def encode(self, cipher: LogCipher | None = None) -> bytes:
        """Return the file's bytes."""
        version = _VERSION if cipher is None else _VERSION_SEALED
        numbers = _NUMBERS.pack(version, self.last_index, self.last_term, self.end_offset)
        state = self.state if cipher is None else cipher.seal_snapshot(self.state, numbers)
        body = b"".join((numbers, len(state).to_bytes(8, "little"), state))  # a join lets others run while it copies
        return b"".join((_MAGIC, crc32c(body).to_bytes(4, "little"), body))


def decode_snapshot(data: Buffer, cipher: LogCipher | None = None) -> StoredSnapshot:
    """Decode the bytes of a snapshot file, and decrypt its state if there is a cipher.

    Raises:
        DecodeError: wrong length, magic, version or checksum; with a cipher, also a state that it cannot open.
    """
    snapshot, version = read_snapshot(data)
    if version == _VERSION_SEALED and cipher is None:
        raise DecodeError("snapshot: it is encrypted, but its log is not")
    if cipher is None:
        return snapshot
    if version != _VERSION_SEALED:
        raise DecodeError("snapshot: it is not encrypted, but its log is")
    state = cipher.open_snapshot(snapshot.state, bytes(data[_CHECKSUM_END : _CHECKSUM_END + _NUMBERS.size]))
    return msgspec.structs.replace(snapshot, state=state)


def read_snapshot(data: Buffer) -> tuple[StoredSnapshot, int]:
    """Return the content of a snapshot file as it is stored, encrypted or not, and its version.

    Raises:
        DecodeError: wrong length, magic, version or checksum.
    """
    if len(data) < _HEADER.size:
        raise DecodeError(f"snapshot: {len(data)} bytes are too few for its header")
    magic, checksum, version, last_index, last_term, end_offset, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or crc32c(data[_CHECKSUM_END:]) != checksum:
        raise DecodeError("snapshot: wrong magic or checksum")
    if version not in (_VERSION, _VERSION_SEALED) or length != len(data) - _HEADER.size:
        raise DecodeError(f"snapshot: unsupported version {version}, or wrong length {length} of its state")
    state = bytes(data[_HEADER.size :])
    return StoredSnapshot(last_index=last_index, last_term=last_term, end_offset=end_offset, state=state), version


class SnapshotStore:
    """The snapshots of one log directory."""

    def __init__(self, disk: Disk, directory: str, *, cipher: LogCipher | None = None) -> None:
        self._disk = disk
        self._directory = directory
        self._cipher = cipher

    def save(self, snapshot: StoredSnapshot) -> None:
        """Add a snapshot and remove all but the newest `SNAPSHOTS_KEPT`. On disk after this returns: `snapshot`."""
        self._write(snapshot, snapshot_name(snapshot.last_index))
        for name in self.names()[:-SNAPSHOTS_KEPT]:
            remove_durably(self._disk, self._directory, name)

    def save_checkpoint(self, checkpoint: StoredSnapshot) -> None:
        """Replace the checkpoint. On disk after this returns: `checkpoint`; after a crash: it or the old one."""
        self._write(checkpoint, CHECKPOINT_NAME)

    def load_checkpoint(self) -> tuple[StoredSnapshot | None, tuple[str, ...]]:
        """Return the checkpoint, or None and, if it exists but is damaged, a warning."""
        if not self._disk.exists(f"{self._directory}/{CHECKPOINT_NAME}"):
            return None, ()
        try:
            return self._load(CHECKPOINT_NAME), ()
        except DecodeError as error:
            return None, (f"{CHECKPOINT_NAME}: {error}; it is ignored",)

    def load_newest(self) -> tuple[StoredSnapshot | None, tuple[str, ...]]:
        """Return the newest intact snapshot, if any, and a warning for each newer one that is damaged.

        Raises:
            DamageError: there are snapshots and none is intact.
        """
        warnings: list[str] = []
        for name in reversed(self.names()):
            try:
                return self._load(name), tuple(warnings)
            except DecodeError as error:
                warnings.append(f"{name}: {error}")
        if warnings:
            raise DamageError("no snapshot is intact: " + "; ".join(warnings))
        return None, ()

    def load_from(self, index: Index) -> StoredSnapshot | None:
        """Return the oldest intact snapshot whose `last_index` is at least `index`; None if there is none."""
        for name in self.names():
            if name >= snapshot_name(index):
                try:
                    return self._load(name)
                except DecodeError:
                    continue  # a newer one may be intact
        return None

    def names(self) -> list[str]:
        """Return the file names of the snapshots, oldest first."""
        return [name for name in self._disk.names(self._directory) if is_snapshot_name(name)]

    def _write(self, snapshot: StoredSnapshot, name: str) -> None:
        path = f"{self._directory}/{name}"
        temporary = path + TEMPORARY_SUFFIX
        if self._disk.exists(temporary):
            self._disk.remove(temporary)  # left by a save that failed
        file = self._disk.open(temporary, create=True)
        try:
            write_all(file, [snapshot.encode(self._cipher)], 0)
            file.sync()
        except OSError as error:
            if is_out_of_space(error):
                with suppress(OSError):  # what does not fit must not take the room of votes
                    self._disk.remove(temporary)
            raise
        finally:
            file.close()
        self._disk.rename(temporary, path)
        self._disk.sync_directory(self._directory)  # on disk now: the snapshot, under its name

    def _load(self, name: str) -> StoredSnapshot:
        file = self._disk.open(f"{self._directory}/{name}")
        try:
            return decode_snapshot(file.read(file.size(), 0), self._cipher)
        finally:
            file.close()


def snapshot_name(last_index: int) -> str:
    """Return the file name of the snapshot at this index."""
    return f"{_PREFIX}{last_index:020d}"


def is_snapshot_name(name: str) -> bool:
    """Return whether a file name is that of a snapshot."""
    digits = name.removeprefix(_PREFIX)
    return name.startswith(_PREFIX) and len(digits) == 20 and digits.isdigit()
