"""The data key of an encrypted log: a file in the log's directory, wrapped by a key of the node.

Each directory has its own random key, made with the directory and never changed: what replicas send to each other are
records, so no two replicas need the same one. The file exists, durably, before the first segment does. Its two slots
of 4,096 bytes hold the same line of JSON, as those of the hard state do: one damaged copy does no harm.

A directory with this file is an encrypted log, whatever the metadata says; an encrypted topic's directory that has
segments but not this file has lost it, and gets no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quiver.errors import ConfigError, DamageError, DecodeError, StorageError
from quiver.storage.disk import Disk
from quiver.storage.flush import write_all
from quiver.storage.log_directory import make_directory
from quiver.storage.recovery import TEMPORARY_SUFFIX
from quiver.storage.segment import is_segment_name

if TYPE_CHECKING:
    from quiver.security.key_ring import KeyRing, WrappedKey
    from quiver.storage.sealing import LogCipher

DATA_KEY_NAME = "datakey"
DATA_KEY_BYTES = 32
SLOT_BYTES = 4096
FORMAT = 1


class _DataKeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    key: str
    nonce: bytes
    wrapped: bytes


def open_cipher(disk: Disk, directory: str, keys: KeyRing | None, *, is_encrypted: bool) -> LogCipher | None:
    """Return the cipher of a log's directory; None if the log is not encrypted. Blocks.

    With `is_encrypted` a directory without segments becomes an encrypted one: its data key is on disk afterwards.

    Raises:
        StorageError: the node lacks the key (`no_encryption_key`); nothing was changed.
        DamageError: the data key is gone or damaged.
        OSError: as the disk raises it.
    """
    has_file = disk.exists(f"{directory}/{DATA_KEY_NAME}")
    if not has_file and not is_encrypted:
        return None
    if keys is None:
        raise StorageError(
            f"{directory}: it is encrypted, and this node has no key: set encryption.key_file or "
            "encryption.key_command on this node and restart it; nothing was changed",
            code="no_encryption_key",
        )
    if not has_file:
        make_directory(disk, directory)
    if not has_file and any(map(is_segment_name, disk.names(directory))):
        raise DamageError(
            f"{directory}: its topic is encrypted, but {DATA_KEY_NAME} is missing: what is there cannot be read; move "
            "the replica to another node"
        )
    from quiver.storage.sealing import LogCipher  # here: most nodes never need `cryptography`

    data_key = load_data_key(disk, directory, keys) if has_file else _make_data_key(disk, directory, keys)
    return LogCipher(data_key, random_bytes=keys.random_bytes)


def load_data_key(disk: Disk, directory: str, keys: KeyRing) -> bytes:
    """Return the data key of a directory.

    Raises:
        StorageError: the node lacks the key that wrapped it (`no_encryption_key`).
        DamageError: both copies are damaged, or another key of the same name wrapped it.
    """
    errors: list[ConfigError | DecodeError] = []
    for slot in _read_slots(disk, directory):
        try:
            return keys.unwrap(_decode_slot(slot), owner_of(directory))
        except (ConfigError, DecodeError) as error:
            errors.append(error)
    sentence = f"{directory}: {DATA_KEY_NAME} cannot be used: {errors[-1].message}; nothing was changed"
    if any(isinstance(error, ConfigError) for error in errors):
        raise StorageError(sentence, code="no_encryption_key")
    raise DamageError(sentence)


def wrapping_key_of(disk: Disk, directory: str) -> str | None:
    """Return the name of the key that wraps a directory's data key; None if the log is not encrypted.

    Raises:
        DamageError: both copies are damaged.
    """
    if not disk.exists(f"{directory}/{DATA_KEY_NAME}"):
        return None
    for slot in _read_slots(disk, directory):
        try:
            return _decode_slot(slot).key
        except DecodeError:
            continue
    raise DamageError(f"{directory}: both copies in {DATA_KEY_NAME} are damaged")


def rewrap(disk: Disk, directory: str, keys: KeyRing) -> bool:
    """Wrap a directory's data key by the first key; return whether another one had wrapped it.

    The data key stays the same. On disk after this returns: the new file; after a crash: it or the old one. The log
    may be open.

    Raises:
        StorageError, DamageError: as `load_data_key` raises it; nothing was changed.
    """
    if wrapping_key_of(disk, directory) in (None, keys.first):
        return False
    _write(disk, directory, keys.wrap(load_data_key(disk, directory, keys), owner_of(directory)))
    return True


def owner_of(directory: str) -> str:
    """Return what a data key is bound to: the name of the directory, which is the number of the replica's group."""
    return directory.rpartition("/")[2]


def _make_data_key(disk: Disk, directory: str, keys: KeyRing) -> bytes:
    data_key = keys.random_bytes(DATA_KEY_BYTES)
    _write(disk, directory, keys.wrap(data_key, owner_of(directory)))
    return data_key


def _write(disk: Disk, directory: str, wrapped: WrappedKey) -> None:
    line = msgspec.json.encode(_DataKeyFile(FORMAT, wrapped.key, wrapped.nonce, wrapped.wrapped))
    slot = line.ljust(SLOT_BYTES - 1) + b"\n"
    path = f"{directory}/{DATA_KEY_NAME}"
    temporary = path + TEMPORARY_SUFFIX
    if disk.exists(temporary):
        disk.remove(temporary)  # left by a write that failed
    file = disk.open(temporary, create=True)
    try:
        write_all(file, [slot, slot], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_directory(directory)  # on disk now: the wrapped key, under its name


def _read_slots(disk: Disk, directory: str) -> tuple[bytes, bytes]:
    file = disk.open(f"{directory}/{DATA_KEY_NAME}")
    try:
        data = file.read(2 * SLOT_BYTES, 0)
    finally:
        file.close()
    return data[:SLOT_BYTES], data[SLOT_BYTES:]


def _decode_slot(slot: bytes) -> WrappedKey:
    from quiver.security.key_ring import WrappedKey

    try:
        found = msgspec.json.decode(slot, type=_DataKeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise DecodeError("the copy is damaged") from None
    if found.format != FORMAT:
        raise DecodeError(f"format {found.format} is unsupported, expected {FORMAT}: upgrade this node")
    return WrappedKey(found.key, found.nonce, found.wrapped)
