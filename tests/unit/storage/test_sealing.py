"""Encrypted logs: what is on disk is unreadable and bound to its place, and no nonce is ever used twice."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_world import (
    DIRECTORY,
    TINY,
    all_entries,
    all_values,
    append,
    control_batch,
    data_batch,
    next_batches,
    open_log,
)

from quiver.errors import DamageError, DecodeError
from quiver.model import Buffer, Index, Offset, Term
from quiver.record.batch import Batch
from quiver.record.header import HEADER_BYTES, SEALED_EXTRA_BYTES, decode_header, verify_payload
from quiver.storage import SnapshotStore, StoredSnapshot
from quiver.storage.inspection import verify_directory
from quiver.storage.scan import BadFrame, scan
from quiver.storage.sealing import ENTRIES_PER_KEY, NONCE_BYTES, LogCipher
from quiver.storage.snapshots import decode_snapshot
from quiver.testing import SimulatedDisk

KEY = bytes(range(32))
SECRET = b"the quick brown fox"


def sealed_and_header(cipher: LogCipher, batch: Batch) -> tuple[bytes, Batch]:
    sealed = cipher.seal_batch(batch.data, batch.header.index)
    return sealed, Batch(sealed, decode_header(sealed, may_be_sealed=True))


def batches() -> list[Batch]:
    return [
        data_batch([SECRET, b"", b"x" * 3000], index=7, offset=3, term=2),
        control_batch(SECRET, index=ENTRIES_PER_KEY, offset=9),
        control_batch(b"", index=ENTRIES_PER_KEY - 1, offset=9),
    ]


@pytest.mark.parametrize("batch", batches(), ids=str)
def test_sealed_batch_opens_to_the_same_bytes(batch: Batch) -> None:
    cipher = LogCipher(KEY)
    sealed, stored = sealed_and_header(cipher, batch)
    assert SECRET not in sealed
    assert len(sealed) == len(batch.data) + SEALED_EXTRA_BYTES
    verify_payload(sealed, stored.header)  # whoever has no key can still check it
    opened = LogCipher(KEY).open_batch(sealed, stored.header)
    assert bytes(opened.data) == bytes(batch.data)
    assert opened.header == batch.header
    opened.verify()


def test_sealed_batch_is_no_batch_for_other_readers() -> None:
    sealed, _ = sealed_and_header(LogCipher(KEY), batches()[0])
    with pytest.raises(DecodeError, match="encoding 1"):
        Batch.decode(sealed)


def test_every_flipped_bit_of_header_and_payload_is_detected_even_with_repaired_checksums() -> None:
    cipher = LogCipher(KEY)
    sealed, stored = sealed_and_header(cipher, data_batch([SECRET], index=7, offset=3))
    authenticated = (*range(8, 92), *range(HEADER_BYTES, len(sealed)))
    for at in authenticated:
        changed = bytearray(sealed)
        changed[at] ^= 1
        # The header is given as it was: as if the attacker had computed the checksums again.
        with pytest.raises(DecodeError, match="cannot be decrypted"):
            cipher.open_batch(bytes(changed), stored.header)


def test_other_keys_do_not_open_it() -> None:
    sealed, stored = sealed_and_header(LogCipher(KEY), batches()[0])
    with pytest.raises(DecodeError, match="cannot be decrypted"):
        LogCipher(KEY[::-1]).open_batch(sealed, stored.header)


def test_plain_batch_in_an_encrypted_log_is_refused() -> None:
    plain = batches()[0]
    with pytest.raises(DecodeError, match="is not encrypted"):
        LogCipher(KEY).open_batch(plain.data, plain.header)


# -- whole logs ----------------------------------------------------------------------------------


def files(disk: SimulatedDisk) -> dict[str, bytes]:
    return {name: disk.read_file(f"{DIRECTORY}/{name}") for name in disk.names(DIRECTORY)}


def test_log_keeps_its_records_and_shows_none_on_disk() -> None:
    async def scenario() -> None:
        disk, cipher = SimulatedDisk(), LogCipher(KEY)
        log = open_log(disk, cipher=cipher)
        values = [SECRET + b"%d" % number * 9 for number in range(40)]
        for few in range(0, 40, 4):
            await append(log, *values[few : few + 4])
        assert await all_values(log) == values
        assert len(disk.names(DIRECTORY)) > 4
        found = await log.find_timestamp(1000, end_offset=log.end_offset)
        assert found == 0
        await log.close()
        assert not any(SECRET in data for data in files(disk).values())
        log = open_log(disk, cipher=LogCipher(KEY), verify=True)
        assert (log.damage, log.warnings) == ((), ())
        assert await all_values(log) == values
        assert verify_directory(disk, DIRECTORY).damage == ()  # without any key

    asyncio.run(scenario())


def test_positions_of_the_bookkeeping_are_those_of_a_rescan() -> None:
    async def scenario() -> None:
        disk = SimulatedDisk()
        log = open_log(disk, cipher=LogCipher(KEY))
        for number in range(12):
            await append(log, b"%d" % number * 50)
        before = log.status().size_bytes, [(s.name, s.size_bytes, s.index.encode()) for s in log._segments]
        await log.close()
        log = open_log(disk, cipher=LogCipher(KEY), verify=True)
        after = log.status().size_bytes, [(s.name, s.size_bytes, s.index.encode()) for s in log._segments]
        assert before[1][:-1] == after[1][:-1]
        assert before[0] == after[0]  # the mark that the clean stop has added is where the next one goes

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("written_by", "read_by"), [(KEY, None), (None, KEY), (KEY, KEY[::-1])], ids=["none", "plain", "other"]
)
def test_reading_with_the_wrong_key_or_none_is_damage_and_changes_nothing(
    written_by: bytes | None, read_by: bytes | None
) -> None:
    async def scenario() -> None:
        disk = SimulatedDisk()
        log = open_log(disk, cipher=LogCipher(written_by) if written_by else None)
        await append(log, b"one", b"two")
        await log.close()
        before = files(disk)
        log = open_log(disk, cipher=LogCipher(read_by) if read_by else None)
        with pytest.raises(DamageError, match=r"encrypted|decrypted"):
            await all_entries(log)
        await log.close()
        assert all(data.startswith(before[name]) for name, data in files(disk).items())  # a close appends a mark

    asyncio.run(scenario())


def test_entry_of_another_log_in_its_place_is_damage() -> None:
    """Checksums alone do not notice a whole valid entry of another replica at the same index."""

    async def scenario() -> None:
        disks = [SimulatedDisk(), SimulatedDisk()]
        for number, disk in enumerate(disks):
            log = open_log(disk, cipher=LogCipher(bytes([number]) * 32))
            await append(log, b"value %d" % number)
            await log.close()
        path = f"{DIRECTORY}/{1:020d}.log"
        disks[0].write_file(path, disks[1].read_file(path))
        assert verify_directory(disks[0], DIRECTORY).damage == ()
        with pytest.raises(DamageError, match="cannot be decrypted"):
            await all_entries(open_log(disks[0], cipher=LogCipher(bytes(32))))

    asyncio.run(scenario())


def test_entry_that_cannot_be_decrypted_is_found_by_a_verifying_start_and_moved_aside() -> None:
    """A read that fails makes the next start verify; it must find what the read found, or the replica never heals."""

    async def scenario() -> None:
        disk, other = SimulatedDisk(), SimulatedDisk()
        for number, one in enumerate((disk, other)):
            log = open_log(one, cipher=LogCipher(bytes([number]) * 32))
            for value in (b"first", b"second", b"third" * 400, b"last"):
                await append(log, value)
            await log.close()
        names = disk.names(DIRECTORY)
        assert len(names) > 1
        disk.write_file(f"{DIRECTORY}/{names[0]}", other.read_file(f"{DIRECTORY}/{names[0]}"))
        assert open_log(disk.clone(), cipher=LogCipher(bytes(32))).damage == ()
        damaged = open_log(disk, cipher=LogCipher(bytes(32)), verify=True)
        assert [damage.first_index for damage in damaged.damage] == [1]
        assert damaged.damage[0].end_index_max >= 5
        await damaged.close()
        log = open_log(disk, cipher=LogCipher(bytes(32)), verify=True, discard_damage=True)
        assert log.end_index == 1
        await append(log, b"again")
        await log.close()
        assert await all_values(open_log(disk, cipher=LogCipher(bytes(32)), verify=True)) == [b"again"]

    asyncio.run(scenario())


class RecordingCipher(LogCipher):
    """Remembers under which derived key and nonce it has sealed what."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.sealed: list[tuple[int, bytes, bytes]] = []

    def seal_batch(self, data: Buffer, index: int) -> bytes:
        sealed = super().seal_batch(data, index)
        nonce = sealed[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES]
        self.sealed.append((index // ENTRIES_PER_KEY, nonce, bytes(data)))
        return sealed


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.booleans()), max_size=8))
def test_no_nonce_repeats_however_often_the_log_is_truncated_rewritten_and_reopened(
    steps: list[tuple[int, int, bool]],
) -> None:
    async def scenario() -> None:
        disk, cipher = SimulatedDisk(), RecordingCipher()
        log = open_log(disk, TINY, cipher=cipher)
        for term, (count, cut, is_reopened) in enumerate(steps, start=1):
            await append(log, *[b"%d" % number * 40 for number in range(count)], term=term)
            log.truncate_suffix(Index(max(log.first_index, log.end_index - cut)))
            await append(log, b"rewritten", term=term)
            if is_reopened:
                await log.close()
                log = open_log(disk, TINY, cipher=cipher)
        assert len(await all_entries(log)) == log.end_index - log.first_index
        await log.close()
        used = sorted((key, nonce) for key, nonce, _ in cipher.sealed)
        assert all(one != other for one, other in pairwise(used))

    asyncio.run(scenario())


