"""Raft's hard state on disk: term, vote, a commit hint and the membership.

One file has two slots, each a complete checksummed copy. A save writes and syncs the first slot, then the second, and
is acknowledged only then. Between saves both slots hold the same state. If a crash, a torn sector or a flipped byte
destroys one slot, the other holds the last acknowledged state or a newer one that was never acknowledged. If both are
bad, the file is damaged and the replica must not vote.
"""

from __future__ import annotations

import struct

import msgspec

from quiver.errors import DamageError, RequestError, StorageError
from quiver.model import Buffer, Index, NodeId, Term
from quiver.record.checksum import crc32c
from quiver.storage.disk import Disk, File
from quiver.storage.flush import sync_finally, write_all

HARD_STATE_NAME = "hardstate"
SLOT_BYTES = 4096
"""One slot: a multiple of every sector size in use, so that writing one never touches the other."""
MEMBERSHIP_BYTES_MAX = SLOT_BYTES - 64

_MAGIC = b"QVHS"
_VERSION = 1
"""Version of a slot, in its last byte; 0 means 1: slots had no version once."""
_SLOT = struct.Struct("<4sIQQqQI")
_CHECKSUM_END = 8


class StoredHardState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a member must make durable before it sends a message that depends on it."""

    term: Term = Term(0)
    vote: NodeId | None = None
    commit_index: Index = Index(0)
    """A lower bound of the commit index."""
    membership: bytes = b""
    """The newest configurations, as the replication layer encodes them."""


class HardStateFile:
    """The hard state of one log directory. It holds no descriptor: saves are rare. All methods block."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{HARD_STATE_NAME}"
        self._sequence = 0
        self._is_named = False
        """Whether the file's name is known to be in the directory; a new one is durable by then."""

    def load(self) -> StoredHardState | None:
        """Return the saved state; None if none was ever saved here.

        Raises:
            DamageError: both slots are bad; this replica cannot know how it voted.
        """
        if not self._disk.exists(self._path):
            return None
        self._is_named = True
        file = self._disk.open(self._path)
        try:
            slots = read_slots(file)
        finally:
            file.close()
        if not slots:
            return None
        self._sequence, state = max(slots, key=_sequence_of)
        if len(slots) < 2 or slots[0] != slots[1]:
            self.save(state)  # both slots must hold the state that the caller acts on
        return state

    def save(self, state: StoredHardState) -> None:
        """Replace the state. On disk after this returns: `state`, twice.

        Raises:
            RequestError: the membership does not fit into a slot; nothing was done.
            OSError: as the disk raises it; the old or the new state is on disk. Unless the disk is full, the file must
                not be used again.
        """
        if len(state.membership) > MEMBERSHIP_BYTES_MAX:
            raise RequestError(
                f"a membership of {len(state.membership)} bytes exceeds the maximum of {MEMBERSHIP_BYTES_MAX}"
            )
        file = self._disk.open(self._path, create=not self._is_named and not self._disk.exists(self._path))
        try:
            self._sequence += 1
            slot = _encode_slot(self._sequence, state)
            for position in (0, SLOT_BYTES):
                write_all(file, [slot], position)
                sync_finally(file)  # on disk after the first round: one new copy; after the second: both
        finally:
            file.close()
        if not self._is_named:
            self._disk.sync_directory(self._directory)
            self._is_named = True


def write_new_hard_state(disk: Disk, directory: str, state: StoredHardState) -> None:
    """Write the first hard state of a directory that has none; blocks. The caller makes it durable."""
    slot = _encode_slot(1, state)
    file = disk.open(f"{directory}/{HARD_STATE_NAME}", create=True)
    try:
        write_all(file, [slot, slot], 0)
    finally:
        file.close()


def read_slots(file: File) -> list[tuple[int, StoredHardState]]:
    """Return the sequence number and state of each intact slot; empty if no save was ever completed.

    Raises:
        DamageError: both slots were written and neither is intact.
        StorageError: a newer program wrote it.
    """
    data = file.read(2 * SLOT_BYTES, 0)
    slots = [slot for position in (0, SLOT_BYTES) if (slot := _decode_slot(data[position : position + SLOT_BYTES]))]
    if not slots and any(data[SLOT_BYTES:]):
        # The second slot is written only after the first is synced, so a save may have been acknowledged.
        raise DamageError(
            f"{HARD_STATE_NAME}: both copies are damaged; this replica does not know its vote and must not vote"
        )
    return slots


def _encode_slot(sequence: int, state: StoredHardState) -> bytes:
    vote = -1 if state.vote is None else state.vote
    fields = (sequence, state.term, vote, state.commit_index, len(state.membership))
    slot = _SLOT.pack(_MAGIC, 0, *fields) + state.membership
    slot = slot.ljust(SLOT_BYTES - 1, b"\0") + bytes((_VERSION,))
    checksum = crc32c(slot[_CHECKSUM_END:])
    return slot[:4] + checksum.to_bytes(4, "little") + slot[_CHECKSUM_END:]


def _decode_slot(slot: Buffer) -> tuple[int, StoredHardState] | None:
    if len(slot) < SLOT_BYTES:
        return None
    magic, checksum, sequence, term, vote, commit_index, length = _SLOT.unpack_from(slot)
    if magic != _MAGIC or crc32c(slot[_CHECKSUM_END:]) != checksum:
        return None
    if slot[-1] > _VERSION:
        raise StorageError(
            f"{HARD_STATE_NAME} has version {slot[-1]}, but this program reads version {_VERSION}: upgrade this node",
            code="unknown_version",
        )
    membership = bytes(slot[_SLOT.size : _SLOT.size + length])
    state = StoredHardState(
        term=term, vote=None if vote < 0 else NodeId(vote), commit_index=commit_index, membership=membership
    )
    return sequence, state


def _sequence_of(slot: tuple[int, StoredHardState]) -> int:
    return slot[0]
