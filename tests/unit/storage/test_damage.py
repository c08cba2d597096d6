"""Rot: a flipped byte anywhere is harmless or reported, and never comes back as data."""

from __future__ import annotations

import asyncio

import pytest
from log_world import (
    DIRECTORY,
    TINY,
    all_entries,
    all_values,
    append,
    data_batch,
    next_batches,
    open_log,
    wait_durable,
)
from test_log import VALUES, runs

from quiver.config import LogSettings
from quiver.errors import DamageError, LogClosedError, QuiverError
from quiver.model import Index, NodeId, Offset, Term
from quiver.storage import HardStateFile, SnapshotStore, StoredHardState, StoredSnapshot
from quiver.storage.frames import MARK_BYTES, SEGMENT_HEADER_BYTES, encode_mark
from quiver.storage.scan import CHUNK_BYTES
from quiver.storage.segment import segment_name
from quiver.testing import SimulatedDisk

SETTINGS = TINY
STATE = StoredHardState(term=Term(7), vote=NodeId(3), commit_index=Index(12), membership=b"members")


async def filled_disk(*, is_closed: bool = True) -> SimulatedDisk:
    """A log of several sealed segments and an active one, with hard state and two snapshots."""
    disk = SimulatedDisk()
    log = open_log(disk, SETTINGS)
    for first in range(0, 20, 2):
        await append(log, *VALUES[first : first + 2], term=1 + first // 8)
    store = SnapshotStore(disk, DIRECTORY)
    store.save(StoredSnapshot(last_index=Index(5), last_term=Term(1), end_offset=Offset(5), state=b"five" * 20))
    store.save(StoredSnapshot(last_index=Index(9), last_term=Term(1), end_offset=Offset(9), state=b"nine" * 20))
    hard_state = HardStateFile(disk, DIRECTORY)
    hard_state.save(STATE)
    if is_closed:
        await log.close()
    disk.sync_all()
    disk.restart()
    return disk


def flip(disk: SimulatedDisk, path: str, position: int, mask: int) -> None:
    data = bytearray(disk.read_file(path))
    data[position] ^= mask
    disk.write_file(path, bytes(data))


async def read_and_report(disk: SimulatedDisk) -> tuple[dict[int, bytes], bool]:
    """Return each entry that can be read, and whether anything was reported."""
    reported = False
    held: dict[int, bytes] = {}
    try:
        log = open_log(disk, SETTINGS)
    except DamageError:
        return {}, True
    reported = bool(log.damage or log.warnings)
    for index in range(log.first_index, log.end_index):
        try:
            (entry,) = await log.read_entries(Index(index), end_index=Index(index + 1), bytes_max=1)
            held[index] = bytes(entry.data)
        except DamageError:
            reported = True
    return held, reported


@pytest.mark.parametrize("is_closed", [True, False])
def test_one_flipped_byte_in_a_segment_is_harmless_or_reported(is_closed: bool) -> None:
    async def flip_everywhere() -> None:
        source = await filled_disk(is_closed=is_closed)
        truth, reported = await read_and_report(source.clone())
        assert len(truth) == 20
        assert not reported
        segments = [path for path in source.paths() if path.endswith(".log")]
        assert len(segments) > 3
        for path in segments:
            for position in range(len(source.read_file(path))):
                disk = source.clone()
                flip(disk, path, position, 1 << position % 8 if position % 3 else 0xFF)
                held, reported = await read_and_report(disk)
                assert held.items() <= truth.items(), f"a wrong byte came back: {path} {position}"
                assert held == truth or reported, f"silently lost: {path} {position}"

    asyncio.run(flip_everywhere())


@runs
async def test_one_flipped_byte_in_the_hard_state_is_harmless() -> None:
    source = await filled_disk()
    path = f"{DIRECTORY}/hardstate"
    for position in range(0, len(source.read_file(path)), 3):
        disk = source.clone()
        flip(disk, path, position, 0x10)
        assert HardStateFile(disk, DIRECTORY).load() == STATE
        # What was found is there twice again: a second flip, in the other copy, does no harm either.
        flip(disk, path, (position + 4096) % 8192, 0x10)
        assert HardStateFile(disk, DIRECTORY).load() == STATE


@runs
async def test_hard_state_with_both_copies_damaged_is_reported() -> None:
    disk = await filled_disk()
    for position in (10, 4106):
        flip(disk, f"{DIRECTORY}/hardstate", position, 1)
    with pytest.raises(DamageError):
        HardStateFile(disk, DIRECTORY).load()


@runs
async def test_one_flipped_byte_in_a_snapshot_is_reported_and_the_older_one_used() -> None:
    source = await filled_disk()
    newest = source.paths()[-1]
    assert newest.endswith("snapshot-00000000000000000009")
    for position in range(len(source.read_file(newest))):
        disk = source.clone()
        flip(disk, newest, position, 0x80)
        snapshot, warnings = SnapshotStore(disk, DIRECTORY).load_newest()
        assert snapshot is not None
        assert snapshot.state == b"five" * 20
        assert len(warnings) == 1


@runs
async def test_snapshots_that_are_all_damaged_are_reported() -> None:
    disk = await filled_disk()
    for index in (5, 9):
        flip(disk, f"{DIRECTORY}/snapshot-{index:020d}", 50, 1)
    with pytest.raises(DamageError):
        SnapshotStore(disk, DIRECTORY).load_newest()


@runs
async def test_a_damaged_log_serves_what_lies_before_and_takes_nothing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, b"good", b"hit" * 20, b"behind")
    await log.close()
    flip(disk, f"{DIRECTORY}/{segment_name(1)}", 200, 1)
    log = open_log(disk)
    assert await all_values(log) == [b"good"]
    (damage,) = log.damage
    assert (damage.first_index, damage.name) == (2, segment_name(1))
    assert damage.end_index_max >= 4
    assert "bytes" in str(damage)
    with pytest.raises(LogClosedError, match="damaged"):
        log.append(next_batches(log, b"x"))
    await log.close()