def test_large_flush_with_marks_and_rolls_seals_batches_alone() -> None:
    async def scenario() -> None:
        disk = SimulatedDisk()
        log = open_log(disk, cipher=LogCipher(KEY))
        await append(log, b"first")
        batches = next_batches(log, *[b"%d" % number * 30 for number in range(60)])
        log.append(batches)
        await append(log, b"last")
        entries = await all_entries(log)
        assert [bytes(entry.data) for entry in entries[1:-1]] == [bytes(batch.data) for batch in batches]
        for name in disk.names(DIRECTORY)[:-1]:
            file = disk.open(f"{DIRECTORY}/{name}")
            *_, last = scan(file, 64, file.size())
            assert isinstance(last, BadFrame), "a sealed segment ends with its footer"

    asyncio.run(scenario())


# -- snapshots -----------------------------------------------------------------------------------

SNAPSHOT = StoredSnapshot(last_index=Index(3), last_term=Term(1), end_offset=Offset(3), state=SECRET * 9)


def test_snapshots_and_checkpoints_are_encrypted() -> None:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    store = SnapshotStore(disk, DIRECTORY, cipher=LogCipher(KEY))
    store.save(SNAPSHOT)
    store.save_checkpoint(SNAPSHOT)
    assert not any(SECRET in data for data in files(disk).values())
    assert store.load_newest() == (SNAPSHOT, ())
    assert store.load_checkpoint() == (SNAPSHOT, ())
    with pytest.raises(DamageError, match="it is encrypted"):
        SnapshotStore(disk, DIRECTORY).load_newest()
    with pytest.raises(DamageError, match="cannot be decrypted"):
        SnapshotStore(disk, DIRECTORY, cipher=LogCipher(KEY[::-1])).load_newest()


