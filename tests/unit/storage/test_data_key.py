"""Data keys in files: made once, opened by the right keys alone, wrapped again, and safe against crashes."""

from __future__ import annotations

import random

import pytest

from quiver.errors import ConfigError, DamageError, StorageError
from quiver.security.key_ring import KeyRing
from quiver.storage.data_key import DATA_KEY_NAME, load_data_key, open_cipher, rewrap, wrapping_key_of
from quiver.testing import PowerLoss, SimulatedDisk

DIRECTORY = "/data/groups/42"
FILE = f"{DIRECTORY}/{DATA_KEY_NAME}"
OLD, NEW = {"old": bytes(32)}, {"new": b"n" * 32}
KEYS = KeyRing(OLD)


def encrypted() -> SimulatedDisk:
    disk = SimulatedDisk()
    assert open_cipher(disk, DIRECTORY, KEYS, is_encrypted=True) is not None
    return disk


def test_plain_log_gets_no_key_and_no_file() -> None:
    disk = SimulatedDisk()
    assert open_cipher(disk, DIRECTORY, KEYS, is_encrypted=False) is None
    assert not disk.exists(DIRECTORY)


def test_key_is_made_once_and_found_again_whatever_the_metadata_says() -> None:
    disk = encrypted()
    before = disk.read_file(FILE)
    assert open_cipher(disk, DIRECTORY, KEYS, is_encrypted=False) is not None
    assert open_cipher(disk, DIRECTORY, KEYS, is_encrypted=True) is not None
    assert disk.read_file(FILE) == before
    assert load_data_key(disk, DIRECTORY, KEYS) not in before
    assert load_data_key(disk, DIRECTORY, KEYS) != load_data_key(encrypted(), DIRECTORY, KEYS)


def test_node_without_a_key_leaves_everything_as_it_is() -> None:
    disk = encrypted()
    before = disk.read_file(FILE)
    with pytest.raises(StorageError, match=r"set encryption\.key_file") as caught:
        open_cipher(disk, DIRECTORY, None, is_encrypted=True)
    assert caught.value.code == "no_encryption_key"
    assert disk.read_file(FILE) == before
    empty = SimulatedDisk()
    with pytest.raises(StorageError, match="has no key"):
        open_cipher(empty, DIRECTORY, None, is_encrypted=True)
    assert not empty.exists(DIRECTORY)


def test_key_of_another_name_is_asked_for_by_name() -> None:
    with pytest.raises(StorageError, match="by the key 'old', and this node has only new") as caught:
        open_cipher(encrypted(), DIRECTORY, KeyRing(NEW), is_encrypted=True)
    assert caught.value.code == "no_encryption_key"
    assert not isinstance(caught.value, DamageError | ConfigError)


def test_another_key_of_the_same_name_does_not_open_it() -> None:
    with pytest.raises(DamageError, match="another key has that name"):
        open_cipher(encrypted(), DIRECTORY, KeyRing({"old": b"x" * 32}), is_encrypted=True)


def test_missing_file_of_a_log_with_segments_is_damage_and_gets_no_new_key() -> None:
    disk = encrypted()
    disk.write_file(f"{DIRECTORY}/{1:020d}.log", b"sealed entries")
    disk.remove(FILE)
    with pytest.raises(DamageError, match="datakey is missing"):
        open_cipher(disk, DIRECTORY, KEYS, is_encrypted=True)
    assert not disk.exists(FILE)


def test_one_damaged_copy_does_no_harm_and_two_are_reported() -> None:
    disk = encrypted()
    whole = disk.read_file(FILE)
    data_key = load_data_key(disk, DIRECTORY, KEYS)
    length = len(whole[:4096].rstrip())
    for at in range(length):
        changed = bytearray(whole)
        changed[at] ^= 1
        disk.write_file(FILE, bytes(changed))
        assert load_data_key(disk, DIRECTORY, KEYS) == data_key
    changed[4096 + length - 10] ^= 1
    disk.write_file(FILE, bytes(changed))
    with pytest.raises(DamageError, match="cannot be used"):
        load_data_key(disk, DIRECTORY, KEYS)


def test_key_that_was_moved_to_another_replica_does_not_open() -> None:
    disk = encrypted()
    disk.make_directory("/data/groups/43")
    disk.write_file(f"/data/groups/43/{DATA_KEY_NAME}", disk.read_file(FILE))
    with pytest.raises(DamageError, match="moved here"):
        open_cipher(disk, "/data/groups/43", KEYS, is_encrypted=True)


def test_rewrap_keeps_the_data_key_and_frees_the_old_key() -> None:
    disk = encrypted()
    data_key = load_data_key(disk, DIRECTORY, KEYS)
    assert wrapping_key_of(disk, DIRECTORY) == "old"
    assert rewrap(disk, DIRECTORY, KeyRing(NEW | OLD))
    assert wrapping_key_of(disk, DIRECTORY) == "new"
    assert load_data_key(disk, DIRECTORY, KeyRing(NEW)) == data_key
    assert not rewrap(disk, DIRECTORY, KeyRing(NEW | OLD)), "there is nothing left to do"
    with pytest.raises(StorageError, match="by the key 'new'"):
        rewrap(disk, DIRECTORY, KEYS)
    assert not rewrap(SimulatedDisk(), DIRECTORY, KEYS), "a plain log has no data key"


def operations_of_a_rewrap() -> int:
    disk = encrypted()
    before = disk.operation_count
    rewrap(disk, DIRECTORY, KeyRing(NEW | OLD))
    return disk.operation_count - before


@pytest.mark.parametrize("operation", range(1, operations_of_a_rewrap() + 1))
def test_crash_during_rewrap_leaves_the_old_file_or_the_new_one(operation: int) -> None:
    for seed in range(8):
        disk = encrypted()
        data_key = load_data_key(disk, DIRECTORY, KEYS)
        disk.crash_after(operation, moment="during", written_share=random.Random(seed).random())
        with pytest.raises(PowerLoss):
            rewrap(disk, DIRECTORY, KeyRing(NEW | OLD))
        disk.crash(random.Random(seed))
        assert load_data_key(disk, DIRECTORY, KeyRing(NEW | OLD)) == data_key


def operations_of_a_creation() -> int:
    return encrypted().operation_count


@pytest.mark.parametrize("operation", range(1, operations_of_a_creation() + 1))
def test_crash_during_creation_leaves_a_usable_key_or_none(operation: int) -> None:
    for seed in range(8):
        disk = SimulatedDisk()
        disk.crash_after(operation, moment="during", written_share=random.Random(seed).random())
        with pytest.raises(PowerLoss):
            open_cipher(disk, DIRECTORY, KEYS, is_encrypted=True)
        disk.crash(random.Random(seed))
        assert open_cipher(disk, DIRECTORY, KEYS, is_encrypted=True) is not None
        assert wrapping_key_of(disk, DIRECTORY) == "old"