@pytest.mark.parametrize(("position", "end_index_max"), [(50, 4), (150, 4), (300, 4), (400, 4)])
@runs
async def test_how_much_may_be_lost_is_told_closely(position: int, end_index_max: int) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    for value in (b"a" * 20, b"b" * 20, b"c" * 20):
        await append(log, value)
    await log.close()
    flip(disk, f"{DIRECTORY}/{segment_name(1)}", SEGMENT_HEADER_BYTES + position, 1)
    damage = open_log(disk).damage
    assert damage
    assert damage[0].end_index_max == end_index_max


@pytest.mark.parametrize("victim", [0, 1, -1])
@runs
async def test_discarding_damage_sets_the_rest_aside_and_goes_on(victim: int) -> None:
    disk = await filled_disk()
    segments = [path for path in disk.paths() if path.endswith(".log")]
    path = segments[victim]
    name = path.rpartition("/")[2]
    log = open_log(disk, SETTINGS)
    await log.close()
    flip(disk, path, SEGMENT_HEADER_BYTES + 100, 1)
    if victim != -1:  # a sealed segment is read at opening only when its footer is bad, too
        flip(disk, path, len(disk.read_file(path)) - 30, 1)
    first_index = int(name[:20])
    log = open_log(disk, SETTINGS, discard_damage=True)
    assert log.damage[0].first_index == log.end_index == first_index
    assert disk.exists(f"{path}.damaged")
    replacement = data_batch([b"from a peer"], index=first_index, offset=log.end_offset, term=9)
    log.append([replacement])
    await wait_durable(log, log.end_index)
    await log.close()
    log = open_log(disk, SETTINGS)
    assert log.damage == ()
    assert await all_values(log) == [*VALUES[: first_index - 1], b"from a peer"]


@runs
async def test_discarding_damage_again_after_a_crash_in_the_middle_works() -> None:
    disk = await filled_disk()
    path = [path for path in disk.paths() if path.endswith(".log")][-1]
    flip(disk, path, SEGMENT_HEADER_BYTES + 100, 1)
    disk.write_file(f"{path}.damaged", b"half a copy")
    log = open_log(disk, SETTINGS, discard_damage=True)
    assert log.damage
    assert len(disk.read_file(f"{path}.damaged")) > 100


@runs
async def test_a_missing_segment_in_the_middle_is_damage() -> None:
    disk = await filled_disk()
    names = [path for path in disk.paths() if path.endswith(".log")]
    disk.remove(names[1])
    log = open_log(disk, SETTINGS)
    (damage,) = log.damage
    assert damage.first_index == log.end_index == int(names[1][-24:-4])
    assert damage.end_index_max == 21, "all that lies behind the hole is given up with it"
    assert len(await all_entries(log)) == log.end_index - 1