def test_plain_snapshot_beside_an_encrypted_log_is_refused() -> None:
    with pytest.raises(DecodeError, match="is not encrypted"):
        decode_snapshot(SNAPSHOT.encode(), LogCipher(KEY))


def test_sealed_snapshot_is_bound_to_its_index() -> None:
    cipher = LogCipher(KEY)
    moved = StoredSnapshot(last_index=Index(4), last_term=Term(1), end_offset=Offset(3), state=b"")
    sealed = cipher.seal_snapshot(SNAPSHOT.state, b"numbers of index 3")
    with pytest.raises(DecodeError, match="cannot be decrypted"):
        cipher.open_snapshot(sealed, b"numbers of index 4")
    assert decode_snapshot(moved.encode(cipher), cipher) == moved


# -- inspection ----------------------------------------------------------------------------------


def test_verification_with_the_cipher_also_decrypts_every_entry_and_snapshot() -> None:
    disk = SimulatedDisk()

    async def write() -> None:
        log = open_log(disk, cipher=LogCipher(KEY))
        await append(log, *[b"%d" % number * 90 for number in range(20)])
        SnapshotStore(disk, DIRECTORY, cipher=LogCipher(KEY)).save(SNAPSHOT)
        await log.close()

    asyncio.run(write())
    assert verify_directory(disk, DIRECTORY, LogCipher(KEY)).is_whole
    assert verify_directory(disk, DIRECTORY).is_whole
    found = verify_directory(disk, DIRECTORY, LogCipher(KEY[::-1]))
    assert sum("cannot be decrypted" in damage.reason for damage in found.damage) == 21