@runs
async def test_a_damaged_mark_hides_no_entry() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    (first,) = await append(log, b"first")
    await append(log, b"second")
    await append(log, b"third")
    await log.close()
    position = SEGMENT_HEADER_BYTES + len(first.data)
    flip(disk, f"{DIRECTORY}/{segment_name(1)}", position + MARK_BYTES - 1, 1)
    log = open_log(disk)
    assert log.damage == ()
    assert "holds no entry" in log.warnings[0]
    assert await all_values(log) == [b"first", b"second", b"third"]
    log.truncate_suffix(Index(3))
    await append(log, b"instead")
    assert await all_values(open_log(disk)) == [b"first", b"second", b"instead"]


@runs
async def test_header_of_the_only_segment_is_rebuilt_from_its_first_batch_or_reported() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await log.close()
    empty = disk.clone()
    flip(empty, f"{DIRECTORY}/{segment_name(1)}", 20, 1)
    with pytest.raises(DamageError, match="first segment"):
        open_log(empty)
    log = open_log(disk)
    await append(log, b"a")
    flip(disk, f"{DIRECTORY}/{segment_name(1)}", 20, 1)
    log = open_log(disk)
    assert "rebuilt" in log.warnings[0]
    assert await all_values(log) == [b"a"]


@runs
async def test_header_of_a_first_segment_that_is_not_the_first_ever_is_not_made_up() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await log.reset(first_index=Index(9), first_offset=Offset(5), previous_term=Term(3))
    await append(log, b"a", term=4)
    flip(disk, f"{DIRECTORY}/{segment_name(9)}", 20, 1)
    with pytest.raises(DamageError, match="where the log starts"):
        open_log(disk)


def destroy(disk: SimulatedDisk, path: str, first: int, end: int, *, with_byte: int = 0x55) -> None:
    data = bytearray(disk.read_file(path))
    data[first:end] = bytes([with_byte]) * (end - first)
    disk.write_file(path, bytes(data))


async def last_segment(disk: SimulatedDisk, *values: bytes) -> str:
    """Append values, each with a flush of its own, and return the path of the last segment."""
    log = open_log(disk, SETTINGS)
    for value in values:
        await append(log, value)
    return [path for path in disk.paths() if path.endswith(".log")][-1]


@runs
async def test_a_destroyed_first_sector_of_the_last_segment_is_damage_and_the_file_stays() -> None:
    disk = SimulatedDisk()
    path = await last_segment(disk, *VALUES[:8])
    assert not path.endswith(segment_name(1))
    destroy(disk, path, 0, 200)
    log = open_log(disk, SETTINGS)
    (damage,) = log.damage
    assert damage.first_index == log.end_index == int(path[-24:-4])
    assert disk.exists(path)
    assert await all_values(log) == VALUES[: log.end_index - 1]


@runs
async def test_a_zeroed_first_sector_of_the_last_segment_is_damage_if_a_mark_vouches_for_it() -> None:
    disk = SimulatedDisk()
    path = await last_segment(disk, *VALUES[:8])
    whole = disk.read_file(path)
    mark = whole.index(b"MRKQ")
    destroy(disk, path, 0, mark - 10, with_byte=0)
    assert open_log(disk.clone(), SETTINGS).damage
    unmarked = disk.clone()
    unmarked.write_file(path, disk.read_file(path)[:mark])
    log = open_log(unmarked, SETTINGS)
    assert log.damage == ()
    assert not unmarked.exists(path)
    assert "torn at birth" in log.warnings[0]


@runs
async def test_a_segment_in_the_middle_that_cannot_be_read_is_damage_and_the_file_stays() -> None:
    disk = await filled_disk()
    path = [path for path in disk.paths() if path.endswith(".log")][1]
    disk.write_file(path, bytes(len(disk.read_file(path))))
    log = open_log(disk, SETTINGS)
    assert [damage.first_index for damage in log.damage] == [log.end_index]
    assert log.damage[0].end_index_max == 21
    assert disk.exists(path)


@runs
async def test_a_first_segment_without_header_and_footer_is_not_taken_for_a_leftover_of_a_reset() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, SETTINGS)
    await log.reset(first_index=Index(1), first_offset=Offset(0), previous_term=Term(0))
    await append(log, *VALUES[:20])
    await log.close()
    path = f"{DIRECTORY}/{segment_name(1)}"
    flip(disk, path, 20, 1)
    flip(disk, path, len(disk.read_file(path)) - 20, 1)
    log = open_log(disk, SETTINGS)
    assert (log.damage, log.first_index) == ((), 1)
    assert await all_values(log) == VALUES[:20]


@runs
async def test_a_batch_with_a_bad_magic_before_an_unfinished_seal_is_not_cut_off_with_it() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, b"kept")
    await append(log, b"rotten")
    segment = log._segments[-1]  # the only one who can seal without rolling
    path = f"{DIRECTORY}/{segment_name(1)}"
    data = disk.read_file(path) + segment.seal().encode()
    disk.write_file(path, data)
    assert "unfinished seal" in open_log(disk.clone()).warnings[0]
    flip(disk, path, data.rindex(b"QVB1"), 1)
    log = open_log(disk)
    assert [damage.first_index for damage in log.damage] == [2]
    assert await all_values(log) == [b"kept"]


@runs
async def test_bytes_of_a_torn_batch_that_look_like_a_mark_prove_nothing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"kept")
    path = f"{DIRECTORY}/{segment_name(1)}"
    size = len(disk.read_file(path))
    impostors = encode_mark(1 << 40) + encode_mark(10) + b"MRKQ" + bytes(12) + b"MRKQ"
    torn = bytes(data_batch([impostors + bytes(900)], index=2, offset=1).data)[:700]
    disk.write_file(path, disk.read_file(path) + torn)
    log = open_log(disk, LogSettings())
    assert log.damage == ()
    assert log.end_index == 2
    assert len(disk.read_file(path)) == size


@runs
async def test_a_batch_inside_a_damaged_batch_is_not_taken_for_an_entry() -> None:
    disk = SimulatedDisk()
    log = open_log(disk, LogSettings())
    await append(log, b"kept")
    inner = bytes(data_batch([b"not an entry"], index=2, offset=1).data)
    await append(log, inner)
    await append(log, b"behind")
    path = f"{DIRECTORY}/{segment_name(1)}"
    outer = disk.read_file(path).index(b"QVB1", SEGMENT_HEADER_BYTES + 4)
    flip(disk, path, outer + 50, 1)
    log = open_log(disk, LogSettings())
    assert [damage.first_index for damage in log.damage] == [2]
    assert await all_values(log) == [b"kept"]


@runs
async def test_damage_is_judged_and_set_aside_in_chunks() -> None:
    """Larger than a chunk in every respect: the bad frame, what lies behind it, and its copy."""
    disk = SimulatedDisk()
    settings = LogSettings(segment_bytes_max=64 << 20)
    log = open_log(disk, settings)
    await append(log, b"kept")
    large = bytes(range(1, 256)) * (3 * CHUNK_BYTES // 255)
    await append(log, large)
    path = f"{DIRECTORY}/{segment_name(1)}"
    whole = disk.read_file(path)
    for position in (len(whole) - 5, len(whole) - CHUNK_BYTES, 300):
        disk.write_file(path, whole)
        flip(disk, path, position, 1)
        assert open_log(disk.clone(), settings).damage, "a whole frame whose bytes have changed"
    destroy(disk, path, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 512, with_byte=0)
    assert open_log(disk.clone(), settings).damage == (), "a frame that never was whole"
    disk.write_file(path, whole + bytes(CHUNK_BYTES * 2))
    flip(disk, path, 300, 1)
    log = open_log(disk, settings, discard_damage=True)
    assert log.damage[0].end_position == len(whole) + CHUNK_BYTES * 2
    aside = disk.read_file(path + ".damaged")
    assert len(aside) > 5 * CHUNK_BYTES
    assert log.end_index == 2


@runs
async def test_a_stale_batch_at_the_tail_is_not_taken_for_the_next_one() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    await append(log, b"a", b"b")
    path = f"{DIRECTORY}/{segment_name(1)}"
    stale = bytes(data_batch([b"stale"], index=9, offset=9).data)
    disk.write_file(path, disk.read_file(path) + stale)
    log = open_log(disk)
    assert log.end_index == 3
    assert log.damage[0].first_index == 3


@runs
async def test_a_verified_opening_reads_sealed_segments_and_finds_them_as_their_footers_say() -> None:
    disk = await filled_disk()
    trusted, verified = open_log(disk.clone(), SETTINGS), open_log(disk.clone(), SETTINGS, verify=True)
    assert (verified.damage, verified.warnings) == ((), ())
    assert verified.status() == trusted.status()
    assert await all_values(verified) == await all_values(trusted)
    path = [path for path in disk.paths() if path.endswith(".log")][1]
    flip(disk, path, 200, 1)
    assert open_log(disk.clone(), SETTINGS).damage == ()
    (damage,) = open_log(disk, SETTINGS, verify=True).damage
    assert path.endswith(damage.name)


@runs
async def test_errors_are_all_of_our_tree() -> None:
    assert issubclass(DamageError, QuiverError)
